"""What all datasets of windows have in common, mixtures of datasets, and which windows are read.

The dataset of a text is data.GPTDatasetV1; synthetic.py has generated sequences.

Shapes: B batch, T positions in a window.
"""

from collections.abc import Sized

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from clearhead.tokens.sampler import WindowOrder

IGNORED = -100  # the loss ignores this target (ignore_index of torch's cross_entropy)


class WindowDataset(Dataset):
    """Base class. A subclass defines `batch`, which reads windows on access, and `__len__`."""

    max_length: int  # T
    phases = 1  # versions of each window; an epoch reads one of them (WindowOrder in sampler.py)

    def num_targets(self, windows: int) -> int | None:
        """Returns the number of targets of a number of windows; None if it varies."""
        return None

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Reads several windows: (B,) -> input_ids (B, T), target_ids (B, T), int64.

        Target i is the token after input i, or IGNORED.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int | np.ndarray) -> tuple[Tensor, Tensor]:
        """Reads one window: (input_ids (T,), target_ids (T,)), int64. For an array of B indices,
        both are (B, T)."""
        if isinstance(index, np.ndarray):
            input_ids, target_ids = self.batch(index)
            return input_ids.contiguous(), target_ids.contiguous()  # as Strategy.to_device needs
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} does not exist; there are {len(self)}")
        input_ids, target_ids = self.batch(np.array([index]))
        return input_ids[0], target_ids[0]


class MixedDataset(WindowDataset):
    """The windows of several datasets, numbered consecutively: first those of dataset 0.

    weights: how often each dataset is used, relative to the others (WindowOrder in sampler.py).
    """

    def __init__(self, datasets: list, weights: list[float]):
        self.datasets = datasets
        self.weights = weights
        self.sizes = [len(dataset) for dataset in datasets]
        self.counts = [len(dataset) * dataset.phases for dataset in datasets]
        self.ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return sum(self.sizes)

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        input_ids = torch.empty(len(windows), self.datasets[0].max_length, dtype=torch.int64)
        target_ids = torch.empty_like(input_ids)
        sources = np.searchsorted(self.ends, windows, side="right")
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            local = windows[rows] - (self.ends[source] - self.counts[source])
            input_ids[rows], target_ids[rows] = self.datasets[source].batch(local)
        return input_ids, target_ids

    def num_targets(self, windows: int) -> int | None:
        return self.datasets[0].num_targets(windows)

    def common_tokens(self, limit: int = 1000) -> np.ndarray:
        """Returns the most frequent ids of each dataset, in ascending order."""
        each = [dataset.common_tokens(limit // len(self.datasets)) for dataset in self.datasets]
        return np.unique(np.concatenate(each))


def mixture(datasets: list, weights: list[float] | None):
    """Returns a dataset with the windows of several; the dataset itself if there is only one; None
    for none."""
    if len(datasets) < 2:
        return datasets[0] if datasets else None
    return MixedDataset(datasets, weights)


def words_per_window(dataset, words: np.ndarray) -> float:
    """Returns the mean number of words that training reads in a window of text. words:
    Tokenizer.words."""
    if isinstance(dataset, MixedDataset):
        each = [words_per_window(part, words) for part in dataset.datasets]
        return float(np.average(each, weights=dataset.weights))
    in_epoch = dataset.tokens.num_words(words) * dataset.max_length / dataset.stride
    return in_epoch / len(dataset)


def window_order(dataset: WindowDataset, batch_size: int, seed: int) -> WindowOrder:
    """Returns the order in which training reads the windows of a dataset."""
    if isinstance(dataset, MixedDataset):
        phases = [part.phases for part in dataset.datasets]
        return WindowOrder(dataset.sizes, batch_size, seed, dataset.weights, phases)
    return WindowOrder(len(dataset), batch_size, seed, phases=dataset.phases)


def evenly_spaced_windows(dataset: Sized, limit: int) -> np.ndarray:
    """Returns at most `limit` evenly spaced windows. For a mixture, the number of windows of
    each dataset is about proportional to its weight, and at least one."""
    if not isinstance(dataset, MixedDataset):
        count = min(len(dataset), limit)
        return np.linspace(0, len(dataset) - 1, count).round().astype(np.int64)
    weights = np.array(dataset.weights)
    counts = np.maximum(1, np.round(limit * weights / weights.sum()).astype(int))
    while counts.sum() > max(limit, len(counts)):
        counts[counts.argmax()] -= 1
    offsets = dataset.ends - dataset.sizes
    parts = zip(dataset.datasets, counts.tolist(), offsets, strict=True)
    windows = [evenly_spaced_windows(part, count) + offset for part, count, offset in parts]
    return np.concatenate(windows)
