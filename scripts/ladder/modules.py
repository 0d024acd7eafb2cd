"""Steps 10 to 14 of the ladder: attention as a module, with one head and with several heads."""

import math

import torch
from torch import Tensor, nn

from attention import MultiHeadAttention, causal_mask
from model import Block, ModelConfig
from scripts.ladder.printing import WORDS, show, show_equal, step


class CausalAttention(nn.Module):
    """One head: steps 5 to 9 for a batch of windows."""

    def __init__(self, d_in: int, head_dim: int, dropout: float = 0.0):
        super().__init__()
        self.W_query = nn.Linear(d_in, head_dim, bias=False)
        self.W_key = nn.Linear(d_in, head_dim, bias=False)
        self.W_value = nn.Linear(d_in, head_dim, bias=False)
        self.dropout = nn.Dropout(dropout)  # in training mode only

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_in) -> (B, T, D)
        queries, keys, values = self.W_query(x), self.W_key(x), self.W_value(x)
        attn_scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        allowed = causal_mask(x.shape[1], x.shape[1], x.device)
        attn_weights = attn_scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        return self.dropout(attn_weights) @ values


class MultiHeadWrapper(nn.Module):
    """Several heads, computed sequentially. Their context vectors are concatenated."""

    def __init__(self, d_in: int, head_dim: int, num_heads: int):
        super().__init__()
        self.heads = nn.ModuleList([CausalAttention(d_in, head_dim) for _ in range(num_heads)])

    def forward(self, x: Tensor) -> Tensor:  # (B, T, d_in) -> (B, T, H * D)
        return torch.cat([head(x) for head in self.heads], dim=-1)


@step(10, CausalAttention)
def one_head(x: Tensor, context_vec: Tensor) -> None:
    """A module with one head.

    The same lines as a module, for the batch x of step 3, (B, T, d_in). The matrix products treat
    each window separately. With the seed of step 5 the module has the same matrices, so the output
    for the first window is the context vectors of step 9.
    """
    torch.manual_seed(789)
    head = CausalAttention(d_in=3, head_dim=2)
    output = head(x)  # (B, T, D)
    show_equal("output[0] is equal to context_vec", output[0], context_vec)


@step(11, MultiHeadWrapper)
def several_heads(x: Tensor) -> MultiHeadWrapper:
    """Several heads, computed sequentially.

    In one head, a query token has one row of weights. With several heads, each with its own
    matrices, it can attend to different tokens for different reasons.
    """
    torch.manual_seed(123)
    wrapper = MultiHeadWrapper(d_in=3, head_dim=2, num_heads=2)
    show("wrapper(x)[0]", wrapper(x)[0])  # (T, H * D): two columns of head 0, two of head 1
    return wrapper


@step(12)
def weight_split(x: Tensor, wrapper: MultiHeadWrapper) -> MultiHeadAttention:
    """The weight split: one matrix for all heads.

    One large matrix product is faster than many small ones. So the matrices of the heads are joined
    to one matrix, and its output is split into heads. attention.MultiHeadAttention, the attention
    of GPT-2 in model.py, does this. With the weights of the wrapper it computes the same. It has
    one more matrix, out_proj, which mixes the outputs of the heads; for the comparison it is the
    identity matrix.
    """
    split = MultiHeadAttention(d_in=3, d_out=4, context_length=6, dropout=0.0, num_heads=2)
    with torch.no_grad():
        for name in ("W_query", "W_key", "W_value"):
            matrices = [getattr(head, name).weight for head in wrapper.heads]  # (D, d_in) each
            getattr(split, name).weight.copy_(torch.cat(matrices))  # (H * D, d_in)
        split.out_proj.weight.copy_(torch.eye(4))
        split.out_proj.bias.zero_()
    show_equal("split(x) is equal to wrapper(x)", split(x), wrapper(x))

    queries = split.W_query(x)
    print("split.W_query(x)  ", tuple(queries.shape), "(B, T, H * D)")
    queries = queries.view(2, 6, 2, 2)  # not .view(2, 2, 6, 2): it mixes tokens and heads
    print(".view(2, 6, 2, 2) ", tuple(queries.shape), "(B, T, H, D): H vectors for each token")
    queries = queries.transpose(1, 2)
    print(".transpose(1, 2)  ", tuple(queries.shape), "(B, H, T, D): a matrix for each head")
    show_equal("the queries of head 1 are equal", queries[:, 1], wrapper.heads[1].W_query(x))

    torch.manual_seed(123)  # a new module, with two heads of width 1 and a random out_proj
    show("MultiHeadAttention(...)(x)[0]", MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)(x)[0])
    return split


@step(13)
def index_notation(x: Tensor, split: MultiHeadAttention) -> None:
    """The same in index notation.

    torch.einsum names each axis by a letter and sums over the letters that the result does not
    have. The matrices of the heads are (h, p, e): h head, p entry of a query, e entry of the input.
    Further letters: b window, t query token, s key token. Nothing has to be transposed.
    """
    linears = split.W_query, split.W_key, split.W_value
    W_query, W_key, W_value = (linear.weight.view(2, 2, 3) for linear in linears)  # (h, p, e)
    queries = torch.einsum("bte,hpe->bhtp", x, W_query)
    keys = torch.einsum("bse,hpe->bhsp", x, W_key)
    values = torch.einsum("bse,hpe->bhsp", x, W_value)
    attn_scores = torch.einsum("bhtp,bhsp->bhts", queries, keys) / math.sqrt(2)
    allowed = causal_mask(6, 6, x.device)
    attn_weights = attn_scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    context_vec = torch.einsum("bhts,bhsp->bthp", attn_weights, values).flatten(2)  # (B, T, H * D)
    show("attn_weights[0], a matrix for each head", attn_weights[0], WORDS)
    show_equal("context_vec is equal to split(x)", context_vec, split(x))


@step(14)
def in_a_block(x: Tensor) -> None:
    """Attention in a block: post-norm and pre-norm.

    A block adds the output of attention to its input. A norm gives each vector mean 0 and variance
    1. Post-norm, in the transformer of 2017, normalises the sum. Pre-norm, in GPT-2, normalises
    only the input of attention: the sum x itself passes through all blocks, which makes models with
    many blocks easier to train. The second half of a block does the same with an MLP.
    """
    torch.manual_seed(123)
    block = Block(ModelConfig(context_length=6, emb_dim=3, num_heads=1, dropout=0.0))
    norm, attention = block.attn_norm, block.attn
    post_norm = norm(x + attention(x))
    pre_norm = x + attention(norm(x))
    show("post_norm[0]", post_norm[0])
    show("pre_norm[0]", pre_norm[0])
    output = pre_norm + block.mlp(block.mlp_norm(pre_norm))
    show_equal("output is equal to that of model.Block", output, block(x))
