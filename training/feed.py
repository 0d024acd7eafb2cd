"""Batches of the training run, on the device, gathered while the step before is computed."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

from training.distributed.device import thread_beside_training

if TYPE_CHECKING:
    from tokens.sampler import WindowOrder
    from training.distributed.strategy import Strategy


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
        self, dataset, order: "WindowOrder", micro_batch_size: int | None, parallel: "Strategy"
    ):
        self.dataset = dataset
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.parallel = parallel
        self._thread = thread_beside_training("feed")
        self._next: tuple[int, Future] | None = None  # (step, its micro-batches)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
        """(input_ids, target_ids, weight, whether more of this step is to come), each.

        The mean loss of a micro-batch, times its weight, is its part of the step's loss: the
        mean over all ranks of the ranks' sums is the mean over all targets of all ranks.
        """
        ahead, future = self._next or (None, None)
        if ahead != step:
            future = self._thread.submit(self._gather, step)
        self._next = step + 1, self._thread.submit(self._gather, step + 1)
        micro_batches = future.result()
        (total,) = self.parallel.all_reduce_sum(sum(count for _, count in micro_batches))
        for number, (tensors, count) in enumerate(micro_batches, start=1):
            weight = count * self.parallel.world_size / total
            on_device = self.dataset.expand(*self.parallel.to_device(*tensors))
            yield *on_device, weight, number < len(micro_batches)

    def _gather(self, step: int) -> list[tuple[list[Tensor], int]]:
        """This rank's micro-batches, and how many targets each has."""
        windows = self.order.windows(step, self.parallel.rank, self.parallel.world_size)
        size = self.micro_batch_size or len(windows)
        parts = [windows[first : first + size] for first in range(0, len(windows), size)]
        gathered = [self.dataset.gather(part) for part in parts]
        counts = [self.dataset.num_targets(*tensors) for tensors in gathered]
        pinned = [self.parallel.pinned(*tensors) for tensors in gathered]
        return list(zip(pinned, counts, strict=True))
