"""What a run prints, records and times: console, tracker (metrics.jsonl, W&B), page; and its
training metrics: loss, gradient norm, speed and skipped steps."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.checkpoint.format import State
from clearhead.compute.optimizers import NonFiniteCheck
from clearhead.errors import CUDNN_HINT, DIVERGENCE_HINT, DivergedError, best_effort
from clearhead.output.console import Console
from clearhead.output.play import PLAY_HTML, write_play_page
from clearhead.output.report import RUN_HTML, write_run_page
from clearhead.output.tracker import Tracker
from clearhead.parallel.strategy import Strategy

if TYPE_CHECKING:
    from headlens import Snapshot

MAX_SHARE = 0.01  # of the time of a run: pages that are written while it trains


@dataclass
class RunLog:
    """The output of a run. Ranks other than 0 print and write nothing."""

    directory: Path  # the run directory
    console: Console
    tracker: Tracker
    exclude: Callable[[float], None]  # called with the seconds of work that is not training
    debug: bool  # whether errors of a page end the run
    seconds: dict[str, float] = field(default_factory=dict)  # of validation, samples, ...
    page_step: int = -1  # of the last page
    page_seconds: float = 0.0  # that it took
    page_time: float = 0.0  # when it was written
    logged_step: int = -1  # of the last page on W&B

    @contextlib.contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Adds the duration of the context to the seconds of this work."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.seconds[work] = self.seconds.get(work, 0.0) + seconds
        self.exclude(seconds)

    def log(
        self,
        metrics: dict[str, float],
        step: int,
        snapshot: "Snapshot | None",
        sample: dict | None,
        is_last: bool,
    ) -> None:
        """Logs the metrics of a step, see Tracker.log, and writes the page, which shows them.

        While the run trains, at most one percent of its time is for pages, so one is skipped if the
        last one took more of the time since. W&B gets the first one, those after twice as many
        steps as the last, and the one of the last step."""
        since = time.perf_counter() - self.page_time
        is_due = is_last or self.page_seconds <= MAX_SHARE * since

        def page() -> Path | None:
            path = self.write_page(step, "finished" if is_last else "running")
            if not path or not (is_last or step >= 2 * self.logged_step):
                return None
            self.logged_step = step
            return path

        self.tracker.log(metrics, step, snapshot, sample, page if is_due else None)

    def write_page(self, step: int, state: str) -> Path | None:
        """Writes run.html, on rank 0, and returns its path; None after an error. state: running,
        stopped or finished."""
        if not self.console.is_rank_0:
            return None
        started, path = time.perf_counter(), None
        with best_effort(f"{RUN_HTML}: could not be written", self.debug):
            path = write_run_page(self.directory, state)
        self.page_time, self.page_step = time.perf_counter(), step
        self.page_seconds = self.page_time - started
        return path

    def write_play_page(self) -> None:
        """Writes play.html at the end of a run, on rank 0, if its model is small enough."""
        if not self.console.is_rank_0:
            return
        with best_effort(f"{PLAY_HTML}: could not be written", self.debug):
            write_play_page(self.directory, "finished")


@dataclass
class Metrics:
    """Collects the training metrics between two rows of metrics.jsonl.

    Losses stay on the device until a method reads them, so a training step does not synchronize.
    """

    strategy: Strategy
    nonfinite: NonFiniteCheck
    console: Console  # prints skipped steps
    tokens_per_step: int  # over all ranks
    flops_per_token: float  # forward and backward
    peak_flops: float | None  # of one device in the precision of the run, FLOP/s; None if unknown
    learning_rate: float  # the peak, for the error message of a diverged run
    train_loss: float | None = None  # of the last row

    def __post_init__(self):
        self.start()

    def restore(self, state: State) -> None:
        """Restores the counters of a state."""
        self.nonfinite.restore(state.skipped, state.skipped_in_a_row)

    def store(self, state: State) -> None:
        """Stores losses and counters in the state of a checkpoint. Synchronizes."""
        state.losses = list(self.losses())
        self.check_skipped(state)

    def start(self, losses: list[float] | None = None) -> None:
        """Starts the next row. losses: of steps since the last row, from a checkpoint."""
        self._losses: list[float] = list(losses or [])
        self._on_device: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.steps, self.since = 0, time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Adds a step: loss in nats per token and gradient norm, both of shape () on the device."""
        self._on_device.append(loss)
        self.grad_norm = grad_norm
        self.steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent in the context from the training time."""
        before = time.perf_counter()
        yield
        self.since += time.perf_counter() - before

    def losses(self) -> list[float]:
        """Returns the loss of each step since the last row, averaged over ranks. Synchronizes."""
        on_device, self._on_device = self._on_device, []
        self._losses += self.strategy.all_reduce_mean(on_device)
        return self._losses

    def row(self, state: State, learning_rate: float) -> dict[str, float]:
        """Returns the training metrics since the last row, and starts the next row. Synchronizes
        with the device. learning_rate: of this step.

        train/mfu, if the peak is known, counts the causal half of attention: 0.93 of nanoGPT's
        value for GPT-2 small with windows of 1,024 tokens."""
        losses = self.losses()
        self.check_skipped(state)
        finite = [loss for loss in losses if math.isfinite(loss)]  # others are of skipped steps
        self.train_loss = sum(finite) / len(finite) if finite else math.nan
        speed = self.tokens_per_step * self.steps / (time.perf_counter() - self.since)
        row = {
            "train/loss": self.train_loss,
            "train/learning_rate": learning_rate,
            "train/grad_norm": float(self.grad_norm),
            "train/tokens_per_second": speed,
            "train/skipped_steps": state.skipped,
        }
        if self.peak_flops:
            achieved = self.flops_per_token * speed / self.strategy.world_size
            row["train/mfu"] = achieved / self.peak_flops
        self.start()
        return row

    def check_skipped(self, state: State) -> None:
        """Updates the counters of skipped steps in the state, which are equal on all ranks, and
        reports new ones. Synchronizes. Raises DivergedError after too many consecutive ones."""
        before = state.skipped
        state.skipped, state.skipped_in_a_row, halted = self.nonfinite.read()
        limit = self.nonfinite.limit
        if halted:
            first = state.step - halted + 2 - limit
            limits = f"{limit} consecutive steps"
            reason = f"the loss or gradient has been NaN or inf since step {first} ({limits})"
            hint, strategy = DIVERGENCE_HINT, self.strategy
            may_use_cudnn = strategy.device.type == "cuda" and strategy.precision != "fp32"
            if may_use_cudnn and all(map(math.isfinite, self.losses()[-1:])):
                hint = f"{CUDNN_HINT}; otherwise {hint}"
            raise DivergedError("optimizer.lr", self.learning_rate, reason, hint)
        if state.skipped > before:
            more = state.skipped - before
            which = "skipped" if more == 1 else f"{more} steps were skipped"
            limits = f"consecutive skipped steps: {state.skipped_in_a_row}, the run ends at {limit}"
            reason = f"the loss or gradient is NaN or inf ({limits})"
            self.console.print(f"step {state.step}  {which}: {reason}")
