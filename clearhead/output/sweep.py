"""The results of a sweep (python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2,3).

Each job writes result.json (config/application.py). At the end Hydra calls `SweepResults`
(hydra.callbacks in configs/config.yaml). It prints a table, writes results.json to
hydra.sweep.dir, and the process ends with the exit code of the first failed job.
"""

import os
import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from clearhead.config.application import results_in, sweep_directory
from clearhead.config.command_line import errors_in_one_line
from clearhead.errors import best_effort, refuse, sanitize
from clearhead.files import REPOSITORY, as_json, atomic_write, last_values
from clearhead.output.comparison import read_all, summarize, table


class SweepResults(Callback):
    """Hydra callback, called in the process that started the sweep, and at the start of a job in
    that of the job."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for launchers
        if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
            with errors_in_one_line():  # Hydra only warns of errors here
                hint = "start it without torchrun, or remove -m"
                refuse([("WORLD_SIZE", ranks, "a sweep runs in one process", hint)])
        for path, _ in results_in(sweep_directory(config.hydra)):
            path.unlink()  # of an earlier start of this sweep

    def on_job_start(self, config: DictConfig, **_: object) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            job = f"job {config.hydra.job.num}: {' '.join(config.hydra.overrides.task)}"
            print(sanitize(job), flush=True)

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        if sys.exc_info()[0]:
            return  # a signal stops the sweep; Hydra 1.3 does not call this then, Hydra 1.4 does
        folder = Path(config.hydra.sweep.dir)
        jobs = [job for _, job in results_in(sweep_directory(config.hydra))]
        failed = [job for job in jobs if job["exit_code"]]
        if not jobs:
            print("the sweep has no jobs: a setting has no values", file=sys.stderr)
            sys.exit(2)
        with best_effort(f"{folder}: cannot write the results"):  # such as a full disk
            write_results(folder, jobs)
        if failed:
            title = f"{len(failed)} of {len(jobs)} jobs failed:"
            print(title, *map(line, failed), sep="\n  ", file=sys.stderr)
            sys.exit(failed[0]["exit_code"])


def line(job: dict) -> str:
    error = job["error"].replace("\n", "; ")
    return sanitize(f"job {job['job']}: {' '.join(job['overrides'])}: {error}", "")


def write_results(folder: Path, jobs: list[dict]) -> None:
    """Prints the table of all runs; writes results.json."""
    # A job that was refused (2, 3) is not a run, also if its run directory exists.
    trained = [job["run"] for job in jobs if job["run"] and job["exit_code"] not in (2, 3)]
    folders = [*map(Path, dict.fromkeys(trained))]
    logged = {key for folder in folders for key in last_values(folder / "metrics.jsonl")}
    metric = "val/loss" if "val/loss" in logged else "train/loss"
    rows = summarize(read_all(folders, metric) if metric in logged else [], metric)
    if rows:
        print(f"\n{table(rows, metric)}\n\nresults          {folder}/results.json", flush=True)
    atomic_write(folder / "results.json", as_json({"jobs": jobs, "metric": metric, "rows": rows}))
