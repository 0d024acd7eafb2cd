"""Lists the runs of a folder; removes optimizer states or whole runs.

    python -m scripts.runs
    python -m scripts.runs remove=optimizer         # of all finished runs
    python -m scripts.runs remove=run name='[lr_1,seed_*]'

Most of the size of a checkpoint is optimizer state, which only a resumed run needs. Only runs that
are directories in runs_dir are listed and removed. Links in runs_dir are not followed, and a run
that is training is not changed. Reads run.json, starts.jsonl, metrics.jsonl and summary.json.
"""

import contextlib
import difflib
import fnmatch
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from clearhead.checkpoint.run_directory import (
    final_validation,
    is_locked,
    lock_directory,
    optimizer_states,
    remove_run,
    settings_of,
    summarized_step,
)
from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Name, Names
from clearhead.config.stored import SETTINGS_JSON
from clearhead.config.yaml_files import flat
from clearhead.errors import RunDirectoryError, refuse
from clearhead.files import last_values, read_rows, size_of
from clearhead.output.charts import minimum_before_rise, number, points_of
from clearhead.output.comparison_table import markdown_table


class RunsConfig(ScriptConfig):
    """python -m scripts.runs [name=NAME] [remove=optimizer] [KEY=VALUE ...]

    Lists runs, sorted by date; removes optimizer states or whole runs.
    """

    runs_dir: Name = Field("runs", description="folder that contains the run directories")
    name: Names | None = Field(
        None,
        description="only these runs: a name, a pattern such as 'lr_*', or a list, also with the"
        " folder, as runs/NAME; null: all",
    )
    remove: Literal["optimizer", "run"] | None = Field(
        None, description="optimizer (states; without name= of all finished runs) | run | null"
    )
    yes: bool = Field(False, description="true: remove without a question")


@dataclass
class FoundRun:
    folder: Path  # absolute, without links
    date: datetime  # of the first start
    steps: int
    planned: object  # number of steps
    parameters: object  # number of parameters of the model; None: not known
    size: int  # bytes of all files
    optimizer_size: int  # bytes of the optimizer states
    loss: float  # of the last validation; NaN: none
    lowest: tuple[int, float] | None  # (step, validation loss); None: it has not risen since
    state: str  # running, finished or stopped


@settings_command(RunsConfig)
def main(settings: RunsConfig) -> None:
    runs = selected(found(Path(settings.runs_dir)), settings)
    if settings.remove:
        ask_and_remove(runs, settings)
        return
    states = sum(run.optimizer_size for run in runs) / 1e6
    total = amount([run.size for run in runs])
    print(f"{table(runs)}\n\n{total}, of which {states:,.1f} MB are optimizer states")


def found(folder: Path) -> list[FoundRun]:
    """Returns the runs in a folder, the oldest first. Raises ConfigError if there are none."""
    folders = [path for path in folder.resolve().glob("*/") if not path.is_symlink()]
    settings = {path: settings_of(path) for path in folders}
    runs = [read(path, known) for path, known in settings.items() if known is not None]
    if not runs:
        hint = "use runs_dir=FOLDER, or the directory in which train.py was started"
        refuse([("runs_dir", folder, "no run directory found", hint)])
    return sorted(runs, key=lambda run: (run.date, run.folder.name))


def read(folder: Path, settings: dict) -> FoundRun:
    """Reads a run directory with these settings. Values of a wrong type count as missing."""
    log, starts = folder / "metrics.jsonl", read_rows(folder / "starts.jsonl")
    last, losses = last_values(log), points_of(read_rows(log, "val/loss"), "val/loss")
    first, steps = starts[0] if starts else {}, last.get("step", 0)
    date = datetime.fromtimestamp((folder / SETTINGS_JSON).stat().st_mtime).astimezone()
    with contextlib.suppress(ValueError, OverflowError):
        date = datetime.fromisoformat(str(first.get("time"))).astimezone()
    state = "finished" if steps == summarized_step(folder) else "stopped"
    return FoundRun(
        folder,
        date,
        steps,
        flat(settings).get("trainer.max_steps"),
        first.get("parameters"),
        size_of(folder),
        size_of(*optimizer_states(folder)),
        number(final_validation(folder, steps).get("loss", last.get("val/loss"))),
        minimum_before_rise(losses),
        "running" if is_locked(folder) else state,
    )


def selected(runs: list[FoundRun], settings: RunsConfig) -> list[FoundRun]:
    """Returns the runs that `name` selects. Raises ConfigError for a name without a run."""
    patterns = [settings.name] if isinstance(settings.name, str) else settings.name or ["*"]
    names, chosen, problems = [run.folder.name for run in runs], set(), []
    for given in patterns:
        in_folder = Path(given).parent.resolve() == Path(settings.runs_dir).resolve()
        pattern = Path(given).name if in_folder else given
        matching = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        chosen.update(matching)
        if not matching:
            near = difflib.get_close_matches(Path(pattern).name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "python -m scripts.runs lists all runs"
            problems.append(("name", given, f"no such run in {settings.runs_dir}", hint))
    refuse(problems)
    return [run for run in runs if run.folder.name in chosen]


def table(runs: list[FoundRun]) -> str:
    """Returns a table with one row for each run."""
    rows = []
    for run in runs:
        is_open = run.state != "finished" and run.planned is not None
        steps = f"{run.steps} of {run.planned}" if is_open else f"{run.steps}"
        parameters = f"{run.parameters:,}" if isinstance(run.parameters, int) else ""
        cells = {"run": run.folder.name, "date": f"{run.date:%Y-%m-%d %H:%M}", "steps": steps}
        cells |= {"parameters": parameters, "MB": f"{run.size / 1e6:,.1f}"}
        cells["MB of optimizer states"] = f"{run.optimizer_size / 1e6:,.1f}"
        cells["validation loss"] = "" if math.isnan(run.loss) else f"{run.loss:.4f}"
        cells["lowest"] = f"{run.lowest[1]:.4f} at step {run.lowest[0]}" if run.lowest else ""
        rows.append(cells | {"state": run.state})
    return markdown_table(rows)


def amount(sizes: Sequence[int]) -> str:
    """Returns the number and the size of runs, or of their optimizer states."""
    return f"{len(sizes)} run{'s' * (len(sizes) != 1)}, {sum(sizes) / 1e6:,.1f} MB"


def ask_and_remove(runs: list[FoundRun], settings: RunsConfig) -> None:
    """Asks whether to remove these runs or their optimizer states, and does it. Raises ConfigError
    if one of them is training, RunDirectoryError if a file cannot be removed."""
    is_whole, named = settings.remove == "run", settings.name is not None
    if is_whole and not named:
        hint = "write name=NAME, a pattern, or name='*' for all"
        refuse([("name", "null", "remove=run removes only runs that are named", hint)])
    hint = "wait until it ends, or stop it with Ctrl-C"
    busy = [run for run in runs if named and run.state == "running"]
    refuse([("name", run.folder.name, "is training", hint) for run in busy])
    if not is_whole:
        runs = [run for run in runs if run.optimizer_size and (named or run.state == "finished")]
    if not runs:
        print("nothing to remove")
        return
    what = amount([run.size if is_whole else run.optimizer_size for run in runs])
    what = f"{'all files' if is_whole else 'the optimizer states'} of {what}"
    if not (settings.yes or sys.stdin.isatty()):
        reason = f"missing, because no terminal can ask whether to remove {what}"
        refuse([("yes", "true", reason, "add it to remove without a question")])
    print(table(runs), end="\n\n")
    if not is_whole:
        print("Without its optimizer state, a run cannot be resumed; everything else works.")
    if not settings.yes:
        print(f"remove {what}? [y/N]", end=" ", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    for run in runs:
        try:
            remove_run(run.folder) if is_whole else remove_optimizer_states(run.folder)
        except OSError as error:
            reason = f"{error.filename or run.folder} cannot be removed ({error.strerror})"
            hint = "change its permissions, or remove it yourself"
            raise RunDirectoryError("name", run.folder.name, reason, hint) from error
    print(f"removed {what}")


def remove_optimizer_states(folder: Path) -> None:
    """Removes the optimizer states of all checkpoints of a run, the newest first."""
    from clearhead.checkpoint.format import remove_optimizer

    with lock_directory(folder):
        for file in reversed(optimizer_states(folder)):
            remove_optimizer(file.parent)


if __name__ == "__main__":
    main()
