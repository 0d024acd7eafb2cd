"""The components of a training run in one dataclass, and what it prints when it starts and ends.

Built by training/setup.py; the loop in train.py works on it.
"""

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data import LoadedData
from errors import DivergedError, best_effort, format_error
from model import GPT
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.format import State
from training.checkpoint.resume import resume_command
from training.config.schema import Config
from training.distributed.strategy import Strategy
from training.evaluation import Evaluator
from training.reporting.console import Console
from training.reporting.lens_runner import LensRunner
from training.reporting.metrics import Metrics
from training.reporting.profiler import Profiler
from training.reporting.report import write_report
from training.reporting.tracker import Tracker
from training.signals import StopSignals
from training.translate_errors import translate_errors


@dataclass
class Run:
    """The components of one training run. Made by `build_run`, used by train.py."""

    config: Config
    strategy: Strategy  # device, precision and ranks
    state: State  # what state.json of a checkpoint holds: step, tokens, best loss
    directory: Path
    data: LoadedData
    # Of each step, this rank's micro-batches: ((input_ids, target_ids), number of targets) each.
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
    closing: contextlib.ExitStack  # closes the components, the last opened first

    def is_due(self, every: int) -> bool:
        """Whether something that happens every N steps, and at the last one, happens now."""
        step = self.state.step
        return step == self.config.trainer.max_steps or (every > 0 and step % every == 0)

    def __enter__(self) -> "Run":
        self.signals.phase = "training"
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        """Closes all components: what is being written is finished."""
        if isinstance(error, Exception):
            title = "Diverged" if isinstance(error, DivergedError) else "Failed"
            self.tracker.alert(title, format_error(error), "ERROR")
        if error is not None:
            self.write_report()  # a failed run is one to look at
        self.closing.__exit__(kind, error, trace)

    def translate_errors(self) -> contextlib.AbstractContextManager:
        """A context that raises errors of torch as what they mean to the user."""
        windows = self.evaluator.batch_size
        return translate_errors(self.config, self.strategy, self.checkpointer, windows)

    # ---------------------------------------------------------------------- periodic work

    def evaluate(self) -> dict[str, float]:
        """Validates, prints the result, and returns the metrics."""
        row = self.evaluator.validate(self.model, self.state.step)
        if row:
            self.state.val_loss = row["val/loss"]
            if "val/accuracy" in row:
                text = f"{row['val/accuracy']:.1%} right"
            else:
                text = f"{row['val/bits_per_byte']:.3f} bits per byte"
            step, loss = self.state.step, row["val/loss"]
            self.console.print(f"step {step}  validation loss {loss:.4f}  {text}")
        return row

    def sample(self) -> dict:
        """Samples a text, prints it, and returns its row of samples.jsonl."""
        row = self.evaluator.sample(self.model, self.state.step)
        self.console.print(f"step {row['step']}  sample: {' '.join(row['text'].split())}")
        return row

    def write_report(self) -> None:
        """Writes report.html, on rank 0."""
        if self.strategy.is_rank_0:
            with best_effort("report.html: not written", self.config.debug):
                write_report(self.directory)

    # ------------------------------------------------------------------------ end and stop

    def finish(self, trained_here: bool, seconds: float) -> None:
        """After the last step: waits for the last checkpoint, uploads the model, prints a summary.

        trained_here: whether there was a step to train. seconds: of training.
        """
        self.signals.phase = "finishing"
        state, out, prefix = self.state, self.console, self.strategy.label
        uploaded = None
        if trained_here:
            self.checkpointer.finish(state)
            with best_effort(f"{prefix}W&B: the model was not uploaded", self.config.debug):
                uploaded = self.tracker.log_model(state.best_step)
        self.write_report()
        out.close()
        out.print()
        if (loss := self.metrics.train_loss) is not None:
            out.print(f"training loss    {loss:.4f}  (step {state.step})")
        best = ""
        if state.best_loss is not None:
            best = f"; best {state.best_loss:.4f} at step {state.best_step}"
            self.tracker.summary({"best_val_loss": state.best_loss, "best_step": state.best_step})
        if state.val_loss is not None:
            out.print(f"validation loss  {state.val_loss:.4f}{best}")
        if sample := self.evaluator.last_sample:
            out.print(f"\n{sample}\n")
        out.print(f"run directory    {self.directory}")
        if trained_here:
            waited = f"training waited {self.checkpointer.seconds:.1f} s of {seconds:.0f} s"
            out.print(f"checkpoints      written in the background; {waited}")
        for finding in self.lens.strongest_heads():
            out.print(f"heads            {finding}")
        if (timelapse := self.directory / "attention" / "timelapse.html").is_file():
            share = f"  (attention logging took {self.lens.seconds:.1f} s of {seconds:.0f} s)"
            out.print(f"watch the heads  {timelapse}{share if trained_here else ''}")
        out.print(f"report           {self.directory / 'report.html'}")
        if self.config.trainer.profile:
            out.print(f"profile          {self.directory / 'profile'}")
        prompt = f"prompt={self.config.trainer.sample_prompt}"
        command = shlex.join(["python", "generate.py", f"checkpoint={self.directory}", prompt])
        out.print(f"more text        {command}")
        if uploaded:
            out.print(f"model for W&B    {uploaded}")
        if where := self.tracker.where():
            out.print(f"W&B              {where}")

    def print_stopped(self) -> None:
        """After a signal: where the run was saved and how to resume it."""
        self.console.close()
        if self.strategy.is_rank_0:
            name = signal.Signals(self.signals.received).name
            text = f"stopped by {name} after step {self.state.step}; saved in {self.directory}"
            hint = resume_command(self.directory, is_saved=True)
            print(f"{text}; {hint}", file=sys.stderr)


def print_introduction(run: Run, is_compiled: bool, notes: list[str]) -> None:
    """What a run prints before its first step."""
    config, strategy, trainer, step = run.config, run.strategy, run.config.trainer, run.state.step
    compiled = ", compiled" if is_compiled else ""
    extra = ", activation checkpointing" if trainer.activation_checkpointing else ""
    val, validation = len(run.data.val or ()), run.evaluator.validation
    used = len(validation.windows) if validation else 0
    evaluated = f" ({used:,} of them each time)" if used < val else ""
    share, size = trainer.batch_size // strategy.world_size, run.evaluator.batch_size
    ranks = f", {share} on each of {strategy.world_size} ranks" if strategy.world_size > 1 else ""
    pieces = f", {size} at a time" if size < share else ""
    windows = f"{len(run.data.train):,} windows of {config.data.max_length} tokens to train on"
    out = run.console.print
    out(f"{run.model.num_parameters():,} parameters {strategy.describe()}{compiled}{extra}")
    out(f"{windows}, {val:,} to validate{evaluated}; {trainer.batch_size} a step{ranks}{pieces}")
    for note in (*run.data.notes, *notes):
        out(f"note: {note}")
    out(f"run directory: {run.directory}")
    if where := run.tracker.where():
        out(f"W&B: {where}")
    if step >= trainer.max_steps:
        out(f"finished already, after step {step}; a larger trainer.max_steps continues it")
    elif step > 0:
        out(f"resumed after step {step}")
