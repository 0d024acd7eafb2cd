"""What the page and the terminal say about heads: all rules and sentences.

    statuses(history, steps)  # of each head at each step: its name, since when, and other names
    findings(snapshot)        # of each head in a snapshot: how clear its name is, and an example
    events(history)           # when heads first got their names
    opening(snapshot)         # the head that tells most, on the row where it is clearest

A sentence is a list of parts for the page: a text, ["bold", text] or ["token", label of a token].
heads.py decides the names.

Shapes: L layers, H heads, n = L H heads by the index layer * H + head, t shown tokens.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .ablation import most_important
from .heads import (
    ALL_NAMES,
    KINDS,
    NAMES,
    PLACES,
    clearest,
    head_table,
    significances,
    strengths_of,
    target_of,
    targets_on,
    title_of,
    title_of_head,
)
from .history import Row
from .prompts import Prompt
from .rounding import formatted, formatted_loss, formatted_mean, formatted_weight
from .snapshot_data import SnapshotData, from_codes
from .statistics import STATISTICS

Part = str | list[str]
WEIGHTS = from_codes(np.arange(256))  # of each byte
FARTHEST = 32  # tokens before the query token, of a positional head
FIRST_QUERY = 2  # the query tokens before it have too few key tokens for an example
LIMITS = np.array([KINDS[name].named_from for name in NAMES])
COVERED_FROM = 0.95  # so much of the tokens is nearly all, which needs no words


def head_name(layer: int, head: int) -> str:
    return f"L{layer} H{head}"


def kind_title(name: str, tokens_back: int | None = None) -> str:
    """Returns a name with "head": "previous-token head", "offset-3 head"."""
    return f"{title_of(name, tokens_back).replace(' ', '-')} head"


def with_article(title: str) -> str:
    return f"{'an' if title[0] in 'aeiou' else 'a'} {title}"


def group_title(name: str, heads: int) -> str:
    """Returns a description of all heads of a name: "both induction heads", "the self head"."""
    which = {1: "the", 2: "both"}.get(heads, f"all {heads}")
    return f"{which} {kind_title(name)}{'s' if heads > 1 else ''}"


# ------------------------------------------------------------------- names over the steps


class Span(NamedTuple):
    """The rows at which a head has a name without interruption."""

    first: int
    last: int
    name: int  # as in Row
    title: str


def statuses(history: Sequence[Row], steps: Sequence[int]) -> list[dict]:
    """Returns for each step, at which the names are those of the last row until then:

    names     [index in ALL_NAMES per head]
    titles    [title per head]     "induction head"; "" without a name that the page shows
    wheres    [place per head]     "on the text only", "on repeated sequences only", or ""
    hollow    [bool per head]      whether the name does not hold on the text
    findings  [sentences per head] the name, since when, and the names before and after

    history: the rows of all snapshots.
    """
    known = [row.step for row in history]
    spans = _spans(history)
    found = []
    for step in steps:
        at = max(0, int(np.searchsorted(known, step, side="right")) - 1)
        row = history[at]
        names, places, offsets = (a.ravel().tolist() for a in (row.names, row.places, row.offsets))
        is_named = [ALL_NAMES[name] in KINDS for name in names]
        # Without a text a name holds everywhere; a positional head has no place.
        has_place = [bool(row.errors) and ALL_NAMES[name] in NAMES for name in names]
        places = [PLACES[p] if has else "" for p, has in zip(places, has_place, strict=True)]
        titles = [
            kind_title(ALL_NAMES[name], back) if is_shown else ""
            for name, back, is_shown in zip(names, offsets, is_named, strict=True)
        ]
        wheres = [_where(place) for place in places]
        shown = zip(names, titles, wheres, spans, strict=True)
        found.append(
            {
                "names": names,
                "titles": titles,
                "wheres": wheres,
                "hollow": [place == "prompts" for place in places],
                "findings": [
                    _status(head_name(*divmod(n, row.names.shape[1])), *of_head, at, known)
                    for n, of_head in enumerate(shown)
                ],
            }
        )
    return found


def _where(place: str) -> str:
    return {"text": "on the text only", "prompts": "on repeated sequences only"}.get(place, "")


def _spans(history: Sequence[Row]) -> list[list[Span]]:
    """Returns for each head when it had which name, without rows where it has none that the page
    shows."""
    names = np.stack([row.names.ravel() for row in history])  # (rows, n)
    backs = np.stack([row.offsets.ravel() for row in history])
    changes = np.diff(names, axis=0, prepend=-1) != 0
    spans = []
    for head in range(names.shape[1]):
        firsts = np.flatnonzero(changes[:, head]).tolist()
        spans.append(
            [
                Span(first, end - 1, name, kind_title(ALL_NAMES[name], int(backs[end - 1, head])))
                for first, end in zip(firsts, [*firsts[1:], len(names)], strict=True)
                if ALL_NAMES[name := int(names[first, head])] in KINDS
            ]
        )
    return spans


def _status(
    head: str, name: int, title: str, where: str, spans: list[Span], at: int, steps: list
) -> str:
    """Returns the name of a head at a row as sentences. name: as in Row. spans: of the head."""
    said = f"{head} has no name"
    if title:
        first = next(span.first for span in spans if span.first <= at <= span.last)
        said = f"{head} is {with_article(title)}"
        if len(steps) > 1:
            said += f" since step {steps[first]:,}"
            earliest = min(span.first for span in spans if span.name == name)
            if earliest < first:
                said += f" (on and off since step {steps[earliest]:,})"
        said += f", {where}" if where else ""
    elif len(steps) > 1:
        said += f" at step {steps[at]:,}"
    others = [span for span in spans if span.name != name or not title]
    for span in [span for span in others if span.last < at][-1:]:
        when = f"from step {steps[span.first]:,} to step {steps[span.last]:,}"
        if span.first == span.last:
            when = f"at step {steps[span.first]:,}"
        said += f". It was {with_article(span.title)} {when}"
    for span in [span for span in others if span.first > at][:1]:
        said += f". It becomes {with_article(span.title)} at step {steps[span.first]:,}"
    return said + "."


def events(history: Sequence[Row]) -> list[dict]:
    """Returns when heads first got each of their names: [{step, key, heads: [index], text}]."""
    known: set[tuple[int, int]] = set()
    found, before = [], -1
    for row in history:
        new: dict[int, list[int]] = {}
        names = row.names.ravel()
        changed, before = np.flatnonzero(names != before).tolist(), names
        for head, name in zip(changed, names[changed].tolist(), strict=True):
            if (head, name) not in known and ALL_NAMES[name] in KINDS:
                known.add((head, name))
                new.setdefault(name, []).append(head)
        for name, heads in new.items():
            some = [head_name(*divmod(head, row.names.shape[1])) for head in heads[:4]]
            more = f" and {len(heads) - 4} more" if len(heads) > 4 else ""
            text = f"{', '.join(some)}{more}: {kind_title(ALL_NAMES[name])}"
            found.append({"step": row.step, "key": ALL_NAMES[name], "heads": heads, "text": text})
    return found


# ------------------------------------------------------------------- one snapshot

CELL = np.dtype(
    [("query", int), ("key", int), ("weight", float), ("is_name", bool), ("mean", float)]
)
NUMBERS = np.arange(1, 1 + len(NAMES))  # of NAMES in ALL_NAMES


class Snapshot:
    """A snapshot with what sentences are made from, for each head by its index."""

    def __init__(self, data: SnapshotData):
        self.data, self.row, self.prompts = data, data.row, data.prompts
        self.num_heads = data.row.names.shape[1]
        self.names, self.places = data.row.names.ravel(), data.row.places.ravel()
        self.offsets = data.row.offsets.ravel().tolist()
        self.table = head_table([data.row], data.uniform)
        # Significances on the text, or without one over the prompts, (names, n); on each prompt.
        self.overall = _flat(significances(data.row.values, data.uniform))
        self.of_prompts, uniform = data.of_prompts, [prompt.uniform for prompt in data.prompts]
        on_each = zip(self.of_prompts, uniform, strict=True)
        self.on_prompts = np.stack([_flat(significances(*pair)) for pair in on_each])
        self.strengths = _flat(strengths_of(data.row, data.uniform, self.of_prompts, uniform)[0])
        self.cells = [_sharpest(data, number) for number in range(len(data.prompts))]
        self.examples = self._examples()
        self.found_names = {row["name"] for row in self.table}

    def index(self, row: Mapping) -> int:
        return row["layer"] * self.num_heads + row["head"]

    def _examples(self) -> np.ndarray:
        """Returns for each head the prompt on which its name is most significant and has a target,
        -1 if there is none or the name holds on the text only, (n,). A sequence of random tokens
        only for names that are defined on no text, because a text is easier to read."""
        is_mean = np.isin(self.names, NUMBERS)
        own = self.on_prompts[:, np.where(is_mean, self.names - 1, 0), np.arange(len(self.names))]
        own = np.where(is_mean, own, 0.0)  # the statistic `positional` is not of one prompt
        own[~np.stack([of_prompt["is_name"] for of_prompt in self.cells])] = np.nan
        is_text = np.array([[prompt.period == 0] for prompt in self.prompts])
        size = np.nan_to_num(own, nan=-np.inf) + 2 * is_text
        if self.row.errors:
            size[:, is_mean & (self.places == PLACES.index("text"))] = -np.inf
        return np.where(size.max(0) > -np.inf, size.argmax(0), -1)

    def shown_prompt(self, index: int) -> int:
        """Returns the prompt on which to show a head: that of its example, or else the first text:
        a sequence of random tokens is no example of a head whose name holds on the text only."""
        _, alone = self.on_one_prompt(index)
        if self.examples[index] >= 0:
            return int(self.examples[index])
        if alone >= 0 and not self.names[index] and not self.data.contexts:
            return alone
        return next((n for n, prompt in enumerate(self.prompts) if not prompt.period), 0)

    def on_one_prompt(self, index: int) -> tuple[str, int]:
        """Returns the name that a head would have on one prompt alone, and the index of this
        prompt; ("", -1) if there is none."""
        found = self.on_prompts[:, :, index]  # (prompts, names)
        possible = np.where(found >= LIMITS, found, -np.inf)
        number, name = np.unravel_index(int(possible.argmax()), possible.shape)
        is_any = possible[number, name] > -np.inf
        return (NAMES[int(name)], int(number)) if is_any else ("", -1)


def _flat(values: np.ndarray) -> np.ndarray:
    """(names, L, H) -> (names, n)"""
    return values.reshape(len(values), -1)


def findings(data: SnapshotData) -> dict:
    """Returns what the page says about the heads of a snapshot:

    findings  [sentences per head]               how clear its name is and an example, or why it has
                                                 none
    rows      [[query token per head] per prompt] where the name is clearest, or else where the head
                                                 attends most to an earlier token; -1: nowhere
    prompts   [prompt per head]                  that of the example; -1: none
    clearest  {name: [index of its clearest head, prompt that shows it]}
    """
    of = Snapshot(data)
    sentences: list[list[Part]] = [[] for _ in of.table]
    for row in of.table:
        index, name = of.index(row), row["name"]
        if name in KINDS:
            sentences[index] = _named(of, row) + _example(of, row) + _second_name(of, index)
        elif name == "uniform":
            sentences[index] = ["Its attention is nearly uniform."]
        else:
            sentences[index] = _unnamed(of, index)
    return {
        "findings": sentences,
        "rows": [of_prompt["query"].tolist() for of_prompt in of.cells],
        "prompts": of.examples.tolist(),
        "clearest": {
            row["name"]: [of.index(row), of.shown_prompt(of.index(row))]
            for row in clearest(of.table)
        },
    }


def opening(data: SnapshotData, prompt: int | None = None) -> dict | None:
    """Returns the head that tells most, {layer, head, prompt, query}, on the row where its name is
    clearest; without names the head that is nearest to one. query: None without such a row. None if
    no statistic is defined. prompt: the one to open with."""
    of = Snapshot(data)
    if named := clearest(of.table):
        index = of.index(named[0])
    else:
        telling = np.array([[KINDS[name].telling > 0] for name in NAMES])
        nearest = np.where(np.isfinite(of.overall), of.overall + telling, -np.inf).max(0)
        index = int(nearest.argmax())
        if nearest[index] == -np.inf:
            return None
    prompt = of.shown_prompt(index) if prompt is None else prompt
    query = int(of.cells[prompt][index]["query"])
    layer, head = divmod(index, of.num_heads)
    place = {"layer": layer, "head": head, "prompt": prompt}
    return place | {"query": query if query >= 0 else None}


def _sharpest(data: SnapshotData, number: int) -> np.ndarray:
    """Returns for each head the target of its name on a prompt whose weight is most above uniform
    attention, of type CELL (n,); without a target, the weight to an earlier token that is most
    above it. query: -1 without one. mean: of a positional head, the mean weight at its distance."""
    prompt = data.prompts[number]
    codes = data.codes[number].reshape(-1, data.codes[number].shape[-1])
    query, key = np.tril_indices(prompt.shown)
    uniform = (1 / (query + 1)).astype(np.float32)
    found = np.zeros(len(codes), CELL)
    found["query"] = found["key"] = -1

    def choose(heads: np.ndarray, cells: np.ndarray, is_name: bool = True) -> None:
        """Chooses one of the cells, bool (N,), for these heads, (m,)."""
        at = np.flatnonzero(cells & (query >= FIRST_QUERY))
        if not heads.size or not at.size:
            return
        best = at[(WEIGHTS[codes[heads][:, at]] - uniform[at]).argmax(1)]
        found["query"][heads], found["key"][heads] = query[best], key[best]
        found["weight"][heads], found["is_name"][heads] = WEIGHTS[codes[heads, best]], is_name

    targets = _targets(tuple(prompt.token_ids), tuple(prompt.tokens), prompt.period)
    names, offsets = data.row.names.ravel(), data.row.offsets.ravel()
    for name in {ALL_NAMES[name] for name in names} & {*KINDS}:
        heads = np.flatnonzero(names == ALL_NAMES.index(name))
        if name == "positional":
            back, found["mean"][heads] = _usual_distances(codes[heads], query, key)
        elif name == "offset":
            back = offsets[heads]
        else:
            if name in targets:
                choose(heads, targets[name][query, key])
            continue
        for distance in np.unique(back):
            choose(heads[back == distance], query - key == distance)
    choose(np.flatnonzero(~found["is_name"]), (key > 0) & (key < query), is_name=False)
    return found


@functools.lru_cache(64)
def _targets(
    token_ids: tuple[int, ...], tokens: tuple[str, ...], period: int
) -> dict[str, np.ndarray]:
    return targets_on(Prompt("", "", [*token_ids], [*tokens], period=period))


def _usual_distances(
    codes: np.ndarray, query: np.ndarray, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many tokens before the query token heads attend most, and the mean weight at this
    distance, (m,) each. codes: (m, N)."""
    means = []
    for back in range(max(1, min(FARTHEST, query[-1] + 1 - FIRST_QUERY))):
        at = np.flatnonzero((query - key == back) & (query >= FIRST_QUERY))
        means.append(WEIGHTS[codes[:, at]].mean(1) if at.size else np.zeros(len(codes)))
    return np.argmax(means, axis=0), np.max(means, axis=0)


# ------------------------------------------------------------------- sentences


def measured(row: Mapping, text_name: str = "") -> str:
    """Returns what was measured of a head with a name, in a few words: "in your text, mean weight
    0.83 on the token before". row: of heads.head_table."""
    name, value = row["name"], formatted(row[row["name"]])
    if name not in NAMES:  # the value of a positional head is not a weight
        return f"value {value}, depends on {target_of(row)}"
    where = f"in {text_name}, " if text_name else ""
    return f"{where}mean weight {value} on {target_of(row)}"


def head_line(row: Mapping, text_name: str = "") -> str:
    """Returns a line for the terminal: "L5 H1 previous token: mean weight 0.83 on the token before
    (since step 400)"."""
    place = head_name(row["layer"], row["head"])
    since = f"(since step {row['since_step']})"
    return f"{place} {title_of_head(row)}: {measured(row, text_name)} {since}"


def _mean_weight(of: Snapshot, name: str, index: int) -> list[Part]:
    """Returns the mean weight on the targets of a name, with its error and its value by chance. On
    the text, or without one on the prompts."""
    target = KINDS[name].target.format(of.offsets[index])
    value = float(of.row.values[name].flat[index])
    error = float(of.row.errors[name].flat[index]) if of.row.errors else None
    chance = formatted(of.data.uniform[name])
    return [
        "mean weight ",
        ["bold", formatted_mean(value, error)],
        f" on {target} (chance {chance})",
    ]


def _place(of: Snapshot, name: str) -> str:
    """Returns where the statistics of a snapshot were measured: "In your text"."""
    if of.data.contexts:
        return f"In {of.data.contexts.text_name}"
    if STATISTICS[name].on == "repeated":
        return "On the repeated sequence"
    return "On the prompts" if len(of.prompts) > 1 else "On the prompt"


def _named(of: Snapshot, row: Mapping) -> list[Part]:
    """Returns what was measured of a head with a name."""
    name, contexts = row["name"], of.data.contexts
    if name not in NAMES:
        return []
    said = [f"{_place(of, name)}: ", *_mean_weight(of, name, of.index(row))]
    if row["holds_on"] == "prompts":
        return [*said, ", too little for the name."]
    covered = contexts.coverage.get(name, 1) if contexts else 1
    if covered < COVERED_FROM:
        share = f"{100 * covered:.0f} %"
        said.append(f", as a mean over the {share} of tokens that have such a token before them")
    return [*said, "."]


def _example(of: Snapshot, row: Mapping) -> list[Part]:
    """Returns an example of what a head with a name does, if there is one."""
    index = of.index(row)
    number = int(of.examples[index])
    if number < 0:
        return []
    labels, cell = of.prompts[number].labels, of.cells[number][index]
    query, key = int(cell["query"]), int(cell["key"])

    def token(at: int) -> list[Part]:
        return [["token", labels[at]], f" ({at})"]

    back: list[Part] = [str(query - key)]
    parts = {"{query}": token(query), "{key}": token(key), "{back}": back}
    where = f"in prompt {number + 1}, " if len(of.prompts) > 1 else ""
    said: list[Part] = []
    text = f" For example, {where}at {{query}} it attends to {KINDS[row['name']].example}"
    for part in filter(None, re.split(r"({\w+})", text)):
        said += parts.get(part, [part])
    chance = formatted(1 / (query + 1))
    said += [
        ", with weight ",
        ["bold", formatted_weight(float(cell["weight"]))],
        f" (chance {chance})",
    ]
    if row["name"] == "positional":
        said.append(f"; on average {formatted(float(cell['mean']))}")
    return [*said, "."]


def _second_name(of: Snapshot, index: int) -> list[Part]:
    """Returns which second name of a head also holds clearly, if one does."""
    strengths = np.where(of.names[index] == NUMBERS, -np.inf, of.strengths[:, index])
    best = int(strengths.argmax())
    if strengths[best] == -np.inf or of.names[index] not in NUMBERS:
        return []
    title = kind_title(NAMES[best], of.offsets[index])
    return [f" It is also {with_article(title)}: ", *_mean_weight(of, NAMES[best], index), "."]


def _unnamed(of: Snapshot, index: int) -> list[Part]:
    """Returns why a head has no name: the name that is nearest."""
    name, number = of.on_one_prompt(index)
    of_head, back = of.overall[:, index], of.offsets[index]
    if not of.data.contexts and name:
        target = KINDS[name].target.format(back)
        value = of.of_prompts[number][name].flat[index]
        return [
            f"In prompt {number + 1}, its mean weight on {target} is ",
            ["bold", formatted(float(value))],
            f" (chance {formatted(of.prompts[number].uniform[name])}), but a name needs a large "
            "weight in every prompt.",
        ]
    if not of.data.contexts or not np.isfinite(of_head).any():
        return ["Its attention fits none of the named patterns."]
    at = int(np.nanargmax(of_head / LIMITS))
    name, chance = NAMES[at], of.data.uniform[NAMES[at]] or 0
    why = f"a name needs at least {formatted(chance + LIMITS[at] * (1 - chance))}"
    if of_head[at] >= LIMITS[at]:
        why = "for a name, the standard error is too large"
    nearest = f"{_place(of, name)}, it is nearest to {with_article(kind_title(name, back))}: "
    return [nearest, *_mean_weight(of, name, index), f"; {why}."]


def subject(data: SnapshotData, history: Sequence[Row]) -> list[Part]:
    """Returns what the model is and what its heads have learned until a snapshot, as sentences.
    history: the rows of all snapshots."""
    layers, heads = data.row.names.shape
    of, removed = Snapshot(data), data.ablation or {"method": "", "groups": []}
    named = [row for row in of.table if row["name"] in KINDS]
    when = f". At step {data.step:,}, " if len(history) > 1 else "; "
    said: list[Part] = [
        ["bold", data.run],
        f": {_count(layers, 'layer')} × {_count(heads, 'head')}{when}",
    ]
    said.append(f"{len(named) or 'none'} of {_count(layers * heads, 'head')} ")
    said.append("have" if len(named) > 1 else "has")
    said.append(
        " a clear pattern, and a name for it" if named else " a clear pattern, so none has a name"
    )
    if (weak := [row for row in named if row["holds_on"] == "prompts"]) and data.contexts:
        strong = len(named) - len(weak)
        hold = "holds" if strong == 1 else "hold"
        said.append(f"; {strong or 'none'} of the names {hold} on {data.contexts.text_name}")
    said.append(". ")
    groups = removed["groups"] if removed["method"] == "exact" else []
    if most := most_important(groups):
        them = "it" if most["heads"] == 1 else "them"
        before = formatted_loss(removed["loss"])
        after = formatted_loss(removed["loss"] + most["loss_change"])
        said.append(
            f"The model needs {group_title(most['name'], most['heads'])} most: without {them}, "
        )
        said += [f"the loss rises from {before} to ", ["bold", after], ". "]
    elif named and not data.ablation:
        said.append("A name says where a head attends, not whether the model needs it. ")
    values, chance = data.row.values["induction"], data.uniform["induction"]
    if np.isfinite(values).all() and chance is not None and "induction" not in of.found_names:
        index = int(values.argmax())
        place = head_name(*divmod(index, heads))
        said.append(
            "No head is an induction head, which copies from earlier in the text: the largest mean "
            f"weight is {formatted(float(values.flat[index]))} ({place}), and chance is "
            f"{formatted(chance)}."
        )
    return said


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
