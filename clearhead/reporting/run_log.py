"""What a run prints, records and times: console, tracker (metrics.jsonl, W&B), profiler, report."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import Start, longer
from clearhead.config.schema import Config
from clearhead.errors import best_effort, format_error
from clearhead.files import script_path
from clearhead.reporting.console import Console
from clearhead.reporting.profiler import Profiler
from clearhead.reporting.report import write_report
from clearhead.reporting.summary import write_summary
from clearhead.reporting.tracker import Tracker


@dataclass
class RunLog:
    """The output of a run. Ranks other than 0 print and write nothing."""

    directory: Path  # the run directory
    console: Console
    tracker: Tracker
    profiler: Profiler
    exclude: Callable[[float], None]  # called with the seconds of work that is not training
    debug: bool  # whether errors of a report end the run
    seconds: dict[str, float] = field(default_factory=dict)  # of validation, samples, ...

    @contextlib.contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Adds the duration of the context to the seconds of this work."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds
        self.exclude(seconds)

    def validation(self, step: int, row: dict[str, float]) -> None:
        """Prints validation metrics."""
        text = f"step {step}  validation loss {row['val/loss']:.4f}"
        if "val/accuracy" in row:
            text += f"  accuracy {row['val/accuracy']:.1%}"
        if "val/bits_per_byte" in row:
            text += f"  {row['val/bits_per_byte']:.3f} bits per byte"
        self.console.print(text)

    def sample(self, row: dict) -> None:
        """Prints a text sample, a row of samples.jsonl."""
        self.console.print(f"step {row['step']}  sample: {' '.join(row['text'].split())}")

    def write_report(self) -> None:
        """Writes report.html, on rank 0."""
        if self.console.is_rank_0:
            with best_effort("report.html: could not be written", self.debug):
                write_report(self.directory)

    def failed(self, title: str, error: Exception) -> None:
        """Sends an alert about an error that ends the run."""
        self.tracker.alert(title, format_error(error), "ERROR")

    # ------------------------------------------------------------------- start and end of a run

    def introduce(
        self, config: Config, state: State, start: Start, facts: list[str], notes: list[str]
    ) -> None:
        """Prints facts, notes, run directory and first step before the training starts."""
        out, step = self.console.print, state.step
        for fact in facts:
            out(fact)
        for note in notes:
            out(f"note: {note}")
        out(f"run directory: {self.directory}")
        if where := self.tracker.where():
            out(f"W&B: {where}")
        if start.was_finished:
            out(f"already finished after step {step}; to train further, use {longer(config, step)}")
        elif step > 0 and start.in_place:
            out(f"resuming after step {step}")
        elif step > 0:
            out(f"branch of {config.trainer.resume}, starting after step {step}")

    def finish(
        self,
        config: Config,
        state: State,
        started: float,
        seconds: float,
        train_loss: float | None,
        saving_seconds: float | None,
        about_heads: list[str],
    ) -> None:
        """Uploads the model, prints a summary, ends the W&B run, and writes the report and, at the
        very end, summary.json: a run without it is finished by its next start.

        started: the time.monotonic() at the start of the process. seconds: of the training.
        train_loss: of the last row. saving_seconds: for which saving blocked training; None if the
        run was finished before. about_heads: lines about the attention heads.
        """
        out, folder, uploaded = self.console, self.directory, None
        seconds_of = self.seconds | {"training": seconds - sum(self.seconds.values())}
        with best_effort("W&B: the model was not uploaded", self.debug):
            uploaded = self.tracker.log_model(state.best_step)
        self.write_report()
        out.close()
        out.print()
        if train_loss is not None:
            out.print(f"training loss    {train_loss:.4f}  (step {state.step})")
        best = ""
        if state.best_loss is not None:
            best = f"  (best: {state.best_loss:.4f} at step {state.best_step})"
            self.tracker.summary({"best_val_loss": state.best_loss, "best_step": state.best_step})
        if state.val_loss is not None:
            out.print(f"validation loss  {state.val_loss:.4f}{best}")
        out.print(f"run directory    {folder}")
        if saving_seconds is not None:
            waited = f"saving blocked training for {saving_seconds:.1f} s"
            out.print(f"checkpoints      {folder / 'checkpoints'}  ({waited})")
            parts = [f"{work} {s:.1f} s ({s / seconds:.1%})" for work, s in seconds_of.items()]
            out.print(f"time             {seconds:.0f} s: {', '.join(parts)}")
        for line in about_heads:
            out.print(line)
        if (timelapse := folder / "attention" / "timelapse.html").is_file():
            out.print(f"attention page   {timelapse}")
        out.print(f"report           {folder / 'report.html'}")
        if config.trainer.profile:
            out.print(f"profile          {folder / 'profile'}")
        prompt = f"prompt={config.trainer.sample_prompt}"
        command = shlex.join(["python", script_path("generate.py"), f"checkpoint={folder}", prompt])
        out.print(f"generate text    {command}")
        if uploaded:
            out.print(f"W&B model        {uploaded}")
        if where := self.tracker.where():
            out.print(f"W&B              {where}")
        self.tracker.finish()
        if saving_seconds is not None and out.is_rank_0:
            with best_effort("summary.json: could not be written", self.debug):
                write_summary(folder, config, state, started, seconds_of)
