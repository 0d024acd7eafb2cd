"""The step at which a model learns to copy."""

import math

import numpy as np

from headlens.copying import copying_begins, loss_of_copy

K = 62


def test_a_clear_drop_is_found_at_its_first_low_snapshot():
    high, low = math.log(K), 0.05
    for length in (2, 5, 41):
        for first in range(1, length):
            noise = 0.1 * np.random.default_rng(first).standard_normal(length)
            losses = np.where(np.arange(length) < first, high, low) + noise
            assert copying_begins(losses, K) == first
    slope = [4.1, 4.2, 4.0, 3.0, 1.0, 0.3, 0.1, 0.1]
    assert copying_begins(slope, K) == 4


def test_no_stage_without_a_clear_drop():
    random = math.log(K) + 0.3 * np.random.default_rng(0).standard_normal(40)
    for losses in (
        random,
        np.linspace(11, 6, 20),  # of a language model: falls slowly and stays high
        [4.1, 4.1, 3.5, 3.5],  # a small drop
        [0.1] * 10,  # copies from the beginning
        [4.1],
        [],
        [4.1, math.nan, 0.1],
    ):
        assert copying_begins(losses, K) is None


def test_loss_of_the_second_copy():
    """R has 3 tokens: [BOS] a b c a b c. Positions 4 and 5 predict the second b and c."""
    assert loss_of_copy(np.float32([9, 9, 9, 9, 1, 2]), period=3) == 1.5
