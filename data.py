"""Datasets and data loaders: text -> tokens -> windows -> batches.

A text is tokenized to a stream of uint16 token ids (clearhead/tokens/). A large text is tokenized
once, to token files that are memory-mapped (scripts/prepare_data.py). A window is read on access.
It has `max_length` input ids; the targets are the ids one position later. The windows of a batch
depend only on (seed, step, rank, world size) (clearhead/tokens/sampler.py).

    dataset = GPTDatasetV1(text, get_tokenizer("gpt2"), max_length=256, stride=256)
    input_ids, target_ids = dataset[0]
    for input_ids, target_ids in create_dataloader(text, batch_size=8):
        ...

Needs torch, numpy and tiktoken. Shapes: B batch, T positions in a window.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from clearhead.config.schema import DataConfig
from clearhead.errors import DataError
from clearhead.tokens.encoding import AnyTokenizer, encode_text
from clearhead.tokens.sampler import WindowOrder
from clearhead.tokens.sources import load_tokens
from clearhead.tokens.synthetic import CycleWalks, RepeatedSequences
from clearhead.tokens.token_stream import Checksums, TokenStream
from clearhead.tokens.tokenizer import Tokenizer, get_tokenizer
from clearhead.tokens.windows import IGNORED, MixedDataset, WindowDataset, mixture, window_order

__all__ = ["DataError", "GPTDatasetV1", "WindowOrder", "create_dataloader", "get_tokenizer"]


# --------------------------------------------------------------------------- tokens -> windows


class GPTDatasetV1(WindowDataset):
    """Windows of a text that start every `stride` tokens: (input_ids, target_ids), int64 (T,) each.

    Target i is the token after input i. T is max_length. The windows are the same as those of the
    book's GPTDatasetV1 (Raschka 2024), but are read on access and not stored as lists of tensors.
    tokenizer: a tiktoken encoding, or any object with encode(txt, allowed_special=...). txt may
    also be tokens (TokenStream), in memory or memory-mapped; tokenizer is then not used. Raises
    DataError if the text is too short for one window.
    """

    def __init__(
        self,
        txt: str | TokenStream,
        tokenizer: AnyTokenizer | None,
        max_length: int,
        stride: int,
    ):
        if isinstance(txt, str):  # these windows do not need the end-of-text token
            ids = encode_text(txt, tokenizer)
            vocab_size = getattr(tokenizer, "n_vocab", 1 + int(ids.max(initial=0)))
            txt = TokenStream([ids], vocab_size, end_of_text=-1)
        if max_length < 1 or stride < 1:
            raise ValueError(f"max_length={max_length} and stride={stride} must be at least 1")
        if len(txt) < max_length + 1:
            reason = f"a window needs {max_length + 1} tokens, but the text has {len(txt)}"
            hint = "use a longer text or a smaller data.max_length"
            raise DataError("data.max_length", max_length, reason, hint)
        self.tokens = txt
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.stride = stride
        self.input_ids = _Windows(self, 0)  # input_ids[i] and target_ids[i] are (T,)
        self.target_ids = _Windows(self, 1)

    def __len__(self) -> int:
        return len(range(0, len(self.tokens) - self.max_length, self.stride))

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.windows_from(windows.astype(np.int64) * self.stride)

    def windows_from(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Reads the windows that start at these tokens, (B,): as `batch`."""
        ids = torch.from_numpy(self.tokens.gather(starts, self.max_length + 1).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def num_targets(self, windows: int) -> int | None:
        return windows * self.max_length

    def common_tokens(self, limit: int = 1000) -> np.ndarray:
        """Returns the most frequent ids of the first million tokens, the most frequent first."""
        size = min(1_000_000, len(self.tokens))
        ids, counts = np.unique(self.tokens.gather(np.array([0]), size), return_counts=True)
        return ids[np.argsort(-counts, kind="stable")][:limit]


class ShiftedWindows(GPTDatasetV1):
    """Windows that start at other tokens in each epoch.

    Window w of phase p, from 0 to stride - 1, starts at token w stride + p. Its number is
    w + p len(self). All phases have the same number of windows.
    """

    @property
    def phases(self) -> int:
        return min(self.stride, len(self.tokens) - self.max_length)

    def __len__(self) -> int:
        return len(range(self.phases - 1, len(self.tokens) - self.max_length, self.stride))

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        phase, window = np.divmod(windows, len(self))
        return self.windows_from(window * self.stride + phase)


class _Windows(Sequence):
    """The inputs (part 0) or the targets (part 1) of all windows, read on access."""

    def __init__(self, dataset: WindowDataset, part: int):
        self.dataset, self.part = dataset, part

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[index][self.part]


class DocumentWindows(GPTDatasetV1):
    """Windows that do not cross document boundaries.

    A document starts with its end-of-text token; its last target is the end-of-text token of the
    next document. The last window of a document is padded with end-of-text tokens and IGNORED
    targets. So every token of every document is predicted. Needs 16 bytes of memory per document.
    """

    def __init__(
        self, txt: TokenStream, tokenizer: AnyTokenizer | None, max_length: int, stride: int
    ):
        super().__init__(txt, tokenizer, max_length, stride)
        # Document i has the tokens from bounds[i] to bounds[i + 1], both included.
        self.bounds = np.append(txt.document_starts(), len(txt) - 1)
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


def create_dataloader(
    txt: str | None = None,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    *,
    dataset: WindowDataset | None = None,
) -> DataLoader:
    """Creates a DataLoader for the windows of a text, tokenized for GPT-2, or of a dataset.

    Its batches are [input_ids (B, T), target_ids (B, T)], int64. drop_last: skips a smaller last
    batch, whose tokens would have a larger weight. train.py uses training_batches, whose order can
    be continued at any step.
    """
    if dataset is None:
        dataset = GPTDatasetV1(txt, get_tokenizer("gpt2"), max_length, stride)
    if drop_last and len(dataset) < batch_size:
        reason = f"greater than the number of windows, {len(dataset)}, so there is no full batch"
        hint = "use a smaller batch_size or drop_last=False"
        raise DataError("batch_size", batch_size, reason, hint)
    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, num_workers=num_workers)


def training_batches(
    dataset: WindowDataset,
    batch_size: int,
    seed: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> Iterator[list[Tensor]]:
    """Yields this rank's batch of each step from first_step, without end: [input_ids, target_ids].

    The windows depend only on (seed, step, rank, world size). A thread reads one batch ahead.
    """
    windows = window_order(dataset, batch_size, seed).steps(first_step, rank, world_size)
    # The sampler yields all windows of a batch, which the dataset reads at once.
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=windows,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise it draws a number from torch's default generator
    )
    return read_ahead(iter(loader))


def read_ahead(batches: Iterator) -> Iterator:
    """Yields the same batches. A thread reads the next batch while the caller uses this one."""
    thread = ThreadPoolExecutor(1, "data")
    # The thread must not start OpenMP threads, which slow down the OpenMP threads of training
    # (a step of GPT-2 small on two cores took a tenth longer,
    # benchmarks/results/2026-11-22-saving-cpu.json). set_num_threads also changes the default for
    # threads that are created later, so the default is restored.
    num_threads = thread.submit(torch.get_num_threads).result()
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(num_threads)
    end = object()
    ahead = thread.submit(next, batches, end)
    while (batch := ahead.result()) is not end:
        ahead = thread.submit(next, batches, end)
        yield batch


def split_batch(
    batch: Sequence[Tensor], micro_batch_size: int | None
) -> list[tuple[Sequence[Tensor], int]]:
    """Splits a batch into micro-batches of at most micro_batch_size windows (None: no split), and
    returns each with its number of targets."""
    size = micro_batch_size or len(batch[0])
    parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
    return [(part, int((part[1] != IGNORED).sum())) for part in parts]


# ----------------------------------------------------------------- settings -> training, validation


@dataclass
class LoadedData:
    """The datasets of a run."""

    train: GPTDatasetV1 | MixedDataset | CycleWalks
    val: WindowDataset | None
    checksums: Checksums  # of the tokens; checkpoints store them
    notes: list[str]  # messages for the user
    overlap: str | None = None  # of the validation text with the training text, see overlap.py


def load_datasets(config: DataConfig, tokenizer: Tokenizer) -> LoadedData:
    """Builds the training and the validation dataset. No token is in both.

    Validation data are those of data.val_path, or the last part of the text (tokens/sources.py).
    Validation windows do not overlap. With data.weights, each entry of data.path is a dataset of a
    mixture. With data.synthetic, generated sequences replace the text.
    """
    length = config.max_length
    if config.synthetic:
        return LoadedData(CycleWalks(length), RepeatedSequences(length), [], [])
    tokens = load_tokens(config, tokenizer)
    val_windows = DocumentWindows if config.within_documents else GPTDatasetV1
    windows = ShiftedWindows if config.shift else val_windows
    train = [windows(t, tokenizer, length, config.stride or length) for t in tokens.train]
    val = [val_windows(t, tokenizer, length, length) for t in tokens.val]
    mixed = [mixture(datasets, config.weights) for datasets in (train, val)]
    return LoadedData(*mixed, tokens.checksums, tokens.notes)
