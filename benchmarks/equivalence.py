"""Equivalence check of benchmarks/training.py: all implementations must compute the same results.

Gradient norms are computed in fp64: the sum of squares of a large matrix in clip_grad_norm_ in fp32
has a relative error of 0.001 or more on some processors.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from benchmarks.implementations import Implementation, Variant, pad_vocabulary
from clearhead.config.schema import OptimizerConfig
from clearhead.errors import ClearheadError
from clearhead.parallel.strategy import Strategy
from model import GPT

Batch = tuple[Tensor, Tensor]  # input_ids (B, T), target_ids (B, T)
FP32 = Variant("fp32", "ours", torch.float32)  # the variant of the check: eager, in fp32
# Relative, in fp32 with the same GELU; loss_after is the loss after an optimizer step.
TIGHT = {"loss": 1e-5, "grad_norm": 1e-4, "loss_after": 1e-4}


class NotEquivalent(ClearheadError):
    """An implementation computes other results than ours, so its speed is not comparable."""


def check_implementations(
    kinds: dict[str, Callable[..., Implementation]],
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    strategy: Strategy,
) -> dict[str, dict]:
    """Compares loss, gradient norm and loss after one update of each implementation in fp32.

    Returns the results of each implementation. Raises NotEquivalent if one differs from ours.

    The weights are perturbed, because initial weights hide errors: their attention is uniform, so a
    missing mask changes little, and a bias of zero is the same as no bias.
    """
    perturbed, results = perturb(pad_vocabulary(weights)), {}  # nanoGPT pads the vocabulary
    for key, kind in kinds.items():
        found = results[key] = _figures(kind(FP32, perturbed, optimizer, strategy), batch)
        ours = results["ours"]
        if found["optimizer"] != ours["optimizer"]:
            reason = f"different AdamW: {found['optimizer']}, ours: {ours['optimizer']}"
            _refuse(key, reason)
        for name, tolerance in TIGHT.items():
            compare(key, f"{name} in fp32", found[name], ours[name], tolerance)
    return results


def _figures(implementation: Implementation, batch: Batch) -> dict:
    """Returns loss, gradient norm and loss after one step, and for each parameter group of the
    optimizer its hyperparameters and number of parameters."""
    kind = type(implementation.optimizer).__name__
    optimizer = sorted(
        (kind, g["lr"], *g["betas"], g["eps"], g["weight_decay"], count)
        for g in implementation.optimizer.param_groups
        if (count := sum(p.numel() for p in g["params"]))
    )
    # An erf GELU differs from GPT-2's tanh GELU by up to 5e-4, more than many errors change.
    modules = implementation.model.modules()
    gelus = [m for m in modules if isinstance(m, nn.GELU) and m.approximate == "none"]
    for gelu in gelus:
        gelu.approximate = "tanh"
    (loss, norm), (after, _) = (first_step(implementation, batch) for _ in range(2))
    return {
        "version": implementation.version,
        "loss": loss,
        "grad_norm": norm,
        "loss_after": after,
        "own_gelu": "erf" if gelus else "tanh",  # the check uses tanh for all, as in GPT-2
        "optimizer": optimizer,
    }


def first_step(implementation: Implementation, batch: Batch) -> tuple[float, float]:
    """Runs one optimizer step. Returns loss and gradient norm."""
    loss = float(implementation.backward(*batch))
    norm = grad_norm(implementation.model)
    implementation.update()
    return loss, norm


def grad_norm(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def compare(key: str, name: str, own: float, ours: float, tolerance: float) -> None:
    """Raises NotEquivalent if a value differs from ours by more than the relative tolerance."""
    if not abs(own - ours) <= tolerance * abs(ours):  # also true for NaN
        _refuse(key, f"different results: {name} is {own:.7g}, ours: {ours:.7g}")


def _refuse(key: str, reason: str) -> None:
    raise NotEquivalent("implementations", key, reason, "check its version, or omit it")


@torch.no_grad()
def perturb(weights: GPT) -> GPT:
    """Returns a copy with random changes: non-uniform attention, non-zero biases."""
    perturbed, random = copy.deepcopy(weights), torch.Generator().manual_seed(0)
    for parameter in perturbed.parameters():
        std = 0.2 if parameter.dim() < 2 else parameter.shape[1] ** -0.5  # rows of norm 1
        parameter.add_(std * torch.randn(parameter.shape, generator=random))
    return perturbed
