"""Batches of the training run, on the device, gathered while the step before is computed."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from order import WindowOrder
    from training.parallel import Parallel


class Feed:
    """This rank's micro-batches of any step.

    dataset: gather(windows) -> tensors as they are stored, pinned and sent to the device as such;
    expand(*tensors) -> (input_ids (B, T), target_ids (B, T)) there, targets that do not count
    being negative; num_targets(*tensors) -> how many do. micro_batch_size: windows at once; None:
    the whole share of this rank.

    The next step's batches are gathered in a thread of their own. Nothing depends on it: which
    windows a step has, its number tells.
    """

    def __init__(
        self, dataset, order: "WindowOrder", micro_batch_size: int | None, parallel: "Parallel"
    ):
        self.dataset = dataset
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.parallel = parallel
        self._thread = ThreadPoolExecutor(1, "feed")
        self._next: tuple[int, Future] | None = None  # (step, its micro-batches)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor, float]]:
        """(input_ids, target_ids, the share of the step's targets that are in it), each."""
        ahead, future = self._next or (None, None)
        if ahead != step:
            future = self._thread.submit(self._gather, step)
        self._next = step + 1, self._thread.submit(self._gather, step + 1)
        for tensors, share in future.result():
            yield *self.dataset.expand(*self.parallel.to_device(*tensors)), share

    def _gather(self, step: int) -> list[tuple[list[Tensor], float]]:
        windows = self.order.windows(step, self.parallel.rank, self.parallel.world_size)
        size = self.micro_batch_size or len(windows)
        parts = [windows[first : first + size] for first in range(0, len(windows), size)]
        gathered = [self.dataset.gather(part) for part in parts]
        counts = [self.dataset.num_targets(*tensors) for tensors in gathered]
        pinned = [self.parallel.pinned(*tensors) for tensors in gathered]
        return [(tensors, n / sum(counts)) for tensors, n in zip(pinned, counts, strict=True)]
