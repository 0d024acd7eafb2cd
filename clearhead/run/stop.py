"""How far a run is, and when it stops: after all steps, at its time limit, or after a signal.

The time limit (trainer.max_minutes) holds for everything from the start of the process to its end.
Nothing is measured or planned before the first step: the learning rate and the automatic intervals
follow from the fraction of the time that is used. A checkpoint stores it, so that a resumed run
continues with the time that is left.
"""

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from clearhead.checkpoint.format import State
from clearhead.config.application import is_single_run
from clearhead.config.automatic import EXPECTED_STEPS
from clearhead.config.schema import Config, TrainerConfig
from clearhead.parallel.memory import meta_model
from clearhead.parallel.strategy import Strategy
from clearhead.run.signals import STARTED, StopRequested, StopSignals

ABLATION_FRACTION = 0.01  # of the limit
FINAL_VALIDATION_FRACTION = 0.02  # of the limit, see evaluation.py
BYTES_PER_SECOND = 3e8  # at which a checkpoint is written, with its checksums
EXIT_SECONDS = 2.0  # for the report and the end of the process
WANDB_EXIT_SECONDS = 5.0  # more for W&B
FEW_STEPS = 100  # of a new model: GPT-2 small has hardly learned a word (docs/results.md)
MEASURED = 10  # steps whose mean duration is used


class Stop:
    """The used time and the last step of a run, on all ranks.

    last_step: trainer.max_steps, or when the run ends earlier, the step at which it does. With a
    time limit, it is at most the number of steps that the time so far allows, rounded up to a power
    of two, so that the intervals that follow from it seldom change.

    The ranks agree by all-reduces between their CPUs. `check` asks for signals before each
    micro-batch and each forward pass of an evaluation. The number of targets and the used time are
    exchanged at the start of a step, if they are needed.
    """

    def __init__(
        self,
        strategy: Strategy,
        signals: StopSignals,
        limit: "TimeLimit",
        state: State,
        trainer: TrainerConfig,
        targets_per_step: int | None,
        intervals: Callable[[int], dict[str, int]],
    ):
        """targets_per_step: over all ranks; None if it varies. intervals: (number of steps of the
        run) -> values of the settings of intervals that are null."""
        self.strategy, self.signals, self.limit = strategy, signals, limit
        self.intervals = intervals
        self.targets_per_step, self.max_steps = targets_per_step, trainer.max_steps
        self._sums = [0.0, limit.used]
        self._is_alone = False  # whether rank 0 works while the others wait for it
        self.last_step = self._expected_steps(state.step)
        self.has_said = state.step > 0 or not limit.exists
        self.few_steps = FEW_STEPS if trainer.init_from is None else 0
        if state.has_ended(trainer):
            self.last_step = state.step

    def start_step(self, num_targets: int) -> None:
        """Exchanges what a step needs. num_targets: of this rank."""
        is_timed = self.limit.exists and self.strategy.is_rank_0
        used = self.limit.start_step() if is_timed else 0.0
        if self.limit.exists or self.targets_per_step is None:
            self._sums = self.strategy.all_reduce_sum(num_targets, used)

    def num_targets(self) -> float:
        """Returns the number of targets of this step over all ranks."""
        return self.targets_per_step or self._sums[0]

    def used_time(self) -> float:
        """Returns the fraction of the time limit that was used when this step started, according to
        rank 0; 1 in the last step for which there is time; 0 without a time limit."""
        return self._sums[1] if self.limit.exists else 0.0

    def progress(self, step: int) -> float:
        """Returns the completed fraction of the run: of its steps or of its time, whichever is
        larger."""
        return max(self.used_time(), step / self.max_steps if self.max_steps else 0.0)

    def is_out_of_time(self, step: int) -> bool:
        """Returns whether the run ends after this step because of its time limit; then it is
        last_step."""
        if self.used_time() >= 1 and step < self.last_step:
            self.last_step = step
            return True
        if step < self.last_step:
            self.last_step = self._expected_steps(step)
        return False

    def expectation(self, step: int) -> str:
        """Returns a line about the number of steps for which there is time, once in a new run:
        after a minute or, if that is less, a tenth of the limit; "" before and afterwards."""
        used, seconds = self.used_time(), self.limit.seconds
        if self.has_said or used < min(60 / seconds, 0.1):
            return ""
        self.has_said = True
        expected = (step - 1) / used
        if expected >= (self.max_steps or math.inf):
            return ""
        hint = ": too few to learn from; use a longer limit or a smaller model"
        text = f"steps that fit into {seconds / 60:g} min: about {expected:,.0f}"
        return text + hint * (expected < self.few_steps)

    def _expected_steps(self, step: int) -> int:
        """Returns max_steps or, if the time so far allows fewer steps, a power of two above
        step + 1, so that the next step is not the last one."""
        if not self.limit.exists:
            return self.max_steps
        used = self.used_time()
        expected = step / used if step and used else EXPECTED_STEPS - 1
        in_time = 1 << int(max(expected, step + 1)).bit_length()
        return min(in_time, self.max_steps or in_time)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stops the run."""
        return self.signals.received > 0

    def check(self) -> None:
        """Raises StopRequested on all ranks if one of them has received a signal, which is then
        signals.received of all."""
        received = self.signals.poll()
        if not self._is_alone:
            received = self.strategy.all_reduce_max(received)
        if received:
            self.signals.received = received
            raise StopRequested

    @contextlib.contextmanager
    def checked_before_each_pass(self, model: torch.nn.Module) -> Iterator[None]:
        """Returns a context in which each forward pass of the model begins with `check`: all ranks
        must run the model the same number of times."""
        hook = model.register_forward_pre_hook(lambda *_: self.check(), prepend=True)
        with hook:  # removes it at the end
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context for work of rank 0 for which the others wait: signals of other ranks
        are not noticed, and StopRequested is raised on rank 0 only."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False


class TimeLimit:
    """The time limit of a run. It begins with the process if that trains one run, otherwise at
    `started` (time.monotonic()).

    used: the fraction of the limit that earlier starts of the run have used. Without a limit, the
    used fraction is always 0. is_compiled: the first step compiles the model.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        started: float,
        used: float = 0.0,
        is_compiled: bool = False,
    ):
        self.started = STARTED if is_single_run() else started
        self.seconds = 60 * (config.trainer.max_minutes or math.inf)
        self.device, self.used, self._omits_first = device, used, is_compiled
        # Seconds for everything after the last validation, whose duration is measured.
        checkpoint_bytes = 12 * meta_model(config.model).num_parameters()
        self.end_of_run = EXIT_SECONDS + checkpoint_bytes / BYTES_PER_SECOND
        self.end_of_run += WANDB_EXIT_SECONDS * (config.wandb.mode != "disabled")
        fraction = FINAL_VALIDATION_FRACTION
        if config.lens.every != 0 and config.lens.ablation != "off":
            fraction += ABLATION_FRACTION
        self.end_of_run += fraction * min(self.seconds, 1e9)
        self.end = self.started + min(1.0 - used, 1.0) * self.seconds - self.end_of_run
        self._first: tuple[float, float] | None = None  # time and used fraction at the first step
        self._last = self._evaluation = self._longest_evaluation = 0.0
        # Seconds of steps, without evaluations. The first one may be slow: it counts until there is
        # another one, but not if it compiles the model.
        self._durations: collections.deque[float] = collections.deque(maxlen=MEASURED + 1)
        self._step, self._is_near_end = 0.0, False  # seconds of a step

    @property
    def exists(self) -> bool:
        return self.seconds < math.inf

    def has_time(self) -> bool:
        """Returns whether there is time for the first step."""
        return time.monotonic() < self.end

    def exclude(self, seconds: float) -> None:
        """Excludes the time of a validation, sample, attention snapshot or of logging from the
        duration of a step."""
        self._evaluation += seconds

    def start_step(self) -> float:
        """Returns the fraction of the limit that is used when a step starts. It is 1.0 if there is
        no time for another step after this one, and never smaller than before."""
        if self._is_near_end:
            torch.get_device_module(self.device).synchronize()  # it may be several steps behind
        now = time.monotonic()
        if self._first is None:  # the validation of step 0 is before it
            self._first = now, self.used
        else:
            self._durations.append(now - self._last - self._evaluation)
        self._longest_evaluation = max(self._longest_evaluation, self._evaluation)
        self._last, self._evaluation = now, 0.0
        first, *others = self._durations or [0.0]
        if others or not self._omits_first:
            self._step = statistics.fmean(others or [first])
        # There may be an evaluation after this step and one after the next.
        end = self.end - 2 * self._longest_evaluation
        left = end - now
        if self.device.type != "cpu" and not self._is_near_end and left < 2 * MEASURED * self._step:
            self._is_near_end = True
            self._durations.clear()
            self._omits_first = True  # the first wait is not the duration of a step
        started, before = self._first
        done = (now - started) / (end - started) if left > 2 * self._step else 1.0
        self.used = min(1.0, max(self.used, before + (1 - before) * done))
        return self.used
