"""Initial weights from a trained model: `trainer.init_from`."""

from typing import TYPE_CHECKING

import torch

from errors import Problem, as_yaml, refuse
from interop.pretrained import load_pretrained
from model import GPT, ModelConfig

if TYPE_CHECKING:
    from training.config.schema import Config

# What the weights and the model must have in common; for positions there is a rule.
SHAPE = ("vocab_size", "emb_dim", "num_heads", "num_layers", "qkv_bias")


def initial_weights(settings: "Config", notes: list[str]) -> GPT:
    """A model with the weights of trainer.init_from. Raises ConfigError if they do not fit.

    Dropout and the kernel are this run's choice; the weights fit all of them. Biases of queries,
    keys and values that the weights lack begin as zeros; for positions see `positions`. notes: gets
    a line when the run uses positions that were not trained.
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
            fix = f"use model.{key}={as_yaml(have)}"
            problems.append(Problem(f"model.{key}", want, f"{theirs} have {as_yaml(have)}", fix))
    if (name := settings.data.tokenizer) != (needed := pretrained.tokenizer_name):
        cause = f"{theirs} were trained with {needed}"
        problems.append(Problem("data.tokenizer", name, cause, f"use data.tokenizer={needed}"))
    refuse(problems)
    weights = pretrained.model.state_dict()
    sizes = (pretrained.window, wanted.context_length, settings.data.max_length)
    weights["pos_emb.weight"], more = positions(weights["pos_emb.weight"], *sizes)
    notes.extend(more)
    with torch.device("meta"):  # nothing is held twice
        fresh = GPT(wanted)
    for name, parameter in fresh.named_parameters():
        if name not in weights:  # a bias
            weights[name] = torch.zeros(parameter.shape)
    fresh.load_state_dict(weights, assign=True)
    return fresh


def positions(
    learned: torch.Tensor, window: int, context_length: int, used: int
) -> tuple[torch.Tensor, list[str]]:
    """Position vectors (context_length, C) from a model's (S, C), of which `window` were trained,
    and a note if the run, which uses `used` of them, uses others than the trained ones.

    A shorter context has the first ones. A longer one repeats the trained ones, as Longformer did
    at its start (Beltagy et al. 2020): neighbouring positions then differ as they did before.
    """
    rows = learned[torch.arange(context_length) % window]
    note = f"model.context_length={context_length}: the weights have {window} trained positions; "
    if context_length < window:
        return rows, [f"{note}the first are used"]
    if used > window or len(learned) != context_length > window:
        repeated = f"they are repeated from position {window} on; "
        return rows, [f"{note}{repeated}data.max_length={window} stays within them"]
    return rows, []
