"""The optimizer and its learning-rate schedule: AdamW, decay on matrices, warmup and decay.

The schedule is a plain function of the step, so it has no state to save and can be plotted
without training. torch is imported when an optimizer is built, not before.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SCHEDULES = ("wsd", "cosine", "constant")


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) and the course of its learning rate."""

    lr: float = 3e-4  # the peak, reached after trainer.warmup_steps
    weight_decay: float = 0.1  # on matrices only; biases and norms are left alone
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    schedule: str = "wsd"  # wsd (warmup, stable, decay) | cosine | constant
    min_lr_ratio: float = 0.1  # where the schedule ends, as a share of lr
    decay_fraction: float = 0.2  # wsd: the last part of the run, in which the rate falls

    def problems(self) -> list[tuple[str, object, str, str]]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        if not 0 < self.lr < math.inf:
            found.append(("lr", self.lr, "must be a positive number", "use 6e-4 or so"))
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
        return found


def build_optimizer(model: "torch.nn.Module", config: OptimizerConfig) -> "torch.optim.Optimizer":
    """AdamW over the model's parameters; matrices (and embeddings) decay, vectors do not.

    Fused where the device has such a kernel: one pass over the parameters instead of ten.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=tuple(config.betas),
        eps=config.eps,
        fused=parameters[0].device.type in ("cuda", "cpu"),
    )


def default_warmup(max_steps: int) -> int:
    """Steps of warmup where the settings name none: a tenth of the run, at most 2,000."""
    return min(max_steps // 10, 2000)


def learning_rate(step: int, config: OptimizerConfig, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of optimizer step `step`, 0 <= step < max_steps.

    Rises linearly to lr over warmup_steps. Then, with r = min_lr_ratio and u in 0..1 the share of
    the remaining steps done:
      cosine    lr (r + (1 - r) (1 + cos(pi u)) / 2)             (Loshchilov and Hutter 2017)
      wsd       lr, then linearly to r lr over the last decay_fraction of all steps
                                                                 (Hu et al. 2024)
      constant  lr
    """
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        start = warmup_steps
    else:
        start = max(warmup_steps, round(max_steps * (1 - config.decay_fraction)) - 1)
    if step < start:
        return config.lr
    # From lr at step `start` to exactly r lr at the last step, max_steps - 1.
    done = min(1.0, (step - start) / max(1, max_steps - 1 - start))
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)
