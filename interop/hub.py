"""Models of the Hugging Face hub: hub:NAME, fetched once into the library's cache.

The only place where weights come over the network: the user asks for it with hub:. Needs
huggingface_hub, and follows its HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN.
"""

import re
from pathlib import Path

from errors import CheckpointError, message_of
from tokens.paths import HUB  # hub:NAME, as data.path has it

MODEL_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
CONFIG = "config.json"
FILES = [CONFIG, "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]


def is_hub_path(path: object) -> bool:
    """Whether a setting is a model of the hub."""
    return str(path).startswith(HUB)


def download(path: str, key: str, files: list[str]) -> Path:
    """The folder with these files of hub:NAME, fetched unless they are cached.

    Raises CheckpointError, naming the setting `key`.
    """
    name = path.removeprefix(HUB)
    if not MODEL_NAME.fullmatch(name) or ".." in name:
        hint = "such as hub:openai-community/gpt2"
        raise CheckpointError(key, path, "is not the name of a model", hint)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=files))
    except ImportError as error:
        reason = "the Hugging Face hub needs huggingface_hub"
        raise CheckpointError(key, path, reason, "pip install huggingface_hub") from error
    except Exception as error:  # network and disk raise many types
        reason = f"cannot be fetched ({type(error).__name__}: {message_of(error)[:200]})"
        hint = "check the name and the network; private and gated models need HF_TOKEN"
        raise CheckpointError(key, path, reason, hint) from error
