"""Signals that ask a run to stop: SIGTERM, SIGUSR1 and Ctrl-C."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from training.distributed.launch import launched

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy

# What schedulers and people send. Slurm can be asked for SIGUSR1 some time before the end.
ASKING = [n for n in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, n)]  # Windows lacks one


PARENT = os.getppid()  # when the process began


def exit_code(number: int) -> int:
    """130 after Ctrl-C, 143 after any other."""
    return 130 if number == signal.SIGINT else 143


def end_quietly() -> None:
    """Signals that come before and after StopSignals end the process with the exit code of a stop,
    and without a traceback: nothing is under way then."""
    for name in ASKING:
        signal.signal(getattr(signal, name), lambda number, _: os._exit(exit_code(number)))


@contextlib.contextmanager
def handled(handler: Callable) -> Iterator[None]:
    """While this is entered, such a signal calls the handler."""
    before = {}
    for name in ASKING:
        number = getattr(signal, name)
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def raise_exit(number: int, _) -> None:
    """Ends what is under way as an exit would, with the exit code of a stop."""
    raise SystemExit(exit_code(number))


def take_no_notice(number: int, _) -> None:
    """For the last words of what is ending anyway, as a launcher hands a terminal's Ctrl-C on."""


class StopSignals:
    """While this is entered, such a signal is a wish that the loop asks for after each step.

    Before there is a loop it ends the process as it would by itself, with the exit code of a stop;
    after the loop, once the run is closed. Repeated ones change nothing, except for a second
    Ctrl-C, which leaves at once: what is being written stays unfinished under another name, and
    what is saved is not touched.
    """

    def __init__(self, is_main: bool, relayed: bool):
        """is_main: whether to say what is going to happen. relayed: whether the process was started
        by a launcher that hands a terminal's Ctrl-C on, so that it comes twice."""
        self.is_main = is_main
        self.relayed = relayed
        self.received = 0  # the first one's number; 0: none came
        self._interrupts = 0
        self.phase = "starting"  # | training: there is a loop that asks | finishing
        self._before = {}

    def __enter__(self) -> "StopSignals":
        for name in ASKING:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received and error is None:  # it came too late for the loop, but not for a sweep
            raise SystemExit(exit_code(self.received))
        if self.received:  # a sweep ends then, whatever else has gone wrong
            error.stopped = exit_code(self.received)

    @classmethod
    def of_this_process(cls) -> "StopSignals":
        """For a command: rank 0 speaks, and torchrun relays a terminal's Ctrl-C."""
        return cls(os.environ.get("RANK", "0") == "0", relayed=launched())

    @property
    def exit_code(self) -> int:
        """The exit code of the signal that was received."""
        return exit_code(self.received)

    def received_on_any_rank(self, strategy: "Strategy") -> bool:
        """Whether any rank was told to stop: all of them stop after the same step."""
        self.check_parent()
        number = strategy.all_reduce_max(self.received)
        if number:  # never back to 0: a signal may have come while the ranks agreed
            self.received = number
        return number > 0

    def check_parent(self) -> None:
        """Asks for a stop, as SIGTERM does, where torchrun has started this process and is gone:
        nobody else would stop it, and a restart would find its directory locked."""
        orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT
        if orphaned and not self.received:
            self.received = signal.SIGTERM
            if self.is_main:
                print("torchrun has ended; stopping after this step", file=sys.stderr)

    def _handle(self, number: int, _) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1 and not self.relayed:
            self._say("stopped at once; what was saved before is intact")
            os._exit(exit_code(number))
        if self.phase == "starting":
            self._say(f"stopped by {signal.Signals(number).name} before the first step")
            raise SystemExit(exit_code(number))
        if not self.received:
            self.received = number
            once_more = number == signal.SIGINT and not self.relayed
            then = "stopping after this step" if self.phase == "training" else "finishing"
            self._say(f"{then}{'; once more to stop at once' * once_more}")

    def _say(self, words: str) -> None:
        if self.is_main:
            # Not by print: this may come while the main program is printing.
            os.write(2, f"{words}\n".encode())
