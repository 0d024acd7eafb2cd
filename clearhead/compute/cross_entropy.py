"""Head and cross-entropy in one function, without fp32 logits of the complete batch.

    loss = mean over targets of  logsumexp(x W^T) - (x W^T)[target]
    d loss / d logits = (softmax(x W^T) - onehot(target)) / number of targets

`head_loss` in model.py, the plain version, allocates three tensors of B T V elements: the logits,
their copy in fp32 and their gradient. This version processes a chunk of positions at a time. The
gradient of a row of logits depends on that row only, so it overwrites the logits and is multiplied
immediately. All gradients are computed in forward; backward only scales them (Hsu et al. 2024,
Liger Kernel). On a CPU this is also faster, because chunks stay in the cache (docs/results.md). On
a GPU, one kernel reads a row of logits and overwrites it (cross_entropy_kernel.py).

Shapes: N positions (B T), n positions per chunk, C emb_dim, V vocabulary, W the number of columns
of the logits: V, on a GPU rounded up to a multiple of 64.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**28  # elements per chunk: enough to keep a GPU busy; 512 MiB in bf16
# Elements whose softmax is computed at once without the kernel.
CACHED = 2**19  # on a CPU: they stay in the cache between two matrix products
SOFTMAX_AT_ONCE = 2**25  # elsewhere: a copy in fp32 takes 128 MiB


def has_triton() -> bool:
    """Returns whether this machine can compile kernels with Triton. Except on Windows it needs a C
    compiler and the headers of Python, which many containers lack."""
    if importlib.util.find_spec("triton") is None:
        return False
    if sys.platform == "win32":
        return True
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


HAS_TRITON = has_triton()


def rows_at_once(num_columns: int) -> int:
    """Returns n, the number of positions per chunk: a power of two, so that chunks of a batch have
    equal sizes and are aligned for the fast kernels of a GPU."""
    return 1 << max(0, (LOGITS_AT_ONCE // num_columns).bit_length() - 1)


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
        ctx.dtypes, vocabulary = (x.dtype, weight.dtype), len(weight)
        wants_grad = ctx.needs_input_grad[0]
        x, weight = x.to(dtype), weight.to(dtype)
        if x.device.type == "cuda":  # rows of 50,257 values are not aligned for the fast products
            weight = F.pad(weight, (0, 0, 0, -vocabulary % 64))  # (W, C)
        # In fp16, a gradient can overflow before it is divided by N.
        ctx.shrink = 1 / 64 if dtype == torch.float16 else 1.0
        loss, grads_x, grad_weight = x.new_zeros((), dtype=torch.float32), [], None
        n = rows_at_once(len(weight))
        for x_n, targets_n in zip(x.split(n), target_ids.split(n), strict=True):
            logits = x_n @ weight.t()  # (n, W)
            loss = loss + _losses(logits, targets_n, vocabulary, wants_grad).sum()
            if wants_grad:
                grad_logits = logits  # _losses has overwritten them
                grads_x.append(grad_logits @ weight)
                part = grad_logits.t() @ (x_n if ctx.shrink == 1 else x_n * ctx.shrink)  # (W, C)
                grad_weight = part if grad_weight is None else grad_weight.float().add_(part)
        count = (target_ids >= 0).sum()
        if wants_grad:
            ctx.save_for_backward(torch.cat(grads_x), grad_weight[:vocabulary], count)
        return loss / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, count = ctx.saved_tensors
        scale = grad_loss / count
        grad_x = grad_x.to(torch.float32, copy=True).mul_(scale)
        grad_weight = grad_weight.to(torch.float32, copy=True).mul_(scale / ctx.shrink)
        of_x, of_weight = ctx.dtypes
        return grad_x.to(of_x), grad_weight.to(of_weight), None, None


def _losses(logits: Tensor, target_ids: Tensor, vocabulary: int, wants_grad: bool) -> Tensor:
    """Returns the cross-entropy per position in fp32, 0 for ignored targets; (n,), or in parts.

    logits (n, W): columns after the vocabulary are ignored. target_ids (n,). wants_grad: also
    overwrite the logits by their gradient, softmax - onehot, 0 for ignored targets.
    """
    device = logits.device.type
    if device == "cuda" and HAS_TRITON:
        from clearhead.compute.cross_entropy_kernel import cross_entropy

        return cross_entropy(logits, target_ids, vocabulary, wants_grad)
    size = max(1, (CACHED if device == "cpu" else SOFTMAX_AT_ONCE) // logits.shape[1])
    parts = zip(logits.split(size), target_ids.split(size), strict=True)
    return torch.cat([_losses_at_once(*part, vocabulary, wants_grad) for part in parts])


def _losses_at_once(
    logits: Tensor, target_ids: Tensor, vocabulary: int, wants_grad: bool
) -> Tensor:
    counts, targets = (target_ids >= 0)[:, None], target_ids.clamp(min=0)[:, None]  # (n, 1)
    log_probs = F.log_softmax(logits[:, :vocabulary], dim=-1, dtype=torch.float32)  # (n, V)
    losses = -log_probs.gather(1, targets) * counts
    if wants_grad:
        minus_one = -torch.ones_like(targets, dtype=torch.float32)
        grad_logits = log_probs.exp_().scatter_add_(1, targets, minus_one)
        logits[:, :vocabulary] = grad_logits.mul_(counts)
        logits[:, vocabulary:] = 0
    return losses
