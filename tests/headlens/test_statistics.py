"""Head statistics: closed forms for pure patterns, plain loops for random weights."""

import math
from statistics import fmean

import numpy as np
import pytest
import torch
from helpers.loops import by_loops, uniform_attention
from helpers.tally import trials
from hypothesis import given
from hypothesis import strategies as st

from headlens import STATISTICS
from headlens.statistics import (
    MEASURED,
    HeadStatistics,
    best_offsets,
    by_statistic,
    chances_of,
    positional,
    ratio_of_sums,
)

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


def measured(weights, token_ids, tokens, scores=None):
    """Returns the statistics of all heads, (H, T, T), on one text."""
    text = HeadStatistics(torch.tensor([token_ids]), [tokens])
    sums = text.sums(weights[None], None if scores is None else scores[None])
    means, _ = ratio_of_sums(sums.numpy()[:, :, None], text.expected()[0])
    return {key: of[0] for key, of in by_statistic(means, best_offsets(means)).items()}


COPIES = [0, *range(1, P + 1), *range(1, P + 1)]  # [BOS] + R + R
LETTERS = [chr(97 + token) for token in COPIES]
TOKENS = ["bell", " Tam", "a", " ", "\n", ".", " …", "", "é—", "(", "<0xE2>"]


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
        found = measured(weights, COPIES, LETTERS)
        for key, value in zip(NAMES, expected, strict=True):
            assert found[key].item() == pytest.approx(value, abs=1e-6), (name, key)
    mixed = sum(weights for weights, _ in PATTERNS.values()) / len(PATTERNS)
    found = measured(mixed, COPIES, LETTERS)
    means = np.mean([expected for _, expected in PATTERNS.values()], axis=0)
    for key, mean in list(zip(NAMES, means, strict=True))[1:]:  # all but entropy are linear
        assert found[key].item() == pytest.approx(mean, abs=1e-6), key


@trials(25, 250)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(TOKENS)), min_size=2, max_size=30),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_random_weights_by_loops(text, num_heads, seed):
    token_ids, tokens = map(list, zip(*text, strict=True))
    num_tokens = len(token_ids)
    weights, scores = random_weights(num_heads, num_tokens, seed)
    found = measured(weights, token_ids, tokens, scores)
    undefined = {key for key, values in found.items() if np.isnan(values).any()}
    for head in range(num_heads):
        expected = by_loops(weights[head].tolist(), token_ids, tokens)
        assert expected.keys() | undefined | {"largest_logit", "learned_sink"} == STATISTICS.keys()
        assert not expected.keys() & undefined
        for key, value in expected.items():
            assert found[key][head].item() == pytest.approx(value, rel=1e-5, abs=1e-5), key
        allowed = [scores[head, q, k].item() for q in range(num_tokens) for k in range(q + 1)]
        assert found["largest_logit"][head].item() == max(allowed)


def test_the_error_is_that_of_the_mean_over_texts():
    """Texts have different numbers of queries with a target. In 2,000 repetitions, the means of
    twelve texts vary as the error says."""
    random = np.random.default_rng(0)
    counts = random.integers(1, 20, (2000, 12)).astype(np.float64)
    sums = counts * 0.3 + random.normal(size=counts.shape) * 0.1 * np.sqrt(counts)
    found = [ratio_of_sums(s[:, None], c[:, None]) for s, c in zip(sums, counts, strict=True)]
    means, errors = (np.array(values)[:, 0] for values in zip(*found, strict=True))
    assert means.mean() == pytest.approx(0.3, abs=0.003)
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.1)


def test_values_for_uniform_attention_are_in_fp32_also_in_a_run_in_bf16():
    texts = HeadStatistics(torch.arange(40).reshape(2, 20) % 5, [list("ab, cd. ef") * 2] * 2)
    wanted = texts.sums(uniform_attention(20).expand(2, 1, 20, 20), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(texts.expected()[1], wanted.numpy(), equal_nan=True)


def test_statistics_do_not_wait_for_the_device():
    """The device "meta" has no values: an operation on the host that needs them is an error."""
    with torch.device("meta"):
        ids, weights = torch.empty(2, T, dtype=torch.int64), torch.empty(2, 3, T, T)
        texts = HeadStatistics(ids, [LETTERS] * 2)
        assert texts.sums(weights, weights).shape == (2, len(MEASURED), 3)


def test_positional_by_loops_and_for_pure_patterns():
    """Almost 1: the same positions in all texts; 0: uniform; negative: different positions."""
    maps = [random_weights(2, 9, seed)[0].numpy() for seed in range(3)]
    q, k = np.tril_indices(9)

    def measured(*triangles):
        causal = chances_of(np.ones((1, triangles[0].shape[-1]), bool))
        return positional(triangles, [causal] * len(triangles))

    found = measured(*(a[None, :, q, k] for a in maps))
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
    assert measured(*[previous] * 3).item() > 0.8
    assert measured(*[uniform] * 3).item() == pytest.approx(0, abs=1e-6)
    assert measured(previous, first).item() < 0
    sharp = [random_weights(20, T, seed)[0].numpy()[None, :, q, k] for seed in range(2)]
    assert measured(*sharp).max() < 0.1
