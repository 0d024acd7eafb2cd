"""Reads the heads of runs from their snapshot files, to compare them (headlens/matching.py).

runs = read_runs([Path("runs/a/attention"), ...])
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .heads import ALL_NAMES, title_of
from .matching import MATCHED_FROM, Group, directions, similarities
from .snapshot_data import SnapshotData, read_snapshot, snapshot_files


class RunError(ValueError):
    """A run that cannot be read, or that cannot be compared with the first run."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


@dataclass
class MatchedRun:
    """The heads of a run."""

    name: str
    texts: list[str]  # of the compared prompts
    periods: list[int]  # of the compared prompts; 0 for a text
    codes: list[np.ndarray]  # weights at the last step: for each prompt uint8 (L, H, N)
    directions: list[np.ndarray]
    steps: list[int]
    similar: np.ndarray  # similarity of each head at each step to its last map, (steps, L, H)
    names: list[list[str]]  # of each head of each layer, keys as in lens.heads

    def since_step(self, layer: int, head: int) -> int | None:
        """Returns the first step from which the head is similar to its last map; None for a
        uniform head."""
        is_similar = self.similar[:, layer, head] >= MATCHED_FROM
        first = len(is_similar) - int(np.logical_and.accumulate(is_similar[::-1]).sum())
        return self.steps[first] if first < len(is_similar) else None


def read_runs(paths: Iterable[Path]) -> list[MatchedRun]:
    """Returns the runs with the prompts that all have. paths: of their folders "attention", or of
    single snapshot files. Raises RunError."""
    found = [(path, _files(path)) for path in paths]
    if not found:
        return []
    last_of = {path: _read(path, files[-1]) for path, files in found}
    first, last = next(iter(last_of.items()))
    shape, prompts = last.row.names.shape, _tokens(last)
    for path, last in last_of.items():
        if (other := last.row.names.shape) != shape:
            reason = "{} layers of {} heads, but {} has {} of {}".format(*other, first, *shape)
            raise RunError(path, reason)
        prompts = [of_prompt for of_prompt in prompts if of_prompt in _tokens(last)]
        if not prompts:
            raise RunError(path, "has no prompt with the same tokens as all runs before it")
    runs = [_load(path, files, last_of[path], prompts) for path, files in found]
    count = Counter(run.name for run in runs)
    for number, run in enumerate(runs, start=1):
        if count[run.name] > 1:
            run.name = f"{run.name} ({number})"
    return runs


def group_title(group: Group, runs: Sequence[MatchedRun]) -> str:
    """Returns the title of the most frequent name of the heads of a group."""
    names = [runs[n].names[group.layer][member.head] for n, member in group.members.items()]
    if any(names):
        return title_of(Counter(filter(None, names)).most_common(1)[0][0])
    return "no name"


def head_rows(groups: Sequence[Group], runs: Sequence[MatchedRun]) -> list[dict]:
    """Returns a row for each head of each run, in the order of the groups."""
    return [
        {
            "layer": group.layer,
            "group": number,
            "group_title": group_title(group, runs),
            "runs": len(group.members),
            "stability": round(group.stability, 4),
            "interchangeable": group.is_ambiguous,
            "run": runs[run].name,
            "head": member.head,
            "name": runs[run].names[group.layer][member.head],
            "similarity": round(member.similarity, 4),
            "margin": round(member.margin, 4),
            "similar_since": runs[run].since_step(group.layer, member.head),
        }
        for number, group in enumerate(groups, start=1)
        for run, member in group.members.items()
    ]


def _files(path: Path) -> list[Path]:
    files = [path] if path.suffix == ".npz" else snapshot_files(path)
    if not files:
        raise RunError(path, "has no snapshots")
    return files


def _read(path: Path, file: Path) -> SnapshotData:
    try:
        return read_snapshot(file)
    except ValueError as error:
        raise RunError(path, str(error)) from error


def _tokens(snapshot: SnapshotData) -> list[list[str]]:
    return [prompt.tokens for prompt in snapshot.prompts]


def _load(
    path: Path, files: Sequence[Path], last: SnapshotData, prompts: Sequence[list[str]]
) -> MatchedRun:
    """Returns a run. prompts: the tokens of the compared prompts. Uses the snapshots that have the
    prompts of the last one, and has one of them in memory at a time."""
    places = [_tokens(last).index(tokens) for tokens in prompts]

    def compared(snapshot: SnapshotData) -> list[np.ndarray]:
        return directions([snapshot.codes[place] for place in places])

    at_end, steps, similar = compared(last), [], []
    for snapshot in (_read(path, file) for file in files):
        if snapshot.prompts == last.prompts:
            steps.append(snapshot.step)
            similar.append(similarities(compared(snapshot), at_end).diagonal(axis1=1, axis2=2))
    return MatchedRun(
        name=last.run,
        texts=[last.prompts[place].text for place in places],
        periods=[last.prompts[place].period for place in places],
        codes=[last.codes[place] for place in places],
        directions=at_end,
        steps=steps,
        similar=np.stack(similar),
        names=np.array(ALL_NAMES)[last.row.names].tolist(),
    )
