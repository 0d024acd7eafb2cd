"""Comparison of runs: read from their directories, as a table and a picture.

    runs = [read(folder, "val/loss")[0] for folder in folders]
    rows = summaries(runs, names := differing(runs), "val/loss")
    print(table(rows, names, "val/loss"))
    Path("results.png").write_bytes(draw(rows, names, "val/loss"))

Runs that differ by their seed alone are one row, the lowest metric first. Losses of different texts
or tokenizers cannot be compared, so those runs are in separate tables. Used after a sweep
(training/reporting/sweep.py) and by scripts/compare.py. Reads run.json and metrics.jsonl.
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

from errors import visible
from files import read_rows
from training.checkpoint.run_directory import settings_of
from training.config.schema import flat
from training.reporting.charts import number

VARIES = ("seed", "name")  # between runs of one row
# Settings that a resumed run may change and that still change what a run learns.
LEARNING = ("seed", "data.path", "data.val_path", "trainer.max_steps", "trainer.init_from")
AXIS_LABELS = {"val/loss": "validation loss", "train/loss": "training loss"}
IN_LEGEND = 10  # rows that get a line of the legend
LOG_RATIO = 8  # largest / smallest value from which a setting's axis is logarithmic


@dataclass
class Run:
    """One run: its settings by dotted name, and the points of the metric."""

    name: str
    settings: dict[str, object]
    points: list[tuple[int, float]]  # (tokens so far, metric)
    max_steps: int
    step: int  # the last one

    def tokens_to(self, target: float) -> int | None:
        return next((tokens for tokens, value in self.points if value <= target), None)


# ------------------------------------------------------------------------------------- reading


def read(folder: Path, metric: str, also: Collection[str] = ()) -> tuple[Run, set[str]]:
    """A run, and the names of all metrics in its log. Raises ValueError for another folder.

    also: settings that distinguish runs even if a resumed run may change them.
    """
    from training.checkpoint.resume import FREE_TO_CHANGE

    try:
        found = settings_of(folder)
        trainer, leaves = found["trainer"], flat(found)
        sizes = trainer["batch_size"], found["data"]["max_length"], trainer["max_steps"]
    except (KeyError, TypeError, RecursionError):
        sizes = ()
    if not sizes or not all(type(size) is int for size in sizes):
        raise ValueError("run.json is missing or damaged")
    settings = {
        name: value
        for name, value in leaves.items()
        if name in (*LEARNING, *also) or not FREE_TO_CHANGE & {name, name.split(".")[0]}
    }
    points, names = [], set()
    tokens_per_step, max_steps = sizes[0] * sizes[1], sizes[2]
    for row in (rows := read_rows(folder / "metrics.jsonl")):
        if row["step"] == 0:
            continue  # before training
        names |= row.keys() - {"step"}
        if metric in row:
            tokens = row.get("train/tokens")
            if type(tokens) is not int or not 0 <= tokens < 2**63:  # a row of version 1
                tokens = row["step"] * tokens_per_step
            points.append((tokens, number(row[metric])))
    last = rows[-1]["step"] if rows else 0
    return Run(folder.name, settings, points, max_steps, last), names


def differing(runs: list[Run]) -> list[str]:
    """The settings in which any two runs differ, in the order of config.yaml."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in VARIES)
    return [n for n in names if any(run.settings.get(n) != runs[0].settings.get(n) for run in runs)]


def shared(runs: list[Run], names: list[str]) -> dict[str, object]:
    """The settings that all runs have in common; of paths only the last part."""
    return {
        key: Path(value).name if key.endswith("path") and isinstance(value, str) else value
        for key, value in runs[0].settings.items()
        if key not in (*names, *VARIES)
    }


def summaries(
    runs: list[Run], names: list[str], metric: str, target: float | None = None
) -> list[dict]:
    """A row for the runs that differ by their seed alone, the best row first.

    row["table"]: number of its table, from 0; rows of different tables cannot be compared.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = json.dumps([run.settings.get(n) for n in names], default=str)
        groups.setdefault((measured_on(run, metric), key), []).append(run)
    tables = list(dict.fromkeys(measured for measured, _ in groups))
    rows = [
        {"table": tables.index(measured)} | summary(group, names, target)
        for (measured, _), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (row["table"], math.isnan(row["mean"]), row["mean"]))


def measured_on(run: Run, metric: str) -> str:
    """The text and the tokenizer of a metric: runs can be compared where both are the same, and
    bits per byte also between tokenizers."""
    validation = run.settings.get("data.val_path") if metric.startswith("val/") else None
    training = [run.settings.get(f"data.{key}") for key in ("path", "synthetic")]
    tokenizer = run.settings.get("data.tokenizer")
    if metric.endswith("/bits_per_byte"):
        tokenizer = None
    return json.dumps([validation or None, None if validation else training, tokenizer])


def summary(group: list[Run], names: list[str], target: float | None) -> dict:
    """One row; `values` and `mean` are of the last metric of each run, NaN if any of them is."""
    last = [run.points[-1][1] for run in group]
    row = {
        "settings": {name: group[0].settings.get(name) for name in names},
        "runs": [run.name for run in group],
        "seeds": [run.settings.get("seed") for run in group],
        "unfinished": [run.name for run in group if run.step < run.max_steps],
        "tokens": max(run.points[-1][0] for run in group),
        "curves": [run.points for run in group],
        "values": last,
        "mean": statistics.fmean(last),
    }
    if target is not None:
        row["tokens_to_target"] = [run.tokens_to(target) for run in group]
    return row


def as_json(value: object) -> bytes:
    """The value as JSON, NaN and infinity as null."""
    return (json.dumps(_without_nan(value), indent=1, default=str) + "\n").encode()


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------- the table


def table(rows: list[dict], names: list[str], metric: str, target: float | None = None) -> str:
    """Markdown that is also readable in a terminal; a blank line between tables."""
    numbers = dict.fromkeys(row["table"] for row in rows)
    parts = [[row for row in rows if row["table"] == number] for number in numbers]
    return "\n\n".join(_table(part, names, metric, target) for part in parts)


def _table(rows: list[dict], names: list[str], metric: str, target: float | None) -> str:
    head = [*(heading(name, names) for name in names), "runs", "tokens", metric, "min–max"]
    if target is not None:
        head.append(f"tokens to {target:g}")
    lines = [[*head, "run"]]
    for row in rows:
        count = len(row["runs"])
        unfinished = f" ({len(row['unfinished'])} unfinished)" if row["unfinished"] else ""
        spread = f"{min(row['values']):.4f}–{max(row['values']):.4f}"
        spread = "some are nan" if math.isnan(row["mean"]) else spread
        cells = [shown(value) for value in row["settings"].values()]
        cells += [f"{count}{unfinished}", f"{row['tokens']:,}", f"{row['mean']:.4f}"]
        cells.append(spread if count > 1 else "")
        if target is not None:
            reached = [tokens for tokens in row["tokens_to_target"] if tokens is not None]
            mean = f"{round(statistics.fmean(reached)):,}" if reached else "never"
            cells.append(
                mean + (f" ({len(reached)} of {count})" if 0 < len(reached) < count else "")
            )
        lines.append([*cells, row["runs"][0] + (f" + {count - 1}" if count > 1 else "")])
    lines = [[visible(cell.replace("|", "\\|"), keep="") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def heading(name: str, names: list[str]) -> str:
    """The shortest name of a setting that is clear among `names`."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if last == "name":  # optimizer.name is shown as optimizer
        return first
    return name if sum(other.split(".")[-1] == last for other in names) > 1 else last


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------- the picture


def draw(rows: list[dict], names: list[str], metric: str) -> bytes:
    """A PNG: the metric over tokens, a colour for each row, a line for each seed. Where one number
    varies, a second chart has the last metric over its values. Values far above those at the start
    are cut off."""
    import matplotlib.style
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    varied = numeric(rows, names)
    if varied:
        rows = sorted(rows, key=lambda row: row["settings"][varied])
    colours = colormaps["viridis" if varied else "tab10"]
    colours = [colours(0.9 * i / len(rows) if varied else i % 10) for i in range(len(rows))]
    label = AXIS_LABELS.get(metric, metric)
    with matplotlib.style.context("seaborn-v0_8-whitegrid"):
        figure = Figure(figsize=(10 if varied else 7.5, 4.4), layout="constrained")
        axes = figure.subplots(1, 2 if varied else 1, squeeze=False)[0]
        _draw_curves(axes[0], rows, colours)
        axes[0].set_ylabel(label)
        if varied:
            _draw_ends(axes[1], rows, varied, colours)
            axes[1].set_xlabel(heading(varied, names))
            axes[1].set_ylabel(f"{label} at the end")
        low, high = limits(rows)
        for axis in axes:
            bottom, top = axis.get_ylim()
            axis.set_ylim(max(bottom, low), min(top, high))
        title = _plain(", ".join(heading(name, names) for name in names))
        figure.legend(loc="outside right upper", fontsize=9, title=title)
        picture = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks
            figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()


def numeric(rows: list[dict], names: list[str]) -> str | None:
    """The setting whose values are numbers and differ, if there is exactly one."""

    def is_number(value: object) -> bool:
        return type(value) in (int, float) and math.isfinite(value)

    found = [n for n in names if all(is_number(row["settings"][n]) for row in rows)]
    if len(found) != 1 or len({row["settings"][found[0]] for row in rows}) < 2:
        return None
    return found[0]


def limits(rows: list[dict]) -> tuple[float, float]:
    """(lowest, highest value that is drawn): a diverged run does not set the scale."""
    curves = [[value for _, value in points] for row in rows for points in row["curves"]]
    finite = [[value for value in curve if math.isfinite(value)] for curve in curves]
    values = [value for curve in finite for value in curve]
    if not values:
        return 0.0, 1.0
    starts = [curve[0] for curve in finite if curve]
    start = max(value for value in starts if value <= 2 * abs(statistics.median(starts)))
    low = min(values)
    high = min(max(values), start + 0.5 * max(start - low, 1e-3))
    margin = 0.04 * (high - low) or 1e-3
    return low - margin, high + margin


def _draw_curves(axis, rows: list[dict], colours: list) -> None:
    from matplotlib.ticker import EngFormatter

    for index, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        text = ", ".join(shown(value)[-28:] for value in row["settings"].values())
        label = _plain(f"{text or 'all'}:  {row['mean']:.4f}") if index < IN_LEGEND else None
        for points in row["curves"]:
            marker = "o" if len(points) <= 12 else None
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=3, label=label)
            label = None
    axis.set_xlabel("tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_ends(axis, rows: list[dict], varied: str, colours: list) -> None:
    """The last metric over the varied number: a point for each seed, a line through the means for
    each combination of the other settings."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row, colour in zip(rows, colours, strict=True):
        place = row["settings"][varied]
        axis.plot([place] * len(row["values"]), row["values"], "o", color=colour, ms=4.5)
        others = ", ".join(shown(v) for name, v in row["settings"].items() if name != varied)
        lines.setdefault(others, []).append((place, row["mean"]))
    for (others, points), style in zip(lines.items(), itertools.cycle(("-", "--", ":", "-."))):
        label = _plain(f"mean, {others}") if len(lines) > 1 else None
        axis.plot(*zip(*points, strict=True), style, color="0.2", lw=0.9, label=label)
    values = sorted({row["settings"][varied] for row in rows})
    if values[0] > 0 and values[-1] / values[0] >= LOG_RATIO:
        axis.set_xscale("log")
    if len(values) <= 8:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()


def _plain(text: str) -> str:
    """A text that matplotlib shows as it is: `$` begins a formula, `_` hides a label."""
    text = visible(text, keep="").replace("$", "\\$")
    return f" {text}" if text.startswith("_") else text
