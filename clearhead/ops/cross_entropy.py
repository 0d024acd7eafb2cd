"""Head and cross-entropy in one function, without fp32 logits of the complete batch.

    loss = mean over targets of  logsumexp(x W^T) - (x W^T)[target]
    d loss / d logits = (softmax(x W^T) - onehot(target)) / number of targets

`head_loss` in model.py, the plain version, allocates three tensors of B T V elements: the logits,
their copy in fp32 and their gradient. This version processes a chunk of positions at a time. The
gradient of a row of logits depends on that row only, so it overwrites the logits and is multiplied
immediately. All gradients are computed in forward; backward only scales them (Hsu et al. 2024,
Liger Kernel). On a CPU this is also faster, because chunks stay in the cache (docs/results.md).

Shapes: N positions (B T), n positions per chunk, C emb_dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**28  # elements per chunk: enough to keep a GPU busy; 512 MiB in bf16
CACHED = 2**19  # elements that stay in the cache of a CPU between two matrix products


def head_loss(x: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats, (), of x (N, C) and target_ids (N,).

    weight: the matrix of the head (V, C). Negative targets are ignored; without other targets the
    result is NaN. Matrix products have the precision of autocast, everything else is fp32.
    """
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _HeadLoss.apply(x, weight, target_ids, dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, target_ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, weight.dtype
        wants_grad = ctx.needs_input_grad[0]
        x, weight = x.to(dtype), weight.to(dtype)
        # In fp16, a gradient can overflow before it is divided by N.
        ctx.shrink = 1 / 64 if dtype == torch.float16 else 1.0
        counts = (target_ids >= 0)[:, None]  # (N, 1)
        targets = target_ids.clamp(min=0)[:, None]  # (N, 1)
        losses, grads_x, grad_weight = [], [], None
        size = max(1, LOGITS_AT_ONCE // len(weight))
        for x_n, targets_n, counts_n in zip(
            x.split(size), targets.split(size), counts.split(size), strict=True
        ):
            logits = x_n @ weight.t()  # (n, V)
            losses.append(_losses(logits, targets_n, wants_grad))
            if wants_grad:
                grad_logits = logits  # _losses has overwritten them
                grads_x.append(grad_logits @ weight * counts_n)
                part = grad_logits.t() @ (x_n * counts_n * ctx.shrink)  # (V, C)
                grad_weight = part if grad_weight is None else grad_weight.float().add_(part)
        count = counts.sum()
        if wants_grad:
            ctx.save_for_backward(torch.cat(grads_x), grad_weight, count)
        return (torch.cat(losses) * counts).sum() / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, count = ctx.saved_tensors
        scale = grad_loss / count
        grad_x = grad_x.to(torch.float32, copy=True).mul_(scale)
        grad_weight = grad_weight.to(torch.float32, copy=True).mul_(scale / ctx.shrink)
        of_x, of_weight = ctx.dtypes
        return grad_x.to(of_x), grad_weight.to(of_weight), None, None


def _losses(logits: Tensor, targets: Tensor, wants_grad: bool) -> Tensor:
    """Returns the cross-entropy per position, (n, 1) in fp32. targets: (n, 1). wants_grad: also
    overwrite the logits (n, V) by their gradient, softmax - onehot."""
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return _losses_at_once(logits, targets, wants_grad)
    size = max(1, CACHED // logits.shape[1])
    parts = zip(logits.split(size), targets.split(size), strict=True)
    return torch.cat([_losses_at_once(*part, wants_grad) for part in parts])


def _losses_at_once(logits: Tensor, targets: Tensor, wants_grad: bool) -> Tensor:
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    losses = -log_probs.gather(1, targets)
    if not wants_grad:
        return losses
    if torch.compiler.is_compiling():  # the compiler fuses this into one pass
        vocabulary = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(log_probs.exp() - (vocabulary == targets).float())
    else:
        minus_one = -torch.ones_like(targets, dtype=torch.float32)
        logits.copy_(log_probs.exp_().scatter_add_(1, targets, minus_one))
    return losses
