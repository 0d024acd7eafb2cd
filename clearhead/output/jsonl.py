"""Logs with one JSON object per line (metrics.jsonl, samples.jsonl).

    rows = RowFile(folder / "metrics.jsonl")
    rows.append({"step": 1, "train/loss": 4.2})

Rows that cannot be written are kept in memory and written later. Only a file that was removed ends
the run: nothing that follows could be found.
"""

import contextlib
import json
import os
import sys
from io import FileIO
from pathlib import Path

from clearhead import files
from clearhead.errors import RunError


class RowFile:
    """Appends rows to a file. The first row creates the file."""

    def __init__(self, path: Path):
        self.path = path
        self.file: FileIO | None = None
        self.pending = b""  # not written yet; may start in the middle of a row
        self.has_failed = False

    def append(self, row: dict) -> None:
        """Writes the pending rows and then this row. Raises RunError if the file was removed."""
        with contextlib.suppress(OSError):  # writing reports it
            if self.file and not self.path.exists():
                reason, hint = f"{self.path} was removed during the run", "run the command again"
                raise RunError("name", self.path.parent.name, reason, hint)
        # backslashreplace: writes a lone surrogate as its JSON escape.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self.pending += line + b"\n"
        self._write()

    def sync(self) -> None:
        """Flushes the rows and the folder's entry to disk (fsync)."""
        self._write()
        try:
            if self.file:
                os.fsync(self.file.fileno())
                files.fsync(self.path.parent)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # `append` raises
                self._report(error, "the last rows may be lost if the machine crashes")

    def close(self) -> None:
        """Tries to write the pending rows, reports the number of lost rows, closes the file."""
        self.sync()
        if lost := self.pending.count(b"\n"):
            print(f"{self.path}: {lost} rows could not be written and are lost", file=sys.stderr)
        if self.file:
            with contextlib.suppress(OSError):  # sync has reported it
                self.file.close()
            self.file = None

    def _write(self) -> None:
        try:
            if self.pending and self.file is None:
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            while self.pending:  # on a nearly full disk only a part is written
                self.pending = self.pending[self.file.write(self.pending) :]
        except OSError as error:
            self._report(error, "training continues; the rows are kept in memory and written later")

    def _report(self, error: OSError, consequence: str) -> None:
        """Prints the first error of this file only."""
        if not self.has_failed:
            self.has_failed = True
            cause = error.strerror or error
            print(f"{self.path}: cannot be written ({cause}); {consequence}", file=sys.stderr)


def drop_rows_after(folder: Path, step: int) -> None:
    """Removes invalid rows and rows after `step` from metrics.jsonl and samples.jsonl, so that a
    run that resumes after `step` logs each step once."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (path := folder / name).exists():
            with open(path, "rb") as file:
                lines = files.log_lines(file)  # without a line that was truncated by a crash
                kept = (line.rstrip(b"\n") + b"\n" for line, row in lines if row["step"] <= step)
                files.atomic_write(path, kept)
