"""The exchange between the CPUs of all ranks in each step: number of targets and stop signal."""

from training.distributed.strategy import Strategy
from training.signals import STOP_SIGNALS, StopSignals


class Exchange:
    """Sums the number of targets over all ranks and tells all ranks about a stop signal.

    The exchange of a step starts before its forward pass. Results are read as late as possible: the
    number of targets before the first backward pass, and only if it varies; the signal after the
    step. By then all ranks have exchanged gradients, so no rank waits for the signal.

    num_targets: targets of each step over all ranks; None if the number varies.
    """

    def __init__(self, strategy: Strategy, signals: StopSignals, num_targets: int | None):
        self.strategy, self.signals, self._constant = strategy, signals, num_targets

    def start(self, num_targets: int) -> None:
        """Starts the exchange of a step. num_targets: of this rank."""
        received = self.signals.poll()
        counts = [number == received for number in STOP_SIGNALS]
        self._sums = self.strategy.start_all_reduce_sum(num_targets, *counts)

    def num_targets(self) -> float:
        """Returns the number of targets of this step over all ranks."""
        return self._constant or self._sums()[0]

    def is_stopped(self) -> bool:
        """Returns whether all ranks stop after this step. With several ranks, a signal that arrives
        after the start of a step stops them after the next step."""
        if self.strategy.world_size == 1:
            return self.signals.poll() > 0
        _, *counts = self._sums()
        for number, count in zip(STOP_SIGNALS, counts, strict=True):
            if count:
                self.signals.received = number
                return True
        return False
