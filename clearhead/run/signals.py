"""Signals that stop a run: SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal was closed) and SIGUSR1.

Windows does not have the last two. A signal that is ignored stays ignored: nohup ignores SIGHUP.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from clearhead.parallel.launch import launched, torchrun_died

# Slurm can send SIGUSR1 a given time before the time limit.
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
    if hasattr(signal, name)
)
# The start of the process: until now it has computed all the time, mostly imports.
STARTED = time.monotonic() - time.process_time()


def exit_code(number: int) -> int:
    """Returns 130 for SIGINT, 143 for other signals."""
    return 130 if number == signal.SIGINT else 143


def exit_on_stop_signals() -> None:
    """Makes signals outside of StopSignals end the process immediately, without a traceback."""
    handle(STOP_SIGNALS, lambda number, _: os._exit(exit_code(number)))


def handle(numbers: tuple[int, ...], handler: Callable) -> dict[int, object]:
    """Installs a handler, not for SIGHUP if nohup ignores it. Returns the handlers before."""
    if (hangup := getattr(signal, "SIGHUP", None)) and signal.getsignal(hangup) == signal.SIG_IGN:
        numbers = tuple(number for number in numbers if number != hangup)
    return {number: signal.signal(number, handler) for number in numbers}


class StopRequested(BaseException):
    """A signal stops the run; not an error, so that no handler of errors catches it."""


class StopSignals:
    """Context in which signals stop the run after the current micro-batch or forward pass.

    Before the training loop, a signal ends the process immediately. After the loop, the process
    ends when the run is closed. Further signals have no effect, except that without torchrun a
    second Ctrl-C ends the process at once: this is safe, as unfinished files have temporary names.

    owns_process: false in a notebook or a program of the user. Then only SIGINT is handled, only
    during the training, and it ends `fit` by KeyboardInterrupt.
    """

    def __init__(self, owns_process: bool = True):
        self.owns_process = owns_process
        self.received = 0  # number of the first signal; 0: none
        self.phase = "starting"  # starting | training | finishing
        self._prints = os.environ.get("RANK", "0") == "0"
        self._relayed = launched()  # torchrun relays Ctrl-C of the terminal, so it arrives twice
        self._interrupts = 0
        self._before = {}

    def __enter__(self) -> "StopSignals":
        numbers = STOP_SIGNALS if self.owns_process else (signal.SIGINT,)
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = handle(numbers, self._handle)
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        handlers, self._before = self._before, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not handlers:  # it was not entered
            return
        if self.received and error is None:  # the loop has not seen the signal; a sweep must stop
            raise self.ending()
        if self.received:  # a sweep must stop after any error
            error.stopped = exit_code(self.received)

    def start_training(self) -> None:
        """Makes signals stop the run, see Stop.check."""
        self.phase = "training"
        if not self.owns_process:
            self.__enter__()

    def ending(self) -> BaseException:
        """Returns the exception that ends the process, or the cell that was interrupted."""
        if self.received == signal.SIGINT and not self.owns_process:
            return KeyboardInterrupt()
        return SystemExit(exit_code(self.received))

    def poll(self) -> int:
        """Returns the number of the first signal of this process; 0 without one. The end of
        torchrun counts as SIGTERM: otherwise nothing would stop its processes, and they would keep
        the run directory locked."""
        if torchrun_died() and not self.received:
            self.received = signal.SIGTERM
            self._print("torchrun has ended; stopping")
        return self.received

    def _handle(self, number: int, _) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1 and not self._relayed:
            self._print("stopped immediately; complete checkpoints are intact")
            if not self.owns_process:
                raise KeyboardInterrupt
            os._exit(exit_code(number))
        if self.phase == "starting":
            self._print(f"stopped by {signal.Signals(number).name} before the first step")
            raise SystemExit(exit_code(number))
        if not self.received:
            self.received = number
            once_more = number == signal.SIGINT and not self._relayed
            then = "stopping" if self.phase == "training" else "finishing the run"
            self._print(f"{then}{'; press Ctrl-C again to stop immediately' * once_more}")

    def _print(self, line: str) -> None:
        if self._prints:  # print() is not safe in a signal handler
            with contextlib.suppress(OSError):  # the terminal was closed
                os.write(2, f"{line}\n".encode())
