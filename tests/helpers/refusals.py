"""Checks of errors by type, key, value and exit code; special files that cannot be read."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clearhead.errors import ClearheadError
from helpers import TIMEOUT

ANY = object()  # matches any value


@contextlib.contextmanager
def refused(
    kind: type[ClearheadError], key: str, value: object = ANY, exit_code: int | None = None
):
    """Expects an error of this type with one problem: this key and value, a reason, a hint, and a
    message of one line. Yields pytest's ExceptionInfo."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    (problem,) = error.problems
    assert problem.key == key
    assert value is ANY or str(problem.value) == str(value)
    assert problem.reason
    assert problem.hint
    assert len(str(error).splitlines()) == 1
    assert exit_code in (None, error.exit_code)


def printed_keys(stderr: str) -> list[str]:
    """Returns the keys of the problems that a command printed, one per line."""
    assert "Traceback" not in stderr
    return [re.match(r"[^=:]*", line)[0] for line in stderr.splitlines()]


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _link_to_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


# Each function replaces a file by a special file; reading it never ends.
SPECIAL_FILES = {"FIFO": _fifo, "device": _link_to_device}


@contextlib.contextmanager
def time_limit(seconds: int = TIMEOUT) -> Iterator[None]:
    """Fails if the code inside takes longer, for example because it waits for a FIFO."""

    def too_long(*_):
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
