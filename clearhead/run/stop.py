"""Decides when a run stops: after trainer.max_steps, at the time limit, or after a signal.

The ranks agree with one all-reduce per step between their CPUs. It also sums the targets of a step.
"""

from clearhead.distributed.strategy import Strategy
from clearhead.run.signals import STOP_SIGNALS, StopSignals
from clearhead.run.time_limit import TimeLimit


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
    ):
        """targets_per_step: over all ranks; None if it varies."""
        self.strategy, self.signals, self.limit = strategy, signals, limit
        self.targets_per_step = targets_per_step
        self.last_step = max_steps

    def start_step(self, num_targets: int) -> None:
        """Starts the exchange of a step. num_targets: of this rank."""
        received, is_last = self.signals.poll(), self.limit.is_last_step()
        counts = [number == received for number in STOP_SIGNALS]
        self._sums = self.strategy.start_all_reduce_sum(num_targets, is_last, *counts)

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
        _, _, *counts = self._sums()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signals.received = number
                return True
        return False
