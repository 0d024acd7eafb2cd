"""Split-weight causal multi-head attention, in interchangeable kernels.

One matrix each for queries, keys and values, viewed as heads. What happens between the
projections is a *kernel*: a function of (queries, keys, values) that owns no parameters, so
every kernel runs every checkpoint. `explicit` is the formula, line by line; the others compute
the same thing in other ways and are tested against it. Needs torch, nothing else.

    Attention(Q, K, V) = softmax(mask(Q K^T / sqrt(D))) V        (Vaswani et al. 2017, eq. 1)

Shapes: B batch, T query positions, S key positions, C emb_dim, H heads, D head_dim.
In training S = T. With S > T the queries are the *last* T of the S positions, as in decoding
with a cache: the causal mask is aligned at its bottom right corner.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys each query may see: bool (T, S), True where allowed.

    Query t is position S - T + t of the sequence and sees every key up to itself.
    Raises ValueError when S < T, where the first queries would see nothing.
    """
    if num_keys < num_queries:
        raise ValueError(f"{num_queries} queries need at least as many keys; got {num_keys}")
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return everything.tril(diagonal=num_keys - num_queries)


def causal_attn_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """How well each query fits each key it may see, mask(Q K^T / sqrt(D)), in fp32.

    queries (B, H, T, D), keys (B, H, S, D) -> (B, H, T, S); -inf for every key after the query.
    """
    head_dim = queries.shape[-1]
    attn_scores = queries @ keys.transpose(-2, -1)  # (B, H, T, S)
    # Divided by sqrt(D), so that the scores of random vectors have variance one whatever D is
    # and the softmax starts out soft. D is the width of one head, not of the whole layer.
    attn_scores = attn_scores.float() / math.sqrt(head_dim)
    mask = causal_mask(queries.shape[-2], keys.shape[-2], queries.device)
    return attn_scores.masked_fill(~mask, float("-inf"))


def causal_attn_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """The attention weights, softmax(mask(Q K^T / sqrt(D))), in fp32.

    queries (B, H, T, D), keys (B, H, S, D) -> (B, H, T, S); each row sums to one, and a query's
    weight on any key after it is exactly zero.
    """
    return torch.softmax(causal_attn_scores(queries, keys), dim=-1)  # over the keys


def explicit(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout_p: float = 0.0,
    capture: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """The plainly right kernel: weights, dropout on the weights, weighted sum of the values.

    queries (B, H, T, D), keys and values (B, H, S, D) -> context_vec (B, H, T, D). So do all.
    This one can also show what it does: capture(attn_weights, attn_scores), both fp32 and
    (B, H, T, S), the weights before dropout, the scores masked with -inf.
    """
    attn_weights = causal_attn_weights(queries, keys)  # (B, H, T, S)
    if capture is not None:
        capture(attn_weights, causal_attn_scores(queries, keys))
    attn_weights = F.dropout(attn_weights, dropout_p)
    return attn_weights.to(values.dtype) @ values  # (B, H, T, D)


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """PyTorch's fused attention, which never writes the (T, S) weights to memory. The default."""
    num_queries, num_keys = queries.shape[-2], keys.shape[-2]
    if num_queries == num_keys:
        return F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout_p, is_causal=True
        )
    # is_causal aligns the mask at the top left: one query would see the first key alone.
    mask = causal_mask(num_queries, num_keys, queries.device)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, dropout_p=dropout_p
    )


def einsum(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """The formula in index notation; nothing is transposed, the letters say what is summed."""
    num_queries, num_keys, head_dim = queries.shape[-2], keys.shape[-2], queries.shape[-1]
    attn_scores = torch.einsum("bhtd,bhsd->bhts", queries, keys).float() / math.sqrt(head_dim)
    mask = causal_mask(num_queries, num_keys, queries.device)
    attn_weights = attn_scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    attn_weights = F.dropout(attn_weights, dropout_p).to(values.dtype)
    return torch.einsum("bhts,bhsd->bhtd", attn_weights, values)


def per_head(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """One head after the other: what "multi-head" means before it is one tensor operation."""
    heads = zip(queries.unbind(1), keys.unbind(1), values.unbind(1), strict=True)
    context_vecs = [
        explicit(q[:, None], k[:, None], v[:, None], dropout_p)  # (B, 1, T, D)
        for q, k, v in heads
    ]
    return torch.cat(context_vecs, dim=1)  # (B, H, T, D)


def flex(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """PyTorch's FlexAttention: a mask written as a Python function, compiled into the kernel.

    It knows no dropout on the weights: raises ValueError when dropout_p > 0.
    """
    if dropout_p > 0.0:
        raise ValueError("the flex kernel has no dropout; use dropout=0 or another kernel")
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (queries, keys, values))
    if needs_grad and queries.device.type in ("cpu", "mps"):
        return _FlexWithExplicitBackward.apply(queries, keys, values)
    return _flex_forward(queries, keys, values)


@functools.lru_cache(maxsize=32)
def _flex_mask(num_queries: int, num_keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    offset = num_keys - num_queries  # the same bottom-right alignment as causal_mask
    if offset < 0:
        raise ValueError(f"{num_queries} queries need at least as many keys; got {num_keys}")

    def causal(batch, head, query, key):
        return key <= query + offset

    return create_block_mask(causal, None, None, num_queries, num_keys, device=str(device))


def _flex_forward(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _flex_mask(queries.shape[-2], keys.shape[-2], queries.device)
    return flex_attention(queries, keys, values, block_mask=mask)


class _FlexWithExplicitBackward(torch.autograd.Function):
    """FlexAttention has a forward on CPU and MPS but no backward: borrow `explicit`'s."""

    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return _flex_forward(queries.detach(), keys.detach(), values.detach())

    @staticmethod
    def backward(ctx, grad_context_vec: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            context_vec = explicit(*inputs)
        return torch.autograd.grad(context_vec, inputs, grad_context_vec)


def over_cache(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """What every kernel computes, for the one new query of each row over keys that were kept.

    queries (B, H, 1, D), keys and values (B, H, S, D) -> context_vec (B, H, 1, D).
    mask (B, 1, 1, S) is True for the keys that a row may see; None: each row sees all.
    """
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "explicit": explicit,
    "sdpa": sdpa,
    "einsum": einsum,
    "per_head": per_head,
    "flex": flex,
}


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention with separate query, key and value matrices.

    d_in: width of the input. d_out: width of all heads together, and of the output.
    context_length: the longest sequence that is accepted. dropout: share of attention weights
    set to zero while training. num_heads: must divide d_out. qkv_bias: biases on the three
    projections (GPT-2 has them). attention: the kernel, one of KERNELS.

    Raises ValueError for settings that do not fit, and for a sequence that is too long.
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
            raise ValueError(f"attention={attention!r} is none of {', '.join(KERNELS)}")
        self.context_length = context_length
        self.dropout = dropout
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.kernel = KERNELS[attention]
        # The order of creation is part of the contract: a seed gives the same weights for ever.
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(
        self,
        x: Tensor,
        capture: Callable[[Tensor, Tensor], None] | None = None,
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None] | None]
        | None = None,
    ) -> Tensor:
        """x (B, T, d_in) -> (B, T, d_out).

        With `capture`, attention is computed by `explicit`, which hands over its weights and
        scores as fp32 (B, H, T, T); without it, the kernel may never form them at all.

        With `remember`, as decoding has it, remember(keys, values) is given the keys and values of
        x, both (B, H, T, D). It returns all that the queries are to look at, (B, H, S, D), and the
        mask (see `over_cache`), or None where that is x itself.
        """
        num_tokens = x.shape[1]
        if num_tokens > self.context_length:
            raise ValueError(
                f"{num_tokens} tokens do not fit into context_length={self.context_length}"
            )
        queries, keys, values = self.project(x)  # (B, H, T, D) each
        dropout_p = self.dropout if self.training else 0.0
        kept = remember(keys, values) if remember else None
        if kept is not None:
            context_vec = over_cache(queries, *kept)  # (B, H, T, D)
        elif capture is None:
            context_vec = self.kernel(queries, keys, values, dropout_p)  # (B, H, T, D)
        else:
            context_vec = explicit(queries, keys, values, dropout_p, capture)

        # Back to one row per token: the heads' results stand side by side.
        context_vec = context_vec.transpose(1, 2).flatten(2)  # (B, T, H * D)
        return self.out_proj(context_vec)  # (B, T, d_out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, d_in) -> queries, keys and values, (B, H, T, D) each."""
        return (
            self.split_heads(self.W_query(x)),
            self.split_heads(self.W_key(x)),
            self.split_heads(self.W_value(x)),
        )

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H * D) -> (B, H, T, D): a view; each head gets its own D columns."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
