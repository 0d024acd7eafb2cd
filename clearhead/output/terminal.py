"""Replaces stdout and stderr by streams whose errors do not end the training, for example when
the disk is full or the reader of a pipe has ended."""

import os
import sys
from collections.abc import Callable
from typing import IO


class NeverFailing:
    """A text stream that discards output it cannot write, and reports the first error on stderr."""

    def __init__(self, stream: IO[str] | None, quiet: bool = False):
        """stream: None if the shell has closed it. quiet: report no errors."""
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.reported = quiet

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, action: Callable, *arguments: str) -> None:
        try:
            action(*arguments)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if not self.reported:
                self.reported = True
                name = getattr(self.stream, "name", "output")
                print(f"{name}: cannot be written ({error}); training continues", file=sys.stderr)


def never_fail(quiet: bool = False) -> None:
    """Replaces stdout and stderr for the rest of the process."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), NeverFailing):
            setattr(sys, name, NeverFailing(getattr(sys, name), quiet))
