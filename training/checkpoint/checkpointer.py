"""The checkpoints of a training run: which step is saved, which one is the best, what to resume.

`Checkpointer` is a component of a run on every rank; rank 0's writes in the background with a
`Saver` (saver.py). The files are described in format.py.
"""

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import NotSavedError
from model import GPT
from training.checkpoint import format as checkpoint
from training.checkpoint import listing
from training.checkpoint.resume import resume_command
from training.checkpoint.saver import Saver
from training.checkpoint.tensors import collect
from training.distributed.strategy import Strategy
from training.planning.micro_batch import spare_memory


@dataclass
class Checkpointer:
    """Saves the state of a run, on all ranks together."""

    directory: Path  # of the run
    saver: Saver | None  # writes on rank 0; None on the others
    strategy: Strategy
    model: GPT
    optimizer: torch.optim.Optimizer
    seconds: float = 0.0  # that training has waited for checkpoints
    _best_before: tuple[float | None, int | None] = (None, None)

    def update_best(self, state: checkpoint.State, val_loss: float) -> bool:
        """Whether this validation loss is the lowest so far; the state then says so."""
        self.wait(state)  # the best one so far may turn out not to be on disk
        if val_loss >= (math.inf if state.best_loss is None else state.best_loss):
            return False
        self._best_before = state.best_loss, state.best_step
        state.best_loss, state.best_step = val_loss, state.step
        return True

    def save(self, state: checkpoint.State, is_last: bool) -> None:
        """Saves this step. The files are written while training continues, if the host has memory
        for a copy of the tensors. is_last: nothing is trained after it, so no copy is needed."""
        state.scaler = self.strategy.scaler.state_dict() or None
        # Where the parameters are on the host, a copy of them must leave room for a step. Rank 0
        # makes the copy and knows whether training waits.
        needed = 12 * self.model.num_parameters()
        copy = self.strategy.device.type != "cpu" or spare_memory() > 2 * needed
        copy, is_last = self.strategy.broadcast([copy, is_last])
        tensors = collect(self.model, self.optimizer, self.strategy, copy and not is_last)
        if self.saver:
            self.saver.save(tensors, state)
        if not copy and not is_last:
            self.wait(state)

    def wait(self, state: checkpoint.State) -> int:
        """Waits until no checkpoint is being written; returns the step of the last one that is on
        disk for certain, 0 without.

        A checkpoint that could not be written is a warning, since the next may succeed.
        """
        saved, failed = self._wait(state)
        if failed and self.strategy.is_rank_0:
            print(f"{failed}; training continues", file=sys.stderr)
        return saved

    def finish(self, state: checkpoint.State) -> None:
        """Waits for the last checkpoint. Raises NotSavedError if it could not be written."""
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

    # ------------------------------------------------------------ after an error, on any rank

    def newest_step(self) -> int:
        """The step of the newest checkpoint, once the pending one is written; 0 without one."""
        if self.saver:
            with contextlib.suppress(Exception):
                self.saver.wait()
        return listing.newest_step(self.directory)

    def describe(self) -> str:
        """Which checkpoint is intact."""
        step = self.newest_step()
        return f"the checkpoint of step {step} is intact" if step else "there is no checkpoint yet"

    def how_to_resume(self) -> str:
        """The command that resumes the run."""
        return resume_command(self.directory) if self.newest_step() else "rerun the same command"
