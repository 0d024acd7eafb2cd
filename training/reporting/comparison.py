"""Comparison of runs: read from their directories, as a table and a picture.

    runs = [read(folder, "val/loss")[0] for folder in folders]
    rows = summaries(runs, names := differing(runs))
    print(table(rows, names, "val/loss"))
    Path("results.png").write_bytes(draw(rows, names, "val/loss"))

Runs that differ by their seed alone are one row, the lowest metric first. Used after a sweep
(training/reporting/sweep.py) and by scripts/compare.py. Reads run.json and metrics.jsonl.
"""

import io
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
HIGHEST = 1.5  # times the median of the first values: above it a curve is cut off
IN_LEGEND = 10  # rows that get a line of the legend


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
        max_steps, leaves = found["trainer"]["max_steps"], flat(found)
    except (KeyError, TypeError, RecursionError):
        max_steps = None
    if type(max_steps) is not int:
        raise ValueError("run.json is missing or damaged")
    settings = {
        name: value
        for name, value in leaves.items()
        if name in (*LEARNING, *also) or not FREE_TO_CHANGE & {name, name.split(".")[0]}
    }
    points, names = [], set()
    for row in (rows := read_rows(folder / "metrics.jsonl")):
        if row["step"] == 0:
            continue  # before training
        names |= row.keys() - {"step"}
        tokens = row.get("train/tokens")
        if metric in row and type(tokens) is int and 0 <= tokens < 2**63:
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


def summaries(runs: list[Run], names: list[str], target: float | None = None) -> list[dict]:
    """A row for the runs that differ by their seed alone, the best row first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.settings.get(n) for n in names], default=str)
        groups.setdefault(key, []).append(run)
    rows = [summary(group, names, target) for group in groups.values()]
    return sorted(rows, key=lambda row: (math.isnan(row["mean"]), row["mean"]))


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
    value = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return (json.dumps(value, indent=1) + "\n").encode()


# ----------------------------------------------------------------------------------- the table


def table(rows: list[dict], names: list[str], metric: str, target: float | None = None) -> str:
    """Markdown that is also readable in a terminal."""
    head = [*names, "runs", "tokens", metric, "min–max"]
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


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------- the picture


def draw(rows: list[dict], metric: str) -> bytes:
    """A PNG: the metric over tokens, a colour for each row, a line for each seed. Values far above
    the first ones are cut off, so that a diverged run does not set the scale."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    style = ["seaborn-v0_8-whitegrid", {"text.parse_math": False}]
    with matplotlib.style.context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # letters that the font lacks
        figure = Figure(figsize=(7.5, 4.4), layout="constrained")
        axis = figure.subplots()
        for index, row in enumerate(rows):
            settings = ", ".join(shown(value)[-28:] for value in row["settings"].values())
            label = visible(f"{row['mean']:.4f}  {settings}", keep="")
            for seed, points in enumerate(row["curves"]):
                axis.plot(
                    *zip(*points, strict=True),
                    color=f"C{index % 10}",
                    marker="o" if len(points) <= 12 else None,
                    ms=3,
                    label=label if seed == 0 and index < IN_LEGEND else None,
                )
        axis.set_xlabel("tokens")
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_ylabel(metric)
        starts = [points[0][1] for row in rows for points in row["curves"]]
        starts = [value for value in starts if math.isfinite(value)]
        bottom, top = axis.get_ylim()
        if starts and bottom < (highest := HIGHEST * statistics.median(starts)) < top:
            axis.set_ylim(top=highest)
        names = visible(", ".join(rows[0]["settings"]), keep="")
        figure.legend(loc="outside right upper", fontsize=9, title=names)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()
