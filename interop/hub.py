"""Models of the Hugging Face hub: hub:NAME, fetched once into the library's cache.

The only place where weights come over the network: the user asks for it with hub:. Needs
huggingface_hub, and follows its HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN.
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
    """Whether a setting is a model of the hub."""
    return str(path).startswith(HUB)


def fetch(path: str, key: str = "checkpoint", check: Callable = lambda config: None) -> Path:
    """The folder with config.json and the weights of hub:NAME, fetched unless they are cached.

    check: called with config.json before the large weights are fetched; raises CheckpointError when
    they cannot be used. Raises CheckpointError, naming the setting `key`.
    """
    try:
        return _fetched(path.removeprefix(HUB), check)
    except _NotFetched as error:
        raise CheckpointError(key, path, *error.args) from error


class _NotFetched(Exception):
    """Arguments: the reason and the hint of the CheckpointError."""


@functools.cache
def _fetched(name: str, check: Callable) -> Path:
    if not NAME.fullmatch(name) or ".." in name:
        raise _NotFetched("is not the name of a model", "such as hub:openai-community/gpt2")
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        hint = "pip install huggingface_hub"
        raise _NotFetched("the Hugging Face hub needs huggingface_hub", hint) from error
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    download = functools.partial(snapshot_download, name)
    offline = "fetch it on a machine with a network, or give a folder"
    try:
        config = Path(download(allow_patterns=CONFIG)) / CONFIG
        if config.is_file():
            check(config)
        folder = Path(download(allow_patterns=SAFE))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(download(allow_patterns=[*SAFE, OLD]))
        return folder
    except CheckpointError:  # from check
        raise
    # The order matters: GatedRepoError is a RepositoryNotFoundError.
    except errors.GatedRepoError as error:
        hint = "ask for access on its page, and set HF_TOKEN"
        raise _NotFetched("is gated: its owner must grant access", hint) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no answer"
        reason = f"the hub cannot be reached ({why}), and the model is not in the cache"
        raise _NotFetched(reason, offline) from error
    except errors.RepositoryNotFoundError as error:
        reason = "no such model on the hub, or a private one"
        raise _NotFetched(reason, "check the name, or set HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        hint = "set HF_TOKEN to a token with access" if status in (401, 403) else "try again later"
        raise _NotFetched(f"the hub answers with {status}", hint) from error
    except Exception as error:  # network and disk raise many types
        reason = f"cannot be fetched ({type(error).__name__}: {message_of(error)[:200]})"
        hint = "check the network and the free disk space"
        raise _NotFetched(reason, hint) from error
