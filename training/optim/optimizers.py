"""Builds the optimizer: AdamW, or Muon with AdamW (training/optim/muon.py)."""

import torch

from training.config.schema import OptimizerConfig
from training.optim.muon import Muon

STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}  # of a parameter


def build_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, muon_dtype: torch.dtype | None = None
) -> torch.optim.Optimizer:
    """AdamW over the model's parameters; matrices and embeddings have weight decay, vectors none.

    With muon, Muon updates the matrices of the blocks in products of muon_dtype (None: fp32), and
    AdamW the embeddings, one of which is the head, and all vectors. Fused where the device has such
    a kernel: one pass over the parameters instead of ten. Each group has the peak of its learning
    rate as "peak_lr".
    """
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


def matrices_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weight matrices inside the blocks: of each W_query, W_key, W_value, out_proj, mlp.fc and
    mlp.out_proj. The other 2-D parameters are embeddings or the head."""
    return [p for p in model.blocks.parameters() if p.requires_grad and p.dim() == 2]


def state_keys(group: dict) -> set[str]:
    """What an optimizer keeps for each parameter of one of its groups."""
    return STATE["muon" if "ns_steps" in group else "adamw"]
