"""Faster attention and dropout for training on a CPU. Measured in docs/results.md.

Results equal those of model.py and attention.py up to the rounding of their dtype; the random
numbers of dropout masks differ. Second derivatives are not supported.

Shapes: B batch, H heads, T positions, D head_dim.
"""

import math

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention import causal_mask, sdpa

# --------------------------------------------------------------------------------- attention

# For longer sequences the fused kernel is faster, because it skips the masked half.
MAX_UNFUSED_LENGTH = 512


def attention(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes sdpa of attention.py, in training faster with dropout and for short sequences in
    bf16. queries (B, H, T, D), keys and values (B, H, S, D) -> context_vec (B, H, T, D)."""
    is_short = keys.shape[-2] <= MAX_UNFUSED_LENGTH and queries.dtype == torch.bfloat16
    # No fused CPU kernel has dropout: torch writes the weights to memory too.
    if dropout_p > 0 or (is_short and queries.requires_grad):
        return _Attention.apply(queries, keys, values, dropout_p)
    return sdpa(queries, keys, values)


class _Attention(torch.autograd.Function):
    """Attention that keeps its weights for the gradient and multiplies all heads at once. In bf16
    the fused kernel is slow: it multiplies small blocks and does not use AMX.

    With weights P, dropout mask M (0 or 1 / (1 - dropout_p)) and W = M P, the output is O = W V:

        dV = W^T dO;  dP = M (dO V^T);  dS = P dP - P rowsum(P dP);  dQ = dS K / sqrt(D);
        dK = dS^T Q / sqrt(D).                M is not needed: P dP = W (dO V^T).

    Each (T, S) matrix has the dtype of the queries and is read as rarely as possible, because
    reading it takes longer than the products.
    """

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (queries, keys, values))  # (B H, T, D), (B H, S, D)
        (T, S), ctx.scale = (q.shape[1], k.shape[1]), q.shape[-1] ** -0.5
        mask = q.new_zeros(T, S).masked_fill(~causal_mask(T, S, q.device), -math.inf)
        p = torch.baddbmm(mask, q, k.mT, alpha=ctx.scale).softmax(-1)  # (B H, T, S)
        w = dropout(p, dropout_p)
        ctx.save_for_backward(q, k, v, p, w)
        return (w @ v).view(queries.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, p, w), do = ctx.saved_tensors, grad.flatten(0, 1)
        p_dp = w * (do @ v.mT)
        sums = p_dp.sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype)
        ds = p_dp.addcmul_(p, sums, value=-1)
        grads = (ds @ k).mul_(ctx.scale), (ds.mT @ q).mul_(ctx.scale), w.mT @ do
        return *(x.unflatten(0, grad.shape[:2]) for x in grads), None


# ----------------------------------------------------------------------------------- dropout


class Dropout(nn.Dropout):
    """nn.Dropout with faster random masks."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """Computes F.dropout in training mode with 16 random bits per element. torch draws 53 bits per
    element, which takes a quarter of a step. p is rounded to a multiple of 2^-16."""
    dropped = min(round(p * 2**16), 2**16 - 1)
    if not dropped:
        return x
    # Not in place, because torch.compile does not support that.
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), dtype=torch.int64)
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
    return (x * kept).mul_(2**16 / (2**16 - dropped))  # the expected value is x
