"""Settings that are null: their values follow from the length of the run."""

from clearhead.config.schema import Config
from clearhead.config.yaml_files import flat
from headlens.config import LensConfig

LOG_EVERY_ON_GPU = 10  # at least: the host waits for the GPU at each row, and then it for the host
AUTOMATIC = (
    *("trainer.warmup_steps", "trainer.eval_every", "trainer.eval_windows", "trainer.log_every"),
    "lens.every",
)


def automatic_values(config: Config, on_gpu: bool) -> dict[str, int]:
    """Returns values for those settings in AUTOMATIC that are null. on_gpu: whether the model is
    trained on a GPU."""
    trainer, given = config.trainer, flat(config.model_dump())
    steps = trainer.schedule_steps or trainer.max_steps
    values = {
        "trainer.warmup_steps": automatic_warmup(steps),
        "trainer.eval_every": min(max(steps // 10, 40), 1000),
        "trainer.log_every": max(steps // 500, LOG_EVERY_ON_GPU if on_gpu else 1),
        "lens.every": LensConfig().interval(steps),
    }
    eval_every = given["trainer.eval_every"]
    eval_every = values["trainer.eval_every"] if eval_every is None else eval_every
    # A validation window takes at most a third of the time of a training window: validation takes
    # less than 1 % of the time, except in very short runs, which validate on at least 8 windows.
    between = trainer.batch_size * (eval_every or steps)
    values["trainer.eval_windows"] = min(max(between * 2 // 100, 8), 400)
    return {key: value for key, value in values.items() if given[key] is None}


def automatic_warmup(max_steps: int) -> int:
    # With 12 warm-up steps, the loss of GPT-2 small rises by four nats (docs/results.md).
    return min(max(max_steps // 10, 24), 2000, max_steps // 5)
