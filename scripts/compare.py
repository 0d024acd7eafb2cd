"""Compares training runs: a table with one row for each combination of settings.

    python train.py -m optimizer=adamw,muon optimizer.lr=3e-3,1e-2 seed=0,1,2
    python -m scripts.compare runs='runs/*' target=1.9
    python -m scripts.compare where='[optimizer.name=muon,optimizer.lr=0.01]'

Runs that differ only in their seed are one row. Settings that differ within a table are columns.
The row with the best metric is first. Runs of different texts or tokenizers are in separate
tables, because their losses are not comparable. val/bits_per_byte is comparable between tokenizers.
Reads run.json and metrics.jsonl of each run.
"""

import datetime
import math
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Name, Paths, rejected
from clearhead.config.validation import nearest
from clearhead.errors import as_yaml, message_of, refuse, sanitize, shorten
from clearhead.files import as_json
from clearhead.output import comparison
from clearhead.output.charts import number
from clearhead.output.comparison_plot import plot
from clearhead.output.comparison_table import tables
from clearhead.output.machine import machine

SWEEPS = "multirun"  # folder of the sweep directories in runs_dir


def _conditions(where: str | list[str]) -> list[tuple[str, str]]:
    """Returns (key, value) of each condition. Raises `rejected`."""
    texts = where if isinstance(where, list) else [where] if where else []
    found = [text.partition("=") for text in texts]
    if not all(key and equals for key, equals, _ in found):
        raise rejected("not of the form KEY=VALUE", "see --help")
    return [(key.strip(), value.strip()) for key, _, value in found]


class CompareConfig(ScriptConfig):
    """python -m scripts.compare runs='runs/*' [target=LOSS] [KEY=VALUE ...]

    Prints a table: one row for each combination of settings, averaged over seeds, best first.
    """

    runs: Paths = Field(
        "runs/*", description="directories of runs or sweeps: a glob pattern, or [A,B,...]"
    )
    where: Annotated[str | list[str], AfterValidator(_conditions)] = Field(
        "",
        description="only runs with this setting or last metric: seed=1, or [A,B,...]",
    )
    metric: Name = Field("val/loss", description="metric of metrics.jsonl to compare")
    target: float | None = Field(
        None, description="also print how many tokens the metric needs to reach this"
    )
    out: OutFile = Field("", description="JSON file for the results")
    plot: OutFile = Field(
        "", pattern=r"(?i)(\.png|^)$", description="PNG file for a plot of the runs"
    )


@settings_command(CompareConfig)
def main(settings: CompareConfig) -> None:
    runs = found(settings)
    rows = comparison.summarize(runs, settings.metric, settings.target)
    print(tables(rows, settings.metric))
    if settings.out:
        written = {
            "date": datetime.date.today().isoformat(),
            **machine(()),
            "metric": settings.metric,
            "target": settings.target,
            "where": ["=".join(condition) for condition in settings.where],
            "settings": comparison.shared(runs),
            "rows": rows,
        }
        write_out(settings.out, as_json(written))
    if settings.plot:
        write_out(settings.plot, plot(rows, settings.metric), "plot")


def found(settings: CompareConfig) -> list[comparison.ComparedRun]:
    """Returns the runs that have the metric. Prints a line on stderr for each other path."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    folders: dict[Path, None] = {}
    for pattern in patterns:
        matches = [path for path in comparison.matching_paths(pattern) if path.is_dir()]
        folders |= dict.fromkeys(matches)
        if not matches:
            say(f"{pattern}: directory not found")
    runs: list[comparison.ComparedRun] = []
    for folder in folders:
        try:
            runs.append(comparison.read(folder, settings.metric))
        except (ValueError, RecursionError) as error:
            if folder.name != SWEEPS:
                say(f"{folder}: skipped, not a run that can be read ({message_of(error)})")
    if not runs:
        hint = "use runs='runs/*' in the directory in which train.py was started"
        refuse([("runs", " ".join(patterns), "no run directory found", hint)])
    runs = selected(runs, settings.where)
    if not any(run.points for run in runs):
        last = {name: value for run in runs for name, value in run.metrics.items()}
        known = sorted(n for n in last if n != "step" and not math.isnan(number(last[n])))
        near = nearest(settings.metric, known)
        hint = f"did you mean {near}?" if near else f"use one of {shorten(', '.join(known))}"
        refuse([("metric", settings.metric, "no run has this metric", hint)])
    for run in runs:
        if not run.points:
            say(f"{run.folder}: skipped, no {settings.metric} after step 0")
    return [run for run in runs if run.points]


def selected(
    runs: list[comparison.ComparedRun], conditions: list[tuple[str, str]]
) -> list[comparison.ComparedRun]:
    """Returns the runs that meet all conditions. Raises ConfigError if there are none."""
    for key, wanted in conditions:
        values = [run.values for run in runs]
        problem = ("where", f"{key}={wanted}")
        if not any(key in of_run for of_run in values):
            near = nearest(key, sorted(set().union(*values)))
            hint = f"did you mean {near}?" if near else "config.yaml of a run lists its settings"
            refuse([(*problem, "no such setting or metric", hint)])
        pairs = [(run, of_run.get(key)) for run, of_run in zip(runs, values, strict=True)]
        runs = [run for run, value in pairs if is_met(value, wanted)]
        if not runs:
            known = " | ".join(sorted({typed(value) for _, value in pairs}))
            refuse([(*problem, "no run meets this condition", f"the values are {shorten(known)}")])
    return runs


def is_met(found: object, wanted: str) -> bool:
    """Compares text or numbers. A list also equals each of its items."""
    values = [found, *found] if isinstance(found, list) else [found]
    return any(typed(value) == wanted or number(value) == number(wanted) for value in values)


def typed(value: object) -> str:
    """Returns a value as it is written in a condition."""
    return f"[{','.join(map(as_yaml, value))}]" if isinstance(value, list) else as_yaml(value)


def say(line: str) -> None:
    """Prints a line on stderr. File names may contain control characters, which are escaped."""
    print(sanitize(line, keep=""), file=sys.stderr)


if __name__ == "__main__":
    main()
