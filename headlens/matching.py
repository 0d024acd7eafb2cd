"""Matches the heads of several runs by the similarity of their attention maps.

    runs = read_runs([runs/NAME/attention, ...])  # headlens/matching_runs.py
    pairs = all_pairs([run.directions for run in runs])
    groups = match_heads(pairs)

The order of the heads of a layer has no meaning: two runs with different seeds can learn the same
head at different places. The similarity of two heads is the cosine of their attention weights A and
B after subtracting uniform attention U, where U[q, k] = 1 / (q + 1), as a mean over prompts:

    similarity = mean over prompts of  <A - U, B - U> / (|A - U| |B - U|)

1: equal maps; about 0: unrelated maps. Without the subtraction, almost all maps are similar. A head
that is uniform on a prompt has no direction there: its cosine is 0. A prompt on which both heads
are uniform does not count.

A group has at most one head of each run, all in the same layer. Runs are added sequentially, each
by an optimal assignment of its heads to the groups of the runs before.

Shapes: L layers, H heads, T tokens, N = T (T + 1) / 2 weights, R runs, G groups of a layer.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .recording import to_codes
from .snapshot_data import from_codes
from .statistics import uniform_attention

MATCHED_FROM = 0.5  # smallest similarity of a match
UNIFORM_BELOW = 0.03  # mean total variation distance to uniform attention
CLEAR_FROM = 0.1  # smallest margin of a match that is not ambiguous


@dataclass
class Member:
    """A head of a group."""

    head: int
    similarity: float  # mean over the other heads of the group; 0 without others
    # similarity minus the best alternative: this head in another group, or another head of this run
    # in this group
    margin: float


@dataclass
class Group:
    """Matched heads of a layer, at most one of each run."""

    layer: int
    members: dict[int, Member]  # by the number of the run
    stability: float  # mean similarity over all pairs of runs; 0 for a pair without both heads

    @property
    def margin(self) -> float:
        """The smallest margin of its heads."""
        return min(member.margin for member in self.members.values())

    @property
    def is_ambiguous(self) -> bool:
        """Whether another choice of heads fits almost as well."""
        return len(self.members) > 1 and self.margin < CLEAR_FROM


def directions(codes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns A - U of each head with length 1, or 0 if the head is uniform.

    codes: for each prompt uint8 (L, H, N), as in a snapshot. -> for each prompt fp32 (L, H, N).
    """
    found = []
    for of_prompt in codes:
        length = int((2 * of_prompt.shape[-1]) ** 0.5)
        uniform = to_codes(uniform_attention(length)[0]).numpy()[np.tril_indices(length)]
        difference = from_codes(of_prompt) - from_codes(uniform)  # 0 for a uniform head
        distance = np.abs(difference).sum(-1, keepdims=True) / 2 / max(length - 1, 1)
        norm = np.linalg.norm(difference, axis=-1, keepdims=True)
        is_uniform = distance < UNIFORM_BELOW
        found.append(np.where(is_uniform, 0, difference / np.where(is_uniform, 1, norm)))
    return found


def similarities(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the similarity of each head of one run to each of another one, (L, H, H)."""
    total, count = 0, 0
    for a, b in zip(first, second, strict=True):
        total = total + a @ b.transpose(0, 2, 1)
        defined = np.any(a, axis=-1)[:, :, None] | np.any(b, axis=-1)[:, None]
        count = count + defined
    return total / np.maximum(count, 1)


def assign(values: np.ndarray) -> np.ndarray:
    """Returns a different column for each row, so that the sum of their values is the largest.

    values: (rows, columns), at least as many columns as rows. Raises ImportError without scipy.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise ImportError("matching heads needs scipy: pip install scipy") from error

    return linear_sum_assignment(values, maximize=True)[1]


def match_heads(pairs: np.ndarray) -> list[Group]:
    """Returns the groups of all layers; of each layer, those in the most runs first, then the most
    stable. pairs: the similarities of all pairs of runs, (R, R, L, H, H)."""
    groups = [
        group
        for layer in range(pairs.shape[2])
        for group in _measured(layer, pairs[:, :, layer], _match_layer(pairs[:, :, layer]))
    ]
    return sorted(groups, key=lambda group: (group.layer, -len(group.members), -group.stability))


def all_pairs(runs: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Returns the similarities of all pairs of runs, (R, R, L, H, H). runs: their directions."""
    return np.stack([np.stack([similarities(a, b) for b in runs]) for a in runs])


def mean_similarity(pairs: np.ndarray) -> np.ndarray:
    """Returns the mean similarity of the heads of two runs, optimally assigned, (R, R)."""
    rows = np.arange(pairs.shape[-1])
    flat = pairs.reshape(-1, *pairs.shape[-2:])  # (R * R * L, H, H)
    best = [values[rows, assign(values)].mean() for values in flat]
    return np.reshape(best, pairs.shape[:3]).mean(-1)


def _match_layer(pairs: np.ndarray) -> np.ndarray:
    """Returns the head of each group in each run, -1 for none. (R, R, H, H) -> (G, R)."""
    num_runs, _, num_heads, _ = pairs.shape
    groups = np.full((num_heads, num_runs), -1)
    groups[:, 0] = np.arange(num_heads)
    for run in range(1, num_runs):
        values = _to_groups(pairs, groups, run)
        is_similar = values >= MATCHED_FROM
        assigned = assign(np.where(is_similar, values, 0))
        matched = is_similar[np.arange(num_heads), assigned]
        groups[assigned[matched], run] = np.flatnonzero(matched)
        new = np.full((num_heads - matched.sum(), num_runs), -1)
        new[:, run] = np.flatnonzero(~matched)
        groups = np.concatenate([groups, new])
    return groups


def _to_groups(pairs: np.ndarray, groups: np.ndarray, run: int) -> np.ndarray:
    """Returns the mean similarity of each head of a run to the heads of each group in other runs,
    (H, G); 0 for a group without such heads."""
    total, count = 0, 0
    for other in range(len(pairs)):
        if other != run:
            is_member = groups[:, other] >= 0
            total = total + pairs[run, other][:, groups[:, other]] * is_member
            count = count + is_member
    return total / np.maximum(count, 1)


def _measured(layer: int, pairs: np.ndarray, groups: np.ndarray) -> list[Group]:
    """Returns the groups (G, R) of a layer with similarities, margins and stability."""
    num_runs = len(pairs)
    tables = [_to_groups(pairs, groups, run) for run in range(num_runs)]  # (H, G) each
    measured = []
    for number, of_runs in enumerate(groups.tolist()):
        heads = {run: head for run, head in enumerate(of_runs) if head >= 0}
        members = {}
        for run, head in heads.items():
            table = tables[run]
            others = [*np.delete(table[head], number), *np.delete(table[:, number], head), 0]
            similarity = float(table[head, number])
            members[run] = Member(head, similarity, similarity - float(max(others)))
        values = [pairs[a, b, heads[a], heads[b]] for a, b in itertools.combinations(heads, 2)]
        stability = float(sum(values)) / math.comb(num_runs, 2)
        measured.append(Group(layer, members, stability))
    return measured
