"""What a page that follows runs shows: the runs of a folder, read again while they train.

    runs = LiveRuns(Path("runs"))
    runs.rows()          # of the list, the newest run first
    run = runs.find("first")
    run.state()          # step, losses, versions of its snapshots and of its report

Only files that have changed are read again, and of metrics.jsonl only the rows that were appended.
Nothing is written. Only directories in this folder are runs, and links are not followed.
output/live_server.py sends the results to a browser.
"""

import functools
import io
import os
import stat
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import quote

from clearhead.checkpoint.run_directory import (
    LOCK,
    SUMMARY_JSON,
    VALIDATION_JSON,
    is_locked,
    summarized_step,
)
from clearhead.config.stored import SETTINGS_JSON, settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import sanitize
from clearhead.files import MAX_LOG_BYTES, log_lines, open_regular, read_object, read_rows
from clearhead.output.charts import CURVES, curves, finite, number, points_of, smooth, thin

if TYPE_CHECKING:  # imports torch, which the list does not need
    from headlens import LiveSnapshots

MAX_RUNS = 200  # in the list
POINTS = 80  # of a curve in the list
BLOCK = 2**24  # bytes of a log that are read at once

Value = TypeVar("Value")


def signature(path: Path) -> tuple[int, ...]:
    """Returns numbers that differ after a change of a file; () without a regular file, such as for
    a link."""
    try:
        found = path.lstat()
    except OSError:
        return ()
    is_file = stat.S_ISREG(found.st_mode)
    return (found.st_ino, found.st_mtime_ns, found.st_size) if is_file else ()


class Cached(Generic[Value]):
    """What a function reads from a file; read again when the file has changed. nothing: the result
    without a file."""

    def __init__(self, path: Path, read: Callable[[], Value], nothing: Value):
        self.path, self.read, self.nothing = path, read, nothing
        self.signature: tuple[int, ...] = ()
        self.value = nothing

    def __call__(self) -> Value:
        found = signature(self.path)
        if found != self.signature:
            self.signature, self.value = found, self.read() if found else self.nothing
        return self.value


class GrowingLog:
    """The rows of metrics.jsonl with losses, and the last step of all rows."""

    def __init__(self, path: Path):
        self.path = path
        self.signature: tuple[int, ...] = ()
        self.clear()

    def clear(self) -> None:
        self.rows: list[dict] = []
        self.step, self.offset = 0, 0

    def update(self) -> None:
        """Reads the rows that were appended; all, if the file was written again, as when a run is
        resumed."""
        found = signature(self.path)
        if found == self.signature:
            return
        if not found or found[:1] != self.signature[:1] or found[2] < self.offset:
            self.clear()
        self.signature = found
        if found and found[2] <= MAX_LOG_BYTES:
            with open_regular(self.path) as file:
                while self._read_block(file):
                    pass

    def _read_block(self, file: io.BufferedIOBase) -> bool:
        file.seek(self.offset)
        whole, newline, _ = file.read(BLOCK).rpartition(b"\n")  # the last line may be incomplete
        for _, row in log_lines(io.BytesIO(whole)):
            self.step = max(self.step, row["step"])
            kept = {key: row[key] for key in CURVES if key in row}
            self.rows += [{"step": row["step"]} | kept] if kept else []
        self.offset += len(whole) + len(newline)
        return bool(newline)


class LiveRun:
    """A run directory that another process may be changing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = threading.Lock()  # one thread at a time reads the files of a run
        self.settings = Cached(
            folder / SETTINGS_JSON, lambda: flat(settings_of(folder) or {}), nothing={}
        )
        self.start = Cached(
            folder / "starts.jsonl", lambda: next(iter(read_rows(folder / "starts.jsonl")), {}), {}
        )
        self.finished_step = Cached(folder / SUMMARY_JSON, lambda: summarized_step(folder), None)
        self.final = Cached(
            folder / VALIDATION_JSON, lambda: read_object(folder / VALIDATION_JSON), {}
        )
        self.log = GrowingLog(folder / "metrics.jsonl")
        self.lines: dict[str, list] = {}  # of the list
        self.lines_seen: tuple[int, ...] = ()  # the signature of the log that they are of
        self.is_running, self.lock_seen = False, ()

    @functools.cached_property
    def snapshots(self) -> "LiveSnapshots":
        import torch

        from headlens import LiveSnapshots

        torch.set_num_threads(1)  # the other cores are for the training
        frames = self.settings().get("lens.frames")
        return LiveSnapshots(self.folder / "attention", frames if isinstance(frames, int) else 24)

    @property
    def has_snapshots(self) -> bool:
        folder = self.folder / "attention"
        return folder.is_dir() and not folder.is_symlink()

    @property
    def has_report(self) -> bool:
        return bool(signature(self.folder / "report.html"))

    @property
    def address(self) -> str:
        return f"run/{quote(os.fsencode(self.folder.name), safe='')}/"

    def row(self) -> dict:
        """Returns the row of the list."""
        self.log.update()
        if self.lines_seen != self.log.signature:
            train, val = (finite(points_of(self.log.rows, f"{of}/loss")) for of in ("train", "val"))
            self.lines_seen = self.log.signature
            self.lines = {
                "training": _rounded(thin(smooth(train), POINTS)),
                "validation": _rounded(thin(val, POINTS)),
            }
        lines = {name: points for name, points in self.lines.items() if points}
        return {
            "name": sanitize(self.folder.name),
            "address": self.address,
            "date": self.date().strftime("%Y-%m-%d %H:%M"),
            "parameters": self.start().get("parameters"),
            **self._progress(),
            "losses": {name: points[-1][1] for name, points in lines.items()} | self._final_loss(),
            "lines": lines,
            "has_attention": self.has_snapshots,
            "has_report": self.has_report,
        }

    def state(self) -> dict:
        """Returns what the attention page asks for, see polling.js."""
        self.log.update()
        found = curves(self.log.rows)
        last = {name: points[-1][1] for name, points in found.items()}
        every = self.settings().get("lens.every")
        return {
            **self._progress(),
            "snapshots": self.snapshots.version() if self.has_snapshots else "",
            "is_recorded": every != 0,
            "curves": found,
            "losses": last,
            "report": repr(signature(self.folder / "report.html")),
        }

    def date(self) -> datetime:
        """Returns the time of the first start."""
        try:
            return datetime.fromisoformat(str(self.start().get("time"))).astimezone()
        except (ValueError, OverflowError):
            changed = self.settings.signature[1:2] or (0,)
            return datetime.fromtimestamp(changed[0] / 1e9).astimezone()

    def _progress(self) -> dict:
        state = "finished" if self.log.step == self.finished_step() else "stopped"
        planned = self.settings().get("trainer.max_steps")
        return {
            "state": "running" if self._is_locked() else state,
            "step": self.log.step,
            "max_steps": planned if isinstance(planned, int) else None,
        }

    def _is_locked(self) -> bool:
        """Asks for the lock only if it is known to be locked, or its file has changed: otherwise
        this process could hold the lock at the moment when a run needs it. A process writes to the
        file after it has locked it."""
        seen = signature(self.folder / LOCK)
        if self.is_running or seen != self.lock_seen:
            self.is_running, self.lock_seen = bool(seen) and is_locked(self.folder), seen
        return self.is_running

    def _final_loss(self) -> dict:
        loss = number(self.final().get("loss"))
        is_last = self.final().get("step") == self.log.step and loss == loss
        return {"validation": round(loss, 4)} if is_last else {}


class LiveRuns:
    """The runs in a folder, which may not exist yet."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.known: dict[str, LiveRun] = {}
        self.lock = threading.Lock()

    def find(self, name: str) -> LiveRun | None:
        return self._update().get(name)

    def rows(self) -> dict:
        """Returns {"folder", "runs": the rows of the newest runs, "more": number of other runs}."""
        runs = sorted(self._update().values(), key=lambda run: (run.date(), run.folder.name))
        newest, rows = runs[::-1][:MAX_RUNS], []
        for run in newest:
            with run.lock:
                rows.append(run.row())
        return {"folder": sanitize(str(self.folder)), "runs": rows, "more": len(runs) - len(newest)}

    def _update(self) -> dict[str, LiveRun]:
        try:
            with os.scandir(self.folder) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            names = []
        with self.lock:
            self.known = {
                name: self.known.get(name) or LiveRun(self.folder / name) for name in names
            }
            return {name: run for name, run in self.known.items() if run.settings()}


def _rounded(points: list) -> list:
    return [(step, round(value, 4)) for step, value in points]
