"""Experiment tracking: writes metrics.jsonl and samples.jsonl, and logs to W&B if it is enabled.

The statistics of single heads, their histograms and the table of heads are logged only to W&B; on
disk they are in attention/statistics.jsonl and attention/heads.csv.

An error of W&B never ends or blocks the training. Calls that may wait have a timeout. After an
error or a timeout, the tracker prints a line on stderr and writes only to disk. docs/wandb.md
describes the dashboard.

A killed process loses the rows that W&B has not written to its record (offline: those of the last
FLUSH_SECONDS, see wandb_process.py) or sent to the server (online: those of the last 15 seconds).
The resumed run logs the steps that it computes again, so only rows from before its checkpoint stay
lost on W&B, and pictures of an online run whose upload was interrupted. The run directory has all
of them.
"""

import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.checkpoint.run_directory import CONFIG_YAML
from clearhead.config.schema import WandbConfig
from clearhead.files import RowFile
from clearhead.output import wandb_process
from clearhead.output.report import sample_page
from clearhead.output.wandb_process import (
    call_with_timeout,
    cause,
    define_metrics,
    next_step,
    say,
    start_run,
    teardown,
)
from headlens import wandb_values

if TYPE_CHECKING:
    from headlens import Snapshot


class Tracker:
    """Writes metrics.jsonl and samples.jsonl, and logs to a W&B run. For rank 0.

    settings: all settings as plain values, for the dashboard.
    run_id: the id of the W&B run to resume, or None for a new one.
    The attribute `run` is the W&B run; None if W&B is off.
    """

    def __init__(
        self, config: WandbConfig, folder: Path, settings: dict, run_id: str | None = None
    ):
        self.folder, self.config = folder, config
        self.rows = RowFile(folder / "metrics.jsonl")
        self.samples = RowFile(folder / "samples.jsonl")
        self.first_step = 0  # the first step that W&B does not have
        self.run, self.is_shared = None, False  # with a W&B run that the user has open
        self.stopped: str | None = None  # why logging stopped
        if config.mode == "disabled":
            return
        # Otherwise W&B sends reports of its errors to its developers, even in offline runs.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb  # takes 0.5 s; a broken installation must not end the run

            self.wandb = wandb
            self.is_shared = bool(wandb.sdk.wandb_setup.singleton().most_recent_active_run)
            given = wandb, config, folder, settings, run_id, self.is_shared
            seconds = wandb_process.START_SECONDS + 2 * wandb_process.CALL_SECONDS
            self.run = call_with_timeout(seconds, lambda: start_run(*given))
        except Exception as error:
            self._stop_logging(error)
        self._call(define_metrics)
        if self.run:  # it may have been started before
            try:
                seconds = wandb_process.CALL_SECONDS
                self.first_step = call_with_timeout(seconds, lambda: next_step(self.run))
            except Exception as error:
                say(f"steps that are computed again may be shown twice ({cause(error)})")

    @property
    def run_id(self) -> str | None:
        """Returns the id of the W&B run, which is needed to resume it; None without a run."""
        return self.run.id if self.run else None

    def where(self) -> str | None:
        """Returns the URL of the dashboard, or the command that uploads an offline run or, after an
        error, what was recorded. None without W&B."""
        if self.run is None:
            return self.stopped
        if self.run.offline:
            folder = _wandb_folder(self.run).parent
            command, where = "wandb sync", f"{shlex.quote(str(folder))}/offline-run-*"
            # `wandb sync` of several parts stops at the incomplete record of a killed run.
            if len([*folder.glob("offline-run-*")]) > 1:
                command, where = "for part in", f'{where}; do wandb sync "$part"; done'
            return f"recorded offline; upload with: {command} {where}"
        return self.run.url

    def log(
        self,
        metrics: dict[str, float],
        step: int,
        snapshot: "Snapshot | None" = None,
        sample: dict | None = None,
        page: Callable[[], Path | None] | None = None,
    ) -> None:
        """Logs the metrics of a step. snapshot: an attention snapshot, whose files are in the run
        directory. sample: a row of samples.jsonl. page(): writes the page of the run, which shows
        these metrics, and returns its path if W&B gets it. W&B has a hard link to the file: the
        next page must replace it, not overwrite it.

        Call it at most once for each step, in order: W&B drops rows of earlier steps.
        """
        row: dict[str, object] = {"step": step}
        if snapshot:
            metrics = metrics | snapshot.metrics
        row |= {key: _json_value(value) for key, value in metrics.items()}
        if snapshot:
            row |= {
                key: [path.relative_to(self.folder).as_posix() for path in paths]
                for key, paths in snapshot.images.items()
            }
        if len(row) > 1:
            self.rows.append(row)
        if sample:
            self.samples.append(sample)
        path = page() if page else None
        # W&B would give a step that it has, and all later ones, another number.
        if step < self.first_step:
            return

        def log_to(run) -> None:
            media = wandb_values(snapshot, say) if snapshot else {}
            # inject=False: by default W&B adds a stylesheet from its server to a page.
            if sample:
                text, options = sample_page(sample), {"inject": False, "data_is_not_path": True}
                media["samples/text"] = self.wandb.Html(text, **options)
            if path:
                media["attention/page"] = self.wandb.Html(str(path), inject=False)
            # commit: otherwise W&B records the row at the next step. W&B names the files of media
            # after the step of the last call.
            run.log(metrics, step=step, commit=not media)
            if media:
                run.log(media, step=step, commit=True)

        self._call(log_to)

    def summary(self, values: dict[str, float]) -> None:
        """Sets summary values, the columns in the table of runs on the dashboard."""
        self._call(lambda run: run.summary.update(values))

    def log_model(self, best_step: int | None) -> str | None:
        """Uploads the model of wandb.log_model (best or last); returns its name on W&B, or None.

        Without validation there is no best model, and the last model is uploaded.
        """
        if self.run is None or not self.config.log_model:
            return None
        from clearhead.checkpoint import format as checkpoint  # imports torch
        from clearhead.checkpoint import listing

        found = {listing.step_of(path): path for path in listing.list_checkpoints(self.folder)}
        step = best_step if self.config.log_model == "best" and best_step in found else max(found)
        state = checkpoint.load_state(found[step])
        names = {"best": best_step, "last": max(found)}
        aliases = [f"step_{step}", *(name for name, at in names.items() if at == step)]
        metadata = {key: getattr(state, key) for key in ("step", "tokens", "val_loss")}
        metadata |= {"settings": {key: state.settings[key] for key in ("model", "data")}}
        files = [found[step] / name for name in checkpoint.MODEL_FILES]
        files = [file for file in files if file.exists()] + [self.folder / CONFIG_YAML]
        return self.upload(files, aliases, metadata)

    def upload(self, files: list[Path], aliases: list[str], metadata: dict) -> str | None:
        """Uploads a version of the run's model and waits for it; returns its name, or None.

        The parameters are not copied: they are uploaded from the checkpoint, also by `wandb sync`.
        """
        if (run := self.run) is None:
            return None
        name = f"model-{run.id}"
        seconds = max(wandb_process.MODEL_SECONDS, run.settings.finish_timeout)

        def upload() -> None:
            artifact = self.wandb.Artifact(name, type="model", metadata=metadata)
            for file in files:
                policy = "immutable" if file.suffix == ".safetensors" else "mutable"
                artifact.add_file(str(file.resolve()), policy=policy, skip_cache=True)
            logged = run.log_artifact(artifact, aliases=aliases)
            if not run.offline:
                logged.wait(timeout=seconds)

        try:
            call_with_timeout(seconds + wandb_process.CALL_SECONDS, upload)
        except Exception as error:
            command = f"wandb artifact put --type model --name {run.entity}/{run.project}/{name}"
            folder = shlex.quote(str(files[0].parent))
            say(f"the model was not uploaded ({cause(error)}); upload with: {command} {folder}")
            return None
        return name

    def sync(self) -> None:
        """Flushes the rows to disk."""
        self.rows.sync()
        self.samples.sync()

    def finish(self, exit_code: int = 0) -> None:
        """Closes the logs and ends the W&B run after its last uploads. With an exit code other than
        0, W&B marks the run as failed."""
        self.rows.close()
        self.samples.close()
        self.summary({"exit_code": exit_code})
        if self.run:
            seconds = wandb_process.CALL_SECONDS + self.run.settings.finish_timeout
            self._call(lambda run: run.finish(exit_code=exit_code), seconds)
        if self.run:  # finish has not failed
            self.run = None
            self._teardown()

    def _call(self, action: Callable, seconds: float | None = None) -> None:
        """Calls action(run). After an error or a timeout, the W&B run is not used again."""
        if self.run is None:
            return
        try:
            seconds = seconds or wandb_process.CALL_SECONDS
            call_with_timeout(seconds, lambda: action(self.run))
        except Exception as error:
            self._stop_logging(error)

    def _stop_logging(self, error: Exception) -> None:
        run, self.run = self.run, None
        what = f"logging stopped ({cause(error)}); all metrics are in metrics.jsonl"
        if run:
            record = shlex.quote(str(_wandb_folder(run)))
            what += f"; upload what was recorded with: wandb sync --include-online {record}"
            self.stopped = what
        say(what)
        self._teardown()

    def _teardown(self) -> None:
        if not self.is_shared:
            teardown()


class NoTracker(Tracker):
    """Logs nothing: for ranks other than 0, and for a run that is already finished."""

    def __init__(self): ...

    def _nothing(self, *_, **__) -> None: ...

    run_id = property(_nothing)
    log = log_model = summary = sync = finish = where = _nothing


def _wandb_folder(run) -> Path:
    """Returns the directory of a W&B run: in the run directory, or temporary after an error."""
    return Path(run.dir).parent


def _json_value(value: float) -> float | str:
    """Returns NaN and infinity as strings: JSON has no such numbers."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
