"""Data sets of windows: of a stream of tokens, across documents or within them, and mixtures.

Shapes: B batch, T positions in a window.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from errors import DataError
from tokens.sampler import WindowOrder
from tokens.stream import TokenStream

IGNORED = -100  # a target that the loss leaves out (torch.nn.functional.cross_entropy)


class WindowDataset(Dataset):
    """Windows that are made when they are asked for; a subclass has `batch` and `__len__`."""

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Several windows at once: (B,) -> input_ids (B, T), target_ids (B, T), int64.

        Target i is the token after input i, or IGNORED.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Window `index` as (input_ids (T,), target_ids (T,)), int64."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        input_ids, target_ids = self.batch(np.array([index]))
        return input_ids[0], target_ids[0]

    def __getitems__(self, windows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Several windows, read at once: torch's DataLoader calls this for a batch."""
        return list(zip(*self.batch(np.asarray(windows)), strict=True))


class SlidingWindows(WindowDataset):
    """Sliding windows over a stream, one every `stride` tokens, of `max_length` inputs.

    Nothing is copied: a window is read from the stream when it is asked for.
    Raises DataError when there are too few tokens for a single window.
    """

    def __init__(self, tokens: TokenStream, max_length: int, stride: int):
        if max_length < 1 or stride < 1:
            raise ValueError(f"max_length={max_length} and stride={stride} must be at least 1")
        if len(tokens) < max_length + 1:
            raise DataError(
                "data.max_length",
                max_length,
                f"a window needs {max_length + 1} tokens (one more, to predict) and there are "
                f"{len(tokens)}",
                "use a longer text or a smaller data.max_length",
            )
        self.tokens = tokens
        self.max_length = max_length
        self.stride = stride

    def __len__(self) -> int:
        return len(range(0, len(self.tokens) - self.max_length, self.stride))

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        starts = windows.astype(np.int64) * self.stride
        ids = torch.from_numpy(self.tokens.gather(starts, self.max_length + 1).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def common_tokens(self, most: int = 1000) -> np.ndarray:
        """The ids that occur most often in the first million tokens, the commonest first."""
        size = min(1_000_000, len(self.tokens))
        ids, counts = np.unique(self.tokens.gather(np.array([0]), size), return_counts=True)
        return ids[np.argsort(-counts, kind="stable")][:most]


class DocumentWindows(SlidingWindows):
    """Windows that stay within a document: from its end-of-text token to the next one, which is
    the last target.

    A document's last window is padded with end-of-text tokens and IGNORED targets. So every token
    of every document is predicted, and nothing is learned across two of them. Needs sixteen bytes
    of memory a document.
    """

    def __init__(self, tokens: TokenStream, max_length: int, stride: int):
        super().__init__(tokens, max_length, stride)
        # Document i is from bounds[i] to bounds[i + 1], both included.
        self.bounds = np.append(tokens.document_starts(), len(tokens) - 1)
        targets = np.diff(self.bounds)
        more = -(-np.maximum(0, targets - max_length) // stride)  # windows after the first
        count = np.minimum(1 + more, -(-targets // stride))  # none begins behind the last target
        self.last_window = np.cumsum(count)  # and one: of each document

    def __len__(self) -> int:
        return int(self.last_window[-1])

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        document = np.searchsorted(self.last_window, windows, side="right")
        before = np.where(document > 0, self.last_window[document - 1], 0)
        start = self.bounds[document] + (windows - before) * self.stride
        ids = self.tokens.gather(start, self.max_length + 1).astype(np.int64)
        left = self.bounds[document + 1] + 1 - start
        padding = np.arange(self.max_length + 1) >= left[:, None]
        input_ids = np.where(padding, self.tokens.end_of_text, ids)[:, :-1]
        target_ids = np.where(padding, IGNORED, ids)[:, 1:]
        return torch.from_numpy(input_ids), torch.from_numpy(target_ids)


class MixedDataset(WindowDataset):
    """The windows of several data sets, numbered consecutively from data set to data set.

    `weights` tells how often each is to be used (WindowOrder in tokens/sampler.py).
    """

    def __init__(self, datasets: list[SlidingWindows], weights: list[float]):
        self.datasets = datasets
        self.weights = weights
        self.sizes = [len(dataset) for dataset in datasets]
        self.ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        input_ids = torch.empty(len(windows), self.datasets[0].max_length, dtype=torch.int64)
        target_ids = torch.empty_like(input_ids)
        sources = np.searchsorted(self.ends, windows, side="right")
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            local = windows[mine] - (self.ends[source] - self.sizes[source])
            input_ids[mine], target_ids[mine] = self.datasets[source].batch(local)
        return input_ids, target_ids

    def common_tokens(self, most: int = 1000) -> np.ndarray:
        """The commonest ids of each, in ascending order."""
        each = [dataset.common_tokens(most // len(self.datasets)) for dataset in self.datasets]
        return np.unique(np.concatenate(each))


def window_order(dataset: WindowDataset, batch_size: int, seed: int) -> WindowOrder:
    """The order in which training takes a data set's windows."""
    if isinstance(dataset, MixedDataset):
        return WindowOrder(dataset.sizes, batch_size, seed, dataset.weights)
    return WindowOrder(len(dataset), batch_size, seed)


def evenly_spaced_windows(dataset: WindowDataset, most: int) -> np.ndarray:
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
    windows = [evenly_spaced_windows(part, count) + offset for part, count, offset in parts]
    return np.concatenate(windows)
