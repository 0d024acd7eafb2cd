"""Faster attention and dropout for training on a CPU. Measured in docs/results.md.

Results equal those of model.py and attention.py up to rounding. The gradient of attention and the
random numbers of dropout masks are computed differently.

Shapes: B batch, H heads, T positions, D head_dim.
"""

import math

import torch
import torch.nn as nn
from torch import Tensor

from attention import causal_attn_weights, sdpa

# --------------------------------------------------------------------------------- attention


def attention(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes sdpa of attention.py with faster dropout and, in bf16, a faster gradient of short
    sequences. queries, keys, values (B, H, T, D) -> context_vec (B, H, T, D)."""
    if dropout_p > 0:  # no fused CPU kernel has dropout: torch writes the weights to memory too
        attn_weights = causal_attn_weights(queries, keys).to(values.dtype)
        return dropout(attn_weights, dropout_p) @ values
    # For longer sequences the fused kernel has a faster gradient: it skips the masked half.
    longest = 512 if torch.compiler.is_compiling() else 128
    fits = queries.shape == keys.shape and keys.shape[-2] <= longest
    if fits and queries.dtype == torch.bfloat16:
        return _Attention.apply(queries, keys, values)
    return sdpa(queries, keys, values)


class _Attention(torch.autograd.Function):
    """Fused forward. Backward recomputes the weights P and multiplies all heads at once. In bf16
    the fused backward is slow: it multiplies small blocks and does not use AMX.

        dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(P dP));  dQ = dS K / sqrt(D);
        dK = dS^T Q / sqrt(D)

    P is normalized here and not by the logsumexp of the fused kernel, which belongs to scores that
    are rounded to bf16: rows of P would not sum to 1. All (T, T) matrices are bf16 and each is read
    as rarely as possible, because reading them takes longer than the products.
    """

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return sdpa(queries, keys, values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        shape, scale = grad.shape, 1 / math.sqrt(grad.shape[-1])
        q, k, v, do = (x.flatten(0, 1) for x in (*ctx.saved_tensors, grad))  # (B H, T, D)
        mask = q.new_full((shape[-2], shape[-2]), -math.inf).triu(1)
        p = torch.baddbmm(mask, q, k.mT, alpha=scale).softmax(-1)  # (B H, T, T)
        p_dp = p * (do @ v.mT)
        sums = p_dp.sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype)
        ds = p_dp.addcmul_(p, sums, value=-1)
        dq, dk = (ds @ k).mul_(scale), (ds.mT @ q).mul_(scale)
        return dq.view(shape), dk.view(shape), (p.mT @ do).view(shape)


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
