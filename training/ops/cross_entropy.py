"""Head and cross-entropy in one, so that the logits of a whole batch never exist in fp32.

    loss = mean over targets of  logsumexp(x W^T) - (x W^T)[target]
    d loss / d logits = (softmax(x W^T) - onehot(target)) / number of targets

The plain form, `head_loss` in model.py, makes three tensors of B T V numbers: the logits, their
copy in fp32, their gradient. Here some positions at a time get their logits; the gradient, which
needs nothing but its own row, takes their place at once, is multiplied on, and is gone. So all
gradients are made in forward, and backward only scales them (as in Hsu et al. 2024, Liger Kernel).

On a CPU it is faster, too: what lies between the products stays in the cache (docs/benchmarks.md).

Shapes: N positions (B T), n of them at a time, C emb_dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**28  # enough to keep a GPU busy; half a gigabyte in bf16
CACHED = 2**19  # logits that stay in a CPU's cache between two matrix products


def head_loss(x: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """The mean cross-entropy in nats, (), of x (N, C) against target_ids (N,); NaN when there are
    no targets.

    weight: the head's matrix (V, C). Negative targets do not count. The products run in autocast's
    precision where it is on, everything else in fp32.
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
        # In fp16 a gradient that is not divided by N yet can exceed the largest number.
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
                grad_logits = logits  # that is what they are now
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
    """Each position's cross-entropy, (n, 1) in fp32. wants_grad: softmax - onehot, its gradient,
    takes the place of the logits (n, V). targets (n, 1)."""
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
    if torch.compiler.is_compiling():  # all in one pass
        vocabulary = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(log_probs.exp() - (vocabulary == targets).float())
    else:
        minus_one = -torch.ones_like(targets, dtype=torch.float32)
        logits.copy_(log_probs.exp_().scatter_add_(1, targets, minus_one))
    return losses
