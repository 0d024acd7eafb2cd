"""A file of text or a part of it: how it is opened, read and divided."""

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from errors import DataError, message_of
from tokens.encoding import find_cut
from tokens.paths import check_regular, kind_of, unreadable

BLOCK = 2**20  # bytes read at once
WINDOW = 2**16  # bytes in which a cut is looked for
SIDE = 4  # bytes on each side of a cut in which it shows: the longest character


@dataclass(frozen=True)
class Part:
    """A file, or the part of a large one that is read by itself.

    Parts meet where a text may be cut without changing its tokens; in JSON lines between lines, in
    Parquet between row groups. `start` and `stop` are where the cut is looked for: bytes, or row
    groups in Parquet. stop=None: to the end.
    """

    path: str
    start: int = 0
    stop: int | None = None
    text_key: str = "text"  # where JSON and Parquet have the text

    @property
    def kind(self) -> str:
        """text | jsonl | parquet | hub"""
        return kind_of(self.path)


def bounds(part: Part) -> tuple[int, int | None]:
    """From which byte to which a part of a text or of JSON lines is; None: to the file's end."""
    begin = _cut_from(part, part.start) if part.start else 0
    if part.stop is None:
        return begin, None
    if begin >= part.stop:
        return 0, 0  # nothing: the inside of a run, which belongs to the part where it began
    return begin, _cut_from(part, part.stop)


def _cut_from(part: Part, place: int) -> int:
    """The first place from `place` on where the file may be cut: in a text where the tokens stay
    the same, in JSON lines at the beginning of a line. The file's end when there is none."""
    place = max(place, SIDE)  # behind a byte-order mark
    with opened(part.path) as file:
        base = place - SIDE  # of the window in the file
        file.seek(base)
        window = b""
        while True:
            block = read(file, part.path, WINDOW)
            window += block
            # What follows the last places is not read yet.
            stop = len(window) - SIDE if block else len(window)
            if part.kind == "jsonl":  # a line begins where there is a line end before
                found = window.find(b"\n", SIDE - 1, stop - 1) + 1 or None
            else:
                found = find_cut(window, SIDE, stop) if stop > SIDE else None
            if found is not None or not block:
                return base + (len(window) if found is None else found)
            if stop > SIDE:
                base, window = base + stop - SIDE, window[stop - SIDE :]


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked where its name says so."""
    check_regular(path)
    try:
        if path.lower().endswith(".gz"):
            file = gzip.open(path)  # noqa: SIM115 closed below
        elif path.lower().endswith(".zst"):
            arrow = needed("pyarrow", path, "zstd", "pyarrow")
            file = io.BufferedReader(arrow.input_stream(path, compression="zstd"), BLOCK)
        else:
            file = open(path, "rb", buffering=BLOCK)  # noqa: SIM115 closed below
    except OSError as error:
        raise unreadable(path, error) from error
    with file:
        yield file


def read(file: BinaryIO, path: str, size: int) -> bytes:
    """At most `size` bytes of a file."""
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error


def damaged(path: str, error: Exception) -> DataError:
    cause = f"cannot be read ({message_of(error) or type(error).__name__})"
    return DataError("data.path", path, cause, "create or download it again")


def needed(module: str, path: str, what: str, package: str):
    """A library that only some data needs; DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}"
        raise DataError("data.path", path, f"reading {what} needs {package}", fix) from error
