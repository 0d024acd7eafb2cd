"""Saving the state of a run: collects it from all ranks and tracks the best checkpoint.

`Checkpointer` is a component of a run on every rank. On rank 0 it writes in the background with a
`Saver` (saver.py). format.py describes the files.
"""

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.resume import resume_command
from clearhead.checkpoint.saver import Saver
from clearhead.checkpoint.tensors import collect
from clearhead.errors import NotSavedError
from clearhead.parallel.memory import available_memory
from clearhead.parallel.strategy import Strategy
from model import GPT


@dataclass
class Checkpointer:
    """Saves the state of a run. All ranks call its methods together, except where noted."""

    directory: Path  # the run directory
    saver: Saver | None  # None on ranks other than 0
    strategy: Strategy
    model: GPT
    optimizer: torch.optim.Optimizer
    seconds: float = 0.0  # time for which training waited for checkpoints
    _pins: bool | None = None  # whether copies from a GPU are pinned
    _best_before: tuple[float | None, int | None] = (None, None)

    def update_best(self, state: checkpoint.State, val_loss: float, eval_every: int) -> bool:
        """Stores a validation loss in the state if it is the lowest, and counts it for
        trainer.patience if it is one of those every eval_every steps. Returns whether it is the
        lowest."""
        self.wait(state)  # a best checkpoint that could not be written does not count
        is_best = val_loss < (math.inf if state.best_loss is None else state.best_loss)
        # The end of a run has a validation that a longer run does not have: it does not count.
        if eval_every and state.step % eval_every == 0 and not state.ended_early:
            state.worse_validations = 0 if is_best else state.worse_validations + 1
        if is_best:
            self._best_before = state.best_loss, state.best_step
            state.best_loss, state.best_step = val_loss, state.step
        return is_best

    def save(self, state: checkpoint.State, is_last: bool) -> None:
        """Saves a checkpoint. It is written while training continues if the host has enough memory
        for a copy of the tensors. is_last: no step follows, so no copy is needed."""
        state.scaler = self.strategy.scaler.state_dict() or None
        # When training on the CPU, the copy must leave enough memory for a training step. Pinned
        # memory is kept for the next checkpoint, up to twice the size of the tensors. Rank 0 makes
        # the copy, so it decides.
        has_memory = available_memory() > 24 * self.model.num_parameters()
        if self._pins is None:  # later, the pinned memory is no longer available
            self._pins = self.strategy.device.type == "cuda" and has_memory
        copy = self.strategy.device.type != "cpu" or has_memory
        copy, is_last = self.strategy.broadcast([copy, is_last])
        to_copy = copy and not is_last
        tensors = collect(self.model, self.optimizer, self.strategy, to_copy, self._pins)
        if self.saver:
            self.saver.save(tensors, state)
        if not copy and not is_last:
            self.wait(state)

    def wait(self, state: checkpoint.State) -> int:
        """Waits for the pending checkpoint. Returns the step of the last checkpoint known to be on
        disk, 0 without one. Only warns if writing failed, because the next write may succeed."""
        saved, failed = self._wait(state)
        if failed and self.strategy.is_rank_0:
            print(f"{failed}; training continues", file=sys.stderr)
        return saved

    def finish(self, state: checkpoint.State) -> None:
        """Waits for the pending checkpoint. Raises NotSavedError if it could not be written."""
        _, failed = self._wait(state)
        if failed:
            raise failed

    def _wait(self, state: checkpoint.State) -> tuple[int, NotSavedError | None]:
        started = time.perf_counter()

        def wait() -> tuple[int, int, tuple | None]:
            failed = self.saver.wait()
            return listing.newest_step(self.directory), self.saver.saved, failed and failed.args

        newest, saved, failed = self.strategy.broadcast(self.strategy.on_rank_0(wait))
        if failed and state.best_step is not None and state.best_step > newest:
            state.best_loss, state.best_step = self._best_before
        self.seconds += time.perf_counter() - started
        return saved, failed and NotSavedError(*failed)

    # --------------------------- for error messages; a rank may call these without the others

    def newest_step(self) -> int:
        """Waits for the pending checkpoint; returns the newest checkpoint's step, 0 without one."""
        if self.saver:
            with contextlib.suppress(Exception):
                self.saver.wait()
        return listing.newest_step(self.directory)

    def describe(self) -> str:
        """Returns which checkpoint is intact, for an error message."""
        step = self.newest_step()
        return f"the checkpoint of step {step} is intact" if step else "no checkpoint was saved yet"

    def how_to_resume(self) -> str:
        """Returns how to resume the run, for an error message."""
        return resume_command(self.directory) if self.newest_step() else "rerun the same command"
