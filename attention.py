"""Split-weight causal multi-head attention with interchangeable kernels. Needs only torch.

Split-weight: queries, keys and values have separate linear layers, and each head uses D output
features of each. A *kernel* is a function of (queries, keys, values) that computes attention.
It has no parameters, so every kernel works with every checkpoint. `explicit` is the formula, line
by line; the other kernels return the same values and are tested against it. A kernel with another
formula, for example a sliding window, declares its scores in SCORES.

    Attention(Q, K, V) = softmax(mask(Q K^T / sqrt(D))) V        (Vaswani et al. 2017, eq. 1)

Shapes: B batch, T query positions, S key positions, H heads, D head_dim. In training S = T. When
S > T, the queries belong to the *last* T of the S positions, as in decoding with a key-value cache:
the causal mask is aligned at its lower right corner.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Returns the causal mask, bool (T, S): True where the query may attend to the key.

    Query t is at position S - T + t of the sequence. It may attend to the keys at this position and
    before it. Raises ValueError when S < T: the first queries would have no key.
    """
    if num_keys < num_queries:
        raise ValueError(f"{num_queries} queries need at least as many keys; got {num_keys}")
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=num_keys - num_queries)


def causal_attn_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the masked attention scores, mask(Q K^T / sqrt(D)), in fp32.

    queries (B, H, T, D), keys (B, H, S, D) -> (B, H, T, S), -inf for every key after the query.
    """
    attn_scores = queries @ keys.transpose(-2, -1)  # (B, H, T, S)
    # The dot product of two vectors of D random entries (mean 0, variance 1) has variance D. After
    # division by sqrt(D) it is 1, so softmax does not saturate. D is the width of one head.
    head_dim = queries.shape[-1]
    attn_scores = attn_scores.float() / math.sqrt(head_dim)
    mask = causal_mask(queries.shape[-2], keys.shape[-2], queries.device)
    return attn_scores.masked_fill(~mask, float("-inf"))


def causal_attn_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the attention weights, softmax(mask(Q K^T / sqrt(D))), in fp32.

    queries (B, H, T, D), keys (B, H, S, D) -> (B, H, T, S). Each row sums to 1. The weight of every
    key after the query is exactly 0.
    """
    return torch.softmax(causal_attn_scores(queries, keys), dim=-1)  # over the keys


# ------------------------------------------------------------------------------------- kernels
# The arguments of every kernel: queries (B, H, T, D), keys and values (B, H, S, D), dropout_p, the
# probability that an attention weight is set to zero. The result: context_vec (B, H, T, D). Every
# kernel raises ValueError when S < T.


def explicit(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes the formula: attention weights, dropout on the weights, weighted sum of values."""
    attn_weights = causal_attn_weights(queries, keys)  # (B, H, T, S)
    attn_weights = F.dropout(attn_weights, dropout_p)
    return attn_weights.to(values.dtype) @ values  # (B, H, T, D)


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Calls PyTorch's fused attention, which does not store the (T, S) weights. The default."""
    num_queries, num_keys = queries.shape[-2], keys.shape[-2]
    if num_queries == num_keys:
        return fused_attention(queries, keys, values, dropout_p=dropout_p, is_causal=True)
    # is_causal aligns the mask at its upper left corner: query 0 would attend to key 0 only.
    mask = causal_mask(num_queries, num_keys, queries.device)
    return fused_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout_p)


def fused_attention(queries: Tensor, keys: Tensor, values: Tensor, **options) -> Tensor:
    """Calls F.scaled_dot_product_attention. On MPS, it returns wrong values for some views (PyTorch
    issue 181133), so they are copied there."""
    if queries.device.type == "mps":
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    return F.scaled_dot_product_attention(queries, keys, values, **options)


def einsum(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes the formula in index notation: letters name the axes, so nothing is transposed."""
    num_queries, num_keys, head_dim = queries.shape[-2], keys.shape[-2], queries.shape[-1]
    attn_scores = torch.einsum("bhtd,bhsd->bhts", queries, keys).float() / math.sqrt(head_dim)
    mask = causal_mask(num_queries, num_keys, queries.device)
    attn_weights = attn_scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    attn_weights = F.dropout(attn_weights, dropout_p).to(values.dtype)
    return torch.einsum("bhts,bhsd->bhtd", attn_weights, values)


def per_head(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Computes each head separately, in a loop, and joins the results."""
    heads = zip(queries.unbind(1), keys.unbind(1), values.unbind(1), strict=True)
    context_vecs = [
        explicit(q[:, None], k[:, None], v[:, None], dropout_p)  # (B, 1, T, D)
        for q, k, v in heads
    ]
    return torch.cat(context_vecs, dim=1)  # (B, H, T, D)


def flex(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Calls PyTorch's FlexAttention, which compiles the mask, a Python function, into its kernel.

    FlexAttention has no dropout: raises ValueError when dropout_p > 0. On CPU and MPS it has no
    backward pass, so `explicit` is used there when gradients are needed.
    """
    if dropout_p > 0.0:
        raise ValueError("the flex kernel has no dropout; use dropout=0 or another kernel")
    needs_grad = any(x.requires_grad for x in (queries, keys, values))
    if needs_grad and queries.device.type in ("cpu", "mps"):
        return explicit(queries, keys, values)
    mask = _flex_mask(queries.shape[-2], keys.shape[-2], queries.device)
    return flex_attention(queries, keys, values, block_mask=mask)


@functools.lru_cache(maxsize=32)
def _flex_mask(num_queries: int, num_keys: int, device: torch.device):
    """Returns the same mask as `causal_mask`, as a FlexAttention block mask."""
    offset = num_keys - num_queries
    if offset < 0:
        raise ValueError(f"{num_queries} queries need at least as many keys; got {num_keys}")

    def causal(batch, head, query, key):  # indices; offset: position of the first query
        return key <= query + offset

    return create_block_mask(causal, None, None, num_queries, num_keys, device=str(device))


AttentionKernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
KERNELS: dict[str, AttentionKernel] = {
    "explicit": explicit,
    "sdpa": sdpa,
    "einsum": einsum,
    "per_head": per_head,
    "flex": flex,
}
NO_DROPOUT: tuple[str, ...] = ("flex",)  # these kernels need dropout=0
# Attention weights are the softmax of attention scores, by default causal_attn_scores. A kernel
# with other scores has its function of queries (B, H, T, D) and keys (B, H, S, D) here. It returns
# fp32 scores (B, H, T, S), -inf for every key after the query. The lens and the cache rely on it.
AttentionScores = Callable[[Tensor, Tensor], Tensor]
SCORES: dict[str, AttentionScores] = {}


@torch.no_grad()
def computes_its_scores(name: str, num_tokens: int, head_dim: int, **options) -> bool:
    """Returns whether a kernel computes softmax(scores) V, where the scores are those in SCORES.

    Compares them on random queries, keys and values of T = num_tokens, for the last queries and for
    the last one alone. options: their dtype and device.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(3, 1, 1, num_tokens, head_dim, generator=generator)
    queries, keys, values = random.to(**options)
    last = queries[:, :, -256:]  # not all: the scores of 32,768 tokens take 4 GiB
    attn_scores = SCORES.get(name, causal_attn_scores)(last, keys)
    expected = attn_scores.softmax(dim=-1) @ values.float()
    later = ~causal_mask(last.shape[2], num_tokens, keys.device)
    is_equal = attn_scores[:, :, later].isneginf().all()
    for asked in (queries, queries[:, :, -1:]):
        found = KERNELS[name](asked, keys, values, 0.0)[:, :, -256:].float()
        is_equal &= torch.isclose(found, expected[:, :, -found.shape[2] :], atol=0.05).all()
    return bool(is_equal)


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention with separate query, key and value matrices.

    d_in: width of the input. d_out: width of all heads together, and of the output.
    context_length: maximum number of tokens. dropout: probability that an attention weight is set
    to zero in training. num_heads: must divide d_out. qkv_bias: whether the query, key and value
    projections have a bias (GPT-2: True). attention: name of the kernel, a key of KERNELS.

    Raises ValueError for invalid arguments, and in forward for more than context_length tokens.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        attention: str = "sdpa",
    ):
        super().__init__()
        if num_heads < 1 or d_out % num_heads != 0:
            raise ValueError(f"num_heads={num_heads} must divide d_out={d_out}")
        if attention not in KERNELS:
            raise ValueError(f"attention={attention!r} must be one of {', '.join(KERNELS)}")
        self.context_length = context_length
        self.dropout = dropout
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.kernel = KERNELS[attention]
        self.attn_scores = SCORES.get(attention, causal_attn_scores)
        # Do not change the order of these lines: the initial weights for a seed depend on it.
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(self, x: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        """x (B, T, d_in) -> (B, T, d_out).

        kernel: replaces self.kernel in this call, for example by a kernel that captures the
        attention weights, or by one that adds the keys and values of a cache.
        """
        num_tokens = x.shape[1]
        if num_tokens > self.context_length:
            raise ValueError(
                f"{num_tokens} tokens are more than context_length={self.context_length}"
            )
        queries, keys, values = self.project(x)  # (B, H, T, D) each
        kernel = self.kernel if kernel is None else kernel
        context_vec = kernel(queries, keys, values, self.dropout if self.training else 0.0)
        context_vec = context_vec.transpose(1, 2).flatten(2)  # (B, T, H * D), heads concatenated
        return self.out_proj(context_vec)  # (B, T, d_out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, d_in) -> queries, keys and values, (B, H, T, D) each."""
        return (
            self.split_heads(self.W_query(x)),
            self.split_heads(self.W_key(x)),
            self.split_heads(self.W_value(x)),
        )

    def value_norms(self, values: Tensor) -> Tensor:
        """values (B, H, T, D) -> the norm of each value vector after the output projection.

        ||W_O^h v||, (B, H, T) in fp32, where W_O^h are the columns of out_proj of head h. Attention
        weight times this norm measures the contribution of a key token (Kobayashi et al. 2020,
        Attention is Not Only a Weight).
        """
        weight = self.out_proj.weight.to(values.dtype)  # (C, H * D)
        weight = weight.unflatten(1, (self.num_heads, self.head_dim)).permute(1, 2, 0)  # (H, D, C)
        # ||W v||^2 = v^T (W^T W) v does not need the vectors W v, (B, H, T, C).
        squares = ((values @ (weight @ weight.mT)).float() * values.float()).sum(-1)
        return squares.clamp(min=0).sqrt()

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H * D) -> (B, H, T, D). Returns a view: each head gets D of the columns."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
