"""The data of a page that follows a run, read from its snapshot files while it trains.

    live = LiveSnapshots(Path("runs/first/attention"))
    live.version()  # another text after each change; "" without a snapshot
    live.data()     # page.run_data, with the address of each frame instead of its content
    live.frame(40)  # the content of the frame of step 40
    live.picture()  # the heatmap of one head, for a list of runs

A server sends these to page/live.js. Links are not followed.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import finding
from .heatmap import png_of_head
from .history import read_history
from .page import frame_data, live_data, run_data
from .render import most_frames
from .snapshot_data import SnapshotData, snapshot_files, snapshot_of, step_of

PICTURE = 96  # pixels
KEPT = 32  # frames in memory; to compress one takes longer than to read a snapshot


class File(NamedTuple):
    """A version of a file."""

    path: Path
    time: int  # of its last change, in nanoseconds
    size: int

    @property
    def step(self) -> int:
        return step_of(self.path)

    @property
    def address(self) -> str:
        return f"frame/{self.step}.json?{self.time:x}-{self.size:x}"


class LiveSnapshots:
    """The snapshots of a run. folder: runs/NAME/attention."""

    def __init__(self, folder: Path):
        self.folder = folder

    def version(self) -> str:
        files = self._files()
        known = [*files, *_found(self.folder / "statistics.jsonl")]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16] if files else ""

    def data(self) -> bytes:
        """Returns the JSON of the page, also with the version as "snapshots". Raises
        FileNotFoundError without a snapshot that can be read."""
        version, files = self.version(), self._files()
        last = _last(files)
        chosen = steadily_spaced(files[: files.index(last) + 1], most_frames(_read(last)))
        same = [file for file in chosen if _subject(file) == _subject(last)]
        frames = [{"step": file.step, "address": file.address} for file in same]
        history = read_history(self.folder / "statistics.jsonl")
        run = run_data([_read(last)], history, frames=frames)
        return live_data(run, version)

    def frame(self, step: int) -> bytes:
        """Returns the JSON of a frame. Raises FileNotFoundError if no snapshot of this step can be
        read."""
        return _frame(_last([file for file in self._files() if file.step == step]))

    def token_ids(self) -> list[list[int]]:
        """Returns the token ids of the prompts of the last snapshot. Raises as `frame`."""
        return _read(_last(self._files())).token_ids

    def picture(self) -> bytes:
        """Returns the heatmap of the clearest head at the last step as a PNG. Raises as `frame`."""
        return _picture(_last(self._files()))

    def _files(self) -> list[File]:
        return [file for path in snapshot_files(self.folder) for file in _found(path)]


def _last(files: list[File]) -> File:
    """Returns the last file that can be read."""
    for file in reversed(files):
        if _subject(file) is not None:
            return file
    raise FileNotFoundError("the run has no such snapshot that can be read")


def steadily_spaced(items: list, most: int) -> list:
    """Returns every item, or every 2nd, 4th, 8th, ..., and the last one: at most `most`, at least
    two. When items are appended, the result keeps its items until every second one is omitted.
    """
    every = 1
    while (len(items) - 2) // every + 2 > max(most, 2):  # with the last one
        every *= 2
    return items[:-1][::every] + items[-1:]


def _found(path: Path) -> Iterator[File]:
    """Yields the file at a path if there is one."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        yield File(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(2)
def _read(file: File) -> SnapshotData:
    """Raises FileNotFoundError for a file that cannot be read."""
    if data := snapshot_of(file.path):
        return data
    raise FileNotFoundError(f"the snapshot of step {file.step} cannot be read")


@functools.lru_cache(1000)
def _subject(file: File) -> int | None:
    """Returns a hash of the subject of a snapshot; None for a file that cannot be read."""
    try:
        return hash(repr(_read(file).subject))
    except FileNotFoundError:
        return None


@functools.lru_cache(KEPT)
def _frame(file: File) -> bytes:
    return json.dumps(frame_data(_read(file))).encode()


@functools.lru_cache(200)
def _picture(file: File) -> bytes:
    of = finding.Heads(_read(file))
    codes = of.data.codes[of.shown_prompt(of.first)]
    return png_of_head(codes[of.first["place"]], PICTURE)
