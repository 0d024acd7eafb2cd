"""What a head does, as numbers: one for each head and kind of behaviour.

Each function takes A, the attention weights of some heads on one prompt, fp32 (H, T, T) with rows
being queries, and gives (H,): the mean over queries of a property of the row. Query 0 sees itself
alone, whatever the head has learned, so it is left out wherever its share would be fixed.

Two statistics need the repeated sequence [BOS] + R + R, R being P random tokens: only there is it
known which earlier place a copying head should look at. They take P as `period`.

"Uniform" is the value of a head that spreads its weight evenly, A[q, k] = 1 / (q + 1): what a model
shows before it has learned anything.

Shapes: H heads, T tokens; q query and k key positions from 0; h(T) = 1 + 1/2 + ... + 1/T.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def entropy(attn_weights: Tensor) -> Tensor:
    """How widely a head looks: 0 on one token, 1 on all alike. (H, T, T) -> (H,).

    mean over q >= 1 of  -sum_k A[q, k] ln A[q, k] / ln(q + 1).    Uniform: 1.
    The entropy of attention rows as in Clark et al. 2019 (What Does BERT Look At?), section 3.3,
    here divided by its largest possible value so that rows of any length compare.
    """
    nats = -torch.special.xlogy(attn_weights, attn_weights).sum(-1)  # (H, T); 0 ln 0 = 0
    longest = torch.arange(1, nats.shape[-1] + 1, device=nats.device).log()
    return (nats[:, 1:] / longest[1:]).mean(-1)


def distance(attn_weights: Tensor) -> Tensor:
    """How far back a head looks, in tokens. (H, T, T) -> (H,).

    mean over q of  sum_k A[q, k] (q - k).    Uniform: (T - 1) / 4.
    Mean attention distance (Vig and Belinkov 2019), each query counting alike.
    """
    places = torch.arange(attn_weights.shape[-1], device=attn_weights.device)
    back = (places[:, None] - places).float()  # (T, T): q - k
    return (attn_weights * back).sum(-1).mean(-1)


def first_token(attn_weights: Tensor) -> Tensor:
    """How much a head rests on the first token, the attention sink. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, 0].    Uniform: (h(T) - 1) / (T - 1).
    (Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.)
    """
    return attn_weights[:, 1:, 0].mean(-1)


def diagonal(attn_weights: Tensor) -> Tensor:
    """How much each token looks at itself. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, q].    Uniform: (h(T) - 1) / (T - 1).
    (Attention to relative positions: Clark et al. 2019, section 3.1.)
    """
    return attn_weights.diagonal(dim1=-2, dim2=-1)[:, 1:].mean(-1)


def previous_token(attn_weights: Tensor) -> Tensor:
    """How much each token looks at the one before it. (H, T, T) -> (H,).

    mean over q >= 1 of  A[q, q - 1].    Uniform: (h(T) - 1) / (T - 1).
    (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.)
    """
    return attn_weights.diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)


def induction(attn_weights: Tensor, period: int) -> Tensor:
    """In the second copy: how much a token looks at what *followed* it in the first. -> (H,).

    mean over q = P + 1 .. 2 P of  A[q, q - P + 1].    Uniform: (h(2 P + 1) - h(P + 1)) / P.
    The head that completes "... A B ... A" with B (Olsson et al. 2022, In-context Learning and
    Induction Heads: "prefix matching").
    """
    return _second_copy(attn_weights, period, back=period - 1)


def duplicate_token(attn_weights: Tensor, period: int) -> Tensor:
    """In the second copy: how much a token looks at *itself* in the first. -> (H,).

    mean over q = P + 1 .. 2 P of  A[q, q - P].    Uniform: (h(2 P + 1) - h(P + 1)) / P.
    (Wang et al. 2022, Interpretability in the Wild: duplicate token heads.)
    """
    return _second_copy(attn_weights, period, back=period)


def _second_copy(attn_weights: Tensor, period: int, back: int) -> Tensor:
    """mean over q = P + 1 .. 2 P of A[q, q - back]."""
    looked_back = attn_weights.diagonal(offset=-back, dim1=-2, dim2=-1)  # (H, T - back)
    first = period + 1 - back  # entry q - back of the diagonal belongs to query q
    return looked_back[:, first : first + period].mean(-1)


def largest_logit(attn_scores: Tensor) -> Tensor:
    """The largest score before the softmax. attn_scores (H, T, T), -inf where masked -> (H,).

    max over q and k <= q of  Q[q] . K[k] / sqrt(D).    Uniform: any value, when all are equal.
    Where it grows without bound, rows become one-hot and training unstable (Dehghani et al. 2023,
    Scaling Vision Transformers to 22 Billion Parameters; Wortsman et al. 2023).
    """
    return attn_scores.amax((-2, -1))


@dataclass(frozen=True)
class Statistic:
    """A statistic as people see it. `of`: its function above; `needs`: what that is given."""

    title: str
    about: str  # one sentence, shown on the page
    of: Callable[..., Tensor]
    needs: str = "weights"  # weights | repeated (the repeated sequence) | scores


STATISTICS = {
    "entropy": Statistic("entropy", "How widely it looks: 0 one token, 1 all alike.", entropy),
    "distance": Statistic("distance", "How many tokens back it looks on average.", distance),
    "first_token": Statistic(
        "first token", "Share of weight on the first token, where idle heads rest.", first_token
    ),
    "diagonal": Statistic("diagonal", "Share of weight of each token on itself.", diagonal),
    "previous_token": Statistic(
        "previous token", "Share of weight on the token just before.", previous_token
    ),
    "induction": Statistic(
        "induction",
        "In a repeated random sequence: weight on the token that followed this one last time.",
        induction,
        "repeated",
    ),
    "duplicate_token": Statistic(
        "duplicate token",
        "In a repeated random sequence: weight on the same token last time.",
        duplicate_token,
        "repeated",
    ),
    "largest_logit": Statistic(
        "largest logit", "The largest score before the softmax.", largest_logit, "scores"
    ),
}


def measure(attn_weights: Tensor, attn_scores: Tensor | None, period: int) -> Tensor:
    """All statistics of some heads on one prompt: (number of STATISTICS, H), nan where undefined.

    attn_weights (H, T, T) fp32; attn_scores the same before the softmax, or None; period P when
    the prompt is [BOS] + R + R, else 0. Nothing here waits for the device.
    """
    given = {
        "weights": (attn_weights,),
        "repeated": (attn_weights, period) if period else None,
        "scores": (attn_scores,) if attn_scores is not None else None,
    }
    nothing = attn_weights.new_full(attn_weights.shape[:1], math.nan)
    rows = []
    for statistic in STATISTICS.values():
        arguments = given[statistic.needs]
        rows.append(nothing if arguments is None else statistic.of(*arguments))
    return torch.stack(rows)


def evenly(num_tokens: int) -> Tensor:
    """The weights of a head that has learned nothing, (1, T, T): 1 / (q + 1) on each key."""
    ones = torch.ones(num_tokens, num_tokens).tril()
    return (ones / ones.sum(-1, keepdim=True))[None]
