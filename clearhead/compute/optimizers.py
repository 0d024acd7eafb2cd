"""The optimizer, its learning-rate schedule, and the check for non-finite gradients.

The optimizer is AdamW, or Muon with AdamW (muon.py). The learning rate is a function
of the step without state, so a checkpoint does not contain it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.compute.muon import AdamW, Muon
from clearhead.config.schema import OptimizerConfig

MAX_SKIPS = 10  # consecutive steps with a non-finite gradient after which a run ends
STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}  # per parameter


def build_optimizer(
    model: torch.nn.Module,
    config: OptimizerConfig,
    muon_dtype: torch.dtype = torch.float32,
    ranks: int = 1,
) -> torch.optim.Optimizer:
    """Builds the optimizer. Matrices and embeddings have weight decay, vectors have none.

    With muon, Muon updates the matrices of the blocks (products in muon_dtype, distributed over the
    ranks of DDP or FSDP), and AdamW updates the embeddings, which include the head, and all
    vectors. AdamW is fused on devices with such a kernel: one pass over the parameters instead of
    ten. "peak_lr" of each group is its peak learning rate.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    of_blocks = matrices_of(model) if config.name == "muon" else {}
    muon_matrices = set(of_blocks.values())
    others = [p for p in parameters if p.dim() >= 2 and p not in muon_matrices]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": others, "weight_decay": config.weight_decay, "peak_lr": config.lr},
        {"params": vectors, "weight_decay": 0.0, "peak_lr": config.lr},
    ]
    device = parameters[0].device
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "eps": config.eps,
        "fused": device.type in ("cuda", "cpu"),
    }
    if config.name == "adamw":
        return AdamW(groups, **settings)
    peak = config.lr if config.matrix_lr is None else config.matrix_lr
    ratio, matrices_with_rate = config.out_proj_lr_ratio, {}
    for name, matrix in of_blocks.items():
        rate = peak * ratio if ".out_proj." in name else peak
        matrices_with_rate.setdefault(rate, []).append(matrix)
    muon_groups = [
        {
            "params": matrices,
            "lr": rate,
            "peak_lr": rate,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
        }
        for rate, matrices in matrices_with_rate.items()
    ]
    return Muon(groups, muon_groups, muon_dtype, ranks, **settings)


def matrices_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns W_query, W_key, W_value, out_proj, mlp.fc and mlp.out_proj of all blocks by name: the
    weight matrices except embeddings and head."""
    named = model.get_submodule("blocks").named_parameters()
    return {name: p for name, p in named if p.requires_grad and p.dim() == 2}


def state_keys(group: dict) -> set[str]:
    """Returns the keys of the optimizer state of each parameter in a group."""
    return STATE["muon" if "momentum" in group else "adamw"]


def learning_rate(
    step: int, config: OptimizerConfig, warmup_steps: int, max_steps: int, lr: float
) -> float:
    """Returns the learning rate of optimizer step `step`. After max_steps it does not change.

    lr: the peak. During warmup_steps, the rate rises linearly to lr. Then, with r = min_lr_ratio
    and u from 0 to 1, the completed fraction of the remaining steps:
      cosine    lr (r + (1 - r) (1 + cos(pi u)) / 2)             (Loshchilov and Hutter 2017)
      wsd       lr, then linearly to r lr over the last decay_fraction of all steps
                                                                 (Hu et al. 2024)
      constant  lr
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return lr
    start = decay_start(config, warmup_steps, max_steps)
    if step < start:
        return lr
    # From lr at step `start` to exactly r lr at the last step, max_steps - 1.
    done = min(1.0, (step - start) / max(1, max_steps - 1 - start))
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def decay_start(config: OptimizerConfig, warmup_steps: int, max_steps: int) -> int:
    """Returns the last step with the peak learning rate."""
    if config.schedule == "cosine":
        return warmup_steps
    return max(warmup_steps, round(max_steps * (1 - config.decay_fraction)) - 1)


class NonFiniteCheck:
    """Checks the gradient of every step before the optimizer uses it. A step with a non-finite
    gradient is skipped. After `limit` such steps in a row, all later steps are skipped too:
    parameters do not change until the host reads the counts and ends the run."""

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self.in_a_row, self.skipped, self.halted_for = torch.zeros(3, device=device).unbind()

    def found_inf(self, grad_norm: Tensor, loss_scale: Tensor) -> Tensor:
        """Returns 1. if the step has to be skipped, else 0., on the device.

        grad_norm: of the gradients of all ranks, (). loss_scale: of fp16. An overflow lowers it; as
        long as it is above 1, the overflow does not count towards the limit.
        """
        bad = (~torch.isfinite(grad_norm)).float()
        self.in_a_row = (self.in_a_row + bad * (loss_scale <= 1)) * bad
        halted = (self.in_a_row >= self.limit) | (self.halted_for > 0)
        self.halted_for = self.halted_for + halted.float()
        skip = torch.maximum(bad, halted.float())
        self.skipped = self.skipped + skip
        return skip

    def read(self) -> tuple[int, int, int]:
        """Returns (skipped steps, non-finite steps in a row until now, steps since the limit was
        reached). Waits for the device."""
        numbers = torch.stack([self.skipped, self.in_a_row, self.halted_for]).tolist()
        return tuple(round(number) for number in numbers)

    def restore(self, skipped: int, in_a_row: int) -> None:
        """Sets the counts to those of a checkpoint."""
        self.skipped = torch.full_like(self.skipped, skipped)
        self.in_a_row = torch.full_like(self.in_a_row, in_a_row)
