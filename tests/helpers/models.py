"""Small models, their inputs, and the ids that they generate."""

import functools

import torch

from clearhead.models.decoding import Sampling, generate
from model import GPT, ModelConfig

TINY_MODEL = {
    "vocab_size": 23,
    "context_length": 12,
    "emb_dim": 16,
    "num_heads": 4,
    "num_layers": 2,
    "dropout": 0.0,
}


def tiny_model(seed: int = 0, std: float | None = 0.3, **changes) -> GPT:
    """Returns a small model. std: standard deviation of the weights, large enough that every module
    changes the logits; None: the initialisation of GPT-2. changes: overrides of TINY_MODEL."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**TINY_MODEL | changes))
    if std is None:
        return model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm.weight" in name else 0.0, std=std)
        model.pos_emb.weight.mul_(3)  # otherwise greedy text repeats one token
    return model


def with_changed_inputs(projections, change, run):
    """Returns run() while change(layer, context) replaces the input of each output projection."""

    def hook(layer, _, arguments):
        return (change(layer, arguments[0].clone()),)

    hooks = [
        projection.register_forward_pre_hook(functools.partial(hook, layer))
        for layer, projection in enumerate(projections)
    ]
    try:
        return run()
    finally:
        for handle in hooks:
            handle.remove()


def random_ids(
    B: int = 2, T: int = 9, seed: int = 1, vocab_size: int = TINY_MODEL["vocab_size"]
) -> torch.Tensor:
    """Returns random token ids (B, T)."""
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


GREEDY = Sampling(temperature=0)
PROMPTS = [random_ids(B=1, T=n, seed=n)[0].tolist() for n in (3, 12, 1, 30, 7)]  # of 12 positions


def generated_ids(model, prompts, num_tokens, sampling=GREEDY, **options):
    """Returns the generated ids of each prompt, greedy by default."""
    steps = generate(model, prompts, num_tokens, sampling, **options)
    return [list(row) for row in zip(*steps, strict=True)]
