"""Where the numbers go: metrics.jsonl in the run's directory always, Weights & Biases as asked.

A tracker takes one row of metrics for each step, and with it what the lens saw and what the model
wrote, and sends all to the same places under the same keys. Some things go to W&B alone: the
statistics of every head, which stand in attention/statistics.jsonl, their histograms, the table of
heads, which is attention/heads.csv, and the sample, which is in samples.jsonl. W&B itself, and
whatever may become of it: training/reporting/wandb_run.py.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from training.checkpoint.run_directory import CONFIG
from training.reporting.jsonl import RowFile
from training.reporting.wandb_run import WandbConfig, WandbRun

if TYPE_CHECKING:
    from lens import Snapshot


class Tracker:
    """Writes metrics.jsonl and feeds a W&B run; made on the main rank.

    settings: the whole resolved configuration as plain values, shown on the dashboard.
    run_id: the id of the W&B run to continue, or None for a new one.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, settings: dict, run_id: str | None = None
    ):
        self.folder = folder
        files = _files_logged(folder / "metrics.jsonl")
        self.rows = RowFile(folder / "metrics.jsonl")
        self.log_model_of = config.log_model
        self.wandb = WandbRun(config, folder, settings, run_id, files)

    @property
    def run_id(self) -> str | None:
        """The W&B run's id, to be continued after a resume; None when W&B is off."""
        return self.wandb.id

    def where(self) -> str | None:
        """What to open or do to see the dashboard."""
        return self.wandb.where()

    def log(
        self,
        metrics: dict[str, float],
        step: int,
        snapshot: "Snapshot | None" = None,
        sample: dict | None = None,
    ) -> None:
        """Logs one row: the metrics of a step, its attention snapshot (files in the run's
        directory) and its sample, a row of samples.jsonl.

        Call it once for each step, in order: W&B drops a row that comes later for an earlier step.
        """
        if snapshot:
            metrics = metrics | snapshot.metrics
        files = snapshot.pictures | snapshot.pages if snapshot else {}
        row = {"step": step} | {key: _finite_or_text(value) for key, value in metrics.items()}
        row |= {key: str(path.relative_to(self.folder)) for key, path in files.items()}
        if len(row) > 1:
            self.rows.append(row)
        self.wandb.log(metrics, step, snapshot, sample)

    def summary(self, values: dict[str, float]) -> None:
        """What the run came to, shown in the dashboard's table of runs."""
        self.wandb.summary(values)

    def alert(self, title: str, text: str, level: str) -> None:
        """A message by way of W&B (level: WARN or ERROR), where wandb.alerts wishes it."""
        self.wandb.alert(title, text, level)

    def log_model(self, best_step: int | None) -> str | None:
        """Uploads the model that wandb.log_model wants; what it is called there, None without one.

        Where nothing was validated, and so none is the best, the last one goes.
        """
        if not self.log_model_of or self.run_id is None:
            return None
        from training.checkpoint import format as checkpoint
        from training.checkpoint import listing

        whole = {listing.step_of(one): one for one in listing.list_checkpoints(self.folder)}
        step = best_step if self.log_model_of == "best" and best_step in whole else max(whole)
        state = checkpoint.load_state(whole[step])
        names = [f"step_{step}"] + ["best"] * (step == best_step) + ["last"] * (step == max(whole))
        facts = {key: getattr(state, key) for key in ("step", "tokens", "val_loss")}
        facts |= {"settings": {key: state.settings[key] for key in ("model", "data")}}
        files = [whole[step] / name for name in checkpoint.OF_MODEL] + [self.folder / CONFIG]
        return self.wandb.log_model(files, names, facts)

    def sync(self) -> None:
        """Waits until the disk has the rows so far."""
        self.rows.sync()

    def finish(self, exit_code: int = 0) -> None:
        """Closes both; W&B marks the run as failed when the code is not 0."""
        self.rows.close()
        self.summary({"exit_code": exit_code})
        self.wandb.finish(exit_code)


class NoTracker:
    """The tracker of the other ranks: takes everything and does nothing."""

    run_id = None

    def where(self) -> None: ...

    def log(self, metrics, step, snapshot=None, sample=None) -> None: ...

    def summary(self, values) -> None: ...

    def alert(self, title, text, level) -> None: ...

    def log_model(self, best_step) -> None: ...

    def sync(self) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


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
