"""A sweep: some runs by one command, one after the other in one process.

    python train.py -m optimizer.lr=1e-3,3e-4 seed=1,2,3

Each job is a run with a directory of its own, runs/<sweep>_<its values>. One that fails is told and
the next begins; at the end there is a table of all, and a list of the failed ones. Which jobs there
are is Hydra's affair (training/config/command_line.py). The sweep's own directory is Hydra's as
well:

multirun/<sweep>/multirun.yaml   what was asked for (Hydra)
                 results.md      table, failed jobs and the commands to repeat them
                 results.json    the same as figures, with every curve
                 results.png     the curves
"""

import contextlib
import datetime
import gc
import itertools
import math
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from errors import DEBUG, RunDirectoryError, exit_code_of, format_error, visible
from files import atomic_write, make_folder
from training.checkpoint import run_directory as directory
from training.reporting import comparison as results
from training.signals import handled, take_no_notice

if TYPE_CHECKING:
    from training.config.schema import Config

METRICS = ("val/loss", "train/loss")  # the first that the runs have is what they are compared by
LONGEST_NAME = 128  # characters of a run's, and of a group's; W&B takes no more


@dataclass
class Plan:
    """What a sweep is asked to do."""

    keys: list[str]  # what it varies
    count: int | None  # jobs; None where the sweeper keeps that to itself
    folder: Path
    is_chosen: bool  # whether the user has named the folder


@dataclass
class Job:
    """One run of a sweep."""

    number: int  # from 1
    overrides: list[str]
    varied: list[str]  # those of the overrides that are this job's own
    name: str | None = None  # of its run
    code: int | None = None  # its exit code, None while it runs
    line: str = ""  # what went wrong

    @property
    def what(self) -> str:
        return visible(" ".join(self.varied), keep="")


class Sweep:
    """Counts the jobs, names their runs, outlives their failures, and sums them up at the end."""

    def __init__(self, plan: Plan, program: list[str], options: list[str], overrides: list[str]):
        """The rest is the command that began it."""
        self.plan = plan
        self.program, self.options = program, options
        self.started = [*program, *options, *overrides]
        self.jobs: list[Job] = []
        self.stopped = 0  # the exit code of a signal that has ended it
        self.lost: str | None = None  # why the sweeper could not go on
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.folder = plan.folder

    # ---------------------------------------------------------------------------------- the jobs

    def begin(self) -> None:
        """Makes the sweep's directory, by whose name all of its runs are called. Raises
        RunDirectoryError."""
        if self.is_main:
            try:
                self.folder = self._own_folder()
                make_folder(self.folder)
            except OSError as error:
                cause = f"cannot be made ({error.strerror})"
                raise RunDirectoryError(
                    "hydra.sweep.dir", self.folder, cause, "give another"
                ) from error

    def _own_folder(self) -> Path:
        """As asked for; by the clock one that is new."""
        folder = self.plan.folder
        if self.plan.is_chosen:
            self._check_names(folder)
            return folder
        return directory.make_new(folder)

    def _check_names(self, folder: Path) -> None:
        """Raises RunDirectoryError where version 1 has begun the sweep: it named runs otherwise
        (lr=0.1,seed=1), so jobs that are done would be done again."""
        name, keys = _in_letters(folder.resolve().name), self.plan.keys
        keys = {results.heading(key, keys) for key in keys}
        for run in directory.RUNS.glob(f"{name}_*=*"):
            if run.name.removeprefix(f"{name}_").partition("=")[0] in keys:
                cause = f"an earlier version has begun it, and named its runs as {run}"
                raise RunDirectoryError("hydra.sweep.dir", folder, cause, "give another folder")

    @property
    def name(self) -> str:
        """What its runs' names begin with, and their group on W&B."""
        return _in_letters(self.folder.resolve().name)[:LONGEST_NAME] or "sweep"

    @contextlib.contextmanager
    def job(self, number: int, overrides: list[str]) -> Iterator[Job]:
        """Around one job. An error inside is kept, and the sweep goes on; a signal ends it."""
        job = Job(number + 1, overrides, [o for o in overrides if self._varies(o)])
        self.jobs.append(job)
        if self.is_main:
            print(_joined(self._title(job), job.what), flush=True)
        try:
            yield job
            job.code = 0
        except Exception as error:
            self.stopped = getattr(error, "stopped", 0)  # by a signal that came before it
            job.code = self.stopped or exit_code_of(error)
            job.line = "; ".join(format_error(error, DEBUG).splitlines())
            _let_go(error)
        except SystemExit as stopped:
            self.stopped = job.code = exit_code_of(stopped)
        except KeyboardInterrupt:
            self.stopped = job.code = 130
        _clean_up()
        if self.is_main:
            if job.line:
                words = _joined(f"{self._title(job)} failed", job.what, job.line)
                print(words, file=sys.stderr)
            self._write()
        if self.stopped or self.lost:
            raise SystemExit(self.exit_code)

    def settle(self, job: Job, settings: "Config") -> None:
        """Names a job's run by its values, and has W&B show the sweep's runs together."""
        if settings.name is None:
            settings.name = self._name(job)
        if settings.wandb.group is None:
            settings.wandb.group = self.name
        job.name = settings.name

    def _name(self, job: Job) -> str:
        """runs/2026-11-22_11-50-02_lr-0.001_seed-1: the same when the sweep is begun again."""
        keys = [_key(text) for text in job.varied]
        pairs = [
            f"{results.heading(key, keys)}-{_in_letters(text.partition('=')[2])}"
            for key, text in zip(keys, job.varied, strict=True)
        ]
        name = "_".join([self.name, *sorted(pairs)])
        taken = {other.name for other in self.jobs if other is not job}
        if len(name) <= LONGEST_NAME and name not in taken:
            return name
        end = f"_{job.number}"
        return name[: LONGEST_NAME - len(end)] + end

    def _varies(self, override: str) -> bool:
        return _key(override) in self.plan.keys

    def _title(self, job: Job) -> str:
        of = f" of {self.plan.count}" if self.plan.count else ""
        return f"job {job.number}{of}"

    # ------------------------------------------------------------------------------- what came out

    def objective(self, job: Job) -> float:
        """What a sweeper that searches makes small: the lowest validation loss of the run, the last
        training loss where nothing is validated. Infinity for a job that failed, so that the search
        goes on elsewhere."""
        if job.code != 0 or not self.is_main:
            return math.inf
        for metric in METRICS:
            with contextlib.suppress(ValueError):
                run, _ = results.read(directory.RUNS / job.name, metric)
                values = [value for _, value in run.points if math.isfinite(value)]
                if values:
                    return min(values) if metric == "val/loss" else values[-1]
        return math.inf

    @property
    def failed(self) -> list[Job]:
        return [job for job in self.jobs if job.line]

    @property
    def exit_code(self) -> int:
        """The first failure's, if a signal has not ended the sweep."""
        return self.stopped or next((job.code for job in self.failed), 4 if self.lost else 0)

    def conclude(self) -> None:
        """The table, where it is kept, and on stderr what failed and how to go on."""
        if not self.is_main:
            return
        with handled(take_no_notice):  # it is a matter of seconds
            table = self._write(picture=True)
            if table:
                print(f"\n{table}\n")
            kept = [name for name in ("md", "json", "png") if self._kept(f"results.{name}")]
            if kept:
                others = f"  (also .{', .'.join(kept[1:])})" if kept[1:] else ""
                path = self.folder / f"results.{kept[0]}"
                print(visible(f"results          {path}{others}"), flush=True)
            if self.failed:
                jobs = f"of {len(self.jobs)} jobs" if len(self.jobs) > 1 else "job"
                print(f"{len(self.failed)} {jobs} failed:", file=sys.stderr)
            for job in self.failed:
                print(f"  {_joined(f'job {job.number}', job.what, job.line)}", file=sys.stderr)
                print(f"    again: {visible(shlex.join(self._again(job)))}", file=sys.stderr)
            if self.stopped or self.lost:
                done = sum(job.code == 0 for job in self.jobs)
                of = f" of {self.plan.count}" if self.plan.count else ""
                why = self.lost or "stopped"
                go_on = visible(shlex.join(self.started_again()))
                print(f"sweep: {why}; {done}{of} jobs done; resume with: {go_on}", file=sys.stderr)

    def _kept(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _again(self, job: Job) -> list[str]:
        """The command that repeats one job alone, in the same place."""
        given = {_key(text) for text in job.overrides}
        own = [("name", job.name), ("wandb.group", self.name)]
        own = [f"{key}={value}" for key, value in own if value and key not in given]
        options = [word for word in self.options if word not in ("-m", "--multirun")]
        return [*self.program, *options, *job.overrides, *own]

    def started_again(self) -> list[str]:
        """The command that goes on with the sweep: jobs that are done are not done again."""
        if self.plan.is_chosen:
            return self.started
        return [*self.started, f"hydra.sweep.dir={self.folder}"]

    def _write(self, picture: bool = False) -> str:
        """Writes what there is to know up to now; returns the table. A disk that is full is a line
        on stderr and no end of a sweep."""
        table, done = "", {}
        try:
            runs, metric = self._runs()
            names = self._names(runs)
            if runs:
                rows = results.summaries(runs, names, metric)
                table = results.table(rows, names, metric)
                done = {"settings": results.shared(runs, names), "rows": rows}
            written = {
                "sweep": self.name,
                "date": datetime.date.today().isoformat(),
                "command": shlex.join(self.started),
                "metric": metric,
                "jobs": [self._as_values(job) for job in self.jobs],
                **done,
            }
            atomic_write(self.folder / "results.json", results.as_json(written))
            if picture and runs:
                atomic_write(self.folder / "results.png", results.draw(rows, names, metric))
            atomic_write(self.folder / "results.md", self._as_text(table).encode())
        except Exception as error:
            words = f"{self.folder}: results not written ({format_error(error)})"
            print(visible(words, keep=""), file=sys.stderr)
        return table

    def _runs(self) -> tuple[list[results.Run], str]:
        """The runs that have come to something, and by what they are compared."""
        for metric in METRICS:
            runs = []
            for job in self.jobs:
                with contextlib.suppress(ValueError):
                    run, _ = results.read(
                        directory.RUNS / (job.name or ""), metric, tuple(self.plan.keys)
                    )
                    if run.points:
                        runs.append(run)
            if runs:
                break
        return runs, metric

    def _names(self, runs: list[results.Run]) -> list[str]:
        """What the sweep varies; a choice of a whole group is known by the settings in it."""
        keys = [key for key in self.plan.keys if key not in results.VARIES]
        if all(key in run.settings for key in keys for run in runs):
            return keys
        return results.differing(runs)

    def _as_values(self, job: Job) -> dict:
        return {
            "run": job.name,
            "overrides": job.overrides,
            "exit_code": job.code,
            **({"error": job.line, "again": shlex.join(self._again(job))} if job.line else {}),
        }

    def _as_text(self, table: str) -> str:
        """results.md."""
        parts = [f"# {self.name}", f"```\n{shlex.join(self.started)}\n```"]
        if table:
            parts.append(table)
        if self._kept("results.png"):
            parts.append("![the curves](results.png)")
        if self.failed:
            parts.append("## Failed")
        for job in self.failed:
            what = f", `{job.what}`" if job.what else ""
            parts.append(f"Job {job.number}{what}: {job.line}")
            parts.append(f"```\n{shlex.join(self._again(job))}\n```")
        return "\n\n".join(parts) + "\n"


def _joined(*parts: str) -> str:
    """With colons between; what the next part begins with is not said twice."""
    pairs = itertools.pairwise([*parts, ""])
    return ": ".join(part for part, after in pairs if part and not after.startswith(f"{part}:"))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _in_letters(text: str) -> str:
    """As the name of a run has it; without = and , to be an item of a list of runs."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.+")


def _let_go(error: BaseException | None) -> None:
    """Of what the error's frames hold: a model, and the connections for which others wait."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _clean_up() -> None:
    """Nothing of a job is left for the next: no model, no compiled code that is counted against
    the next one's."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
