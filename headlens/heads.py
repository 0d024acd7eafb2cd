"""The name of each head, and the table of all heads, heads.csv.

A head has the name of a statistic, such as "induction", if it attends to the key tokens of this
statistic clearly more than uniform attention does. v is the value of the statistic, which is a mean
weight, and c is its value for uniform attention:

    significance = (v - c) / (1 - c)     0: as uniform attention; 1: all weight on these key tokens

A name can hold in two places, and a head can have it in each of them:

- on the text, if the significance there is at least `named_from` (see KINDS), and at least
  MIN_ERRORS times its standard error over windows;
- on the prompts, if the significance is at least `named_from` on every prompt on which the
  statistic is defined, and at least MIN_ERRORS times its standard error by chance there. So a head
  that attends to a certain word, which is the first token of one prompt, is not a first-token head,
  and on a few tokens, random attention has no name.

For the name that a head has at the snapshot before, these limits are KEPT_FROM of that. So a head
whose significance is near a limit does not lose its name and get it again at each snapshot.

If several names are possible, the head has the one with the largest significance on the text, or if
none holds there, on the prompts (the smallest over prompts). Where there is a text, only names of
the repeated sequence can hold on prompts alone: for the others, a prompt is a short text. If no
name is possible, the head is "positional" if its statistic `positional` is at least `named_from`,
"uniform" if its entropy is at least UNIFORM_FROM, and else it has no name, "".

Shapes: L layers, H heads.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .history import Row, json_values
from .prompts import Prompt
from .statistics import STATISTICS, TARGETS, HeadStatistics, by_layer


@dataclass(frozen=True)
class Kind:
    """Heads with a name: how the page and the report show them, and when a head gets the name. The
    key in KINDS is the name and that of the statistic that decides."""

    letter: str  # the sign of the heads on the page
    colours: tuple[str, str]  # of the sign, on a light and on a dark page
    meaning: str  # one sentence
    target: str  # of the mean weight that the statistic measures: "mean weight on ..."
    # What one head does and what several heads do, with {unit} for "letter" or "token".
    verbs: tuple[str, str]
    named_from: float = 0.25  # the significance that a name needs
    # 0: says least, such as attention to the token itself; 1: depends on positions; 2: depends on
    # the tokens. Pages, printed lines and images begin with the heads that tell most.
    telling: int = 2


KINDS = {
    "previous_token": Kind(
        "P",
        ("#1a62b0", "#7fb9ff"),
        "Each token attends to the token before it.",
        "the token before",
        ("looks one {unit} back", "look one {unit} back"),
        telling=1,
    ),
    "induction": Kind(
        "I",
        ("#a85400", "#ffb454"),
        "Each token attends to the token that followed its earlier occurrence. So the model can"
        " continue a sequence that it has seen before.",
        "the tokens that followed earlier occurrences of the query token",
        ("copies what came next", "copy what came next"),
    ),
    "duplicate_token": Kind(
        "D",
        ("#6f3aa8", "#c9a4f5"),
        "Each token attends to its earlier occurrences.",
        "earlier occurrences of the query token",
        ("finds the same {unit} again", "find the same {unit} again"),
    ),
    "first_token": Kind(
        "F",
        ("#5f666e", "#9ba3ac"),
        "Most tokens attend to the first token, an attention sink.",
        "the first token",
        ("rests on the first {unit}", "rest on the first {unit}"),
        telling=0,
    ),
    "offset": Kind(
        "O",
        ("#4a45c4", "#aeabff"),
        "Each token attends to the token a fixed number of places before it, from 2 to 8.",
        "the token {} places before",
        ("looks {back} {unit}s back", "look {back} {unit}s back"),
        telling=1,
    ),
    "diagonal": Kind(
        "S",
        ("#b8125a", "#ff8ab5"),
        "Each token attends to itself: the token is passed on, in a form for later layers.",
        "the token itself",
        ("looks at the {unit} itself", "look at the {unit} itself"),
        telling=0,
    ),
    # A text has few different separators: heads of random models reach 0.36.
    "separator": Kind(
        "¶",
        ("#6b6100", "#d8cc5a"),
        "The tokens attend to punctuation and white space.",
        "separators",
        ("watches word and line breaks", "watch word and line breaks"),
        named_from=0.4,
    ),
    "segment_start": Kind(
        "^",  # as in a regular expression
        ("#00728f", "#58c7e8"),
        "The tokens attend to tokens that follow white space or punctuation. In a model of letters,"
        " these are the first letters of words.",
        "tokens after separators",
        ("finds where words begin", "find where words begin"),
        named_from=0.4,
    ),
    # Its value, not its significance, decides: it is 0 for uniform attention.
    "positional": Kind(
        "#",
        ("#3b6b1c", "#a2cf7c"),
        "The attention depends on the positions of the tokens, hardly on the tokens.",
        "positions",
        ("goes by position, not by {unit}", "go by position, not by {unit}"),
        telling=0,
    ),
}
NAMES = tuple(key for key in KINDS if key != "positional")
LIMITS = np.array([KINDS[key].named_from for key in NAMES])
ALL_NAMES = ("", *KINDS, "uniform")
PLACES = ("text and prompts", "text", "prompts")
WHERES = {"text": "on the text only", "prompts": "on repeated sequences only"}
UNIFORM_FROM = 0.95  # normalised entropy
MIN_ERRORS = 3  # standard errors
MAX_DRAWN = 8  # heads of a name whose mean attention is drawn: the clearest
KEPT_FROM = 0.75  # a head keeps its name from this part of the limits on
# since_step: the first step from which all snapshots give the head this name. holds_on: one of
# PLACES. error: the standard error of the statistic that names the head. tokens_back: of "offset".
# layer: its number in the model; the key "place", (layer, head) as in arrays, is no column.
COLUMNS = ("rank", "layer", "head", "name", "holds_on", "since_step", "significance", "error")
COLUMNS += ("tokens_back", *STATISTICS)


def title_of(name: str, tokens_back: int | None = None) -> str:
    """Returns a name as people read it: "previous token", "offset 3"."""
    title = STATISTICS[name].title if name in STATISTICS else name
    return f"{title} {tokens_back}" if name == "offset" and tokens_back else title


def title_of_head(row: Mapping) -> str:
    """Returns the name of a head in a row of the table, and where it holds if it does not hold on
    text and prompts: "induction (on repeated sequences only)"."""
    where = WHERES.get(row["holds_on"], "")
    return title_of(row["name"], row["tokens_back"]) + (f" ({where})" if where else "")


def targets_on(prompt: Prompt) -> dict[str, np.ndarray]:
    """Returns for each name, "offset_2" to "offset_8" in place of "offset", which key tokens its
    heads attend to, bool (t, t) for the t tokens that are shown. Without names that are undefined
    on the prompt: in a sequence of random tokens, a separator separates nothing."""
    ids, shown = prompt.token_ids, prompt.shown
    found = HeadStatistics(torch.tensor([ids[:shown]]), [prompt.tokens[:shown]]).targets[0]
    return {
        key: targets.bool().numpy()
        for key, targets in zip(TARGETS, found, strict=True)
        if (name := key if key in STATISTICS else "offset") in KINDS
        if not prompt.period or STATISTICS[name].on != "texts"
    }


def significances(values: Mapping[str, np.ndarray], uniform: Mapping) -> np.ndarray:
    """Returns the significance of each statistic in NAMES, (names, L, H); NaN if it is undefined.

    values: statistics, (L, H). uniform: their values for uniform attention, see statistics.Chance.
    """
    chances = [by_layer(uniform[key]) for key in NAMES]
    return np.stack([(values[key] - c) / (1 - c) for key, c in zip(NAMES, chances, strict=True)])


def _errors_by_chance(uniform: Mapping, queries: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns how far from 0 a significance is by chance, (names, L, H): its standard error if the
    n weights are 1 with the probability c of uniform attention and else 0, sqrt(c / (1 - c) / n).
    That of other weights with this mean is smaller."""
    chances = [by_layer(uniform[key]) for key in NAMES]
    pairs = zip(chances, (queries[key] for key in NAMES), strict=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack([np.sqrt(c / (1 - c) / n) for c, n in pairs])


def names_of(
    row: Row,
    uniform: Mapping,
    of_prompts: Sequence[Mapping[str, np.ndarray]],
    uniform_of_prompts: Sequence[Mapping],
    before: np.ndarray | None = None,
    queries_of_prompts: Sequence[Mapping[str, np.ndarray]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the name of each head as its index in ALL_NAMES, and where it holds as an index in
    PLACES, (L, H) each.

    row: with errors if it has the statistics on a text. of_prompts: the statistics on each prompt.
    uniform, uniform_of_prompts: their values for uniform attention. before: the names at the
    snapshot before, if there is one. queries_of_prompts: the number of queries of which the
    statistics are the mean.
    """
    before = np.zeros_like(row.names) if before is None else before
    limits = LIMITS[:, None, None]
    # So the limits for the name that a head has are KEPT_FROM of those for other names.
    numbers = 1 + np.arange(len(NAMES))[:, None, None]
    factors = np.where(before == numbers, 1 / KEPT_FROM, 1)
    found = [significances(*pair) for pair in zip(of_prompts, uniform_of_prompts, strict=True)]
    for of, uniform_of, queries in zip(found, uniform_of_prompts, queries_of_prompts, strict=False):
        of[factors * of < MIN_ERRORS * _errors_by_chance(uniform_of, queries)] = 0
    least = factors * np.fmin.reduce(found)  # (names, L, H), without NaN
    on_prompts = least >= limits
    on_text, strengths = np.zeros_like(on_prompts), np.where(on_prompts, least, -np.inf)
    if row.errors:
        is_repeated = np.array([STATISTICS[key].on == "repeated" for key in NAMES])
        strengths[~is_repeated] = -np.inf
        significant = factors * significances(row.values, uniform)
        errors = np.stack([row.errors[key] / (1 - by_layer(uniform[key])) for key in NAMES])
        on_text = (significant >= limits) & (significant >= MIN_ERRORS * errors)
        # A significance is at most 1, and with its factor less than 2: names that hold on the text
        # come first.
        strengths = np.where(on_text, 2 + significant, strengths)
    others = np.where(row.values["entropy"] >= UNIFORM_FROM, ALL_NAMES.index("uniform"), 0)
    number, limit = ALL_NAMES.index("positional"), KINDS["positional"].named_from
    is_positional = row.values["positional"] >= limit * np.where(before == number, KEPT_FROM, 1)
    others = np.where(is_positional, number, others)
    has_name, best = strengths.max(0) > -np.inf, strengths.argmax(0)[None]
    places = [np.take_along_axis(on, best, axis=0)[0] for on in (on_text, on_prompts)]
    both, text, prompts = (PLACES.index(place) for place in PLACES)
    place = np.where(places[0], np.where(places[1], both, text), prompts)
    return np.where(has_name, best[0] + 1, others), np.where(has_name, place, both)


def holds_on(row: Row, place: tuple[int, int]) -> str | None:
    """Returns where the name of a head holds, one of PLACES. None if its name is of no place, and
    without a text: all names are of the prompts then. place: (layer, head)."""
    is_placed = ALL_NAMES[row.names[place]] in NAMES and row.errors
    return PLACES[row.places[place]] if is_placed else None


def first_rows(names: np.ndarray) -> np.ndarray:
    """Returns for the name of each head at each snapshot the index of the first snapshot from which
    the head has it without interruption. (rows, L, H) -> (rows, L, H)."""
    first = np.zeros_like(names)
    for n in range(1, len(names)):
        first[n] = np.where(names[n] == names[n - 1], first[n - 1], n)
    return first


def head_table(rows: Sequence[Row], uniform: Mapping) -> list[dict]:
    """Returns a row for each head at the last snapshot, the most significant first.

    rows: the statistics of all snapshots. The keys of a row are COLUMNS, without "learned_sink" if
    the model has none, and "place". A head without a name has the name "" and the since_step None.
    An undefined statistic or significance is None.
    """
    last = rows[-1]
    names = np.stack([row.names for row in rows])  # (rows, L, H)
    since = first_rows(names)[-1]
    statistics = {key: json_values(last.values[key].ravel()) for key in STATISTICS}
    if {*statistics["learned_sink"]} == {None}:
        del statistics["learned_sink"]
    errors = {key: json_values(values.ravel()) for key, values in last.errors.items()}
    largest = np.nan_to_num(significances(last.values, uniform), nan=-np.inf).max(0)
    significant = json_values(largest.ravel())
    table = []
    for rank, index in enumerate(np.argsort(-largest, axis=None, kind="stable"), start=1):
        place = layer, head = divmod(int(index), largest.shape[1])
        name = ALL_NAMES[names[-1][place]]
        row = {"place": place, "rank": rank, "layer": last.layers[layer], "head": head}
        row |= {"name": name, "holds_on": holds_on(last, place)}
        row["since_step"] = rows[since[place]].step if name else None
        row["significance"] = significant[index]
        row["error"] = errors[name][index] if name in errors else None
        row["tokens_back"] = int(last.offsets[place]) if name == "offset" else None
        table.append(row | {key: of_heads[index] for key, of_heads in statistics.items()})
    return table


def clearest(table: Sequence[dict]) -> list[dict]:
    """Returns the most significant head of each name in KINDS in a table; of a positional head, the
    one with the largest value. Names that hold on the text come first, of these the names that tell
    most, and of these the names that also hold on the prompts. Names that say least are last."""

    def clearness(row: dict) -> tuple:
        value = -row["positional"] if row["name"] == "positional" else row["rank"]
        return row["holds_on"] == "prompts", value

    first: dict[str, dict] = {}
    for row in sorted((row for row in table if row["name"] in KINDS), key=clearness):
        first.setdefault(row["name"], row)

    def place_of(row: dict) -> tuple:
        telling, place = KINDS[row["name"]].telling, row["holds_on"]
        is_positional = row["name"] == "positional"
        order = is_positional, telling == 0, place == "prompts", -telling, place == "text"
        return *order, row["rank"]

    return sorted(first.values(), key=place_of)


def heads_by_name(table: Sequence[dict]) -> dict[str, list[tuple[int, int]]]:
    """Returns the places of all heads that have a name, for each name except "uniform"."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in table:
        if row["name"] not in ("", "uniform"):
            found.setdefault(row["name"], []).append(row["place"])
    return found


def as_csv(table: Sequence[dict]) -> str:
    """Returns a table as CSV."""
    file = io.StringIO(newline="")
    columns = [key for key in table[0] if key != "place"]
    writer = csv.DictWriter(file, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue()
