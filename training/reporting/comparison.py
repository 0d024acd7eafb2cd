"""Comparison of runs: reads run directories, and creates tables and a plot.

    rows = summarize([read(folder, "val/loss") for folder in folders], "val/loss")
    print(tables(rows, "val/loss"))
    Path("results.png").write_bytes(plot(rows, "val/loss"))

Runs that differ only in their seed share a row; rows are sorted by the metric, lowest first. Runs
with different texts or tokenizers are in separate tables, because their losses are not comparable.
Used by sweeps (training/reporting/sweep.py) and scripts/compare.py. Reads run.json, metrics.jsonl.
"""

import io
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from errors import as_yaml, sanitize
from files import read_rows
from training.checkpoint.run_directory import settings_of
from training.config.yaml_files import flat
from training.reporting.charts import number

# Settings that change what a run learns, although they may be changed when it is resumed.
LEARNING = {"data.path", "data.val_path", "trainer.max_steps", "trainer.init_from"}
Y_LIMIT = 1.5  # upper limit of a chart, relative to the median of the first values
COLOURS = 10  # of matplotlib; more rows repeat them and have no legend entry

Points = list[tuple[int, float]]  # (tokens so far, metric)


@dataclass
class Run:
    name: str
    settings: dict[str, object]  # by dotted name
    metrics: set[str]  # names in metrics.jsonl
    points: Points
    is_finished: bool


@dataclass
class Row:
    """The runs that differ only in their seed."""

    text: str  # settings of text and tokenizer
    settings: dict[str, object]  # other settings in which any runs differ
    runs: list[str]
    seeds: list[object]
    unfinished: list[str]
    tokens: int  # maximum over the runs
    curves: list[Points]
    values: list[float]  # last value of each run
    mean: float  # of values; NaN if any value is NaN
    tokens_to_target: list[int | None]  # of each run; empty without a target


# ------------------------------------------------------------------------------------- reading


def read(folder: Path, metric: str) -> Run:
    """Reads a run directory. Raises ValueError for any other directory."""
    settings = flat(settings_of(folder) or {})
    max_steps = settings.get("trainer.max_steps")
    if type(max_steps) is not int:
        raise ValueError("run.json is missing or damaged")
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] > 0]
    points = []
    for row in rows:
        tokens = row.get("train/tokens")
        if metric in row and type(tokens) is int and 0 <= tokens < 2**63:
            points.append((tokens, number(row[metric])))
    metrics = set().union(*rows) - {"step"}
    is_finished = bool(rows) and rows[-1]["step"] >= max_steps
    return Run(folder.name, settings, metrics, points, is_finished)


def differing(runs: list[Run], swept: Collection[str] = ()) -> list[str]:
    """Returns the settings that differ between the runs, except name and seed. Includes settings
    that do not change what a run learns only if they are in `swept`."""
    from training.checkpoint.resume import FREE_TO_CHANGE

    equal, free = shared(runs), FREE_TO_CHANGE - LEARNING
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in equal)
    found = [n for n in names if n in swept or not free & {n, n.partition(".")[0]}]
    return [name for name in found if name not in ("seed", "name")]


def shared(runs: list[Run]) -> dict[str, object]:
    """Returns the settings that are equal in all runs."""
    return {
        name: value
        for name, value in runs[0].settings.items()
        if all(name in run.settings and run.settings[name] == value for run in runs)
    }


def data_settings(run: Run, metric: str) -> dict[str, object]:
    """Returns the settings of text and tokenizer for a metric. Values of runs are comparable if
    these are equal. Bits per byte do not depend on the tokenizer."""
    names = ["data.path", "data.synthetic"]
    if metric.startswith("val/") and run.settings.get("data.val_path"):
        names = ["data.val_path"]
    if not metric.endswith("/bits_per_byte"):
        names.append("data.tokenizer")
    return {name: run.settings.get(name) for name in names}


def summarize(
    runs: list[Run], metric: str, target: float | None = None, swept: Collection[str] = ()
) -> list[Row]:
    """Returns one row per group of runs that differ only in their seed; omits runs without the
    metric. Rows are sorted by text and tokenizer, and then by the metric, lowest first."""
    names = differing(runs, swept)
    groups: dict[str, list[Run]] = {}
    for run in filter(lambda run: run.points, runs):
        text = data_settings(run, metric)
        settings = {name: run.settings.get(name) for name in names if name not in text}
        groups.setdefault(json.dumps([text, settings]), []).append(run)
    rows = []
    for key, group in groups.items():
        text, settings = json.loads(key)
        last = [run.points[-1][1] for run in group]
        reached = [] if target is None else [tokens_to(target, run.points) for run in group]
        row = Row(
            text=sanitize(", ".join(f"{k}={as_yaml(v)}" for k, v in text.items() if v), keep=""),
            settings=settings,
            runs=[run.name for run in group],
            seeds=[run.settings.get("seed") for run in group],
            unfinished=[run.name for run in group if not run.is_finished],
            tokens=max(run.points[-1][0] for run in group),
            curves=[run.points for run in group],
            values=last,
            mean=statistics.fmean(last),
            tokens_to_target=reached,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row.text, math.isnan(row.mean), row.mean))


def tokens_to(target: float, points: Points) -> int | None:
    """Returns the tokens until the metric first was at or below the target; None if never."""
    return next((tokens for tokens, value in points if value <= target), None)


def by_text(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows in one list for each text and tokenizer."""
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.text)]


def as_json(value: object) -> bytes:
    """Returns a value, which may contain rows, as JSON. NaN and infinity become null."""
    value = json.loads(json.dumps(value, default=vars), parse_constant=lambda _: None)
    return (json.dumps(value, indent=1) + "\n").encode()


# ---------------------------------------------------------------------------------- the tables


def tables(rows: list[Row], metric: str) -> str:
    """Returns a Markdown table, readable in a terminal, for each text and tokenizer."""
    parts = [f"## {group[0].text}\n\n{table(group, metric)}" for group in by_text(rows)]
    return "\n\n".join(parts)


def table(rows: list[Row], metric: str) -> str:
    head = [*rows[0].settings, "runs", "tokens", metric, "min–max"]
    if rows[0].tokens_to_target:
        head.append("tokens to target")
    lines = [[*head, "run"]]
    for row in rows:
        count = len(row.runs)
        unfinished = f" ({len(row.unfinished)} unfinished)" if row.unfinished else ""
        has_spread = count > 1 and not math.isnan(row.mean)
        cells = [as_yaml(value) for value in row.settings.values()]
        cells += [f"{count}{unfinished}", f"{row.tokens:,}", f"{row.mean:.4f}"]
        cells.append(f"{min(row.values):.4f}–{max(row.values):.4f}" if has_spread else "")
        if row.tokens_to_target:
            reached = [tokens for tokens in row.tokens_to_target if tokens is not None]
            mean = f"{round(statistics.fmean(reached)):,}" if reached else "never"
            cells.append(f"{mean} ({len(reached)} of {count})")
        lines.append([*cells, row.runs[0] + (f" + {count - 1}" if count > 1 else "")])
    lines = [[sanitize(cell.replace("|", "\\|"), keep="") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


# ------------------------------------------------------------------------------------ the plot


def plot(rows: list[Row], metric: str) -> bytes:
    """Returns a PNG with a chart of the metric over tokens for each text and tokenizer. Rows differ
    in colour; each seed is a line."""
    import matplotlib.style
    from matplotlib.figure import Figure

    groups = by_text(rows)
    style = ["seaborn-v0_8-whitegrid", {"text.parse_math": False}]
    with matplotlib.style.context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks
        figure = Figure(figsize=(7.5, 4.4 * len(groups)), layout="constrained")
        axes = figure.subplots(len(groups), squeeze=False)[:, 0]
        for axis, group in zip(axes, groups, strict=True):
            plot_group(axis, group, metric)
            axis.set_title(group[0].text[-80:], loc="left", fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


def plot_group(axis, rows: list[Row], metric: str) -> None:
    """Plots the rows. The y axis ends at Y_LIMIT times the median of the first values, so that
    a diverged run does not determine the scale."""
    from matplotlib.ticker import EngFormatter

    for index, row in enumerate(rows):
        label = ", ".join([f"{row.mean:.4f}", *(as_yaml(v)[-28:] for v in row.settings.values())])
        for seed, points in enumerate(row.curves):
            axis.plot(
                *zip(*points, strict=True),
                color=f"C{index % COLOURS}",
                marker="o" if len(points) <= 12 else None,
                ms=3,
                label=sanitize(label, keep="") if seed == 0 and index < COLOURS else None,
            )
    axis.set_xlabel("tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_ylabel(metric)
    starts = [points[0][1] for row in rows for points in row.curves]
    starts = [value for value in starts if math.isfinite(value)]
    bottom, top = axis.get_ylim()
    if starts and bottom < (highest := Y_LIMIT * statistics.median(starts)) < top:
        axis.set_ylim(top=highest)
    heading = ",\n".join(sanitize(name, keep="") for name in (f"mean {metric}", *rows[0].settings))
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    axis.legend(**place, title=heading, fontsize=9, title_fontsize=9, alignment="left")
