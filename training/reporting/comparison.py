"""What several runs came to, side by side: read from their directories, as a table and a picture.

    runs = [read(folder, "val/loss")[0] for folder in folders]
    rows = summaries(runs, names := differing(runs), "val/loss")
    print(table(rows, names, "val/loss"))
    Path("results.png").write_bytes(draw(rows, names, "val/loss"))

Runs that differ by their seed alone are one row, the lowest metric first. Runs of different texts
or tokenizers are in tables of their own, as their losses cannot be compared. For a sweep
(training/reporting/sweep.py) and for scripts/compare. Reads run.json and metrics.jsonl, changes
nothing.
"""

import io
import json
import math
import os
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path

from errors import visible
from training.checkpoint.run_directory import flat, settings_of
from training.reporting.charts import number
from training.reporting.report import read_rows

VARIES = ("seed", "name")  # between runs of one row
# Of what a run may change when it goes on, what makes it learn otherwise all the same.
LEARNING = ("seed", "data.path", "data.val_path", "trainer.max_steps", "trainer.init_from")
NAMES_IN_TABLE = 4  # runs of a row that are named
IN_WORDS = {"val/loss": "validation loss", "train/loss": "training loss"}

INK, GRID, PALE = "#24292f", "#e6e8eb", "#b8bfc6"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
}
# Of settings without an order; told apart by people who see no red and green, too.
KINDS = ("#0b6e99", "#c2571a", "#3f8f4f", "#8a4fa3", "#c9a227", "#5b6770", "#d6618f", "#1fa7a0")
IN_LEGEND = 10  # rows that have a colour and a line of the legend
RATIO_OF_LOG = 8  # from there on a setting's values stand on a logarithmic axis


@dataclass
class Run:
    """One run: its settings by dotted name, and how the metric went."""

    name: str
    settings: dict[str, object]
    points: list[tuple[int, float]]  # (tokens so far, metric)
    max_steps: int
    step: int  # the last one

    def tokens_to(self, target: float) -> int | None:
        return next((tokens for tokens, value in self.points if value <= target), None)


# ------------------------------------------------------------------------------------- reading


def read(folder: Path, metric: str, also: tuple[str, ...] = ()) -> tuple[Run, set[str]]:
    """A run, and the names of all that its log has. also: settings to tell runs apart by, whatever
    they are. ValueError where it is none."""
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
    of_a_step, max_steps = sizes[0] * sizes[1], sizes[2]
    for row in (rows := read_rows(folder / "metrics.jsonl")):
        if row["step"] == 0:
            continue  # nothing was learned yet
        names |= row.keys() - {"step"}
        if metric in row:
            tokens = row.get("train/tokens")
            if type(tokens) is not int or not 0 <= tokens < 2**63:  # a row of an older run
                tokens = row["step"] * of_a_step
            points.append((tokens, number(row[metric])))
    last = rows[-1]["step"] if rows else 0
    return Run(folder.name, settings, points, max_steps, last), names


def differing(runs: list[Run]) -> list[str]:
    """The settings in which any two runs differ, in the order of config.yaml."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in VARIES)
    return [n for n in names if any(run.settings.get(n) != runs[0].settings.get(n) for run in runs)]


def shared(runs: list[Run], names: list[str]) -> dict[str, object]:
    """The settings that all the runs have; of the machine's folders names alone."""
    return {
        key: Path(value).name if key.endswith("path") and isinstance(value, str) else value
        for key, value in runs[0].settings.items()
        if key not in (*names, *VARIES)
    }


def summaries(
    runs: list[Run], names: list[str], metric: str, target: float | None = None
) -> list[dict]:
    """A row for the runs that differ by their seed alone, the best row first.

    row["table"] is the number of the table that a row belongs to, from 0: rows of different tables
    cannot be compared.
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
    """The text and the tokenizer of a metric. It can be compared between runs where they are the
    same; bits per byte can be compared between tokenizers."""
    validation = run.settings.get("data.val_path") if metric.startswith("val/") else None
    training = [run.settings.get(f"data.{key}") for key in ("path", "synthetic")]
    tokenizer = run.settings.get("data.tokenizer")
    if metric.endswith("/bits_per_byte"):
        tokenizer = None
    return json.dumps([validation or None, None if validation else training, tokenizer])


def summary(group: list[Run], names: list[str], target: float | None) -> dict:
    """What a row says: of the metric's last values mean, least and most; nan where any is."""
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
    """As a file has it. JSON knows no nan and no infinity: null."""
    return (json.dumps(without_nan(value), indent=1, default=str) + "\n").encode()


def without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------- the table


def table(rows: list[dict], names: list[str], metric: str, target: float | None = None) -> str:
    """As Markdown, to be read in a terminal too; a blank line between tables."""
    numbers = dict.fromkeys(row["table"] for row in rows)
    parts = [[row for row in rows if row["table"] == number] for number in numbers]
    return "\n\n".join(_table(part, names, metric, target) for part in parts)


def _table(rows: list[dict], names: list[str], metric: str, target: float | None) -> str:
    head = [*(heading(name, names) for name in names), "runs", "tokens", metric, "least–most"]
    if target is not None:
        head.append(f"tokens to {target:g}")
    lines = [[*head, "run"]]
    for row in rows:
        cells = [shown(value) for value in row["settings"].values()]
        unfinished = f" ({len(row['unfinished'])} unfinished)" if row["unfinished"] else ""
        spread = f"{min(row['values']):.4f}–{max(row['values']):.4f}"
        spread = "some are nan" if math.isnan(row["mean"]) else spread
        cells += [f"{len(row['runs'])}{unfinished}", f"{row['tokens']:,}", f"{row['mean']:.4f}"]
        cells.append(spread if len(row["runs"]) > 1 else "")
        if target is not None:
            cells.append(told_tokens(row["tokens_to_target"]))
        lines.append([*cells, listed(row["runs"])])
    lines = [[visible(cell.replace("|", "\\|"), keep="") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def heading(name: str, names: list[str]) -> str:
    """The shortest that says which setting it is."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if last == "name":  # optimizer.name is which optimizer
        return first
    return name if sum(other.split(".")[-1] == last for other in names) > 1 else last


def shown(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def listed(runs: list[str]) -> str:
    """The names of a row's runs: the first one, and of some others how they end."""
    start = len(os.path.commonprefix(runs))  # noqa: RUF071 letters are meant
    others = [f"…{name[start:]}" if start > 3 else name for name in runs[1:NAMES_IN_TABLE]]
    more = f" + {len(runs) - NAMES_IN_TABLE}" if len(runs) > NAMES_IN_TABLE else ""
    return ", ".join([runs[0], *others]) + more


def told_tokens(counts: list[int | None]) -> str:
    """The mean of those that came so far, and how many did."""
    reached = [count for count in counts if count is not None]
    if not reached:
        return "never"
    of = f" ({len(reached)} of {len(counts)})" if len(reached) < len(counts) else ""
    return f"{round(statistics.fmean(reached)):,}{of}"


# --------------------------------------------------------------------------------- the picture


def draw(rows: list[dict], names: list[str], metric: str) -> bytes:
    """A PNG: the metric over tokens, a colour for each row, a line for each seed; and beside it,
    where one number was varied, what the metric came to at each of its values.

    What went beyond the losses at the start is cut off; beside, it is a cross at the top.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    varied = numeric(rows, names)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10 if varied else 7.5, 4.4), layout="constrained")
        axes = figure.subplots(1, 2 if varied else 1, squeeze=False)[0]
        if varied:
            rows = sorted(rows, key=lambda row: float(row["settings"][varied]))
        colours = coloured(rows, varied)
        low, high = limits(rows)
        _draw_curves(axes[0], rows, names, colours)
        axes[0].set_xlabel("tokens")
        axes[0].set_xlim(left=0)
        axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        in_words = IN_WORDS.get(metric, metric)
        axes[0].set_ylabel(in_words)
        if varied:
            _draw_ends(axes[1], rows, names, varied, colours, high)
            axes[1].set_ylabel(f"{in_words} at the end")
        axes[0].set_ylim(top=high + 0.04 * (high - low))
        for axis in axes:
            axis.grid()
        title = _plain(", ".join(heading(name, names) for name in names))
        figure.legend(loc="outside right upper", fontsize=9, title=title)
        picture = io.BytesIO()
        with warnings.catch_warnings():  # of letters that its font lacks: they are boxes
            warnings.filterwarnings("ignore", message="Glyph")
            figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()


def numeric(rows: list[dict], names: list[str]) -> str | None:
    """The one setting whose values are numbers, where there is just one."""

    def is_number(value: object) -> bool:
        is_one = isinstance(value, int | float) and not isinstance(value, bool)
        return is_one and math.isfinite(value)

    found = [n for n in names if all(is_number(row["settings"][n]) for row in rows)]
    if len(found) != 1 or len({row["settings"][found[0]] for row in rows}) < 2:
        return None
    return found[0]


def coloured(rows: list[dict], varied: str | None) -> list:
    """A colour for each row: in the order of the numbers from dark to bright, or by kind. Of very
    many rows without an order, those that come first have one."""
    if varied:
        from matplotlib import colormaps

        values = sorted({row["settings"][varied] for row in rows})
        place = {value: 0.88 * i / (len(values) - 1) for i, value in enumerate(values)}
        return [colormaps["viridis"](place[row["settings"][varied]]) for row in rows]
    return [KINDS[i] if i < len(KINDS) else PALE for i in range(len(rows))]


def limits(rows: list[dict]) -> tuple[float, float]:
    """(The lowest value, the highest that is worth the room): a run that fails can end anywhere."""
    curves = [[value for _, value in points] for row in rows for points in row["curves"]]
    finite = [[value for value in curve if math.isfinite(value)] for curve in curves]
    values = [value for curve in finite for value in curve]
    if not values:
        return 0.0, 1.0
    starts = [curve[0] for curve in finite if curve]
    start = max(value for value in starts if value <= 2 * abs(statistics.median(starts)))
    low = min(values)
    return low, min(max(values), start + 0.5 * max(start - low, 1e-3))


def _draw_curves(axis, rows: list[dict], names: list[str], colours: list) -> None:
    for index, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        for number_of, points in enumerate(row["curves"]):
            tokens, values = zip(*points, strict=True)
            axis.plot(
                tokens,
                values,
                color=colour,
                lw=1.2 if colour != PALE else 0.8,
                marker="o" if len(points) <= 12 else None,
                ms=3,
                zorder=2 if colour != PALE else 1,
                label=_label(rows, index, names) if number_of == 0 else None,
            )


def _label(rows: list[dict], index: int, names: list[str]) -> str | None:
    """What the legend says of a row; the last line stands for all that are left."""
    if index >= IN_LEGEND and len(rows) > IN_LEGEND:
        return f"and {len(rows) - IN_LEGEND} more" if index == IN_LEGEND else None
    row = rows[index]
    what = ", ".join(_short(shown(value)) for value in row["settings"].values())
    what = what or f"{len(row['runs'])} runs"
    return _plain(f"{what}:  {row['mean']:.4f}")


def _short(text: str) -> str:
    return text if len(text) <= 28 else f"…{text[-27:]}"


def _plain(text: str) -> str:
    """A text that matplotlib takes as it is: no formula, and no name that it keeps to itself."""
    text = visible(text, keep="").replace("$", "\\$")
    return f" {text}" if text.startswith("_") else text


def _draw_ends(
    axis, rows: list[dict], names: list[str], varied: str, colours: list, high: float
) -> None:
    """The ends over the number's values: a point for each seed, and a line through the means; a
    line of its own for each value of the other settings."""
    lines: dict[str, list[dict]] = {}
    for row, colour in zip(rows, colours, strict=True):
        place = row["settings"][varied]
        inside = [value for value in row["values"] if value <= high]  # never true of nan
        axis.plot([place] * len(inside), inside, "o", color=colour, ms=4.5, zorder=3)
        if len(inside) < len(row["values"]):
            axis.plot(
                place, 0.97, "x", color=colour, ms=7, mew=2, transform=axis.get_xaxis_transform()
            )
        others = ", ".join(shown(v) for name, v in row["settings"].items() if name != varied)
        lines.setdefault(others, []).append(row)
    for (others, of), style in zip(lines.items(), 9 * ("-", "--", ":", "-."), strict=False):
        of = [row for row in of if row["mean"] <= high]
        axis.plot(
            [row["settings"][varied] for row in of],
            [row["mean"] for row in of],
            style,
            color=INK,
            lw=0.9,
            label=_plain(f"mean, {others}") if others and len(lines) > 1 else None,
        )
    values = [row["settings"][varied] for row in rows]
    axis.set_xlabel(heading(varied, names))
    if min(values) > 0 and max(values) / min(values) >= RATIO_OF_LOG:
        axis.set_xscale("log")
    distinct = sorted(set(values))
    if len(distinct) <= 8:
        axis.set_xticks(distinct, [f"{value:g}" for value in distinct])
        axis.minorticks_off()
