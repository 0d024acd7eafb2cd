"""Equivalence check of benchmarks/training.py: all implementations have to compute the same.

check_implementations   each implementation in fp32, on weights that use every parameter: loss,
                        gradient norm, and loss after one update. Tight tolerances.
check_first_step        the first step of each variant, in its own precision and compiled, on the
                        weights that are timed. Looser, because bf16 is coarse.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

from benchmarks.implementations import HINT, Implementation, NotEquivalent, Variant, load_weights
from benchmarks.runner import Batch
from model import GPT
from training.config.schema import OptimizerConfig
from training.distributed.strategy import Strategy

# Relative tolerances of loss and gradient norm of the first step, by precision. On a CPU
# clip_grad_norm_ in fp32 gives a norm that is a thousandth or more too small.
TOLERANCES = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (1e-3, 2e-2)}
TIGHT = (1e-5, 3e-4, 1e-4)  # in fp32 with the same GELU: loss, gradient norm, loss after an update


@dataclass
class Figures:
    """What an implementation computes from the check's weights and the first batch, in fp32."""

    loss: float
    grad_norm: float
    loss_after: float  # on the same batch, after one optimizer step
    own_gelu: str = "tanh"  # in the project's training; the check uses tanh, as GPT-2 does


def check_implementations(
    implementations: dict[str, Implementation],
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    device: torch.device,
) -> dict[str, Figures]:
    """The figures of each implementation, ours first; NotEquivalent if one differs from ours.

    Fresh weights would hide mistakes: their attention is uniform, so a missing mask changes
    little, and biases of zero equal missing biases.
    """
    perturbed, results, mathematics = perturb(weights), {}, {}
    for key, implementation in implementations.items():
        found, own = _figures(implementation, perturbed, batch, optimizer, device)
        results[key], mathematics[key] = found, own
        if own != mathematics["ours"]:
            reason = f"another AdamW: {own} where ours has {mathematics['ours']}"
            raise NotEquivalent("implementations", key, reason, HINT)
        names = ("loss", "grad_norm", "loss_after")
        for name, tolerance in zip(names, TIGHT, strict=True):
            theirs, ours = getattr(found, name), getattr(results["ours"], name)
            _compare(key, f"{name} in fp32", theirs, ours, tolerance)
    return results


def _figures(
    implementation: Implementation,
    weights: GPT,
    batch: Batch,
    config: OptimizerConfig,
    device: torch.device,
) -> tuple[Figures, list[tuple]]:
    """Two fp32 losses of an implementation, and the mathematics of its optimizer: class and
    hyperparameters of each group with its number of parameters."""
    model = load_weights(implementation, weights).to(device).train()
    optimizer = implementation.optimizer(model, config)
    mathematics = sorted(
        (type(optimizer).__name__, g["lr"], *g["betas"], g["eps"], g["weight_decay"], count)
        for g in optimizer.param_groups
        if (count := sum(p.numel() for p in g["params"]))
    )
    # GELUs of the erf form differ from GPT-2's by up to 5e-4, more than many mistakes.
    gelus = [m for m in model.modules() if isinstance(m, nn.GELU) and m.approximate == "none"]
    for gelu in gelus:
        gelu.approximate = "tanh"
    loss = implementation.loss(model, *batch)
    loss.backward()
    # In fp64: fp32 loses digits when it adds the squares of a large matrix.
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
    optimizer.step()
    with torch.no_grad():
        after = float(implementation.loss(model, *batch))
    return Figures(float(loss.detach()), norm, after, "erf" if gelus else "tanh"), mathematics


def reference(weights: GPT, batch: Batch, strategy: Strategy) -> tuple[float, float]:
    """Our loss and gradient norm on the initial weights, in fp32."""
    model = copy.deepcopy(weights).to(strategy.device).train()
    _, loss = model(*batch)
    loss.backward()
    return float(loss.detach()), float(strategy.total_norm(model))


def check_first_step(
    variant: Variant, loss: float, norm: float, expected: tuple[float, float]
) -> None:
    """NotEquivalent if the first step of a variant differs from ours in fp32."""
    pairs = zip(("loss", "gradient norm"), (loss, norm), expected, strict=True)
    for (name, own, ours), tolerance in zip(pairs, TOLERANCES[variant.dtype], strict=True):
        _compare(variant.implementation, f"first {name} of {variant.name}", own, ours, tolerance)


def _compare(key: str, name: str, own: float, ours: float, tolerance: float) -> None:
    if not abs(own - ours) <= tolerance * abs(ours):  # also true for NaN
        reason = f"not the same computation: the {name} is {own:.7g} and ours {ours:.7g}"
        raise NotEquivalent("implementations", key, reason, HINT)


@torch.no_grad()
def perturb(weights: GPT) -> GPT:
    """A copy whose attention is not uniform and whose biases and norms all matter."""
    perturbed, random = copy.deepcopy(weights), torch.Generator().manual_seed(0)
    for name, parameter in perturbed.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() < 2:
            parameter.add_(0.2 * noise)
        elif not name.endswith("_emb.weight"):
            parameter.copy_(noise / parameter.shape[1] ** 0.5)  # rows of length one
    return perturbed
