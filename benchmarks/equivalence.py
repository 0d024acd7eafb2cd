"""Equivalence check of benchmarks/training.py: all implementations have to compute the same.

check_implementations   each implementation in fp32, on weights that use every parameter: loss,
                        gradient norm, and loss after one update. Tight tolerances.
check_first_step        the first step of each variant, in its own precision and compiled, on the
                        weights that are timed. Looser, because bf16 is coarse.
"""

import contextlib
import copy
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from benchmarks.implementations import Implementation, Ours, Variant
from benchmarks.runner import HINT, Batch, NotEquivalent, make_runner, pad_vocabulary
from model import GPT
from training.config.schema import OptimizerConfig
from training.distributed.strategy import Strategy

# Relative tolerances of loss and gradient norm, by precision.
TOLERANCES = {
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (1e-3, 2e-2),
    torch.float16: (1e-3, 2e-2),
}
TIGHT = (1e-5, 3e-4, 1e-4)  # in fp32 with the same GELU: loss, gradient norm, loss after an update


@dataclass
class Figures:
    """What an implementation computes from the check's weights and the first batch, in fp32."""

    loss: float
    grad_norm: float
    loss_after: float  # on the same batch, after one optimizer step
    own_gelu: str | None = None  # the GELU of its own training; None: tanh, as in GPT-2


def check_implementations(
    implementations: list[Implementation],
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    strategy: Strategy,
    seed: int,
) -> dict[str, Figures]:
    """The figures of each implementation; NotEquivalent if one differs from ours.

    Fresh weights would hide mistakes: their attention is uniform, so a missing mask changes
    little, and biases of zero equal missing biases.
    """
    perturbed = perturb(weights, seed)
    expected, mathematics = _figures(Ours(), perturbed, batch, optimizer, strategy, seed)
    results = {"ours": expected}
    for implementation in implementations:
        key = implementation.key
        if key == "ours":
            continue
        found, own = _figures(implementation, perturbed, batch, optimizer, strategy, seed)
        if own != mathematics:
            reason = f"another AdamW: {own} where ours has {mathematics}"
            raise NotEquivalent("implementations", key, reason, HINT)
        names = ("loss", "gradient norm", "loss after a step")
        pairs = [(f.loss, f.grad_norm, f.loss_after) for f in (found, expected)]
        for name, theirs, ours, tolerance in zip(names, *pairs, TIGHT, strict=True):
            _compare(key, f"{name} in fp32", theirs, ours, tolerance)
        results[key] = found
    return results


def _figures(
    implementation: Implementation,
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    strategy: Strategy,
    seed: int,
) -> tuple[Figures, list[tuple]]:
    """Two fp32 steps of an implementation, and the mathematics of its optimizer."""
    variant = Variant(implementation.title, implementation.key, torch.float32)
    runner = make_runner(variant, implementation, weights, optimizer, strategy, seed)
    mathematics = _mathematics(runner.optimizer)
    gelus = _erf_gelus(runner.model)
    for gelu in gelus:
        gelu.approximate = "tanh"
    with exact_norm(runner.model) as squares:
        loss, _ = map(float, runner.step(*batch))
    norm = math.sqrt(sum(map(float, squares)))
    after, _ = map(float, runner.step(*batch))
    del runner
    gc.collect()
    return Figures(loss, norm, after, "erf" if gelus else None), mathematics


def reference(weights: GPT, batch: Batch, strategy: Strategy, pad: bool) -> tuple[float, float]:
    """Our loss and gradient norm on the initial weights, in fp32."""
    model = pad_vocabulary(weights) if pad else copy.deepcopy(weights)
    model.to(strategy.device).train()
    _, loss = model(*batch)
    loss.backward()
    return float(loss.detach()), float(strategy.total_norm(model))


@contextlib.contextmanager
def exact_norm(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that collects the squared fp64 norm of each gradient of a step.

    On a CPU clip_grad_norm_ returns a norm that is a thousandth or more too small: fp32 loses
    digits when it adds the squares of a large matrix.
    """
    squares: list[Tensor] = []
    hooks = [
        p.register_post_accumulate_grad_hook(
            lambda p: squares.append(p.grad.double().square().sum())
        )
        for p in model.parameters()
    ]
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()


def check_first_step(
    variant: Variant, loss: float, norm: float, expected: tuple[float, float]
) -> None:
    """NotEquivalent if the first step of a variant differs from ours in fp32."""
    where = f"in {variant.precision}{', compiled' if variant.compiled else ''}"
    names = (f"first loss {where}", f"first gradient norm {where}")
    tolerances = TOLERANCES[torch.bfloat16 if variant.tf32 else variant.dtype]
    for name, own, ours, tolerance in zip(names, (loss, norm), expected, tolerances, strict=True):
        _compare(variant.implementation, name, own, ours, tolerance)


def _compare(key: str, name: str, own: float, ours: float, tolerance: float) -> None:
    if not abs(own - ours) <= tolerance * abs(ours):  # also true for NaN
        reason = f"not the same computation: the {name} is {own:.7g} and ours {ours:.7g}"
        raise NotEquivalent("implementations", key, reason, HINT)


def _mathematics(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """Class and hyperparameters of each group, and its number of parameters; not the kernel."""
    kind = type(optimizer).__name__
    return sorted(
        (kind, group["lr"], *group["betas"], group["eps"], group["weight_decay"], count)
        for group in optimizer.param_groups
        if (count := sum(p.numel() for p in group["params"]))
    )


def _erf_gelus(model: nn.Module) -> list[nn.GELU]:
    """GELUs of the erf form. They differ from GPT-2's by up to 5e-4, more than many mistakes."""
    return [m for m in model.modules() if isinstance(m, nn.GELU) and m.approximate == "none"]


@torch.no_grad()
def perturb(weights: GPT, seed: int) -> GPT:
    """A copy whose attention is not uniform and whose biases and norms all matter."""
    perturbed, random = copy.deepcopy(weights), torch.Generator().manual_seed(seed)
    for name, parameter in perturbed.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() < 2:
            parameter.add_(0.2 * noise)
        elif not name.endswith("_emb.weight"):
            parameter.copy_(noise / parameter.shape[1] ** 0.5)  # rows of length one
    return perturbed
