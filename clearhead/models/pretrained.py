"""Loads a trained model from a run, a checkpoint, a Hugging Face directory or hub:NAME.

Models are downloaded only here, and only for paths that start with hub:, into the cache of
huggingface_hub, whose environment variables apply (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME, HF_TOKEN).

    pretrained = load_pretrained("runs/NAME")
    ids = pretrained.tokenizer.encode("The ferry bell")
    logits, _ = pretrained.model(torch.tensor([ids]))
"""

import contextlib
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clearhead.checkpoint.format import State
from clearhead.checkpoint.listing import find_checkpoint, read_found
from clearhead.checkpoint.tensors import load_model
from clearhead.errors import CheckpointError, message_of
from clearhead.models.huggingface import (
    CLEARHEAD,
    CONFIG,
    from_hf,
    model_config,
    read_config,
)
from clearhead.tokens import HUB, VOCABULARIES
from clearhead.tokens.tokenizer import Tokenizer, get_tokenizer
from clearhead.tokens.tokenizer_json import TOKENIZER, read_tokenizer
from model import GPT

MODEL_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
REVISION = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})*", re.ASCII)  # a branch, a tag or a commit
TOKENIZER_FILES = ["tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"]
TOKENIZER_FILES += ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"]
FILES = [CONFIG, "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
FILES += TOKENIZER_FILES


@dataclass
class PretrainedModel:
    """A trained model with its tokenizer and information about its training."""

    model: GPT  # in eval mode
    tokenizer: Tokenizer
    window: int  # the number of trained positions; the model may have more
    state: State | None  # None for a Hugging Face directory
    folder: Path  # the checkpoint or the Hugging Face directory


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
    if text.startswith(HUB):
        config = download(text, key, [CONFIG]) / CONFIG
        model_config(config)  # raises before the weights are downloaded
        return download(text, key, FILES)
    return Path(path) if (Path(path) / CONFIG).is_file() else find_checkpoint(path, key)


# ---------------------------------------------------------------------------- Hugging Face Hub


def download(path: str, key: str, files: list[str]) -> Path:
    """Returns the folder with these files of hub:NAME, downloaded unless they are in the cache.

    Raises CheckpointError, naming the setting `key`.
    """
    name, revision = _parts(path, key)
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(key, path, "not a valid revision", "for example hub:NAME@step1000")
    with _hub_errors(path, key):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=files))


def revisions(path: str, key: str) -> list[str]:
    """Returns hub:NAME@REVISION for each revision of hub:NAME@A,B,...; one with * is a pattern of
    branches and tags. Raises CheckpointError, naming the setting `key`."""
    name, wanted = _parts(path, key)
    found: dict[str, None] = {}
    for pattern in (wanted or "").split(","):
        if "*" not in pattern:
            found[pattern] = None
            continue
        with _hub_errors(path, key):
            from huggingface_hub import HfApi

            refs = HfApi().list_repo_refs(name)
        names = [ref.name for ref in [*refs.branches, *refs.tags]]
        found |= dict.fromkeys(fnmatch.filter(names, pattern))
    return [f"{HUB}{name}@{revision}" for revision in found]


def _parts(path: str, key: str) -> tuple[str, str | None]:
    """Returns the name and the revision of hub:NAME@REVISION."""
    name, at, revision = path.removeprefix(HUB).partition("@")
    if not MODEL_NAME.fullmatch(name) or ".." in name:
        hint = "for example hub:openai-community/gpt2"
        raise CheckpointError(key, path, "not a valid model name", hint)
    return name, revision if at else None


@contextlib.contextmanager
def _hub_errors(path: str, key: str) -> Iterator[None]:
    """Translates the errors of a download to a CheckpointError."""
    try:
        yield
    except ImportError as error:
        reason = "paths on the Hugging Face Hub require the package huggingface_hub"
        raise CheckpointError(key, path, reason, "pip install huggingface_hub") from error
    except Exception as error:  # network and disk errors have many types
        reason = f"download failed ({type(error).__name__}: {message_of(error)[:200]})"
        hint = "check the name and the network; private and gated models require HF_TOKEN"
        raise CheckpointError(key, path, reason, hint) from error
