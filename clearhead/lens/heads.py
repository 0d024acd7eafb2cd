"""The name of each head, and the table of all heads, heads.csv.

A head has the name of a statistic, such as "induction", if it attends to the key tokens of this
statistic clearly more than uniform attention does. v is the value of the statistic, which is a mean
weight, and c is its value for uniform attention:

    significance = (v - c) / (1 - c)     0: as uniform attention; 1: all weight on these key tokens

A head can have the name of a statistic if its significance is at least `named_from` (see KINDS) on
every prompt on which the statistic is defined. So a head that attends to a certain word, which is
the first token of one prompt, is not a first-token head. If several names are possible, it has the
one with the largest significance (the smallest over prompts). If none is, it is "positional" if its
statistic `positional` is at least `named_from`, "uniform" if its entropy is at least UNIFORM_FROM,
and else it has no name, "".

Shapes: L layers, H heads.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .history import Row, json_values
from .statistics import STATISTICS


@dataclass(frozen=True)
class Kind:
    """Heads with a name: how the page and the report show them, and when a head gets the name. The
    key in KINDS is the name and that of the statistic that decides."""

    letter: str  # the sign of the heads on the page
    meaning: str  # one sentence
    target: str  # of the mean weight that the statistic measures: "mean weight on ..."
    named_from: float = 0.25  # the significance that a name needs
    is_simple: bool = False  # says least, such as attention to the token itself


KINDS = {
    "previous_token": Kind("P", "Each token attends to the token before it.", "the token before"),
    "induction": Kind(
        "I",
        "Each token attends to the token that followed its earlier occurrence. So the model can"
        " continue a sequence that it has seen before.",
        "the token after it in copy 1",
    ),
    "duplicate_token": Kind(
        "D", "Each token attends to its earlier occurrence.", "the same token in copy 1"
    ),
    "first_token": Kind(
        "F",
        "Most tokens attend to the first token, an attention sink.",
        "the first token",
        is_simple=True,
    ),
    "diagonal": Kind("S", "Each token attends to itself.", "the token itself", is_simple=True),
    # A text has few different separators: heads of random models reach 0.36.
    "separator": Kind("¶", "The tokens attend to punctuation and white space.", "separators", 0.4),
    "segment_start": Kind(
        "^",  # as in a regular expression
        "The tokens attend to tokens that follow white space or punctuation. In a model of letters,"
        " these are the first letters of words.",
        "tokens after separators",
        0.4,
    ),
    # Its value, not its significance, decides: it is 0 for uniform attention.
    "positional": Kind(
        "#",
        "The attention depends on the positions of the tokens, hardly on the tokens.",
        "positions",
        is_simple=True,
    ),
}
NAMES = tuple(key for key in KINDS if key != "positional")
ALL_NAMES = ("", *KINDS, "uniform")
UNIFORM_FROM = 0.95  # normalised entropy
# since_step: the first step from which all snapshots give the head this name
COLUMNS = ("rank", "layer", "head", "name", "since_step", "significance", *STATISTICS)


def title_of(name: str) -> str:
    """Returns a name as people read it: "previous token"."""
    return STATISTICS[name].title if name in STATISTICS else name


def prompt_of(name: str, periods: Sequence[int]) -> int:
    """Returns the index of the first prompt that shows what heads of a name do: for a name that is
    defined on the repeated sequence, that one, else a text. 0 if there is none.

    periods: of all prompts; 0 for a text.
    """
    is_repeated = name in STATISTICS and STATISTICS[name].needs == "repeated"
    return next((n for n, period in enumerate(periods) if bool(period) == is_repeated), 0)


def significances(values: Mapping[str, np.ndarray], uniform: Mapping) -> np.ndarray:
    """Returns the significance of each statistic in NAMES, (names, L, H); NaN if it is undefined.

    values: statistics, (L, H). uniform: their values for uniform attention, or None if undefined.
    """
    chance = [np.nan if uniform[key] is None else uniform[key] for key in NAMES]
    return np.stack([(values[key] - c) / (1 - c) for key, c in zip(NAMES, chance, strict=True)])


def names_of(
    of_prompts: Sequence[Mapping[str, np.ndarray]],
    uniform: Sequence[Mapping],
    mean: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Returns the name of each head as its index in ALL_NAMES, (L, H).

    of_prompts: the statistics on each prompt. uniform: their values for uniform attention. mean:
    the means over prompts.
    """
    found = [significances(*pair) for pair in zip(of_prompts, uniform, strict=True)]
    least = np.fmin.reduce(found)  # (names, L, H), without NaN
    limits = np.array([KINDS[key].named_from for key in NAMES])[:, None, None]
    possible = np.where(least >= limits, least, -np.inf)
    others = np.where(mean["entropy"] >= UNIFORM_FROM, ALL_NAMES.index("uniform"), 0)
    is_positional = mean["positional"] >= KINDS["positional"].named_from
    others = np.where(is_positional, ALL_NAMES.index("positional"), others)
    return np.where(possible.max(0) > -np.inf, possible.argmax(0) + 1, others)


def head_table(rows: Sequence[Row], uniform: Mapping) -> list[dict]:
    """Returns a row for each head at the last snapshot, the most significant first.

    rows: the statistics of all snapshots. The keys of a row are COLUMNS. A head without a name has
    the name "" and the since_step None. An undefined statistic or significance is None.
    """
    names = np.stack([row.names for row in rows])  # (rows, L, H)
    differs = names != names[-1]
    since = np.where(differs.any(0), len(rows) - differs[::-1].argmax(0), 0)
    statistics = {key: json_values(rows[-1].values[key].ravel()) for key in STATISTICS}
    largest = np.nan_to_num(significances(rows[-1].values, uniform), nan=-np.inf).max(0)
    significant = json_values(largest.ravel())
    table = []
    for rank, index in enumerate(np.argsort(-largest, axis=None, kind="stable"), start=1):
        layer, head = divmod(int(index), largest.shape[1])
        name = ALL_NAMES[names[-1][layer, head]]
        since_step = rows[since[layer, head]].step if name else None
        values = [of_heads[index] for of_heads in statistics.values()]
        row = (rank, layer, head, name, since_step, significant[index], *values)
        table.append(dict(zip(COLUMNS, row, strict=True)))
    return table


def most_significant(table: Sequence[dict]) -> list[dict]:
    """Returns the most significant head of each name in a table, without positional and uniform
    heads. Heads that attend to themselves or to the first token are last: they say least."""
    first = {row["name"]: row for row in reversed(table) if row["name"] in NAMES}
    return sorted(first.values(), key=lambda row: (KINDS[row["name"]].is_simple, row["rank"]))


def clearest(table: Sequence[dict]) -> list[dict]:
    """Returns the clearest head of each name in KINDS: as `most_significant`, then the positional
    head with the largest value."""
    positional = [row for row in table if row["name"] == "positional"]
    largest = sorted(positional, key=lambda row: row["positional"], reverse=True)
    return most_significant(table) + largest[:1]


def counts_of_names(table: Sequence[dict]) -> str:
    """Returns the number of heads with a name, and of each name: "3 of 32 heads have a name: 2
    induction, 1 separator"."""
    counts = Counter(title_of(row["name"]) for row in table if row["name"] in KINDS)
    if not counts:
        return f"none of {len(table)} heads has a name"
    kinds = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    has = "has" if counts.total() == 1 else "have"
    return f"{counts.total()} of {len(table)} heads {has} a name: {kinds}"


def heads_by_name(table: Sequence[dict]) -> dict[str, list[tuple[int, int]]]:
    """Returns (layer, head) of all heads that have a name, for each name except "uniform"."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in table:
        if row["name"] not in ("", "uniform"):
            found.setdefault(row["name"], []).append((row["layer"], row["head"]))
    return found


def clearest_prompts(
    of_prompts: Sequence[Mapping[str, np.ndarray]], uniform: Sequence[Mapping]
) -> np.ndarray:
    """Returns the index of the prompt on which each head is most significant, (L, H). Arguments as
    for `names_of`."""
    found = [significances(*pair) for pair in zip(of_prompts, uniform, strict=True)]
    return np.nan_to_num(found, nan=-np.inf).max(1).argmax(0)


def as_csv(table: Sequence[dict]) -> str:
    """Returns a table as CSV."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(table[0]))
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue()
