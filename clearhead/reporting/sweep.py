"""Sweeps: runs the jobs of a Hydra multirun (python train.py -m) and reports their results.

    python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2,3

Each job is a run, <runs_dir>/<sweep>_<number>, and writes result.json to its job directory
(hydra.sweep.dir/hydra.sweep.subdir). A file of this name that contains another sweep's directory is
ignored. A failed job reports an infinite loss, so that every launcher and sweeper continues. At the
end Hydra calls `SweepResults` (hydra.callbacks in configs/config.yaml). It writes results.md,
results.json and results.png to hydra.sweep.dir, and the process ends with the exit code of the
first failed job.
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

from clearhead.errors import (
    DEBUG_HINT,
    best_effort,
    exit_code_of,
    format_error,
    message_of,
    sanitize,
)
from clearhead.files import REPOSITORY, atomic_write, make_folder, read_json
from clearhead.reporting import comparison
from clearhead.reporting.comparison_plot import plot

if TYPE_CHECKING:
    from clearhead.config.schema import Config

METRICS = ("val/loss", "train/loss")  # the comparison uses the first of these that any run has
MAX_NAME_CHARS = 64  # characters of the sweep's directory name in the names of its runs


# ---------------------------------------------------------------------------------- one job


def run_job(hydra: DictConfig, make_config: Callable[[], "Config"], run: Callable) -> float:
    """Runs one job of a sweep. Returns the value that a sweeper minimises: the lowest validation
    loss, without validation the last training loss; infinity if the job failed.

    hydra: the job's hydra config. make_config: composes the config or raises ConfigError.
    run: trains. Raises OSError if result.json cannot be written before the job starts: Hydra then
    runs the other jobs and ends with this error.
    """
    number, overrides = hydra.job.num, list(hydra.overrides.task)
    result = {"sweep": _directory(hydra), "job": number, "overrides": overrides, "run": None}
    result |= {"exit_code": 4, "error": "the job ended without a result"}
    path = Path(hydra.runtime.output_dir) / "result.json"
    make_folder(path.parent)
    atomic_write(path, comparison.as_json(result))
    debug = False
    try:
        config = make_config()
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
    with best_effort(f"job {number} counts as failed: cannot write {path}"):  # such as a full disk
        atomic_write(path, comparison.as_json(result))
        if not result["exit_code"]:
            return _objective(result["run"])
    return math.inf


def _directory(hydra: DictConfig) -> str:
    """Returns the sweep's absolute directory: a job may have another working directory."""
    return os.path.abspath(os.path.join(hydra.runtime.cwd, hydra.sweep.dir))


def _label(config: "Config", hydra: DictConfig) -> None:
    """Sets the name <sweep>_<number>, which is the same when the sweep is resumed, and the W&B
    group of the sweep's runs."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(_directory(hydra)).name)
    sweep = name[:MAX_NAME_CHARS].strip("-.+") or "sweep"
    if config.name is None:
        config.name = f"{sweep}_{hydra.job.num}"
    if config.wandb.group is None:
        config.wandb.group = sweep
    config.wandb.id = None  # WANDB_RUN_ID would make all jobs one run


def _objective(run: str) -> float:
    runs, metric = _runs([run])
    points = [point for run in runs for point in run.points if point[0]]  # not of step 0
    values = [value for _, value in points if math.isfinite(value)]
    return (min(values) if metric == "val/loss" else values[-1]) if values else math.inf


def _runs(folders: list[str]) -> tuple[list[comparison.ComparedRun], str]:
    """Returns (runs, the first of METRICS that any of them has); [] and "" if there is none."""
    for metric in METRICS:
        runs = []
        for folder in folders:
            with contextlib.suppress(ValueError):
                runs.append(comparison.read(Path(folder), metric))
        if any(run.points for run in runs):
            return runs, metric
    return [], ""


def _free_memory() -> None:
    """Frees the model and the compiled code of a job before the next job starts."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


# ------------------------------------------------------------------------------ all jobs


class SweepResults(Callback):
    """Hydra callback, called in the process that started the sweep."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for launchers
        sweep = _directory(config.hydra)
        for path in Path(sweep).rglob("result.json"):
            if (result := _result(path, sweep)) and result["sweep"]:
                path.unlink()  # of an earlier start of this sweep

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        if sys.exc_info()[0]:
            return  # a signal stops the sweep; Hydra 1.3 does not call this then, Hydra 1.4 does
        folder, sweep = Path(config.hydra.sweep.dir), _directory(config.hydra)
        found = [_result(path, sweep) for path in Path(sweep).rglob("result.json")]
        jobs = sorted(filter(None, found), key=lambda job: job["job"])
        failed = [job for job in jobs if job["exit_code"]]
        lines = []
        for job in failed:
            error = job["error"].replace("\n", "; ")
            lines.append(sanitize(f"job {job['job']}: {' '.join(job['overrides'])}: {error}", ""))
        with best_effort(f"{folder}: cannot write the results"):  # such as a full disk
            write_results(folder, jobs, lines)
        if failed:
            print(f"{len(lines)} of {len(jobs)} jobs failed:", *lines, sep="\n  ", file=sys.stderr)
            sys.exit(failed[0]["exit_code"])


def _result(path: Path, sweep: str) -> dict | None:
    """Reads the result.json of a job; None if it does not belong to this sweep.

    An unreadable file directly in a job directory counts as the result of a failed job.
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
    """Prints the tables of all runs; writes results.md, results.json and results.png.

    failed: one line for each failed job.
    """
    results: dict[str, object] = {"jobs": jobs}
    parts = [f"# {folder.absolute().name}"]
    trained = [job["run"] for job in jobs if job["run"] and job["exit_code"] not in (2, 3)]
    runs, metric = _runs([*dict.fromkeys(trained)])
    if runs:
        keys = {text.partition("=")[0].lstrip("+") for job in jobs for text in job["overrides"]}
        rows = comparison.summarize(runs, metric, swept=keys)
        tables = comparison.tables(rows, metric)
        print(f"\n{tables}\n\nresults          {folder}/results.md, .json, .png", flush=True)
        parts += [tables, "![metric over tokens](results.png)"]
        results |= {"metric": metric, "settings": comparison.shared(runs), "rows": rows}
    parts += ["## Failed jobs"] * bool(failed) + [f"- {line}" for line in failed]
    atomic_write(folder / "results.json", comparison.as_json(results))
    atomic_write(folder / "results.md", ("\n\n".join(parts) + "\n").encode())
    if runs:
        atomic_write(folder / "results.png", plot(rows, metric))
