"""Steps 4 to 9 of the ladder: attention formula by formula, for the first window."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import causal_mask
from scripts.ladder.printing import WORDS, show, step


@step(4)
def dot_products(x: Tensor) -> None:
    """The idea of attention, without parameters.

    Attention computes a new vector for each token, its context vector, with information from other
    tokens. The token whose context vector is computed is the query token. The tokens to which it
    attends, which means from which it takes information, are its key tokens. The score of two
    tokens is the dot product of their vectors: it is large if both are long and have a similar
    direction. A softmax turns the scores of a query token into weights, which are positive and sum
    to 1. The context vector is the sum of the vectors, each multiplied by its weight.
    """
    query = x[1]  # the query token is "old"
    attn_scores = x @ query  # (S,)
    show("attn_scores of old", attn_scores[None], WORDS, ["old"])
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (S,)
    show("attn_weights of old", attn_weights[None], WORDS, ["old"])
    context_vec = attn_weights @ x  # (d_in,)
    show("context_vec of old", context_vec[None], rows=["old"])

    # All query tokens in one matrix product: row t has the scores of query token t.
    attn_scores = x @ x.T  # (T, S)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (T, S)
    show("attn_scores", attn_scores, WORDS)
    show("context_vec", attn_weights @ x)  # (T, d_in)


@step(5)
def projections(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values.

    Step 4 has nothing to learn, and its scores are symmetric: the score of "old" and "bell" is that
    of "bell" and "old". Three matrices, which training changes, give each token three vectors. Its
    query is multiplied by the keys of the tokens to which it may attend. Its key is multiplied by
    the queries of the tokens that may attend to it. Its value is what these tokens take from it.
    """
    torch.manual_seed(789)
    W_query = nn.Linear(3, 2, bias=False)  # d_in = 3, D = 2
    W_key = nn.Linear(3, 2, bias=False)
    W_value = nn.Linear(3, 2, bias=False)
    queries, keys, values = W_query(x), W_key(x), W_value(x)  # (T, D) each
    show("queries", queries)
    show("keys", keys)
    show("values", values)
    return queries, keys, values


@step(6)
def scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Scores, scaled.

    A score is the dot product of the query of one token and the key of another, so it is a sum of D
    products. If the entries of queries and keys have variance 1, scores have variance D. Divided by
    sqrt(D) they have variance 1 at any width. Larger scores would give weights close to 0 and 1,
    where the gradient of the softmax is close to 0.
    """
    attn_scores = queries @ keys.T  # (T, S)
    show("attn_scores", attn_scores, WORDS)
    attn_scores = attn_scores / math.sqrt(queries.shape[-1])
    show("attn_scores / sqrt(D)", attn_scores, WORDS)
    return attn_scores


@step(7)
def causal(attn_scores: Tensor) -> Tensor:
    """The causal mask.

    The model predicts the next token, so a token must not attend to the tokens after it. Their
    scores become minus infinity before the softmax: exp(-inf) is 0, and each row of weights still
    sums to 1. If weights were set to 0 after the softmax, rows would sum to less than 1.
    """
    allowed = causal_mask(6, 6, attn_scores.device)  # (T, S), True on the diagonal and below
    masked_scores = attn_scores.masked_fill(~allowed, float("-inf"))
    show("masked_scores", masked_scores, WORDS)
    return masked_scores


@step(8)
def softmax(attn_scores: Tensor, masked_scores: Tensor) -> Tensor:
    """The softmax: from scores to weights.

    The softmax is taken over the keys, dim=-1: each query token distributes a weight of 1 over
    itself and the tokens before it. The first token can only attend to itself. The heatmaps that
    this repository draws are pictures of this matrix.
    """
    show("attn_weights without the mask", attn_scores.softmax(dim=-1), WORDS)
    attn_weights = masked_scores.softmax(dim=-1)  # (T, S)
    show("attn_weights", attn_weights, WORDS)
    show("sum of each row", attn_weights.sum(dim=-1, keepdim=True))
    return attn_weights


@step(9)
def weighted_sum(attn_weights: Tensor, values: Tensor) -> Tensor:
    """Context vectors, and dropout.

    The context vector of a query token is the sum of the values, each multiplied by its weight. In
    training, dropout first sets random weights to 0, so that the model does not depend on single
    tokens. The other weights are divided by 1 - p, so the expected sum of a row is still 1.
    """
    context_vec = attn_weights @ values  # (T, D)
    show("context_vec", context_vec)
    torch.manual_seed(123)
    show("attn_weights after dropout with p = 0.5", F.dropout(attn_weights, p=0.5), WORDS)
    return context_vec
