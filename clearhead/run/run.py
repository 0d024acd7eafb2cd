"""The components of a training run as one dataclass, and the output at its start and end.

`build_run` (run/build.py) creates a Run; `fit` (train.py) trains it.
"""

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clearhead.checkpoint.checkpointer import Checkpointer
from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import Start, longer, resume_command
from clearhead.config.schema import Config
from clearhead.distributed.strategy import Strategy
from clearhead.errors import DivergedError, best_effort, format_error
from clearhead.reporting.console import Console
from clearhead.reporting.metrics import Metrics
from clearhead.reporting.profiler import Profiler
from clearhead.reporting.report import write_report
from clearhead.reporting.tracker import Tracker
from clearhead.run.evaluation import Evaluator
from clearhead.run.exchange import Exchange
from clearhead.run.lens_runner import LensRunner
from clearhead.run.signals import StopSignals
from clearhead.run.summary import write_summary
from clearhead.run.time_limit import TimeLimit
from clearhead.run.translate_errors import translate_errors
from data import LoadedData
from model import GPT


@dataclass
class Run:
    """The components of one training run."""

    config: Config
    strategy: Strategy  # device, precision and ranks
    state: State  # step, tokens, best loss, ...; a checkpoint stores it as state.json
    directory: Path
    data: LoadedData
    # For each step the micro-batches of this rank: ((input_ids, target_ids), number of targets).
    batches: Iterator[list[tuple[Sequence[torch.Tensor], int]]]
    model: GPT  # evaluated, saved and read by the lens
    trained_model: torch.nn.Module  # the same parameters, possibly wrapped and compiled
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[..., float]  # (step, peak) -> rate
    metrics: Metrics
    evaluator: Evaluator
    lens: LensRunner
    checkpointer: Checkpointer
    tracker: Tracker
    console: Console
    profiler: Profiler
    signals: StopSignals
    exchange: Exchange
    limit: TimeLimit
    closing: contextlib.ExitStack  # closes the components, the last opened first
    seconds: dict[str, float] = field(default_factory=dict)  # of validation, samples, ...

    def is_due(self, every: int) -> bool:
        """Returns whether this is the last step, or a multiple of `every` if that is not 0."""
        step = self.state.step
        return step == self.config.trainer.max_steps or (every > 0 and step % every == 0)

    def __enter__(self) -> "Run":
        self.signals.phase = "training"
        self.limit.start()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        """Closes all components; pending writes are completed."""
        if isinstance(error, Exception):
            title = "Diverged" if isinstance(error, DivergedError) else "Failed"
            self.tracker.alert(title, format_error(error), "ERROR")
        if error is not None:
            self.write_report()  # shows the metrics up to the error
        self.closing.__exit__(kind, error, trace)

    def translate_errors(self) -> contextlib.AbstractContextManager:
        """Returns a context that replaces errors of torch by errors with a message for users."""
        windows = self.evaluator.batch_size
        return translate_errors(self.config, self.strategy, self.checkpointer, windows)

    def check_time_limit(self) -> None:
        """Makes this step the last one if there is no time for another one. The stored settings
        keep the planned number of steps: a resumed run continues to it."""
        trainer, step = self.config.trainer, self.state.step
        if step < trainer.max_steps and self.exchange.is_out_of_time():
            steps = f"the run ends after step {step} of {trainer.max_steps}"
            self.console.print(f"trainer.max_minutes={trainer.max_minutes}: {steps}")
            trainer.max_steps = self.tracker.last_step = step

    # ---------------------------------------------------------------------- periodic work

    @contextlib.contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Adds the duration of the context to the seconds of this work."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds
        self.limit.exclude(seconds)

    def evaluate(self) -> dict[str, float]:
        """Computes, prints and returns the validation metrics."""
        with self.timed("validation"):
            row = self.evaluator.validate(self.model, self.state.step)
        if row:
            self.state.val_loss = row["val/loss"]
            if "val/accuracy" in row:
                text = f"accuracy {row['val/accuracy']:.1%}"
            else:
                text = f"{row['val/bits_per_byte']:.3f} bits per byte"
            step, loss = self.state.step, row["val/loss"]
            self.console.print(f"step {step}  validation loss {loss:.4f}  {text}")
        return row

    def sample(self) -> dict:
        """Generates and prints a sample; returns its row of samples.jsonl."""
        with self.timed("samples"):
            row = self.evaluator.sample(self.model, self.state.step)
        self.console.print(f"step {row['step']}  sample: {' '.join(row['text'].split())}")
        return row

    def write_report(self) -> None:
        """Writes report.html, on rank 0."""
        if self.strategy.is_rank_0:
            with best_effort("report.html: could not be written", self.config.debug):
                write_report(self.directory)

    # ------------------------------------------------------------------------ end and stop

    def finish(self, trained_here: bool, seconds: float) -> None:
        """Waits for the last checkpoint, uploads the model and prints a summary.

        trained_here: whether this process trained any step. seconds: the duration of the training.
        """
        self.signals.phase = "finishing"
        state, out, prefix = self.state, self.console, self.strategy.label
        uploaded = None
        seconds_of = self.seconds | {"training": seconds - sum(self.seconds.values())}
        if trained_here:
            self.checkpointer.finish(state)
        if trained_here and self.strategy.is_rank_0:
            with best_effort("summary.json: could not be written", self.config.debug):
                write_summary(self.directory, self.config, state, self.limit.started, seconds_of)
        with best_effort(f"{prefix}W&B: the model was not uploaded", self.config.debug):
            uploaded = self.tracker.log_model(state.best_step)
        self.write_report()
        out.close()
        out.print()
        if (loss := self.metrics.train_loss) is not None:
            out.print(f"training loss    {loss:.4f}  (step {state.step})")
        best = ""
        if state.best_loss is not None:
            best = f"  (best: {state.best_loss:.4f} at step {state.best_step})"
            self.tracker.summary({"best_val_loss": state.best_loss, "best_step": state.best_step})
        if state.val_loss is not None:
            out.print(f"validation loss  {state.val_loss:.4f}{best}")
        out.print(f"run directory    {self.directory}")
        if trained_here:
            waited = f"saving blocked training for {self.checkpointer.seconds:.1f} s"
            out.print(f"checkpoints      {self.directory / 'checkpoints'}  ({waited})")
            parts = [f"{work} {s:.1f} s ({s / seconds:.1%})" for work, s in seconds_of.items()]
            out.print(f"time             {seconds:.0f} s: {', '.join(parts)}")
        for line in self.lens.summary():
            out.print(line)
        if (timelapse := self.directory / "attention" / "timelapse.html").is_file():
            out.print(f"attention page   {timelapse}")
        out.print(f"report           {self.directory / 'report.html'}")
        if self.config.trainer.profile:
            out.print(f"profile          {self.directory / 'profile'}")
        prompt = f"prompt={self.config.trainer.sample_prompt}"
        command = shlex.join(["python", "generate.py", f"checkpoint={self.directory}", prompt])
        out.print(f"generate text    {command}")
        if uploaded:
            out.print(f"W&B model        {uploaded}")
        if where := self.tracker.where():
            out.print(f"W&B              {where}")

    def print_stopped(self) -> None:
        """Prints, after a stop signal, where the checkpoint is and how to resume the run."""
        self.console.close()
        if self.strategy.is_rank_0:
            name = signal.Signals(self.signals.received).name
            folder = self.directory / "checkpoints"
            text = f"stopped by {name} after step {self.state.step}; checkpoint saved in {folder}"
            hint = resume_command(self.directory, is_saved=True)
            print(f"{text}; {hint}", file=sys.stderr)


def print_introduction(run: Run, start: Start, is_compiled: bool, notes: list[str]) -> None:
    """Prints model, data, notes, run directory and first step before the training starts."""
    config, strategy, trainer, step = run.config, run.strategy, run.config.trainer, run.state.step
    compiled = ", compiled" if is_compiled else ""
    extra = ", activation checkpointing" if trainer.activation_checkpointing else ""
    val, validation = len(run.data.val or ()), run.evaluator.validation
    used = len(validation.windows) if validation else 0
    evaluated = f"; each evaluation uses {used:,}" if used < val else ""
    per_rank, size = trainer.batch_size // strategy.world_size, run.evaluator.batch_size
    world = strategy.world_size
    ranks = f", {per_rank} on each of {world} ranks" if world > 1 else ""
    micro = f", in micro-batches of {size}" if size < per_rank else ""
    out = run.console.print
    out(f"model: {run.model.num_parameters():,} parameters {strategy.describe()}{compiled}{extra}")
    out(f"training data: {len(run.data.train):,} windows of {config.data.max_length} tokens")
    out(f"validation data: {val:,} windows{evaluated}")
    out(f"batch size: {trainer.batch_size} windows per step{ranks}{micro}")
    for note in (*run.data.notes, *notes):
        out(f"note: {note}")
    out(f"run directory: {run.directory}")
    if where := run.tracker.where():
        out(f"W&B: {where}")
    if step >= trainer.max_steps:
        out(f"already finished after step {step}; to train further, use {longer(config, step)}")
    elif step > 0 and start.in_place:
        out(f"resuming after step {step}")
    elif step > 0:
        out(f"branch of {trainer.resume}, starting after step {step}")
