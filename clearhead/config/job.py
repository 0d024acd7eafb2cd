"""One job of a sweep (python train.py -m): a run, named <sweep>_<number>, and its result.json.

result.json is in the job directory (hydra.sweep.dir/hydra.sweep.subdir). A failed job reports an
infinite loss, so that every launcher and sweeper continues. reporting/sweep.py reads the results.
"""

import gc
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from clearhead.config.compose import one_line_each
from clearhead.config.schema import Config
from clearhead.config.validation import flat_fields, validate
from clearhead.config.yaml_files import default_values, flat, nested
from clearhead.errors import (
    DEBUG_HINT,
    Problem,
    best_effort,
    exit_code_of,
    format_error,
    message_of,
    refuse,
)
from clearhead.files import as_json, atomic_write, make_folder, read_json

MAX_NAME_CHARS = 64  # characters of the sweep's directory name in the names of its runs


def check_sweep(config: DictConfig) -> int | None:
    """Raises ConfigError before a sweep starts: several ranks, no job, a value that its setting
    cannot have, or one name for all jobs. Each job checks the rules between settings. Returns the
    number of jobs; None if the sweeper decides it.

    config: as Hydra composed it for the sweep, with the node `hydra`.
    """
    composed, problems, found, num_jobs = OmegaConf.to_container(config), [], {}, 1
    task = composed["hydra"]["overrides"]["task"]
    sweeper = composed["hydra"]["sweeper"]
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        hint = "start it without torchrun, or remove -m"
        problems.append(Problem("WORLD_SIZE", ranks, "a sweep runs in one process", hint))
    with one_line_each([*params, *task]):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for override in parser.parse_overrides([*params, *task]):
            key, values = override.key_or_group, [None, None]  # the sweeper chooses from a range
            if override.is_discrete_sweep():
                values = [*override.sweep_string_iterator()]
            elif not override.is_sweep_override():
                values = [override.get_value_element_as_str()]
            found[key] = values
            num_jobs *= len(values)
            if not values:
                hint = f"write {key}=A,B; glob() finds only names of files in configs/"
                written = override.get_value_string()
                problems.append(Problem(key, written, "has no values, so no job runs", hint))
            problems += problems_of_values(key, [value for value in values if value])
    swept = {key for key, values in found.items() if len(values) > 1}
    if "name" not in found and swept <= flat_fields(Config).keys():  # else a file may set the name
        found["name"] = [composed["name"]]
    names = [str(name) for name in found.get("name", ()) if name not in (None, "null")]
    names = [name for name in names if "$" not in name]
    if names and swept - {"name"}:
        problems.append(same_name(names[0]))
    refuse(problems)
    runs_all = sweeper["_target_"].endswith(".BasicSweeper")  # all combinations of the values
    return num_jobs if runs_all else sweeper.get("n_trials")


def problems_of_values(key: str, values: Iterable[str]) -> list[Problem]:
    """Returns the problem of the first value, as in an override, that this setting cannot have."""
    defaults = flat(default_values())
    for value in values:
        if key in defaults and "$" not in value:
            override = OverridesParser.create().parse_override(f"{key}={value}")
            tree = nested(defaults | {key: override.value()})
            found = [each for each in validate(Config, tree, rules=False)[1] if each.key == key]
            if found:
                return found
    return []


def same_name(name: str) -> Problem:
    """Returns the problem of a job with the name of another job."""
    hint = "remove it, or write a name with each swept setting, as in name='lr${optimizer.lr}'"
    return Problem("name", name, "another job of this sweep has the same name", hint)


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


def is_in_sweep() -> bool:
    """Returns whether this process is running a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


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
            "wandb.id": None,  # WANDB_RUN_ID would make all jobs one run
        }
    )


def check_own_name(config: Config, result: dict) -> None:
    """Raises ConfigError if another job of the sweep has the same run directory."""
    others = [each for each in results_in(result["sweep"]) if each["job"] != result["job"]]
    if any(each["run"] == result["run"] for each in others):
        refuse([same_name(config.name)])


def results_in(sweep: str) -> list[dict]:
    """Returns the contents of the result.json of each job of a sweep, in their order. A file that
    cannot be read counts as the result of a failed job."""
    results = []
    for path in Path(sweep).rglob("result.json"):
        try:
            result = read_json(path)
        except (OSError, ValueError) as error:
            if str(path.parent.parent) != sweep or not path.parent.name.isdecimal():
                continue
            failed = {"exit_code": 4, "error": f"{path} cannot be read ({message_of(error)})"}
            number = int(path.parent.name)
            result = {"sweep": sweep, "job": number, "overrides": [], "run": None} | failed
        if isinstance(result, dict) and result.get("sweep") == sweep:
            results.append(result)
    return sorted(results, key=lambda each: each["job"])


def free_memory() -> None:
    """Frees the model and the compiled code of a job before the next job starts."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
