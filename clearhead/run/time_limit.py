"""trainer.max_minutes: how many steps fit into a time limit, and the end of a run in time.

The limit holds for everything from the start of the process to its end. The number of steps is
decided once, before the first step, so the run is the same as one with trainer.max_steps=N. If it
becomes slower than expected, the learning rate starts to decay while there is time for the complete
decay (stop.py). The run is then the same as one with that smaller N from its start.
"""

import array
import collections
import math
import statistics
import time
from collections.abc import Iterator

import torch

from clearhead.compute.optimizers import NonFiniteCheck
from clearhead.config.application import is_single_run
from clearhead.config.automatic import automatic_values
from clearhead.config.schema import Config
from clearhead.errors import refuse
from clearhead.parallel.memory import meta_model
from clearhead.parallel.strategy import Strategy
from clearhead.run.signals import STARTED

MEASURED_FRACTION = 0.03  # of the limit in which steps are measured, at most MEASURED_SECONDS
MEASURED_SECONDS = 30.0
# For validation, samples, attention snapshots and logging: fraction of training, and seconds (about
# 500 rows, 20 snapshots and 10 samples of a small model).
EVALUATION_FRACTION, EVALUATION_SECONDS = 0.04, 6.0
ABLATION_FRACTION = 0.01  # of the limit
FINAL_VALIDATION_FRACTION = 0.02  # of the limit, see evaluation.py
BYTES_PER_SECOND = 3e8  # at which a checkpoint is written, with its checksums
EXIT_SECONDS = 2.0  # for the report and the end of the process
WANDB_EXIT_SECONDS = 5.0  # more for W&B
SLOWDOWN = 4.0  # if steps have become slower, the end of the run takes at most this much longer


class HostClock:
    """The time at which a CPU reaches a point of its work."""

    def mark(self) -> float:
        return time.monotonic()

    def time_of(self, mark: float) -> float | None:
        return mark


class CudaClock:
    """The time at which a GPU reaches a point of its work, which is later than the launch. Nothing
    waits for the GPU."""

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._last is None:  # before the first step, the GPU has nothing to do
            self._last = event, time.monotonic()
        return event

    def time_of(self, mark: torch.cuda.Event) -> float | None:
        """Returns the time of a mark in seconds, None if the GPU has not reached it. Call it in the
        order of the marks."""
        if not mark.query():
            return None
        last, seconds = self._last
        self._last = mark, seconds + last.elapsed_time(mark) / 1000
        return self._last[1]


class TimeLimit:
    """The time limit of one start of a run. It begins with the process if that trains one run,
    otherwise at `started` (time.monotonic())."""

    def __init__(self, config: Config, device: torch.device, started: float):
        self.started = STARTED if is_single_run() else started
        limit = 60 * (config.trainer.max_minutes or math.inf)
        # Seconds for everything after the last validation, whose duration is measured.
        checkpoint_bytes = 12 * meta_model(config.model).num_parameters()
        self.end_of_run = EXIT_SECONDS + checkpoint_bytes / BYTES_PER_SECOND
        self.end_of_run += WANDB_EXIT_SECONDS * (config.wandb.wanted() != "disabled")
        fraction = FINAL_VALIDATION_FRACTION
        if config.lens.every != 0 and config.lens.ablation != "off":
            fraction += ABLATION_FRACTION
        self.end_of_run += fraction * min(limit, 1e9)
        self.end = self.started + limit - self.end_of_run  # of the training
        is_limited = config.trainer.max_minutes is not None
        self._clock = CudaClock() if is_limited and device.type == "cuda" else HostClock()
        # Steps that the device has not started: (mark at the start, seconds of evaluation before).
        self._launched: collections.deque[tuple] = collections.deque()
        self._steps: collections.deque[float] = collections.deque(maxlen=10)  # seconds
        self._starts = array.array("d")  # of all steps that the device has started, in seconds
        self._fastest = math.inf
        self._evaluation = self._longest_evaluation = 0.0
        self.start()

    def start(self) -> None:
        """Marks the start of training, before the validation of step 0."""
        self._previous = time.monotonic()

    def exclude(self, seconds: float) -> None:
        """Excludes the time of a validation, sample, attention snapshot or of logging from the
        duration of a step."""
        self._evaluation += seconds

    def is_last_step(self) -> bool:
        """Returns whether there is no time for another step after the step that starts now. Called
        at the start of each step."""
        self._launched.append((self._clock.mark(), self._evaluation))
        self._longest_evaluation = max(self._longest_evaluation, self._evaluation)
        self._evaluation = 0.0
        while self._launched and (start := self._clock.time_of(self._launched[0][0])) is not None:
            self._starts.append(start)
            self._steps.append(start - self._previous - self._launched.popleft()[1])
            self._previous = start
        step = statistics.median(self._steps) if self._steps else 0.0
        now = time.monotonic() + len(self._launched) * step  # when the device starts this step
        if len(self._steps) == self._steps.maxlen:  # before the first step, there was none
            self._fastest = min(self._fastest, step)
        # If steps have become slower, the end of the run has too.
        slower = (min(max(1.0, step / self._fastest), SLOWDOWN) - 1) * self.end_of_run
        # There may be an evaluation after this step and one after the next.
        self._left = self.end - now - 2 * self._longest_evaluation - slower  # seconds for steps
        return self._left < 2 * step

    def steps_left(self) -> float:
        """Returns how many steps there is time for from the step that starts now on, at the mean
        speed of the last third of the steps. Infinity before the eleventh step."""
        recent = max(10, len(self._starts) // 3)
        if len(self._starts) <= recent:
            return math.inf
        return self._left * recent / (self._starts[-1] - self._starts[-1 - recent])


def with_max_steps(
    config: Config, strategy: Strategy, end: float, per_step: float, notes: list[str]
) -> Config:
    """Returns the config with trainer.max_steps, the number of steps that fit if it is not smaller
    already, and with the automatic settings that depend on it. Appends a note for the user.

    end: the time.monotonic() at which training ends. per_step: seconds, on this rank. Raises
    ConfigError if there is no time for a step.
    """
    trainer, seconds = config.trainer, end - time.monotonic()
    seconds -= EVALUATION_FRACTION * seconds + min(EVALUATION_SECONDS, 0.1 * seconds)
    per_step, steps = strategy.broadcast([per_step, int(seconds / per_step)])
    if steps < 1:
        reason = f"is too short: start, one step ({per_step:.1f} s) and end of the run take longer"
        hint = "use more minutes or a smaller model"
        refuse([("trainer.max_minutes", trainer.max_minutes, reason, hint)])
    steps = min(trainer.max_steps, steps)
    speed = f"{steps:,} steps, a step takes {1000 * per_step:,.1f} ms"
    notes.append(f"trainer.max_minutes={trainer.max_minutes}: {speed}")
    # For compile=auto, the number of steps has to be known before the model is compiled.
    compiled = False if trainer.compile == "auto" else trainer.compile
    values = {"trainer.max_steps": steps, "trainer.compile": compiled}
    on_gpu = strategy.device.type != "cpu"
    config = config.with_values(values)
    return config.with_values(automatic_values(config, on_gpu))


def measure_steps(
    config: Config,
    strategy: Strategy,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list],
) -> float:
    """Returns the median duration of training steps, which are repeated for 3 % of the limit, at
    most 30 s. The first step, which may compile the model, does not count.

    The learning rate is 0, and optimizer state and loss scale are restored, so these steps do not
    change the run. model, batches: as for training.
    """
    nonfinite, scale = NonFiniteCheck(1, strategy.device), strategy.scaler.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seconds = min(MEASURED_FRACTION * 60 * config.trainer.max_minutes, MEASURED_SECONDS)
    durations, end = [], time.monotonic() + seconds
    while len(durations) < 2 or strategy.broadcast(time.monotonic() < end):
        started, micro_batches = time.monotonic(), next(batches)
        for number, (tensors, _) in enumerate(micro_batches, start=1):
            input_ids, target_ids = strategy.to_device(*tensors)  # (B, T)
            with strategy.no_sync(number < len(micro_batches)):
                with strategy.autocast():
                    _, loss = model(input_ids, target_ids)
                strategy.backward(loss / len(micro_batches))
        strategy.update(model, optimizer, config.trainer.grad_clip, nonfinite)
        strategy.synchronize()
        durations.append(time.monotonic() - started)
    optimizer.state.clear()
    strategy.scaler.load_state_dict(scale)
    return statistics.median(durations[1:])
