"""What served pages show: the runs of a folder, read again while they train; and a model without a
run, whose heads are measured once.

    runs = LiveRuns(Path("runs"))
    runs.rows()          # of the list, the newest run first
    run = runs.find("first")
    run.state()          # step, versions of its snapshots and of its losses
    run.training         # losses, samples and settings

A run is read again when one of its files has changed. Nothing is written. Only directories in this
folder are runs, and none whose files are links. output/live_server.py sends the results to a
browser.
"""

import contextlib
import functools
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from clearhead.checkpoint.format import MODEL
from clearhead.checkpoint.listing import list_checkpoints, step_of
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
from clearhead.output.live_typing import Checkpoint
from clearhead.output.report import ROWS, progress, training_data, validation_loss
from headlens import LiveSnapshots, Reader, SnapshotData, live_data, rounded

MAX_RUNS = 200  # in the list
POINTS = 80  # of a curve in the list
METRICS, STARTS = "metrics.jsonl", "starts.jsonl"
FILES = (SETTINGS_JSON, CONFIG_YAML, METRICS, STARTS, "samples.jsonl", VALIDATION_JSON)
FILES += (SUMMARY_JSON, LOCK)


def signature(path: Path) -> tuple[int, ...] | None:
    """Returns numbers that differ after a change of a file; () without one, None for something else
    such as a link."""
    try:
        found = path.lstat()
    except OSError:
        return ()
    is_file = stat.S_ISREG(found.st_mode)
    return (found.st_ino, found.st_mtime_ns, found.st_size) if is_file else None


class LiveRun:
    """A version of a run directory that another process may be changing. A file is read once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.version = [signature(folder / name) for name in FILES]
        self.snapshots = LiveSnapshots(folder / "attention")
        self.may_be_running = True

    @property
    def is_run(self) -> bool:
        return None not in self.version and bool(self.settings)

    @functools.cached_property
    def settings(self) -> dict:
        return flat(settings_of(self.folder) or {})

    @functools.cached_property
    def start(self) -> dict:
        return next(iter(read_rows(self.folder / STARTS)), {})

    @functools.cached_property
    def rows(self) -> list[dict]:
        return read_rows(self.folder / METRICS, *ROWS)

    @functools.cached_property
    def training(self) -> bytes:
        """Losses, samples and settings as JSON."""
        found = {"training": training_data(self.folder, self.rows), "curves": curves(self.rows)}
        return json.dumps(found).encode()

    @functools.cached_property
    def losses(self) -> dict:
        """The last losses as texts and the curves of both, for the list."""
        train, val = (finite(points_of(self.rows, f"{of}/loss")) for of in ("train", "val"))
        found = validation_loss(self.folder, self.rows)
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
        parameters = self.start.get("parameters")
        history = signature(self.folder / "attention" / "statistics.jsonl")
        has_picture = self.has_snapshots and history
        return {
            "name": sanitize(self.folder.name),
            "address": self.address,
            "date": self.date(),
            "size": f"{parameters:,} parameters" if isinstance(parameters, int) else "",
            "picture": f"{self.address}head.png?{history[1]:x}" if has_picture else "",
            **self.progress(),
            **self.losses,
        }

    def state(self) -> dict:
        """Returns what the page of the run asks for, see page/live.js."""
        return {
            **self.progress(),
            "snapshots": self.snapshots.version() if self.has_snapshots else "",
            "training": hashlib.sha256(self.training).hexdigest()[:16],
            "typing": self.typing(),
        }

    def typing(self) -> dict | None:
        """Returns what a page needs to read texts with the checkpoints; None without one."""
        steps, limit = list(self.checkpoints()), self.settings.get("data.max_length")
        if not steps or not isinstance(limit, int):
            return None
        return {"steps": steps, "limit": min(limit, Reader.MOST)}

    def checkpoints(self) -> dict[int, Checkpoint]:
        """Returns the checkpoints by step, ascending."""
        if (self.folder / "checkpoints").is_symlink():
            return {}
        found = [folder for folder in list_checkpoints(self.folder) if not folder.is_symlink()]
        versions = {folder: signature(folder / MODEL) for folder in reversed(found)}
        return {step_of(of): Checkpoint(str(of), v) for of, v in versions.items() if v}

    def prompts(self) -> list[list[int]]:
        """Returns the token ids of the prompts of the last snapshot; [] without one."""
        with contextlib.suppress(OSError, ValueError):
            return self.snapshots.token_ids() if self.has_snapshots else []
        return []

    def date(self) -> str:
        """Returns the time of the first start, such as 2026-11-29 01:36; "" if it is not known."""
        return sanitize(str(self.start.get("time", ""))[:16].replace("T", " "), keep="")

    def progress(self) -> dict:
        """Returns {"state", "text": the state in words, "done": the fraction of the steps}."""
        step = self.rows[-1]["step"] if self.rows else 0
        state = "finished" if step == summarized_step(self.folder) else "stopped"
        state = "running" if self.is_running() else state
        planned = self.settings.get("trainer.max_steps")
        is_known = state != "finished" and isinstance(planned, int) and planned > 0
        done = min(step / planned, 1) if is_known else None
        return {"state": state, "text": progress(state, self.rows, planned), "done": done}

    def is_running(self) -> bool:
        """Asks for the lock of a version until it is free: otherwise this process could hold the
        lock at the moment when a run needs it. A process writes to the file of the lock after it
        has locked it, which makes another version."""
        if self.may_be_running:
            self.may_be_running = is_locked(self.folder)
        return self.may_be_running


class LiveRuns:
    """The runs in a folder, which may not exist yet."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.known: dict[str, LiveRun] = {}

    def find(self, name: str) -> LiveRun | None:
        return self._update().get(name)

    def runs(self) -> list[LiveRun]:
        """Returns all runs, the newest last."""
        return sorted(self._update().values(), key=lambda run: (run.date(), run.folder.name))

    def are_running(self) -> bool:
        """Returns whether a run trains."""
        return any(run.is_running() for run in self._update().values())

    def rows(self) -> dict:
        """Returns {"folder", "runs": the rows of the newest runs, "more": number of other runs}."""
        runs = self.runs()[::-1]
        rows = [run.row() for run in runs[:MAX_RUNS]]
        return {"folder": sanitize(str(self.folder)), "runs": rows, "more": len(runs) - len(rows)}

    def _update(self) -> dict[str, LiveRun]:
        try:
            with os.scandir(self.folder) as entries:
                names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            names = []
        known = {}
        for name in names:
            run, before = LiveRun(self.folder / name), self.known.get(name)
            known[name] = before if before and before.version == run.version else run
        self.known = known
        return {name: run for name, run in known.items() if run.is_run}


@dataclass
class LiveModel:
    """A model without a run: a checkpoint, or a model of transformers."""

    name: str
    path: str  # directory or hub:NAME
    window: int  # maximum number of tokens
    snapshot: SnapshotData
    run: dict[str, Any]  # its page, see headlens.run_data

    def __post_init__(self):
        self.data = live_data(self.run, snapshots=self.name)

    def state(self) -> dict:
        """Returns what the page asks for, as LiveRun.state."""
        steps, limit = list(self.checkpoints()), min(self.window, Reader.MOST)
        known = {"state": "finished", "text": "", "done": None, "training": ""}
        return known | {"snapshots": self.name, "typing": {"steps": steps, "limit": limit}}

    def checkpoints(self) -> dict[int, Checkpoint]:
        return {self.snapshot.step: Checkpoint(self.path, ())}

    def prompts(self) -> list[list[int]]:
        return self.snapshot.token_ids
