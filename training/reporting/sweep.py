"""Sweeps: jobs of a Hydra multirun (python train.py -m), and their results.

    python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2,3

Each job is a run, <runs_dir>/<sweep>_<number>, and leaves result.json in its job directory
(hydra.sweep.dir/hydra.sweep.subdir); files of this name without this sweep's directory in them are
left alone. A failed job reports an infinite loss, so that any launcher and sweeper continues. At
the end Hydra calls `SweepResults` (hydra.callbacks in configs/config.yaml), which writes
results.md, results.json and results.png into hydra.sweep.dir and ends the process with the exit
code of the first failed job.
"""

import contextlib
import gc
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from errors import DEBUG_HINT, best_effort, exit_code_of, format_error, message_of, sanitize
from files import atomic_write, make_folder, read_json
from training.config.yaml_files import REPOSITORY
from training.reporting import comparison

if TYPE_CHECKING:
    from training.config.schema import Config

METRICS = ("val/loss", "train/loss")  # the first one that the runs have is compared
LONGEST_NAME = 64  # characters of the sweep's folder that are used in the names of its runs


# ---------------------------------------------------------------------------------- one job


def run_job(hydra: DictConfig, make: Callable[[], "Config"], run: Callable) -> float:
    """Runs one job of a sweep. Returns what a sweeper minimises: the lowest validation loss, or the
    last training loss without validation; infinity for a job that failed.

    hydra: the job's hydra config. make: makes the config, or raises ConfigError. run: trains.
    Raises OSError where result.json cannot be written before the job starts: Hydra then runs the
    other jobs, and ends with this error.
    """
    number, overrides = hydra.job.num, list(hydra.overrides.task)
    result = {"sweep": _directory(hydra), "job": number, "overrides": overrides, "run": None}
    result |= {"exit_code": 4, "error": "ended without a result"}
    path = Path(hydra.runtime.output_dir) / "result.json"
    make_folder(path.parent)
    atomic_write(path, comparison.as_json(result))
    debug = False
    try:
        config = make()
        debug = config.debug
        _label(config, hydra)
        result["run"] = str(Path(config.runs_dir) / config.name)
        print(f"job {number}: {config.name}", flush=True)
        run(config)
        result |= {"exit_code": 0, "error": ""}
    except SystemExit:  # by a signal
        folder = hydra.sweep.dir
        print(
            f"sweep stopped; to resume: rerun the same command with hydra.sweep.dir={folder}",
            file=sys.stderr,
        )
        raise
    except Exception as error:
        if stopped := getattr(error, "stopped", 0):  # by a signal before the error
            raise SystemExit(stopped) from error
        result |= {"exit_code": exit_code_of(error), "error": format_error(error, DEBUG_HINT)}
        print(f"job {number} failed: {result['error']}", file=sys.stderr, flush=True)
        if debug:
            traceback.print_exception(error)
    _free_memory()
    with best_effort(f"job {number} counts as failed: {path} not written"):  # such as a full disk
        atomic_write(path, comparison.as_json(result))
        if not result["exit_code"]:
            return _objective(result["run"])
    return math.inf


def _directory(hydra: DictConfig) -> str:
    """The sweep's directory as an absolute path; a job may have another current directory."""
    return os.path.abspath(os.path.join(hydra.runtime.cwd, hydra.sweep.dir))


def _label(config: "Config", hydra: DictConfig) -> None:
    """Names the run <sweep>_<number>, the same when the sweep is started again in its folder, and
    groups the sweep's runs on W&B."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(_directory(hydra)).name)
    sweep = name[:LONGEST_NAME].strip("-.+") or "sweep"
    if config.name is None:
        config.name = f"{sweep}_{hydra.job.num}"
    if config.wandb.group is None:
        config.wandb.group = sweep


def _objective(run: str) -> float:
    runs, metric = _runs([run])
    values = [value for run in runs for _, value in run.points if math.isfinite(value)]
    return (min(values) if metric == "val/loss" else values[-1]) if values else math.inf


def _runs(folders: list[str]) -> tuple[list[comparison.Run], str]:
    """The runs, with the first one of METRICS that any of them has; none if they have neither."""
    for metric in METRICS:
        runs = []
        for folder in folders:
            with contextlib.suppress(ValueError):
                runs.append(comparison.read(Path(folder), metric))
        if any(run.points for run in runs):
            return runs, metric
    return [], ""


def _free_memory() -> None:
    """Frees the model and the compiled code of a job before the next one starts."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


# ------------------------------------------------------------------------------ all jobs


class SweepResults(Callback):
    """Hydra calls it in the process that started the sweep."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for launchers
        sweep = _directory(config.hydra)
        for path in Path(sweep).rglob("result.json"):
            if (result := _result(path, sweep)) and result["sweep"]:
                path.unlink()  # of an earlier start of this sweep

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        folder, sweep = Path(config.hydra.sweep.dir), _directory(config.hydra)
        found = [_result(path, sweep) for path in Path(sweep).rglob("result.json")]
        jobs = sorted(filter(None, found), key=lambda job: job["job"])
        failed = [job for job in jobs if job["exit_code"]]
        lines = []
        for job in failed:
            error = job["error"].replace("\n", "; ")
            lines.append(sanitize(f"job {job['job']}: {' '.join(job['overrides'])}: {error}", ""))
        with best_effort(f"{folder}: results not written"):  # such as a full disk
            write_results(folder, jobs, lines)
        if failed:
            print(f"{len(lines)} of {len(jobs)} jobs failed:", *lines, sep="\n  ", file=sys.stderr)
            sys.exit(failed[0]["exit_code"])


def _result(path: Path, sweep: str) -> dict | None:
    """What a job of this sweep has left; None for the file of anything else.

    A file that cannot be read and is directly in a job's directory is that of a failed job.
    """
    try:
        result = read_json(path)
    except (OSError, ValueError) as error:
        if str(path.parent.parent) != sweep or not path.parent.name.isdecimal():
            return None
        failed = {"exit_code": 4, "error": f"{path} cannot be read ({message_of(error)})"}
        number = int(path.parent.name)
        return {"sweep": None, "job": number, "overrides": [], "run": None} | failed
    is_own = isinstance(result, dict) and result.get("sweep") == sweep
    return result if is_own else None


def write_results(folder: Path, jobs: list[dict], failed: list[str]) -> None:
    """Prints the table of all runs; writes results.md, results.json and results.png.

    failed: a line for each failed job.
    """
    figures: dict[str, object] = {"jobs": jobs}
    parts = [f"# {folder.absolute().name}"]
    runs, metric = _runs([job["run"] for job in jobs if job["run"]])
    if runs:
        keys = {text.partition("=")[0].lstrip("+") for job in jobs for text in job["overrides"]}
        rows = comparison.summarize(runs, metric, swept=keys)
        tables = comparison.tables(rows, metric)
        print(f"\n{tables}\n\nresults          {folder}/results.md, .json, .png", flush=True)
        atomic_write(folder / "results.png", comparison.plot(rows, metric))
        parts += [tables, "![metric over tokens](results.png)"]
        figures |= {"metric": metric, "settings": comparison.shared(runs), "rows": rows}
    parts += ["## Failed jobs"] * bool(failed) + [f"- {line}" for line in failed]
    atomic_write(folder / "results.json", comparison.as_json(figures))
    atomic_write(folder / "results.md", ("\n\n".join(parts) + "\n").encode())
