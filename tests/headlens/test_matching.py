"""headlens/matching.py: similarity of heads, optimal assignment, groups of matched heads."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.loops import uniform_attention

from headlens.matching import (
    MatchedRun,
    all_pairs,
    directions,
    match_heads,
    mean_similarity,
    similarities,
)
from headlens.snapshot_data import from_codes, to_codes, triangle_to_square
from headlens.statistics import chances_of

LENGTHS = (2, 7, 20)  # tokens of each prompt


def random_codes(seed, layers=2, heads=4, sharpness=3.0, lengths=LENGTHS):
    """Returns the codes of random heads, for each prompt (L, H, N)."""
    draw = torch.Generator().manual_seed(seed)
    return [codes_of(torch.randn(layers, heads, n, n, generator=draw) * sharpness) for n in lengths]


def codes_of(scores):
    size = scores.shape[-1]
    masked = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
    return to_codes(masked.softmax(-1)).numpy()[..., *np.tril_indices(size)]


def causal_directions(codes):
    return directions(codes, [chances_of(np.ones((1, of.shape[-1]), bool)) for of in codes])


def matched(*of_runs):
    """Returns the groups, each {number of the run: its row}, and the mean similarity of the runs.
    of_runs: the codes of each run."""
    runs = []
    for number, codes in enumerate(of_runs):
        names = np.full(codes[0].shape[:2], "")
        layers = [*range(len(names))]
        runs.append(MatchedRun(str(number), causal_directions(codes), names, layers))
    pairs = all_pairs(runs)
    assert np.isfinite(pairs).all()
    groups = {}
    for row in match_heads(runs, pairs):
        groups.setdefault(row["group"], {})[int(row["run"])] = row
    return [*groups.values()], mean_similarity(pairs)


def heads_of(group):
    return {run: row["head"] for run, row in group.items()}


def stability_of(group):
    return next(iter(group.values()))["stability"]


def test_similarity_is_the_cosine_after_subtracting_uniform_attention():
    first, second = random_codes(1), random_codes(2)
    found = similarities(causal_directions(first), causal_directions(second))
    for layer, a, b in np.ndindex(found.shape):
        cosines = []
        for x, y in zip(first, second, strict=True):
            size, dot, of_a, of_b = len(triangle_to_square(x[layer, a])), 0, 0, 0
            x, y = (triangle_to_square(from_codes(v)) for v in (x[layer, a], y[layer, b]))
            for q in range(1, size):
                for k in range(q + 1):
                    one, other = (v[q, k] - v[q].sum() / (q + 1) for v in (x, y))
                    dot, of_a, of_b = dot + one * other, of_a + one**2, of_b + other**2
            cosines.append(dot / math.sqrt(of_a * of_b))
        assert found[layer, a, b] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_random_maps_are_not_similar():
    runs = [random_codes(seed, heads=8, lengths=(40, 40)) for seed in range(3)]
    groups, mean = matched(*runs)
    assert len(groups) == 3 * 2 * 8
    assert all(stability_of(group) == 0 for group in groups)
    assert np.abs(mean[~np.eye(3, dtype=bool)]).max() < 0.1


def test_uniform_heads_are_not_matched():
    """Also if they are uniform only up to the precision of a code, or on some prompts."""
    same = [uniform_attention(n)[0].log().expand(1, 2, n, n) for n in LENGTHS]
    uniform = [codes_of(scores) for scores in same]
    nearly = [random_codes(seed, layers=1, heads=2, sharpness=0.01) for seed in (2, 3)]
    for first, second in itertools.combinations(
        (uniform, uniform, *nearly, random_codes(4, layers=1, heads=2)), 2
    ):
        groups, mean = matched(first, second)
        assert mean[0, 1] == 0
        assert all(len(group) == 1 for group in groups)
    partly = [uniform[0], uniform[1], random_codes(5, layers=1, heads=2)[2]]
    groups, mean = matched(partly, partly)  # prompts on which both are uniform do not count
    assert mean[0, 1] == pytest.approx(1, abs=1e-5)


def test_heads_without_a_match_and_heads_that_the_first_run_lacks():
    a, b, c = (random_codes(seed, layers=1, heads=2, lengths=(30,))[0] for seed in (1, 2, 3))
    first, second, third = a, np.stack([b[:, 0], a[:, 1]], 1), np.stack([c[:, 0], b[:, 0]], 1)
    groups, _ = matched([first], [second], [third])
    found = [heads_of(group) for group in groups]
    assert sorted(found[:2], key=min) == [{0: 1, 1: 1}, {1: 0, 2: 1}]  # equally stable
    assert found[2:] == [{0: 0}, {2: 0}]
    assert [*map(stability_of, groups)] == pytest.approx([1 / 3, 1 / 3, 0, 0], abs=1e-4)
