"""Logs with one JSON object per line (metrics.jsonl, samples.jsonl).

    rows = RowFile(folder / "metrics.jsonl")
    rows.append({"step": 1, "train/loss": 4.2})

A log never ends training: what cannot be written is kept in memory and written later, in order.
"""

import contextlib
import json
import os
import sys
from io import FileIO
from pathlib import Path

import files


class RowFile:
    """Appends rows to a file. The first row creates it."""

    def __init__(self, path: Path):
        self.path = path
        self.file: FileIO | None = None
        self.pending = b""  # not yet written; may start within a row, of which a part was written
        self.has_failed = False

    def append(self, row: dict) -> None:
        """Writes a row, after those that are pending."""
        # backslashreplace: half a surrogate pair becomes its JSON escape.
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
            self._report(error, "its last rows may be lost if the machine fails")

    def close(self) -> None:
        """Tries to write what is pending, reports how many rows are lost, closes the file."""
        self.sync()
        if lost := self.pending.count(b"\n"):
            print(f"{self.path}: {lost} rows could not be written and are lost", file=sys.stderr)
        if self.file:
            with contextlib.suppress(OSError):  # reported by fsync
                self.file.close()

    def _write(self) -> None:
        try:
            if self.pending and self.file is None:
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            while self.pending:  # a disk that becomes full takes only a part
                self.pending = self.pending[self.file.write(self.pending) :]
        except OSError as error:
            self._report(error, "training continues, its rows are kept in memory and tried again")

    def _report(self, error: OSError, consequence: str) -> None:
        """Prints one line for all failures of this file."""
        if not self.has_failed:
            self.has_failed = True
            cause = error.strerror or error
            print(f"{self.path}: not written ({cause}); {consequence}", file=sys.stderr)


def drop_rows_after(folder: Path, step: int) -> None:
    """Removes later and damaged rows from metrics.jsonl and samples.jsonl before a run resumes at
    `step`, so that each step is in the log once."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if not (path := folder / name).exists():
            continue
        kept = []
        for line in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # truncated by a crash
                if json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
        files.atomic_write(path, b"".join(kept))
