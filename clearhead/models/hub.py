"""Downloads models from the Hugging Face Hub (hub:NAME or hub:NAME@REVISION) into the cache of
huggingface_hub.

Weights are downloaded only here, and only for paths that start with hub:. Requires
huggingface_hub; its environment variables apply (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME, HF_TOKEN).
"""

import contextlib
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

from clearhead.errors import CheckpointError, message_of
from clearhead.tokens import HUB

MODEL_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
REVISION = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})*", re.ASCII)  # a branch, a tag or a commit
CONFIG = "config.json"
TOKENIZER_FILES = ["tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"]
TOKENIZER_FILES += ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"]
FILES = [CONFIG, "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
FILES += TOKENIZER_FILES


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
