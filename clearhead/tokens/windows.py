"""Datasets of windows: across document boundaries, within documents, and mixtures of datasets.

Shapes: B batch, T positions in a window.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from clearhead.errors import DataError
from clearhead.tokens.sampler import WindowOrder
from clearhead.tokens.stream import TokenStream

IGNORED = -100  # the loss ignores this target (ignore_index of torch's cross_entropy)


class WindowDataset(Dataset):
    """Base class. A subclass defines `batch`, which reads windows on access, and `__len__`."""

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

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Reads one window: (input_ids (T,), target_ids (T,)), int64."""
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} does not exist; there are {len(self)}")
        input_ids, target_ids = self.batch(np.array([index]))
        return input_ids[0], target_ids[0]

    def __getitems__(self, windows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Reads several windows at once; torch's DataLoader calls this for a batch."""
        return list(zip(*self.batch(np.asarray(windows)), strict=True))


class SlidingWindows(WindowDataset):
    """Windows of `max_length` inputs that start every `stride` tokens of a stream.

    A window is read from the stream on access. Raises DataError when there are too few tokens for
    one window.
    """

    def __init__(self, tokens: TokenStream, max_length: int, stride: int):
        if max_length < 1 or stride < 1:
            raise ValueError(f"max_length={max_length} and stride={stride} must be at least 1")
        if len(tokens) < max_length + 1:
            reason = (
                f"a window needs {max_length + 1} tokens (inputs and the last target), but the "
            )
            reason += f"text has {len(tokens)}"
            hint = "use a longer text or a smaller data.max_length"
            raise DataError("data.max_length", max_length, reason, hint)
        self.tokens = tokens
        self.max_length = max_length
        self.stride = stride

    def __len__(self) -> int:
        return len(range(0, len(self.tokens) - self.max_length, self.stride))

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        starts = windows.astype(np.int64) * self.stride
        ids = torch.from_numpy(self.tokens.gather(starts, self.max_length + 1).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def num_targets(self, windows: int) -> int | None:
        return windows * self.max_length

    def common_tokens(self, limit: int = 1000) -> np.ndarray:
        """Returns the most frequent ids of the first million tokens, the most frequent first."""
        size = min(1_000_000, len(self.tokens))
        ids, counts = np.unique(self.tokens.gather(np.array([0]), size), return_counts=True)
        return ids[np.argsort(-counts, kind="stable")][:limit]


class DocumentWindows(SlidingWindows):
    """Windows that do not cross document boundaries.

    A document starts with its end-of-text token; its last target is the end-of-text token of the
    next document. The last window of a document is padded with end-of-text tokens and IGNORED
    targets. So every token of every document is predicted. Needs 16 bytes of memory per document.
    """

    def __init__(self, tokens: TokenStream, max_length: int, stride: int):
        super().__init__(tokens, max_length, stride)
        # Document i has the tokens from bounds[i] to bounds[i + 1], both included.
        self.bounds = np.append(tokens.document_starts(), len(tokens) - 1)
        targets = np.diff(self.bounds)
        more = -(-np.maximum(0, targets - max_length) // stride)  # windows after the first
        count = np.minimum(1 + more, -(-targets // stride))  # each window has at least one target
        self.window_ends = np.cumsum(count)  # document i has windows window_ends[i - 1], ...

    def __len__(self) -> int:
        return int(self.window_ends[-1])

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        document = np.searchsorted(self.window_ends, windows, side="right")
        first_window = np.where(document > 0, self.window_ends[document - 1], 0)
        start = self.bounds[document] + (windows - first_window) * self.stride
        ids = self.tokens.gather(start, self.max_length + 1).astype(np.int64)
        remaining = self.bounds[document + 1] + 1 - start  # tokens of the document
        padding = np.arange(self.max_length + 1) >= remaining[:, None]
        input_ids = np.where(padding, self.tokens.end_of_text, ids)[:, :-1]
        target_ids = np.where(padding, IGNORED, ids)[:, 1:]
        return torch.from_numpy(input_ids), torch.from_numpy(target_ids)

    def num_targets(self, windows: int) -> int | None:
        return None


class MixedDataset(WindowDataset):
    """The windows of several datasets, numbered consecutively: first those of dataset 0.

    weights: how often each dataset is used, relative to the others (WindowOrder in sampler.py).
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
            rows = np.flatnonzero(sources == source)
            local = windows[rows] - (self.ends[source] - self.sizes[source])
            input_ids[rows], target_ids[rows] = self.datasets[source].batch(local)
        return input_ids, target_ids

    def num_targets(self, windows: int) -> int | None:
        return self.datasets[0].num_targets(windows)

    def common_tokens(self, limit: int = 1000) -> np.ndarray:
        """Returns the most frequent ids of each dataset, in ascending order."""
        each = [dataset.common_tokens(limit // len(self.datasets)) for dataset in self.datasets]
        return np.unique(np.concatenate(each))


def window_order(dataset: WindowDataset, batch_size: int, seed: int) -> WindowOrder:
    """Returns the order in which training reads the windows of a dataset."""
    if isinstance(dataset, MixedDataset):
        return WindowOrder(dataset.sizes, batch_size, seed, dataset.weights)
    return WindowOrder(len(dataset), batch_size, seed)


def evenly_spaced_windows(dataset: WindowDataset, limit: int) -> np.ndarray:
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
