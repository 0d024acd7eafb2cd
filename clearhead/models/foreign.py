"""Loads a model of any architecture for the lens, and the checkpoints of a training, in order.

    foreign = load_any("hub:EleutherAI/pythia-14m@step1000")  # through transformers
    for step, path in series("out/checkpoint-*"): ...

Models that model.py computes are loaded by pretrained.py, without transformers. No file is ever
unpickled, and no code of a model is executed.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint.format import MAX_STATE_BYTES
from clearhead.checkpoint.listing import is_checkpoint
from clearhead.errors import CheckpointError, DamagedCheckpointError, message_of
from clearhead.files import read_json
from clearhead.models.huggingface import CONFIG, read_config
from clearhead.models.pretrained import (
    FILES,
    TOKENIZER_FILES,
    PretrainedModel,
    download,
    load_pretrained,
    revisions,
)
from clearhead.tokens import HUB
from headlens import lens_tokenizer, trainer_curves

TRAINER_STATE = "trainer_state.json"  # of transformers' Trainer
ADAPTER = "adapter_config.json"  # of PEFT
VOCABULARY = ("tokenizer.json", "vocab.json", "*.model", "vocab.txt")
MAX_WINDOW = 1024  # tokens; the weights of all heads grow with its square
MERGE = "merge it: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
SAFE = {"trust_remote_code": False, "local_files_only": True}


@dataclass
class ForeignModel:
    """A model of transformers with its tokenizer. Its fields are those of PretrainedModel."""

    model: Any  # a PreTrainedModel, fp32, in eval mode
    tokenizer: Any
    window: int  # maximum number of tokens of a prompt
    folder: Path
    state: None = None


def load_any(
    path: str, key: str = "checkpoint", tokenizer: str | None = None
) -> PretrainedModel | ForeignModel:
    """Loads a run, a checkpoint, or a Hugging Face directory or hub:NAME of any architecture.

    tokenizer: a directory or hub:NAME with the tokenizer, if the model's has none. Raises
    CheckpointError, naming the setting `key` or "tokenizer".
    """
    is_hugging_face = path.startswith(HUB) or (Path(path) / CONFIG).is_file()
    config = _folder(path, key, [CONFIG]) / CONFIG if is_hugging_face else None
    if config and tokenizer:
        return _load(path, key, tokenizer, config)
    try:
        return load_pretrained(path, key)
    except DamagedCheckpointError:
        raise
    except CheckpointError:
        if config:  # another architecture or tokenizer than ours
            return _load(path, key, tokenizer, config)
        raise


def _load(path: str, key: str, tokenizer: str | None, config: Path) -> ForeignModel:
    try:
        import transformers
    except ImportError as error:
        kind = read_config(config).get("model_type")
        reason = f"a model of type {kind!s:.40} needs the package transformers"
        raise CheckpointError(key, path, reason, "pip install transformers accelerate") from error
    folder = _folder(path, key, FILES)
    if (folder / ADAPTER).is_file():
        raise CheckpointError(key, path, "has an adapter (PEFT) next to its weights", MERGE)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        # With the config as an argument, an implementation of attention in config.json is not used.
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=transformers.AutoConfig.from_pretrained(folder, **SAFE),
            attn_implementation="eager",
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **SAFE,
        )
    except Exception as error:  # of the config, the files or the weights; it has many types
        hint = "give a decoder that transformers loads, with model.safetensors"
        raise CheckpointError(key, path, _short(error), hint) from error
    if missing := sorted(loaded["missing_keys"]):
        reason = f"{len(missing)} weights are missing, such as {missing[0]:.80}"
        raise CheckpointError(key, path, reason, "use another checkpoint")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    window = min(positions or MAX_WINDOW, MAX_WINDOW)
    return ForeignModel(model.eval(), _tokenizer(tokenizer, folder, path), window, folder)


def _tokenizer(given: str | None, model: Path, path: str) -> Any:
    """Returns the tokenizer of a model. Raises CheckpointError, naming the setting "tokenizer"."""
    from transformers import AutoTokenizer

    folder = _folder(given, "tokenizer", [*TOKENIZER_FILES, CONFIG]) if given else model
    try:
        if not any(file.is_file() for name in VOCABULARY for file in folder.glob(name)):
            raise OSError("no vocabulary file")  # transformers would return an empty tokenizer
        found = AutoTokenizer.from_pretrained(folder, **SAFE)
        lens_tokenizer(found)  # refuses a slow one, which does not know the bytes of a token
        return found
    except Exception as error:  # of its files; it has many types
        reason = f"no tokenizer for {path} ({_short(error)})" if not given else _short(error)
        hint = "set tokenizer=DIR, or tokenizer=hub:NAME"
        raise CheckpointError("tokenizer", given, reason, hint) from error


def _folder(path: str, key: str, files: list[str]) -> Path:
    """Returns the folder of a directory or of hub:NAME."""
    return download(path, key, files) if path.startswith(HUB) else Path(path)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(message_of(error).split())[:200]}"


def series(pattern: str, key: str = "checkpoints") -> list[tuple[int, str]]:
    """Returns (step, path) of each checkpoint, in the order of their steps.

    pattern: with * in its last part, such as out/checkpoint-* (of transformers' Trainer) or
    runs/NAME/checkpoints/step_*, or hub:NAME@REVISION,REVISION or hub:NAME@PATTERN. The step is the
    one in trainer_state.json, the digits after "step", or those at the end of the name. Raises
    CheckpointError.
    """
    if pattern.startswith(HUB):
        paths = revisions(pattern, key)
    else:
        paths = [path for path in glob.glob(pattern) if _is_model(path)]
    if not paths:
        hint = "give a pattern such as 'out/checkpoint-*' or 'hub:NAME@step*'"
        raise CheckpointError(key, pattern, "no checkpoint matches", hint)
    return sorted({_step(path, key): path for path in sorted(paths)}.items())


def series_name(pattern: str) -> str:
    """Returns the name of the training: that of the folder of its checkpoints, or hub:NAME."""
    if pattern.startswith(HUB):
        return pattern.partition("@")[0]
    folder = Path(pattern).absolute().parent
    return folder.parent.name if folder.name == "checkpoints" else folder.name


def curves_of(path: str) -> dict[str, list[tuple[int, float]]]:
    """Returns the losses in trainer_state.json, {name: [(step, loss)]}; {} without the file."""
    file = Path(path) / TRAINER_STATE
    if path.startswith(HUB) or not file.is_file():
        return {}
    return trainer_curves(_trainer_state(file).get("log_history", []))


def _trainer_state(file: Path) -> dict:
    """Returns the content of trainer_state.json. Raises ValueError."""
    content = read_json(file, MAX_STATE_BYTES)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _is_model(folder: str) -> bool:
    return (Path(folder) / CONFIG).is_file() or is_checkpoint(Path(folder))


def _step(path: str, key: str) -> int:
    """Returns the step of a checkpoint."""
    if (file := Path(path) / TRAINER_STATE).is_file():
        try:
            return int(_trainer_state(file)["global_step"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"{TRAINER_STATE} cannot be read ({_short(error)})"
            raise CheckpointError(key, path, reason, "use another checkpoint") from error
    # `last` of our runs is a link
    name = path.partition("@")[2] or Path(path).resolve().name
    # step1000-tokens4B of OLMo is step 1000
    digits = re.search(r"step\D?(\d+)", name) or re.search(r"(\d+)\D*$", name)
    if not digits:
        hint = "name it such as checkpoint-1000"
        raise CheckpointError(key, path, "there is no step in its name", hint)
    return int(digits[1])
