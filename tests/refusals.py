"""What every refusal of bad data must look like, and files that must not be read to their end."""

import contextlib
import os
import signal
from pathlib import Path

from tokens import DataError


def check_refusal(error: DataError | str, key: str, cause: str, fix: str) -> None:
    """One line `key=value: cause; fix`, no refusal inside another; of an error its exit code, of
    what a command said on stderr that it is all. `key` is what stands before the cause, `cause`
    and `fix` some of what is told."""
    if isinstance(error, DataError):
        assert error.exit_code == 3
        message = str(error)
    else:
        assert error.endswith("\n")
        message = error[:-1]
    assert "\n" not in message
    assert message.startswith(f"{key}: ")
    told_cause, _, told_fix = message.removeprefix(f"{key}: ").partition("; ")
    assert cause in told_cause
    assert f"{key.partition('=')[0]}=" not in told_cause
    assert fix in told_fix


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _link_to_fifo(path: Path) -> None:
    _fifo(path.with_name("fifo"))
    path.unlink(missing_ok=True)
    path.symlink_to("fifo")


def _link_to_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


# Each replaces a file by something that is no regular file and whose reading would not end.
SPECIAL_FILES = {"FIFO": _fifo, "link to a FIFO": _link_to_fifo, "device": _link_to_device}


@contextlib.contextmanager
def not_waiting(seconds: int = 5):
    """What happens in here fails instead of waiting for a FIFO's other end."""

    def too_long(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
