"""Data sets of windows over a stream of tokens: across documents, or within them.

Shapes: B batch, T positions in a window.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from errors import DataError
from tokens.stream import NO_TOKEN, TokenStream
from tokens.synthetic import IGNORED


class Windows(Dataset):
    """Sliding windows: pairs (input_ids, target_ids), int64 of length max_length.

    Target i is the token after input i. Windows start every `stride` tokens. Nothing is copied: a
    window is read from the stream when it is asked for.
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
                f"{len(tokens)} to train on",
                "use a longer text or a smaller data.max_length",
            )
        self.tokens = tokens
        self.max_length = max_length
        self.stride = stride

    def __len__(self) -> int:
        return len(range(0, len(self.tokens) - self.max_length, self.stride))

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

    def common_tokens(self, most: int = 1000) -> np.ndarray:
        """The ids that occur most often in the first million tokens, the commonest first."""
        size = min(1_000_000, len(self.tokens))
        ids, counts = np.unique(self.tokens.gather(np.array([0]), size), return_counts=True)
        return ids[np.argsort(-counts, kind="stable")][:most]

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Several windows at once: (B,) -> input_ids (B, T), target_ids (B, T), int64."""
        return self.expand(*self.gather(windows))

    def gather(self, windows: np.ndarray) -> tuple[Tensor, ...]:
        """The same as it is stored, two bytes a token: what is worth sending to a device."""
        ids = self._ids(windows.astype(np.int64))  # (B, T + 1)
        signed = np.int16 if ids.dtype.itemsize == 2 else np.int32  # as torch has every operation
        return (torch.from_numpy(ids.view(signed)),)

    def _ids(self, windows: np.ndarray) -> np.ndarray:
        return self.tokens.gather(windows * self.stride, self.max_length + 1)

    def expand(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What `gather` gave, on any device -> input_ids (B, T), target_ids (B, T), int64."""
        bits = 0xFFFF if ids.dtype == torch.int16 else 0xFFFFFFFF
        ids = ids.long() & bits  # (B, T + 1)
        return ids[:, :-1], ids[:, 1:]

    def num_targets(self, ids: Tensor) -> int:
        """How many targets count in what `gather` gave."""
        return len(ids) * self.max_length


class DocumentWindows(Windows):
    """Windows that stay within a document: from its end-of-text token to the next one, which is
    the last target.

    A document's last window is padded, and padding counts as no target. So every token of every
    document is predicted, and nothing is learned across two of them. Needs sixteen bytes of memory
    a document.
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

    def _ids(self, windows: np.ndarray) -> np.ndarray:
        document = np.searchsorted(self.last_window, windows, side="right")
        before = np.where(document > 0, self.last_window[document - 1], 0)
        inside = (windows - before) * self.stride  # where in its document a window begins
        start = self.bounds[document] + inside
        ids = self.tokens.gather(start, self.max_length + 1)
        left = self.bounds[document + 1] + 1 - start
        ids[np.arange(self.max_length + 1) >= left[:, None]] = NO_TOKEN
        return ids

    def expand(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        input_ids, target_ids = super().expand(ids)
        input_ids = torch.where(input_ids == NO_TOKEN, self.tokens.end_of_text, input_ids)
        return input_ids, torch.where(target_ids == NO_TOKEN, IGNORED, target_ids)

    def num_targets(self, ids: Tensor) -> int:
        filled_up = torch.tensor(NO_TOKEN).to(ids.dtype)  # as `gather` stores it
        return int((ids[:, 1:] != filled_up).sum())
