"""Comparison of runs: a table of a metric, with a row for the runs that differ only in their seed.

    runs = read_all([Path("runs/a"), Path("runs/b")], "val/loss")
    print(table(summarize(runs, "val/loss"), "val/loss"))

The row with the best metric is first. Reads run.json, metrics.jsonl, validation.json and
summary.json.
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
from clearhead.config.stored import SETTINGS_JSON, is_of, settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import as_yaml, sanitize
from clearhead.files import read_object, read_rows
from clearhead.output.charts import minimum_before_rise, number
from headlens import rounded

# The settings that change what a run learns.
LEARNING = ("model", "data", "optimizer", "trainer.init_from", "trainer.precision")
LEARNING += tuple(
    f"trainer.{name}"
    for name in ("batch_size", "grad_clip", "max_minutes", "max_steps", "patience", "warmup_steps")
)
HIGHER_IS_BETTER = ("val/accuracy", "train/tokens_per_second", "train/mfu", "attention")
CHECKSUM = "data checksum"  # of the tokens: the text at a path may change
TEXTS = ("data.path", "data.synthetic", "data.val_path", CHECKSUM)
OTHER_TEXTS = "These runs have different texts: their values are not comparable."
OTHER_TOKENIZERS = "Losses are not comparable between tokenizers; metric=val/bits_per_byte is."


@dataclass
class ComparedRun:
    folder: Path
    settings: dict[str, object]  # by dotted name: those of LEARNING and seed
    tokens: int  # until the last value
    value: float  # of the metric: of the validation at the end of the run, else the last value
    lowest: float | None  # lowest value, if the validation loss has risen since
    is_finished: bool


@dataclass
class ComparisonRow:
    """The runs that differ at most in their seed."""

    settings: dict[str, object]  # without seed
    runs: list[str]
    seeds: list[object]
    values: list[float]  # of each seed
    mean: float  # of values; NaN if any value is NaN
    standard_error: float | None  # of the mean; None for a single run
    lowest: list[float]  # of the runs whose validation loss has risen
    tokens: int  # maximum over the runs
    unfinished: list[str]


def matching_paths(pattern: str) -> list[Path]:
    """Returns the paths that a pattern matches."""
    # The name of a directory may contain characters such as * or [.
    return [Path(pattern)] if os.path.exists(pattern) else sorted(map(Path, glob.glob(pattern)))


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
    settings[CHECKSUM] = str(stored.get("data"))[:8]
    # The name of a trained tokenizer has a checksum. It has the size of the vocabulary.
    settings["data.tokenizer"] = stored.get("tokenizer", settings.get("data.tokenizer"))
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
        tokens if type(tokens) is int else 0,
        value,
        None if metric.startswith(HIGHER_IS_BETTER) else lowest,
        is_finished=last == summarized_step(folder),
    )


def summarize(runs: Sequence[ComparedRun], metric: str) -> list[ComparisonRow]:
    """Returns one row for the runs that differ only in their seed, the best first."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    rows = []
    for key, group in groups.items():
        # A seed that was run again gives the same value, not an independent one.
        values = [run.value for run in {run.settings.get("seed"): run for run in group}.values()]
        rows.append(
            ComparisonRow(
                settings=json.loads(key),
                runs=[run.folder.name for run in group],
                seeds=[run.settings.get("seed") for run in group],
                values=values,
                mean=statistics.fmean(values),
                standard_error=standard_error(values),
                lowest=[run.lowest for run in group if run.lowest is not None],
                tokens=max(run.tokens for run in group),
                unfinished=[run.folder.name for run in group if not run.is_finished],
            )
        )
    sign = -1 if metric.startswith(HIGHER_IS_BETTER) else 1
    return sorted(rows, key=lambda row: (math.isnan(row.mean), sign * row.mean))


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of independent values; None for a single value or
    values that are not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def table(rows: Sequence[ComparisonRow], metric: str) -> str:
    """Returns a Markdown table. Its columns are the settings that differ between its rows."""
    lines, names = [], dict.fromkeys(name for row in rows for name in row.settings)
    names = [n for n in names if len({as_yaml(row.settings.get(n)) for row in rows}) > 1]
    if any(name.startswith("data.") for name in names):
        names = [name for name in names if name != CHECKSUM]  # it follows from these
    for row in rows:
        text = row.runs[0]
        if others := len(row.runs) - 1:
            text += f" + {others} run{'s' * (others > 1)}"
        text += f" ({len(row.unfinished)} unfinished)" if row.unfinished else ""
        cells = {"run": text}
        cells |= {n: as_yaml(row.settings[n]) if n in row.settings else "" for n in names}
        cells |= {"tokens": f"{row.tokens:,}", metric: f"{row.mean:.4f}"}
        if row.standard_error is not None:
            cells[metric] += f" ± {rounded(row.standard_error, 4)}"
        cells["lowest"] = f"{statistics.fmean(row.lowest):.4f}" if row.lowest else ""
        lines.append(cells)
    own = metric.startswith("val/") and rows[0].settings.get("data.val_path")
    is_same = own and "data.val_path" not in names
    notes = [OTHER_TEXTS] * bool({*TEXTS} & {*names} and not is_same)
    if "data.tokenizer" in names and not metric.endswith("/bits_per_byte"):
        notes.append(OTHER_TOKENIZERS)
    return "\n\n".join([markdown_table(lines), *notes])


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
