"""compose(["model=gpt2-nano", ...]): Hydra composes configs/ and overrides, pydantic checks them.

`compose` works in scripts, in notebooks and inside a Hydra application: it restores Hydra's global
state.
"""

import contextlib
import os
import shlex
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

from errors import NO_VALUE, ConfigError, Problem, refuse, shorten
from training.config.command_line import not_a_setting
from training.config.other_names import current_names, unknown_key
from training.config.schema import Config, known_settings
from training.config.stored import config_from
from training.config.yaml_files import CONFIGS


def compose(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    config_name: str = "config",
    config_path: str | Path = CONFIGS,
) -> Config:
    """Returns the checked config for overrides, written as on the command line of train.py.

    config_dir: a folder with more YAML files (--config-dir). Raises ConfigError with all problems.
    """
    problems: list[Problem] = []
    if config_dir is not None and not os.path.isdir(config_dir):
        refuse([Problem("--config-dir", config_dir, "folder not found", "check the path")])
    with _hydra_state(config_path, config_dir):
        texts = _checked(list(overrides), problems)
        values = _composed(config_name, texts, problems)
    if values is None:
        raise ConfigError(problems)
    return config_from(values, texts, problems)


@contextlib.contextmanager
def _hydra_state(config_path: str | Path, config_dir: str | None) -> Iterator[None]:
    """Initializes Hydra for these folders; restores its global state at exit."""

    class ConfigDir(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            """Adds the folder as hydra.main does for --config-dir."""
            search_path.append("command-line", f"file://{os.path.abspath(config_dir)}")

    before = Singleton.get_state()  # Hydra's state and OmegaConf's resolvers
    if config_dir is not None:
        Plugins.instance().register(ConfigDir)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(os.path.abspath(config_path), version_base="1.3"):
            yield
    finally:
        Singleton.set_state(before)


def _checked(overrides: list[str], problems: list[Problem]) -> list[str]:
    """Returns the overrides that Hydra can compose. Adds all others to `problems`, because Hydra
    stops at the first one. The schema checks added keys (+KEY=VALUE)."""
    parser, texts = OverridesParser.create(), []
    loader = GlobalHydra.instance().config_loader()  # includes the groups in config_dir
    known = [*known_settings(), *loader.get_group_options("", ObjectType.GROUP)]
    for text in current_names(overrides, known):
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError):
            invalid = Problem(text, NO_VALUE, "not a valid Hydra override", quoting(text))
            problems.append(invalid if "=" in text else not_a_setting(text, "data.path"))
            continue
        key = override.key_or_group
        is_known = key.partition("/")[0] in known or override.package is not None
        if override.is_sweep_override():
            fix = f"use -m to train one run per value, or [1,2] for a list; {quoting(text)}"
            problems.append(Problem(text, NO_VALUE, "has several values", fix))
        elif override.type is OverrideType.CHANGE and not (is_known or key.startswith("hydra.")):
            problems.append(unknown_key(key, text.partition("=")[2], known))
        else:
            texts.append(text)
    return texts


def quoting(text: str) -> str:
    """Returns a hint: how to quote a value with a comma, a bracket, a quote or an accent."""
    key, _, value = text.replace('"', r"\"").partition("=")
    return "if the value is text, write " + shlex.quote(f'{key}="{shorten(value)}"')


def _composed(config_name: str, overrides: list[str], problems: list[Problem]) -> dict | None:
    """Returns the composed values, or None after an error. Adds errors to `problems`. An unknown
    choice of a group is skipped, so that the other overrides are checked too."""
    try:
        # Hydra sets these in jobs only, but name=${hydra:job.num} needs them here.
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
                    fix = not_a_setting(value, "data.path").hint
                problems.append(Problem(key, value, f"no such {key}", fix))
                rest = [other for other in overrides if other != text]
                return _composed(config_name, rest, problems)
        problems.append(problem_of(error, overrides))
    except Exception as error:  # of Hydra, OmegaConf or YAML
        problems.append(problem_of(error, overrides))
    return None


def problem_of(error: Exception, overrides: list[str]) -> Problem:
    """Turns an error of Hydra or OmegaConf into a problem, with the setting if it is known."""
    for text in overrides:
        key, _, value = text.removeprefix("+").partition("=")
        clashes = (f"already at '{key}'", f"Multiple values for {key}.")  # messages of Hydra
        if text.startswith("+") and any(clash in str(error) for clash in clashes):
            return Problem(key, value, "exists already", f"write {key}={value}, without +")
    said = getattr(error, "problem", None) or str(error).strip() or type(error).__name__
    key = getattr(error, "full_key", None)
    value = NO_VALUE if key else " ".join(overrides)
    return Problem(key or "command line", value, said.splitlines()[0].rstrip("."), "see --help")
