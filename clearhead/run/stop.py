"""How far a run is, and when it stops: after all steps, at the time limit, or after a signal.

The ranks agree with one all-reduce per step between their CPUs. It also sums the targets of a step.
"""

from collections.abc import Callable

from clearhead.checkpoint.format import State
from clearhead.config.automatic import EXPECTED_STEPS
from clearhead.config.schema import TrainerConfig
from clearhead.parallel.strategy import Strategy
from clearhead.run.signals import STOP_SIGNALS, StopSignals
from clearhead.run.time_limit import TimeLimit


class Stop:
    """The used time and the last step of a run, on all ranks.

    last_step: trainer.max_steps, or when the run ends earlier, the step at which it does. With a
    time limit, it is at most the number of steps that the time so far allows, rounded up to a power
    of two, so that the intervals that follow from it seldom change.

    The exchange of a step starts before its forward pass. Results are read as late as possible: the
    number of targets before the first backward pass, and only if it varies; the used time before
    the update, and only with a time limit; all others after the step. On a CPU all ranks have
    exchanged gradients by then, so no rank waits.
    """

    def __init__(
        self,
        strategy: Strategy,
        signals: StopSignals,
        limit: TimeLimit,
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
        self._sums = lambda: [0.0, limit.used]
        self.last_step = self._expected_steps(state.step)
        if state.has_ended(trainer):
            self.last_step = state.step

    def start_step(self, step: int, num_targets: int) -> None:
        """Starts the exchange of a step. step: completed steps. num_targets: of this rank."""
        is_timed = self.limit.exists and self.strategy.is_rank_0
        used = self.limit.start_step() if is_timed else 0.0
        received = self.signals.poll()
        counts = [number == received for number in STOP_SIGNALS]
        self._sums = self.strategy.start_all_reduce_sum(num_targets, used, *counts)

    def num_targets(self) -> float:
        """Returns the number of targets of this step over all ranks."""
        return self.targets_per_step or self._sums()[0]

    def used_time(self) -> float:
        """Returns the fraction of the time limit that was used when this step started, according to
        rank 0; 1 in the last step for which there is time; 0 without a time limit."""
        return self._sums()[1] if self.limit.exists else 0.0

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

    def _expected_steps(self, step: int) -> int:
        """Returns max_steps or, if the time so far allows fewer steps, a power of two above
        step + 1, so that the next step is not the last one."""
        if not self.limit.exists:
            return self.max_steps
        used = self.used_time()
        expected = step / used if step and used else EXPECTED_STEPS - 1
        in_time = 1 << int(max(expected, step + 1)).bit_length()
        return min(in_time, self.max_steps or in_time)

    def is_stopped(self) -> bool:
        """Returns whether a signal stops all ranks after this step; signals.received is then the
        signal. With several ranks, a signal that arrives after the start of a step stops them after
        the next."""
        if self.strategy.world_size == 1:
            return self.signals.poll() > 0
        _, _, *counts = self._sums()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signals.received = number
                return True
        return False
