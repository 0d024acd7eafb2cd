"""Output whose errors do not end the training: the terminal was closed, the reader of a pipe has
ended, or the disk of a redirected output is full."""

import contextlib
import os
import sys
from typing import IO


class NeverFailing:
    """A text stream that discards what it cannot write."""

    def __init__(self, stream: IO[str] | None):
        """stream: None if the shell has closed it."""
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def never_fail() -> None:
    """Replaces stdout and stderr for the rest of the process."""
    sys.stdout, sys.stderr = NeverFailing(sys.stdout), NeverFailing(sys.stderr)
