"""Logs of one JSON row a line, kept whole when the disk is full or fails for a while.

    rows = RowFile(folder / "metrics.jsonl")
    rows.append({"step": 1, "train/loss": 4.2})

Training never ends for the log: rows that cannot be written wait in memory, in their order, and
go out with the next one that can.
"""

import contextlib
import json
import os
import sys
from io import FileIO
from pathlib import Path

import files


class RowFile:
    """A file of rows, each on disk when append() returns, or else waiting; made by the first."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[bytes] = []
        self.file: FileIO | None = None
        self.size = 0  # bytes up to the end of the last whole row
        self.is_torn = False  # whether half a row may follow them
        self.is_new = False  # whether the folder's entry may not be on the disk yet
        self.has_failed = False

    def append(self, row: dict) -> None:
        """Adds a row, after those that wait."""
        # A half character of a command line becomes its JSON escape.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self.waiting.append(line + b"\n")
        self._write()

    def sync(self) -> None:
        """Waits until the disk has the rows: they outlast a loss of power."""
        self._write()
        if self.file is None:
            return
        try:
            os.fsync(self.file.fileno())
            if self.is_new:
                files.sync(self.path.parent)
                self.is_new = False
        except OSError as error:
            self._tell(error, "its last rows may be lost when the machine fails")

    def close(self) -> None:
        """A last try at what still waits; what cannot be written is lost, and counted."""
        self.sync()
        if self.waiting:
            lost = "1 row" if len(self.waiting) == 1 else f"{len(self.waiting)} rows"
            print(f"{self.path}: {lost} could not be written and are lost", file=sys.stderr)
        self.waiting = []
        file, self.file = self.file, None
        try:
            if file:
                file.close()
        except OSError as error:  # some file systems notice only here that they are full
            self._tell(error, "its last rows may be lost")

    def _write(self) -> None:
        if not self.waiting:
            return
        try:
            if self.file is None:
                self.is_new = not self.path.exists()
                self.size = 0 if self.is_new else self.path.read_bytes().rfind(b"\n") + 1
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
                self.is_torn = True
            if self.is_torn:
                self._cut_back()
            while self.waiting:
                self.is_torn = True
                rest = self.waiting[0]
                while rest:
                    rest = rest[self.file.write(rest) :]  # a disk that fills takes a part
                self.is_torn = False
                self.size += len(self.waiting.pop(0))
        except OSError as error:
            self._tell(error, "training goes on, its rows wait in memory for another try")
            with contextlib.suppress(OSError):  # else the next try begins with it
                self._cut_back()

    def _cut_back(self) -> None:
        """Leaves nothing behind the last whole row: no reader meets half of one."""
        if self.file and self.is_torn:
            self.file.truncate(self.size)
            self.is_torn = False

    def _tell(self, error: OSError, consequence: str) -> None:
        """Once: a disk that is full stays so for a while."""
        if not self.has_failed:
            self.has_failed = True
            cause = error.strerror or error
            print(f"{self.path}: not written ({cause}); {consequence}", file=sys.stderr)


class NoRows:
    """The log of the other ranks: takes rows and does nothing."""

    def append(self, row: dict) -> None: ...

    def sync(self) -> None: ...


def drop_rows_after(folder: Path, step: int) -> None:
    """Cuts metrics.jsonl and samples.jsonl back to `step`: a resumed run writes the rest again."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if not (path := folder / name).exists():
            continue
        content, kept = path.read_bytes(), []
        for line in content.split(b"\n"):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line that was being written when the run or the machine was cut off
        if (whole := b"".join(kept)) != content:
            files.atomic_write(path, whole)
