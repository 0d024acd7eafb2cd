"""Attention statistics: each function reduces the attention weights of a head to one number.

The argument A has the attention weights of some heads on one prompt, fp32 (H, T, T), rows are
queries. The result (H,) is a mean over queries; that of `largest_logit` is a maximum. Query 0
attends only to itself, so most statistics exclude it. Two statistics are defined only on the
repeated sequence [BOS] + R + R, where R has P random tokens; P is their argument `period`. Three
are defined only on texts: `separator`, `segment_start`, and `positional`, which compares the maps
of different texts.

"Uniform" is the value for uniform attention, A[q, k] = 1 / (q + 1), as in an untrained model.

Shapes: H heads, T tokens; q query and k key positions from 0; h(T) = 1 + 1/2 + ... + 1/T.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor


def entropy(attn_weights: Tensor) -> Tensor:
    """Returns the normalised entropy (0: all weight on one key token; 1: uniform). -> (H,).

    mean over q >= 1 of  -sum_k A[q, k] ln A[q, k] / ln(q + 1).    Uniform: 1.
    Entropy of attention rows: Clark et al. 2019 (What Does BERT Look At?), section 3.3. Here
    it is divided by its maximum, so that rows of different lengths are comparable.
    """
    nats = -torch.special.xlogy(attn_weights, attn_weights).sum(-1)  # (H, T); 0 ln 0 = 0
    longest = torch.arange(1, nats.shape[-1] + 1, device=nats.device).log()
    return (nats[:, 1:] / longest[1:]).mean(-1)


def distance(attn_weights: Tensor) -> Tensor:
    """Returns the mean distance from query token to key token, in tokens. (H, T, T) -> (H,).

    mean over q of  sum_k A[q, k] (q - k).    Uniform: (T - 1) / 4.
    Mean attention distance (Vig and Belinkov 2019), averaged over queries.
    """
    positions = torch.arange(attn_weights.shape[-1], device=attn_weights.device)
    distances = (positions[:, None] - positions).float()  # (T, T): q - k
    return (attn_weights * distances).sum(-1).mean(-1)


def first_token(attn_weights: Tensor) -> Tensor:
    """Returns the mean weight on the first token, the attention sink. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, 0].    Uniform: (h(T) - 1) / (T - 1).
    (Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.)
    """
    return attn_weights[:, 1:, 0].mean(-1)


def diagonal(attn_weights: Tensor) -> Tensor:
    """Returns the mean weight of a query token on itself. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, q].    Uniform: (h(T) - 1) / (T - 1).
    (Attention to relative positions: Clark et al. 2019, section 3.1.)
    """
    return attn_weights.diagonal(dim1=-2, dim2=-1)[:, 1:].mean(-1)


def previous_token(attn_weights: Tensor) -> Tensor:
    """Returns the mean weight of a query token on the previous token. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, q - 1].    Uniform: (h(T) - 1) / (T - 1).
    (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.)
    """
    return attn_weights.diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)


def induction(attn_weights: Tensor, period: int) -> Tensor:
    """Returns the mean weight of a token in copy 2 on the token that follows it in copy 1. -> (H,).

    mean over q = P + 1 .. 2 P of  A[q, q - P + 1].    Uniform: (h(2 P + 1) - h(P + 1)) / P.
    An induction head completes "... A B ... A" with B (Olsson et al. 2022, In-context Learning and
    Induction Heads: "prefix matching").
    """
    return _second_copy(attn_weights, period, back=period - 1)


def duplicate_token(attn_weights: Tensor, period: int) -> Tensor:
    """Returns the mean weight of a token in copy 2 on the same token in copy 1. -> (H,).

    mean over q = P + 1 .. 2 P of  A[q, q - P].    Uniform: (h(2 P + 1) - h(P + 1)) / P.
    (Wang et al. 2022, Interpretability in the Wild: duplicate token heads.)
    """
    return _second_copy(attn_weights, period, back=period)


def _second_copy(attn_weights: Tensor, period: int, back: int) -> Tensor:
    """Returns the mean over q = P + 1 .. 2 P of A[q, q - back]."""
    weights = attn_weights.diagonal(offset=-back, dim1=-2, dim2=-1)  # (H, T - back)
    first = period + 1 - back  # entry q - back of the diagonal belongs to query q
    return weights[:, first : first + period].mean(-1)


def largest_logit(attn_scores: Tensor) -> Tensor:
    """Returns the largest attention score. attn_scores (H, T, T), -inf where masked -> (H,).

    max over q and k <= q of  Q[q] . K[k] / sqrt(D).    Uniform: any value, if all are equal.
    If it keeps growing, rows become one-hot and training becomes unstable (Dehghani et al. 2023,
    Scaling Vision Transformers to 22 Billion Parameters; Wortsman et al. 2023).
    """
    return attn_scores.amax((-2, -1))


def on_earlier(attn_weights: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean weight on earlier tokens of a kind, such as separators. -> (H,).

    mean over q with a target before q of  sum over targets k < q of A[q, k]. Position 0 does
    not count, because it is often an attention sink. targets: bool (T,). NaN without any.
    (Clark et al. 2019, section 3.2: heads that attend to [SEP] and to periods and commas.)
    """
    earlier = (targets & (torch.arange(len(targets)) > 0)).to(attn_weights.device).float()
    on_targets = attn_weights @ earlier - attn_weights.diagonal(dim1=-2, dim2=-1) * earlier
    defined = (earlier.cumsum(0) - earlier > 0).float()  # (T,): 1 with a target before q
    return (on_targets * defined).sum(-1) / defined.sum()  # a mask as index would synchronise


def segment_starts(separators: Tensor) -> Tensor:
    """Returns which tokens follow a separator and are none, bool (T,). separators: bool (T,)."""
    after = torch.cat([separators.new_zeros(1), separators[:-1]])
    return after & ~separators


def positional(triangles: Sequence[np.ndarray]) -> np.ndarray:
    """Returns how much of the attention depends on positions only. -> (L, H).

    D(a, b) = mean over q >= 1 of  sum_k |a[q, k] - b[q, k]| / 2   (total variation distance)
    mean over pairs of texts with the maps a and b of  (D(a, uniform) + D(b, uniform)) / 2 - D(a, b)
    Almost 1: each query token attends to one position, which is the same in all texts. Uniform: 0.
    Negative: the positions differ between texts.

    triangles: the weights on each text, (L, H, T (T + 1) / 2): the first T tokens, row by row.
    """
    num_tokens = int((2 * triangles[0].shape[-1]) ** 0.5)
    rows, _ = np.tril_indices(num_tokens)
    scale = 2 * max(1, num_tokens - 1)  # query 0 contributes nothing
    to_uniform = np.mean([np.abs(a - 1 / (rows + 1)).sum(-1) for a in triangles], axis=0)
    apart = np.mean([np.abs(a - b).sum(-1) for a, b in combinations(triangles, 2)], axis=0)
    return (to_uniform - apart) / scale


@dataclass(frozen=True)
class Statistic:
    """A statistic: its title, description and function, and the arguments that it needs."""

    title: str
    description: str  # one sentence, shown on the page
    function: Callable[..., Any]  # returns a tensor (H,); `positional` an array
    # weights | repeated (the repeated sequence) | scores | separators | segment_starts |
    # texts (at least two)
    needs: str = "weights"


STATISTICS = {
    "entropy": Statistic("entropy", "0: all weight on one key; 1: uniform attention.", entropy),
    "distance": Statistic("distance", "Mean distance from query to key, in tokens.", distance),
    "first_token": Statistic(
        "first token", "Mean weight on the first token (attention sink).", first_token
    ),
    "diagonal": Statistic(
        "self", "Mean weight of a query token on itself (the diagonal).", diagonal
    ),
    "previous_token": Statistic(
        "previous token", "Mean weight of a query token on the previous token.", previous_token
    ),
    "induction": Statistic(
        "induction",
        "On the repeated sequence: mean weight of a token of the second copy on the token that"
        " follows it in the first copy.",
        induction,
        "repeated",
    ),
    "duplicate_token": Statistic(
        "duplicate token",
        "On the repeated sequence: mean weight of a token of the second copy on the same token in"
        " the first copy.",
        duplicate_token,
        "repeated",
    ),
    "separator": Statistic(
        "separator",
        "Mean weight on earlier separators: punctuation and white space.",
        on_earlier,
        "separators",
    ),
    "segment_start": Statistic(
        "segment start",
        "Mean weight on earlier tokens that follow a separator: in letters, the starts of words.",
        on_earlier,
        "segment_starts",
    ),
    "positional": Statistic(
        "positional",
        "How much of the attention depends on positions only: 1 if it is the same in all texts.",
        positional,
        "texts",
    ),
    "largest_logit": Statistic(
        "largest logit", "Largest attention score before the softmax.", largest_logit, "scores"
    ),
}


def measure(
    attn_weights: Tensor, attn_scores: Tensor | None, period: int, separators: Tensor
) -> Tensor:
    """Returns all statistics of some heads on one prompt, (len(STATISTICS), H). Undefined: NaN.

    attn_weights: (H, T, T) fp32. attn_scores: (H, T, T) before the softmax, or None. period: P if
    the prompt is [BOS] + R + R, else 0. separators: bool (T,), on the CPU: which tokens are
    punctuation or white space. Does not synchronise with the device.
    """
    given = {
        "weights": (attn_weights,),
        "repeated": (attn_weights, period) if period else None,
        "scores": (attn_scores,) if attn_scores is not None else None,
        # Between random tokens, a separator separates nothing.
        "separators": None if period else (attn_weights, separators),
        "segment_starts": None if period else (attn_weights, segment_starts(separators)),
        "texts": None,  # see probe.py
    }
    undefined = attn_weights.new_full(attn_weights.shape[:1], math.nan)
    rows = []
    for statistic in STATISTICS.values():
        arguments = given[statistic.needs]
        rows.append(undefined if arguments is None else statistic.function(*arguments))
    return torch.stack(rows)


def uniform_attention(num_tokens: int) -> Tensor:
    """Returns uniform attention, (1, T, T): weight 1 / (q + 1) on each key token."""
    ones = torch.ones(num_tokens, num_tokens).tril()
    return (ones / ones.sum(-1, keepdim=True))[None]
