"""What may be shown on a terminal: texts, prompts and paths come from anywhere."""

import contextlib
import os
import re
import sys
from typing import IO

# Control characters (a terminal obeys them: title, clipboard, colours, cursor), what reverses the
# direction of the text after it, and half surrogate pairs, which are no characters at all.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with what a terminal would obey written out, such as \\x1b; `keep` stays."""

    def written_out(found: re.Match) -> str:
        character = found[0]
        if character in keep:
            return character
        code = ord(character)
        return _SHORT.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")

    return _UNSAFE.sub(written_out, text)


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
