"""Text -> tokens -> windows -> batches.

A text becomes a stream of token ids, two bytes each (tokens/); a large one once and for all, in
files that are mapped into memory (scripts/prepare_data.py). A window is cut from it when it is
asked for: `max_length` ids to read, and the same ids one place later to predict. Which windows
make up which batch is a pure function of (seed, step, rank, world size) (tokens/sampler.py).

    dataset = GPTDatasetV1(text, get_tokenizer("gpt2"), max_length=256, stride=256)
    input_ids, target_ids = dataset[0]
    for input_ids, target_ids in create_dataloader(text, batch_size=8):
        ...

Needs torch, numpy and tiktoken. Shapes: B batch, T positions in a window.
"""

import itertools
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from errors import DataError, visible
from tokens import END_OF_TEXT
from tokens.encoding import StreamEncoder, text_blocks
from tokens.parts import Part
from tokens.paths import find_files
from tokens.readers import encode_part
from tokens.sampler import StepSampler, WindowOrder, shares
from tokens.shards import is_shards, open_shards
from tokens.stream import BLOCK_BYTES, NO_TOKEN, TokenStream
from tokens.synthetic import IGNORED, CycleWalks, RepeatedSequences
from tokens.tokenizers import TOKENIZERS, get_tokenizer

__all__ = ["DataError", "GPTDatasetV1", "WindowOrder", "create_dataloader", "get_tokenizer"]

LARGE = 10**9  # bytes of text that are tokenised in some seconds, at every start anew
Checksums = list[tuple[str, list[str]]]  # (file, of each of its blocks)


@dataclass
class DataConfig:
    """Which text or token files, and how they are cut into windows."""

    path: str | list[str] | None = None  # a file, a folder, a glob, or a list of these
    weights: list[float] | None = None  # proportions of the entries of path; null: concatenate them
    val_path: str | list[str] | None = None  # what to validate on; null: a part of path
    tokenizer: str = "gpt2"  # gpt2 | byte
    text_key: str = "text"  # where JSON lines and Parquet have the text
    max_length: int = 256  # tokens in a window; at most the model's context length
    stride: int | None = None  # from one window's start to the next; null: max_length, no overlap
    within_documents: bool = False  # true: no window spans two documents
    val_fraction: float = 0.1  # the last documents, about this share of the tokens, to validate on
    endoftext: str = "token"  # what "<|endoftext|>" written in a text is: that token, or its text
    verify: str | bool = "auto"  # checksums of token files: auto (all up to 1 GiB) | true | false
    synthetic: str | None = None  # instead of a text: null | induction (see tokens/synthetic.py)

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if not self.path and not self.synthetic:
            found.append(("path", self.path, "no text given", "set data.path=FILE, or data=sample"))
        if self.tokenizer not in TOKENIZERS:
            found.append(("tokenizer", self.tokenizer, "no such tokenizer", "use gpt2 or byte"))
        if self.max_length < 1:
            found.append(("max_length", self.max_length, "a window needs a token", "use 1 or more"))
        if self.stride is not None and self.stride < 1:
            found.append(("stride", self.stride, "windows must move on", "use 1 or more, or null"))
        if not 0.0 <= self.val_fraction < 1.0:
            cause = "is a share of the text, from 0 to below 1"
            found.append(("val_fraction", self.val_fraction, cause, "use 0.1, or 0 for none"))
        if self.endoftext not in ("token", "text"):
            found.append(("endoftext", self.endoftext, "no such choice", "use token or text"))
        if self.verify not in ("auto", True, False):
            found.append(("verify", self.verify, "no such choice", "use auto, true or false"))
        found += _weights_problems(self)
        if self.synthetic not in (None, "induction"):
            found.append(("synthetic", self.synthetic, "no such choice", "use null or induction"))
        elif self.synthetic and self.path:
            fix = "give one of the two: data=induction, or data.synthetic=null"
            found.append(("path", self.path, "data.synthetic makes its own sequences", fix))
        elif self.synthetic and (self.tokenizer != "byte" or not 16 <= self.max_length <= 124):
            cause = "needs data.tokenizer=byte and data.max_length from 16 to 124"
            found.append(("synthetic", self.synthetic, cause, "use data=induction as it is"))
        return found


def _weights_problems(config: DataConfig) -> list[tuple[str, object, str, str]]:
    """What is wrong with data.weights."""
    weights = config.weights
    if weights is None:
        return []
    entries = [config.path] if isinstance(config.path, str) else config.path or []
    if len(weights) != len(entries):
        cause = f"data.path has {len(entries)} entries"
        return [("weights", weights, cause, "give one weight for each, such as [0.7,0.3]")]
    if not all(0 < weight < math.inf for weight in weights):
        return [("weights", weights, "must be more than 0", "leave the entry out of data.path")]
    try:
        shares(weights)
    except ValueError:
        cause = "this proportion repeats after more than 100,000 windows only"
        return [("weights", weights, cause, "use weights of fewer digits")]
    return []


# ------------------------------------------------------------------------------ text -> tokens


def encode_text(txt: str, tokenizer: tiktoken.Encoding, endoftext: str = "token") -> np.ndarray:
    """The ids of a text; any encoding of tiktoken's will do, GPT-2's is the fastest."""
    if tokenizer.name in TOKENIZERS:
        return _collected(StreamEncoder(tokenizer.name, endoftext).encode(text_blocks(txt)))
    allowed = {END_OF_TEXT} if endoftext == "token" else set()
    txt = b"".join(text_blocks(txt)).decode()  # without halves of surrogate pairs
    ids = tokenizer.encode_to_numpy(txt, allowed_special=allowed, disallowed_special=())
    return ids.astype(np.uint16) if tokenizer.n_vocab <= 2**16 else ids


def _collected(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """uint16 arrays, as they come, as one."""
    data = bytearray()
    for ids in arrays:
        data += memoryview(ids)
    return np.frombuffer(data, np.uint16)


def load_stream(
    config: DataConfig, path: str | list[str], notes: list[str] | None = None
) -> dict[str, TokenStream]:
    """What a path names, text or token files, as one stream: {"train": ...}.

    With a "val" besides where token files are named so. What the user should be told is added to
    the notes.
    """
    if is_shards(path):
        return open_shards(path, config.tokenizer, config.verify)
    files = find_files(path, notes)
    _announce(path, sum(os.path.getsize(file) for file in files if os.path.isfile(file)))
    encoder = StreamEncoder(config.tokenizer, config.endoftext)
    parts = [Part(file, text_key=config.text_key) for file in files]
    tokens = _collected(itertools.chain.from_iterable(encode_part(p, encoder) for p in parts))
    tokenizer = encoder.tokenizer
    return {"train": TokenStream([tokens], tokenizer.n_vocab, tokenizer.eot_token)}


def _announce(path: str | list[str], size: int) -> None:
    """Says, before it begins, that a large text is better tokenised once and for all."""
    if size > LARGE and os.environ.get("RANK", "0") == "0":
        paths = shlex.quote(f"data.path={path}")
        command = f"python -m scripts.prepare_data {paths} out=DIR"
        what = f"{size / 1e9:.1f} GB of text will be tokenised into memory, at each start anew"
        note = visible(f"note: {what}; once and for all: {command}", keep="")
        print(note, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------- tokens -> windows


class GPTDatasetV1(Dataset):
    """Sliding windows over a text: pairs (input_ids, target_ids), int64 of length max_length.

    Target i is the token after input i. Windows start every `stride` tokens; the same ones as
    the classic implementation builds into two lists of tensors, cut on access instead.
    Raises DataError when the text is too short for a single window.
    """

    def __init__(self, txt: str, tokenizer: tiktoken.Encoding, max_length: int, stride: int):
        ids = encode_text(txt, tokenizer)
        try:
            end_of_text = tokenizer.eot_token
        except KeyError:  # an encoding without one; plain windows need none
            end_of_text = -1
        self._cut(TokenStream([ids], tokenizer.n_vocab, end_of_text), max_length, stride)

    @classmethod
    def from_stream(cls, tokens: TokenStream, max_length: int, stride: int) -> "GPTDatasetV1":
        """The same windows over a stream of token ids, which is kept, not copied."""
        dataset = cls.__new__(cls)
        dataset._cut(tokens, max_length, stride)
        return dataset

    def _cut(self, tokens: TokenStream, max_length: int, stride: int) -> None:
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


class DocumentWindows(GPTDatasetV1):
    """Windows that stay within a document: from its end-of-text token to the next one, which is
    the last target.

    A document's last window is filled up; what is filled up counts as no target. So every token
    of every document is predicted, and nothing is learned across two of them. Needs sixteen bytes
    of memory a document.
    """

    def _cut(self, tokens: TokenStream, max_length: int, stride: int) -> None:
        super()._cut(tokens, max_length, stride)
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


class MixedDataset(Dataset):
    """The windows of several data sets, those of the second numbered behind the first's, ...

    `weights` tells how often each is to be used; WindowOrder mixes them.
    """

    def __init__(self, datasets: list[GPTDatasetV1], weights: list[float]):
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
    """At most so many windows, evenly spread; of a mixture from each source by its weight."""
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


class StoredBatches(Dataset):
    """A dataset whose batches stay as they are stored, two bytes a token."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, windows: np.ndarray) -> tuple[Tensor, ...]:
        return self.dataset.gather(windows)


def create_dataloader(
    txt: str | None = None,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    *,
    dataset=None,
    batch_sampler: Iterable[np.ndarray] | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """A torch DataLoader over the windows of a text in GPT-2's tokens, or of a dataset.

    Without batch_sampler the batches are [input_ids (B, T), target_ids (B, T)], int64.
    With one, which says which windows each batch has, the batches are [tensors as they are
    stored]: dataset.expand(*batch) makes input_ids and target_ids of them, on any device, and
    dataset.num_targets(*batch) counts the targets. train.py trains on these.
    """
    if dataset is None:
        dataset = GPTDatasetV1(txt, get_tokenizer("gpt2"), max_length, stride)
    options = {"num_workers": num_workers, "pin_memory": pin_memory}
    if batch_sampler is not None:
        return DataLoader(
            StoredBatches(dataset),
            batch_sampler=batch_sampler,
            collate_fn=list,
            generator=torch.Generator(),  # otherwise iter() draws from torch's global one
            **options,
        )
    if drop_last and len(dataset) < batch_size:
        raise DataError(
            "batch_size",
            batch_size,
            f"the text has {len(dataset)} windows, and drop_last would leave no batch at all",
            "use a smaller batch_size or drop_last=False",
        )
    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, **options)


def training_batches(
    dataset,
    batch_size: int,
    seed: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> Iterator[list[Tensor]]:
    """This rank's part of the batch of each step from first_step on, as it is stored; endless.

    The windows depend on nothing but (seed, step, rank, world size). One batch is read ahead.
    """
    sampler = StepSampler(order_of(dataset, batch_size, seed), first_step, rank, world_size)
    loader = create_dataloader(dataset=dataset, batch_sampler=sampler, pin_memory=pin_memory)
    return read_ahead(iter(loader))


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
    """A stored batch as micro-batches of at most so many windows, each with its target count."""
    size = micro_batch_size or len(batch[0])
    parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
    return [(part, dataset.num_targets(*part)) for part in parts]


# ----------------------------------------------------------------- settings -> training, validation


@dataclass
class Loaded:
    """What training reads."""

    train: GPTDatasetV1 | MixedDataset | CycleWalks
    val: GPTDatasetV1 | MixedDataset | RepeatedSequences | None
    checksums: Checksums  # of the tokens; what a checkpoint remembers
    notes: list[str]  # what the user should be told


def load_datasets(config: DataConfig) -> Loaded:
    """The windows to train and to validate on; no token is in both.

    The validation part is the end of the text, from the document on that begins nearest to
    data.val_fraction; a text whose documents are longer than that is cut inside one, with a note.
    Its windows do not overlap whatever the stride, so that each of its tokens is predicted once.
    None when val_fraction is 0. With data.synthetic: sequences made on the spot instead, of the
    same interface (tokens/synthetic.py).
    """
    if config.synthetic:
        return Loaded(CycleWalks(config.max_length), RepeatedSequences(config.max_length), [], [])
    if not config.weights or isinstance(config.path, str):
        return _load_source(config, config.path)
    others = replace(config, val_path=None, val_fraction=0.0) if config.val_path else config
    sources = [_load_source(others if n else config, e) for n, e in enumerate(config.path)]
    val_set = sources[0].val  # the same for all with data.val_path, and none for all without
    if val_set is not None and not config.val_path:
        val_set = MixedDataset([source.val for source in sources], config.weights)
    return Loaded(
        MixedDataset([source.train for source in sources], config.weights),
        val_set,
        [pair for source in sources for pair in source.checksums],
        [note for source in sources for note in source.notes],
    )


def _load_source(config: DataConfig, path: str | list[str]) -> Loaded:
    """The windows of one source."""
    notes: list[str] = []
    streams = load_stream(config, path, notes)
    train, val = streams["train"], streams.get("val")
    checksums = [pair for stream in streams.values() for pair in stream.checksums()]
    if config.val_path:
        try:
            found = load_stream(config, config.val_path)
        except DataError as error:
            if error.key == "data.path":
                error.key = "data.val_path"
            raise
        val = found.get("val", found["train"])
        checksums += val.checksums()
    elif config.val_fraction == 0:
        val = None
    elif val is not None:
        names = ", ".join(os.path.basename(name) for name, _ in val.names[:3])
        cause = f"validating on the files named val ({names}); data.val_fraction is not used"
        notes.append(visible(f"data.path={path}: {cause}", keep=""))
    else:
        train, val = split_tokens(config, path, train, notes)
    cut = (DocumentWindows if config.within_documents else GPTDatasetV1).from_stream
    train_set = cut(train, config.max_length, config.stride or config.max_length)
    val_set = None
    if val is not None:
        if len(val) < config.max_length + 1:
            key, value = ("val_path", config.val_path) if config.val_path else ("path", path)
            cause = f"{len(val)} tokens to validate on, and a window needs {config.max_length + 1}"
            fix = "use a longer text or a smaller data.max_length"
            raise DataError(f"data.{key}", value, cause, fix)
        val_set = cut(val, config.max_length, config.max_length)
    return Loaded(train_set, val_set, checksums, notes)


def split_tokens(
    config: DataConfig, path: str | list[str], tokens: TokenStream, notes: list[str]
) -> tuple[TokenStream, TokenStream]:
    """The tokens to train on, and those to validate on."""
    if 2 <= len(tokens) <= config.max_length:
        raise DataError(
            "data.path",
            path,
            f"{len(tokens)} tokens, and a window needs {config.max_length + 1}",
            f"use a longer text, or data.max_length={len(tokens) - 1} data.val_fraction=0 to train "
            "on all of it in one window",
        )
    num_val = int(len(tokens) * config.val_fraction)
    wished = len(tokens) - num_val
    position = tokens.nearest_document(wished, num_val // 2)
    if position is None:
        position = wished
        if tokens.nearest_document(wished, 10**8) is not None:
            notes.append("the validation part begins inside a document, as the documents are long")
    train, val = tokens.split(position)
    if len(val) < config.max_length + 1:
        raise DataError(
            "data.val_fraction",
            config.val_fraction,
            f"leaves {len(val)} of {len(tokens)} tokens for validation, and a window needs "
            f"{config.max_length + 1}",
            "use a longer text, a larger data.val_fraction (0 for none) or a smaller "
            "data.max_length",
        )
    return train, val


def check_unchanged(before: Checksums | None, now: Checksums, path: object) -> None:
    """Raises DataError when the tokens are others than those that a checkpoint was trained on."""
    if before is None:
        cause = "the checkpoint is of an earlier version, whose tokens were others"
        fix = "begin a new run; trainer.init_from= starts it from these weights"
        raise DataError("data.path", path, cause, fix)
    fix = (
        "restore the data, or give another name= for a new run; trainer.resume_override=true goes "
        "on all the same"
    )
    for (old_file, old), (file, new) in itertools.zip_longest(before, now, fillvalue=("none", [])):
        if old_file != file:
            cause = f"the checkpoint was trained on {old_file} where there is {file} now"
            raise DataError("data.path", path, cause, fix)
        if (byte := _first_difference(old, new)) is not None:
            cause = f"{file} is another from byte {byte} on than the one that"
            raise DataError("data.path", path, f"{cause} the checkpoint was trained on", fix)


def check_same(main_has: Checksums, here: Checksums, path: object) -> None:
    """Raises DataError when this rank's tokens are others than those of the main one."""
    fix = "give every machine the same data"
    for (_, theirs), (file, ours) in itertools.zip_longest(main_has, here, fillvalue=("none", [])):
        if (byte := _first_difference(theirs, ours)) is not None:
            cause = f"{file} is another from byte {byte} on than what rank 0 has"
            raise DataError("data.path", path, cause, fix)


def _first_difference(before: list[str], now: list[str]) -> int | None:
    """Where the first block begins whose checksums differ; an empty one is not known."""
    for block, (one, other) in enumerate(itertools.zip_longest(before, now, fillvalue=None)):
        if one != other and "" not in (one, other):
            return block * BLOCK_BYTES
    return None
