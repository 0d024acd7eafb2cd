"""Builds the optimizer: AdamW, or Muon with AdamW (training/optim/muon.py)."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("adamw", "muon")
STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}  # of a parameter
SCHEDULES = ("wsd", "cosine", "constant")
MOST_NS_STEPS = 20  # five are enough; each costs products as large as the matrices


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019), with Muon (Jordan et al. 2024) for the matrices of the
    blocks or without, and the course of the learning rate."""

    name: str = "adamw"  # adamw | muon, which has AdamW for all but the matrices of the blocks
    lr: float = 3e-4  # the peak, reached after trainer.warmup_steps
    weight_decay: float = 0.1  # on matrices only; biases and norms are left alone
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    schedule: str = "wsd"  # wsd (warmup, stable, decay) | cosine | constant
    min_lr_ratio: float = 0.1  # where the schedule ends, as a share of lr
    decay_fraction: float = 0.2  # wsd: the last part of the run, in which the rate falls
    matrix_lr: float | None = None  # muon: the peak of the matrices' rate; null: lr
    momentum: float = 0.95  # muon
    nesterov: bool = True  # muon: the gradient once more, ahead of the momentum
    ns_steps: int = 5  # muon: Newton-Schulz iterations

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if self.name not in OPTIMIZERS:
            fix = f"use one of {', '.join(OPTIMIZERS)}"
            found.append(("name", self.name, "no such optimizer", fix))
        if not 0 < self.lr < math.inf:
            found.append(("lr", self.lr, "must be a positive number", "use 3e-4 or so"))
        if not 0 <= self.weight_decay < math.inf:
            found.append(
                ("weight_decay", self.weight_decay, "must not be negative", "use 0.1 or 0")
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            found.append(
                ("betas", self.betas, "are two numbers from 0 to below 1", "use [0.9,0.95]")
            )
        if not 0 < self.eps < math.inf:
            found.append(("eps", self.eps, "must be a positive number", "use 1e-8"))
        if self.schedule not in SCHEDULES:
            fix = f"use one of {', '.join(SCHEDULES)}"
            found.append(("schedule", self.schedule, "no such schedule", fix))
        if not 0 <= self.min_lr_ratio <= 1:
            found.append(("min_lr_ratio", self.min_lr_ratio, "is a share of lr", "use 0 to 1"))
        if not 0 < self.decay_fraction <= 1:
            found.append(
                ("decay_fraction", self.decay_fraction, "is a share of the run", "use 0.2")
            )
        if self.matrix_lr is not None and not 0 < self.matrix_lr < math.inf:
            fix = "use 1e-3 or so, or null for optimizer.lr"
            found.append(("matrix_lr", self.matrix_lr, "must be a positive number", fix))
        if not 0 <= self.momentum < 1:
            found.append(("momentum", self.momentum, "is a number from 0 to below 1", "use 0.95"))
        if not 1 <= self.ns_steps <= MOST_NS_STEPS:
            cause = f"must be from 1 to {MOST_NS_STEPS}"
            found.append(("ns_steps", self.ns_steps, cause, "use 5"))
        return found


def build_optimizer(
    model: "torch.nn.Module", config: OptimizerConfig, muon_dtype: "torch.dtype | None" = None
) -> "torch.optim.Optimizer":
    """AdamW over the model's parameters; matrices and embeddings have weight decay, vectors none.

    With muon, Muon updates the matrices of the blocks in products of muon_dtype (None: fp32), and
    AdamW the embeddings, one of which is the head, and all vectors. Fused where the device has such
    a kernel: one pass over the parameters instead of ten. Each group has the peak of its learning
    rate as "peak_lr".
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    of_muon = set(matrices_of(model)) if config.name == "muon" else set()
    matrices = [p for p in parameters if p.dim() >= 2 and p not in of_muon]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "peak_lr": config.lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": config.lr},
    ]
    device = parameters[0].device
    settings = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "eps": config.eps,
        "fused": device.type in ("cuda", "cpu"),
    }
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **settings)
    from training.optim.muon import Muon

    peak = config.lr if config.matrix_lr is None else config.matrix_lr
    of_blocks = {
        "params": [p for p in parameters if p in of_muon],
        "lr": peak,
        "peak_lr": peak,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.ns_steps,
    }
    return Muon(groups, of_blocks, muon_dtype or torch.float32, **settings)


def matrices_of(model: "torch.nn.Module") -> "list[torch.nn.Parameter]":
    """The weight matrices inside the blocks: of each W_query, W_key, W_value, out_proj, mlp.fc and
    mlp.out_proj. The other 2-D parameters are embeddings or the head."""
    return [p for p in model.blocks.parameters() if p.requires_grad and p.dim() == 2]


def state_keys(group: dict) -> set[str]:
    """What an optimizer keeps for each parameter of one of its groups."""
    return STATE["muon" if "ns_steps" in group else "adamw"]
