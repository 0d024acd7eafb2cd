"""What the page says about removed heads: sentences and the table of groups, from the result of
ablation.py. A sentence is a list of parts, see finding.py.
"""

import math
from collections.abc import Sequence

import numpy as np

from .ablation import within_noise
from .finding import Part, group_title, head_name
from .heads import ALL_NAMES, KINDS
from .history import Row
from .rounding import formatted, formatted_change, formatted_loss, rounded

ALSO_FROM = 0.1  # of the largest change: from there on, the model needs a group too
MORE_FROM = 3  # standard errors: a change is then more than those of single heads


def removed_heads(found: dict, row: Row, text_name: str = "") -> dict:
    """Returns what the page shows of the result of `ablate`. row: of the same step.

    step      of the measurement
    changes   [change of the loss per head]
    findings  [sentences per head]
    columns   [title per column] of the table
    groups    [{key: of the name, cells: [text per column], meaning, is_noise}], the first without a
              key: nothing removed
    notes     [how it was measured, what it means]
    """
    groups = sorted(found["groups"], key=lambda group: -group["loss_change"])
    heads, names = found["heads"], [ALL_NAMES[name] for name in row.names.ravel().tolist()]
    change = "change" if found["method"] == "exact" else "change (estimated)"
    accuracy = ["accuracy"] * (found["accuracy"] is not None)
    return {
        "step": found["step"],
        "changes": [head["loss_change"] for head in heads],
        "findings": [_sentences(found, head, names, n) for n, head in enumerate(heads)],
        "columns": ["removed", "loss", change, *accuracy],
        "groups": _table(found, groups, row, text_name) if groups else [],
        "notes": _notes(found),
    }


def _sentences(found: dict, head: dict, names: Sequence[str], index: int) -> list[Part]:
    """Returns the loss without a head, and without all heads of its name. names: of all heads."""
    name = names[index]
    is_exact, singles = found["method"] == "exact", found["heads"]
    said = _sentence(found, head, head_name(head["layer"], head["head"]))
    is_largest = head["loss_change"] == max(single["loss_change"] for single in singles)
    if is_exact and is_largest and len(singles) > 1 and not within_noise([head]):
        said[-1:] = [f"; this is the largest change of the {len(singles)} heads."]
    group = next((group for group in found["groups"] if group["name"] == name), None)
    if group and group["heads"] > 1:
        said += [" ", *_sentence(found, group, group_title(name, group["heads"]))]
        members = [head for head, of in zip(singles, names, strict=True) if of == name]
        total = sum(head["loss_change"] for head in members)
        limit = total + MORE_FROM * (group["loss_change_error"] or math.inf)
        if is_exact and group["loss_change"] > limit:
            said.append(
                f" The single changes together are only {formatted_loss(total, signed=True)}:"
                " without one of these heads, the others replace a part of what it does."
            )
    result = group or head
    if name in KINDS and is_exact and result["loss_change"] > 0 and not within_noise([result]):
        said += [f" {KINDS[name].removal}"] * bool(KINDS[name].removal)
    return said + (_also_needed(found, name) if is_exact else [])


def _sentence(found: dict, result: dict, what: str) -> list[Part]:
    """Returns the loss and the accuracy before and after a removal."""
    change, error = result["loss_change"], result["loss_change_error"]
    losses = [found["loss"], found["loss"] + change]
    before, after = map(formatted_loss, losses)
    is_none = formatted_loss(change, signed=True) == "0"
    if before == after and not is_none:
        before, after = (rounded(loss, 4) for loss in losses)
    is_unclear = within_noise([result])
    verb = "rise" if change > 0 else "fall"
    size = formatted_change(change, error)
    if is_none:
        said: list[Part] = [f"Without {what}, the loss stays at {before} (no measurable change)"]
    elif found["method"] != "exact":
        unclear = ", not clearly different from 0" if is_unclear else ""
        estimated = f"the loss is estimated to {verb} from {before} to about {after}"
        said = [f"Without {what}, {estimated} ({size}{unclear})"]
    elif is_unclear:
        changes = f"the loss changes from {before} to {after}"
        said = [f"Without {what}, {changes} ({size}, not clearly different from 0)"]
    else:
        said = [
            f"Without {what}, the loss {verb}s from {before} to ",
            ["bold", after],
            f" ({size})",
        ]
    if (without := result["accuracy_without"]) is not None:
        accuracies = formatted(found["accuracy"]), formatted(without)
        if accuracies[0] == accuracies[1]:
            said.append(f", and the accuracy stays at {accuracies[0]}")
        else:
            said += [f", and the accuracy goes from {accuracies[0]} to ", ["bold", accuracies[1]]]
    return [*said, "."]


def _also_needed(found: dict, name: str) -> list[Part]:
    """Returns the other groups of heads that the model clearly needs, if it needs this one."""
    groups = found["groups"]
    most = max((group["loss_change"] for group in groups), default=0)
    needed = {
        group["name"]: group_title(group["name"], group["heads"])
        for group in groups
        if group["loss_change"] > max(ALSO_FROM * most, 2 * (group["loss_change_error"] or 0))
    }
    others = [title for other, title in needed.items() if other != name]
    if not others or name not in needed:
        return []
    return [f" The model also needs {' and '.join(others)}."]


def _table(found: dict, groups: Sequence[dict], row: Row, text_name: str) -> list[dict]:
    """Returns the rows of the table, with one number of decimals in the column of losses."""
    losses = [found["loss"], *(found["loss"] + group["loss_change"] for group in groups)]
    shown = [formatted_loss(loss) for loss in losses]
    if len({*shown}) < len({*losses}):  # so that small changes are seen
        shown = [rounded(loss, 4) for loss in losses]
    nothing = ["nothing", shown[0], ""]
    if found["accuracy"] is not None:
        nothing.append(formatted(found["accuracy"]))
    rows = [{"key": "", "cells": nothing, "meaning": "", "is_noise": False}]
    for group, loss in zip(groups, shown[1:], strict=True):
        name = group["name"]
        cells = [group_title(name, group["heads"]), loss]
        cells.append(formatted_change(group["loss_change"], group["loss_change_error"]))
        if found["accuracy"] is not None:
            cells.append(formatted(group["accuracy_without"]))
        meaning = KINDS[name].meaning if name in KINDS else ""
        of_name = row.names == ALL_NAMES.index(name)
        # 2: of PLACES, on the prompts only
        weak = int(np.count_nonzero(of_name & (row.places == 2))) if text_name else 0
        if weak:
            which = "" if weak == group["heads"] else f"{weak} of them "
            meaning += f" {which}on repeated sequences only, not on {text_name}."
        is_noise = within_noise([group])
        rows.append({"key": name, "cells": cells, "meaning": meaning, "is_noise": is_noise})
    return rows


def _notes(found: dict) -> list[str]:
    """Returns how the loss was measured, and what it means."""
    how = "Removed: the output of the heads is replaced by its mean."
    if found["method"] != "exact":
        how = "First-order estimates (gradient times change), correct only for small changes."
    windows, targets = found["windows"], found["targets"]
    where = f"{targets:,} prediction{'s' * (targets != 1)}"
    where += f" in {windows} validation window{'s' * (windows != 1)}"
    error = "; ± is the standard error" if windows > 1 else ""
    whole = f"the loss with all heads is {formatted_loss(found['loss'])} there"
    return [
        f"{how} Measured on {where}: {whole}{error}.",
        "Attention is not importance: a head can have a clear pattern that the model does not need."
        " Heads of the same name can replace each other: the loss may change little without one of"
        " them and much without all of them.",
    ]
