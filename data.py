"""Text -> tokens -> windows -> batches.

A text becomes a stream of token ids of two bytes (tokens/); a large one only once, in files that
are mapped into memory (scripts/prepare_data.py). A window is read from the stream when it is asked
for: `max_length` input ids, and the same ids one place later as targets. The windows of each batch
are a pure function of (seed, step, rank, world size) (tokens/sampler.py).

    dataset = GPTDatasetV1(text, get_tokenizer("gpt2"), max_length=256, stride=256)
    input_ids, target_ids = dataset[0]
    for input_ids, target_ids in create_dataloader(text, batch_size=8):
        ...

Needs torch, numpy and tiktoken. Shapes: B batch, T positions in a window.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from errors import ConfigError, DataError, sanitize
from tokens.encoding import StreamEncoder, concatenate, encode_text
from tokens.paths import find_files
from tokens.readers import FilePart, encode_part
from tokens.sampler import WindowOrder, integer_weights
from tokens.shards import is_shards, open_shards
from tokens.stream import Checksums, TokenStream
from tokens.synthetic import CycleWalks, RepeatedSequences
from tokens.tokenizers import get_tokenizer
from tokens.windows import (
    IGNORED,
    DocumentWindows,
    MixedDataset,
    SlidingWindows,
    WindowDataset,
    window_order,
)
from training.config.schema import DataConfig

__all__ = ["DataError", "GPTDatasetV1", "WindowOrder", "create_dataloader", "get_tokenizer"]


# ------------------------------------------------------------------------------ text -> tokens


def load_streams(config: DataConfig, path: str | list[str]) -> dict[str, TokenStream]:
    """The text or token files that a path names, as one stream: {"train": ...}.

    With a "val" where token files have it in their names.
    """
    if is_shards(path):
        return open_shards(path, config.tokenizer, config.verify)
    files = find_files(path)
    encoder = StreamEncoder(config.tokenizer, config.endoftext)
    parts = [FilePart(file, text_key=config.text_key) for file in files]
    tokens = concatenate(itertools.chain.from_iterable(encode_part(p, encoder) for p in parts))
    if not len(tokens):
        raise DataError("data.path", path, "there is no text in it", "give a text of some length")
    tokenizer = encoder.tokenizer
    return {"train": TokenStream([tokens], tokenizer.n_vocab, tokenizer.eot_token)}


# --------------------------------------------------------------------------- tokens -> windows


class GPTDatasetV1(SlidingWindows):
    """Sliding windows over a text: pairs (input_ids, target_ids), int64 of length max_length.

    Target i is the token after input i. Windows start every `stride` tokens; the same ones as
    the classic implementation builds into two lists of tensors, read on access instead.
    Raises DataError when the text is too short for a single window.
    """

    def __init__(self, txt: str, tokenizer: tiktoken.Encoding, max_length: int, stride: int):
        ids = encode_text(txt, tokenizer)
        try:
            end_of_text = tokenizer.eot_token
        except KeyError:  # an encoding without one; plain windows need none
            end_of_text = -1
        super().__init__(TokenStream([ids], tokenizer.n_vocab, end_of_text), max_length, stride)


def create_dataloader(
    txt: str | None = None,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    *,
    dataset: Dataset | None = None,
    batch_sampler: Iterable[np.ndarray] | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """A torch DataLoader over the windows of a text in GPT-2's tokens, or of a dataset.

    The batches are [input_ids (B, T), target_ids (B, T)], int64. batch_sampler: which windows each
    batch has, instead of batch_size, shuffle and drop_last; train.py trains on such batches.
    """
    if dataset is None:
        dataset = GPTDatasetV1(txt, get_tokenizer("gpt2"), max_length, stride)
    options = {"num_workers": num_workers, "pin_memory": pin_memory}
    if batch_sampler is not None:
        generator = torch.Generator()  # otherwise iter() draws from torch's global one
        return DataLoader(dataset, batch_sampler=batch_sampler, generator=generator, **options)
    if drop_last and len(dataset) < batch_size:
        raise DataError(
            "batch_size",
            batch_size,
            f"the text has {len(dataset)} windows, and drop_last would leave no batch at all",
            "use a smaller batch_size or drop_last=False",
        )
    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, **options)


def training_batches(
    dataset: WindowDataset,
    batch_size: int,
    seed: int,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> Iterator[list[Tensor]]:
    """This rank's part of the batch of each step from first_step on, [input_ids, target_ids].

    Endless. The windows depend on nothing but (seed, step, rank, world size). One batch is read
    ahead.
    """
    windows = window_order(dataset, batch_size, seed).steps(first_step, rank, world_size)
    loader = create_dataloader(dataset=dataset, batch_sampler=windows, pin_memory=pin_memory)
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
    batch: Sequence[Tensor], micro_batch_size: int | None
) -> list[tuple[Sequence[Tensor], int]]:
    """A batch as micro-batches of at most micro_batch_size windows, each with the number of its
    targets. None: the whole batch."""
    size = micro_batch_size or len(batch[0])
    parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
    return [(part, int((part[1] != IGNORED).sum())) for part in parts]


# ----------------------------------------------------------------- settings -> training, validation


@dataclass
class LoadedData:
    """What training reads."""

    train: SlidingWindows | MixedDataset | CycleWalks
    val: WindowDataset | None
    checksums: Checksums  # of the tokens; what a checkpoint remembers
    notes: list[str]  # what the user should be told


def load_datasets(config: DataConfig) -> LoadedData:
    """The windows to train and to validate on; no token is in both.

    The validation part is the end of the text, from the document on that begins nearest to
    data.val_fraction; a text whose documents are longer than that is cut inside one, with a note.
    Its windows do not overlap whatever the stride, so that each of its tokens is predicted once.
    None when val_fraction is 0. With data.synthetic: sequences made on the spot instead, of the
    same interface (tokens/synthetic.py).
    """
    if config.synthetic:
        length = config.max_length
        return LoadedData(CycleWalks(length), RepeatedSequences(length), [], [])
    if not config.weights or isinstance(config.path, str):
        return _load_source(config, config.path)
    try:
        integer_weights(config.weights)
    except ValueError as error:
        cause, fix = "the proportion repeats only after 100,000 windows", "use fewer digits"
        raise ConfigError([("data.weights", config.weights, cause, fix)]) from error
    without_val = {"val_path": None, "val_fraction": 0.0}
    others = config.model_copy(update=without_val) if config.val_path else config
    sources = [_load_source(others if n else config, e) for n, e in enumerate(config.path)]
    val_set = sources[0].val  # the same for all with data.val_path, and none for all without
    if val_set is not None and not config.val_path:
        val_set = MixedDataset([source.val for source in sources], config.weights)
    return LoadedData(
        MixedDataset([source.train for source in sources], config.weights),
        val_set,
        [pair for source in sources for pair in source.checksums],
        [note for source in sources for note in source.notes],
    )


def _load_source(config: DataConfig, path: str | list[str]) -> LoadedData:
    """The windows of one source."""
    notes: list[str] = []
    streams = load_streams(config, path)
    train, val = streams["train"], streams.get("val")
    checksums = [pair for stream in streams.values() for pair in stream.checksums()]
    if config.val_path:
        try:
            found = load_streams(config, config.val_path)
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
        notes.append(sanitize(f"data.path={path}: {cause}", keep=""))
    else:
        train, val = split_tokens(config, train, notes)
    if val is not None and len(val) <= config.max_length:
        key, value = ("val_path", config.val_path) if config.val_path else ("path", path)
        cause = f"{len(val)} tokens to validate on, and a window needs {config.max_length + 1}"
        fix = "a longer text, a smaller data.max_length, or data.val_fraction=0 to train on all"
        is_split = not config.val_path and "val" not in streams
        if is_split and len(train) + len(val) > 2 * (config.max_length + 1):
            fix = f"a larger data.val_fraction, {fix}"
        raise DataError(f"data.{key}", value, cause, f"use {fix}")
    cut = DocumentWindows if config.within_documents else SlidingWindows
    train_set = cut(train, config.max_length, config.stride or config.max_length)
    val_set = None if val is None else cut(val, config.max_length, config.max_length)
    return LoadedData(train_set, val_set, checksums, notes)


def split_tokens(
    config: DataConfig, tokens: TokenStream, notes: list[str]
) -> tuple[TokenStream, TokenStream]:
    """The tokens to train on, and those to validate on."""
    num_val = int(len(tokens) * config.val_fraction)
    wished = len(tokens) - num_val
    position = tokens.nearest_document_start(wished, num_val // 2)
    if position is None:
        position = wished
        if tokens.nearest_document_start(wished, 10**8) is not None:
            notes.append("the validation part begins inside a document, as the documents are long")
    return tokens.split(position)
