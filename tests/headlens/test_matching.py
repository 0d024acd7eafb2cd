"""lens/matching.py: similarity of heads, optimal assignment, groups of matched heads."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch

from headlens.matching import (
    all_pairs,
    assign,
    directions,
    match_heads,
    mean_similarity,
    similarities,
)
from headlens.recording import to_codes
from headlens.snapshot_data import from_codes, triangle_to_square
from headlens.statistics import uniform_attention

LENGTHS = (2, 7, 20)  # tokens of each prompt


def random_codes(seed, layers=2, heads=4, sharpness=3.0, lengths=LENGTHS):
    """Returns the codes of random heads, for each prompt (L, H, N)."""
    draw = torch.Generator().manual_seed(seed)
    return [codes_of(torch.randn(layers, heads, n, n, generator=draw) * sharpness) for n in lengths]


def codes_of(scores):
    size = scores.shape[-1]
    masked = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
    return to_codes(masked.softmax(-1)).numpy()[..., *np.tril_indices(size)]


def matched(*runs):
    pairs = all_pairs([directions(run) for run in runs])
    assert np.isfinite(pairs).all()
    return match_heads(pairs), mean_similarity(pairs)


def heads_of(group):
    return {run: member.head for run, member in group.members.items()}


def test_similarity_is_the_cosine_after_subtracting_uniform_attention():
    first, second = random_codes(1), random_codes(2)
    found = similarities(directions(first), directions(second))
    for layer, a, b in np.ndindex(found.shape):
        cosines = []
        for x, y in zip(first, second, strict=True):
            size, dot, of_a, of_b = len(triangle_to_square(x[layer, a])), 0, 0, 0
            x, y = (triangle_to_square(from_codes(v)) for v in (x[layer, a], y[layer, b]))
            for q in range(1, size):
                for k in range(q + 1):
                    uniform = (round(255 * math.sqrt(1 / (q + 1))) / 255) ** 2
                    dot += (x[q, k] - uniform) * (y[q, k] - uniform)
                    of_a += (x[q, k] - uniform) ** 2
                    of_b += (y[q, k] - uniform) ** 2
            cosines.append(dot / math.sqrt(of_a * of_b))
        assert found[layer, a, b] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_assignment_has_the_largest_sum(monkeypatch):
    assert assign(np.array([[0.9, 0.8, 0.1], [0.8, 0.1, 0.2]])).tolist() == [1, 0]  # not 0.9 + 0.2
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        assign(np.zeros((1, 1)))


def test_permuted_heads_are_matched_completely():
    codes = random_codes(1, heads=6)
    orders = [np.arange(6), *(np.random.default_rng(seed).permutation(6) for seed in (1, 2))]
    groups, mean = matched(*([of_prompt[:, order] for of_prompt in codes] for order in orders))
    assert len(groups) == 2 * 6
    assert mean == pytest.approx(1, abs=1e-5)
    for group in groups:
        assert len({orders[run][head] for run, head in heads_of(group).items()}) == 1
        assert len(group.members) == 3
        assert group.stability == pytest.approx(1, abs=1e-5)
        assert all(m.similarity == pytest.approx(1, abs=1e-5) for m in group.members.values())
        assert not group.is_ambiguous


def test_random_maps_are_not_similar():
    runs = [random_codes(seed, heads=8, lengths=(40, 40)) for seed in range(3)]
    groups, mean = matched(*runs)
    assert len(groups) == 3 * 2 * 8
    assert all(group.stability == 0 for group in groups)
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
        assert all(len(group.members) == 1 for group in groups)
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
    assert [group.stability for group in groups] == pytest.approx([1 / 3, 1 / 3, 0, 0], abs=1e-5)


def test_interchangeable_heads_are_ambiguous():
    (codes,) = random_codes(1, layers=1, heads=3, lengths=(30,))
    codes[:, 1] = codes[:, 0]
    groups, _ = matched([codes], [codes])
    assert all(len(group.members) == 2 for group in groups)
    ambiguous = {head for g in groups if g.is_ambiguous for head in heads_of(g).values()}
    assert ambiguous == {0, 1}
    assert sorted(round(group.margin, 3) for group in groups)[:2] == [0, 0]
