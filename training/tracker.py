"""Where the numbers go: metrics.jsonl in the run's directory always, Weights & Biases as asked.

The only file that knows wandb. A tracker takes one row of metrics for each step, and with it what
the lens saw, and sends both to the same places under the same keys. Some things go to W&B alone:
the statistics of every head, which stand in attention/statistics.jsonl, their histograms, and the
table of heads, which is attention/heads.csv.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lens import Look

FILES_AT_MOST = 950  # of one run on W&B, which becomes slow beyond a thousand
MODES = ("auto", "online", "offline", "disabled")


@dataclass
class WandbConfig:
    """The run as Weights & Biases shows it."""

    mode: str = "auto"  # auto (online with an API key, else offline) | online | offline | disabled
    project: str = "clearhead"
    name: str | None = None  # null: the run's name
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def problems(self) -> list[tuple[str, object, str, str]]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        if self.mode not in MODES:
            found.append(("mode", self.mode, "no such mode", f"use one of {', '.join(MODES)}"))
        if not self.project:
            found.append(("project", self.project, "needs a name", "use wandb.project=clearhead"))
        return found


class Tracker:
    """Writes metrics.jsonl and feeds a W&B run; made on the main rank.

    settings: the whole resolved configuration as plain values, shown on the dashboard.
    run_id: the id of the W&B run to continue, or None for a new one.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, settings: dict, run_id: str | None = None
    ):
        self.folder = folder
        self.files_left = FILES_AT_MOST - _files_logged(folder / "metrics.jsonl")
        self.file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.run = _start_wandb(config, folder, settings, run_id)
        # Hidden: a thousand curves would bury the others. A panel of one's own can show any.
        self._wandb(lambda run: run.define_metric("attention_heads/*", hidden=True))

    @property
    def run_id(self) -> str | None:
        """The W&B run's id, to be continued after a resume; None when W&B is off."""
        return self.run.id if self.run else None

    def where(self) -> str | None:
        """What to open or do to see the dashboard."""
        if self.run is None:
            return None
        if self.run.offline:
            return f"offline; to upload it: wandb sync {self.folder}/wandb/offline-run-*"
        return self.run.url

    def log(self, metrics: dict[str, float], step: int, look: "Look | None" = None) -> None:
        """One row: the metrics of one step, and what the lens saw (files in the run's directory).

        Call it once for each step, in order: W&B drops a row that comes later for an earlier step.
        """
        if look:
            metrics = metrics | look.metrics
        files = look.pictures | look.pages if look else {}
        row = {"step": step} | {key: _finite_or_text(value) for key, value in metrics.items()}
        row |= {key: str(path.relative_to(self.folder)) for key, path in files.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

        media = self._media(look) if look and self.run else {}
        self._wandb(lambda run: run.log(metrics | media, step=step))

    def _media(self, look: "Look") -> dict[str, object]:
        """A look in W&B's types. What fails is left out, and named; it is on disk all the same."""
        import wandb

        media = dict(look.heads)
        media |= {key: wandb.Histogram(values) for key, values in look.histograms.items()}
        pictures, pages = look.pictures, look.pages
        if len(pictures) + len(pages) > self.files_left:
            # A run made longer and longer: the time-lapse has what matters, and comes rarely.
            pictures = {}
            pages = {key: path for key, path in pages.items() if key == "attention/timelapse"}
        self.files_left -= len(pictures) + len(pages)
        try:
            media |= {key: wandb.Image(str(path)) for key, path in pictures.items()}
            # inject=False: by default W&B would add a stylesheet from its server to the page.
            media |= {key: wandb.Html(str(path), inject=False) for key, path in pages.items()}
            for key, (columns, rows) in look.tables.items():
                media[key] = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        except Exception as error:
            print(f"W&B: a picture or page was left out ({_one_line(error)})", file=sys.stderr)
        return media

    def summary(self, values: dict[str, float]) -> None:
        """What the run came to, shown in the dashboard's table of runs."""
        self._wandb(lambda run: run.summary.update(values))

    def finish(self, exit_code: int = 0) -> None:
        """Closes both; W&B marks the run as failed when the code is not 0."""
        self.file.close()
        self._wandb(lambda run: run.finish(exit_code=exit_code))

    def _wandb(self, action: Callable) -> None:
        """Does something with the W&B run; when it fails, says so once and goes on without."""
        if self.run is None:
            return
        try:
            action(self.run)
        except Exception as error:
            self.run = None
            _left_out(error)


class NoTracker:
    """The tracker of the other ranks: takes everything and does nothing."""

    run_id = None

    def where(self) -> None: ...

    def log(self, metrics, step, look=None) -> None: ...

    def summary(self, values) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


def drop_rows_after(folder: Path, step: int) -> None:
    """Cuts metrics.jsonl and samples.jsonl back to `step`: a resumed run writes the rest again."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        if not (path := folder / name).exists():
            continue
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError):
                continue  # a line that was being written when the run was cut off
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(kept), encoding="utf-8")
        os.replace(whole, path)


def last_wandb_id(folder: Path) -> str | None:
    """The id of the run's last W&B run, None when there was none: wandb names its folders
    run-DATE-ID and offline-run-DATE-ID."""
    folders = list((folder / "wandb").glob("*run-*-*"))
    # Not "offline-": sorted by date, then, whichever way they were recorded.
    names = sorted(folder.name.removeprefix("offline-") for folder in folders)
    return names[-1].split("-", 2)[2] if names else None


def _files_logged(metrics: Path) -> int:
    """How many pictures and pages the rows so far name: a run that goes on has logged them."""
    if not metrics.exists():
        return 0
    return len(re.findall(r'": "attention/', metrics.read_text(encoding="utf-8")))


def _finite_or_text(value: float) -> float | str:
    """JSON has no NaN and no infinity; a reader should see them all the same."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _start_wandb(config: WandbConfig, folder: Path, settings: dict, run_id: str | None):
    """The W&B run, or None. What goes wrong there is a line on stderr, never a lost run."""
    mode = os.environ.get("WANDB_MODE", "auto") if config.mode == "auto" else config.mode
    if mode == "disabled":
        return None
    try:
        import wandb

        if mode != "offline" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            print(
                "W&B: no API key found, so this run is recorded offline "
                "(wandb login, then wandb sync; wandb=off for none)",
                file=sys.stderr,
            )
        options = {
            "project": config.project,
            "name": config.name or folder.name,
            "group": config.group,
            "tags": config.tags,
            "dir": str(folder),
            "config": settings,
            "id": run_id,
            "resume": "allow" if run_id else None,
            "settings": wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, init_timeout=20
            ),
        }
        if mode != "offline":
            try:
                return wandb.init(mode="online", **options)
            except Exception as error:
                cause = _one_line(error)
                print(f"W&B: not reached ({cause}); recorded offline instead", file=sys.stderr)
        return wandb.init(mode="offline", **options)
    except Exception as error:
        _left_out(error)
        return None


def _left_out(error: Exception) -> None:
    print(f"W&B: left out, metrics are in metrics.jsonl ({_one_line(error)})", file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
