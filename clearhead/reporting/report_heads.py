"""Section "Attention heads" of report.html: for each name, the most significant head.

    heads_section(Path("runs/first/attention"))

It reads heads.csv, ablation.json, statistics.jsonl and the page of the newest snapshot, and omits
what is missing or invalid.
"""

import csv
import math
from collections import Counter
from pathlib import Path

import numpy as np

from clearhead.files import read_bounded, read_json, read_rows
from clearhead.lens.heads import ALL_NAMES, NAMED_FROM, NAMES, title_of
from clearhead.lens.heatmap import data_url
from clearhead.lens.page import codes_of, read
from clearhead.reporting.charts import finite, number, thin

# Name of a head: what it does
MEANINGS = {
    "previous_token": "Each token attends to the token before it.",
    "induction": "Each token attends to the token that followed its earlier occurrence. So the"
    " model can continue a sequence that it has seen before.",
    "duplicate_token": "Each token attends to its earlier occurrence.",
    "first_token": "Most tokens attend to the first token, an attention sink.",
    "diagonal": "Each token attends to itself.",
    "separator": "The tokens attend to punctuation and line breaks.",
    "positional": "The attention depends on the positions of the tokens, hardly on the tokens.",
}
MAX_TABLE, MAX_PAGE = 2**24, 2**27  # bytes; larger files are ignored
THUMBNAIL = 128  # pixels, as in style.css
MAX_LISTED = 12  # heads with the same name

Maps = dict[bool, np.ndarray]  # whether the prompt is repeated: codes (L, H, T (T + 1) / 2)


def heads_section(folder: Path) -> str:
    """Returns the section as HTML; "" without a table of heads. folder: the attention folder."""
    table = read_table(folder / "heads.csv")
    if not table:
        return ""
    named = [row for row in table if row["name"] in MEANINGS]
    counts = Counter(title_of(row["name"]) for row in named)
    kinds = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    has = "has" if len(named) == 1 else "have"
    found = f"{len(named)} of {len(table)} heads {has} a name{': ' if kinds else ''}{kinds}."
    if count := sum(row["name"] == "uniform" for row in table):
        found += f" {count} {'has' if count == 1 else 'have'} nearly uniform attention."
    if not named:
        largest, least = max(row["significance"] for row in table), min(NAMED_FROM.values())
        found += f" A name needs a significance of {least}; the largest is {largest:.2f}."
    rows, maps = read_rows(folder / "statistics.jsonl"), last_maps(folder)
    groups, is_estimate = read_ablation(folder / "ablation.json")
    if is_estimate:
        found += " Changes of the loss are first-order estimates."
    cards = []
    for name in dict.fromkeys(row["name"] for row in named):  # in the order of the table
        head, *others = [row for row in named if row["name"] == name]
        text = description(head, others, groups.get(name, {})) + curve(head, rows)
        cards.append(f"<article>{thumbnail(head, maps)}<div>{text}</div></article>")
    return f'<p>{found}</p><div class="heads">{"".join(cards)}</div>'


def read_table(path: Path) -> list[dict]:
    """Returns the rows of heads.csv with valid values."""
    try:
        text = read_bounded(path, MAX_TABLE).decode("utf-8", "replace")
        rows = list(csv.DictReader(text.splitlines()))
    except (OSError, csv.Error):
        return []
    table = []
    for row in rows:
        name = row.get("name")
        numbers = {key: number(value) for key, value in row.items() if key and key != "name"}
        known = {key: value for key, value in numbers.items() if not math.isnan(value)}
        is_head = all(0 <= known.get(key, -1) < 1e6 for key in ("layer", "head"))
        if is_head and "significance" in known and name in ALL_NAMES:
            table.append(known | {"name": name})
    return table


def read_ablation(path: Path) -> tuple[dict[str, dict], bool]:
    """Returns from ablation.json the numbers of each removed group of heads, by name, and whether
    they are estimates."""
    try:
        found = read_json(path, MAX_TABLE)
        groups = {
            group["name"]: {
                key: value for key in group if math.isfinite(value := number(group[key]))
            }
            for group in found["groups"]
        }
        return groups, found["method"] == "estimate"
    except (OSError, ValueError, LookupError, TypeError):
        return {}, False


def change(row: dict) -> str:
    """Returns the change of the loss without heads, with its standard error if it is known."""
    error = f" ± {row['loss_change_error']:.4f}" if "loss_change_error" in row else ""
    return f"{row['loss_change']:+z.4f}{error}"


def description(row: dict, others: list[dict], group: dict) -> str:
    """Returns what a head does as HTML. others: heads with the same name. group: the change of the
    loss without all of them, or {}."""
    facts = []
    is_weight = row["name"] in NAMES  # "positional" is not, and has no significance
    if row["name"] in row:
        facts.append(f"{'mean weight' if is_weight else 'value'} {row[row['name']]:.2f}")
    if is_weight:
        facts.append(f"significance {row['significance']:.2f}")
    if "loss_change" in row:
        facts.append(f"loss without this head: {change(row)}")
    if others and "loss_change" in group:
        which = "both" if len(others) == 1 else f"all {len(others) + 1}"
        facts.append(f"without {which} {title_of(row['name'])} heads: {change(group)}")
    if others:
        listed = ", ".join(map(place, others[:MAX_LISTED]))
        more = len(others) - MAX_LISTED
        facts.append(f"also {listed}" + (f" and {more} more" if more > 0 else ""))
    since = f" since step {row['since_step']:,.0f}" if "since_step" in row else ""
    return (
        f"<h3>{place(row)}: {title_of(row['name'])}<small>{since}</small></h3>"
        f'<p>{MEANINGS[row["name"]]}</p><p class="quiet">{" · ".join(facts)}</p>'
    )


def place(row: dict) -> str:
    return f"L{row['layer']:.0f} H{row['head']:.0f}"


def curve(row: dict, rows: list[dict]) -> str:
    """Returns an SVG of the statistic of a head over the steps. rows: of statistics.jsonl."""
    name, layer, head = row["name"], int(row["layer"]), int(row["head"])
    points = []
    for snapshot in rows:
        try:
            points.append((snapshot["step"], number(snapshot[name][layer][head])))
        except (KeyError, IndexError, TypeError):
            continue
    points = thin(finite(points))
    last = points[-1][0] if points else 0
    if last == 0:
        return ""

    def x(step: float) -> str:
        return f"{100 * min(step / last, 1):.2f}"

    path = "L".join(f"{x(step)} {100 * (1 - min(max(v, 0), 1)):.2f}" for step, v in points)
    since = x(row.get("since_step", 0))
    return (
        f'<svg role="img" aria-label="{title_of(name)} over the steps" viewBox="0 0 100 100"'
        f' preserveAspectRatio="none"><path class="since" d="M{since} 0V100"/>'
        f'<path class="training" d="M{path}"/></svg>'
        f'<p class="axis quiet"><span>step {points[0][0]:,}</span><span>{last:,}</span></p>'
    )


def last_maps(folder: Path) -> Maps:
    """Returns the weights of the newest snapshot on a repeated and on an ordinary prompt."""
    pages = [path for path in folder.glob("step_*.html") if path.is_file()]
    if not pages or (newest := max(pages)).stat().st_size > MAX_PAGE:
        return {}
    try:
        run = read(newest)[0]
        is_repeated = [bool(prompt["period"]) for prompt in run["prompts"]]
        codes = codes_of(run, run["frames"][-1])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}  # not a page
    return {kind: codes[is_repeated.index(kind)] for kind in set(is_repeated)}


def thumbnail(row: dict, maps: Maps) -> str:
    """Returns the heatmap of a head as HTML, on a prompt that shows what the head does."""
    in_repeated = row["name"] in ("induction", "duplicate_token")
    codes = maps.get(in_repeated, maps.get(not in_repeated))
    try:
        url = data_url(codes[int(row["layer"]), int(row["head"])], THUMBNAIL)
    except (IndexError, TypeError, ValueError):
        return ""  # no map, or not of this model
    text = f"Attention of {place(row)}: rows are query tokens, columns are key tokens"
    return f'<img src="{url}" alt="{text}">'
