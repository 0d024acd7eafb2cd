"""Attention and dropout as CPUs compute them faster. Measured in docs/benchmarks.md.

The result is that of model.py and attention.py up to rounding; only how the gradient of attention
is computed and how dropout masks are drawn differs.

Shapes: B batch, H heads, T positions, D head_dim.
"""

import math

import torch
import torch.nn as nn
from torch import Tensor

from attention import causal_attn_weights, sdpa
from model import GPT

# Whether the processor multiplies bf16 matrices in tiles (AMX); torch before 2.12 does not tell.
HAS_TILES = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)


def speed_up(model: GPT) -> None:
    """Replaces dropout and the sdpa kernel of a model that is trained on a CPU."""
    for module in (model, *model.blocks):
        module.dropout = Dropout(module.dropout.p).train(module.training)
    for block in model.blocks:
        if block.attn.kernel is sdpa:
            block.attn.kernel = attention


# --------------------------------------------------------------------------------- attention


def attention(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The sdpa kernel of attention.py, with faster dropout and, in bf16 on processors with tiles, a
    faster gradient of short sequences.

    queries, keys, values (B, H, T, D) -> context_vec (B, H, T, D).
    """
    if dropout_p > 0:  # no fused kernel on CPU has dropout: torch writes the weights out as well
        attn_weights = causal_attn_weights(queries, keys).to(values.dtype)
        return dropout(attn_weights, dropout_p) @ values
    # For longer sequences the fused kernel's gradient is faster, which skips the masked half.
    longest = 512 if torch.compiler.is_compiling() else 128
    fits = queries.shape == keys.shape and keys.shape[-2] <= longest
    if HAS_TILES and fits and queries.dtype == torch.bfloat16:
        return _Attention.apply(queries, keys, values)
    return sdpa(queries, keys, values)


class _Attention(torch.autograd.Function):
    """The fused kernel forward. Backward computes the weights P again and multiplies in tiles,
    which the fused backward does not:

        dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(P dP)) / sqrt(D);  dQ = dS K;  dK = dS^T Q

    P is normalised here, not by the logsumexp of the fused kernel: its scores are rounded to bf16,
    and rows of P would no longer sum to 1.
    """

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return sdpa(queries, keys, values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        shape, dtype = grad.shape, grad.dtype
        q, k, v, do = (x.flatten(0, 1) for x in (*ctx.saved_tensors, grad))  # (B H, T, D)
        p = causal_attn_weights(q, k)  # (B H, T, T), fp32
        dp = (do @ v.mT).float()
        ds = (p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(shape[-1])).to(dtype)
        dv = p.to(dtype).mT @ do
        return (ds @ k).view(shape), (ds.mT @ q).view(shape), dv.view(shape)


# ----------------------------------------------------------------------------------- dropout


class Dropout(nn.Dropout):
    """nn.Dropout with faster masks."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """F.dropout in training, with masks of 16 random bits per number: torch draws 53 bits, one
    number after another, which takes a quarter of a step. p is rounded to a multiple of 2^-16."""
    dropped = min(round(p * 2**16), 2**16 - 1)
    if not dropped:
        return x
    # Out of place, so that torch.compile accepts it.
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), dtype=torch.int64)
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
    return (x * kept).mul_(2**16 / (2**16 - dropped))  # so that the expectation is x
