"""Reads runs from pages of the lens, to compare their heads (lens/matching.py).

runs = read_runs([Path("runs/a/attention/timelapse.html"), ...])
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .heads import ALL_NAMES, title_of
from .matching import MATCHED_FROM, Group, directions, similarities
from .page import codes_of, read, unpacked


class PageError(ValueError):
    """A page that cannot be read, or that cannot be compared with the first page."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


@dataclass
class MatchedRun:
    """The heads of a run, from the data of its page."""

    name: str
    texts: list[str]  # of the compared prompts
    repeated: list[bool]  # whether a prompt is the repeated sequence
    codes: list[np.ndarray]  # weights at the last step: for each prompt uint8 (L, H, N)
    directions: list[np.ndarray]
    steps: list[int]
    similar: np.ndarray  # similarity of each head at each step to its last map, (steps, L, H)
    # Of each head of each layer, keys as in lens.heads; None in a page of an older version.
    names: list[list[str]] | None

    def name_of(self, layer: int, head: int) -> str:
        return self.names[layer][head] if self.names else ""

    def since_step(self, layer: int, head: int) -> int | None:
        """Returns the first step from which the head is similar to its last map; None for a
        uniform head."""
        is_similar = self.similar[:, layer, head] >= MATCHED_FROM
        first = len(is_similar) - int(np.logical_and.accumulate(is_similar[::-1]).sum())
        return self.steps[first] if first < len(is_similar) else None


def read_runs(paths: Iterable[Path]) -> list[MatchedRun]:
    """Returns the runs of all pages, with the prompts that all pages have. Raises PageError."""
    found = []  # (path, data, numbers of layers and heads, tokens of each prompt)
    for path in paths:
        with _page_errors(path):
            found += [(path, data, _shape(data), _tokens(data)) for data in read(path)]
    if not found:
        return []
    first, _, shape, prompts = found[0]
    for path, _, other, tokens in found:
        if other != shape:
            reason = "{} layers of {} heads, but {} has {} of {}".format(*other, first, *shape)
            raise PageError(path, reason)
        prompts = [of_prompt for of_prompt in prompts if of_prompt in tokens]
        if not prompts:
            raise PageError(path, "has no prompt with the same tokens as all pages before it")
    runs = []
    for path, data, _, _ in found:
        with _page_errors(path):
            runs.append(_load(data, prompts))
    count = Counter(run.name for run in runs)
    for number, run in enumerate(runs, start=1):
        if count[run.name] > 1:
            run.name = f"{run.name} ({number})"
    return runs


def group_title(group: Group, runs: Sequence[MatchedRun]) -> str:
    """Returns the title of the most frequent name of the heads of a group."""
    names = [runs[n].name_of(group.layer, member.head) for n, member in group.members.items()]
    if any(names):
        return title_of(Counter(filter(None, names)).most_common(1)[0][0])
    return "no name" if any(runs[n].names for n in group.members) else "name unknown"


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
            "name": runs[run].name_of(group.layer, member.head),
            "similarity": round(member.similarity, 4),
            "margin": round(member.margin, 4),
            "similar_since": runs[run].since_step(group.layer, member.head),
        }
        for number, group in enumerate(groups, start=1)
        for run, member in group.members.items()
    ]


@contextlib.contextmanager
def _page_errors(path: Path) -> Iterator[None]:
    """Converts the errors of a page with invalid data to PageError."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        found = isinstance(error, OSError) and error.strerror
        raise PageError(path, found or "not a valid page of the lens") from error


def _shape(data: dict) -> tuple[int, int]:
    """Returns the numbers of layers and heads."""
    layers, heads = data["layers"], data["heads"]
    if not all(type(number) is int and number > 0 for number in (layers, heads)):
        raise ValueError("no layers or heads")
    return layers, heads


def _tokens(data: dict) -> list[list[str]]:
    return [list(prompt["tokens"]) for prompt in data["prompts"]]


def _load(data: dict, prompts: Sequence[list[str]]) -> MatchedRun:
    """Returns a run from the data of its page. prompts: the tokens of the compared prompts."""
    of_page = _tokens(data)
    places = [of_page.index(tokens) for tokens in prompts]

    def compared(frame: dict) -> list[np.ndarray]:
        codes = codes_of(data, frame)
        return [codes[place] for place in places]

    codes = compared(data["frames"][-1])
    last = directions(codes)
    similar = [
        similarities(directions(compared(frame)), last).diagonal(axis1=1, axis2=2)
        for frame in data["frames"]
    ]
    return MatchedRun(
        name=str(data["name"]),
        texts=[str(data["prompts"][place]["text"]) for place in places],
        repeated=[bool(data["prompts"][place]["period"]) for place in places],
        codes=codes,
        directions=last,
        steps=[int(frame["step"]) for frame in data["frames"]],
        similar=np.stack(similar),
        names=_names(data),
    )


def _names(data: dict) -> list[list[str]] | None:
    """Returns the name of each head at the last step, or None for a page of an older version."""
    history = json.loads(unpacked(data["history"]))
    if "names" not in history:
        return None
    return np.array(ALL_NAMES)[np.reshape(history["names"][-1], _shape(data))].tolist()
