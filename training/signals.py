"""Signals that ask a run to stop: SIGTERM, SIGUSR1 and Ctrl-C."""

import os
import signal
from typing import TYPE_CHECKING

from training.distributed.launch import launched

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy

# What schedulers and people send. Slurm can be asked for SIGUSR1 some time before the end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PARENT_PID = os.getppid()  # when the process began


def exit_code(number: int) -> int:
    """130 after Ctrl-C, 143 after any other."""
    return 130 if number == signal.SIGINT else 143


def exit_on_stop_signals() -> None:
    """Signals that come before and after StopSignals end the process at once, with the exit code of
    a stop and without a traceback."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: os._exit(exit_code(number)))


class StopSignals:
    """While this is entered, such a signal is a request that the loop checks after each step.

    Before the loop it ends the process at once, after the loop once the run is closed, both with
    the exit code of a stop. Repeated signals change nothing, except for a second Ctrl-C, which ends
    the process at once: what is saved stays, what is being written has a temporary name.
    """

    def __init__(self):
        self.received = 0  # number of the first signal; 0: none
        self.phase = "starting"  # | training: the loop checks | finishing
        self._prints = os.environ.get("RANK", "0") == "0"
        self._relayed = launched()  # torchrun relays a terminal's Ctrl-C, so that it comes twice
        self._interrupts = 0
        self._before = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and error is None:  # the loop has not seen it; a sweep has to stop
            raise SystemExit(self.exit_code)
        if self.received:  # a sweep stops, whatever the error is
            error.stopped = self.exit_code

    @property
    def exit_code(self) -> int:
        """The exit code of the signal that was received."""
        return exit_code(self.received)

    def received_on_any_rank(self, strategy: "Strategy") -> bool:
        """Whether any rank was asked to stop: all of them stop after the same step.

        Also where torchrun has started this process and has died: nothing else would stop it, and a
        restart would find its directory locked.
        """
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT_PID
        if orphaned and not self.received:
            self.received = signal.SIGTERM
            self._print("torchrun has ended; stopping after this step")
        number = strategy.all_reduce_max(self.received)
        if number:  # never back to 0: a signal may have come during the collective
            self.received = number
        return number > 0

    def _handle(self, number: int, _) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1 and not self._relayed:
            self._print("stopped immediately; complete checkpoints are intact")
            os._exit(exit_code(number))
        if self.phase == "starting":
            self._print(f"stopped by {signal.Signals(number).name} before the first step")
            raise SystemExit(exit_code(number))
        if not self.received:
            self.received = number
            once_more = number == signal.SIGINT and not self._relayed
            then = "stopping after this step" if self.phase == "training" else "finishing the run"
            self._print(f"{then}{'; press Ctrl-C again to stop immediately' * once_more}")

    def _print(self, line: str) -> None:
        if self._prints:  # not by print(), which the signal may have interrupted
            os.write(2, f"{line}\n".encode())
