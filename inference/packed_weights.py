"""A model that only decodes, with its weights packed for speed.

A decoding step multiplies one row for each text by every matrix of the model, so it takes as long
as reading the matrices. Three things shorten that: half the bytes (bf16), one product for queries,
keys and values instead of three, and, on a CPU, matrices in the memory layout of oneDNN's kernels,
converted once instead of in each call. The results are those of model.py, rounded as the type
rounds. Measured in docs/models.md.

Shapes: B batch, T positions, C emb_dim, K inputs, N outputs of a layer, V vocabulary.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention
from model import GPT, Block


def pack_weights(model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False) -> GPT:
    """Turns a model into one that decodes `rows` texts at once, in `dtype`. In place, so that a
    large model needs its memory once; it cannot be trained or saved after that.

    to_compile: matrices keep their layout, because torch.compile does not accept packed ones.
    """
    model.to(dtype).eval().requires_grad_(False)
    on_cpu = model.token_emb.weight.device.type == "cpu"
    pack = on_cpu and not to_compile and can_pack(dtype)
    linear = functools.partial(PackedLinear, rows=rows) if pack else Linear
    for block in model.blocks:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        parts = [attn.W_query, attn.W_key, attn.W_value]
        weight = torch.cat([part.weight for part in parts])  # (3 C, C)
        has_bias = attn.W_query.bias is not None
        bias = torch.cat([part.bias for part in parts]) if has_bias else None  # (3 C,)
        del attn.W_query, attn.W_key, attn.W_value
        attn.W_qkv = W_qkv = linear(weight, bias)
        attn.project = functools.partial(_project, attn, W_qkv)
        for module, name in ((attn, "out_proj"), (mlp, "fc"), (mlp, "out_proj")):
            layer = getattr(module, name)
            setattr(module, name, linear(layer.weight, layer.bias))
    model.head = head = linear(model.token_emb.weight, None)  # the embedding keeps its matrix
    model.logits = head.forward  # a module of this name would not replace the method
    return model


def _project(
    attn: MultiHeadAttention, W_qkv: nn.Module, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """MultiHeadAttention.project with one product: x (B, T, C) -> queries, keys and values,
    (B, H, T, D) each."""
    queries, keys, values = W_qkv(x).chunk(3, dim=-1)  # (B, T, C) each
    return attn.split_heads(queries), attn.split_heads(keys), attn.split_heads(values)


class Linear(nn.Module):
    """x (..., K) -> x weight^T + bias, (..., N): weight (N, K), bias (N,). Without parameters."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight.detach(), bias if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """Linear with its matrix in oneDNN's layout for a given number of rows.

    These operators are private; torch.compile packs matrices with them. The public form,
    torch.utils.mkldnn.to_mkldnn, is no faster than nn.Linear: its inputs are converted in each
    call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int):
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN and the operators of PackedLinear, and the processor supports
    the type."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    available = torch.backends.mkldnn.is_available()
    if not available or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
