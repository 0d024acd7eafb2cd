"""order.py: the order of windows, of one source and of mixtures, against its definition; and as
training/feed.py reads it, in micro-batches and on many ranks.

Needs no network and no files.
"""

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.tally import CAMPAIGN
from hypothesis import example, given, settings
from hypothesis import strategies as st

from order import LONGEST_SCHEDULE, WindowOrder, permute, schedule, shares
from training.feed import Feed

some = settings(max_examples=500 if CAMPAIGN else 20, deadline=None, derandomize=True)

seeds = st.integers(0, 2**64 - 1)
decimals = st.builds(lambda n, unit: n / unit, st.integers(1, 30), st.sampled_from([1, 4, 10]))
micro_batch_sizes = st.none() | st.integers(1, 9)


@st.composite
def shared_batches(draw) -> tuple[int, int]:
    """(batch_size, world_size), the one a multiple of the other."""
    world_size = draw(st.integers(1, 8))
    return world_size * draw(st.integers(1, 4)), world_size


@st.composite
def mixtures(draw) -> tuple[list[int], list[float]]:
    """(windows of each source, weights), two to six sources."""
    count = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    return sizes, draw(st.lists(decimals, min_size=count, max_size=count))


# (windows, weights) of one source or of several
anything = st.tuples(st.integers(1, 200), st.none()) | mixtures()


def by_source(windows: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(the source of each window, its number in that source)."""
    ends = np.cumsum(sizes)
    sources = np.searchsorted(ends, windows, side="right")
    return sources, windows - (ends - sizes)[sources]


def check_epochs(windows: list[int], sizes: list[int]) -> None:
    """Each window of a source comes once in every epoch of it, and at most once in the last."""
    sources, numbers = by_source(np.array(windows), sizes)
    for source, n in enumerate(sizes):
        own = numbers[sources == source].tolist()
        for first in range(0, len(own), n):
            epoch = own[first : first + n]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(n))


class Rank:
    """One of many ranks, without a device."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def pinned(self, *tensors):
        return list(tensors)

    to_device = pinned
    sum = pinned


class Numbers:
    """A data set whose window w is the number w."""

    def gather(self, windows):
        return (torch.from_numpy(windows)[:, None],)

    def expand(self, numbers):
        return numbers, numbers

    def num_targets(self, numbers):
        return len(numbers)


def fed(order: WindowOrder, steps, world_size: int = 1, micro_batch_size: int | None = None):
    """The global batch of each step, as the ranks read it, micro-batch by micro-batch."""
    ranks = [Rank(rank, world_size) for rank in range(world_size)]
    feeds = [Feed(Numbers(), order, micro_batch_size, rank) for rank in ranks]
    share = order.batch_size // world_size
    size = micro_batch_size or share
    batches = []
    for step in steps:
        batch = []
        for feed in feeds:
            parts = [input_ids[:, 0].tolist() for input_ids, *_ in feed.batches(step)]
            sizes = [min(size, share - first) for first in range(0, share, size)]
            assert [len(part) for part in parts] == sizes
            batch += itertools.chain(*parts)
        batches.append(batch)
    return batches


# --------------------------------------------------------------------------------- the definition


@some
@given(anything, shared_batches(), micro_batch_sizes, seeds)
@example((1, None), (8, 8), None, 0)
@example((60, None), (32, 8), 3, 0)
@example(([1, 1], [1.0, 1.0]), (8, 8), 1, 0)
@example(([4, 6, 1], [0.5, 0.4, 0.1]), (6, 3), None, 2**64 - 1)
def test_every_window_comes_once_per_epoch(what, batch, micro_batch_size, seed):
    """Of each source, whatever the number of ranks and the size of micro-batches."""
    (num_windows, weights), (batch_size, world_size) = what, batch
    order = WindowOrder(num_windows, batch_size, seed, weights)
    places = 100 if weights else 2 * num_windows  # two epochs; a batch may belong to both
    steps = range(-(-places // batch_size))
    check_epochs([w for step in steps for w in order.windows(step)], order.sizes)
    fed_steps = steps[: -(-24 // batch_size)]
    expected = [order.windows(step).tolist() for step in fed_steps]
    assert fed(order, fed_steps, world_size, micro_batch_size) == expected


@some
@given(anything, st.sampled_from([1, 4, 12, 24]), micro_batch_sizes, seeds, st.integers(0, 10**9))
def test_global_batch_does_not_depend_on_the_world_size(
    what, batch_size, micro_batch_size, seed, step
):
    num_windows, weights = what
    order = WindowOrder(num_windows, batch_size, seed, weights)
    expected = [order.windows(step), order.windows(step + 2)]
    assert {(windows.dtype, windows.shape) for windows in expected} == {
        (np.dtype(np.int64), (batch_size,))
    }
    for world_size in (size for size in range(1, 9) if batch_size % size == 0):
        parts = [order.windows(step, rank, world_size) for rank in range(world_size)]
        assert {part.shape for part in parts} == {(batch_size // world_size,)}
        assert np.concatenate(parts).tolist() == expected[0].tolist()
        batches = fed(order, (step, step + 2), world_size, micro_batch_size)
        assert batches == [windows.tolist() for windows in expected]


@some
@given(anything, shared_batches(), seeds, st.data())
def test_order_depends_on_its_arguments_only(what, batch, seed, draw):
    """So a resumed run reads the rest of the order, and no other random number is drawn."""
    (num_windows, weights), (batch_size, world_size) = what, batch
    steps = draw.draw(st.lists(st.integers(0, 200), unique=True, max_size=8))
    order = WindowOrder(num_windows, batch_size, seed, weights)
    first = {step: order.windows(step).tolist() for step in steps}
    random_state = torch.get_rng_state()
    shuffled = draw.draw(st.permutations(steps))
    again = {step: order.windows(step).tolist() for step in shuffled}
    other = WindowOrder(num_windows, batch_size, seed, weights)
    assert first == again == {step: other.windows(step).tolist() for step in shuffled}
    assert torch.equal(torch.get_rng_state(), random_state)
    resumed_at = draw.draw(st.integers(0, 2))
    assert fed(other, range(resumed_at, 3), world_size) == fed(order, range(3))[resumed_at:]
    # A place has its window, however many places make up a step.
    larger = WindowOrder(num_windows, 3 * batch_size, seed, weights)
    parts = [order.windows(step) for step in range(6)]
    assert np.array_equal(np.concatenate(parts), np.r_[larger.windows(0), larger.windows(1)])


@some
@given(
    st.integers(20, 500),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
)
@example(20, (0, 0), (0, 1))
@example(20, (0, 0), (1, 0))
@example(20, (0, 1), (1, 0))
def test_each_seed_and_epoch_has_its_own_order(n, one, other):
    orders = [WindowOrder(n, n, seed).windows(epoch).tolist() for seed, epoch in (one, other)]
    assert (orders[0] == orders[1]) == (one == other)
    mixed = WindowOrder([n, n], 2 * n, one[0], [1.0, 1.0]).windows(one[1])
    first, second = (mixed[mixed // n == source] % n for source in (0, 1))
    assert not np.array_equal(first, second)  # nor is it the order of another source


def test_order_is_frozen():
    """A run that is resumed with a later version must keep its order."""
    order = WindowOrder(num_windows=10, batch_size=6, seed=123)
    expected = [[1, 3, 6, 9, 4, 7], [2, 5, 8, 0, 0, 8], [3, 5, 2, 7, 4, 9]]
    assert [order.windows(step).tolist() for step in range(3)] == expected
    order = WindowOrder([5, 3, 4], batch_size=10, seed=123, weights=[0.5, 0.3, 0.2])
    assert order.schedule.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    expected = [
        [4, 5, 2, 10, 3, 7, 1, 6, 0, 11],
        [3, 6, 4, 9, 1, 5, 2, 7, 0, 8],
        [0, 7, 4, 8, 2, 6, 1, 5, 3, 10],
    ]
    assert [order.windows(step).tolist() for step in range(3)] == expected
    assert order.windows(10**9).tolist() == [3, 6, 4, 8, 1, 5, 2, 7, 0, 11]


@pytest.mark.parametrize("weights", [None, [0.5, 0.2, 0.3]])
def test_any_step_of_a_huge_run_costs_no_memory(weights):
    tracemalloc.start()
    try:
        order = WindowOrder([10**12, 5, 10**12] if weights else 10**12, 8, 0, weights)
        windows = order.windows(10**11)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert fed(order, [10**11], 4) == [windows.tolist()]
    sources, numbers = by_source(windows, order.sizes)
    assert set(sources.tolist()) == set(range(len(order.sizes)))
    assert (numbers >= 0).all()
    assert (numbers < np.array(order.sizes)[sources]).all()
    huge = windows[sources != 1]
    assert len(set(huge.tolist())) == len(huge)
    assert len(set((huge // 10**9).tolist())) > 1  # from everywhere, not from the beginning


def test_arguments_that_do_not_fit_are_refused():
    for windows, weights in ((100, None), ([100, 50], [0.7, 0.3])):
        for batch_size, world_size in ((8, 3), (1, 2), (6, 4)):
            with pytest.raises(ValueError, match=rf"{batch_size}\D+{world_size}\D"):
                WindowOrder(windows, batch_size, 0, weights).windows(0, 0, world_size)
    for windows, weights, numbers in (
        ([10, 20], [1.0], r"1\D+2"),
        ([10, 20], [0.2, 0.3, 0.5], r"3\D+2"),
        ([10, 20], None, r"1\D+2"),
        (10, [0.5, 0.5], r"2\D+1"),
        ([10, 20], [0.00001, 1.0], "100001"),
    ):
        with pytest.raises(ValueError, match=numbers):
            WindowOrder(windows, 8, 0, weights)


# -------------------------------------------------------------------------------------- mixtures


@some
@given(mixtures(), st.sampled_from([1, 10**4, 10**6]))
@example(([1, 1], [1.0, 1.0]), 1)
@example(([3, 5, 7], [0.5, 0.25, 0.125]), 1)
@example(([1, 30], [0.1, 30.0]), 1)
@example(([2, 2, 2, 2, 2, 2], [0.1, 0.1, 0.1, 0.1, 0.1, 7.25]), 1)
def test_each_source_has_its_share_of_any_first_places(mixture, larger):
    """Among any p first places, less than one window away from its weight's share of p."""
    sizes, weights = mixture
    sizes = [size * larger for size in sizes]
    parts = [int(40 * Fraction(str(weight))) for weight in weights]  # tenths and eighths: whole
    total = sum(parts)
    num_places = 2 * total // math.gcd(*parts) + 1  # two rounds of the schedule
    windows = WindowOrder(sizes, num_places, 0, weights).windows(0)
    sources, _ = by_source(windows, sizes)
    p = np.arange(1, num_places + 1)
    for source, part in enumerate(parts):
        counts = np.cumsum(sources == source)
        assert np.abs(counts * total - p * part).max() < total  # |count - p part / total| < 1


def test_one_weighted_source_has_the_order_of_an_unweighted_one():
    for n, batch_size, seed in ((1, 1, 0), (7, 3, 5), (500, 9, 2**64 - 1)):
        orders = [WindowOrder(n, batch_size, seed), WindowOrder([n], batch_size, seed)]
        orders += [WindowOrder([n], batch_size, seed, [w]) for w in (1.0, 0.3, 1000.0, 1e-9)]
        for step in (0, 1, 2, 10**9):
            assert len({tuple(order.windows(step).tolist()) for order in orders}) == 1


# --------------------------------------------------------------------------- shares and schedule


def test_shares_of_known_weights():
    for weights, expected in (
        ([0.3], [1]),
        ([0.5, 0.25], [2, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),  # as floats 0.1 + 0.2 is not 0.3
        ([2, 4, 6], [1, 2, 3]),
        ([7.25] * 3, [1, 1, 1]),
        ([1e-9, 3e-9], [1, 3]),
        ([1e20, 5e19], [2, 1]),
        ([0.99999, 0.00001], [99_999, 1]),  # the longest schedule that is allowed
    ):
        assert shares(weights) == expected
    for weights, length in (
        ([1.0, 100_000.0], LONGEST_SCHEDULE + 1),
        ([0.1 + 0.2, 0.7], 100_000_000_000_000_004 // 4),
        ([1e-300, 1.0], 10**300 + 1),
    ):
        with pytest.raises(ValueError, match=rf"\b{length}\b"):
            shares(weights)


@some
@given(st.lists(decimals, min_size=1, max_size=6))
def test_shares_are_exact_and_the_smallest(weights):
    turns = shares(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    assert all(type(turn) is int for turn in turns)
    assert [Fraction(turn, sum(turns)) for turn in turns] == [w / sum(exact) for w in exact]
    assert math.gcd(*turns) == 1


@some
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
@example([1, 1, 3])
@example([1])
@example([60, 1, 60, 1, 60, 1])
@example([30_000, 1, 7])
def test_schedule_keeps_every_deadline(turns):
    """Turn j of a source with t of n turns: not before the place in which j n / t lies, and
    before (j + 1) n / t. All in whole numbers."""
    n = sum(turns)
    order = schedule(turns)
    assert order.shape == (n,)
    for source, t in enumerate(turns):
        places = np.flatnonzero(order == source)
        assert len(places) == t
        j = np.arange(t)
        assert (places >= j * n // t).all()
        assert (places * t < (j + 1) * n).all()


def test_known_schedules():
    for turns, expected in (
        ([1], [0]),
        ([1, 1], [0, 1]),
        ([2, 1], [0, 0, 1]),  # due at the same place: the first source
        ([1, 2], [1, 0, 1]),
        ([1, 1, 2], [2, 0, 1, 2]),
        ([2, 3], [1, 0, 1, 0, 1]),
        ([1] * 6, list(range(6))),
    ):
        assert schedule(turns).tolist() == expected


# --------------------------------------------------------------------------------------- permute


def test_permute_is_a_bijection_of_any_size():
    for n, key in itertools.product([*range(1, 66), 255, 256, 257], [(0,), (2**64 - 1, 7, 3)]):
        index = np.arange(n)
        assert sorted(permute(index, n, key).tolist()) == list(range(n))
        assert index.tolist() == list(range(n))  # the argument is not changed


@some
@given(st.integers(1, 10**15), seeds, st.data())
def test_permute_evaluates_each_place_alone(n, seed, draw):
    places = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    together = permute(np.array(places), n, (seed,)).tolist()
    assert together == [permute(np.array([place]), n, (seed,)).item() for place in places]
    assert len(set(together)) == len(set(places))
    assert all(0 <= window < n for window in together)


def test_permute_of_ten_to_the_twelfth():
    n = 10**12
    index = np.concatenate([np.arange(20_000), np.arange(n - 20_000, n), np.arange(0, n, 10**8)])
    index = np.unique(index)
    windows = permute(index, n, (0, 0))
    assert len(np.unique(windows)) == len(index)
    assert windows.min() >= 0
    assert windows.max() < n
    tenths = np.bincount(windows // (n // 10), minlength=10)
    assert chi_square(tenths) < 40  # 9 degrees of freedom: exceeded by chance once in 100,000


def chi_square(counts: np.ndarray) -> float:
    """How far counts are from equal: about their number, less one, if by chance."""
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean())


@pytest.mark.parametrize("varied", ["seed", "epoch", "source"])
def test_permute_is_about_uniform(varied):
    place_of = ["seed", "epoch", "source"].index(varied)
    count = 5000 if CAMPAIGN else 600
    keys = [tuple(i if place == place_of else 0 for place in range(3)) for i in range(count)]
    orders = np.array([permute(np.arange(6), 6, key) for key in keys])
    for place in range(6):  # bounds: exceeded by chance about once in 100,000
        assert chi_square(np.bincount(orders[:, place], minlength=6)) < 31
    for one, other in itertools.combinations(range(6), 2):
        pairs = np.bincount(orders[:, one] * 6 + orders[:, other], minlength=36)
        unequal = [6 * i + j for i in range(6) for j in range(6) if i != j]
        assert chi_square(pairs[unequal]) < 73
