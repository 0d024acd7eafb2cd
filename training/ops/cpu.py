"""Linear layers, attention and dropout as CPUs compute them faster.

model.py and attention.py say what is computed. What is computed here is the same; only how
products are cut, how attention's gradient is made and how masks are drawn differs. Measured in
docs/benchmarks.md, each by itself.

Shapes: R rows, K inputs, N outputs of a layer; B batch, H heads, T positions, D head_dim.
"""

import functools
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import causal_attn_weights, sdpa
from model import GPT

# oneDNN gives a result of some 1,000 rows and few columns to one of two cores. Of small matrices
# the halves would cost more than they save.
HALVED_ROWS, HALVED_COLUMNS, HALVED_SIZE = (513, 1024), 1280, 2**18
# Above so many positions the fused kernel's gradient is faster: it leaves the half out that the
# mask hides, and is one operation where this one, not compiled, is many. By compiled or not.
LONGEST = {True: 512, False: 128}


def has_tiles() -> bool:
    """Whether the processor multiplies bf16 matrices in tiles (AMX)."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older than torch 2.12
        return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    return torch.cpu.get_capabilities().get("amx_bf16", False)


def speed_up(model: GPT, dtype: torch.dtype, compiled: bool) -> None:
    """Has a model that is trained on a CPU compute in the faster way.

    dtype: what products run in. compiled: whether the blocks will be.
    """
    tiles = dtype == torch.bfloat16 and has_tiles()
    kernel = functools.partial(attention, longest=LONGEST[compiled] if tiles else 0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = types.MethodType(_dropout_forward, module)
        elif isinstance(module, nn.Linear) and tiles and torch.get_num_threads() == 2:
            module.forward = types.MethodType(_linear_forward, module)
    for block in model.blocks:
        if block.attn.kernel is sdpa:
            block.attn.kernel = kernel


# ----------------------------------------------------------------------------- linear layers


def _linear_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, x (..., K) -> (..., N), weight (N, K), bias (N,); in bf16 where autocast is."""
    # Without a gradient autocast converts each weight once for many calls.
    if not torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        ctx.has_bias = bias is not None
        x, weight = x.flatten(0, -2).bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight)
        y = product(x, weight.t(), bias.bfloat16() if ctx.has_bias else None)  # (R, N)
        return y.view(*ctx.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight) = ctx.saved_tensors, ctx.dtypes
        grad_y = grad_y.flatten(0, -2)
        grad_x = product(grad_y, weight).to(of_x).view(ctx.shape)
        grad_weight = (grad_y.t() @ x).to(of_weight)  # is fastest in one
        grad_bias = grad_y.sum(0).to(of_weight) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias: a (R, K), b (K, N), bias (N,) -> (R, N); by halves where that uses both cores."""
    least, most = HALVED_ROWS
    fits = b.shape[1] <= HALVED_COLUMNS and b.numel() >= HALVED_SIZE
    if fits and least <= a.shape[0] <= most:
        return torch.cat([_product(half, b, bias) for half in a.chunk(2)])
    return _product(a, b, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


# --------------------------------------------------------------------------------- attention


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout_p: float = 0.0,
    longest: int = 0,
) -> Tensor:
    """The sdpa kernel of attention.py, with masks that are drawn faster and, up to `longest`
    positions in bf16, a gradient that is made faster.

    queries, keys, values (B, H, T, D) -> context_vec (B, H, T, D).
    """
    if dropout_p > 0:  # no fused kernel has it here: torch, too, writes the weights out
        attn_weights = causal_attn_weights(queries, keys).to(values.dtype)
        return dropout(attn_weights, dropout_p) @ values
    fits = queries.shape == keys.shape and keys.shape[-2] <= longest
    if fits and queries.dtype == torch.bfloat16:
        return _Attention.apply(queries, keys, values)
    return sdpa(queries, keys, values)


class _Attention(torch.autograd.Function):
    """Forward is the fused kernel. Backward makes the weights P again, and multiplies in tiles,
    which the fused one does not:

        dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(P dP)) / sqrt(D);  dQ = dS K;  dK = dS^T Q

    P is normalised here, not by the logsumexp of the fused kernel: the scores are rounded to bf16,
    and rows of P would no longer sum to one.
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


def _dropout_forward(module: nn.Dropout, x: Tensor) -> Tensor:
    return dropout(x, module.p) if module.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """F.dropout in training, with masks from 16 random bits a number: torch draws 53, one number
    after the other, which takes a quarter of a step. p is rounded to a multiple of 2^-16."""
    dropped = min(round(p * 2**16), 2**16 - 1)
    return _Dropout.apply(x, dropped) if dropped else x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dropped: int) -> Tensor:
        # Out of place, so that a compiler can take it.
        drawn = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), dtype=torch.int64)
        kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        ctx.save_for_backward(kept)
        ctx.scale = 2**16 / (2**16 - dropped)  # so that the expectation is x
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return (grad * kept).mul_(ctx.scale), None
