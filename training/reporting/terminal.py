"""What may be shown on a terminal: texts, prompts and paths come from anywhere."""

import contextlib
import os
import sys
from typing import IO


class NeverFailing:
    """A stream that takes what it is given, whether it can be written or not: a full disk under a
    log, or a pipe whose reader is gone, is no reason for training to end."""

    def __init__(self, stream: IO[str] | None, quiet: bool = False):
        """quiet: not even a line about it."""
        # None where the shell has closed it.
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.has_failed = quiet

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._forgiven():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._forgiven():
            self.stream.flush()

    @contextlib.contextmanager
    def _forgiven(self):
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it is closed
            if not self.has_failed:
                self.has_failed = True
                name = getattr(self.stream, "name", "output")
                print(f"{name}: not written ({error}); training goes on", file=sys.stderr)


def never_fail(quiet: bool = False) -> None:
    """Makes stdout and stderr such streams, for as long as this process lives."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), NeverFailing):
            setattr(sys, name, NeverFailing(getattr(sys, name), quiet))
