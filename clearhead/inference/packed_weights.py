"""Packed weights: converts a model for fast text generation on a CPU.

A decoding step multiplies each matrix of the model by one row for each text, so its time is the
time to read the matrices from memory. Three changes make this faster. bf16 halves the bytes. One
product computes queries, keys and values, because large matrices are read faster than small ones.
And each matrix is stored in the memory layout that is fastest on this processor. Outputs equal
those of model.py up to rounding. Measurements: docs/models.md.
"""

import itertools
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention
from model import GPT

# Of the measurement in `fastest_layouts`:
OUTPUTS = 4096  # output features of a matrix; the output layer of GPT-2 has 50,257
ROUNDS = 3
ADVANTAGE = 1.1  # another layout must be faster than the first one by this factor


def pack_weights(model: GPT, dtype: torch.dtype, rows: int = 1, to_compile: bool = False) -> GPT:
    """Converts a model in place for generating `rows` texts at once in `dtype`, and returns it.

    The converted model cannot be trained, saved or copied. In place, so that a large model is not
    in memory twice. to_compile: changes only the dtype, because torch.compile rejects packed
    matrices.
    """
    model.to(dtype).eval().requires_grad_(False)
    if model.token_emb.weight.device.type != "cpu" or to_compile:
        return model
    for module in list(model.modules()):
        if isinstance(module, MultiHeadAttention):
            join_projections(module)
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, PackedLinear(layer))
    model.head = head = PackedLinear(model.token_emb)
    model.logits = head.forward  # a module as attribute would not hide the method
    model.forward = torch.inference_mode()(model.forward)  # 2 to 4 % faster
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    found = fastest_layouts([linear.weight for linear in linears], rows)
    for linear in linears:
        linear.weight = found[linear.weight.shape](linear.weight, rows)
    return model


def join_projections(attn: MultiHeadAttention) -> None:
    """Replaces three products by one: (B, T, C) -> queries, keys and values, (B, T, 3 C)."""
    attn.W_qkv = joined = PackedLinear(attn.W_query, attn.W_key, attn.W_value)
    del attn.W_query, attn.W_key, attn.W_value

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = joined(x).chunk(3, dim=-1)
        return attn.split_heads(queries), attn.split_heads(keys), attn.split_heads(values)

    attn.project = project


class PackedLinear(nn.Module):
    """x (..., K) -> (..., N), the output features of all `layers`. The weight (N, K) may have any
    layout."""

    def __init__(self, *layers: nn.Linear | nn.Embedding):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if isinstance(layer, nn.Linear)]
        self.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = torch.cat(biases) if biases and biases[0] is not None else None

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), weight (N, K) in any layout, bias (N,) -> x weight^T + bias, (..., N)."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


# ------------------------------------------------------------------------------------- layouts
# A layout is a function of a weight (N, K) and the number of rows of the products. It returns the
# same matrix in another memory layout.
Layout = Callable[[Tensor, int], Tensor]


def by_rows(weight: Tensor, rows: int) -> Tensor:
    """The layout of nn.Linear."""
    return weight


def by_columns(weight: Tensor, rows: int) -> Tensor:
    """The layout of GPT-2 in transformers."""
    return weight.t().contiguous().t()


def packed(weight: Tensor, rows: int) -> Tensor:
    """The layout of oneDNN for this number of rows. It avoids a conversion in each product.

    Uses the private operators with which torch.compile packs matrices. The public alternative,
    torch.utils.mkldnn.to_mkldnn, is no faster than nn.Linear, because it converts the inputs.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def packed_for_8(weight: Tensor, rows: int) -> Tensor:
    """The layout of oneDNN for 8 rows, which may also be fast for one row."""
    return packed(weight, 8)


def layouts(dtype: torch.dtype) -> list[Layout]:
    """Returns the layouts to choose from; the first one is preferred.

    In bf16, oneDNN's layout is the fastest on all measured processors. There is no choice in bf16:
    the layouts round differently, so the text of a seed would depend on the choice.
    """
    if dtype != torch.float32:
        return [packed if can_pack(dtype) else by_rows]
    return [*([packed, packed_for_8] if can_pack(dtype) else []), by_rows, by_columns]


def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this torch build has the operators of oneDNN that `packed` and `multiply`
    use, which are private, and the processor supports `dtype`."""
    used = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in used):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def fastest_layouts(weights: list[Tensor], rows: int) -> dict[torch.Size, Layout]:
    """Returns the fastest layout for each shape (N, K) of the weights.

    Measures one weight of each shape. A round reads all of them in all layouts, so that they come
    from memory, as in a decoding step, and not from the cache. The minimum of several rounds
    counts, because other processes can only make a product slower.
    """
    choices = layouts(weights[0].dtype)
    examples = {weight.shape: weight[:OUTPUTS] for weight in weights}
    if len(choices) == 1:
        return dict.fromkeys(examples, choices[0])
    best = dict.fromkeys(itertools.product(examples, choices), float("inf"))  # seconds
    laid_out = {(shape, layout): layout(examples[shape], rows) for shape, layout in best}
    for _ in range(ROUNDS):
        for (shape, layout), weight in laid_out.items():
            x = torch.ones(rows, shape[1])
            started = time.perf_counter()
            multiply(x, weight)
            best[shape, layout] = min(best[shape, layout], time.perf_counter() - started)
    for shape in examples:
        best[shape, choices[0]] /= ADVANTAGE
    return {shape: min(choices, key=lambda layout: best[shape, layout]) for shape in examples}
