"""What a page that follows runs shows: the runs of a folder, read again while they train.

    runs = LiveRuns(Path("runs"))
    runs.rows()          # of the list, the newest run first
    run = runs.find("first")
    run.state()          # step, versions of its snapshots and of its losses
    run.training()       # losses, samples and settings

Only files that have changed are read again. Nothing is written. Only directories in this folder
are runs, and links are not followed. output/live_server.py sends the results to a browser, to one
request at a time.
"""

import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from clearhead.checkpoint.run_directory import (
    CONFIG_YAML,
    LOCK,
    SUMMARY_JSON,
    VALIDATION_JSON,
    is_locked,
    summarized_step,
)
from clearhead.config.stored import SETTINGS_JSON, settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import sanitize
from clearhead.files import read_rows
from clearhead.output.charts import curves, finite, points_of, smooth, thin
from clearhead.output.report import ROWS, progress, training_data, validation_loss
from headlens import LiveSnapshots, rounded

MAX_RUNS = 200  # in the list
POINTS = 80  # of a curve in the list
METRICS, STARTS = "metrics.jsonl", "starts.jsonl"
LOGS = (METRICS, STARTS, "samples.jsonl", VALIDATION_JSON)

Value = TypeVar("Value")


def signature(path: Path) -> tuple[int, ...] | None:
    """Returns numbers that differ after a change of a file; () without one, None for something else
    such as a link."""
    try:
        found = path.lstat()
    except OSError:
        return ()
    is_file = stat.S_ISREG(found.st_mode)
    return (found.st_ino, found.st_mtime_ns, found.st_size) if is_file else None


def read_from(*names: str, nothing: Value) -> Callable:
    """Decorates a method of LiveRun that reads these files: it is called again only if one has
    changed. nothing: its result without the first file, and if one is a link."""

    def decorate(method: Callable[["LiveRun"], Value]) -> Callable[["LiveRun"], Value]:
        @functools.wraps(method)
        def read(run: "LiveRun") -> Value:
            seen = [signature(run.folder / name) for name in names]
            if run.known.get(method, (None,))[0] != seen:
                is_there = seen[0] and None not in seen
                run.known[method] = seen, method(run) if is_there else nothing
            return run.known[method][1]

        return read

    return decorate


class LiveRun:
    """A run directory that another process may be changing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.snapshots = LiveSnapshots(folder / "attention")
        self.known = {}  # the signatures of files, and what was read from them
        self.is_running, self.lock_seen = False, ()

    @read_from(SETTINGS_JSON, nothing={})
    def settings(self) -> dict:
        return flat(settings_of(self.folder) or {})

    @read_from(STARTS, nothing={})
    def start(self) -> dict:
        return next(iter(read_rows(self.folder / STARTS)), {})

    @read_from(SUMMARY_JSON, nothing=None)
    def finished_step(self) -> int | None:
        return summarized_step(self.folder)

    @read_from(METRICS, nothing=[])
    def rows(self) -> list[dict]:
        return read_rows(self.folder / METRICS, *ROWS)

    @read_from(CONFIG_YAML, *LOGS, nothing=b"")
    def training(self) -> bytes:
        """Returns losses, samples and settings as JSON."""
        found = {"training": training_data(self.folder, self.rows()), "curves": curves(self.rows())}
        return json.dumps(found).encode()

    @read_from(*LOGS, nothing={"losses": [], "lines": {}})
    def losses(self) -> dict:
        """Returns the last losses as texts and the curves of both, for the list."""
        train, val = (finite(points_of(self.rows(), f"{of}/loss")) for of in ("train", "val"))
        found = validation_loss(self.folder, self.rows())
        losses = [("training", rounded(train[-1][1], 4))] if train else []
        losses += [("validation", rounded(found["loss"], 4))] if found else []
        lines = {"training": thin(smooth(train), POINTS), "validation": thin(val, POINTS)}
        lines = {name: points for name, points in lines.items() if points}
        return {"losses": losses, "lines": lines}

    @property
    def has_snapshots(self) -> bool:
        folder = self.folder / "attention"
        return folder.is_dir() and not folder.is_symlink()

    @property
    def address(self) -> str:
        return f"run/{quote(os.fsencode(self.folder.name), safe='')}/"

    def row(self) -> dict:
        """Returns the row of the list."""
        parameters = self.start().get("parameters")
        history = signature(self.folder / "attention" / "statistics.jsonl")
        has_picture = self.has_snapshots and history
        return {
            "name": sanitize(self.folder.name),
            "address": self.address,
            "date": self.date(),
            "size": f"{parameters:,} parameters" if isinstance(parameters, int) else "",
            "picture": f"{self.address}head.png?{history[1]:x}" if has_picture else "",
            **self._progress(),
            **self.losses(),
        }

    def state(self) -> dict:
        """Returns what the page of the run asks for, see page/live.js."""
        return {
            **self._progress(),
            "snapshots": self.snapshots.version() if self.has_snapshots else "",
            "training": hashlib.sha256(self.training()).hexdigest()[:16],
        }

    def date(self) -> str:
        """Returns the time of the first start, such as 2026-11-29 01:36; "" if it is not known."""
        return sanitize(str(self.start().get("time", ""))[:16].replace("T", " "), keep="")

    def _progress(self) -> dict:
        """Returns {"state", "text": the state in words, "done": the fraction of the steps}."""
        step = self.rows()[-1]["step"] if self.rows() else 0
        state = "finished" if step == self.finished_step() else "stopped"
        state = "running" if self._is_locked() else state
        planned = self.settings().get("trainer.max_steps")
        is_known = state != "finished" and isinstance(planned, int) and planned > 0
        done = min(step / planned, 1) if is_known else None
        return {"state": state, "text": progress(state, self.rows(), planned), "done": done}

    def _is_locked(self) -> bool:
        """Asks for the lock only if it is known to be locked, or its file has changed: otherwise
        this process could hold the lock at the moment when a run needs it. A process writes to the
        file after it has locked it."""
        seen = signature(self.folder / LOCK)
        if self.is_running or seen != self.lock_seen:
            self.is_running, self.lock_seen = bool(seen) and is_locked(self.folder), seen
        return self.is_running


class LiveRuns:
    """The runs in a folder, which may not exist yet."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.known: dict[str, LiveRun] = {}

    def find(self, name: str) -> LiveRun | None:
        return self._update().get(name)

    def rows(self) -> dict:
        """Returns {"folder", "runs": the rows of the newest runs, "more": number of other runs}."""
        runs = sorted(self._update().values(), key=lambda run: (run.date(), run.folder.name))
        rows = [run.row() for run in runs[::-1][:MAX_RUNS]]
        return {"folder": sanitize(str(self.folder)), "runs": rows, "more": len(runs) - len(rows)}

    def _update(self) -> dict[str, LiveRun]:
        try:
            with os.scandir(self.folder) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            names = []
        self.known = {name: self.known.get(name) or LiveRun(self.folder / name) for name in names}
        return {name: run for name, run in self.known.items() if run.settings()}
