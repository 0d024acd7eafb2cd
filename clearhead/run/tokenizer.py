"""The tokenizer of a run: data.tokenizer. Rank 0 reads or trains it and gives it to the others."""

import functools
import time
from pathlib import Path

import numpy as np

from clearhead.config.schema import Config
from clearhead.errors import DataError, Problem, message_of, refuse
from clearhead.output.console import in_thread
from clearhead.parallel.strategy import Strategy
from clearhead.tokens import TRAINED, VOCABULARIES
from clearhead.tokens.sources import token_files
from clearhead.tokens.tokenizer import BLOCK, Sample, Tokenizer, get_tokenizer, train_tokenizer
from clearhead.tokens.tokenizer_json import from_json, load_tokenizer, read_tokenizer, to_json
from clearhead.tokens.windows import MixedDataset
from data import load_datasets


def find_tokenizer(
    config: Config, strategy: Strategy, checkpoint: Path | None, notes: list[str]
) -> Tokenizer:
    """Returns the tokenizer, the same on all ranks. checkpoint: that the run starts from; its
    tokenizer is used. Raises DataError."""
    if config.data.tokenizer in VOCABULARIES:
        return get_tokenizer(config.data.tokenizer)

    def find() -> tuple[str, str]:
        note = ""
        if checkpoint:
            found = of_checkpoint(config.data.tokenizer, checkpoint)
        elif config.data.tokenizer != TRAINED:
            found = load_tokenizer(config.data.tokenizer)
        else:
            started = time.perf_counter()
            found, num_bytes = train_on_text(config)
            seconds = time.perf_counter() - started
            note = f"{found.n_vocab:,} ids, trained on {num_bytes:,} bytes in {seconds:.1f} s"
        return to_json(found).decode(), note

    content, note = strategy.broadcast(strategy.on_rank_0(find))
    notes += [f"data.tokenizer=bpe: {note}"] if note else []
    return from_json(content.encode())


def of_checkpoint(name: str, checkpoint: Path) -> Tokenizer:
    """Returns the tokenizer in a checkpoint. Raises DataError if there is none, or if the directory
    that data.tokenizer names has another one now."""
    try:
        found = read_tokenizer(checkpoint)
    except (OSError, ValueError) as error:
        hint = "use another checkpoint"
        raise DataError("checkpoint", checkpoint, message_of(error), hint) from error
    if found is None:
        raise DataError("checkpoint", checkpoint, "has no tokenizer.json", "use another checkpoint")
    is_here = name != TRAINED and Path(name).expanduser().exists()
    if is_here and (now := load_tokenizer(name).name) != found.name:
        reason = f"is now {now}, but the run was trained with {found.name}"
        hint = "start a new run with another name, or restore the file"
        raise DataError("data.tokenizer", name, reason, hint)
    return found


def train_on_text(config: Config) -> tuple[Tokenizer, int]:
    """Returns a tokenizer, trained on the training part of the text, and the bytes of that part."""
    for key, path in (("data.path", config.data.path), ("data.val_path", config.data.val_path)):
        if token_files(path):
            hint = "give the tokenizer that they were made with: data.tokenizer=DIR"
            raise DataError(key, path, "token files are tokenized already", hint)
    as_bytes = get_tokenizer("byte")
    text = load_datasets(config.data, as_bytes).train
    sample = Sample()
    for dataset in text.datasets if isinstance(text, MixedDataset) else [text]:
        for ids in dataset.tokens.arrays:
            for start in range(0, len(ids), BLOCK):
                block = ids[start : start + BLOCK]
                # No byte of UTF-8 is 0xFF, so it can stand for the end of a text.
                raw = np.where(block == as_bytes.eot_token, 0xFF, block).astype(np.uint8).tobytes()
                for part in raw.split(b"\xff"):
                    sample.add(part)
    train = functools.partial(train_tokenizer, sample, config.data.vocab_size)
    return in_thread(train).result(), sample.text_bytes


def vocabulary_size(config: Config, tokenizer: Tokenizer) -> int:
    """Returns model.vocab_size, that of the tokenizer unless it is given. Raises ConfigError if it
    is smaller."""
    size, needed = config.model.vocab_size, tokenizer.n_vocab
    if size is not None and size < needed:
        reason = f"data.tokenizer={config.data.tokenizer} has {needed} token ids"
        hint = f"use null, or {needed} or more"
        refuse([Problem("model.vocab_size", size, reason, hint)])
    return needed if size is None else size
