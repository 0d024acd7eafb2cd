"""compose(["model=gpt2-nano", ...]): Hydra composes configs/ and the overrides, pydantic checks."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import hydra
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from clearhead.config.schema import GROUPS, Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.validation import unknown_key
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, ClearheadError, ConfigError, Problem

VERSION = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # 1.4: only its own
# Hydra raises these for settings; the last three for files, folders and combinations of options.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
ERRORS += (RecursionError,)


def compose(overrides: Sequence[str] = ()) -> Config:
    """Returns the checked config for overrides, written as on the command line of train.py.

    Raises ConfigError with all problems.
    """
    with one_line_each(overrides), hydra.initialize_config_dir(str(CONFIGS), **VERSION):
        return checked(hydra.compose("config", list(overrides)), overrides)


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
        known = known_settings()
        given = [text.partition("=") for text in overrides]
        unknown = [
            unknown_key(key, value, known)
            for key, _, value in given
            if key == cause.full_key or (key.partition(".")[0] in GROUPS and key not in known)
        ]
        if unknown:
            return unknown
    said = f"{error}\n\n".partition("\n\n")[0]  # the rest is a list of folders or choices
    if isinstance(cause, OmegaConfBaseException):
        said += f": {cause}"
    key, said = getattr(error, "override", "hydra"), " ".join(said.split())
    return [Problem(key, NO_VALUE, said or type(error).__name__, "see --help")]


def override(key: str, text: object) -> str:
    """Returns KEY=TEXT for Hydra, with quotes if the text is not a plain path with a slash."""
    if re.fullmatch(r"[\w.+-]*/[\w./+ -]*", str(text), re.ASCII):
        return f"{key}={text}"
    return f"{key}={QuotedString(str(text), Quote.double).with_quotes()}"
