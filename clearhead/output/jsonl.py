"""Logs with one JSON object per line (metrics.jsonl, samples.jsonl).

rows = RowFile(folder / "metrics.jsonl")
rows.append({"step": 1, "train/loss": 4.2})
"""

import json
import os
from io import FileIO
from pathlib import Path

from clearhead import files
from clearhead.errors import RunError, best_effort


class RowFile:
    """Appends rows to a file. The first row creates the file."""

    def __init__(self, path: Path):
        self.path = path
        self.file: FileIO | None = None

    def append(self, row: dict) -> None:
        """Writes a row. Raises RunError if it cannot be written, for example because the disk is
        full or the run directory was removed. The checkpoints are intact, and a resumed run removes
        an incomplete row."""
        # backslashreplace: writes a lone surrogate as its JSON escape.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            if self.file:
                self.path.stat()  # raises FileNotFoundError
            else:
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            while line:  # on a nearly full disk only a part is written
                line = line[self.file.write(line) :]
        except OSError as error:
            reason = f"{self.path} cannot be written ({error.strerror})"
            hint = "free disk space and rerun the same command"
            raise RunError("name", self.path.parent.name, reason, hint) from error

    def sync(self) -> None:
        """Flushes the rows and the folder's entry to disk (fsync)."""
        with best_effort(f"{self.path}: the last rows may be lost if the machine crashes"):
            if self.file:
                os.fsync(self.file.fileno())
                files.fsync(self.path.parent)

    def close(self) -> None:
        self.sync()
        if self.file:
            self.file.close()
        self.file = None


def drop_rows_after(folder: Path, step: int) -> None:
    """Removes invalid rows and rows after `step` from metrics.jsonl and samples.jsonl, so that a
    run that resumes after `step` logs each step once."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (path := folder / name).exists():
            with open(path, "rb") as file:
                lines = files.log_lines(file)  # without a line that was truncated by a crash
                kept = (line.rstrip(b"\n") + b"\n" for line, row in lines if row["step"] <= step)
                files.atomic_write(path, kept)
