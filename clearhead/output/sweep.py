"""The results of a sweep (python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2,3).

Each job writes result.json (config/job.py). At the end Hydra calls `SweepResults`
(hydra.callbacks in configs/config.yaml). It writes results.md, results.json and results.png to
hydra.sweep.dir, and the process ends with the exit code of the first failed job.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from clearhead.config.command_line import errors_in_one_line
from clearhead.config.job import check_sweep, results_in, sweep_directory
from clearhead.errors import best_effort, sanitize
from clearhead.files import REPOSITORY, as_json, atomic_write, read_object
from clearhead.output import comparison
from clearhead.output.comparison_plot import plot
from clearhead.output.comparison_table import tables
from clearhead.output.console import duration

METRICS = ("val/loss", "train/loss")  # the comparison uses the first of these that any run has


class SweepResults(Callback):
    """Hydra callback, called in the process that started the sweep, and at the start of a job in
    that of the job, to which a launcher may have copied this object."""

    started: float | None = None  # when the sweep started, time.time(); None: not a sweep
    num_jobs: int | None = None  # None if it is unknown

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for launchers
        with errors_in_one_line(config.get("debug") is True):  # Hydra only warns of errors here
            self.num_jobs, self.started = check_sweep(config), time.time()
        sweep = sweep_directory(config.hydra)
        for path in Path(sweep).rglob("result.json"):
            if read_object(path).get("sweep") == sweep:
                with contextlib.suppress(OSError):
                    path.unlink()  # of an earlier start of this sweep

    def on_job_start(self, config: DictConfig, **_: object) -> None:
        if self.started is None:
            return
        number, text = config.hydra.job.num, ""
        if self.num_jobs:
            text = f" ({number + 1} of {self.num_jobs}"
            if number and config.hydra.launcher._target_.endswith(".BasicLauncher"):  # one by one
                left = (time.time() - self.started) / number * (self.num_jobs - number)
                text += f", about {duration(left)} left"
            text += ")"
        line = f"job {number}{text}: {' '.join(config.hydra.overrides.task)}"
        print(sanitize(f"\n{line}" if number else line), flush=True)

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        if sys.exc_info()[0]:
            return  # a signal stops the sweep; Hydra 1.3 does not call this then, Hydra 1.4 does
        folder = Path(config.hydra.sweep.dir)
        jobs = results_in(sweep_directory(config.hydra))
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


def write_results(folder: Path, jobs: list[dict], failed: list[str]) -> None:
    """Prints the tables of all runs; writes results.md, results.json and results.png.

    failed: one line for each failed job.
    """
    results: dict[str, object] = {"jobs": jobs}
    parts = [f"# {folder.absolute().name}"]
    trained = [job["run"] for job in jobs if job["run"] and job["exit_code"] not in (2, 3)]
    runs, metric = _runs([*dict.fromkeys(trained)])
    if runs:
        given = [set(job["overrides"]) for job in jobs]
        swept = set.union(*given) - set.intersection(*given)
        keys = {text.partition("=")[0].lstrip("+") for text in swept}
        rows = comparison.summarize(runs, metric, swept=keys)
        text = tables(rows, metric)
        print(f"\n{text}\n\nresults          {folder}/results.md, .json, .png", flush=True)
        parts += [text, "![metric over tokens](results.png)"]
        results |= {"metric": metric, "settings": comparison.shared(runs), "rows": rows}
    parts += ["## Failed jobs"] * bool(failed) + [f"- {line}" for line in failed]
    atomic_write(folder / "results.json", as_json(results))
    atomic_write(folder / "results.md", ("\n\n".join(parts) + "\n").encode())
    if runs:
        atomic_write(folder / "results.png", plot(rows, metric))
