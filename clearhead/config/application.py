"""train.py as a Hydra application: hydra.main composes the settings, `config_from` checks them.

    @hydra_main
    def main(config: Config) -> float: ...  # returns the value that a sweep minimises

Launchers, sweepers, callbacks and all options of Hydra work as Hydra documents them. Errors are
printed as one line per problem. Exit codes: errors.py.
"""

import argparse
import filecmp
import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from clearhead.config.command_line import errors_in_one_line
from clearhead.config.compose import VERSION, checked, one_line_each
from clearhead.config.job import run_job
from clearhead.config.schema import Config
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, Problem, refuse

# Hydra 1.4 can restrict which callbacks and launchers it creates. The user's own settings name
# them, so there is no restriction, as in Hydra 1.3.
OPTIONS = VERSION or {"execution_whitelist": hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
if sys.version_info >= (3, 14) and VERSION:
    # Python 3.14 checks the help text of each option when it is added, and raises for the object
    # that Hydra 1.3 uses in place of a text (hydra issue 3121). Hydra 1.4 does not have it.
    setattr(argparse.ArgumentParser, "_check_help", lambda parser, action: None)  # noqa: B010
OURS = ("hydra", "main", "schema")  # providers of settings


def is_single_run() -> bool:
    """Returns whether this process trains one run, from train.py; false in a sweep or notebook."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN


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
