"""compose(["model=gpt2-nano", ...]): Hydra composes configs/ and overrides, pydantic checks them.

`compose` works in scripts, in notebooks and inside a Hydra application: it restores Hydra's global
state.
"""

import argparse
import contextlib
import functools
import os
import re
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
from hydra.types import RunMode
from omegaconf import OmegaConf

from clearhead.config.command_line import not_a_setting
from clearhead.config.other_names import unknown_key
from clearhead.config.schema import Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.user_files import place, with_places
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, ConfigError, Problem, refuse, shorten

VERSION = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # 1.4: only its own


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
    with hydra_state(config_path, config_dir):
        texts = _checked(list(overrides), problems)
        try:
            values = _composed(config_name, texts, problems)
            return config_from(values, texts, problems)
        except ConfigError as error:
            later = [problem for problem in error.problems if problem not in problems]
            raise ConfigError(problems + with_places(later, config_name, texts)) from error


def group_choices(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the choices of each group, including those of the user's folders. A group that is not
    in the defaults list of the primary config has a +, as on the command line."""
    with hydra_state(options.config_path, options.config_dir):
        loader = GlobalHydra.instance().config_loader()
        primary = loader.compute_defaults_list(options.config_name, [], RunMode.RUN)
        choices = functools.partial(loader.get_group_options, overrides=options.overrides)
        groups = [group for group in choices("", ObjectType.GROUP) if group != "hydra"]
        known = primary.overrides.known_choices
        return {("" if group in known else "+") + group: choices(group) for group in groups}


@contextlib.contextmanager
def hydra_state(config_path: str | Path, config_dir: str | None) -> Iterator[None]:
    """Initializes Hydra for these folders; restores its global state at exit."""

    class ConfigDir(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            """Adds the folder as hydra.main does for --config-dir."""
            search_path.append("command-line", f"file://{os.path.abspath(config_dir)}")

    plugins = Plugins.instance()  # Hydra 1.4: registers Hydra's own groups, part of the state
    before = Singleton.get_state()  # Hydra's state and OmegaConf's resolvers
    if config_dir is None:
        before["instances"][Plugins] = plugins  # otherwise Hydra would search for plugins again
    else:
        plugins.register(ConfigDir)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(os.path.abspath(config_path), **VERSION):
            yield
    finally:
        Singleton.set_state(before)


def _checked(overrides: list[str], problems: list[Problem]) -> list[str]:
    """Returns the overrides that Hydra can compose. Adds all others to `problems`, because Hydra
    stops at the first one. The schema checks added keys (+KEY=VALUE)."""
    parser, texts = OverridesParser.create(), []
    loader = GlobalHydra.instance().config_loader()  # includes the groups in config_dir
    known = [*known_settings(), *loader.get_group_options("", ObjectType.GROUP)]
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except (HydraException, ValueError, RecursionError):
            invalid = Problem(text, NO_VALUE, "not a valid Hydra override", quoting(text))
            problems.append(invalid if "=" in text else not_a_setting(text, "data.path"))
            continue
        key = override.key_or_group
        is_known = key.partition("/")[0] in known or override.package is not None
        if override.type is OverrideType.ADD and key in known_settings():
            fix = f"write {text[1:]}, without +"
            problems.append(Problem(key, text.partition("=")[2], "exists already", fix))
        elif override.is_sweep_override():
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


def _composed(config_name: str, overrides: list[str], problems: list[Problem]) -> dict:
    """Returns the composed values. Raises ConfigError with `problems` and an error of Hydra. An
    unknown choice of a group is skipped, so that the other overrides are checked too."""
    try:
        # Hydra sets these in jobs only, but name=${hydra:job.num} needs them here.
        jobs = ["hydra.job.num=0", "hydra.job.id=${hydra.job.num}"]
        config = hydra.compose(config_name, [*jobs, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        settings = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        return OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        key, _, value = (error.missing_cfg_file or "").rpartition("/")
        if not error.options:
            raise ConfigError([*problems, problem_of(error, overrides)]) from error
        fix = f"use one of {', '.join(error.options)}"
        if key == "data" and os.path.exists(value):
            fix = not_a_setting(value, "data.path").hint
        rest = [text for text in overrides if text.lstrip("+") != f"{key}={value}"]
        problems.append(Problem(key, value, f"no such {key}", fix))
        if rest == overrides:  # the choice is in a file
            raise ConfigError(problems) from error
        return _composed(config_name, rest, problems)
    except Exception as error:  # of Hydra, OmegaConf or YAML
        raise ConfigError([*problems, problem_of(error, overrides)]) from error


def problem_of(error: Exception, overrides: Sequence[str]) -> Problem:
    """Turns an error of Hydra, OmegaConf or YAML into a problem."""
    if error.__cause__ and (not str(error) or str(error).startswith("Error merging override")):
        error = error.__cause__
    if mark := getattr(error, "problem_mark", None):  # invalid YAML
        where = place(mark.name, mark.line + 1)
        return Problem("", NO_VALUE, error.problem, "correct the file", where)
    said = str(error).strip() or type(error).__name__
    first, _, more = said.partition("\n")
    reason = f"{first} {more.partition(chr(10))[0]}" if first.endswith(":") else first.rstrip(".")
    if key := getattr(error, "full_key", None):
        return Problem(key, NO_VALUE, reason, "see --help")
    quoted = re.findall(r"'([^'\n]+)'", said)
    for key, equals, value in [text.partition("=") for text in overrides]:
        if key.lstrip("+~") in quoted:
            add = re.search(r"use (\+.*)", said)
            hint = f"to add it, write {add[1]}" if add else "see --help"
            return Problem(key.lstrip("+~"), value if equals else NO_VALUE, reason, hint)
    return Problem("command line", NO_VALUE, reason, "see --help")
