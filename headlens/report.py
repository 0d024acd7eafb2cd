"""The heads of a run for a report: for each name, the most significant head.

    heads_section(Path("runs/first/attention"))

It is made from the newest snapshot and statistics.jsonl.
"""

from pathlib import Path

import numpy as np

from .heads import (
    KINDS,
    NAMES,
    clearest,
    counts_of_names,
    head_table,
    prompt_of,
    title_of,
    title_of_head,
)
from .heatmap import data_url
from .history import Row, evenly_spaced, read_history
from .rounding import formatted, formatted_change, formatted_loss
from .snapshot_data import Contexts, SnapshotData, read_snapshot, snapshot_files

THUMBNAIL = 128  # pixels, as in style.css
MAX_LISTED = 12  # heads with the same name
MAX_POINTS = 1000  # of a curve


def heads_section(folder: Path) -> tuple[str, str]:
    """Returns a clause about the names of the heads, and the section as HTML; "" without a
    snapshot. folder: the attention folder."""
    if not (files := snapshot_files(folder)):
        return "", ""
    data = read_snapshot(files[-1])
    rows = read_history(folder / "statistics.jsonl") or [data.row]
    table = head_table(rows, data.uniform)
    removed = data.ablation or {"heads": [], "groups": [], "method": ""}
    changes = {(row["layer"], row["head"]): row for row in removed["heads"]}
    changes |= {group["name"]: group for group in removed["groups"]}
    named = [row for row in table if row["name"] in KINDS]
    notes = []
    if count := sum(row["name"] == "uniform" for row in table):
        what = "head has" if count == 1 else "heads have"
        notes.append(f"{count} {what} nearly uniform attention.")
    if not named:
        largest = formatted(max(row["significance"] or 0 for row in table))
        least, *_, most = sorted({kind.named_from for kind in KINDS.values()})
        limit = f"A name needs a significance of {least} (some names: {most})"
        notes.append(f"{limit}; the largest is {largest}.")
    elif removed["method"] == "estimate":
        notes.append("Changes of the loss are first-order estimates.")
    cards = []
    for head in clearest(table):
        others = [row for row in named if row["name"] == head["name"] and row is not head]
        text = description(head, others, changes, data.contexts) + curve(head, rows)
        cards.append(f"<article>{thumbnail(head, data)}<div>{text}</div></article>")
    notes = f'<p class="quiet">{" ".join(notes)}</p>' if notes else ""
    return counts_of_names(table), f'{notes}<div class="heads">{"".join(cards)}</div>'


def change(row: dict) -> str:
    """Returns the change of the loss without heads, with its standard error if it is known."""
    if formatted_loss(row["loss_change"], signed=True) == "0":
        return "no measurable change"
    return formatted_change(row["loss_change"], row["loss_change_error"])


def description(
    row: dict, others: list[dict], changes: dict, contexts: Contexts | None = None
) -> str:
    """Returns what a head does as HTML. others: heads with the same name. changes: of the loss,
    without a head, by (layer, head), and without all heads of a name, by name. contexts: if heads
    were measured on a text."""
    name = row["name"]
    is_weight = name in NAMES  # "positional" is not, and has no significance
    facts = [f"{'mean weight' if is_weight else 'value'} {formatted(row[name])}"]
    if is_weight and row["error"] is not None:
        facts[0] += f" ± {row['error']:.2g} on the text"
    if is_weight:
        facts.append(f"significance {formatted(row['significance'])}")
    if is_weight and contexts:
        facts.append(f"its name explains {contexts.explained(row):.0%} of its attention")
    if found := changes.get((row["layer"], row["head"])):
        facts.append(f"loss without this head: {change(found)}")
    if others and name in changes:
        which = "both" if len(others) == 1 else f"all {len(others) + 1}"
        facts.append(f"without {which} {title_of(name)} heads: {change(changes[name])}")
    if others:
        listed = ", ".join(map(place, others[:MAX_LISTED]))
        more = len(others) - MAX_LISTED
        facts.append(f"also {listed}" + (f" and {more} more" if more > 0 else ""))
    since = f"<small> since step {row['since_step']:,}</small>"
    return (
        f"<h3>{place(row)}: {title_of_head(row)}{since}</h3>"
        f'<p>{KINDS[name].meaning}</p><p class="quiet">{" · ".join(facts)}</p>'
    )


def place(row: dict) -> str:
    return f"L{row['layer']} H{row['head']}"


def curve(row: dict, rows: list[Row]) -> str:
    """Returns an SVG of the statistic of a head over the steps. rows: of statistics.jsonl."""
    name, place = row["name"], (row["layer"], row["head"])
    of_head = [(at.step, float(at.values[name][place])) for at in rows]
    points = evenly_spaced([point for point in of_head if np.isfinite(point[1])], MAX_POINTS)
    last = points[-1][0] if points else 0
    if last == 0:
        return ""

    def x(step: float) -> str:
        return f"{100 * min(step / last, 1):.2f}"

    path = "L".join(f"{x(step)} {100 * (1 - min(max(v, 0), 1)):.2f}" for step, v in points)
    since = x(row["since_step"])
    return (
        f'<svg role="img" aria-label="{title_of(name)} over the steps" viewBox="0 0 100 100"'
        f' preserveAspectRatio="none"><path class="since" d="M{since} 0V100"/>'
        f'<path class="training" d="M{path}"/></svg>'
        f'<p class="axis quiet"><span>step {points[0][0]:,}</span><span>{last:,}</span></p>'
    )


def thumbnail(row: dict, data: SnapshotData) -> str:
    """Returns the heatmap of a head as HTML, on a prompt that shows what the head does."""
    codes = data.codes[prompt_of(row["name"], [prompt.period for prompt in data.prompts])]
    url = data_url(codes[row["layer"], row["head"]], THUMBNAIL)
    text = f"Attention of {place(row)}: rows are query tokens, columns are key tokens"
    return f'<img src="{url}" alt="{text}">'
