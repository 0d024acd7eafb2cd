"""Everything that rewrites a GPT for a device. model.py and attention.py are the plain versions.

    specialize                  for training and evaluation: cross_entropy.py, cpu.py, and compiled
                                blocks. The model can still be trained, saved and sharded.
    specialize_for_generation   for fast generation: reduced precision, and on a CPU packed weights.

Results equal those of model.py up to rounding. Two rewrites are elsewhere because they do not
change the model: DDP and the compilation of the complete model (parallel/strategy.py), and the
compiled decoding step (models/decoding.py).

Packed weights: a decoding step multiplies each matrix of the model by one row for each text, so its
time is the time to read the matrices from memory. One product computes queries, keys and values,
because large matrices are read faster than small ones. And each matrix has the memory layout of
oneDNN, which is the fastest one on the measured processors (docs/results.md).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention, sdpa
from clearhead.compute import cpu
from clearhead.compute.cross_entropy import head_loss
from model import GPT


def specialize(model: GPT, device: torch.device, compile_blocks: bool = False) -> None:
    """Rewrites a model in place for training and evaluation on a device.

    The loss no longer stores the logits of the complete batch. On a CPU, attention and dropout are
    faster ones. compile_blocks: compiles each block; the blocks share compiled code.
    """
    model.head_loss = head_loss
    if device.type == "cpu":
        for module in (model, *model.blocks):
            module.dropout = cpu.Dropout(module.dropout.p).train(module.training)
        for block in model.blocks:
            if block.attn.kernel is sdpa:
                block.attn.kernel = cpu.attention
    if compile_blocks:
        for block in model.blocks:
            block.compile()


def specialize_for_generation(
    model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False
) -> GPT:
    """Rewrites a model in place for generating `rows` texts at once in `dtype`, and returns it.

    The model cannot be trained, saved or copied any more. In place, so that a large model is not in
    memory twice. to_compile: changes only the dtype, because torch.compile rejects packed weights.
    """
    model.to(dtype).eval().requires_grad_(False)
    if model.token_emb.weight.device.type == "cpu" and not to_compile:
        pack_weights(model, rows)
        model.forward = torch.inference_mode()(model.forward)  # 2 to 4 % faster
    return model


# ----------------------------------------------------------------------------- packed weights


def pack_weights(model: GPT, rows: int) -> None:
    """Replaces the linear layers of a model on a CPU by packed ones, for `rows` texts at once."""
    for module in list(model.modules()):
        if isinstance(module, MultiHeadAttention):
            join_projections(module, rows)
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, PackedLinear(layer, rows=rows))
    model.head = head = PackedLinear(model.token_emb, rows=rows)
    model.logits = head.forward  # a module as attribute would not hide the method


def join_projections(attn: MultiHeadAttention, rows: int) -> None:
    """Replaces three products by one: (B, T, C) -> queries, keys and values, (B, T, 3 C)."""
    attn.W_qkv = joined = PackedLinear(attn.W_query, attn.W_key, attn.W_value, rows=rows)
    del attn.W_query, attn.W_key, attn.W_value

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = joined(x).chunk(3, dim=-1)
        return attn.split_heads(queries), attn.split_heads(keys), attn.split_heads(values)

    attn.project = project


class PackedLinear(nn.Module):
    """x (..., K) -> (..., N), the output features of all `layers`.

    The weight has the layout of oneDNN for `rows` rows of x, which avoids a conversion in each
    product. This uses the private operators with which torch.compile packs matrices. The public
    alternative, torch.utils.mkldnn.to_mkldnn, is no faster than nn.Linear: it converts the inputs.
    """

    def __init__(self, *layers: nn.Linear | nn.Embedding, rows: int):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # (N, K)
        self.bias = torch.cat(biases) if biases and biases[0] is not None else None
        if can_pack(self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            options = ("none", [], "")  # no activation
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, *options)
        return F.linear(x, self.weight, self.bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this torch build has the private operators of oneDNN that PackedLinear uses,
    and the processor supports `dtype`."""
    used = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in used):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
