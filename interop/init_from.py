"""Initial weights from a trained model: `trainer.init_from`."""

from typing import TYPE_CHECKING

import torch

from errors import Problem
from interop.pretrained import load_pretrained
from model import GPT, ModelConfig

if TYPE_CHECKING:
    from training.config.schema import Config

# What the weights and the model must have in common; for positions there is a rule.
SHAPE = ("vocab_size", "emb_dim", "num_heads", "num_layers", "qkv_bias")


def initial_weights(settings: "Config") -> tuple[GPT | None, list[Problem], list[str]]:
    """A model with the weights of trainer.init_from, what does not fit the settings, and what
    there is to know.

    Dropout and the kernel are this run's choice; the weights fit all of them. Biases of queries,
    keys and values that the weights lack begin as zeros; for positions see `positions`.
    """
    source = settings.trainer.init_from
    assert source is not None
    wanted = ModelConfig(**settings.model.model_dump())
    pretrained = load_pretrained(source, "trainer.init_from")
    given, theirs = pretrained.model.config, f"the weights of trainer.init_from={source}"
    problems = []
    for key in SHAPE:
        have, want = getattr(given, key), getattr(wanted, key)
        if have != want and not (key == "qkv_bias" and want):
            have = str(have).lower()
            fix = f"use model.{key}={have}"
            problems.append(Problem(f"model.{key}", want, f"{theirs} have {have}", fix))
    if (name := settings.data.tokenizer) != (needed := pretrained.tokenizer_name):
        cause = f"{theirs} were trained with {needed}"
        problems.append(Problem("data.tokenizer", name, cause, f"use data.tokenizer={needed}"))
    if problems:
        return None, problems, []
    weights = pretrained.model.state_dict()
    weights["pos_emb.weight"], notes = positions(
        weights["pos_emb.weight"],
        pretrained.window,
        wanted.context_length,
        settings.data.max_length,
    )
    with torch.device("meta"):  # nothing is held twice
        fresh = GPT(wanted)
    for name, parameter in fresh.named_parameters():
        if name not in weights:  # a bias
            weights[name] = torch.zeros(parameter.shape)
    fresh.load_state_dict(weights, assign=True)
    return fresh, [], notes


def positions(
    learned: torch.Tensor, window: int, context_length: int, used: int
) -> tuple[torch.Tensor, list[str]]:
    """Position vectors (context_length, C) from a model's (S, C), of which `window` have learned
    something; and what there is to know, when the run will use `used` of them.

    A shorter context has the first of them. A longer one has the learned ones again and again, as
    Longformer's began (Beltagy et al. 2020): near positions then look as they did.
    """
    rows = learned[torch.arange(context_length) % window]
    known = f"the weights know {window} positions"
    if context_length < window:
        return rows, [f"model.context_length={context_length}: {known}; the first are taken"]
    if used > window or len(learned) != context_length > window:
        again = f"position {window} begins as position 0, and so on"
        within = f"data.max_length={window} stays within them"
        return rows, [f"model.context_length={context_length}: {known}; {again}; {within}"]
    return rows, []
