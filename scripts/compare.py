"""Compares training runs: a table with one row for each combination of settings.

    python train.py -m optimizer=adamw,muon optimizer.lr=3e-3,1e-2 seed=0,1,2
    python -m scripts.compare runs='runs/*' target=1.9

Runs that differ only in their seed are one row. Settings that differ between runs are columns. The
row with the lowest metric is first. Runs of different texts or tokenizers are in separate tables,
because their losses are not comparable. val/bits_per_byte is comparable between tokenizers. Reads
run.json and metrics.jsonl of each run.
"""

import datetime
import glob
import os
import sys
from pathlib import Path

from pydantic import Field

from errors import message_of, refuse, sanitize
from training.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from training.config.schema import Name, Paths
from training.reporting import comparison as results
from training.reporting.machine import machine


class CompareConfig(ScriptConfig):
    """python -m scripts.compare runs='runs/*' [target=LOSS] [KEY=VALUE ...]

    Prints a table: one row for each combination of settings, averaged over seeds, lowest first.
    """

    runs: Paths = Field("runs/*", description="run directories: a glob pattern, or [A,B,...]")
    metric: Name = Field("val/loss", description="metric of metrics.jsonl to compare")
    target: float | None = Field(
        None, description="also print how many tokens the metric needs to be at or below this"
    )
    out: OutFile = Field("", description="JSON file for the results")
    plot: OutFile = Field("", description="PNG file for a plot of the runs")


@settings_command(CompareConfig)
def main(settings: CompareConfig) -> None:
    runs = found(settings)
    rows = results.summarize(runs, settings.metric, settings.target)
    print(results.tables(rows, settings.metric))
    if settings.out:
        written = {
            "date": datetime.date.today().isoformat(),
            **machine(("torch",)),
            "metric": settings.metric,
            "target": settings.target,
            "settings": results.shared(runs),
            "rows": rows,
        }
        write_out(settings.out, results.as_json(written))
    if settings.plot:
        write_out(settings.plot, results.plot(rows, settings.metric), "plot")


def found(settings: CompareConfig) -> list[results.Run]:
    """Returns the runs that have the metric. Prints a line on stderr for each other path."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    runs: list[results.Run] = []
    for pattern in patterns:
        # The name of a directory may contain characters such as * or [.
        paths = [pattern] if os.path.isdir(pattern) else sorted(glob.glob(pattern))
        folders = [folder for folder in map(Path, paths) if folder.is_dir()]
        if not folders:
            say(f"{pattern}: directory not found")
        for folder in folders:
            try:
                runs.append(results.read(folder, settings.metric))
            except (ValueError, RecursionError) as error:
                say(f"{folder}: skipped, not a run directory ({message_of(error)})")
                continue
            if not runs[-1].points:
                say(f"{folder}: skipped, no {settings.metric} after step 0")
    if not runs:
        fix = "use runs='runs/*' in the directory in which train.py was started"
        refuse([("runs", " ".join(patterns), "no run directory found", fix)])
    if not any(run.points for run in runs):
        fix = f"use one of {', '.join(sorted(set().union(*(run.metrics for run in runs))))}"
        refuse([("metric", settings.metric, "no run has this metric", fix)])
    return [run for run in runs if run.points]


def say(line: str) -> None:
    """Prints a line on stderr. File names may contain control characters, which are escaped."""
    print(sanitize(line, keep=""), file=sys.stderr)


if __name__ == "__main__":
    main()
