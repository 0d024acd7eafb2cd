"""Metrics of a run: metrics.jsonl in the run's directory always, Weights & Biases if it is on.

Only W&B gets the statistics of every head (on disk in attention/statistics.jsonl), their
histograms, the table of heads (attention/heads.csv) and the samples (samples.jsonl).
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from errors import best_effort
from training.checkpoint.run_directory import CONFIG
from training.config.schema import WandbConfig
from training.reporting.jsonl import RowFile

if TYPE_CHECKING:
    from lens.snapshots import Snapshot


class Tracker:
    """Writes metrics.jsonl and logs to a W&B run; for rank 0.

    settings: the complete configuration as plain values, shown on the dashboard.
    run_id: the id of the W&B run to resume, or None for a new one.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, settings: dict, run_id: str | None = None
    ):
        self.folder = folder
        self.log_model_of = config.log_model
        self.rows = RowFile(folder / "metrics.jsonl")
        self.wandb = NoTracker()
        if config.wanted() != "disabled":
            # Otherwise W&B sends reports of its own errors to its makers, in offline runs too.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            with best_effort("W&B: not started; metrics are in metrics.jsonl"):
                from training.reporting.wandb_run import WandbRun  # imports wandb

                self.wandb = WandbRun(config, folder, settings, run_id)

    @property
    def run_id(self) -> str | None:
        """The id of the W&B run, needed to resume it; None when W&B is off."""
        return self.wandb.run_id

    def where(self) -> str | None:
        """The URL of the dashboard, or the command that uploads an offline run."""
        return self.wandb.where()

    def log(
        self,
        metrics: dict[str, float],
        step: int,
        snapshot: "Snapshot | None" = None,
        sample: dict | None = None,
    ) -> None:
        """Logs one row: the metrics of a step, an attention snapshot (its files are in the run's
        directory) and a sample (a row of samples.jsonl).

        Call it once for each step, in order: W&B drops rows of earlier steps.
        """
        if snapshot:
            metrics = metrics | snapshot.metrics
        files = snapshot.pictures | snapshot.pages if snapshot else {}
        row = {"step": step} | {key: _json_value(value) for key, value in metrics.items()}
        row |= {key: str(path.relative_to(self.folder)) for key, path in files.items()}
        if len(row) > 1:
            self.rows.append(row)
        self.wandb.log(metrics, step, snapshot, sample)

    def summary(self, values: dict[str, float]) -> None:
        """Sets values of the dashboard's table of runs."""
        self.wandb.summary(values)

    def alert(self, title: str, text: str, level: str) -> None:
        """Sends a message through W&B if wandb.alerts is set. level: WARN or ERROR."""
        self.wandb.alert(title, text, level)

    def log_model(self, best_step: int | None) -> str | None:
        """Uploads the model that wandb.log_model asks for; returns its name on W&B, or None.

        Without a validation there is no best model; then it is the last one.
        """
        if not self.log_model_of or self.run_id is None:
            return None
        from training.checkpoint import format as checkpoint  # imports torch
        from training.checkpoint import listing

        found = {listing.step_of(path): path for path in listing.list_checkpoints(self.folder)}
        step = best_step if self.log_model_of == "best" and best_step in found else max(found)
        state = checkpoint.load_state(found[step])
        aliases = (
            [f"step_{step}"] + ["best"] * (step == best_step) + ["last"] * (step == max(found))
        )
        metadata = {key: getattr(state, key) for key in ("step", "tokens", "val_loss")}
        metadata |= {"settings": {key: state.settings[key] for key in ("model", "data")}}
        files = [found[step] / name for name in checkpoint.OF_MODEL] + [self.folder / CONFIG]
        return self.wandb.log_model(files, aliases, metadata)

    def sync(self) -> None:
        """Flushes the rows to disk."""
        self.rows.sync()

    def finish(self, exit_code: int = 0) -> None:
        """Closes the log and the W&B run; W&B marks it as failed when the code is not 0."""
        self.rows.close()
        self.summary({"exit_code": exit_code})
        self.wandb.finish(exit_code)


class NoTracker:
    """Accepts every call and does nothing: the tracker of other ranks, W&B that is off."""

    run_id = None

    def where(self) -> None: ...

    def log(self, metrics, step, snapshot=None, sample=None) -> None: ...

    def summary(self, values) -> None: ...

    def alert(self, title, text, level) -> None: ...

    def log_model(self, *_) -> None: ...

    def sync(self) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


def _json_value(value: float) -> float | str:
    """NaN and infinity as text: JSON has no numbers for them."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
