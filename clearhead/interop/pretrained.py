"""Loads a trained model from a run, a checkpoint, a Hugging Face directory or hub:NAME.

pretrained = load_pretrained("runs/NAME")
ids = pretrained.tokenizer.encode("The ferry bell")
logits, _ = pretrained.model(torch.tensor([ids]))
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.checkpoint.format import State
from clearhead.checkpoint.listing import find_checkpoint, read_found, similar_run
from clearhead.checkpoint.tensors import load_model
from clearhead.errors import CheckpointError
from clearhead.interop import hub
from clearhead.interop.huggingface import (
    CLEARHEAD,
    CONFIG,
    check_tokenizer,
    from_hf,
    model_config,
    read_config,
)
from clearhead.tokens import VOCABULARIES
from clearhead.tokens.tokenizers import get_tokenizer
from model import GPT

if TYPE_CHECKING:
    import tiktoken


@dataclass
class PretrainedModel:
    """A trained model with its tokenizer and information about its training."""

    model: GPT  # in eval mode
    tokenizer_name: str
    tokenizer: "tiktoken.Encoding"
    window: int  # the number of trained positions; the model may have more
    state: State | None  # None for a Hugging Face directory
    folder: Path  # the checkpoint or the Hugging Face directory


def load_pretrained(path: str | Path, key: str = "checkpoint") -> PretrainedModel:
    """Loads a trained model from a run, a checkpoint, a Hugging Face directory or hub:NAME.

    A Hugging Face directory that was exported from a run contains the tokenizer's name and the
    window. Otherwise the tokenizer is GPT-2's, or the byte tokenizer if there are 257 ids, and all
    positions count as trained; tokenizer files of another tokenizer are refused. Raises
    CheckpointError, naming the setting `key`.
    """
    folder, (model, state) = read_found(lambda: _folder(path, key), _load)
    vocab_size, context = model.config.vocab_size, model.config.context_length
    if state:
        data = state.settings["data"]
        name, window = data.get("tokenizer"), data.get("max_length")
    else:
        usual = "byte" if vocab_size == VOCABULARIES["byte"] else "gpt2"
        ours = read_config(folder / CONFIG).get(CLEARHEAD, {"tokenizer": usual, "window": context})
        ours = ours if isinstance(ours, dict) else {}
        name, window = ours.get("tokenizer"), ours.get("window")
    fits = type(window) is int and 1 <= window <= context
    if not isinstance(name, str) or name not in VOCABULARIES or not fits:
        reason = f"invalid tokenizer {name!r:.40} or window of {window!r:.40} tokens"
        raise CheckpointError(key, path, reason, "use another checkpoint")
    if not state:
        check_tokenizer(folder, name)
    if vocab_size < (needed := VOCABULARIES[name]):
        reason = f"the model has {vocab_size} token ids, its tokenizer {name} has {needed}"
        raise CheckpointError(key, path, reason, "use a model with at least as many ids")
    return PretrainedModel(model, name, get_tokenizer(name), window, state, folder)


def _load(folder: Path) -> tuple[GPT, State | None]:
    """Returns (model, state) of a checkpoint or a Hugging Face directory."""
    return (from_hf(folder), None) if (folder / CONFIG).is_file() else load_model(folder)


def _folder(path: str | Path, key: str) -> Path:
    """Returns the checkpoint or the Hugging Face directory for a path."""
    text = str(path)
    if text.startswith(hub.HUB):
        config = hub.download(text, key, [CONFIG]) / CONFIG
        model_config(config)  # raises before the weights are downloaded
        return hub.download(text, key, hub.FILES)
    if (Path(path) / CONFIG).is_file():
        return Path(path)
    is_name = hub.MODEL_NAME.fullmatch(text) and ("/" not in text or not Path(text).parent.exists())
    if is_name and not os.path.lexists(text) and not similar_run(Path(text)):
        hint = f"give a run directory or a checkpoint; hub:{text} downloads it from Hugging Face"
        raise CheckpointError(key, text, "directory not found", hint)
    return find_checkpoint(path, key)
