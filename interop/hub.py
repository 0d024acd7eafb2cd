"""Models of the Hugging Face hub: hub:NAME, fetched once and kept where its library keeps them.

The one place where weights come over the network, because the user named them so. Needs
huggingface_hub, and obeys its HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN.
"""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from errors import CheckpointError, message_of
from tokens.paths import HUB  # hub:NAME, as data.path has it

NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
CONFIG = "config.json"
SAFE = [CONFIG, "model.safetensors", "model.safetensors.index.json"]
SAFE += ["model-*-of-*.safetensors"]
OLD = "pytorch_model.bin"


def is_named(path: object) -> bool:
    """Whether a setting names a model of the hub."""
    return str(path).startswith(HUB)


def fetch(path: str, key: str = "checkpoint", check: Callable = lambda config: None) -> Path:
    """The folder in which config.json and the weights of hub:NAME are, fetched if need be.

    check: is given config.json before the weights, which are large, are fetched, and raises
    CheckpointError where they are of no use. So does this, naming the setting `key`.
    """
    try:
        return _fetched(path.removeprefix(HUB), check)
    except _NotFetched as error:
        raise CheckpointError(key, path, *error.args) from error


class _NotFetched(Exception):
    """Its arguments are the reason and the hint of the CheckpointError."""


@functools.cache
def _fetched(name: str, check: Callable) -> Path:
    if not NAME.fullmatch(name) or ".." in name:
        raise _NotFetched("is no name of a model", "such as hub:openai-community/gpt2")
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        fix = "pip install huggingface_hub"
        raise _NotFetched("the Hugging Face hub needs huggingface_hub", fix) from error
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    download = functools.partial(snapshot_download, name)
    offline = "fetch it where there is a network, or give a folder"
    try:
        config = Path(download(allow_patterns=CONFIG)) / CONFIG
        if config.is_file():
            check(config)
        folder = Path(download(allow_patterns=SAFE))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(download(allow_patterns=[*SAFE, OLD]))
        return folder
    except CheckpointError:  # of the check
        raise
    # Gated is one kind of not found, and not in the cache is one of no such file.
    except errors.GatedRepoError as error:
        fix = "ask for access on its page, and set HF_TOKEN"
        raise _NotFetched("is gated: its owner has to let you in", fix) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no useful answer"
        cause = f"the hub is not reached ({why}), and it is not in the cache"
        raise _NotFetched(cause, offline) from error
    except errors.RepositoryNotFoundError as error:
        cause = "no such model on the hub, or a private one"
        raise _NotFetched(cause, "check the name, or set HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        fix = "set HF_TOKEN to one that may" if status in (401, 403) else "try again later"
        raise _NotFetched(f"the hub answers with {status}", fix) from error
    except Exception as error:  # of the network, of the disk: many kinds
        cause = f"cannot be fetched ({type(error).__name__}: {message_of(error)[:200]})"
        fix = "check the network and the room on the disk"
        raise _NotFetched(cause, fix) from error
