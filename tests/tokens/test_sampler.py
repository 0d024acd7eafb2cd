"""order.py: the order of windows, of one source and of mixtures, against its plain definition.

Needs no network and no files. The order is also read
through training/feed.py, in micro-batches and by many ranks, as a training run reads it.
"""

import itertools
import math
import re
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from order import LONGEST_SCHEDULE, WindowOrder, permute, schedule, shares
from training.feed import Feed

many = settings(max_examples=100, deadline=None, derandomize=True)
some = settings(max_examples=40, deadline=None, derandomize=True)

seeds = st.integers(0, 2**64 - 1)
numbers_of_windows = st.integers(1, 500)
decimals = st.builds(lambda n, unit: n / unit, st.integers(1, 30), st.sampled_from([1, 4, 10]))


@st.composite
def shared_batches(draw) -> tuple[int, int]:
    """(batch_size, world_size), the one a multiple of the other."""
    world_size = draw(st.integers(1, 8))
    return world_size * draw(st.integers(1, 8)), world_size


@st.composite
def mixtures(draw) -> tuple[list[int], list[float]]:
    """(windows of each source, weights), two to six sources."""
    count = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    return sizes, draw(st.lists(decimals, min_size=count, max_size=count))


# (windows, weights) of one source or of several
anything = st.tuples(numbers_of_windows, st.none()) | mixtures()


def global_batch(order: WindowOrder, step: int, world_size: int = 1) -> list[int]:
    return [w for rank in range(world_size) for w in order.windows(step, rank, world_size)]


def first_places(order: WindowOrder, count: int) -> np.ndarray:
    """The windows of the first places, by whole batches."""
    steps = range(-(-count // order.batch_size))
    return np.concatenate([order.windows(step) for step in steps])[:count]


def by_source(windows: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(the source of each window, its number in that source)."""
    ends = np.cumsum(sizes)
    sources = np.searchsorted(ends, windows, side="right")
    return sources, windows - (ends - sizes)[sources]


def check_epochs(windows: list[int], n: int) -> None:
    """Each of n windows exactly once in every epoch, at most once in one that is not complete."""
    for first in range(0, len(windows), n):
        epoch = windows[first : first + n]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(n))


# ------------------------------------------------------------------------------------ one source


@some
@given(numbers_of_windows, shared_batches(), seeds)
@example(1, (8, 8), 0)
@example(500, (1, 1), 0)
def test_every_window_comes_once_per_epoch(n, batch, seed):
    batch_size, world_size = batch
    order = WindowOrder(n, batch_size, seed)
    num_steps = -(-2 * n // batch_size)  # two epochs, whose border may lie inside a batch
    places = [w for step in range(num_steps) for w in global_batch(order, step, world_size)]
    assert sorted(places[:n]) == list(range(n))
    assert sorted(places[n : 2 * n]) == list(range(n))


@many
@given(anything, shared_batches(), seeds, st.integers(0, 10**9))
def test_global_batch_is_the_same_whatever_the_world_size(what, batch, seed, step):
    batch_size, _ = batch
    num_windows, weights = what
    order = WindowOrder(num_windows, batch_size, seed, weights)
    expected = order.windows(step)
    assert expected.dtype == np.int64
    assert expected.shape == (batch_size,)
    for world_size in (size for size in range(1, 9) if batch_size % size == 0):
        parts = [order.windows(step, rank, world_size) for rank in range(world_size)]
        assert {part.shape for part in parts} == {(batch_size // world_size,)}
        assert np.concatenate(parts).tolist() == expected.tolist()


@some
@given(anything, shared_batches(), seeds, st.lists(st.integers(0, 200), unique=True), st.data())
def test_order_depends_on_nothing_but_its_arguments(what, batch, seed, steps, draw):
    """In particular: after a resume the rest of the order is what it would have been."""
    batch_size, world_size = batch
    num_windows, weights = what

    def new_order():
        return WindowOrder(num_windows, batch_size, seed, weights)

    order = new_order()
    there = {step: global_batch(order, step, world_size) for step in steps}
    torch.manual_seed(draw.draw(st.integers(0, 9)))
    random_state = torch.get_rng_state()
    other_way = draw.draw(st.permutations(steps))
    again = {step: global_batch(order, step, world_size) for step in other_way}
    fresh = {step: global_batch(new_order(), step, world_size) for step in other_way}
    assert there == again == fresh
    assert torch.equal(torch.get_rng_state(), random_state)


@some
@given(anything, seeds, st.lists(st.integers(1, 12), min_size=2, max_size=2))
def test_order_does_not_depend_on_the_batch_size(what, seed, batch_sizes):
    """A place has its window, however many places make up a step."""
    num_windows, weights = what
    orders = [WindowOrder(num_windows, size, seed, weights) for size in batch_sizes]
    one, other = [first_places(order, 60).tolist() for order in orders]
    assert one == other


@many
@given(
    st.integers(20, 500),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
)
@example(20, (0, 0), (0, 1))
@example(20, (0, 0), (1, 0))
@example(20, (0, 1), (1, 0))
def test_seeds_and_epochs_have_their_own_order(n, one, other):
    orders = [WindowOrder(n, n, seed).windows(epoch).tolist() for seed, epoch in (one, other)]
    assert (orders[0] == orders[1]) == (one == other)


def test_order_is_the_one_of_earlier_runs():
    """Frozen, for a run that is continued with a later version must go on in its own order."""
    order = WindowOrder(num_windows=10, batch_size=6, seed=123)
    expected = [[1, 3, 6, 9, 4, 7], [2, 5, 8, 0, 0, 8], [3, 5, 2, 7, 4, 9]]
    assert [order.windows(step).tolist() for step in range(3)] == expected


def test_step_of_a_huge_run_is_found_at_once():
    order = WindowOrder(10**12, batch_size=8, seed=0)
    assert global_batch(order, 10**11, 4) == order.windows(10**11).tolist()
    assert len(set(order.windows(10**11).tolist())) == 8


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 3), (1, 2), (6, 4)])
def test_uneven_batch_is_refused(batch_size, world_size, weights):
    message = f"batch_size={batch_size} over {world_size} ranks is uneven"
    with pytest.raises(ValueError, match=re.escape(message)):
        WindowOrder([100, 50] if weights else 100, batch_size, 0, weights).windows(0, 0, world_size)


# -------------------------------------------------------------------------------------- mixtures


@many
@given(mixtures(), st.sampled_from([1, 10**4, 10**6]))
@example(([1, 1], [1.0, 1.0]), 1)
@example(([3, 5, 7], [0.5, 0.25, 0.125]), 1)
@example(([1, 30], [0.1, 30.0]), 1)
@example(([2, 2, 2, 2, 2, 2], [0.1, 0.1, 0.1, 0.1, 0.1, 7.25]), 1)
def test_each_source_has_its_share_of_every_beginning(mixture, larger):
    """Among any p first places less than one window away from its weight's share of p."""
    sizes, weights = mixture
    sizes = [size * larger for size in sizes]
    parts = [int(40 * Fraction(str(weight))) for weight in weights]  # tenths and eighths: whole
    total = sum(parts)
    num_places = 3 * total // math.gcd(*parts) + 1  # three rounds of the schedule
    windows = WindowOrder(sizes, num_places, 0, weights).windows(0)
    sources, _ = by_source(windows, sizes)
    p = np.arange(1, num_places + 1)
    for source, part in enumerate(parts):
        counts = np.cumsum(sources == source)
        assert np.abs(counts * total - p * part).max() < total  # |count - p part / total| < 1


@some
@given(mixtures(), shared_batches(), seeds)
@example(([1, 1], [1.0, 1.0]), (8, 8), 0)
@example(([4, 6, 1], [0.5, 0.4, 0.1]), (6, 3), 2**64 - 1)
def test_every_window_of_a_source_comes_once_in_each_of_its_epochs(mixture, batch, seed):
    sizes, weights = mixture
    batch_size, world_size = batch
    order = WindowOrder(sizes, batch_size, seed, weights)
    steps = range(-(-300 // batch_size))
    windows = np.array([w for step in steps for w in global_batch(order, step, world_size)])
    assert 0 <= windows.min() <= windows.max() < sum(sizes)
    sources, numbers = by_source(windows, sizes)
    for source, size in enumerate(sizes):
        check_epochs(numbers[sources == source].tolist(), size)
    # And at least one source has been through more than one.
    assert max(np.bincount(sources, minlength=len(sizes)) / sizes) > 1


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("weight", [1.0, 0.1, 7.25])
def test_equal_weights_alternate(count, weight):
    order = WindowOrder([10] * count, 5, 0, [weight] * count)
    sources, _ = by_source(first_places(order, 7 * count), order.sizes)
    assert sources.tolist() == list(range(count)) * 7


@some
@given(numbers_of_windows, st.integers(1, 9), seeds, st.sampled_from([1.0, 0.3, 1000.0, 1e-9]))
def test_a_single_weighted_source_is_in_the_order_of_an_unweighted_one(n, batch_size, seed, weight):
    alone = WindowOrder(n, batch_size, seed)
    for other in (WindowOrder([n], batch_size, seed, [weight]), WindowOrder([n], batch_size, seed)):
        for step in (0, 1, 2, 10**9):
            assert other.windows(step).tolist() == alone.windows(step).tolist()


def test_seeds_epochs_and_sources_have_their_own_order():
    found = []
    for seed in (0, 1):
        order = WindowOrder([50, 50], 200, seed, [1.0, 1.0])
        sources, numbers = by_source(order.windows(0), order.sizes)  # two epochs of each source
        for source in (0, 1):
            mine = numbers[sources == source].tolist()
            found += [tuple(mine[:50]), tuple(mine[50:])]
    assert len(set(found)) == 8


@some
@given(mixtures(), st.sampled_from([Fraction(1, 10), Fraction(7), Fraction(40)]))
def test_weights_need_not_add_up_to_one(mixture, factor):
    """Only their proportion counts."""
    sizes, weights = mixture
    larger = [float(Fraction(str(weight)) * factor) for weight in weights]
    one, other = (WindowOrder(sizes, 30, 0, w).windows(3).tolist() for w in (weights, larger))
    assert one == other


def test_order_of_a_mixture_is_the_one_of_earlier_runs():
    """Frozen, for a run that is continued with a later version must go on in its own order."""
    order = WindowOrder([5, 3, 4], batch_size=10, seed=123, weights=[0.5, 0.3, 0.2])
    assert order.schedule.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    expected = [
        [4, 5, 2, 10, 3, 7, 1, 6, 0, 11],
        [3, 6, 4, 9, 1, 5, 2, 7, 0, 8],
        [0, 7, 4, 8, 2, 6, 1, 5, 3, 10],
    ]
    assert [order.windows(step).tolist() for step in range(3)] == expected
    assert order.windows(10**9).tolist() == [3, 6, 4, 8, 1, 5, 2, 7, 0, 11]


def test_huge_mixtures_cost_no_memory():
    tracemalloc.start()
    try:
        order = WindowOrder([10**12, 5, 10**12], 8, 0, [0.5, 0.2, 0.3])
        windows = order.windows(10**11)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert global_batch(order, 10**11, 4) == windows.tolist()
    sources, numbers = by_source(windows, order.sizes)
    assert set(sources.tolist()) == {0, 1, 2}
    assert all(0 <= number < order.sizes[n] for n, number in zip(sources, numbers, strict=True))
    huge = windows[sources != 1]
    assert len(set(huge.tolist())) == len(huge)
    assert len(set((huge // 10**9).tolist())) > 1  # from everywhere, not from the beginning


@pytest.mark.parametrize(
    ("num_windows", "weights", "message"),
    [
        ([10, 20], [1.0], "1 weights for 2 sources"),
        ([10, 20], [0.2, 0.3, 0.5], "3 weights for 2 sources"),
        ([10, 20], None, "1 weights for 2 sources"),
        (10, [0.5, 0.5], "2 weights for 1 sources"),
        ([10, 20], [0.00001, 1.0], "weights [1e-05, 1.0] repeat after 100001 windows only"),
    ],
)
def test_weights_that_do_not_fit_are_refused(num_windows, weights, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        WindowOrder(num_windows, 8, 0, weights)


# --------------------------------------------------------------------------- shares and schedule


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], [1]),
        ([0.3], [1]),
        ([0.5, 0.25], [2, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),  # as floats 0.1 + 0.2 is not 0.3
        ([2, 4, 6], [1, 2, 3]),
        ([1e-9, 3e-9], [1, 3]),
        ([1e20, 5e19], [2, 1]),
        ([0.99999, 0.00001], [99_999, 1]),  # the longest schedule there may be
    ],
)
def test_shares_of_known_weights(weights, expected):
    assert shares(weights) == expected


@many
@given(st.lists(decimals, min_size=1, max_size=6))
def test_shares_are_exact_and_the_smallest(weights):
    turns = shares(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    assert all(type(turn) is int for turn in turns)
    assert [Fraction(turn, sum(turns)) for turn in turns] == [w / sum(exact) for w in exact]
    assert math.gcd(*turns) == 1


@pytest.mark.parametrize(
    ("weights", "length"),
    [
        ([1.0, 100_000.0], LONGEST_SCHEDULE + 1),
        ([0.1 + 0.2, 0.7], 100_000_000_000_000_004 // 4),
        ([1e-300, 1.0], 10**300 + 1),
    ],
)
def test_a_schedule_that_is_too_long_is_refused(weights, length):
    message = f"weights {weights} repeat after {length} windows only"
    with pytest.raises(ValueError, match=re.escape(message)):
        shares(weights)


@many
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
@example([1, 1, 3])
@example([1])
@example([60, 1, 60, 1, 60, 1])
@example([30_000, 1, 7])
def test_schedule_keeps_each_date(turns):
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


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([1], [0]),
        ([1, 1], [0, 1]),
        ([2, 1], [0, 0, 1]),  # due at the same place: the first source
        ([1, 2], [1, 0, 1]),
        ([1, 1, 2], [2, 0, 1, 2]),
        ([2, 3], [1, 0, 1, 0, 1]),
    ],
)
def test_schedules_by_hand(turns, expected):
    assert schedule(turns).tolist() == expected


# -------------------------------------------------------------------------------------- the feed


class Rank:
    """One of many ranks, without a device."""

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size

    def pinned(self, *tensors):
        return list(tensors)

    to_device = pinned

    def sum(self, *values):
        return list(values)


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
    feeds = [
        Feed(Numbers(), order, micro_batch_size, Rank(rank, world_size))
        for rank in range(world_size)
    ]
    share = order.batch_size // world_size
    size = micro_batch_size or share
    batches = []
    for step in steps:
        batch = []
        for feed in feeds:
            parts = [input_ids[:, 0].tolist() for input_ids, _, _, _ in feed.batches(step)]
            assert [len(part) for part in parts] == [
                min(size, share - first) for first in range(0, share, size)
            ]
            batch += itertools.chain(*parts)
        batches.append(batch)
    return batches


micro_batch_sizes = st.none() | st.integers(1, 9)


@some
@given(st.integers(1, 60), shared_batches(), micro_batch_sizes, seeds)
@example(1, (8, 8), 1, 0)
@example(60, (64, 8), 3, 0)
def test_feed_of_all_ranks_is_every_window_once_per_epoch(n, batch, micro_batch_size, seed):
    batch_size, world_size = batch
    order = WindowOrder(n, batch_size, seed)
    steps = range(-(-2 * n // batch_size))
    places = list(itertools.chain(*fed(order, steps, world_size, micro_batch_size)))
    assert sorted(places[:n]) == list(range(n))
    assert sorted(places[n : 2 * n]) == list(range(n))


@some
@given(mixtures(), shared_batches(), micro_batch_sizes, seeds)
def test_feed_of_a_mixture_is_every_window_once_per_epoch(mixture, batch, micro_batch_size, seed):
    sizes, weights = mixture
    batch_size, world_size = batch
    order = WindowOrder(sizes, batch_size, seed, weights)
    batches = fed(order, range(-(-100 // batch_size)), world_size, micro_batch_size)
    sources, numbers = by_source(np.array(list(itertools.chain(*batches))), sizes)
    for source, size in enumerate(sizes):
        check_epochs(numbers[sources == source].tolist(), size)


@some
@given(anything, st.integers(1, 48), micro_batch_sizes, seeds, st.integers(0, 10**9))
@example((100, None), 48, 1, 0, 0)
@example(([5, 7], [0.7, 0.3]), 24, 2, 0, 0)
def test_feed_is_the_same_whatever_world_size_and_micro_batch(
    what, batch_size, micro_batch_size, seed, step
):
    num_windows, weights = what
    order = WindowOrder(num_windows, batch_size, seed, weights)
    expected = [order.windows(step).tolist(), order.windows(step + 1).tolist()]
    for world_size in (size for size in range(1, 9) if batch_size % size == 0):
        assert fed(order, (step, step + 1), world_size, micro_batch_size) == expected


@some
@given(anything, shared_batches(), micro_batch_sizes, seeds, st.integers(0, 8))
def test_a_resumed_feed_goes_on_as_the_uninterrupted_one(
    what, batch, micro_batch_size, seed, resumed_at
):
    num_windows, weights = what
    batch_size, world_size = batch
    arguments = num_windows, batch_size, seed, weights
    whole = fed(WindowOrder(*arguments), range(8), world_size, micro_batch_size)
    rest = fed(WindowOrder(*arguments), range(resumed_at, 8), world_size, micro_batch_size)
    assert rest == whole[resumed_at:]


# --------------------------------------------------------------------------------------- permute


def test_permute_is_a_bijection_of_any_size():
    for n, key in itertools.product(range(1, 301), [(0,), (1, 2), (2**64 - 1, 7, 3)]):
        index = np.arange(n)
        assert sorted(permute(index, n, key).tolist()) == list(range(n))
        assert index.tolist() == list(range(n))  # left as it was


@some
@given(st.integers(1, 10**15), seeds, st.data())
def test_permute_tells_each_place_alone(n, seed, draw):
    places = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    together = permute(np.array(places), n, (seed,)).tolist()
    assert together == [permute(np.array([place]), n, (seed,)).item() for place in places]
    assert len(set(together)) == len(set(places))
    assert all(0 <= window < n for window in together)


def test_permute_a_million_million():
    n = 10**12
    index = np.concatenate([np.arange(50_000), np.arange(n - 50_000, n), np.arange(0, n, 10**8)])
    index = np.unique(index)
    tracemalloc.start()
    try:
        windows = permute(index, n, (0, 0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(np.unique(windows)) == len(index)
    assert windows.min() >= 0
    assert windows.max() < n
    assert peak < 20 * index.nbytes  # by the places asked for, not by n
    tenths = np.bincount(windows // (n // 10), minlength=10)
    assert chi_square(tenths) < 40  # 9 degrees of freedom: exceeded by chance once in 100,000


def chi_square(counts: np.ndarray) -> float:
    """How far counts are from being all alike: about their number, less one, if by chance."""
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean())


@pytest.mark.parametrize("varied", ["seed", "epoch", "source"])
def test_permute_is_about_uniform(varied):
    place_of = ["seed", "epoch", "source"].index(varied)
    keys = [tuple(i if place == place_of else 0 for place in range(3)) for i in range(2000)]
    orders = np.array([permute(np.arange(6), 6, key) for key in keys])
    for place in range(6):  # bounds: exceeded by chance about once in 100,000
        assert chi_square(np.bincount(orders[:, place], minlength=6)) < 31
    for one, other in itertools.combinations(range(6), 2):
        pairs = np.bincount(orders[:, one] * 6 + orders[:, other], minlength=36)
        unequal = [6 * i + j for i in range(6) for j in range(6) if i != j]
        assert chi_square(pairs[unequal]) < 73
