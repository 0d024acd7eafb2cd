"""Attention statistics: each reduces the attention of a head to one number.

    found = HeadStatistics(token_ids, tokens)
    found.sums(weights, scores)  # of all statistics, for each text and head of a layer
    found.expected()  # of uniform attention, for each text and layer

A statistic is a function of an `Attention`: attention weights, scores, token ids and the text of
each token. A[q, k] is the attention weight of key token k for query token q. Most statistics are
the mean weight on target tokens:

    mean over q with a visible target of  sum over targets k of A[q, k]

For "previous token" the target of query token q is token q - 1, for "induction" its targets are the
tokens that followed earlier occurrences of token q. The function of such a statistic returns the
targets of all query tokens, bool (B, T, T) or (T, T); the others return a value for each head.

n(q) is the number of keys that query token q can see: q + 1, or less in a layer with a sliding
window or with chunks, whose mask hides other keys. "Uniform" is the value for uniform attention,
A[q, k] = 1 / n(q) on the keys that q can see, as in an untrained model: the fraction of the weight
that chance gives. Values given for it are without such a mask. s(q) is the sum of the row of q: 1,
or less in a model with a learned sink, which gets the rest.

Shapes: B texts, H heads, L layers, T tokens, K = len(TARGETS), M = len(MEASURED); q query and k key
positions from 0; h(T) = 1 + 1/2 + ... + 1/T.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .prompts import is_separator

OFFSETS = range(2, 9)  # tokens back; 1 is `previous_token`
ROWS = 32  # of attention, whose entropy is computed at once
ROUNDING = 2**-8  # the sum of a row of bf16 weights differs by less from 1
# The value of a statistic for uniform attention, None if it is undefined; a list of the values of
# the layers if they differ, because the masks of the layers differ.
Chance = float | list[float | None] | None


@dataclass
class Attention:
    """Attention of the heads of a layer on B texts of the same length: all that a statistic needs.

    weights: (B, H, T, T), fp32. scores: the same before the softmax, -inf where masked, or None if
    they are unknown. visible: whether a query can see a key, bool (B, T, T). token_ids: (B, T).
    tokens: the text of each token, B lists of T; bytes of incomplete UTF-8 as <0xE2>
    (prompts.bytes_of).
    """

    weights: Tensor
    scores: Tensor | None
    visible: Tensor
    token_ids: Tensor
    tokens: Sequence[Sequence[str]]

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The sum of each row, and the sum of A[q, k] k, (B, H, T) each."""
        positions = torch.arange(self.weights.shape[-1], device=self.weights.device).float()
        found = self.weights @ torch.stack([torch.ones_like(positions), positions], dim=-1)
        return found[..., 0], found[..., 1]

    def back(self) -> Tensor:
        """Returns the distance from query to key in tokens, q - k, (T, T)."""
        positions = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return positions[:, None] - positions

    def of_tokens(self, function: Callable[[str], Any]) -> Tensor:
        """Returns what a function returns for the text of each token, (B, T)."""
        known = {token: function(token) for tokens in self.tokens for token in tokens}
        values = [[known[token] for token in tokens] for tokens in self.tokens]
        return torch.tensor(values, device=self.token_ids.device)


# ------------------------------------------------------------------- targets of query tokens


def first_token(attention: Attention) -> Tensor:
    """The first token, for all q >= 1: an attention sink. Uniform: (h(T) - 1) / (T - 1).

    (Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.)
    """
    back = attention.back()
    keys = torch.arange(len(back), device=back.device)
    return (keys == 0) & (back > 0)


def diagonal(attention: Attention) -> Tensor:
    """The query token itself, for all q >= 1. Uniform: (h(T) - 1) / (T - 1).

    (Attention to relative positions: Clark et al. 2019, section 3.1.)
    """
    back = attention.back()
    keys = torch.arange(len(back), device=back.device)
    return (back == 0) & (keys > 0)


def previous_token(attention: Attention) -> Tensor:
    """The token before. Uniform: (h(T) - 1) / (T - 1).

    (Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.)
    """
    return attention.back() == 1


def duplicate_token(attention: Attention) -> Tensor:
    """Earlier occurrences of the query token.

    (Wang et al. 2022, Interpretability in the Wild: duplicate token heads.)
    """
    ids = attention.token_ids
    same = ids[:, :, None] == ids[:, None]  # (B, T, T)
    return same & (attention.back() > 0)


def induction(attention: Attention) -> Tensor:
    """The tokens that followed earlier occurrences of the query token, without the query token.

    An induction head completes "... A B ... A" with B (Olsson et al. 2022, In-context Learning and
    Induction Heads: "prefix matching").
    """
    followed = duplicate_token(attention).roll(1, dims=-1)  # token k - 1 is the query token
    return followed & (attention.back() > 0)


def separator(attention: Attention) -> Tensor:
    """Earlier separators. Position 0 does not count, because it is often an attention sink.

    (Clark et al. 2019, section 3.2: heads that attend to [SEP] and to periods and commas.)
    """
    return _earlier(attention, attention.of_tokens(is_separator))


def segment_start(attention: Attention) -> Tensor:
    """Earlier tokens that follow a separator and are none: in letters, the starts of words."""
    separators = attention.of_tokens(is_separator)
    return _earlier(attention, separators.roll(1, dims=-1) & ~separators)


def _earlier(attention: Attention, targets: Tensor) -> Tensor:
    """Returns the targets (B, T), bool, that are before q and not at position 0."""
    before = attention.back() > 0
    before[:, 0] = False
    return targets[:, None] & before


def _offset(number: int) -> Callable[[Attention], Tensor]:
    return lambda attention: attention.back() == number


# ------------------------------------------------------------------------- values of heads


def entropy(attention: Attention) -> Tensor:
    """Returns the normalised entropy (0: all weight on one key token; 1: uniform).

    mean over q with n(q) >= 2 of  -sum_k p[k] ln p[k] / ln n(q),  p = A[q] / s(q).    Uniform: 1.
    Entropy of attention rows: Clark et al. 2019 (What Does BERT Look At?), section 3.3. Here
    it is divided by its maximum, so that rows of different lengths are comparable. Rows with the
    sum 0 do not count.
    """
    weights, (sums, _), keys = attention.weights, attention.rows, attention.visible.sum(-1)[:, None]
    # -p ln p, 0 for p = 0: (B, H, T). Without most of the later keys, whose weights are 0.
    ends = range(ROWS, weights.shape[-1] + ROWS, ROWS)
    parts = [torch.special.xlogy(w := weights[..., n - ROWS : n, :n], w).sum(-1) for n in ends]
    nats = -torch.cat(parts, dim=-1)
    if nats.shape[-1] == 1:
        return torch.full_like(nats[..., 0], torch.nan)  # of one token
    nats = nats / sums + sums.log()  # of the row divided by its sum
    return _mean(nats / keys.log(), (keys > 1) & (sums != 0))


def distance(attention: Attention) -> Tensor:
    """Returns the mean distance from query token to key token, in tokens.

    mean over q of  sum_k A[q, k] (q - k) / s(q).    Uniform: (T - 1) / 4.
    Mean attention distance (Vig and Belinkov 2019), averaged over queries. Rows with the sum 0 do
    not count.
    """
    sums, positions = attention.rows  # sum_k A[q, k] (q - k) = q s(q) - sum_k A[q, k] k
    queries = torch.arange(sums.shape[-1], device=sums.device)
    return _mean(queries - positions / sums, sums != 0)


def learned_sink(attention: Attention) -> Tensor:
    """Returns the mean weight that the keys do not get: mean over q of  1 - s(q).    Uniform: 0.

    A learned sink is a parameter of a head, which is one more score in the softmax of each row
    (gpt-oss-120b & gpt-oss-20b Model Card 2025; "softmax off by one", Miller 2023). An attention
    sink is a token, see `first_token`.
    """
    sums, _ = attention.rows
    return (1 - sums).mean(-1)


def _mean(values: Tensor, is_counted: Tensor) -> Tensor:
    """Returns the mean over the queries that count, 0 without one. (B, H, T) each -> (B, H)."""
    return values.where(is_counted, 0).sum(-1) / is_counted.sum(-1).clamp(min=1)


def largest_logit(attention: Attention) -> Tensor | None:
    """Returns the largest attention score, None if the scores are unknown.

    max over q and k <= q of  Q[q] . K[k] / sqrt(D).    Uniform: any value, if all are equal.
    If it keeps growing, rows become one-hot and training becomes unstable (Dehghani et al. 2023,
    Scaling Vision Transformers to 22 Billion Parameters; Wortsman et al. 2023).
    """
    return None if attention.scores is None else attention.scores.amax((-2, -1))


def positional(triangles: Sequence[np.ndarray], chances: Sequence[np.ndarray]) -> np.ndarray:
    """Returns how much of the attention depends on positions only. -> (L, H).

    D(a, b) = mean over q >= 1 of  sum_k |a[q, k] - b[q, k]| / 2   (total variation distance)
    mean over pairs of texts with the maps a and b of  (D(a, uniform) + D(b, uniform)) / 2 - D(a, b)
    Almost 1: each query token attends to one position, which is the same in all texts. Uniform: 0.
    Negative: the positions differ between texts. Uniform attention has the row sums of the head.

    triangles: the weights on each text, (L, H, T (T + 1) / 2): the first T tokens, row by row.
    chances: of `chances_of` on each text, (L, T (T + 1) / 2).
    """
    num_tokens = int((2 * triangles[0].shape[-1]) ** 0.5)
    scale = 2 * max(1, num_tokens - 1)  # query 0 contributes nothing
    even = [c[:, None] * row_sums(a) for a, c in zip(triangles, chances, strict=True)]
    pairs = zip(triangles, even, strict=True)
    to_uniform = np.mean([np.abs(a - b).sum(-1) for a, b in pairs], axis=0)
    apart = np.mean([np.abs(a - b).sum(-1) for a, b in combinations(triangles, 2)], axis=0)
    return (to_uniform - apart) / scale


def row_sums(triangles: np.ndarray) -> np.ndarray:
    """Returns for each cell of lower triangles, (..., T (T + 1) / 2), the sum of its row."""
    num_tokens = int((2 * triangles.shape[-1]) ** 0.5)
    lengths = np.arange(1, num_tokens + 1)
    starts = lengths * (lengths - 1) // 2
    return np.add.reduceat(triangles, starts, axis=-1).repeat(lengths, axis=-1)


def chances_of(visible: np.ndarray) -> np.ndarray:
    """Returns uniform attention on the keys that each query can see, as lower triangles, fp32.
    visible: bool (..., T (T + 1) / 2)."""
    return visible / np.maximum(row_sums(visible.astype(np.float32)), 1)


@dataclass(frozen=True)
class Statistic:
    """A statistic: its title, description and function."""

    title: str
    description: str  # one sentence, shown on the page
    function: Callable[..., Any]
    # What the function returns: targets, or the value of each head, (B, H), None if it is unknown.
    # `positional`, of "prompts", compares prompts, so it is not a function of an Attention.
    of: str = "targets"
    # Prompts on which it is defined: all, the repeated sequence, or texts: between random tokens, a
    # separator separates nothing. On whole text, each is defined.
    on: str = "all"


STATISTICS = {
    "entropy": Statistic(
        "entropy",
        "0: all weight on one key; 1: uniform attention on the keys that the query can see.",
        entropy,
        "value",
    ),
    "distance": Statistic(
        "distance", "Mean distance from query to key, in tokens.", distance, "value"
    ),
    "first_token": Statistic(
        "first token", "Mean weight on the first token (an attention sink).", first_token
    ),
    "diagonal": Statistic(
        "self", "Mean weight of a query token on itself (the diagonal).", diagonal
    ),
    "previous_token": Statistic(
        "previous token", "Mean weight of a query token on the previous token.", previous_token
    ),
    "offset": Statistic(
        "offset",
        "Mean weight of a query token on the token 2 to 8 before it: of these, the number with the"
        " largest weight.",
        _offset,
    ),
    "induction": Statistic(
        "induction",
        "Mean weight of a token that occurred before on the tokens that followed it there.",
        induction,
        on="repeated",
    ),
    "duplicate_token": Statistic(
        "duplicate token",
        "Mean weight of a token that occurred before on its earlier occurrences.",
        duplicate_token,
        on="repeated",
    ),
    "separator": Statistic(
        "separator",
        "Mean weight on earlier separators: punctuation and white space.",
        separator,
        on="texts",
    ),
    "segment_start": Statistic(
        "segment start",
        "Mean weight on earlier tokens that follow a separator: in letters, the starts of words.",
        segment_start,
        on="texts",
    ),
    "positional": Statistic(
        "positional",
        "How much of the attention depends on positions only: 1 if it is the same in all prompts.",
        positional,
        "prompts",
    ),
    "learned_sink": Statistic(
        "learned sink",
        "Mean weight on no token, but on a learned parameter of the head, as in GPT-OSS.",
        learned_sink,
        "value",
    ),
    "largest_logit": Statistic(
        "largest logit", "Largest attention score before the softmax.", largest_logit, "value"
    ),
}
# What `sums` computes, in this order. The offsets are separate until the best one is known.
TARGETS: dict[str, Callable[[Attention], Tensor]] = {
    key: statistic.function
    for key, statistic in STATISTICS.items()
    if statistic.of == "targets" and key != "offset"
}
TARGETS |= {f"offset_{number}": _offset(number) for number in OFFSETS}
VALUES = [key for key, statistic in STATISTICS.items() if statistic.of == "value"]
MEASURED = (*TARGETS, *VALUES)


class HeadStatistics:
    """Measures heads on B texts of the same length, layer by layer.

    token_ids: (B, T). tokens: the text of each token, B lists of T. masks: of each measured layer,
    whether a query can see a key, bool (B, T, T).
    """

    def __init__(self, token_ids: Tensor, tokens: Sequence[Sequence[str]]):
        self.token_ids, self.tokens = token_ids, tokens
        self.masks: list[Tensor] = []

    @functools.cached_property
    def targets(self) -> Tensor:
        """1 at the targets of each query token, else 0, fp32 (B, K, T, T)."""
        size = self.token_ids.shape[1]
        shape = len(self.token_ids), size, size
        nothing = torch.zeros((), device=self.token_ids.device)
        given = Attention(nothing, None, nothing, self.token_ids, self.tokens)
        found = [targets(given).expand(shape) for targets in TARGETS.values()]
        return torch.stack(found, dim=1).float()

    def sums(self, weights: Tensor, scores: Tensor | None) -> Tensor:
        """Returns for targets the sum over queries of the weight on them, for the others the value
        of the text; NaN if it is undefined. -> (B, M, H).

        weights, scores: of a layer, as in Attention. The mask is that of the scores; without them,
        all earlier keys are visible. Does not synchronise with the device.
        """
        if self.token_ids.device != weights.device:
            self.token_ids = self.token_ids.to(weights.device)
        if scores is None:
            visible = weights.new_ones(weights.shape[-2:], dtype=torch.bool).tril()
            visible = visible.expand(len(weights), -1, -1)
        else:
            visible = ~scores[:, 0].isneginf()  # also where the scores of a diverged model are NaN
        self.masks.append(visible)
        return self._sums(weights, scores, visible)

    def _sums(self, weights: Tensor, scores: Tensor | None, visible: Tensor) -> Tensor:
        on_targets = self.targets.flatten(2) @ weights.flatten(2).mT  # (B, K, H)
        unknown = torch.full_like(on_targets[:, 0], torch.nan)
        attention = Attention(weights, scores, visible, self.token_ids, self.tokens)
        found = [STATISTICS[key].function(attention) for key in VALUES]
        values = torch.stack([unknown if of is None else of for of in found], dim=1)
        return torch.cat([on_targets, values], dim=1)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each measured layer of how many values each sum consists, which are the
        queries with a visible target, or 1; and the sums of uniform attention. (B, M, L) each."""
        known: dict[bytes, tuple[Tensor, Tensor]] = {}  # of each mask: most layers have the same
        of_layers = []
        for mask in torch.stack(self.masks).cpu().tril():  # NaN hides no later keys
            if (key := mask.numpy().tobytes()) not in known:
                known[key] = self._expected(mask.to(self.token_ids.device))
            of_layers.append(known[key])
        counts, uniform = zip(*of_layers, strict=True)
        return torch.stack(counts, -1).cpu().numpy(), torch.stack(uniform, -1).cpu().numpy()

    def _expected(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(mask.device.type, enabled=False):  # of a run in bf16
            weights = (mask / mask.sum(-1, keepdim=True))[:, None]
            with_target = (self.targets * mask[:, None]).amax(-1).sum(-1)  # (B, K)
            ones = with_target.new_ones(len(with_target), len(VALUES))
            counts = torch.cat([with_target, ones], dim=1)
            return counts, self._sums(weights, None, mask)[..., 0]


def ratio_of_sums(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of each statistic over the queries of all texts, and its standard error,
    (M, ...) each. NaN without a query; the error is NaN for one text.

    sums: (B, M, ...). counts: (B, M), (B, M, L) ... as the first dimensions of `sums`. The error is
    that of a ratio of sums, because texts have different numbers of queries with a target.
    """
    counts = counts.reshape(*counts.shape, *[1] * (sums.ndim - counts.ndim)).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(0, dtype=np.float64) / counts.sum(0)
        rest = sums - counts * mean
        texts = len(sums)
        error = np.sqrt((rest**2).sum(0) * texts / (texts - 1)) / counts.sum(0)
    return mean, error


def uniform_values(sums: np.ndarray, counts: np.ndarray) -> dict[str, Chance]:
    """Returns each statistic for uniform attention. sums, counts: of `expected`, (B, M, L)."""
    means, _ = ratio_of_sums(sums[..., None], counts)
    # Two tokens back has the largest weight of all offsets.
    found = by_statistic(means, best_offsets(means))
    return {key: chance_of(of_layers[:, 0]) for key, of_layers in found.items()}


def chance_of(of_layers: np.ndarray) -> Chance:
    """Returns the value of each layer as a Chance. of_layers: (L,), NaN if it is undefined."""
    known = [None if np.isnan(value) else round(float(value), 6) for value in of_layers]
    return known if len({*known}) > 1 else known[0]


def by_layer(chance: Chance) -> np.ndarray:
    """Returns the value for uniform attention of each layer, (L, 1), or (1, 1) if all layers have
    the same; NaN if it is undefined."""
    return np.array(chance, np.float64).reshape(-1, 1)


def best_offsets(means: np.ndarray) -> np.ndarray:
    """Returns the number of tokens back, in OFFSETS, on which each head has the largest weight.
    (M, L, H) -> (L, H)."""
    first = MEASURED.index(f"offset_{OFFSETS[0]}")
    of_offsets = np.nan_to_num(means[first : first + len(OFFSETS)], nan=-1.0)  # in short texts
    return OFFSETS[0] + of_offsets.argmax(0)


def by_statistic(values: np.ndarray, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """Returns {statistic: (L, H)} from (M, L, H). offsets: of `best_offsets`. The value
    of "positional" is NaN."""
    first = MEASURED.index(f"offset_{OFFSETS[0]}") - OFFSETS[0]
    found = dict(zip(MEASURED, values.astype(np.float32), strict=True))
    found["offset"] = np.take_along_axis(values, first + offsets[None], axis=0)[0]
    found["positional"] = np.full_like(found["entropy"], np.nan)
    if not (found["learned_sink"] > ROUNDING).any():
        found["learned_sink"] = np.full_like(found["entropy"], np.nan)  # the model has none
    return {key: found[key].astype(np.float32) for key in STATISTICS}
