"""Packed weights: converts a model for fast text generation.

A decoding step multiplies each matrix of the model by one row for each text, so its time is the
time to read the matrices from memory. Two changes make this faster: bf16 halves the bytes, and on a
CPU the matrices are stored in the memory layout of oneDNN's kernels, which avoids a conversion in
each call. Outputs equal those of model.py up to rounding. Measurements: docs/models.md.
"""

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT


def pack_weights(model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False) -> GPT:
    """Converts a model in place for generating `rows` texts at once in `dtype`, and returns it.

    The converted model cannot be trained or saved. In place, so that a large model is not in memory
    twice. to_compile: keeps the layout of matrices, because torch.compile rejects packed matrices.
    """
    model.to(dtype).eval().requires_grad_(False)
    if model.token_emb.weight.device.type == "cpu" and not to_compile and can_pack(dtype):
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(module, name, PackedLinear(layer.weight, layer.bias, rows))
        model.head = head = PackedLinear(model.token_emb.weight, None, rows)
        model.logits = head.forward  # a module as attribute would not hide the method
    return model


class PackedLinear(nn.Module):
    """x (..., K) -> x weight^T + bias, (..., N), with the weight (N, K) in oneDNN's layout for a
    given number of rows.

    Uses the private operators with which torch.compile packs matrices. The public alternative,
    torch.utils.mkldnn.to_mkldnn, is no faster than nn.Linear, because it converts the inputs in
    each call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias = bias if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this torch build has oneDNN and the processor supports `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
