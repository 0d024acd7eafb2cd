"""Initial weights of a new run from a trained model: `trainer.init_from`."""

import torch

from attention import SCORES
from clearhead.config.schema import Config
from clearhead.errors import Problem, as_yaml, refuse
from clearhead.models.pretrained import load_pretrained
from clearhead.tokens import VOCABULARIES
from clearhead.tokens.tokenizer import Tokenizer
from model import GPT, ModelConfig, model_without_values

# Settings that must equal those of the weights. For the context length see `positions`.
SHAPE = ("vocab_size", "emb_dim", "num_heads", "num_layers", "qkv_bias")


def initial_weights(config: Config, tokenizer: Tokenizer, notes: list[str]) -> GPT:
    """Returns a model with the weights of trainer.init_from. Raises ConfigError if they do not fit.

    Dropout may differ, and the attention kernel if both have the same scores. Missing biases of
    queries, keys and values start as zeros. Appends notes about unused or untrained positions to
    `notes`.
    """
    source = config.trainer.init_from
    assert source is not None
    wanted = ModelConfig(**config.model.model_dump())
    pretrained = load_pretrained(source, "trainer.init_from")
    given, theirs = pretrained.model.config, f"the weights of trainer.init_from={source}"
    problems, same_tokens = [], tokenizer.name == pretrained.tokenizer.name
    for key in SHAPE if same_tokens else SHAPE[1:]:
        have, want = getattr(given, key), getattr(wanted, key)
        if have != want and not (key == "qkv_bias" and want):
            hint = f"use model.{key}={as_yaml(have)}"
            problems.append(Problem(f"model.{key}", want, f"{theirs} have {as_yaml(have)}", hint))
    if SCORES.get(given.attention) is not SCORES.get(wanted.attention):
        reason, hint = f"{theirs} were trained with another formula", f"use {given.attention}"
        problems.append(Problem("model.attention", wanted.attention, reason, hint))
    if not same_tokens:
        needed = pretrained.tokenizer.name
        reason = f"{theirs} were trained with {needed}"
        hint = f"use data.tokenizer={needed if needed in VOCABULARIES else pretrained.folder}"
        problems.append(Problem("data.tokenizer", config.data.tokenizer, reason, hint))
    refuse(problems)
    weights = pretrained.model.state_dict()
    sizes = (pretrained.window, wanted.context_length, config.data.max_length)
    weights["pos_emb.weight"], more = positions(weights["pos_emb.weight"], *sizes)
    notes.extend(more)
    fresh = model_without_values(wanted)
    for name, parameter in fresh.named_parameters():
        if name not in weights:  # a bias
            weights[name] = torch.zeros(parameter.shape)
    fresh.load_state_dict(weights, assign=True)
    return fresh


def positions(
    learned: torch.Tensor, window: int, context_length: int, used: int
) -> tuple[torch.Tensor, list[str]]:
    """Returns position embeddings (context_length, C) and notes about unused or untrained ones.

    learned: the model's embeddings (S, C), of which the first `window` were trained. used: number
    of positions that the run uses. A shorter context gets the first embeddings. A longer context
    repeats the trained ones, as Longformer does (Beltagy et al. 2020), which preserves the
    differences between neighbouring positions.
    """
    rows = learned[torch.arange(context_length) % window]
    note = f"model.context_length={context_length}: the weights have {window} trained positions; "
    if context_length < window:
        return rows, [f"{note}the first {context_length} are used"]
    if used > window or len(learned) != context_length > window:
        repeated = f"they are repeated for positions {window} and above; "
        return rows, [f"{note}{repeated}data.max_length={window} uses trained positions only"]
    return rows, []
