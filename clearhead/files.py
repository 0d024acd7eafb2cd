"""Atomic writes, bounded reads, and logs with one JSON object per line (.jsonl).

A file is written under a temporary name, flushed to disk (fsync) and then renamed. After a crash or
a power failure it is complete or absent. A rename is safe only after fsync of the parent folder.
"""

import contextlib
import errno
import functools
import glob
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from clearhead.errors import RunError, best_effort, sanitize

REPOSITORY = Path(__file__).resolve().parents[1]
MAX_NESTING = 100  # far below the recursion limit of functions that copy or compare values
MAX_LOG_BYTES = 2**28  # larger logs are not read


def script_path(name: str) -> str:
    """Returns the path of a script of this repository, such as train.py, as it is typed in the
    working directory."""
    script = REPOSITORY / name
    return name if Path(name).resolve() == script else str(script)


def temporary_name(path: Path) -> Path:
    """Returns a new temporary name for a file that is not yet complete."""
    return path.with_name(f"{path.name}.part-{secrets.token_hex(8)}")


def atomic_write(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Writes a file atomically. content: all of it, or pieces."""
    with atomic_file(path) as part, open(part, "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name for a file, which has the name `path` afterwards: a reader never sees
    an incomplete file. After an error, the file is removed."""
    part = temporary_name(path)
    try:
        yield part
        fsync(part)
        rename(part, path)
    except BaseException:  # also SystemExit after a signal
        part.unlink(missing_ok=True)
        raise


def remove_temporary_files(folder: Path, name: str = "*") -> None:
    """Removes temporary files and folders of killed processes, of one name or of all. No other
    process may write to them."""
    pattern = name if name == "*" else glob.escape(name)
    for part in folder.glob(f"{pattern}.part-" + "[0-9a-f]" * 16):
        remove(part)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def size_of(*paths: Path) -> int:
    """Returns the bytes of files, and of all files in folders. A file with several names counts
    once. Links are not followed."""
    inside = [Path(at, name) for path in paths for at, _, names in os.walk(path) for name in names]
    sizes = {}
    for path in (*paths, *inside):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def rename(part: Path, path: Path) -> None:
    """Renames a complete file, folder or link and flushes the new name to disk."""
    os.replace(part, path)
    fsync(path.parent)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents and flushes their names to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def fsync(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to disk. Windows cannot open a folder, so
    there a folder is not flushed."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return
    # Windows flushes a file only if it is open for writing.
    number = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file for reading.

    Raises OSError for other types: reading a FIFO or a device could block or never end.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # not on Windows
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(number, "rb")


def read_bounded(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most `limit` bytes. Raises OSError otherwise."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)  # read(n) allocates n bytes at once
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    return content


def read_json(path: Path, limit: int = 2**24) -> object:
    """Reads a JSON file of at most `limit` bytes and MAX_NESTING levels. Raises OSError or
    ValueError."""
    return parse_json(read_bounded(path, limit))


def parse_json(content: bytes) -> object:
    """Parses JSON of at most MAX_NESTING levels. Raises ValueError."""
    with contextlib.suppress(RecursionError):
        try:
            value = json.loads(content)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not valid JSON: {error}") from error
        level = [[value]]
        for _ in range(MAX_NESTING):
            parts = [part.values() if isinstance(part, dict) else part for part in level]
            level = [each for part in parts for each in part if isinstance(each, dict | list)]
            if not level:
                return value
    raise ValueError("is nested too deeply")


def read_object(path: Path) -> dict:
    """Returns the object in a small JSON file; {} without one, and for a damaged file."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(value := read_json(path), dict):
            return value
    return {}


def as_json(value: object) -> bytes:
    """Returns a value, which may contain rows, as JSON. NaN and infinity become null."""
    value = json.loads(json.dumps(value, default=vars), parse_constant=lambda _: None)
    return (json.dumps(value, indent=1) + "\n").encode()


# ------------------------------------------------------------------------------------- logs


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
            if isinstance(error, FileNotFoundError):
                hint = "do not remove or move it during training; rerun the same command"
            raise RunError("name", self.path.parent.name, reason, hint) from error

    def sync(self) -> None:
        """Flushes the rows and the folder's entry to disk (fsync)."""
        with best_effort(f"{self.path}: the last rows may be lost if the machine crashes"):
            if self.file:
                os.fsync(self.file.fileno())
                fsync(self.path.parent)

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
                lines = log_lines(file)  # without a line that was truncated by a crash
                kept = (line.rstrip(b"\n") + b"\n" for line, row in lines if row["step"] <= step)
                atomic_write(path, kept)


def read_rows(path: Path, *keys: str) -> list[dict]:
    """Reads the rows of a .jsonl log, sorted by step; [] if the file is missing or, with a line on
    stderr, too large. Ignores read errors.

    keys: only these numbers and texts and `step`, of the rows that have any; without keys, all. A
    run that logs each step may have too many values to keep all of them.
    """
    rows = []
    for row in _rows(path):
        if keys:
            kept = {key: row[key] for key in keys if isinstance(row.get(key), float | int | str)}
            row = kept and {"step": row["step"]} | kept
        rows += [row] if row else []
    return sorted(rows, key=lambda row: row["step"])


def last_values(path: Path) -> dict[str, object]:
    """Returns the last value of each key in the rows after step 0 of a log, as read_rows."""
    values = {}
    for row in _rows(path):
        values |= row if row["step"] else {}
    return values


def _rows(path: Path) -> Iterator[dict]:
    with contextlib.suppress(OSError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= MAX_LOG_BYTES:
            yield from (row for _, row in log_lines(file))
        else:
            print_once(f"{path}: not read, because it is larger than {MAX_LOG_BYTES:,} bytes")


def log_lines(file: IO[bytes]) -> Iterator[tuple[bytes, dict]]:
    """Yields the lines of a .jsonl log and their rows. Skips lines that are not valid JSON, have no
    step or are longer than 1 MiB, with a line on stderr; the last one may be incomplete."""
    damaged = 0
    while line := file.readline(2**20):  # pieces of a longer line are not valid JSON
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode("utf-8", "replace"))
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is int and 0 <= step < 2**53:
            yield line, row
        else:
            damaged += line.endswith(b"\n")
    if damaged:
        print_once(f"{file.name}: skipped {damaged:,} damaged lines; the others are used")


@functools.lru_cache(1000)
def print_once(text: str) -> None:
    """Prints a line on stderr, once for each text."""
    print(sanitize(text, keep=""), file=sys.stderr)
