"""Which settings were better? A table of some runs, from their directories.

    python train.py -m optimizer=adamw,muon optimizer.lr=3e-3,1e-2 seed=0,1,2
    python -m scripts.compare runs='runs/*' target=1.9

Runs that differ by their seed alone are one row. The settings in which any two runs differ are the
columns; the best row comes first. Runs of different texts or tokenizers are in separate tables:
their losses cannot be compared (metric=val/bits_per_byte can, between tokenizers). Reads run.json
and metrics.jsonl, changes nothing.
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

    Tables of runs: one row for each setting that differs, seeds together, the lowest metric first.
    """

    runs: Paths = Field("runs/*", description="run directories: a pattern, or [A,B,...]")
    metric: Name = Field("val/loss", description="which metric of metrics.jsonl to compare")
    target: float | None = Field(
        None, description="also the tokens until a row of the log is at or below this"
    )
    out: OutFile = Field("", description="a JSON file for the figures")
    plot: OutFile = Field("", description="a PNG file for a plot of the runs")


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
    """The runs that have the metric; a line on stderr for each of the others."""
    patterns = [settings.runs] if isinstance(settings.runs, str) else settings.runs
    runs: list[results.Run] = []
    for pattern in patterns:
        # A name may contain what has a meaning in a pattern.
        paths = [pattern] if os.path.isdir(pattern) else sorted(glob.glob(pattern))
        folders = [folder for folder in map(Path, paths) if folder.is_dir()]
        if not folders:
            say(f"{pattern}: no such folder")
        for folder in folders:
            try:
                runs.append(results.read(folder, settings.metric))
            except (ValueError, RecursionError) as error:
                say(f"{folder}: skipped, not a run ({message_of(error)})")
                continue
            if not runs[-1].points:
                say(f"{folder}: skipped, no {settings.metric} after step 0")
    if not runs:
        fix = "use runs='runs/*' where training has been"
        refuse([("runs", " ".join(patterns), "no run's directory", fix)])
    if not any(run.points for run in runs):
        fix = f"use one of {', '.join(sorted(set().union(*(run.metrics for run in runs))))}"
        refuse([("metric", settings.metric, "none of the runs has it", fix)])
    return [run for run in runs if run.points]


def say(line: str) -> None:
    """A line on stderr. Names of files and folders come from anywhere."""
    print(sanitize(line, keep=""), file=sys.stderr)


if __name__ == "__main__":
    main()
