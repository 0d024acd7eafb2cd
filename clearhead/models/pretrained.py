"""Loads a trained model from a run, a checkpoint, a Hugging Face directory or hub:NAME.

pretrained = load_pretrained("runs/NAME")
ids = pretrained.tokenizer.encode("The ferry bell")
logits, _ = pretrained.model(torch.tensor([ids]))
"""

import os
from dataclasses import dataclass
from pathlib import Path

from clearhead.checkpoint.format import State
from clearhead.checkpoint.listing import find_checkpoint, read_found, similar_run
from clearhead.checkpoint.tensors import load_model
from clearhead.errors import CheckpointError, message_of
from clearhead.models import hub
from clearhead.models.huggingface import (
    CLEARHEAD,
    CONFIG,
    from_hf,
    model_config,
    read_config,
)
from clearhead.tokens import VOCABULARIES
from clearhead.tokens.tokenizer import Tokenizer, get_tokenizer
from clearhead.tokens.tokenizer_json import TOKENIZER, read_tokenizer
from model import GPT


@dataclass
class PretrainedModel:
    """A trained model with its tokenizer and information about its training."""

    model: GPT  # in eval mode
    tokenizer: Tokenizer
    window: int  # the number of trained positions; the model may have more
    state: State | None  # None for a Hugging Face directory
    folder: Path  # the checkpoint or the Hugging Face directory

    @property
    def sizes(self) -> tuple[int, int]:
        """(layers, heads)"""
        return self.model.config.num_layers, self.model.config.num_heads


def load_pretrained(path: str | Path, key: str = "checkpoint") -> PretrainedModel:
    """Loads a trained model from a run, a checkpoint, a Hugging Face directory or hub:NAME.

    The tokenizer is the one in the directory. Without one it is GPT-2's, or the byte tokenizer if
    there are 257 ids. A Hugging Face directory that was exported from a run contains the window;
    otherwise all positions count as trained. Raises CheckpointError, naming the setting `key`.
    """
    folder, (model, state) = read_found(lambda: _folder(path, key), _load)
    vocab_size, context = model.config.vocab_size, model.config.context_length
    window = context
    name = "byte" if vocab_size == VOCABULARIES["byte"] else "gpt2"
    if state:
        name, window = (state.settings["data"].get(key) for key in ("tokenizer", "max_length"))
    elif isinstance(ours := read_config(folder / CONFIG).get(CLEARHEAD), dict):
        name, window = ours.get("tokenizer"), ours.get("window")
    if not isinstance(name, str) or type(window) is not int or not 1 <= window <= context:
        reason = f"invalid tokenizer {name!r:.40} or window of {window!r:.40} tokens"
        raise CheckpointError(key, path, reason, "use another checkpoint")
    tokenizer = _tokenizer(folder, name, key)
    if vocab_size < (needed := tokenizer.n_vocab):
        reason = (
            f"the model has {vocab_size} token ids, its tokenizer {tokenizer.name} has {needed}"
        )
        raise CheckpointError(key, path, reason, "use a model with at least as many ids")
    return PretrainedModel(model, tokenizer, window, state, folder)


def _tokenizer(folder: Path, name: str, key: str) -> Tokenizer:
    """Returns the tokenizer in a directory; without one, the built-in one with this name."""
    try:
        found = read_tokenizer(folder)
    except (OSError, ValueError) as error:
        hint = "use a model with byte-level BPE, as GPT-2's"
        raise CheckpointError(key, folder, f"its tokenizer {message_of(error)}", hint) from error
    if found is None and name not in VOCABULARIES:
        reason = f"has no {TOKENIZER}, but was trained with {name:.40}"
        raise CheckpointError(key, folder, reason, "use another checkpoint")
    return found or get_tokenizer(name)


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
