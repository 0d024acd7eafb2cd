"""train.py as a Hydra application: hydra.main composes the settings, `config_from` checks them.

    @hydra_main
    def main(config: Config) -> float: ...  # returns the value that a sweep minimises

Launchers, sweepers, callbacks and all options of Hydra work as Hydra documents them. Errors are
printed as one line per problem. Exit codes: errors.py.

A job of a sweep (python train.py -m) is a run, named <sweep>_<number>. Its result.json is in the
job directory (hydra.sweep.dir/hydra.sweep.subdir). A failed job reports an infinite loss, so that
every launcher and sweeper continues. output/sweep.py reads the results.
"""

import argparse
import filecmp
import functools
import gc
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from clearhead.config.command_line import errors_in_one_line
from clearhead.config.compose import VERSION, checked, one_line_each
from clearhead.config.schema import Config
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    Problem,
    best_effort,
    exit_code_of,
    format_error,
    refuse,
)
from clearhead.files import as_json, atomic_write, make_folder, read_object

# Hydra 1.4 can restrict which callbacks and launchers it creates. The user's own settings name
# them, so there is no restriction, as in Hydra 1.3.
OPTIONS = VERSION or {"execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
if sys.version_info >= (3, 14) and VERSION:
    # Python 3.14 checks the help text of each option when it is added, and raises for the object
    # that Hydra 1.3 uses in place of a text (hydra issue 3121). Hydra 1.4 does not have it.
    setattr(argparse.ArgumentParser, "_check_help", lambda parser, action: None)  # noqa: B010
OURS = ("hydra", "main", "schema")  # providers of settings
MAX_NAME_CHARS = 64  # characters of the sweep's directory name in the names of its runs


def is_single_run() -> bool:
    """Returns whether this process trains one run, from train.py; false in a sweep or notebook."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN


def is_in_sweep() -> bool:
    """Returns whether this process is running a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def hydra_main(run: Callable[[Config], object]) -> Callable[[], None]:
    """Turns run(config) into a Hydra application that prints each problem in one line."""

    @functools.wraps(run)
    def task(values: DictConfig) -> object:
        job = HydraConfig.get()

        def make_config() -> Config:
            refuse(unread_files(job.runtime.config_sources))
            # As plain texts: OmegaConf would look for the settings of ${...} among those of Hydra.
            config = checked(values, OmegaConf.to_container(job.overrides.task))
            if job.job.chdir:  # printed paths are for the user's folder
                config = config.with_values({"runs_dir": os.path.abspath(config.runs_dir)})
            return config

        if job.mode == RunMode.MULTIRUN:
            return run_job(job, make_config, run)
        with errors_in_one_line(debug=values.get("debug") is True):
            return run(make_config())

    @functools.wraps(run)
    def main() -> None:
        arguments = sys.argv[1:]
        with errors_in_one_line(debug="debug=true" in arguments):
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
            with one_line_each(arguments):
                hydra.main(str(CONFIGS), "config", **OPTIONS)(task)()

    return main


def unread_files(sources: Iterable[DictConfig]) -> list[Problem]:
    """Returns a problem for each file in the user's folders of settings that Hydra does not read,
    because another file of this name in configs/ has priority."""
    folders = [Path(source.path) for source in sources if source.provider not in OURS]
    pairs = [(f / p.relative_to(CONFIGS), p) for f in folders for p in CONFIGS.rglob("*.yaml")]
    reason = "not read, because a file of this name in configs/ has priority"
    hint = "rename it; to repeat a run: from=RUN"
    return [
        Problem(os.path.relpath(mine), NO_VALUE, reason, hint)
        for mine, ours in pairs
        if mine.is_file() and not filecmp.cmp(mine, ours, shallow=False)
    ]


# -------------------------------------------------------------------------- jobs of a sweep


def run_job(job: DictConfig, make_config: Callable[[], Config], run: Callable) -> float:
    """Runs one job of a sweep. Returns run(config), the value that a sweeper minimises; infinity if
    the job failed.

    job: its hydra config. make_config: returns the config or raises ConfigError. Raises OSError if
    result.json cannot be written before the job starts: Hydra then runs the other jobs and ends
    with this error.
    """
    number, overrides, value = job.job.num, list(job.overrides.task), math.inf
    result = {"sweep": sweep_directory(job), "job": number, "overrides": overrides, "run": None}
    result |= {"exit_code": 4, "error": "the job ended without a result"}
    path = Path(job.runtime.output_dir) / "result.json"
    make_folder(path.parent)
    atomic_write(path, as_json(result))
    debug = False
    try:
        config = config_of_job(make_config(), job)
        debug, result["run"] = config.debug, str(Path(config.runs_dir) / config.name)
        check_own_name(config, result)
        atomic_write(path, as_json(result))
        value = run(config)
        result |= {"exit_code": 0, "error": ""}
    except SystemExit:  # by a signal
        again = f"rerun the same command with hydra.sweep.dir={job.sweep.dir}"
        print(f"sweep stopped; to resume: {again}", file=sys.stderr)
        raise
    except Exception as error:
        if stopped := getattr(error, "stopped", 0):  # by a signal before the error
            raise SystemExit(stopped) from error
        result |= {"exit_code": exit_code_of(error), "error": format_error(error, DEBUG_HINT)}
        print(f"job {number} failed: {result['error']}", file=sys.stderr, flush=True)
        if debug:
            traceback.print_exception(error)
    free_memory()
    with best_effort(f"job {number} counts as failed: cannot write {path}"):  # such as a full disk
        atomic_write(path, as_json(result))
        return value
    return math.inf


def sweep_directory(job: DictConfig) -> str:
    """Returns the sweep's absolute directory: a job may have another working directory."""
    return os.path.abspath(os.path.join(job.runtime.cwd, job.sweep.dir))


def config_of_job(config: Config, job: DictConfig) -> Config:
    """Returns the config with the name <sweep>_<number>, which is the same when the sweep is
    resumed, and with the W&B group of the sweep's runs, unless they are set."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(sweep_directory(job)).name)
    sweep = name[:MAX_NAME_CHARS].strip("-.+") or "sweep"
    return config.with_values(
        {
            "name": f"{sweep}_{job.job.num}" if config.name is None else config.name,
            "wandb.group": sweep if config.wandb.group is None else config.wandb.group,
        }
    )


def check_own_name(config: Config, result: dict) -> None:
    """Raises ConfigError if another job of the sweep has the same run directory, which this job
    would resume."""
    others = [job for _, job in results_in(result["sweep"]) if job["job"] != result["job"]]
    if any(job["run"] == result["run"] for job in others):
        hint = "remove it, or write a name with each swept setting, as in name='lr${optimizer.lr}'"
        refuse([("name", config.name, "another job of this sweep has the same name", hint)])


def results_in(sweep: str) -> list[tuple[Path, dict]]:
    """Returns the result.json of each job of a sweep and its contents, in the order of the jobs."""
    found = [(path, read_object(path)) for path in Path(sweep).rglob("result.json")]
    found = [(path, result) for path, result in found if result.get("sweep") == sweep]
    return sorted(found, key=lambda each: each[1]["job"])


def free_memory() -> None:
    """Frees the model and the compiled code of a job before the next job starts."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
