"""compose(["model=gpt2-nano", ...]) for notebooks; messages for the errors of Hydra."""

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clearhead.config.command_line import not_a_setting
from clearhead.config.other_names import unknown_key
from clearhead.config.schema import GROUPS, Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.validation import flat_fields, keep_text
from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, ClearheadError, ConfigError, Problem, shorten

VERSION = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # 1.4: only its own
# Hydra raises these for settings; the last two for folders and for combinations of options.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, FileNotFoundError, ValueError)
# In the value of an override: a quoted text, or text without quotes, brackets and commas.
WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.?|[^\\"'(){}\[\],])+""")


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
        return config_from(with_typed_text(plain, overrides), overrides)


def with_typed_text(values: dict, overrides: Sequence[str]) -> dict:
    """Returns the composed values, with text settings as they were typed on the command line:
    Hydra reads name=1_1_1 as the number 111."""
    parser, fields = OverridesParser.create(), flat_fields(Config)

    def in_quotes(found: re.Match) -> str:
        word = found[0].strip()
        is_text = word[:1] in "'\"" or isinstance(parser.parse_rule(word, "primitive"), str)
        return found[0] if is_text else f'"{word}"'

    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    for key, value in given.items():
        group, _, name = key.rpartition(".")
        holder = values.get(group) if group else values
        if key in fields and isinstance(holder, dict) and "$" not in value:
            texts = (value, WORD.sub(in_quotes, value))
            plain, quoted = (parser.parse_override(f"{key}={text}").value() for text in texts)
            holder[name] = keep_text(fields[key].annotation, plain, quoted, value)
    return values


@contextlib.contextmanager
def one_line_each(arguments: Sequence[str]) -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as ConfigError. Hydra stops at the first error."""
    try:
        yield
    except ClearheadError:
        raise
    except ERRORS as error:
        raise ConfigError(problems_of(error, arguments)) from error


def problems_of(error: Exception, arguments: Sequence[str]) -> list[Problem]:
    """Returns the problem that an error of Hydra is about, and further unknown settings."""
    if isinstance(error, OverrideParseException):
        text = error.override
        invalid = Problem(text, NO_VALUE, "not a valid Hydra override", quoting(text))
        return [invalid if "=" in text else not_a_setting(text, "data.path")]
    if isinstance(error, MissingConfigException) and error.options:
        group, _, value = error.missing_cfg_file.rpartition("/")
        hint = f"use one of {', '.join(error.options)}"
        if group == "data" and os.path.exists(value):
            hint = not_a_setting(value, "data.path").hint
        return [Problem(group, value, f"no such {group}", hint)]
    if error.__cause__ and (not str(error) or str(error).startswith("Error merging override")):
        error = error.__cause__
    if mark := getattr(error, "problem_mark", None):  # invalid YAML
        where = f"{os.path.relpath(mark.name)}:{mark.line + 1}"
        return [Problem(where, NO_VALUE, error.problem, "correct the file")]
    said = str(error).strip() or type(error).__name__
    if unknown := re.match(r"Could not override '([^']+)'", said):
        given = [text.partition("=") for text in arguments if not text.startswith("-")]
        return [
            unknown_key(key, value, known_settings())
            for key, _, value in given
            if key == unknown[1]
            or (key.partition(".")[0] in GROUPS and key not in known_settings())
        ] or [unknown_key(unknown[1], NO_VALUE, known_settings())]
    if found := re.match(r"Ambiguous value for argument '(.*)'\n", said):
        reason = "several values are a sweep, which needs -m"
        key, _, value = found[1].partition("=")
        return [Problem(key, value, reason, quoting(found[1]))]
    first, *more = [line.strip() for line in said.splitlines()]
    if first.endswith(":") and more:
        first = f"{first} {more.pop(0)}"
    reason = first.rstrip(".")
    hint = "; ".join(line for line in more if not line.startswith(("full_key", "object_type")))
    hint = hint or "see --help"
    if key := getattr(error, "full_key", None):
        return [Problem(key, NO_VALUE, reason, hint)]
    for text in arguments:  # which one the message quotes
        key, equals, value = text.partition("=")
        key = key.lstrip("+~")
        if key and re.search(rf"'[+~]*{re.escape(key)}[=']", said):
            return [Problem(key, value if equals else NO_VALUE, reason, hint)]
    return [Problem("command line", NO_VALUE, reason, hint)]


def quoting(text: str) -> str:
    """Returns a hint: how to quote a value with a comma, a bracket, a quote or an accent."""
    key, _, value = text.partition("=")
    return "if the value is text, write " + shlex.quote(override(key, shorten(value)))


def override(key: str, text: object) -> str:
    """Returns KEY=TEXT for Hydra, with quotes if the text is not a plain word or path."""
    if re.fullmatch(r"[\w./+ -]*", str(text), re.ASCII):
        return f"{key}={text}"
    escaped = str(text).replace('"', r"\"")
    return f'{key}="{escaped}"'
