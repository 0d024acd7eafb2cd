"""Batches of training: as they are stored, read ahead, and split into micro-batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class StoredBatches(Dataset):
    """A dataset whose batches stay as they are stored, two bytes a token."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, windows: np.ndarray) -> tuple[Tensor, ...]:
        return self.dataset.gather(windows)


def read_ahead(batches: Iterator) -> Iterator:
    """The same batches, each read by a thread while the one before it is used."""
    thread = ThreadPoolExecutor(1, "data")
    # The thread gets no OpenMP threads: while these exist, those of training synchronize more
    # slowly (a step of GPT-2 small on two cores took a tenth longer,
    # benchmarks/results/2026-11-22-saving-cpu.json). set_num_threads also sets the number that
    # later threads start with, so it is set back.
    num_threads = thread.submit(torch.get_num_threads).result()
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(num_threads)
    end = object()
    ahead = thread.submit(next, batches, end)
    while (batch := ahead.result()) is not end:
        ahead = thread.submit(next, batches, end)
        yield batch


def split_batch(
    dataset, batch: Sequence[Tensor], micro_batch_size: int | None
) -> list[tuple[Sequence[Tensor], int]]:
    """A stored batch as micro-batches of at most micro_batch_size windows, each with the number of
    its targets. None: the whole batch."""
    size = micro_batch_size or len(batch[0])
    parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
    return [(part, dataset.num_targets(*part)) for part in parts]
