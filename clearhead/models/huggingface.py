"""Reads and writes Hugging Face GPT-2 directories: `from_hf` and `to_hf`.

Hugging Face's parameters differ from those of model.py in three ways. Queries, keys and values have
one common weight matrix, `c_attn`. Each projection is a `Conv1D`, whose weight is the transpose of
a Linear's weight. Names may have the prefix `transformer.`, and old files contain causal masks. The
files are safetensors, possibly in shards, and JSON. The transformers library is not needed.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from attention import SCORES
from clearhead.checkpoint.format import MAX_STATE_BYTES
from clearhead.checkpoint.tensors import model_from_tensors, pickle_error, read_tensors
from clearhead.config.schema import ModelSettings
from clearhead.config.validation import validate
from clearhead.errors import CheckpointError, DamagedCheckpointError, message_of
from clearhead.files import read_json
from clearhead.tokens.tokenizer import Tokenizer
from model import GPT, ModelConfig

CONFIG = "config.json"
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CLEARHEAD = "clearhead"  # key in config.json of our settings: tokenizer, window, qkv_bias

# Our name: Hugging Face name. Each module of a block has a weight and a bias.
BLOCK_MODULES = {
    "attn_norm": "ln_1",
    "attn.out_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.out_proj": "mlp.c_proj",
}
OTHER_NAMES = {
    "token_emb.weight": "wte.weight",
    "pos_emb.weight": "wpe.weight",
    "final_norm.weight": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
}
PROJECTIONS = ("W_query", "W_key", "W_value")  # in the order of c_attn
SIZES = {  # our name: name in config.json
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "emb_dim": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
}
# Equal up to rounding. model.py and config.json use the first.
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")

# If config.json contains one of these keys, model.py supports only this value.
REQUIRED: dict[str, object] = {
    "model_type": "gpt2",
    "activation_function": TANH_GELUS[0],
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def from_hf(folder: str | Path, attention: str = "sdpa") -> GPT:
    """Returns the model of a Hugging Face GPT-2 directory (config.json and weights) in eval mode.

    Raises CheckpointError if it is not a GPT-2 or is a variant that model.py cannot compute.
    """
    folder = Path(folder)
    config = model_config(folder / CONFIG, attention)
    file, tensors = _weights(folder)
    theirs = {
        name.removeprefix("transformer."): value
        for name, value in tensors.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # masks, in old files
    }
    head = theirs.pop("lm_head.weight", None)  # some files contain the tied head too
    try:
        ours = _from_hf_names(theirs, config.num_layers)
    except KeyError as error:
        raise gpt2_error(file, f"{error.args[0]} is missing") from error
    if theirs:
        raise gpt2_error(file, f"unknown tensor {min(theirs):.80}")
    model = model_from_tensors(config, ours, file)
    if head is not None and not torch.equal(head.float(), model.token_emb.weight):
        raise gpt2_error(file, "lm_head.weight differs from wte.weight")
    return model


def to_hf(
    model: GPT, folder: str | Path, tokenizer: Tokenizer | None = None, window: int | None = None
) -> None:
    """Writes config.json and model.safetensors, from which transformers loads the same model.

    window: the number of trained positions.
    """
    theirs = {name: value.contiguous() for name, value in hf_tensors(model).items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(theirs, folder / SINGLE_FILE, {"format": "pt"})
    c = model.config
    end_of_text = tokenizer.eot_token if tokenizer else None
    settings = REQUIRED | {name: getattr(c, key) for key, name in SIZES.items()}
    settings["n_ctx"] = c.context_length  # llama.cpp reads it to convert the directory to GGUF
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout)
    settings |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    settings["architectures"] = ["GPT2LMHeadModel"]
    if tokenizer:
        window = window or c.context_length
        ours = {"tokenizer": tokenizer.name, "window": window, "qkv_bias": c.qkv_bias}
        settings[CLEARHEAD] = ours
    write_json(folder / CONFIG, settings)
    # save_file makes files readable by the owner only.
    (folder / SINGLE_FILE).chmod((folder / CONFIG).stat().st_mode)


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def hf_tensors(model: GPT) -> dict[str, Tensor]:
    """Returns the weights with Hugging Face's names and layout, in fp32.

    Their GPT-2 always has biases for queries, keys and values; they are 0 for a model without them.
    Raises CheckpointError for a kernel that computes other attention scores.
    """
    if (kernel := model.config.attention) in SCORES:
        reason = "the kernel has other attention scores than GPT-2 in other programs"
        hint = "export a model with another kernel"
        raise CheckpointError("model.attention", kernel, reason, hint)
    ours = {name: value.detach().float() for name, value in model.named_parameters()}
    c = model.config
    theirs = {
        f"transformer.{name}": ours[key].T if transposed else ours[key]
        for key, name, transposed in _names(c.num_layers)
    }
    for layer in range(c.num_layers):
        attn = f"blocks.{layer}.attn"
        weights = [ours[f"{attn}.{which}.weight"].T for which in PROJECTIONS]  # (C, C) each
        theirs[f"transformer.h.{layer}.attn.c_attn.weight"] = torch.cat(weights, dim=1)  # (C, 3 C)
        zeros = torch.zeros_like(ours[f"{attn}.out_proj.bias"])
        biases = [ours.get(f"{attn}.{which}.bias", zeros) for which in PROJECTIONS]
        theirs[f"transformer.h.{layer}.attn.c_attn.bias"] = torch.cat(biases)  # (3 C,)
    return theirs


def _names(num_layers: int) -> Iterator[tuple[str, str, bool]]:
    """Yields our name, theirs, and whether it is a transposed matrix, of all parameters except the
    projections of attention."""
    for key, name in OTHER_NAMES.items():
        yield key, name, False
    for layer, (key, name) in itertools.product(range(num_layers), BLOCK_MODULES.items()):
        for kind in ("weight", "bias"):
            transposed = kind == "weight" and "norm" not in key
            yield f"blocks.{layer}.{key}.{kind}", f"h.{layer}.{name}.{kind}", transposed


def read_config(file: Path) -> dict:
    """Returns the contents of a config.json. Raises CheckpointError if it cannot be read."""
    try:
        theirs = read_json(file, MAX_STATE_BYTES)
        if not isinstance(theirs, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise gpt2_error(file, f"cannot be read ({message_of(error)})") from error
    return theirs


def gpt2_error(file: Path, reason: str) -> CheckpointError:
    return CheckpointError("checkpoint", file, reason, "use a standard GPT-2")


def _weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Returns (the weights file or index, the tensors by name), memory-mapped if possible."""
    if (folder / SINGLE_FILE).is_file():
        return folder / SINGLE_FILE, read_tensors(folder / SINGLE_FILE)
    if (folder / INDEX).is_file():
        return folder / INDEX, _read_shards(folder / INDEX)
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
        raise pickle_error(pickles[0], f", and there is no {SINGLE_FILE}")
    raise DamagedCheckpointError(folder / SINGLE_FILE, "file not found")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Returns the tensors of all files in an index."""
    weight_map = read_config(index).get("weight_map")
    names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else {"nothing"}
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise gpt2_error(
                index, f"lists {name!r:.80}, which is not a safetensors file in this folder"
            )
        tensors |= read_tensors(index.with_name(name))
    return tensors


def model_config(file: Path, attention: str = "sdpa") -> ModelConfig:
    theirs = read_config(file)
    if theirs.get("activation_function") in TANH_GELUS:
        theirs["activation_function"] = TANH_GELUS[0]
    for key, needed in REQUIRED.items():
        if theirs.get(key, needed) != needed:
            reason = f"{key} is {theirs[key]!r:.80}, only {needed!r} is supported"
            raise gpt2_error(file, reason)
    # The default values of transformers are GPT-2 small, as ours are.
    values = {key: theirs.get(name, getattr(ModelConfig, key)) for key, name in SIZES.items()}
    values |= {"dropout": theirs.get("resid_pdrop", 0.1), "qkv_bias": True, "attention": attention}
    settings, problems = validate(ModelSettings, values)
    if settings is None:
        key = problems[0].key
        reason = problems[0].reason.replace("model.emb_dim", SIZES["emb_dim"])
        raise gpt2_error(file, f"{SIZES.get(key, key)}: {reason}")
    if theirs.get("n_inner") not in (None, 4 * settings.emb_dim):
        raise gpt2_error(file, "n_inner is not 4 * n_embd")
    return ModelConfig(**settings.model_dump())


def _from_hf_names(theirs: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Removes all known tensors from `theirs` and returns them with our names and layout."""
    ours = {
        key: theirs.pop(name).T if transposed else theirs.pop(name)
        for key, name, transposed in _names(num_layers)
    }
    for layer in range(num_layers):
        weight = theirs.pop(f"h.{layer}.attn.c_attn.weight")  # (C, 3 C)
        bias = theirs.pop(f"h.{layer}.attn.c_attn.bias")  # (3 C,)
        for which, w, b in zip(PROJECTIONS, weight.chunk(3, dim=1), bias.chunk(3), strict=True):
            ours[f"blocks.{layer}.attn.{which}.weight"] = w.T  # (C, C)
            ours[f"blocks.{layer}.attn.{which}.bias"] = b
    return ours
