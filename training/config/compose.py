"""compose(["model=gpt2-nano", ...]): configs/ and overrides, composed by Hydra and checked.

Works in scripts, notebooks and inside a Hydra application: Hydra's global state is restored.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from errors import NO_VALUE, ConfigError, Problem, refuse
from training.config.command_line import meant
from training.config.other_names import current_names, unknown_key
from training.config.schema import Config, known_settings
from training.config.stored import config_from
from training.config.yaml_files import CONFIGS, REPOSITORY

# `${repository:}` in a YAML file is the folder of this repository.
OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY), replace=True)
QUOTES = """text with a comma, bracket or quote needs two pairs of quotes: 'key="some, text"'"""


def compose(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    config_name: str = "config",
    config_path: str | Path = CONFIGS,
) -> Config:
    """The config that these overrides make, as on the command line of train.py.

    config_dir: a folder of more YAML files (--config-dir). Raises ConfigError with every problem.
    """
    problems: list[Problem] = []
    if config_dir is not None and not os.path.isdir(config_dir):
        refuse([Problem("--config-dir", config_dir, "no such folder", "check the path")])
    with _hydra_state(config_path, config_dir):
        texts = _checked(list(overrides), problems)
        values = _composed(config_name, texts, problems)
    if values is None:
        raise ConfigError(problems)
    return config_from(values, texts, problems)


@contextlib.contextmanager
def _hydra_state(config_path: str | Path, config_dir: str | None) -> Iterator[None]:
    """Hydra initialised for these folders; its global state is restored afterwards."""

    class ConfigDir(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            """As hydra.main does it for --config-dir."""
            search_path.append("command-line", f"file://{os.path.abspath(config_dir)}")

    before = Singleton.get_state()  # of Hydra and of the resolvers of OmegaConf
    if config_dir is not None:
        Plugins.instance().register(ConfigDir)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(os.path.abspath(config_path), version_base="1.3"):
            yield
    finally:
        Singleton.set_state(before)


def _checked(overrides: list[str], problems: list[Problem]) -> list[str]:
    """The overrides without those that cannot be composed, which are added to the problems: Hydra
    would stop at the first one. Keys that are added (+key=value) are left to the schema."""
    parser, texts = OverridesParser.create(), []
    loader = GlobalHydra.instance().config_loader()  # it knows the groups in the user's folders
    known = [*known_settings(), *loader.get_group_options("", ObjectType.GROUP)]
    for text in current_names(overrides, known):
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError):
            fix = QUOTES if "=" in text else meant(text, "data.path")
            cause = "is not of the form key=value"
            problems.append(Problem(text if text.strip() else repr(text), NO_VALUE, cause, fix))
            continue
        key = override.key_or_group
        is_known = key.partition("/")[0] in known or override.package is not None
        if override.is_sweep_override():
            fix = f"-m trains once for each value; a list has brackets; {QUOTES}"
            problems.append(Problem(text, NO_VALUE, "several values for one run", fix))
        elif override.type is OverrideType.CHANGE and not (is_known or key.startswith("hydra.")):
            problems.append(unknown_key(key, text.partition("=")[2], known))
        else:
            texts.append(text)
    return texts


def _composed(config_name: str, overrides: list[str], problems: list[Problem]) -> dict | None:
    """The plain values of a composition; None where there is none. Adds to the problems.

    A choice that does not exist is skipped, so that the rest is checked too.
    """
    try:
        # hydra.job has these in jobs only, and ${hydra:job.num} may name a run.
        jobs = ["hydra.job.num=0", "hydra.job.id='0'"]
        config = hydra.compose(config_name, [*jobs, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        settings = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        return OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        for text in overrides:
            key, _, value = text.lstrip("+").partition("=")
            if f"{key}/{value}" == error.missing_cfg_file:
                fix = f"use one of {', '.join(error.options or [])}"
                if key == "data" and os.path.exists(value):
                    fix = meant(value, "data.path")
                problems.append(Problem(key, value, f"no such {key}", fix))
                rest = [other for other in overrides if other != text]
                return _composed(config_name, rest, problems)
        problems.append(problem_of(error, overrides))
    except Exception as error:  # Hydra, OmegaConf and YAML raise many types
        problems.append(problem_of(error, overrides))
    return None


def problem_of(error: Exception, overrides: list[str]) -> Problem:
    """What Hydra or OmegaConf reports, with the setting where that is known."""
    said = getattr(error, "problem", None) or str(error).strip() or type(error).__name__
    key = getattr(error, "full_key", None)
    value = NO_VALUE if key else " ".join(overrides)
    return Problem(key or "command line", value, said.splitlines()[0].rstrip("."), "see --help")
