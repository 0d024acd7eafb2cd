"""Settings that are null: their values follow from the length of the run."""

from clearhead.config.schema import Config, TrainerConfig
from clearhead.config.yaml_files import flat
from headlens import LensConfig

LOG_EVERY_ON_GPU = 10  # at least: the host waits for the GPU at each row, and then it for the host
EXPECTED_STEPS = 4096  # at most, of a run with trainer.max_minutes, before its first step
AUTOMATIC = (
    *("trainer.warmup_steps", "trainer.eval_every", "trainer.eval_windows", "trainer.log_every"),
    "lens.every",
)


def expected_steps(trainer: TrainerConfig) -> int:
    """Returns the number of steps for what is decided before the first step."""
    if not trainer.max_minutes:
        return trainer.max_steps
    return min(trainer.max_steps or EXPECTED_STEPS, EXPECTED_STEPS)


def automatic_values(config: Config, on_gpu: bool, epoch: int | None) -> dict[str, int]:
    """Returns values for those settings in AUTOMATIC that are null. With trainer.max_minutes, the
    steps between validations and the like follow from the progress of the run, so they stay null.

    on_gpu: whether the model is trained on a GPU. epoch: the largest number of steps between
    validations, unless it is below 20; None: no limit.
    """
    trainer, given = config.trainer, flat(config.model_dump())
    steps = expected_steps(trainer)
    values: dict[str, int] = {}
    if not trainer.max_minutes:
        values = automatic_intervals(steps, on_gpu, epoch)
        values["trainer.warmup_steps"] = automatic_warmup(steps)
    # A validation window takes at most a third of the time of a training window: validation takes
    # less than 1 % of the time, except in very short runs, which validate on at least 8 windows.
    every = trainer.eval_every
    between = (automatic_eval_every(steps) if every is None else every) or steps
    values["trainer.eval_windows"] = min(max(between * trainer.batch_size * 2 // 100, 8), 400)
    return {key: value for key, value in values.items() if given[key] is None}


def automatic_intervals(steps: int, on_gpu: bool, epoch: int | None) -> dict[str, int]:
    """Returns the steps between validations, between rows of metrics.jsonl and between attention
    snapshots, in a run of this number of steps. on_gpu, epoch: as above."""
    every = automatic_eval_every(steps)
    return {
        "trainer.eval_every": every if epoch is None else min(every, max(epoch, 20)),
        "trainer.log_every": max(steps // 500, LOG_EVERY_ON_GPU if on_gpu else 1),
        "lens.every": LensConfig().interval(steps),
    }


def automatic_eval_every(steps: int) -> int:
    return min(max(steps // 10, 40), 1000)


def automatic_warmup(steps: int) -> int:
    # With 12 warm-up steps, the loss of GPT-2 small rises by four nats (docs/results.md).
    return min(max(steps // 10, 24), 2000, steps // 5)
