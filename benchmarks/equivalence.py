"""Equivalence check of benchmarks/training.py: all implementations have to compute the same.

check_implementations   each implementation in fp32, on weights that use every parameter: loss,
                        gradient norm, and loss after one update. Tight tolerances.
check_first_step        the first step of each variant, in its own precision and compiled, on the
                        weights that are timed. Looser, because bf16 is coarse.

Gradient norms are computed in fp64 here: clip_grad_norm_ in fp32 loses digits when it adds the
squares of a large matrix, on some processors a thousandth or more.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from benchmarks.implementations import Implementation, Variant, pad_vocabulary
from errors import ClearheadError
from model import GPT
from training.config.schema import OptimizerConfig
from training.distributed.strategy import Strategy

Batch = tuple[Tensor, Tensor]  # input_ids (B, T), target_ids (B, T)
FP32 = Variant("fp32", "ours", torch.float32)  # the variant of the check: eager, in fp32
# Relative tolerances of loss and gradient norm of the first step, by precision. The GELUs of the
# erf form in fp32 differ by 4e-5 in the norm; bf16 by 5e-4.
TOLERANCES = {torch.float32: (1e-4, 2e-4), torch.bfloat16: (1e-3, 5e-3)}
# In fp32 with the same GELU; loss_after is the loss after an optimizer step.
TIGHT = {"loss": 1e-5, "grad_norm": 1e-4, "loss_after": 1e-4}


class NotEquivalent(ClearheadError):
    """An implementation that computes something else; its speed would mean nothing."""


def check_implementations(
    kinds: dict[str, Callable[..., Implementation]],
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    strategy: Strategy,
) -> dict[str, dict]:
    """The figures of each implementation, ours first; NotEquivalent if one differs from ours.

    Fresh weights would hide mistakes: their attention is uniform, so a missing mask changes
    little, and biases of zero equal missing biases.
    """
    perturbed, results = perturb(pad_vocabulary(weights)), {}  # nanoGPT pads it anyway
    for key, kind in kinds.items():
        found = results[key] = _figures(kind(FP32, perturbed, optimizer, strategy), batch)
        ours = results["ours"]
        if found["optimizer"] != ours["optimizer"]:
            reason = f"another AdamW: {found['optimizer']} where ours has {ours['optimizer']}"
            _refuse(key, reason)
        for name, tolerance in TIGHT.items():
            _compare(key, f"{name} in fp32", found[name], ours[name], tolerance)
    return results


def _figures(implementation: Implementation, batch: Batch) -> dict:
    """What an implementation computes, and of each group of its optimizer the hyperparameters and
    the number of parameters."""
    kind = type(implementation.optimizer).__name__
    optimizer = sorted(
        (kind, g["lr"], *g["betas"], g["eps"], g["weight_decay"], count)
        for g in implementation.optimizer.param_groups
        if (count := sum(p.numel() for p in g["params"]))
    )
    # GELUs of the erf form differ from GPT-2's by up to 5e-4, more than many mistakes.
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
        "own_gelu": "erf" if gelus else "tanh",  # the check uses tanh for all, as GPT-2 does
        "optimizer": optimizer,
    }


def first_step(implementation: Implementation, batch: Batch) -> tuple[float, float]:
    """Takes an optimizer step. Returns loss and gradient norm."""
    loss = float(implementation.backward(*batch))
    norm = grad_norm(implementation.model)
    implementation.update()
    return loss, norm


def grad_norm(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def check_first_step(
    implementation: Implementation, found: tuple[float, float], batch: Batch
) -> None:
    """NotEquivalent if loss or norm of the first step differ from ours in fp32."""
    model = copy.deepcopy(implementation.weights).to(batch[0].device).train()
    _, loss = model(*batch)
    loss.backward()
    expected, variant = (float(loss.detach()), grad_norm(model)), implementation.variant
    pairs = zip(("loss", "gradient norm"), found, expected, TOLERANCES[variant.dtype], strict=True)
    for name, own, ours, tolerance in pairs:
        _compare(variant.implementation, f"first {name} of {variant.name}", own, ours, tolerance)


def _compare(key: str, name: str, own: float, ours: float, tolerance: float) -> None:
    if not abs(own - ours) <= tolerance * abs(ours):  # also true for NaN
        _refuse(key, f"not the same computation: the {name} is {own:.7g} and ours {ours:.7g}")


def _refuse(key: str, reason: str) -> None:
    raise NotEquivalent("implementations", key, reason, "check its version, or leave it out")


@torch.no_grad()
def perturb(weights: GPT) -> GPT:
    """A copy whose attention is not uniform and whose biases and norms all matter."""
    perturbed, random = copy.deepcopy(weights), torch.Generator().manual_seed(0)
    for parameter in perturbed.parameters():
        std = 0.2 if parameter.dim() < 2 else parameter.shape[1] ** -0.5  # rows of length one
        parameter.add_(std * torch.randn(parameter.shape, generator=random))
    return perturbed
