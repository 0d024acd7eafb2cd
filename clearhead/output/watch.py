"""Histograms of gradients and parameters (wandb.watch).

W&B's own run.watch logs the gradients of single micro-batches, in the row of another step.
"""

import numpy as np
import torch

from clearhead.checkpoint.format import State
from clearhead.config.schema import TrainerConfig
from clearhead.errors import best_effort
from clearhead.output.tracker import Tracker

BINS = 64
Histogram = tuple[np.ndarray, np.ndarray]  # counts (BINS,), edges (BINS + 1,)


def watch(
    tracker: Tracker,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: TrainerConfig,
    state: State,
) -> None:
    """Logs histograms at all validations after step 0, directly before the optimizer step."""
    every = trainer.eval_every or trainer.max_steps

    def before_step(*_) -> None:
        step = state.step + 1
        if step % every == 0 or step == trainer.max_steps:
            with best_effort("wandb.watch: no histograms"):
                found = histograms(model, optimizer, tracker.config.watch)
                tracker.log_histograms(found, step)

    optimizer.register_step_pre_hook(before_step)


def histograms(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, watched: str
) -> dict[str, Histogram]:
    """Returns histograms by key, such as gradients/blocks.0.attn.W_query.weight.

    Call it directly before the update. watched: gradients, parameters or all. Gradients are
    those of the complete batch after clipping. Omits tensors with non-finite values.
    """
    scale = getattr(optimizer, "grad_scale", None)  # the fused kernel divides gradients by it
    found = {}
    for name, parameter in model.named_parameters():
        if watched != "parameters" and parameter.grad is not None:
            gradient = parameter.grad if scale is None else parameter.grad / scale
            found[f"gradients/{name}"] = histogram(gradient)
        if watched != "gradients":
            found[f"parameters/{name}"] = histogram(parameter.detach())
    return {key: value for key, value in found.items() if value}


def histogram(values: torch.Tensor) -> Histogram | None:
    """Returns the histogram of a tensor; None if it has non-finite values."""
    low, high = (float(limit) for limit in values.aminmax())
    if not np.isfinite([low, high]).all():
        return None
    high = max(high, np.nextafter(np.float32(low), np.float32(np.inf)))
    parts = values.float().flatten().split(2**24)  # histc counts in fp32
    # On the CPU, because MPS has no doubles.
    counts = sum(torch.histc(part, BINS, low, high).cpu().double() for part in parts)
    return counts.numpy(), np.linspace(low, high, BINS + 1)
