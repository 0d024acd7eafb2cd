"""What pages and the terminal say about heads: all sentences.

    statuses(history, steps)   # of each head at each step: its name, since when, and the one before
    findings(snapshot)         # of each head in a snapshot: how clear its name is, and an example
    removed_heads(found, row)  # of each head and of each name: the loss without
    events(history)            # when heads first got their names
    opening(snapshot)          # the head that tells most, on the row where it is clearest

A sentence is a list of parts for the page: a text, ["bold", text] or ["token", label of a token].
heads.py decides the names.

Shapes: L layers, H heads, n = L H heads by the index layer * H + head, t shown tokens.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .ablation import is_estimate, most_important, within_noise
from .heads import (
    ALL_NAMES,
    KINDS,
    LIMITS,
    MIN_ERRORS,
    NAMES,
    WHERES,
    clearest,
    first_rows,
    head_table,
    holds_on,
    significances,
    targets_on,
    title_of,
    title_of_head,
)
from .history import Row, head_name
from .rounding import formatted, formatted_change, formatted_loss, formatted_mean, formatted_weight
from .snapshot_data import SnapshotData, from_codes
from .statistics import STATISTICS, by_layer

Part = str | list[str]
WEIGHTS = from_codes(np.arange(256))  # of each byte
FARTHEST = 32  # tokens before the query token, of a positional head
MOST_CHANCE = 0.4  # a query token with two key tokens or less is no example


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


def statuses(history: Sequence[Row], steps: Sequence[int]) -> list[dict]:
    """Returns for each step, at which the names are those of the last row until then:

    names     [index in ALL_NAMES per head]
    titles    [title per head]     "induction head"; "" without a name that the page shows
    wheres    [place per head]     "on the text only", "on repeated sequences only", or ""
    hollow    [bool per head]      whether the name does not hold on the text
    findings  [sentences per head] the name, since when, and the last name before

    history: the rows of all snapshots.
    """
    known = [row.step for row in history]
    names = np.stack([row.names.ravel() for row in history])  # (rows, n)
    since = first_rows(names)
    is_shown = np.isin(names, [ALL_NAMES.index(name) for name in KINDS])

    def title(at: int, head: int) -> str:
        name = ALL_NAMES[names[at, head]]
        return kind_title(name, history[at].offsets.flat[head]) if name in KINDS else ""

    found = []
    for step in steps:
        at = max(0, int(np.searchsorted(known, step, side="right")) - 1)
        row, others = history[at], is_shown[:at] & (names[:at] != names[at])
        places = [holds_on(row, place) for place in np.ndindex(row.names.shape)]
        wheres = [WHERES.get(place or "", "") for place in places]
        titles = [title(at, head) for head in range(len(places))]
        said = []
        for head, (of_head, where) in enumerate(zip(titles, wheres, strict=True)):
            text = f"{row.head_name(head)} "
            text += f"is {with_article(of_head)}" if of_head else "has no name"
            if of_head and len(known) > 1:
                text += f" since step {known[since[at, head]]:,}"
            text += f", {where}" if where else ""
            if len(before := np.flatnonzero(others[:, head])):
                earlier = with_article(title(before[-1], head))
                text += f". It was {earlier} until step {known[before[-1]]:,}"
            said.append(f"{text}.")
        found.append(
            {
                "names": names[at].tolist(),
                "titles": titles,
                "wheres": wheres,
                "hollow": [place == "prompts" for place in places],
                "findings": said,
            }
        )
    return found


def events(history: Sequence[Row]) -> list[dict]:
    """Returns when heads first got each of their names: [{step, key, heads: [index], text}]."""
    found, known = [], set()
    for row in history:
        for key in KINDS:
            named = np.flatnonzero(row.names == ALL_NAMES.index(key)).tolist()
            if heads := [head for head in named if (key, head) not in known]:
                known |= {(key, head) for head in heads}
                some = [row.head_name(head) for head in heads[:4]]
                more = f" and {len(heads) - 4} more" if len(heads) > 4 else ""
                text = f"{', '.join(some)}{more}: {kind_title(key)}"
                found.append({"step": row.step, "key": key, "heads": heads, "text": text})
    return found


# ------------------------------------------------------------------- one snapshot


class Cell(NamedTuple):
    """A weight of a head on a prompt, in which its name can be seen."""

    query: int  # -1: none
    key: int
    weight: float
    chance: float  # the weight of uniform attention
    is_name: bool  # whether the key token is a target of the name
    mean: float  # of a positional head, the mean weight at this distance


class Heads:
    """The heads of a snapshot, with what sentences about them are made from."""

    def __init__(self, data: SnapshotData):
        self.data, self.row, self.prompts = data, data.row, data.prompts
        self.num_heads = data.row.names.shape[1]
        self.offsets = data.row.offsets.ravel().tolist()
        self.table = head_table([data.row], data.uniform)
        self.first = (clearest(self.table) or self.table)[0]  # of the table: the head to begin with
        self.cells = [_sharpest(data, number) for number in range(len(data.prompts))]
        on_each = zip(data.of_prompts, data.prompts, strict=True)
        self.found = [significances(of, prompt.uniform) for of, prompt in on_each]
        self.examples = [self._example(index) for index in range(len(self.table))]

    def index(self, row: Mapping) -> int:
        """Returns the index of a head. row: of heads.head_table."""
        layer, head = row["place"]
        return layer * self.num_heads + head

    def chance(self, name: str, index: int) -> float:
        """Returns the value of a statistic for uniform attention in the layer of a head."""
        of_heads = np.broadcast_to(by_layer(self.data.uniform[name]), self.row.names.shape)
        return float(of_heads.flat[index])

    def _example(self, index: int) -> int:
        """Returns the prompt on which the name of a head is most significant and has a target, -1
        if there is none or the name holds on the text only. A sequence of random tokens only for
        names that are defined on no text, because a text is easier to read."""
        place = divmod(index, self.num_heads)
        name = ALL_NAMES[self.row.names[place]]
        if holds_on(self.row, place) == "text":
            return -1
        found = []
        for n, prompt in enumerate(self.prompts):
            # The statistic `positional` is not of one prompt.
            own = self.found[n][NAMES.index(name)][place] if name in NAMES else 0
            if self.cells[n][index].is_name and np.isfinite(own):
                found.append((prompt.period == 0, own, -n))
        return -max(found)[2] if found else -1

    def shown_prompt(self, row: Mapping) -> int:
        """Returns the prompt on which to show a head: that of its example, or else the first text:
        a sequence of random tokens is no example of a head whose name holds on the text only."""
        if (example := self.examples[self.index(row)]) >= 0:
            return example
        return next((n for n, prompt in enumerate(self.prompts) if not prompt.period), 0)


def findings(data: SnapshotData) -> dict:
    """Returns what the page says about the heads of a snapshot:

    findings  [sentences per head]               how clear its name is and an example, or why it has
                                                 none
    rows      [[query token per head] per prompt] where the name is clearest, or else where the head
                                                 attends most to an earlier token; -1: nowhere
    prompts   [prompt per head]                  that of the example; -1: none
    clearest  {name: [index of its clearest head, prompt that shows it]}
    """
    of = Heads(data)
    sentences = {of.index(row): sentence(of, row) for row in of.table}
    return {
        "findings": [sentences[index] for index in range(len(of.table))],
        "rows": [[cell.query for cell in cells] for cells in of.cells],
        "prompts": of.examples,
        "clearest": {
            row["name"]: [of.index(row), of.shown_prompt(row)] for row in clearest(of.table)
        },
    }


def sentence(of: Heads, row: Mapping) -> list[Part]:
    """Returns what is said about a head in a snapshot. row: of heads.head_table."""
    index, name = of.index(row), row["name"]
    if name == "uniform":
        return ["Its attention is nearly uniform."]
    if name in NAMES:
        said = [f"{_place(of, name)}: ", *_mean_weight(of, name, index), "."]
        return said + _example(of, row)
    return _example(of, row) if name else _unnamed(of, index)


def plain(sentence: Sequence[Part]) -> str:
    """Returns a sentence as text."""
    return "".join(part if isinstance(part, str) else part[1] for part in sentence).strip()


def opening(data: SnapshotData, prompt: int | None = None) -> dict | None:
    """Returns the head that tells most, {layer, head, prompt, query}, on the row where its name is
    clearest; without names the most significant head. query: None without such a row. None if no
    statistic is defined. prompt: the one to open with."""
    of = Heads(data)
    if of.first["significance"] is None:
        return None
    prompt = of.shown_prompt(of.first) if prompt is None else prompt
    query = of.cells[prompt][of.index(of.first)].query
    layer, head = of.first["place"]
    place = {"layer": layer, "head": head, "prompt": prompt}
    return place | {"query": query if query >= 0 else None}


def _sharpest(data: SnapshotData, number: int) -> list[Cell]:
    """Returns for each head the target of its name on a prompt whose weight is most above uniform
    attention; without a target, the weight to an earlier token that is most above it."""
    prompt = data.prompts[number]
    query, key = np.tril_indices(prompt.shown)
    back = query - key
    earlier = (key > 0) & (back > 0)
    targets = {name: of_name[query, key] for name, of_name in targets_on(prompt).items()}
    found, chances = [], data.chances(number)
    for layer, head in np.ndindex(data.row.names.shape):
        name, offset = ALL_NAMES[data.row.names[layer, head]], data.row.offsets[layer, head]
        weights, chance, mean = WEIGHTS[data.codes[number][layer, head]], chances[layer], 0.0
        counted = (chance > 0) & (chance < MOST_CHANCE)
        cells = targets.get(f"offset_{offset}" if name == "offset" else name, False) & counted
        if name == "positional" and counted.any():
            counts = np.bincount(back[counted])
            means = np.bincount(back[counted], weights[counted]) / np.maximum(counts, 1)
            mean = float(means[:FARTHEST].max())
            cells = counted & (back == means[:FARTHEST].argmax())
        is_name = bool(cells.any())
        cells = cells if is_name else earlier & counted
        best = int(np.where(cells, weights - chance, -np.inf).argmax())
        place = (int(query[best]), int(key[best])) if cells.any() else (-1, -1)
        found.append(Cell(*place, float(weights[best]), float(chance[best]), is_name, mean))
    return found


# ------------------------------------------------------------------- sentences on one snapshot


def _place(of: Heads, name: str) -> str:
    """Returns where the statistics of a snapshot were measured: "In the text"."""
    if of.data.contexts:
        return f"In {of.data.contexts.text_name}"
    return "On the repeated sequence" if STATISTICS[name].on == "repeated" else "On the prompts"


def _mean_weight(of: Heads, name: str, index: int) -> list[Part]:
    """Returns the mean weight on the targets of a name, with its error and its value by chance. On
    the text, or without one on the prompts."""
    target = KINDS[name].target.format(of.offsets[index])
    value = float(of.row.values[name].flat[index])
    error = float(of.row.errors[name].flat[index]) if name in of.row.errors else None
    chance = formatted(of.chance(name, index))
    weight = ["bold", formatted_mean(value, error)]
    return ["mean weight ", weight, f" on {target} (chance {chance})"]


def _example(of: Heads, row: Mapping) -> list[Part]:
    """Returns an example of what a head with a name does, if there is one."""
    number = of.examples[of.index(row)]
    if number < 0:
        return []
    labels, cell = of.prompts[number].labels, of.cells[number][of.index(row)]
    where = f"in prompt {number + 1}, " if len(of.prompts) > 1 else ""
    average = f"; on average {formatted(cell.mean)}" if row["name"] == "positional" else ""
    return [
        f" For example, {where}at ",
        ["token", labels[cell.query]],
        f" ({cell.query}) it attends to ",
        ["token", labels[cell.key]],
        f" ({cell.key}), with weight ",
        ["bold", formatted_weight(cell.weight)],
        f" (chance {formatted(cell.chance)}){average}.",
    ]


def _unnamed(of: Heads, index: int) -> list[Part]:
    """Returns why a head has no name: the name that is nearest, and what it needs."""
    found = significances(of.row.values, of.data.uniform).reshape(len(NAMES), -1)[:, index]
    if not np.isfinite(found).any():
        return ["Its attention fits none of the named patterns."]
    at = int(np.nanargmax(found / LIMITS))
    name, chance = NAMES[at], of.chance(NAMES[at], index)
    title = with_article(kind_title(name, of.offsets[index]))
    nearest = f"{_place(of, name)}, it is nearest to {title}: "
    least = formatted(chance + LIMITS[at] * (1 - chance))
    where = f"and {MIN_ERRORS} standard errors above chance" if of.row.errors else "on each prompt"
    return [nearest, *_mean_weight(of, name, index), f"; a name needs at least {least}, {where}."]


def subject(data: SnapshotData, status: Mapping, step: int | None) -> list[Part]:
    """Returns what the model is, how many heads have names at a step and, from the last snapshot,
    which heads the model needs. data: the last snapshot. status: of `statuses` at the step. step:
    None without a training."""
    layers, heads = data.row.names.shape
    removed = data.measured
    when = "; " if step is None else f". At step {step:,}, "
    with_attention = " with attention" if data.others else ""
    sizes = f": {_count(layers, 'layer')}{with_attention} × {_count(heads, 'head')}{when}"
    names = [{"name": ALL_NAMES[number]} for number in status["names"]]
    said: list[Part] = [["bold", data.run], f"{sizes}{counts_of_names(names)}"]
    if data.contexts and (weak := sum(status["hollow"])):
        said.append(f"; {weak} of the names not on {data.contexts.text_name}")
    said.append(". ")
    groups = removed.get("groups", [])
    if most := most_important(groups):
        needs = f"The model needs {group_title(most['name'], most['heads'])} most"
        them = "it" if most["heads"] == 1 else "them"
        before, after = (formatted_loss(removed["loss"] + c) for c in (0, most["loss_change"]))
        if step not in (None, data.step):
            needs = f"At step {data.step:,}, the{needs.removeprefix('The')}"
        said += [f"{needs}: without {them}, the loss rises from {before} to ", ["bold", after], "."]
    return said


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def between_layers(data: SnapshotData) -> list[str]:
    """Returns what is before each layer with attention weights, and after the last: "layers 0 to 2:
    linear attention, no weights", or "". L + 1 texts."""
    found: list[list[int]] = [[] for _ in range(len(data.row.layers) + 1)]
    for number in sorted(data.others):
        found[bisect.bisect(data.row.layers, number)].append(number)
    return [_others([data.others[n] for n in numbers], numbers) for numbers in found]


def _others(kinds: Sequence[str], numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    counts = Counter(kinds)
    what = ", ".join(f"{n} {kind}" for kind, n in counts.items()) if len(counts) > 1 else kinds[0]
    where = f"layer {numbers[0]}"
    if len(numbers) > 1:
        where = f"layers {numbers[0]} {'to' if len(numbers) > 2 else 'and'} {numbers[-1]}"
    return f"{where}: {what}, no weights"


# ------------------------------------------------------------------- removed heads


REMOVED = "Removed: the output of the heads is replaced by its mean."
ESTIMATED = (
    "Estimated: the model did not run without the heads. An estimate can be wrong by any amount, "
    "also in its sign, above all where the loss is nearly 0."
)


def removed_heads(found: dict, row: Row) -> dict:
    """Returns what the page shows of the result of `head_removal`. row: of the same step.

    step      of the measurement
    changes   [change of the loss per head]
    findings  [sentences per head]
    columns   [title per column] of the table
    groups    [{key: of the name, cells: [text per column], meaning, is_noise}], the first without a
              key: nothing removed
    notes     [how it was measured, what it means]
    """
    of_names = {group["name"]: group for group in found["groups"]}
    sentences = []
    for index, (head, number) in enumerate(zip(found["heads"], row.names.flat, strict=True)):
        said = _without(found, head, row.head_name(index))
        group = of_names.get(ALL_NAMES[number], {"heads": 1})
        if group["heads"] > 1:
            said += [" ", *_without(found, group, group_title(group["name"], group["heads"]))]
        sentences.append(said)
    how, columns = REMOVED, ["removed", "loss", "change", "accuracy"]
    if is_estimate(found):
        how, columns = f"{REMOVED} {ESTIMATED}", ["removed", "estimated loss", "change"]
    where = f"{_count(found['targets'], 'prediction')} in "
    where += _count(found["windows"], "validation window")
    whole = f"the loss with all heads is {formatted_loss(found['loss'])} there"
    return {
        "step": found["step"],
        "changes": [head["loss_change"] for head in found["heads"]],
        "findings": sentences,
        "columns": columns[: 4 - (found["accuracy"] is None)],
        "groups": _table(found) if found["groups"] else [],
        "notes": [
            f"{how} Measured on {where}: {whole}; ± is the standard error.",
            "Attention is not importance: a head can have a clear pattern that the model does not "
            "need. Heads of the same name can replace each other: the loss may change little "
            "without one of them and much without all of them.",
        ],
    }


def _without(found: dict, result: dict, what: str) -> list[Part]:
    """Returns the loss and the accuracy after a removal."""
    is_unclear = within_noise(result)
    change = formatted_change(result["loss_change"], result["loss_change_error"])
    changes = "is estimated to change" if is_estimate(found) else "changes"
    said: list[Part] = [f"Without {what}, the loss {changes} by "]
    said.append(change if is_unclear else ["bold", change])
    said.append(" (not clearly different from 0)" * is_unclear)
    said.append(f" to {formatted_loss(found['loss'] + result['loss_change'])}")
    if (without := result["accuracy_without"]) is not None:
        said.append(f", the accuracy from {formatted(found['accuracy'])} to {formatted(without)}")
    return [*said, "."]


def _table(found: dict) -> list[dict]:
    """Returns the rows of the table: nothing removed, then the names by the change of the loss."""

    def row(key: str, *cells: str, accuracy: float | None, is_noise: bool = False) -> dict:
        more = [] if found["accuracy"] is None else [formatted(accuracy)]
        meaning = KINDS[key].meaning if key in KINDS else ""
        return {"key": key, "cells": [*cells, *more], "meaning": meaning, "is_noise": is_noise}

    rows = [row("", "nothing", formatted_loss(found["loss"]), "", accuracy=found["accuracy"])]
    for group in sorted(found["groups"], key=lambda group: -group["loss_change"]):
        title, change = group_title(group["name"], group["heads"]), group["loss_change"]
        loss = formatted_loss(found["loss"] + change)
        size = formatted_change(change, group["loss_change_error"])
        more = {"accuracy": group["accuracy_without"], "is_noise": within_noise(group)}
        rows.append(row(group["name"], title, loss, size, **more))
    return rows


# ------------------------------------------------------------------- the terminal


def counts_of_names(table: Sequence[Mapping]) -> str:
    """Returns the number of heads with a name, and of each name: "3 of 32 heads have a name: 2
    induction, 1 separator"."""
    counts = Counter(title_of(row["name"]) for row in table if row["name"] in KINDS)
    kinds = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    has = "have" if counts.total() > 1 else "has"
    some = f"{counts.total() or 'none'} of {_count(len(table), 'head')} {has} a name"
    return f"{some}: {kinds}" if counts else some


def head_line(row: Mapping, has_steps: bool = True) -> str:
    """Returns a line about a head with a name: "L5 H1 previous token: mean weight 0.83 on the token
    before (since step 400)". row: of heads.head_table."""
    target = KINDS[row["name"]].target.format(row["tokens_back"])
    said = f"mean weight {formatted(row[row['name']])} on {target}"
    if row["name"] not in NAMES:  # the value of a positional head is not a weight
        said = f"value {formatted(row['positional'])}, depends on {target}"
    place = head_name(row["layer"], row["head"])
    since = f" (since step {row['since_step']})" * has_steps
    return f"{place} {title_of_head(row)}: {said}{since}"


def removal_lines(found: dict, row: Row) -> list[str]:
    """Describes the head, and the name of several heads, that the model needs most. found: the
    result of `head_removal`. row: of the same step."""
    said = []
    if first := most_important(found["heads"]):
        index = found["heads"].index(first)
        title = title_of(ALL_NAMES[row.names.flat[index]]) or "no name"
        said.append(_without(found, first, f"{row.head_name(index)} ({title})"))
    else:
        said.append(["Without any single head, the loss increases by less than the noise."])
    if first := most_important(group for group in found["groups"] if group["heads"] > 1):
        said.append(_without(found, first, group_title(first["name"], first["heads"])))
    return [plain(sentence) for sentence in said]
