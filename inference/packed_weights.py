"""A model that only decodes, in the form that decoding is fastest in.

A step of decoding multiplies one row for each text by every matrix of the model, so it takes as
long as the matrices take to be read. Three things shorten that: half the bytes (bf16), one product
for queries, keys and values instead of three, and, on a CPU, matrices in the order that oneDNN's
kernels read them in, made once instead of in each call. What is computed stays what model.py says;
the rounding is that of the type. Measured in docs/models.md.

Shapes: B batch, T positions, C emb_dim, K inputs, N outputs of a layer, V vocabulary.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention
from model import GPT


def freeze(model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False) -> GPT:
    """Turns a model into one that decodes `rows` texts at once, in `dtype`. In place, so that a
    large model is there once; it cannot be trained or saved after that.

    to_compile: nothing is packed, since torch's compiler takes no packed matrices.
    """
    model.to(dtype).eval().requires_grad_(False)
    on_cpu = model.token_emb.weight.device.type == "cpu"
    pack = on_cpu and not to_compile and can_pack(dtype)
    product = functools.partial(Packed, rows=rows) if pack else Product
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        parts = [attn.W_query, attn.W_key, attn.W_value]
        weight = torch.cat([part.weight for part in parts])  # (3 C, C)
        has_bias = attn.W_query.bias is not None
        bias = torch.cat([part.bias for part in parts]) if has_bias else None  # (3 C,)
        attn.W_query = attn.W_key = attn.W_value = None
        attn.W_qkv = product(weight, bias)
        attn.project = functools.partial(_project, attn)
        for of, name in ((attn, "out_proj"), (mlp, "fc"), (mlp, "out_proj")):
            layer = getattr(of, name)
            setattr(of, name, product(layer.weight, layer.bias))
    model.head = product(model.token_emb.weight, None)  # the embedding looks up its rows as ever
    model.logits = model.head.forward  # a module of that name would stand behind the method
    return model


def _project(attn: MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, T, C) -> queries, keys and values, (B, H, T, D) each; for `project` of attention.py."""
    queries, keys, values = attn.W_qkv(x).chunk(3, dim=-1)  # (B, T, C) each
    return attn.split_heads(queries), attn.split_heads(keys), attn.split_heads(values)


class Product(nn.Module):
    """x (..., K) -> x weight^T + bias, (..., N): weight (N, K), bias (N,)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight.detach(), bias if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed(Product):
    """The same, with its matrix in the order in which oneDNN reads it for so many rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int):
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN, and the two operators that its compiler packs matrices by;
    and the processor what they need for 16 bits."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has = torch.backends.mkldnn.is_available()
    if not has or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
