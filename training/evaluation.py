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
    from training.distributed.strategy import Strategy


class Validation:
    """Some windows of a data set.

    dataset: anything with batch(windows) -> (input_ids, target_ids), targets that do not count
    being negative. bytes_per_token(token ids) says how many bytes of text a token of these stands
    for on average; None where the share of right answers is asked for instead.
    """

    def __init__(
        self,
        dataset,
        windows: np.ndarray,
        bytes_per_token: Callable[[np.ndarray], float] | None,
    ):
        self.dataset = dataset
        self.windows = windows
        self.bytes_per_token = None
        if bytes_per_token:
            _, targets = dataset.batch(windows)
            self.bytes_per_token = bytes_per_token(targets[targets >= 0].numpy())

    def run(
        self, model: torch.nn.Module, parallel: "Strategy", batch_size: int
    ) -> tuple[float, float | None]:
        """(mean loss in nats over all targets; share of right answers, where that is asked for).

        The ranks share the windows out, and all know the result.
        """
        total, right, count = 0.0, 0, 0
        mine = self.windows[parallel.rank :: parallel.world_size]
        most = -(-len(self.windows) // parallel.world_size)  # of the rank that has most
        with parallel.inference(model):
            for first in range(0, most, batch_size):
                windows = mine[first : first + batch_size]
                # A sharded model computes on all ranks or on none: one that has nothing left
                # computes something, and leaves it uncounted.
                counts = len(windows) > 0
                input_ids, target_ids = self.dataset.batch(windows if counts else self.windows[:1])
                targets = counts * int((target_ids >= 0).sum())
                input_ids, target_ids = parallel.to_device(input_ids, target_ids)  # (B, T)
                _, loss = model(input_ids, target_ids)
                total, count = total + loss * targets, count + targets
                if self.bytes_per_token is None:
                    logits, _ = model(input_ids)  # (B, T, V)
                    right += counts * int((logits.argmax(-1) == target_ids).sum())
        total, right, count = parallel.all_reduce_sum(parallel.item(total), right, count)
        return total / count, (right / count if self.bytes_per_token is None else None)

    def metrics(self, loss: float, accuracy: float | None) -> dict[str, float]:
        """The row of the log."""
        if accuracy is not None:
            return {"val/loss": loss, "val/accuracy": accuracy}
        return {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}
