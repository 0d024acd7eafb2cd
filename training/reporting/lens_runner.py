"""Takes attention snapshots during training, on all ranks. Their errors do not end the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import best_effort
from files import read_rows
from lens.ablation import Head
from lens.snapshots import Lens, Snapshot
from model import GPT
from training.distributed.strategy import Strategy
from training.reporting.charts import Points, finite, points_of, smooth, thin

CURVES = {
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/accuracy": "validation accuracy",
}
MAX_POINTS = 300  # of a curve
FAILED = "lens: failed; attention logging is off for the rest of this run"


@dataclass
class LensRunner:
    """Takes attention snapshots of the model of a training run."""

    lens: Lens | None  # None if it is off
    strategy: Strategy
    directory: Path  # the run directory
    max_steps: int
    debug: bool  # whether an error ends the run
    # (model, heads by name) -> the loss without each head, see inference/ablation.py; None: off
    ablate: Callable[[GPT, dict[str, list[Head]]], dict] | None
    seconds: float = 0.0  # time spent on attention snapshots and their logging

    def is_due(self, step: int) -> bool:
        return self.lens is not None and self.lens.due(step, self.max_steps)

    def snapshot(self, model: GPT, step: int, row: dict[str, float]) -> Snapshot | None:
        """Takes an attention snapshot: statistics, images and pages. Returns None after an error.

        row: the metrics of this step, which are not in metrics.jsonl yet.

        All ranks run the model, and rank 0 writes the files. After an error on one rank the lens is
        off on all ranks, because they run the model together.
        """

        def capture_attention(token_ids: list[int], capture: Callable) -> torch.Tensor:
            input_ids = torch.tensor([token_ids], device=self.strategy.device)
            with self.strategy.probing(model):
                return model.capture_attention(input_ids, capture, self.lens.config.logit_lens)

        def ablate(groups: dict[str, list[Head]]) -> dict | None:
            with best_effort("lens.ablation: failed", self.debug), self.strategy.probing(model):
                return self.ablate(model, groups)
            return None  # after an error

        snapshot, failed = None, True
        with best_effort(FAILED, self.debug, self.strategy.label):
            snapshot = self.lens.snapshot(
                capture_attention,
                step,
                self.max_steps,
                self.directory / "attention",
                run_name=self.directory.name,
                write=self.strategy.is_rank_0,
                curves=lambda: self._curves(step, row),
                ablate=ablate if self.ablate else None,
            )
            failed = False
        if self.strategy.all_reduce_max(failed):
            self.lens = None
        return snapshot

    def _curves(self, step: int, row: dict[str, float]) -> dict[str, Points]:
        """Returns the curves that the attention page shows, from metrics.jsonl and `row`."""
        rows = [*read_rows(self.directory / "metrics.jsonl"), {"step": step, **row}]
        curves = {}
        for key, name in CURVES.items():
            points = smooth(points_of(rows, key)) if key == "train/loss" else points_of(rows, key)
            if known := thin(finite(points), MAX_POINTS):
                curves[name] = [(at, round(value, 4)) for at, value in known]
        return curves

    def summary(self) -> list[str]:
        """Returns lines about the heads, for the summary at the end of a run."""
        if self.lens is None:
            return []
        significant = [f"attention heads  {text}" for text in self.lens.most_significant_heads()]
        return significant + [f"without heads    {t}" for t in self.lens.most_important_heads()]
