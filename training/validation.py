"""Validation: the loss on windows held back, always the same ones, and what it means.

Bits per byte compare models with different tokenizers; where only some targets can be known
(synthetic sequences mark the others as ignored) the share of right answers says more.

Shapes: B batch, T positions, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from training.parallel import Parallel


class Validation:
    """At most `most` windows of a data set, evenly spread.

    dataset: anything with len() and batch(windows) -> (input_ids, target_ids), targets that do
    not count being negative. bytes_per_token(token ids) says how many bytes of text a token of
    these stands for on average.
    """

    def __init__(self, dataset, most: int, bytes_per_token: Callable[[np.ndarray], float]):
        self.dataset = dataset
        count = min(len(dataset), most)
        self.windows = np.linspace(0, len(dataset) - 1, count).round().astype(int)
        _, targets = dataset.batch(self.windows)
        self.some_ignored = bool((targets < 0).any())
        if not self.some_ignored:
            self.bytes_per_token = bytes_per_token(targets.numpy().ravel())

    def run(
        self, model: torch.nn.Module, parallel: "Parallel", batch_size: int
    ) -> tuple[torch.Tensor, float | None]:
        """(mean loss in nats, on the device; share of right answers, where some are ignored)."""
        total, right = 0.0, 0.0
        with parallel.inference(model):
            for first in range(0, len(self.windows), batch_size):
                windows = self.windows[first : first + batch_size]
                input_ids, target_ids = parallel.to_device(*self.dataset.batch(windows))  # (B, T)
                _, loss = model(input_ids, target_ids)
                total = total + loss * len(windows)
                if self.some_ignored:
                    logits, _ = model(input_ids)  # (B, T, V)
                    hits = (logits.argmax(-1) == target_ids)[target_ids >= 0]
                    right += float(hits.float().mean()) * len(windows)
        count = len(self.windows)
        return total / count, (right / count if self.some_ignored else None)

    def metrics(self, loss: float, accuracy: float | None) -> dict[str, float]:
        """The row of the log."""
        if accuracy is not None:
            return {"val/loss": loss, "val/accuracy": accuracy}
        return {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}
