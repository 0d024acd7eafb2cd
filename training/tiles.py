"""Linear layers and attention as CPUs with matrix tiles (AMX) compute them faster in bf16.

model.py and attention.py say what is computed. What is computed here is the same; only how the
products are cut, and how attention's gradient is made, differs. Measured in docs/benchmarks.md.

Shapes: R rows, K inputs, N outputs of a layer; B batch, H heads, T positions, D head_dim.
"""

import math
import types

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import causal_mask, sdpa
from model import GPT

# oneDNN gives a result of some 1,000 rows and few columns to one of two cores.
HALVED_ROWS, HALVED_COLUMNS = range(513, 1025), 1280
# Above, the fused kernel is faster: it leaves the half out that the mask hides.
LONGEST = 512


def has_tiles() -> bool:
    """Whether the processor multiplies bf16 matrices in tiles."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older than torch 2.12
        return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    return torch.cpu.get_capabilities().get("amx_bf16", False)


def use_tiles(model: GPT, compiled: bool) -> None:
    """Has a model that is trained on a CPU compute in the faster way, where autocast is on.

    compiled: whether its blocks will be; if not, attention stays as it is, whose gradient is made
    of many small operations here.
    """
    if torch.get_num_threads() == 2:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = types.MethodType(_linear_forward, module)
    if compiled:
        for block in model.blocks:
            if block.attn.kernel is sdpa:
                block.attn.kernel = attention


# ----------------------------------------------------------------------------- linear layers


def _linear_forward(module: torch.nn.Linear, x: Tensor) -> Tensor:
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
    if len(a) in HALVED_ROWS and b.shape[1] <= HALVED_COLUMNS:
        return torch.cat([_product(half, b, bias) for half in a.chunk(2)])
    return _product(a, b, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


# --------------------------------------------------------------------------------- attention


def attention(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The sdpa kernel of attention.py, with a faster gradient where it has one to make.

    queries, keys, values (B, H, T, D) -> context_vec (B, H, T, D).
    """
    in_bf16 = queries.dtype == torch.bfloat16
    if not in_bf16 or dropout_p > 0 or queries.shape != keys.shape or keys.shape[-2] > LONGEST:
        return sdpa(queries, keys, values, dropout_p)
    return _Attention.apply(queries, keys, values)


class _Attention(torch.autograd.Function):
    """Forward is the fused kernel. Backward makes the weights P again from the scores and their
    logsumexp, and multiplies in tiles, which the fused one does not (Dao et al. 2022, appendix B):

        dV = P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(O dO)) / sqrt(D);  dQ = dS K;  dK = dS^T Q
    """

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        context_vec, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, True
        )
        ctx.save_for_backward(queries, keys, values, context_vec, logsumexp)
        return context_vec

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        shape, dtype = grad.shape, grad.dtype
        *tensors, logsumexp = ctx.saved_tensors
        q, k, v, o, do = (x.flatten(0, 1) for x in (*tensors, grad))  # (B H, T, D)
        scale = 1 / math.sqrt(shape[-1])
        hidden = ~causal_mask(shape[-2], shape[-2], grad.device)
        scores = (q @ k.mT).float() * scale - logsumexp.flatten(0, 1).unsqueeze(-1)  # (B H, T, T)
        p = scores.masked_fill(hidden, float("-inf")).exp()
        rowsum = (o.float() * do.float()).sum(-1, keepdim=True)
        ds = (((do @ v.mT).float() - rowsum) * p * scale).to(dtype)
        dv = p.to(dtype).mT @ do
        return (ds @ k).view(shape), (ds.mT @ q).view(shape), dv.view(shape)
