"""Downloads models from the Hugging Face Hub (hub:NAME) into the cache of huggingface_hub.

Weights are downloaded only here, and only for paths that start with hub:. Requires
huggingface_hub; its environment variables apply (HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME, HF_TOKEN).
"""

import re
from pathlib import Path

from clearhead.errors import CheckpointError, message_of
from clearhead.tokens.paths import HUB  # "hub:", also used by data.path

MODEL_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
CONFIG = "config.json"
TOKENIZER_FILES = ["tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"]
TOKENIZER_FILES += ["tokenizer_config.json"]
FILES = [CONFIG, "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
FILES += TOKENIZER_FILES


def download(path: str, key: str, files: list[str]) -> Path:
    """Returns the folder with these files of hub:NAME, downloaded unless they are in the cache.

    Raises CheckpointError, naming the setting `key`.
    """
    name = path.removeprefix(HUB)
    if not MODEL_NAME.fullmatch(name) or ".." in name:
        hint = "for example hub:openai-community/gpt2"
        raise CheckpointError(key, path, "not a valid model name", hint)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=files))
    except ImportError as error:
        reason = "paths on the Hugging Face Hub require the package huggingface_hub"
        raise CheckpointError(key, path, reason, "pip install huggingface_hub") from error
    except Exception as error:  # network and disk errors have many types
        reason = f"download failed ({type(error).__name__}: {message_of(error)[:200]})"
        hint = "check the name and the network; private and gated models require HF_TOKEN"
        raise CheckpointError(key, path, reason, hint) from error
