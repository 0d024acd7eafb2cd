"""Training metrics: loss, gradient norm, speed, skipped steps and loss spikes."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from errors import DIVERGENCE_HINT, DivergedError
from training.checkpoint.format import State
from training.distributed.strategy import Strategy
from training.optim.optimizers import NonFiniteCheck
from training.reporting.console import Console
from training.reporting.tracker import Tracker


@dataclass
class Metrics:
    """What is measured between two rows of the log.

    Losses stay on the device until `row` or `check_skipped` reads them: a step waits for nothing.
    """

    strategy: Strategy
    nonfinite: NonFiniteCheck
    console: Console  # shows skipped steps and loss spikes
    tracker: Tracker  # sends alerts of them
    tokens_per_step: int  # over all ranks
    flops_per_token: float  # forward and backward
    peak_flops: float | None  # of one device, in FLOP/s; None when unknown
    learning_rate: float  # the peak, for the error of a diverged run
    train_loss: float | None = None  # of the last row

    def __post_init__(self):
        self.start()

    def restore(self, state: State, forget_skipped: bool) -> None:
        """Continues the counts of a state. forget_skipped: begins the count of consecutive skipped
        steps at 0, because a setting was changed that may help."""
        in_a_row = 0 if forget_skipped else state.skipped_in_a_row
        self.nonfinite.restore(state.skipped, in_a_row)

    def store(self, state: State) -> None:
        """Writes what a resumed run needs into the state of a checkpoint; waits for the device."""
        state.losses = list(self.losses())
        self.check_skipped(state)

    def start(self, losses: list[float] | None = None) -> None:
        """Starts the next row. losses: of the steps since the last row before a resume."""
        self._losses: list[float] = list(losses or [])
        self._on_device: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.steps, self.since = 0, time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Adds a step: its loss in nats per token and gradient norm, both () on the device."""
        self._on_device.append(loss)
        self.grad_norm = grad_norm
        self.steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time spent inside does not count as training time."""
        before = time.perf_counter()
        yield
        self.since += time.perf_counter() - before

    def losses(self) -> list[float]:
        """The loss of each step since the last row, averaged over ranks; waits for the device."""
        on_device, self._on_device = self._on_device, []
        self._losses += self.strategy.all_reduce_mean(on_device)
        return self._losses

    def row(self, state: State, learning_rate: float) -> dict[str, float]:
        """The row of the log: metrics since the last row. Waits for the device; starts the next
        row. learning_rate: of this step."""
        losses = self.losses()
        self.check_skipped(state)
        finite = [loss for loss in losses if math.isfinite(loss)]  # the others were skipped
        self.train_loss = sum(finite) / len(finite) if finite else math.nan
        spikes_before = state.spikes.count
        z_scores = [z for loss in losses if (z := state.spikes.add(loss)) is not None]
        if state.spikes.count > spikes_before:
            rise = f"the loss rose to {max(finite):.2f}, far above those before"
            self.notify("Loss spike", f"step {state.step}: {rise}")
        speed = self.tokens_per_step * self.steps / (time.perf_counter() - self.since)
        row = {
            "train/loss": self.train_loss,
            "train/learning_rate": learning_rate,
            "train/grad_norm": float(self.grad_norm),
            "train/tokens_per_second": speed,
            "train/skipped_steps": state.skipped,
            "train/loss_spikes": state.spikes.count,
        }
        if z_scores:
            row["train/loss_z_score"] = max(z_scores)
        if self.peak_flops:
            achieved = self.flops_per_token * speed / self.strategy.world_size
            row["train/mfu"] = achieved / self.peak_flops
        self.start()
        return row

    def notify(self, title: str, text: str) -> None:
        self.console.print(text)
        self.tracker.alert(title, text, "WARN")

    def check_skipped(self, state: State) -> None:
        """Counts skipped steps into the state; all ranks skip the same steps. Waits for the device.

        Raises DivergedError after too many consecutive ones.
        """
        before = state.skipped
        state.skipped, state.skipped_in_a_row, halted = self.nonfinite.read()
        limit = self.nonfinite.limit
        if halted:
            first = state.step - halted + 2 - limit
            times = f"{limit} in a row" if limit > 1 else "on_nonfinite"
            reason = f"the loss or gradient of step {first} is NaN or inf ({times})"
            raise DivergedError("optimizer.lr", self.learning_rate, reason, DIVERGENCE_HINT)
        if state.skipped > before:
            more = state.skipped - before
            which = f"step {state.step}" if more == 1 else f"{more} steps up to {state.step}"
            limits = f"{state.skipped_in_a_row} in a row, {limit} end the run"
            text = f"{which} skipped: the loss or gradient is NaN or inf ({limits})"
            self.notify("Steps skipped", text)
