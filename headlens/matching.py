"""Matches the heads of several runs by the similarity of their attention maps.

    rows, names, mean = matched_heads([Path("runs/a/attention"), Path("runs/b/attention")])

The order of the heads of a layer has no meaning: two runs with different seeds can learn the same
head at different places. The similarity of two heads is the cosine of their attention weights A and
B after subtracting uniform attention, as a mean over prompts:

    similarity = mean over prompts of  <A - U, B - V> / (|A - U| |B - V|)

U and V: uniform attention on the keys that the queries can see, with the row sums of A and of B.

1: equal maps; about 0: unrelated maps. Without the subtraction, almost all maps are similar. A head
that is uniform on a prompt has no direction there: its cosine is 0. A prompt on which both heads
are uniform does not count.

Shapes: L layers, H heads, T tokens, N = T (T + 1) / 2 weights, R runs, G groups of a layer.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .heads import ALL_NAMES, title_of
from .snapshot_data import SnapshotData, from_codes, last_snapshot, read_snapshot
from .statistics import row_sums

MATCHED_FROM = 0.5  # smallest similarity of a match
UNIFORM_BELOW = 0.03  # mean total variation distance to uniform attention


@dataclass
class MatchedRun:
    """The heads of a run."""

    name: str
    directions: list[np.ndarray]  # at the last step, on the compared prompts
    names: np.ndarray  # of each head, keys as in heads.py, (L, H)
    layers: list[int]  # their numbers in the model


def matched_heads(paths: Iterable[Path]) -> tuple[list[dict], list[str], np.ndarray]:
    """Returns a row for each head of each run, see match_heads, the names of the runs, and the mean
    similarity of two runs, (R, R). paths: of at least two runs, as for read_runs."""
    runs = read_runs(paths)
    pairs = all_pairs(runs)
    return match_heads(runs, pairs), [run.name for run in runs], mean_similarity(pairs)


def read_runs(paths: Iterable[Path]) -> list[MatchedRun]:
    """Returns the runs, on the prompts that all have. Snapshots of one run have the step in their
    name, and other runs of the same name a number. paths: of their folders "attention", or of
    single snapshot files. Raises ValueError for a run that cannot be read or compared."""
    last_of = []
    for path in paths:
        last = read_snapshot(path) if path.suffix == ".npz" else last_snapshot(path)
        if not last:
            raise ValueError(f"{path} has no snapshots")
        last_of.append(last)
    shapes = {last.row.names.shape for last in last_of}
    if len(shapes) > 1:
        raise ValueError(f"the runs have different numbers of (layers, heads): {sorted(shapes)}")
    if any(last.row.layers != last_of[0].row.layers for last in last_of):
        found = " and ".join(sorted({str(last.row.layers) for last in last_of}))
        raise ValueError(f"the runs have attention in different layers: {found}")
    prompts = [p for p in tokens_of(last_of[0]) if all(p in tokens_of(last) for last in last_of)]
    if not prompts:
        raise ValueError("the runs have no prompt with the same tokens")
    runs = []
    for last in last_of:
        places = [tokens_of(last).index(tokens) for tokens in prompts]
        at_end = directions(*zip(*((last.codes[n], last.chances(n)) for n in places), strict=True))
        names = np.array(ALL_NAMES)[last.row.names]
        runs.append(MatchedRun(last.run, at_end, names, last.row.layers))
    names, steps = [run.name for run in runs], [last.step for last in last_of]
    for number, (run, step) in enumerate(zip(runs, steps, strict=True), start=1):
        same = [at for name, at in zip(names, steps, strict=True) if name == run.name]
        by_step = len({*same}) == len(same)
        if len(same) > 1:
            run.name += f" step {step:,}" if by_step else f" ({number})"
    return runs


def tokens_of(snapshot: SnapshotData) -> list[list[str]]:
    """Returns the tokens of each prompt."""
    return [prompt.tokens for prompt in snapshot.prompts]


def directions(codes: Sequence[np.ndarray], chances: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns A - U of each head with length 1, or 0 if the head is uniform.

    codes: for each prompt uint8 (L, H, N), as in a snapshot. chances: for each prompt uniform
    attention in each layer, (L, N). -> for each prompt fp32 (L, H, N).
    """
    found = []
    for of_prompt, of_layers in zip(codes, chances, strict=True):
        length = int((2 * of_prompt.shape[-1]) ** 0.5)
        weights = from_codes(of_prompt)
        difference = weights - of_layers[:, None] * row_sums(weights)
        distance = np.abs(difference).sum(-1, keepdims=True) / 2 / max(length - 1, 1)
        norm = np.linalg.norm(difference, axis=-1, keepdims=True)
        is_uniform = distance < UNIFORM_BELOW
        found.append(np.where(is_uniform, 0, difference / np.where(is_uniform, 1, norm)))
    return found


def similarities(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the similarity of each head of one run to each of another one, (L, H, H). first,
    second: their directions."""
    total, count = 0, 0
    for a, b in zip(first, second, strict=True):
        total = total + a @ b.transpose(0, 2, 1)
        defined = np.any(a, axis=-1)[:, :, None] | np.any(b, axis=-1)[:, None]
        count = count + defined
    return total / np.maximum(count, 1)


def all_pairs(runs: Sequence[MatchedRun]) -> np.ndarray:
    """Returns the similarities of all pairs of runs, (R, R, L, H, H)."""
    return np.stack(
        [np.stack([similarities(a.directions, b.directions) for b in runs]) for a in runs]
    )


def mean_similarity(pairs: np.ndarray) -> np.ndarray:
    """Returns the mean similarity of the heads of two runs, optimally assigned, (R, R)."""
    rows = np.arange(pairs.shape[-1])
    flat = pairs.reshape(-1, *pairs.shape[-2:])  # (R * R * L, H, H)
    best = [values[rows, assign(values)].mean() for values in flat]
    return np.reshape(best, pairs.shape[:3]).mean(-1)


def assign(values: np.ndarray) -> np.ndarray:
    """Returns a different column for each row, so that the sum of their values is the largest.

    values: (rows, columns), at least as many columns as rows. Raises ImportError without scipy.
    """
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(values, maximize=True)[1]


def match_heads(runs: Sequence[MatchedRun], pairs: np.ndarray) -> list[dict]:
    """Returns a row for each head of each run. pairs: all_pairs(runs).

    A group has at most one head of each run, all in the same layer. The rows of a group follow each
    other; of a layer, the groups of the most runs are first, then the most stable. stability: the
    mean similarity over all pairs of runs, 0 for a pair without both heads. similarity: to the
    other heads of the group.
    """
    rows, number = [], itertools.count(1)
    for layer in range(pairs.shape[2]):
        of_layer = pairs[:, :, layer]
        members = _groups(of_layer)
        tables = [_to_groups(of_layer, members, run) for run in range(len(runs))]  # (H, G) each
        groups = []
        for place, of_runs in enumerate(members.tolist()):
            heads = {run: head for run, head in enumerate(of_runs) if head >= 0}
            both = [of_layer[a, b, heads[a], heads[b]] for a, b in itertools.combinations(heads, 2)]
            groups.append((place, heads, float(sum(both)) / math.comb(len(runs), 2)))
        for place, heads, stability in sorted(
            groups, key=lambda group: (-len(group[1]), -group[2])
        ):
            names = Counter(filter(None, (runs[run].names[layer, h] for run, h in heads.items())))
            title = title_of(names.most_common(1)[0][0]) if names else "no name"
            group = {"layer": runs[0].layers[layer], "group": next(number), "group_title": title}
            group |= {"runs": len(heads), "stability": round(stability, 4)}
            for run, head in heads.items():
                values = {"run": runs[run].name, "head": head, "name": runs[run].names[layer, head]}
                values["similarity"] = round(float(tables[run][head, place]), 4)
                rows.append(group | values)
    return rows


def _groups(pairs: np.ndarray) -> np.ndarray:
    """Returns the head of each group of a layer in each run, -1 for none: (R, R, H, H) -> (G, R).
    Each run is added by an optimal assignment of its heads to the groups of the runs before."""
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
    others = [other for other in range(len(pairs)) if other != run]
    values = np.stack([pairs[run, other][:, groups[:, other]] for other in others])  # (R-1, H, G)
    is_member = groups[:, others].T[:, None] >= 0
    return (values * is_member).sum(0) / np.maximum(is_member.sum(0), 1)
