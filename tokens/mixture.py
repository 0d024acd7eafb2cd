"""Several data sets as one, the order in which training takes windows, and evenly spread ones.

Shapes: B batch, T positions in a window.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tokens.sampler import WindowOrder
from tokens.windows import Windows


class MixedDataset(Dataset):
    """The windows of several data sets, numbered consecutively from data set to data set.

    `weights` tells how often each is to be used; WindowOrder mixes them.
    """

    def __init__(self, datasets: list[Windows], weights: list[float]):
        self.datasets = datasets
        self.weights = weights
        self.sizes = [len(dataset) for dataset in datasets]
        self.ends = np.cumsum(self.sizes)
        self.expand, self.num_targets = datasets[0].expand, datasets[0].num_targets

    def __len__(self) -> int:
        return int(self.ends[-1])

    def common_tokens(self, most: int = 1000) -> np.ndarray:
        """The commonest ids of each, in ascending order."""
        each = [dataset.common_tokens(most // len(self.datasets)) for dataset in self.datasets]
        return np.unique(np.concatenate(each))

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Windows of any of them: (B,) -> input_ids (B, T), target_ids (B, T), int64."""
        return self.expand(*self.gather(windows))

    def gather(self, windows: np.ndarray) -> tuple[Tensor, ...]:
        """The same as it is stored, two bytes a token."""
        sources = np.searchsorted(self.ends, windows, side="right")
        ids = None
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            local = windows[mine] - (self.ends[source] - self.sizes[source])
            (part,) = self.datasets[source].gather(local)
            if ids is None:
                ids = part.new_empty(len(windows), part.shape[1])
            ids[torch.from_numpy(mine)] = part
        return (ids,)


def order_of(dataset, batch_size: int, seed: int) -> WindowOrder:
    """The order in which training takes a data set's windows."""
    if isinstance(dataset, MixedDataset):
        return WindowOrder(dataset.sizes, batch_size, seed, dataset.weights)
    return WindowOrder(len(dataset), batch_size, seed)


def evenly(dataset, most: int) -> np.ndarray:
    """At most `most` windows, evenly spread; of a mixture from each source by its weight."""
    if not isinstance(dataset, MixedDataset):
        count = min(len(dataset), most)
        return np.linspace(0, len(dataset) - 1, count).round().astype(np.int64)
    weights = np.array(dataset.weights)
    counts = np.maximum(1, np.round(most * weights / weights.sum()).astype(int))
    while counts.sum() > max(most, len(counts)):
        counts[counts.argmax()] -= 1
    offsets = dataset.ends - dataset.sizes
    parts = zip(dataset.datasets, counts.tolist(), offsets, strict=True)
    return np.concatenate([evenly(part, count) + offset for part, count, offset in parts])
