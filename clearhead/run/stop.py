"""Decides when a run stops: after trainer.max_steps, at the time limit, or after a signal.

If steps become so slow that there is no time for the decay of the learning rate at the planned
steps (schedule wsd: warm-up, stable, decay), it plans fewer steps.

The ranks agree with one all-reduce per step between their CPUs. It also sums the targets of a step.
"""

import bisect
from collections.abc import Callable

from clearhead.parallel.strategy import Strategy
from clearhead.run.signals import STOP_SIGNALS, StopSignals
from clearhead.run.time_limit import TimeLimit

# The number of steps is decreased if there is time for less than this fraction of it: the speed
# varies. The decay starts a little early, because steps may become still slower.
TOO_SLOW, CAUTION = 0.95, 0.95


class Stop:
    """The last step of a run, on all ranks.

    The exchange of a step starts before its forward pass. Results are read as late as possible: the
    number of targets before the first backward pass, and only if it varies; all others after the
    step. On a CPU all ranks have exchanged gradients by then, so no rank waits.
    """

    def __init__(
        self,
        strategy: Strategy,
        signals: StopSignals,
        limit: TimeLimit,
        max_steps: int,
        targets_per_step: int | None,
        decay_start: Callable[[int], int] | None = None,
    ):
        """targets_per_step: over all ranks; None if it varies. decay_start: (number of steps) ->
        the last step before the decay of the learning rate; None: never plan fewer steps."""
        self.strategy, self.signals, self.limit = strategy, signals, limit
        self.targets_per_step = targets_per_step
        self.last_step, self.decay_start = max_steps, decay_start

    def start_step(self, step: int, num_targets: int) -> None:
        """Starts the exchange of a step. step: completed steps. num_targets: of this rank."""
        received, is_last = self.signals.poll(), self.limit.is_last_step()
        counts = [number == received for number in STOP_SIGNALS]
        fewer = 0 if is_last or not self.strategy.is_rank_0 else self._fewer_steps(step + 1)
        self._sums = self.strategy.start_all_reduce_sum(num_targets, is_last, fewer, *counts)

    def _fewer_steps(self, following: int) -> int:
        """Returns the number of steps with which the decay of the learning rate starts at the step
        `following`, if it has to start there to be complete in time; otherwise 0."""
        fits = following - 1 + CAUTION * self.limit.steps_left()
        starts, planned = self.decay_start, self.last_step
        if starts is None or fits > TOO_SLOW * planned:
            return 0
        if not starts(int(fits)) <= following < starts(planned):
            return 0
        return bisect.bisect_left(range(planned), following, key=starts)

    def plans_fewer_steps(self) -> bool:
        """Returns whether the number of steps is decreased after this step, on all ranks."""
        fewer = int(self._sums()[2])
        self.last_step = fewer or self.last_step
        return fewer > 0

    def num_targets(self) -> float:
        """Returns the number of targets of this step over all ranks."""
        return self.targets_per_step or self._sums()[0]

    def is_out_of_time(self, step: int) -> bool:
        """Returns whether this is the last step for which any rank has time; then it is last_step.
        Stored settings keep the planned number of steps: a resumed run continues to it."""
        if step < self.last_step and self._sums()[1] > 0:
            self.last_step = step
            return True
        return False

    def is_stopped(self) -> bool:
        """Returns whether a signal stops all ranks after this step; signals.received is then the
        signal. With several ranks, a signal that arrives after the start of a step stops them after
        the next."""
        if self.strategy.world_size == 1:
            return self.signals.poll() > 0
        _, _, _, *counts = self._sums()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signals.received = number
                return True
        return False
