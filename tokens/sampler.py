"""Which windows each step trains on: a pure function of (seed, step, rank, world size).

    order = WindowOrder(1000, batch_size=8, seed=0)
    order.windows(step=5)                       # the global batch of step 5: int64 (8,)
    order.windows(step=5, rank=1, world_size=2) # its second half

No shuffling state to save, and nothing to lose: step one million is found as fast as step one, of
a thousand windows or of 10^12. Needs numpy.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

MAX_PERIOD = 100_000  # places until a mixture's schedule repeats


class WindowOrder:
    """The order of windows of one source, or of several that are mixed.

    The training run reads places 0, 1, 2, ... of an endless sequence, `batch_size` a step. Of one
    source of n windows, place p lies in epoch p // n, and a permutation keyed with (seed, epoch)
    tells its window. So every window comes exactly once per epoch, and the global batch of a step
    is the same whatever the number of ranks.

    Of several sources, a schedule tells whose turn a place is, and how often it was that source's
    turn before: its j-th turn is the j-th place of its own sequence, with epochs of its own. Among
    any p first places a source has its weight's share of p, to within one window.

    num_windows: of the source, or a list, of each source; windows of the second are numbered
    behind those of the first, and so on. weights: of each source; they need not add up to 1.
    """

    def __init__(
        self,
        num_windows: int | list[int],
        batch_size: int,
        seed: int,
        weights: list[float] | None = None,
    ):
        self.sizes = [num_windows] if isinstance(num_windows, int) else num_windows
        self.batch_size = batch_size
        self.seed = seed
        turns = integer_weights(weights) if weights else [1]
        if len(turns) != len(self.sizes):
            raise ValueError(f"{len(turns)} weights for {len(self.sizes)} sources")
        self.offsets = np.cumsum([0, *self.sizes])[:-1]
        self.turns = np.array(turns)  # of each source in one round of the schedule
        self.schedule = schedule(turns)  # (round,) whose turn it is
        is_turn = self.schedule[:, None] == np.arange(len(turns))  # (round, sources)
        self.turns_before = np.cumsum(is_turn, axis=0) - is_turn

    def windows(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The windows of this rank at this step: int64 (batch_size / world_size,).

        The ranks' parts, one after the other, are the global batch.
        Raises ValueError when the batch cannot be shared out evenly.
        """
        if self.batch_size % world_size != 0:
            raise ValueError(f"batch_size={self.batch_size} over {world_size} ranks is uneven")
        share = self.batch_size // world_size
        first = step * self.batch_size + rank * share
        places = np.arange(first, first + share, dtype=np.int64)
        rounds, moments = np.divmod(places, len(self.schedule))
        sources = self.schedule[moments]
        turns = rounds * self.turns[sources] + self.turns_before[moments, sources]
        windows = np.empty_like(places)
        for source in np.unique(sources):
            mine = sources == source
            key = (self.seed,) if len(self.sizes) == 1 else (self.seed, int(source))
            windows[mine] = self.offsets[source] + shuffled(turns[mine], self.sizes[source], key)
        return windows

    def steps(
        self, first_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """This rank's windows of each step from first_step on: a batch sampler for DataLoader."""
        for step in itertools.count(first_step):
            yield self.windows(step, rank, world_size)


def shuffled(places: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Places of an endless sequence of epochs -> the one of n items at each place."""
    epochs = places // n
    items = np.empty_like(places)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        items[inside] = permute(places[inside] % n, n, (key[0], int(epoch), *key[1:]))
    return items


def integer_weights(weights: list[float]) -> list[int]:
    """Weights as whole numbers in the same proportion, as small as can be: .5, .25 -> 2, 1.

    Decimals are taken as they are written, so nothing is rounded.
    Raises ValueError when their proportion needs a schedule that is too long.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    unit = Fraction(1, math.lcm(*(weight.denominator for weight in exact)))
    turns = [int(weight / unit) for weight in exact]
    turns = [turn // math.gcd(*turns) for turn in turns]
    if sum(turns) > MAX_PERIOD:
        raise ValueError(f"weights {weights} repeat after {sum(turns)} windows only")
    return turns


def schedule(turns: list[int]) -> np.ndarray:
    """Whose turn it is at each of sum(turns) places, each source's turns spread evenly.

    Source i has t of n turns. Its j-th turn (from 0) may come from the place on in which j n / t
    lies, and has to come before place (j + 1) n / t; then at any place it is less than one turn
    ahead or behind. Taking the turn that is due first, of those that may come, keeps all these
    dates (earliest deadline first; Liu and Layland 1973, Baruah et al. 1996).
    """
    n = sum(turns)
    waiting = [(0, source, 0) for source in range(len(turns))]  # (may come at, source, turn)
    heapq.heapify(waiting)
    due: list[tuple[int, int, int]] = []
    order = np.empty(n, np.int64)
    for place in range(n):
        while waiting and waiting[0][0] <= place:
            _, source, turn = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(turn + 1) * n // turns[source]), source, turn))
        _, source, turn = heapq.heappop(due)
        order[place] = source
        if turn + 1 < turns[source]:
            heapq.heappush(waiting, ((turn + 1) * n // turns[source], source, turn + 1))
    return order


def permute(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """A keyed permutation of 0..n-1, evaluated at `index` only: O(1) memory for any n.

    A Feistel network permutes the smallest 4^k that holds n; a result of n or more is sent
    through again until it falls below n ("cycle walking"; Black and Rogaway 2002), four times at
    most on average. Eight rounds, each mixed with the finaliser of SplitMix64 (Steele et al. 2014).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64(2**half_bits - 1), np.uint64(half_bits)
    round_keys = _round_keys(key)

    def once(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_splitmix64(right + round_key) & mask)
        return left << shift | right

    result = once(np.asarray(index).astype(np.uint64))
    while (outside := result >= n).any():
        result[outside] = once(result[outside])
    return result.astype(np.int64)


@functools.lru_cache(64)
def _round_keys(key: tuple[int, ...]) -> list[np.ndarray]:
    """A key for each of the eight rounds: uint64 (1,)."""
    round_key = np.zeros(1, np.uint64)
    for part in key:
        round_key = _splitmix64(round_key ^ np.uint64(part % 2**64))
    return [_splitmix64(round_key + np.uint64(i)) for i in range(8)]


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64: every bit of the input changes half the bits of the output. uint64, wrapping."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
