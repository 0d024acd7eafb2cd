"""Attention snapshots while training: when they are due, on all ranks, and never in the way."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import best_effort
from lens.snapshots import Lens, Snapshot
from model import GPT
from training.distributed.strategy import Strategy

FAILED = "lens: failed and is off from here on"


@dataclass
class LensRunner:
    """Runs the lens on the model of a training run."""

    lens: Lens | None  # None where it is off
    strategy: Strategy
    directory: Path  # the run's
    max_steps: int
    debug: bool  # whether an error ends the run
    seconds: float = 0.0  # spent on attention so far, logging included

    def is_due(self, step: int) -> bool:
        return self.lens is not None and self.lens.due(step, self.max_steps)

    def snapshot(self, model: GPT, step: int) -> Snapshot | None:
        """What every head does at this step: statistics, pictures and pages.

        All ranks run the model, rank 0 writes the files. After an error on any rank the lens is
        off on all of them, because they run the model together.
        """

        def capture_attention(token_ids: list[int], capture: Callable) -> None:
            input_ids = torch.tensor([token_ids], device=self.strategy.device)
            with self.strategy.probing(model):
                model.capture_attention(input_ids, capture)

        snapshot, failed = None, True
        with best_effort(FAILED, self.debug, self.strategy.label):
            snapshot = self.lens.snapshot(
                capture_attention,
                step,
                self.max_steps,
                self.directory / "attention",
                run_name=self.directory.name,
                write=self.strategy.is_rank_0,
            )
            failed = False
        if self.strategy.all_reduce_max(failed):
            self.lens = None
        return snapshot

    def strongest_heads(self) -> list[str]:
        """Sentences about the heads, for the summary at the end."""
        return list(self.lens.strongest_heads()) if self.lens else []
