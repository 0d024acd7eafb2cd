"""Everything that rewrites a GPT for a device. model.py and attention.py are the plain versions.

    specialize                  for training and evaluation: the loss of cross_entropy.py, compiled
                                blocks, and on a CPU faster attention and dropout. The model can
                                still be trained, saved and sharded.
    specialize_for_generation   for fast generation: reduced precision, and on a CPU packed weights.

Results equal those of model.py up to the rounding of their dtype; the random numbers of dropout
masks differ. Two rewrites are elsewhere because they do not change the model: DDP and the
compilation of the complete model (parallel/strategy.py), and the compiled decoding step
(models/decoding.py). docs/results.md has the measurements.

Shapes: B batch, H heads, T positions, D head_dim.
"""

import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention import AttentionKernel, MultiHeadAttention, causal_mask, sdpa
from clearhead.compute.cross_entropy import head_loss
from model import GPT, Block


def specialize(model: GPT, device: torch.device, compile_blocks: bool = False) -> None:
    """Rewrites a model in place for training and evaluation on a device.

    The loss no longer stores the logits of the complete batch. On a CPU, attention and dropout are
    faster ones. compile_blocks: compiles each block; the blocks share compiled code.
    """
    model.head_loss = head_loss
    if device.type == "cuda" and not compile_blocks:
        for block in model.blocks:
            block.forward = types.MethodType(flat_forward, block)
    if device.type == "cpu":
        for module in (model, *model.blocks):
            module.dropout = FastDropout(module.dropout.p).train(module.training)
        for block in model.blocks:
            if block.attn.kernel is sdpa:
                block.attn.kernel = fast_attention
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


def flat_forward(block: Block, x: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
    """Computes block.forward with a residual stream of (B T, C) inside, the shape of the products.
    With (B, T, C), torch.compile casts the gradient of the residual stream in a separate kernel,
    instead of in the one of the norm that computes it. Blocks that are compiled separately would
    save one more tensor for backward."""
    shape, x = x.shape, x.flatten(0, 1)
    branch = block.attn(block.attn_norm(x).view(shape), kernel).flatten(0, 1)
    x = x + block.dropout(branch)
    return (x + block.dropout(block.mlp(block.mlp_norm(x)))).view(shape)


# -------------------------------------------------------------------------- attention on a CPU

# For longer sequences the fused kernel is faster, because it skips the masked half.
MAX_UNFUSED_LENGTH = 512


def fast_attention(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes sdpa of attention.py, in training faster with dropout and for short sequences in
    bf16. queries (B, H, T, D), keys and values (B, H, S, D) -> context_vec (B, H, T, D)."""
    is_short = keys.shape[-2] <= MAX_UNFUSED_LENGTH and queries.dtype == torch.bfloat16
    # No fused CPU kernel has dropout: torch writes the weights to memory too.
    if dropout_p > 0 or (is_short and queries.requires_grad):
        return _Attention.apply(queries, keys, values, dropout_p)
    return sdpa(queries, keys, values)


class _Attention(torch.autograd.Function):
    """Attention that keeps its weights for the gradient and multiplies all heads at once. In bf16
    the fused kernel is slow: it multiplies small blocks and does not use AMX.

    With weights P, dropout mask M (0 or 1 / (1 - dropout_p)) and W = M P, the output is O = W V:

        dV = W^T dO;  dP = M (dO V^T);  dS = P dP - P rowsum(P dP);  dQ = dS K / sqrt(D);
        dK = dS^T Q / sqrt(D).                M is not needed: P dP = W (dO V^T).

    Each (T, S) matrix has the dtype of the queries and is read as rarely as possible, because
    reading it takes longer than the products.
    """

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (queries, keys, values))  # (B H, T, D), (B H, S, D)
        (T, S), ctx.scale = (q.shape[1], k.shape[1]), q.shape[-1] ** -0.5
        mask = q.new_zeros(T, S).masked_fill(~causal_mask(T, S, q.device), -math.inf)
        p = torch.baddbmm(mask, q, k.mT, alpha=ctx.scale).softmax(-1)  # (B H, T, S)
        w = fast_dropout(p, dropout_p)
        ctx.save_for_backward(q, k, v, p, w)
        return (w @ v).view(queries.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, p, w), do = ctx.saved_tensors, grad.flatten(0, 1)
        p_dp = w * (do @ v.mT)
        sums = p_dp.sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype)
        ds = p_dp.addcmul_(p, sums, value=-1)
        grads = (ds @ k).mul_(ctx.scale), (ds.mT @ q).mul_(ctx.scale), w.mT @ do
        return *(x.unflatten(0, grad.shape[:2]) for x in grads), None


# ---------------------------------------------------------------------------- dropout on a CPU


class FastDropout(nn.Dropout):
    """nn.Dropout with faster random masks."""

    def forward(self, x: Tensor) -> Tensor:
        return fast_dropout(x, self.p) if self.training else x


def fast_dropout(x: Tensor, p: float) -> Tensor:
    """Computes F.dropout in training mode with 16 random bits per element. torch draws 53 bits per
    element, which takes a quarter of a step. p is rounded to a multiple of 2^-16."""
    dropped = min(round(p * 2**16), 2**16 - 1)
    if not dropped:
        return x
    # Not in place, because torch.compile does not support that.
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), dtype=torch.int64)
    kept = drawn.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
    return (x * kept).mul_(2**16 / (2**16 - dropped))  # the expected value is x


# ----------------------------------------------------------------------------- packed weights

# A decoding step multiplies each matrix of the model by one row for each text, so its time is the
# time to read the matrices from memory. One product computes queries, keys and values, because
# large matrices are read faster than small ones. And each matrix has the memory layout of oneDNN,
# which is the fastest one on the measured processors.


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
