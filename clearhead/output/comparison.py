"""Comparison of runs: a table of a metric, with a row for the runs that differ only in their seed.

    runs = read_all([Path("runs/a"), Path("runs/b")], "val/loss")
    print(tables(summarize(runs, "val/loss"), "val/loss"))

The row with the best metric is first. Losses on different texts or with different tokenizers are
not comparable, so each combination has its own table. Reads run.json, metrics.jsonl,
validation.json and summary.json.
"""

import glob
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.checkpoint.run_directory import final_validation, summarized_step
from clearhead.config.automatic import automatic_warmup
from clearhead.config.stored import SETTINGS_JSON, is_of, settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import as_yaml, sanitize
from clearhead.files import read_object, read_rows
from clearhead.output.charts import minimum_before_rise, number
from clearhead.tokens import VOCABULARIES
from headlens import rounded

# The settings that change what a run learns. Those of the text and the tokenizer are in the title
# of the table.
LEARNING = ("model", "data", "optimizer", "trainer.init_from", "trainer.precision")
LEARNING += tuple(
    f"trainer.{name}"
    for name in ("batch_size", "grad_clip", "max_minutes", "max_steps", "patience", "warmup_steps")
)
HIGHER_IS_BETTER = ("val/accuracy", "train/tokens_per_second", "train/mfu", "attention")
COMPARABLE = "Values in different tables are not comparable. Bits per byte are comparable between "
COMPARABLE += "tokenizers: add\nmetric=val/bits_per_byte"


@dataclass
class ComparedRun:
    folder: Path
    settings: dict[str, object]  # by dotted name: those of LEARNING, seed and data
    checksum: object  # of the tokens of the data
    tokens: int  # until the last value
    value: float  # of the metric: of the validation at the end of the run, else the last value
    lowest: float | None  # lowest value, if the validation loss has risen since
    is_finished: bool


@dataclass
class ComparisonRow:
    """The runs that differ at most in their seed."""

    text: str  # settings of text and tokenizer
    settings: dict[str, object]  # other settings
    runs: list[str]
    seeds: list[object]
    values: list[float]  # of each run
    mean: float  # of values; NaN if any value is NaN
    standard_error: float | None  # of the mean; None for a single run
    lowest: list[float]  # of the runs whose validation loss has risen
    tokens: int  # maximum over the runs
    unfinished: list[str]
    repeated: list[str]  # runs that equal one of `runs`; not counted


def matching_paths(pattern: str) -> list[Path]:
    """Returns the paths that a pattern matches. The directory of a sweep stands for its runs."""
    # The name of a directory may contain characters such as * or [.
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    return [run for path in map(Path, found) for run in _runs_of_sweep(path) or [path]]


def _runs_of_sweep(folder: Path) -> list[Path]:
    runs = [read_object(path).get("run") for path in sorted(folder.glob("*/result.json"))]
    return [Path(run) for run in runs if isinstance(run, str)]


def read_all(folders: Iterable[Path], metric: str) -> list[ComparedRun]:
    """Reads run directories. Prints a line on stderr for each without a run or the metric."""
    runs = []
    for folder in folders:
        try:
            runs.append(read(folder, metric))
        except ValueError as error:
            print(sanitize(f"{folder}: skipped, {error}", keep=""), file=sys.stderr)
    return runs


def read(folder: Path, metric: str) -> ComparedRun:
    """Reads a run directory. Raises ValueError if it is none, or has no value after step 0."""
    if (settings := settings_of(folder)) is None:
        raise ValueError("not a run: run.json is missing or damaged")
    stored, settings = read_object(folder / SETTINGS_JSON), flat(settings)
    settings = {key: settings[key] for key in settings if key == "seed" or is_of(key, LEARNING)}
    # The name of a trained tokenizer has a checksum. It has the size of the vocabulary.
    settings["data.tokenizer"] = stored.get("tokenizer", settings.get("data.tokenizer"))
    steps = settings.get("trainer.max_steps")
    automatic = {"model.vocab_size": VOCABULARIES.get(str(settings["data.tokenizer"]))}
    automatic["trainer.warmup_steps"] = automatic_warmup(steps) if type(steps) is int else None
    settings = {key: v for key, v in settings.items() if v != automatic.get(key, ...)}

    rows = read_rows(folder / "metrics.jsonl", metric, "train/tokens")
    points = [(row["step"], number(row[metric])) for row in rows if metric in row and row["step"]]
    if not points:
        raise ValueError(f"no {metric} after step 0")
    (_, value), last = points[-1], rows[-1]["step"]
    tokens, lowest = rows[-1].get("train/tokens"), None
    if metric.startswith("val/"):
        final = final_validation(folder, last)
        value = number(final.get(metric.removeprefix("val/"), value))
        _, lowest = minimum_before_rise(points) or (0, None)
    return ComparedRun(
        folder,
        settings,
        stored.get("data"),
        tokens if type(tokens) is int else 0,
        value,
        None if metric.startswith(HIGHER_IS_BETTER) else lowest,
        is_finished=last == summarized_step(folder),
    )


def _data_settings(run: ComparedRun, metric: str) -> dict[str, object]:
    """Returns the settings of text and tokenizer for a metric. Values of runs are comparable if
    these are equal. Bits per byte do not depend on the tokenizer."""
    has_own = metric.startswith("val/") and run.settings.get("data.val_path")
    found = {"data.val_path": None} if has_own else {"data.path": None, "data.synthetic": None}
    found = {name: run.settings.get(name) for name in found}
    if not metric.endswith("/bits_per_byte"):
        found["data.tokenizer"] = run.settings.get("data.tokenizer")
        found["checksum"] = None if has_own else run.checksum
    return found


def summarize(runs: Sequence[ComparedRun], metric: str) -> list[ComparisonRow]:
    """Returns one row for the runs that differ only in their seed, sorted by text and tokenizer,
    and then by the metric, best first."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        data = _data_settings(run, metric)
        others = {k: v for k, v in run.settings.items() if k not in data and k != "seed"}
        key = json.dumps([data, others], sort_keys=True)
        groups.setdefault(key, []).append(run)
    rows, texts = [], [json.loads(key)[0] for key in groups]
    for key, group in groups.items():
        data, settings = json.loads(key)
        same = [{**text, "checksum": 0} == {**data, "checksum": 0} for text in texts]
        if all(text == data for text, is_same in zip(texts, same, strict=True) if is_same):
            data.pop("checksum", None)  # shown only if the text at a path has changed
        once = {(run.settings.get("seed"), run.tokens, run.value): run for run in reversed(group)}
        kept = list(once.values())[::-1]
        values = [run.value for run in kept]
        rows.append(
            ComparisonRow(
                text=_pairs({name: value for name, value in data.items() if value}),
                settings=settings,
                runs=[run.folder.name for run in kept],
                seeds=[run.settings.get("seed") for run in kept],
                values=values,
                mean=statistics.fmean(values),
                standard_error=standard_error(values),
                lowest=[run.lowest for run in kept if run.lowest is not None],
                tokens=max(run.tokens for run in kept),
                unfinished=[run.folder.name for run in kept if not run.is_finished],
                repeated=[run.folder.name for run in group if run not in kept],
            )
        )
    sign = -1 if metric.startswith(HIGHER_IS_BETTER) else 1
    return sorted(rows, key=lambda row: (row.text, math.isnan(row.mean), sign * row.mean))


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of independent values; None for a single value or
    values that are not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def tables(rows: Sequence[ComparisonRow], metric: str) -> str:
    """Returns a Markdown table for each text and tokenizer. Its columns are the settings that
    differ between its rows."""
    parts = []
    for text in dict.fromkeys(row.text for row in rows):
        group, lines = [row for row in rows if row.text == text], []
        names = dict.fromkeys(name for row in group for name in row.settings)
        names = [n for n in names if len({as_yaml(row.settings.get(n)) for row in group}) > 1]
        for row in group:
            cells = {"run": _label(row)}
            cells |= {n: as_yaml(row.settings[n]) if n in row.settings else "" for n in names}
            cells |= {"tokens": f"{row.tokens:,}", metric: f"{row.mean:.4f}"}
            if row.standard_error is not None:
                cells[metric] += f" ± {rounded(row.standard_error, 4)}"
            cells["lowest"] = f"{statistics.fmean(row.lowest):.4f}" if row.lowest else ""
            if 0 < len(row.lowest) < len(row.runs):
                cells["lowest"] += f" ({len(row.lowest)} of {len(row.runs)})"
            lines.append(cells)
        parts.append(f"## {text}\n\n{markdown_table(lines)}")
    if len(parts) > 1 and not metric.endswith("/bits_per_byte"):
        parts.append(COMPARABLE)
    return "\n\n".join(parts)


def markdown_table(lines: Sequence[Mapping[str, str]]) -> str:
    """Returns a table, readable in a terminal, with a column for each key; columns without any text
    are omitted."""
    columns = []
    for name in lines[0]:
        texts = [name, *(cells[name] for cells in lines)]
        texts = [sanitize(text.replace("|", "\\|"), keep="") for text in texts]
        width = max(map(len, texts))
        head, *body = (text.ljust(width) for text in texts)
        if any(cells[name] for cells in lines):
            columns.append([head, "-" * width, *body])
    return "\n".join(f"| {' | '.join(texts)} |" for texts in zip(*columns, strict=True))


def _label(row: ComparisonRow) -> str:
    """Returns the first run of a row, and how many others, unfinished and repeated ones it has."""
    text = row.runs[0]
    if others := len(row.runs) - 1:
        text += f" + {others} run{'s' * (others > 1)}"
    text += f" ({len(row.unfinished)} unfinished)" if row.unfinished else ""
    return text + (f" (repeated: {', '.join(row.repeated)})" if row.repeated else "")


def _pairs(settings: Mapping[str, object]) -> str:
    return sanitize(", ".join(f"{key}={as_yaml(v)}" for key, v in settings.items()), keep="")
