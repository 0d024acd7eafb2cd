"""One all-reduce per step between the CPUs of all ranks: number of targets, end of the time limit,
stop signals."""

from dataclasses import dataclass

from clearhead.distributed.strategy import Strategy
from clearhead.run.signals import STOP_SIGNALS, StopSignals
from clearhead.run.time_limit import TimeLimit
from clearhead.tokens.windows import WindowDataset


@dataclass
class Exchange:
    """Sums the number of targets over all ranks and tells all ranks when to stop.

    The exchange of a step starts before its forward pass. Results are read as late as possible: the
    number of targets before the first backward pass, and only if it varies; all others after the
    step. On a CPU all ranks have exchanged gradients by then, so no rank waits.
    """

    strategy: Strategy
    signals: StopSignals
    limit: TimeLimit
    dataset: WindowDataset
    batch_size: int  # windows per step over all ranks

    def start(self, num_targets: int) -> None:
        """Starts the exchange of a step. num_targets: of this rank."""
        received, is_last = self.signals.poll(), self.limit.is_last_step()
        counts = [number == received for number in STOP_SIGNALS]
        self._sums = self.strategy.start_all_reduce_sum(num_targets, is_last, *counts)

    def num_targets(self) -> float:
        """Returns the number of targets of this step over all ranks."""
        return self.dataset.num_targets(self.batch_size) or self._sums()[0]

    def is_out_of_time(self) -> bool:
        """Returns whether this is the last step for which any rank has time."""
        return self._sums()[1] > 0

    def is_stopped(self) -> bool:
        """Returns whether all ranks stop after this step; signals.received is then the signal. With
        several ranks, a signal that arrives after the start of a step stops them after the next."""
        if self.strategy.world_size == 1:
            return self.signals.poll() > 0
        _, _, *counts = self._sums()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signals.received = number
                return True
        return False
