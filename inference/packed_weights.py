"""A model that only decodes, with its weights packed for speed.

A decoding step multiplies one row for each text by every matrix of the model, so it takes as long
as reading the matrices. Two things shorten that: half the bytes (bf16) and, on a CPU, matrices in
the memory layout of oneDNN's kernels, converted once instead of in each call. The results are those
of model.py, rounded as the type rounds. Measured in docs/models.md.
"""

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT


def pack_weights(model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False) -> GPT:
    """Turns a model into one that decodes `rows` texts at once, in `dtype`. In place, so that a
    large model needs its memory once; it cannot be trained or saved after that.

    to_compile: matrices keep their layout, because torch.compile does not accept packed ones.
    """
    model.to(dtype).eval().requires_grad_(False)
    if model.token_emb.weight.device.type == "cpu" and not to_compile and can_pack(dtype):
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(module, name, PackedLinear(layer.weight, layer.bias, rows))
        model.head = head = PackedLinear(model.token_emb.weight, None, rows)
        model.logits = head.forward  # a module of this name would not replace the method
    return model


class PackedLinear(nn.Module):
    """x (..., K) -> x weight^T + bias, (..., N), with the weight (N, K) in oneDNN's layout for a
    given number of rows.

    These operators are private; torch.compile packs matrices with them. The public form,
    torch.utils.mkldnn.to_mkldnn, is no faster than nn.Linear: its inputs are converted in each
    call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias = bias if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN and the processor supports the type."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
