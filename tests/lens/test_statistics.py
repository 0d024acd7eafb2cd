"""Head statistics: closed forms for pure patterns, plain loops for random weights."""

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lens.statistics import STATISTICS, measure, uniform_attention

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


def measured(weights, period=0, scores=None):
    return dict(zip(STATISTICS, measure(weights, scores, period), strict=True))


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


def by_loops(a, period):
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
    if period:
        second_copy = range(period + 1, 2 * period + 1)
        found["induction"] = fmean(a[q][q - period + 1] for q in second_copy)
        found["duplicate_token"] = fmean(a[q][q - period] for q in second_copy)
    return found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(2, 30), st.integers(1, 3), st.integers(0, 10**6))
def test_random_weights_by_loops(period, length, num_heads, seed):
    period = period if period >= 2 else 0
    num_tokens = 2 * period + 1 if period else length
    weights, scores = random_weights(num_heads, num_tokens, seed)
    found = measured(weights, period, scores)
    undefined = {key for key, values in found.items() if values.isnan().any()}
    assert undefined == (set() if period else {"induction", "duplicate_token"})
    for head in range(num_heads):
        expected = by_loops(weights[head].tolist(), period)
        assert expected.keys() | undefined | {"largest_logit"} == STATISTICS.keys()
        for key, value in expected.items():
            assert found[key][head].item() == pytest.approx(value, abs=1e-5), key
        allowed = [scores[head, q, k].item() for q in range(num_tokens) for k in range(q + 1)]
        assert found["largest_logit"][head].item() == max(allowed)
