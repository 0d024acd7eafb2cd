"""stdout and stderr that never fail: a full disk under a log, or a pipe whose reader has ended,
must not end training."""

import os
import sys
from collections.abc import Callable
from typing import IO


class NeverFailing:
    """A text stream that drops what it cannot write and reports that once on stderr."""

    def __init__(self, stream: IO[str] | None, quiet: bool = False):
        """stream: None where the shell has closed it. quiet: nothing is reported."""
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
        except (OSError, ValueError) as error:  # ValueError: it is closed
            if not self.reported:
                self.reported = True
                name = getattr(self.stream, "name", "output")
                print(f"{name}: not written ({error}); training continues", file=sys.stderr)


def never_fail(quiet: bool = False) -> None:
    """Replaces stdout and stderr for the rest of the process."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), NeverFailing):
            setattr(sys, name, NeverFailing(getattr(sys, name), quiet))
