"""Head statistics: closed forms for pure patterns, plain loops for random weights."""

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from helpers.tally import trials
from hypothesis import given
from hypothesis import strategies as st

from clearhead.lens.statistics import STATISTICS, measure, positional, uniform_attention

T, P = 21, 10  # tokens of [BOS] + R + R, and of R


def attending(at):
    """Returns one head, (1, T, T), whose query q attends only to key at(q)."""
    return torch.eye(T)[[at(q) for q in range(T)]][None]


def back(n):
    """Returns a head that attends n tokens back; the first n tokens attend to themselves."""
    return attending(lambda q: q - n if q >= n else q)


def random_weights(num_heads, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(num_heads, num_tokens, num_tokens, generator=generator)
    scores -= 20  # so that the maximum is negative: below a mask of zeros
    future = torch.ones(num_tokens, num_tokens).triu(1).bool()
    scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1), scores


def measured(weights, period=0, scores=None, separators=()):
    mask = torch.zeros(weights.shape[-1], dtype=torch.bool)
    mask[list(separators)] = True
    return dict(zip(STATISTICS, measure(weights, scores, period, mask), strict=True))


def harmonic(n):
    return sum(1 / i for i in range(1, n + 1))


# The statistics for which PATTERNS has closed forms.
NAMES = ["entropy", "distance", "first_token", "diagonal", "previous_token"]
NAMES += ["induction", "duplicate_token"]
ONE_CELL = (harmonic(T) - 1) / (T - 1)  # for uniform attention: the mean of 1/2 to 1/T
# A query of the second R, q = P + 1 .. 2 P, gives each token the weight 1 / (q + 1): their mean.
ONE_STRIPE = (harmonic(2 * P + 1) - harmonic(P + 1)) / P
UNIFORM = (1, (T - 1) / 4, ONE_CELL, ONE_CELL, ONE_CELL, ONE_STRIPE, ONE_STRIPE)
# Weights, and the closed form of each statistic in NAMES.
PATTERNS = {
    "uniform": (uniform_attention(T), UNIFORM),
    "itself": (back(0), (0, 0, 0, 1, 0, 0, 0)),
    "previous": (back(1), (0, 20 / 21, 1 / 20, 0, 1, 0, 0)),
    # Token 0 precedes only token 1; induction and duplicate count weight on tokens 1 to P + 1.
    "first": (attending(lambda q: 0), (0, 10, 1, 0, 1 / 20, 0, 0)),
    # Queries from 9 on attend 9 back: 12 of them; the other 8 of 20 attend to themselves.
    "induction": (back(P - 1), (0, 9 * 12 / 21, 1 / 20, 8 / 20, 0, 1, 0)),
    "duplicate": (back(P), (0, 10 * 11 / 21, 1 / 20, 9 / 20, 0, 0, 1)),
}


def test_pure_patterns_and_their_mixture():
    for name, (weights, expected) in PATTERNS.items():
        found = measured(weights, P)
        for key, value in zip(NAMES, expected, strict=True):
            assert found[key].item() == pytest.approx(value, abs=1e-6), (name, key)
    mixed = measured(sum(weights for weights, _ in PATTERNS.values()) / len(PATTERNS), P)
    means = np.mean([expected for _, expected in PATTERNS.values()], axis=0)
    for key, mean in list(zip(NAMES, means, strict=True))[1:]:  # all but entropy are linear
        assert mixed[key].item() == pytest.approx(mean, abs=1e-6), key


def by_loops(a, period, separators):
    """Returns the statistics by their definitions. a: nested lists (T, T)."""
    n = len(a)

    def nats(row):
        return -sum(w * math.log(w) for w in row if w > 0)

    found = {
        "entropy": fmean(nats(a[q]) / math.log(q + 1) for q in range(1, n)),
        "distance": fmean(sum(a[q][k] * (q - k) for k in range(q + 1)) for q in range(n)),
        "first_token": fmean(a[q][0] for q in range(1, n)),
        "diagonal": fmean(a[q][q] for q in range(1, n)),
        "previous_token": fmean(a[q][q - 1] for q in range(1, n)),
    }
    after_one = [q for q in range(n) if any(0 < k < q for k in separators)]
    if after_one and not period:
        found["separator"] = fmean(sum(a[q][k] for k in separators if 0 < k < q) for q in after_one)
    starts = [k for k in range(1, n) if k - 1 in separators and k not in separators]
    after_one = [q for q in range(n) if any(k < q for k in starts)]
    if after_one and not period:
        found["segment_start"] = fmean(sum(a[q][k] for k in starts if k < q) for q in after_one)
    if period:
        second_copy = range(period + 1, 2 * period + 1)
        found["induction"] = fmean(a[q][q - period + 1] for q in second_copy)
        found["duplicate_token"] = fmean(a[q][q - period] for q in second_copy)
    return found


@trials(25, 250)
@given(
    st.integers(0, 12),
    st.integers(2, 30),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sets(st.integers(0, 24)),
)
def test_random_weights_by_loops(period, length, num_heads, seed, places):
    period = period if period >= 2 else 0
    num_tokens = 2 * period + 1 if period else length
    weights, scores = random_weights(num_heads, num_tokens, seed)
    separators = [place for place in places if place < num_tokens]
    found = measured(weights, period, scores, separators)
    undefined = {key for key, values in found.items() if values.isnan().any()}
    of_copies = {"induction", "duplicate_token"} if not period else set()
    assert undefined - {"separator", "segment_start"} == of_copies | {"positional"}
    for head in range(num_heads):
        expected = by_loops(weights[head].tolist(), period, separators)
        assert expected.keys() | undefined | {"largest_logit"} == STATISTICS.keys()
        for key, value in expected.items():
            assert found[key][head].item() == pytest.approx(value, abs=1e-5), key
        allowed = [scores[head, q, k].item() for q in range(num_tokens) for k in range(q + 1)]
        assert found["largest_logit"][head].item() == max(allowed)


def test_statistics_do_not_wait_for_the_device():
    """The device "meta" has no values: an operation on the host that needs them is an error."""
    weights = torch.empty(2, T, T, device="meta")
    found = measured(weights, P, weights, separators=[3, 7])
    assert {values.shape for values in found.values()} == {(2,)}


def test_positional_by_loops_and_for_pure_patterns():
    """Almost 1: the same positions in all texts; 0: uniform; negative: different positions."""
    maps = [random_weights(2, 9, seed)[0].numpy() for seed in range(3)]
    q, k = np.tril_indices(9)
    found = positional([a[None, :, q, k] for a in maps])
    for head in range(2):
        of = [a[head].tolist() for a in maps]

        def apart(one, other):
            return fmean(
                sum(abs(one[q][k] - other[q][k]) for k in range(q + 1)) / 2 for q in range(1, 9)
            )

        even = [[1 / (q + 1)] * 9 for q in range(9)]
        expected = fmean(apart(a, even) for a in of) - fmean(
            apart(a, b) for a, b in ((of[0], of[1]), (of[0], of[2]), (of[1], of[2]))
        )
        assert found[0, head] == pytest.approx(expected, abs=1e-6)
    q, k = np.tril_indices(T)
    previous, uniform, first = (
        PATTERNS[name][0].numpy()[None, :, q, k] for name in ("previous", "uniform", "first")
    )
    assert positional([previous] * 3).item() > 0.8
    assert positional([uniform] * 3).item() == pytest.approx(0, abs=1e-6)
    assert positional([previous, first]).item() < 0
    sharp = [random_weights(20, T, seed)[0].numpy()[None, :, q, k] for seed in range(2)]
    assert positional(sharp).max() < 0.1
