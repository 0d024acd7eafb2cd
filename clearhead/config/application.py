"""Command line of train.py: hydra.main, after a check that reports all problems at once.

    @hydra_main
    def main(config: Config) -> None: ...

`hydra_main` composes and checks the settings, reports each problem in one line, and then calls
`hydra.main` with the same arguments, so launchers, sweepers, callbacks and all options of Hydra
work as Hydra documents them. Exit codes: errors.py.
"""

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable

import hydra.utils
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clearhead.config.command_line import errors_in_one_line, show_settings, unknown_option
from clearhead.config.compose import VERSION, compose, group_choices, problem_of
from clearhead.config.schema import Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, ClearheadError, ConfigError, Problem, refuse
from clearhead.files import REPOSITORY
from clearhead.reporting.sweep import run_job

# Arguments of hydra.main. Hydra 1.4 can restrict which callbacks and launchers it creates.
# The user's own settings name them, so there is no restriction, as in Hydra 1.3.
OPTIONS = VERSION or {"execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
if sys.version_info >= (3, 14) and VERSION:
    # Python 3.14 checks the help text of each option when it is added, and raises for the object
    # that Hydra 1.3 uses in place of a text (hydra issue 3121). Hydra 1.4 does not have it. This
    # changes all parsers of the process, because hydra.main makes its own one when it is called.
    setattr(argparse.ArgumentParser, "_check_help", lambda parser, action: None)  # noqa: B010
# Overrides on ranks other than 0: Hydra creates no directories and writes no logs there.
OTHER_RANKS = ["hydra.run.dir=.", "hydra.output_subdir=null"]
OTHER_RANKS += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
MAX_VALUES = 100  # values of one setting that are checked before a sweep starts


def hydra_main(run: Callable[[Config], object]) -> Callable[[], None]:
    """Turns run(config) into a Hydra application that prints each problem in one line."""

    @functools.wraps(run)
    def task(values: DictConfig) -> object:
        hydra_config = HydraConfig.get()

        def config_of_job() -> Config:
            plain = OmegaConf.to_container(values, resolve=True)
            return config_from(plain, hydra_config.overrides.task)

        if hydra_config.mode == RunMode.MULTIRUN:
            return run_job(hydra_config, config_of_job, run)
        with errors_in_one_line(debug=values.get("debug") is True):
            return run(config_of_job())

    @functools.wraps(run)
    def main() -> None:
        with errors_in_one_line(debug="debug=true" in sys.argv):
            options = parse_options(sys.argv[1:])
            config = check(options)
            trains = (config or options.experimental_rerun) and not (options.help or options.cfg)
            is_rank_0 = os.environ.get("RANK", "0") == "0"
            if is_rank_0 and options.help:
                show_settings(config, group_choices(options))
            elif is_rank_0 or trains:
                run_hydra(task, options, [] if is_rank_0 else OTHER_RANKS)

    return main


def run_hydra(task: Callable, options: argparse.Namespace, more: list[str]) -> None:
    """Calls hydra.main with additional overrides. Raises ConfigError for errors of Hydra."""
    sys.argv[1:] = sorted(sys.argv[1:], key=options.overrides.__contains__) + more  # options first
    if options.config_path != str(CONFIGS):
        sys.argv += ["--config-path", options.config_path]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        hydra.main(str(CONFIGS), "config", **OPTIONS)(task)()
    except (HydraException, OmegaConfBaseException, FileNotFoundError, ValueError) as error:
        if isinstance(error, ClearheadError):
            raise
        raise ConfigError([problem_of(error, options.overrides)]) from error


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parses Hydra options and overrides, in any order. Raises ConfigError for unknown options."""
    parser = get_args_parser()  # of hydra.main
    parser.allow_abbrev = False
    parser.set_defaults(config_name="config")
    parser.error = lambda message: refuse(
        [Problem("command line", NO_VALUE, message, "see --hydra-help")]
    )
    options, unknown = parser.parse_known_intermixed_args(arguments)
    refuse([unknown_option(text, known_settings()) for text in unknown])
    options.config_path = str(REPOSITORY / (options.config_path or CONFIGS))  # as in Hydra
    return options


def check(options: argparse.Namespace) -> Config | None:
    """Returns the checked config (sweep: of the first job); None for options like --version.

    Raises ConfigError with all problems. For a sweep, checks the values in `sweep_variants`."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and options.multirun:
        fix = "start it without torchrun, or remove -m"
        refuse([Problem("WORLD_SIZE", ranks, "a sweep runs in one process", fix)])
    shown = (options.hydra_help, options.info, options.shell_completion)
    if (any(shown) or options.experimental_rerun) and not options.help:
        return None
    configs, problems = [], []
    folders = {key: getattr(options, key) for key in ("config_dir", "config_name", "config_path")}
    jobs = sweep_variants(options.overrides) if options.multirun else [options.overrides]
    for number, overrides in enumerate(jobs):
        overrides = [f"hydra.job.num={number}", *overrides]  # for name=${hydra:job.num}
        try:
            configs.append(compose(overrides, **folders))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    refuse(problems)
    runs = [(config.runs_dir, config.name) for config in configs if config.name]
    if len(set(runs)) < len(runs):
        fix = "remove it, or write a name with each swept setting, such as name='lr${optimizer.lr}'"
        refuse([Problem("name", configs[0].name, "several jobs would have the same name", fix)])
    return configs[0]


def sweep_variants(overrides: list[str]) -> list[list[str]]:
    """Returns overrides of single runs that together contain every value of a sweep. The first run
    has the first value of each setting. Each other run changes one of them. An interval contributes
    its bounds, glob(...) nothing, a long list its first MAX_VALUES values."""
    choices = [texts for texts in map(_values, overrides) if texts]
    first = [texts[0] for texts in choices]
    return [first] + [
        [*first[:index], text, *first[index + 1 :]]
        for index, texts in enumerate(choices)
        for text in texts[1:]
    ]


def _values(text: str) -> list[str]:
    """Returns the overrides of single runs for one override of a sweep."""
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            return [text]
        if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            return []  # only Hydra knows the choices
        if override.is_interval_sweep():
            choices = [override.value().start, override.value().end]
        else:
            choices = itertools.islice(override.sweep_string_iterator(), MAX_VALUES)
        return [f"{text.partition('=')[0]}={choice}" for choice in choices]
    except (HydraException, TypeError, ValueError, RecursionError, AssertionError):
        return [text]  # `compose` reports the problem
