"""tokens/sampler.py: the order of windows of one source and of mixtures; plain definitions.

How training uses it: tests/test_data_loader.py.
"""

import itertools

import numpy as np
import pytest
from helpers.tally import CAMPAIGN, trials
from helpers.texts import peak_memory
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.tokens import MIXTURE_BLOCK
from clearhead.tokens.sampler import WindowOrder, permute

some = trials(8, 500)

seeds = st.integers(0, 2**64 - 1)
decimals = st.builds(lambda n, unit: n / unit, st.integers(1, 30), st.sampled_from([1, 4, 10]))


@st.composite
def mixtures(draw) -> tuple[list[int], list[float]]:
    """(number of windows of each source, weights), with two to six sources."""
    count = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    return sizes, draw(st.lists(decimals, min_size=count, max_size=count))


# (number of windows, weights) of one or several sources
anything = st.tuples(st.integers(1, 200), st.none()) | mixtures()


def by_source(windows: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(the source of each window, its index in that source)."""
    ends = np.cumsum(sizes)
    sources = np.searchsorted(ends, windows, side="right")
    return sources, windows - (ends - sizes)[sources]


@some
@given(anything, st.integers(1, 8), st.integers(1, 4), seeds)
@example((1, None), 8, 1, 0)
@example((60, None), 8, 4, 3)
@example(([1, 1], [1.0, 1.0]), 8, 1, 1)
@example(([4, 6, 1], [0.5, 0.4, 0.1]), 3, 2, 2**64 - 1)
def test_every_window_comes_once_per_epoch(what, world_size, share, seed):
    """In a mixture, a window of a source comes at most once more than another one of it in the
    first 1,000 positions. The number of ranks and the batch size do not change the order."""
    num_windows, weights = what
    batch_size = world_size * share
    order = WindowOrder(num_windows, batch_size, seed, weights)
    positions = MIXTURE_BLOCK if weights else 2 * num_windows  # two epochs
    steps = range(-(-positions // batch_size))
    batches = [order.windows(step) for step in steps]
    sources, numbers = by_source(np.concatenate(batches)[:positions], order.sizes)
    for source, n in enumerate(order.sizes):
        own = numbers[sources == source]
        for epoch in np.split(own, range(n, len(own), n)) if weights is None else [own]:
            counts = np.bincount(epoch, minlength=n)
            assert len(counts) == n
            assert counts.max() - counts.min() <= 1

    whole = WindowOrder(num_windows, len(steps) * batch_size, seed, weights).windows(0)
    assert np.array_equal(whole, np.concatenate(batches))
    for step in reversed(steps):
        parts = [order.windows(step, rank, world_size) for rank in range(world_size)]
        assert {(part.dtype, part.shape) for part in parts} == {(np.dtype(np.int64), (share,))}
        assert np.array_equal(np.concatenate(parts), batches[step])


@some
@given(
    st.integers(20, 500),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
)
@example(20, (0, 0), (0, 1))
@example(20, (0, 0), (1, 0))
@example(20, (0, 1), (1, 0))
def test_each_seed_epoch_and_source_has_its_own_order(n, one, other):
    orders = [WindowOrder(n, n, seed).windows(epoch).tolist() for seed, epoch in (one, other)]
    assert (orders[0] == orders[1]) == (one == other)
    mixed = WindowOrder([n, n], 2 * n, one[0], [1.0, 1.0]).windows(one[1])
    first, second = (mixed[mixed // n == source] % n for source in (0, 1))
    assert not np.array_equal(first, second)


def test_order_is_frozen():
    """The order must not change in later versions: runs are resumed with them."""
    order = WindowOrder(1000, batch_size=6, seed=123)
    assert [order.windows(step).tolist() for step in range(2)] == [
        [753, 872, 870, 953, 219, 594],
        [752, 30, 479, 253, 675, 518],
    ]
    expected = [[7, 6, 9, 4, 3, 8], [5, 2, 0, 1, 6, 1], [9, 7, 4, 2, 5, 8]]
    for num_windows, weights in ((10, None), ([10], [0.3])):
        order = WindowOrder(num_windows, batch_size=6, seed=123, weights=weights)
        assert [order.windows(step).tolist() for step in range(3)] == expected
    order = WindowOrder(5, batch_size=5, seed=123, phases=7)
    assert [order.windows(step).tolist() for step in range(3)] == [
        [29, 28, 27, 25, 26],
        [6, 9, 7, 8, 5],
        [18, 16, 15, 17, 19],
    ]
    order = WindowOrder([50, 3000, 40], batch_size=10, seed=123, weights=[0.5, 0.3, 0.2])
    expected = [
        [2704, 40, 1617, 879, 3052, 3, 501, 34, 40, 665],
        [16, 30, 35, 17, 3061, 2, 3079, 1699, 7, 1643],
        [1096, 1405, 1128, 1478, 30, 3062, 132, 3074, 3087, 5],
    ]
    assert [order.windows(step).tolist() for step in (0, 100, 10**9)] == expected


def test_arguments_that_do_not_fit_are_refused():
    for windows, weights in ((100, None), ([100, 50], [0.7, 0.3])):
        with pytest.raises(ValueError, match=r"8\D+3"):
            WindowOrder(windows, 8, 0, weights).windows(0, 0, 3)
    for windows, weights in (([10, 20], [1.0]), ([10, 20], None)):
        with pytest.raises(ValueError, match=r"1\D+2"):
            WindowOrder(windows, 8, 0, weights)


@some
@given(mixtures(), seeds)
@example(([1, 1], [1.0, 1.0]), 0)
@example(([20_000, 9, 9], [3000.0, 0.1, 0.7]), 0)
def test_each_source_has_its_share_of_the_positions(mixture, seed):
    """Of each 1,000 exactly, rounded. Of fewer, within 5 standard deviations."""
    sizes, weights = mixture
    order = WindowOrder(sizes, MIXTURE_BLOCK, seed, weights)
    for step in (0, 1, 10**9):
        sources, _ = by_source(order.windows(step), sizes)
        p = np.arange(1, MIXTURE_BLOCK + 1)
        for source, share in enumerate(np.array(weights) / sum(weights)):
            counts = np.cumsum(sources == source)
            assert abs(counts[-1] - MIXTURE_BLOCK * share) <= 1
            deviation = np.sqrt(p * share * (1 - share)).clip(max=8)
            assert (np.abs(counts - p * share) <= 2 + 5 * deviation).all()


def test_permute_is_a_bijection_of_any_size():
    """Of a large one, some indices are evaluated, without the memory of all."""
    for n, key in itertools.product([*range(1, 66), 255, 256, 257], [(0,), (2**64 - 1, 7, 3)]):
        assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))
    n = 10**12
    index = np.unique(np.r_[0:20_000, n - 20_000 : n, 0 : n : 10**8])
    windows, peak = peak_memory(lambda: permute(index, n, (0, 0)))
    assert peak < 2e7
    assert len(np.unique(windows)) == len(index)
    assert windows.min() >= 0
    assert windows.max() < n
    tenths = np.bincount(windows // (n // 10), minlength=10)
    assert chi_square(tenths) < 40  # 9 degrees of freedom: exceeded by chance once in 100,000
    for position in (0, 1234, len(index) - 1):  # each index is evaluated separately
        assert permute(index[[position]], n, (0, 0)).item() == windows[position]


def chi_square(counts: np.ndarray) -> float:
    """The chi-square statistic against equal counts; its mean is len(counts) - 1."""
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean())


@pytest.mark.parametrize("varied", [0, 1, 2], ids=["seed", "epoch", "source"])
def test_permute_is_about_uniform(varied):
    count = 5000 if CAMPAIGN else 600
    keys = [tuple(i if position == varied else 0 for position in range(3)) for i in range(count)]
    # A Feistel network only gives orders with an even number of swaps.
    swaps = [np.linalg.det(np.eye(16)[permute(np.arange(16), 16, key)]) for key in keys]
    assert abs(np.mean(swaps)) < 4.5 / count**0.5
    orders = np.array([permute(np.arange(6), 6, key) for key in keys])
    for position in range(6):  # bounds: exceeded by chance about once in 100,000
        assert chi_square(np.bincount(orders[:, position], minlength=6)) < 31
    for one, other in itertools.combinations(range(6), 2):
        pairs = np.bincount(orders[:, one] * 6 + orders[:, other], minlength=36)
        unequal = [6 * i + j for i in range(6) for j in range(6) if i != j]
        assert chi_square(pairs[unequal]) < 73
