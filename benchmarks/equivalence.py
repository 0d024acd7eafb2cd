"""Whether all contenders of benchmarks/training.py compute the same, before anything is timed.

check_projects   each project in fp32 on weights that use every parameter: the loss, the norm of its
                 gradient, and the loss after an update. Tight.
check_first_step each row of a table, in its own precision and compiled, on the weights that it is
                 timed with. Looser, as bf16 is coarse.
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

from benchmarks.implementations import LEAVE_OUT, Batch, Disagreement, Ours, Project, Row, padded
from model import GPT
from training.distributed.strategy import Strategy
from training.optim.optimizers import OptimizerConfig

# Relative, by precision: of the loss, of the norm of its gradient.
TOLERANCES = {
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (1e-3, 2e-2),
    torch.float16: (1e-3, 2e-2),
}
TIGHT = (1e-5, 3e-4, 1e-4)  # in fp32 with the same GELU; the last of the loss after an update


@dataclass
class Agreement:
    """What a project computes of the check's weights and first batch, in fp32."""

    loss: float
    grad_norm: float
    loss_after: float  # on the same batch, after one optimizer step
    own_gelu: str | None = None  # of the form that its own training has; None: tanh, as GPT-2


def check_projects(
    projects: list[Project],
    weights: GPT,
    batch: Batch,
    optimizer: OptimizerConfig,
    parallel: Strategy,
    seed: int,
) -> dict[str, Agreement]:
    """Each project's figures on weights that use every parameter; raises Disagreement at the first
    that differs from ours.

    Fresh weights would hide mistakes: their attention is even, so that a missing mask hardly
    matters, and biases of zero agree with biases that are not there.
    """
    stirred = stir(weights, seed)
    results: dict[str, Agreement] = {}
    ours = None
    for project in [Ours(), *(p for p in projects if p.key != "ours")]:
        row = Row(project.title, project.key, torch.float32)
        contender = project.contender(row, stirred, optimizer, parallel, seed)
        mathematics = _mathematics(contender.optimizer)
        gelus = _erf_gelus(contender.model)
        for gelu in gelus:
            gelu.approximate = "tanh"
        with exact_norm(contender.model) as squares:
            loss, _ = map(float, contender.step(*batch))
        norm = math.sqrt(sum(map(float, squares)))
        after, _ = map(float, contender.step(*batch))
        found = Agreement(loss, norm, after, "erf" if gelus else None)
        del contender
        gc.collect()
        if ours is None:
            ours, expected = found, mathematics
        elif mathematics != expected:
            cause = f"another AdamW: {mathematics} where ours has {expected}"
            raise Disagreement("contenders", project.key, cause, LEAVE_OUT)
        names = ("loss", "norm of the gradient", "loss after a step")
        figures = [(f.loss, f.grad_norm, f.loss_after) for f in (found, ours)]
        for name, theirs, our, tolerance in zip(names, *figures, TIGHT, strict=True):
            _compare(project.key, f"{name} in fp32", theirs, our, tolerance)
        results[project.key] = found
    return results


def reference(weights: GPT, batch: Batch, parallel: Strategy, pad: bool) -> tuple[float, float]:
    """Our loss and norm of the gradient on the weights that training begins with, in fp32."""
    model = padded(weights) if pad else copy.deepcopy(weights)
    model.to(parallel.device).train()
    _, loss = model(*batch)
    loss.backward()
    return float(loss.detach()), float(parallel.total_norm(model))


@contextlib.contextmanager
def exact_norm(model: nn.Module) -> Iterator[list[Tensor]]:
    """The squared norm of each gradient that a step inside makes, in fp64.

    The norm that clip_grad_norm_ returns on a CPU lacks a thousandth and more, as fp32 cannot add
    up the squares of a large matrix one by one.
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


def check_first_step(row: Row, loss: float, norm: float, expected: tuple[float, float]) -> None:
    """Raises Disagreement when the first step of a row, compiled and in its own precision, is not
    what ours computes in fp32."""
    where = f"in {row.precision}{', compiled' if row.compiled else ''}"
    names = (f"first loss {where}", f"first norm of the gradient {where}")
    tolerances = TOLERANCES[torch.bfloat16 if row.tf32 else row.dtype]
    for name, own, ours, tolerance in zip(names, (loss, norm), expected, tolerances, strict=True):
        _compare(row.project, name, own, ours, tolerance)


def _compare(project: str, name: str, own: float, ours: float, tolerance: float) -> None:
    if not abs(own - ours) <= tolerance * abs(ours):  # NaN is no agreement
        cause = f"not the same computation: the {name} is {own:.7g} and ours {ours:.7g}"
        raise Disagreement("contenders", project, cause, LEAVE_OUT)


def _mathematics(optimizer: torch.optim.Optimizer) -> list[tuple]:
    """What an AdamW does, whatever kernel it does it with; how many numbers to each group."""
    kind = type(optimizer).__name__
    return sorted(
        (kind, group["lr"], *group["betas"], group["eps"], group["weight_decay"], count)
        for group in optimizer.param_groups
        if (count := sum(p.numel() for p in group["params"]))
    )


def _erf_gelus(model: nn.Module) -> list[nn.GELU]:
    """GELUs of the erf form, which differs from GPT-2's by up to 5e-4: more than many mistakes."""
    return [m for m in model.modules() if isinstance(m, nn.GELU) and m.approximate == "none"]


@torch.no_grad()
def stir(weights: GPT, seed: int) -> GPT:
    """A copy whose attention is uneven and whose every bias and norm matters."""
    stirred, random = copy.deepcopy(weights), torch.Generator().manual_seed(seed)
    for name, parameter in stirred.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() < 2:
            parameter.add_(0.2 * noise)
        elif not name.endswith("_emb.weight"):
            parameter.copy_(noise / parameter.shape[1] ** 0.5)  # of a row's length
    return stirred
