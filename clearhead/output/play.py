"""The page of a run on which people type into its model: one file, with the weights.

    write_play_page(Path("runs/first"), state="finished")  # runs/first/play.html

It is run.html with the key `model` in its data. headlens/page/embedded.js runs the model:

    config       {vocab_size, context_length, emb_dim, num_heads, num_layers}
    tokenizer    see headlens/page/tokenizer.js
    tensors      [[name, shape]] of the parameters
    checkpoints  [{step, weights, means}], packed as other data of the page

weights: of each tensor, a vector being one row, first the scale of each row, float32, then the
values, int16: value * scale is the parameter, with an error of at most 1/65,534 of the largest one
of the row. means: float32 (L, C), the mean context vectors of all heads, which replace the context
vector of a head that is switched off. Numbers are little endian.
"""

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from attention import SCORES
from clearhead.checkpoint.listing import list_checkpoints, step_of
from clearhead.config.schema import ModelSettings
from clearhead.config.stored import settings_of
from clearhead.config.validation import validate
from clearhead.files import atomic_write
from clearhead.models.pretrained import load_pretrained
from clearhead.output.report import run_page
from clearhead.tokens.tokenizer import Tokenizer
from headlens import Reader, last_snapshot, mean_contexts
from model import GPT, ModelConfig, model_without_values

PLAY_HTML = "play.html"
MAX_PARAMETERS = 3_000_000  # a browser computes a text of 128 tokens in a second
MAX_CHECKPOINTS = 8
MAX_WEIGHTS = 10_000_000  # bytes of all checkpoints in the page, which has 1 to 2 MB besides
LEVELS = 2**15 - 1


def why_not(folder: Path) -> str | None:
    """Returns why a run has no page with its model; None if it has one."""
    settings, problems = validate(ModelSettings, (settings_of(folder) or {}).get("model"))
    if problems or settings.vocab_size is None or not list_checkpoints(folder):
        return "the run has no checkpoint"
    if settings.attention in SCORES:
        return f"model.attention={settings.attention} has other attention scores than GPT-2"
    count = model_without_values(ModelConfig(**settings.model_dump())).num_parameters()
    if count > MAX_PARAMETERS:
        return f"the model has {count:,} parameters; a page runs at most {MAX_PARAMETERS:,}"
    return None if last_snapshot(folder / "attention") else "the run has no attention snapshot"


def write_play_page(folder: Path, state: str) -> Path | None:
    """Writes folder/play.html; returns its path, or None if the run has no such page. state: as for
    write_run_page. Raises CheckpointError."""
    if why_not(folder):
        return None
    atomic_write(folder / PLAY_HTML, run_page(folder, state, packed_model(folder)))
    return folder / PLAY_HTML


def packed_model(folder: Path) -> dict:
    """Returns the model of a run for its page, with at most MAX_CHECKPOINTS of its checkpoints in
    at most MAX_WEIGHTS: evenly spaced, with the first and the last; at least the last."""
    snapshot, newest_first = last_snapshot(folder / "attention"), list_checkpoints(folder)
    newest = load_pretrained(newest_first[0], "run")
    config, found = newest.model.config, snapshot.token_ids if snapshot else []
    prompts = [ids for ids in found if len(ids) <= config.context_length]
    prompts = [ids for ids in prompts if max(ids) < config.vocab_size] or [[0]]
    window = min(newest.window, Reader.MOST)
    last = _packed_checkpoint(newest.model, window, newest_first[0], prompts)
    most = min(MAX_CHECKPOINTS, MAX_WEIGHTS // len(last["weights"]), len(newest_first))
    apart = (len(newest_first) - 1) / max(1, most - 1)
    checkpoints = [last]
    for number in range(1, most):
        found = newest_first[round(number * apart)]
        model = load_pretrained(found, "run").model
        checkpoints.append(_packed_checkpoint(model, window, found, prompts))
    sizes = ("vocab_size", "emb_dim", "num_heads", "num_layers")
    return {
        "config": {key: getattr(config, key) for key in sizes} | {"context_length": window},
        "tokenizer": packed_tokenizer(newest.tokenizer),
        "tensors": [[name, t.shape] for name, t in _tensors(newest.model, window)],
        "checkpoints": checkpoints[::-1],
    }


def packed_tokenizer(tokenizer: Tokenizer) -> dict:
    """Returns a tokenizer for the page."""
    words = [tokenizer.decode_single_token_bytes(token) for token in range(tokenizer.n_vocab)]
    content = b"".join(struct.pack("<H", len(word)) + word for word in words)
    special = sorted(tokenizer.special.values())
    return {"pattern": tokenizer.pattern, "words": _packed(content), "special": special}


def _packed_checkpoint(model: GPT, window: int, folder: Path, prompts: list[list[int]]) -> dict:
    content = []
    for _, tensor in _tensors(model, window):
        rows = tensor.reshape(-1, tensor.shape[-1])
        scales = np.abs(rows).max(1, keepdims=True) / LEVELS
        values = np.round(rows / np.where(scales > 0, scales, 1))
        content += [scales.astype("<f4").tobytes(), values.astype("<i2").tobytes()]
    means = torch.stack(mean_contexts(model, prompts))
    return {
        "step": step_of(folder),
        "weights": _packed(b"".join(content)),
        "means": _packed(means.flatten(1).numpy().astype("<f4").tobytes()),
    }


def _tensors(model: GPT, window: int) -> list[tuple[str, np.ndarray]]:
    """Returns the parameters by name; of the positions only those that the page uses."""
    found = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    found["pos_emb.weight"] = found["pos_emb.weight"][:window]
    return [*found.items()]


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()
