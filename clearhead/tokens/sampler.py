"""Sampler: the windows of each step are a pure function of (seed, step, rank, world size).

    order = WindowOrder(1000, batch_size=8, seed=0)
    order.windows(step=5)                       # the global batch of step 5: int64 (8,)
    order.windows(step=5, rank=1, world_size=2) # its second half

The sampler has no state, so a checkpoint does not store one. The time per step does not depend on
the step or on the number of windows. Needs numpy.
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from clearhead.tokens import MIXTURE_BLOCK


class WindowOrder:
    """The order in which training reads the windows of one source or of a mixture of sources.

    Training reads positions 0, 1, 2, ... of an endless sequence, `batch_size` positions per step.
    With one source of n windows, position p is in epoch p // n, and a permutation with the key
    (seed, epoch) selects its window. So every window is read exactly once per epoch, and the global
    batch of a step does not depend on the number of ranks.

    With several sources, a hash of the position selects the source: each 1,000 positions are
    permuted, with the key (seed, number of these 1,000), and source i has 1,000 w_i / sum(w) of
    them, rounded. Each source is an endless sequence of windows, with its own epochs; each 1,000
    positions read the next windows of the sequence, in random order. Among the first p positions, a
    source with the share s has p s windows, with a standard deviation of at most
    sqrt(p s (1 - s)), which is never above 8.

    num_windows: per epoch of the source, or a list with one number per source. Windows are numbered
    consecutively: those of source 1 follow those of source 0. weights: one per source, of any sum.
    phases: the versions of each window; n is added to the number of a window for the next version
    (data.ShiftedWindows). A hash of (seed, epoch) selects the version that an epoch reads.
    """

    def __init__(
        self,
        num_windows: int | list[int],
        batch_size: int,
        seed: int,
        weights: list[float] | None = None,
        phases: int | list[int] = 1,
    ):
        self.sizes = [num_windows] if isinstance(num_windows, int) else num_windows
        self.batch_size = batch_size
        self.seed = seed
        weights = weights or [1.0]
        if len(weights) != len(self.sizes):
            raise ValueError(f"got {len(weights)} weights, need {len(self.sizes)}: one per source")
        self.phases = [phases] * len(self.sizes) if isinstance(phases, int) else phases
        self.offsets = np.cumsum([0, *np.multiply(self.sizes, self.phases)])[:-1]
        shares = np.cumsum([0, *weights]) / sum(weights)
        # Source i has the positions ends[i] to ends[i + 1] - 1 of each MIXTURE_BLOCK, permuted.
        self.ends = (shares * MIXTURE_BLOCK + 0.5).astype(np.int64)

    def windows(self, step: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """Returns the windows of this rank at this step: int64 (batch_size / world_size,).

        The global batch is the concatenation of the windows of rank 0, 1, ... Raises ValueError if
        world_size does not divide batch_size.
        """
        if self.batch_size % world_size != 0:
            raise ValueError(f"batch_size={self.batch_size} is not divisible by {world_size} ranks")
        per_rank = self.batch_size // world_size
        first = step * self.batch_size + rank * per_rank
        positions = np.arange(first, first + per_rank, dtype=np.int64)
        if len(self.sizes) == 1:
            return shuffled(positions, self.sizes[0], (self.seed,), self.phases[0])
        slots = shuffled(positions, MIXTURE_BLOCK, (self.seed, len(self.sizes)))
        sources = np.searchsorted(self.ends, slots, side="right") - 1
        # The positions in the sequence of the source.
        counts, before = np.diff(self.ends)[sources], self.ends[sources]
        positions_in_source = positions // MIXTURE_BLOCK * counts + slots - before
        windows = np.empty_like(positions)
        for source in np.unique(sources):
            rows, key = sources == source, (self.seed, int(source))
            size, phases = self.sizes[source], self.phases[source]
            own = shuffled(positions_in_source[rows], size, key, phases)
            windows[rows] = self.offsets[source] + own
        return windows

    def steps(
        self, first_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """Yields this rank's windows, step by step from first_step: a DataLoader batch sampler."""
        for step in itertools.count(first_step):
            yield self.windows(step, rank, world_size)


def shuffled(positions: np.ndarray, n: int, key: tuple[int, ...], phases: int = 1) -> np.ndarray:
    """Returns the item at each position of an endless sequence of shuffled epochs: 0 to n - 1, plus
    n times the phase of the epoch."""
    epochs = positions // n
    items = np.empty_like(positions)
    for epoch in np.unique(epochs):
        rows, of_epoch = epochs == epoch, (key[0], int(epoch), *key[1:])
        phase = int(_round_keys((*of_epoch, phases))[0][0] % np.uint64(phases))
        items[rows] = permute(positions[rows] % n, n, of_epoch) + phase * n
    return items


def permute(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Evaluates a pseudorandom permutation of 0, ..., n - 1 at `index`. The key selects it.

    Nothing of size n is stored. A Feistel network permutes 0, ..., 4^k - 1, for the smallest 4^k
    that is at least n. A result that is not below n is permuted again until it is ("cycle walking";
    Black and Rogaway 2002), at most four times on average. The network has eight rounds, each with
    the finaliser of SplitMix64 (Steele et al. 2014). Up to 16 items are sorted by random numbers:
    with two bits in each half, the network does not give all orders equally often.
    """
    if n <= 16:
        random = _splitmix64(_round_keys(key)[0] + np.arange(n, dtype=np.uint64))
        return random.argsort()[index]
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64(2**half_bits - 1), np.uint64(half_bits)
    round_keys = _round_keys(key)

    def feistel(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_splitmix64(right + round_key) & mask)
        return left << shift | right

    result = feistel(np.asarray(index).astype(np.uint64))
    while (outside := result >= n).any():
        result[outside] = feistel(result[outside])
    return result.astype(np.int64)


@functools.lru_cache(64)
def _round_keys(key: tuple[int, ...]) -> list[np.ndarray]:
    """Returns a key for each of the eight rounds: uint64 (1,)."""
    round_key = np.zeros(1, np.uint64)
    for part in key:
        round_key = _splitmix64(round_key ^ np.uint64(part % 2**64))
    return [_splitmix64(round_key + np.uint64(i)) for i in range(8)]


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64 (uint64, wraps): each input bit changes about half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
