"""Hydra composes configs/ and the command line, `config_from` checks the values.

    config = compose(["model=gpt2-nano"])  # in Python

    @hydra_main
    def main(config: Config) -> float: ...  # train.py; returns the value that a sweep minimises

Launchers, sweepers, callbacks and all options of Hydra work as Hydra documents them. Errors are
printed as one line per problem. Exit codes: errors.py.

A job of a sweep (python train.py -m) is a run, named <name or sweep>_<number>. Its result.json is
in the job directory (hydra.sweep.dir/hydra.sweep.subdir). A failed job reports an infinite loss, so
that every launcher and sweeper continues. output/sweep.py reads the results.
"""

import argparse
import contextlib
import functools
import gc
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra
import hydra.utils
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from clearhead.config.command_line import (
    SYNTAX,
    errors_in_one_line,
    not_a_setting,
    spin_briefly,
)
from clearhead.config.schema import Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.validation import unknown_key
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    ClearheadError,
    ConfigError,
    Problem,
    exit_code_of,
    format_error,
)
from clearhead.files import as_json, atomic_write, make_folder, read_object

VERSION = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # 1.4: only its own
# Hydra 1.4 can restrict which callbacks and launchers it creates. The user's own settings name
# them, so there is no restriction, as in Hydra 1.3.
OPTIONS = VERSION or {"execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
if sys.version_info >= (3, 14) and VERSION:
    # Python 3.14 checks the help text of each option when it is added, and raises for the object
    # that Hydra 1.3 uses in place of a text (hydra issue 3121). Hydra 1.4 does not have it.
    setattr(argparse.ArgumentParser, "_check_help", lambda parser, action: None)  # noqa: B010
SWEEPS = {"-m", "--multirun", "hydra.mode=MULTIRUN"}
COMPOSING = threading.Lock()
MAX_NAME_CHARS = 64  # characters of the sweep's directory name in the names of its runs
# Hydra raises these for settings; the last three for files, folders and combinations of options.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
ERRORS += (RecursionError,)


def compose(overrides: Sequence[str] = ()) -> Config:
    """Returns the checked config for overrides, written as on the command line of train.py.

    Raises ConfigError with all problems.
    """
    with one_line_each(overrides), COMPOSING:
        # The program may be a Hydra application itself: its Hydra, which is global, is restored.
        of_process, version = GlobalHydra.instance(), VersionBase.instance()
        before = of_process.hydra, version.version_base
        of_process.hydra = None
        try:
            with hydra.initialize_config_dir(str(CONFIGS), **VERSION):
                return checked(hydra.compose("config", quote_texts(overrides)), overrides)
        finally:
            GlobalHydra.set_instance(of_process)
            of_process.hydra, version.version_base = before


def checked(values: DictConfig, overrides: Sequence[str]) -> Config:
    """Returns the config for values that Hydra has composed. Raises ConfigError."""
    with one_line_each(overrides):
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        return config_from(plain, overrides)


@contextlib.contextmanager
def one_line_each(overrides: Sequence[str]) -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as ConfigError."""
    try:
        yield
    except ClearheadError:
        raise
    except ERRORS as error:
        raise ConfigError(problems_of(error, overrides)) from error


def problems_of(error: Exception, overrides: Sequence[str]) -> list[Problem]:
    """Returns all unknown settings, an unknown choice, or what Hydra says. Hydra stops at the first
    error."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return [Problem(group, name, f"no such {group}", f"use one of {', '.join(error.options)}")]
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        known, given = known_settings(), [text.partition("=") for text in overrides]
        unknown = [
            unknown_key(key, value, known)
            for key, _, value in given
            if key == cause.full_key  # others may be groups of the user, or Hydra's own
            or ("." in key and key not in known and not key.startswith(("hydra", "+", "~")))
        ]
        if unknown:
            return unknown
    said = f"{error}\n\n".partition("\n\n")[0]  # the rest is a list of folders or choices
    if isinstance(cause, OmegaConfBaseException):
        said += f": {cause}"
    key, said, hint = getattr(error, "override", "hydra"), " ".join(said.split()), "see --help"
    if isinstance(error, OverrideParseException):
        if "=" not in key:
            return [not_a_setting(key)]
        hint = f"""as a text: '{key.partition("=")[0]}="TEXT"'"""
    return [Problem(key, NO_VALUE, said or type(error).__name__, hint)]


def override(key: str, text: object) -> str:
    """Returns KEY=TEXT for Hydra, with quotes if the text is not a plain path with a slash."""
    if re.fullmatch(r"[\w.+-]*/[\w./+ -]*", str(text), re.ASCII):
        return f"{key}={text}"
    return f"{key}={QuotedString(str(text), Quote.double).with_quotes()}"


def quote_texts(overrides: Sequence[str], is_sweep: bool = False) -> list[str]:
    """Returns the overrides, with quotes for each value that Hydra cannot parse and that does not
    begin with syntax of Hydra: data.path="小説.txt". A value of a sweep has no comma then."""
    parser = OverridesParser.create()

    def changed(text: str) -> str:
        key, equals, value = text.partition("=")
        has_syntax = SYNTAX.match(value) or (is_sweep and "," in value)
        if not equals or text.startswith("-") or has_syntax:
            return text
        try:
            parser.parse_override(text)
        except HydraException:
            return f"{key}={QuotedString(value.strip(), Quote.double).with_quotes()}"
        return text

    return [*map(changed, overrides)]


# ------------------------------------------------------------------------- the command train.py


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
        spin_briefly()
        with errors_in_one_line(debug="debug=true" in arguments):
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
            with one_line_each(arguments):
                is_sweep = not SWEEPS.isdisjoint(arguments)
                sys.argv[1:] = quote_texts(arguments, is_sweep)
                hydra.main(str(CONFIGS), "config", **OPTIONS)(task)()

    return main


# -------------------------------------------------------------------------- jobs of a sweep


def run_job(job: DictConfig, make_config: Callable[[], Config], run: Callable) -> float:
    """Runs one job of a sweep. Returns run(config), the value that a sweeper minimises; infinity if
    the job failed.

    job: its hydra config. make_config: returns the config or raises ConfigError. Raises OSError if
    result.json cannot be written: Hydra then runs the other jobs and ends with this error.
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
    gc.collect()  # frees the model
    if "torch._dynamo" in sys.modules:  # the compiler gives up after some compilations in a process
        sys.modules["torch"].compiler.reset()
    atomic_write(path, as_json(result))
    return value


def sweep_directory(job: DictConfig) -> str:
    """Returns the sweep's absolute directory: a job may have another working directory."""
    return os.path.abspath(os.path.join(job.runtime.cwd, job.sweep.dir))


def config_of_job(config: Config, job: DictConfig) -> Config:
    """Returns the config with the name <name or sweep>_<number>, which is the same when the sweep
    is resumed, and with the W&B group of the sweep's runs, unless it is set. Raises ConfigError."""
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(sweep_directory(job)).name)
    sweep = name[:MAX_NAME_CHARS].strip("-.+") or "sweep"
    return config.with_values(
        {
            "name": f"{config.name or sweep}_{job.job.num}",
            "wandb.group": sweep if config.wandb.group is None else config.wandb.group,
        }
    )


def results_in(sweep: str) -> list[tuple[Path, dict]]:
    """Returns the result.json of each job of a sweep and its contents, in the order of the jobs."""
    found = [(path, read_object(path)) for path in Path(sweep).rglob("result.json")]
    found = [(path, result) for path, result in found if result.get("sweep") == sweep]
    return sorted(found, key=lambda each: each[1]["job"])
