"""compose(["model=gpt2-nano", ...]) for notebooks; messages for the errors of Hydra."""

import argparse
import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import NoneType

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.reader import ReaderError

from clearhead.config.command_line import not_a_setting
from clearhead.config.other_names import unknown_key
from clearhead.config.schema import GROUPS, Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.validation import flat_fields, is_text, keep_text, validate
from clearhead.config.yaml_files import CONFIGS, default_values, flat, nested
from clearhead.errors import NO_VALUE, ClearheadError, ConfigError, Problem, shorten

VERSION = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}  # 1.4: only its own
# Hydra raises these for settings; the last two for folders and for combinations of options.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, FileNotFoundError, ValueError)
ERRORS += (RecursionError,)
UNREADABLE = {  # errors of YAML files that do not name their file
    UnicodeDecodeError: ("not in UTF-8", "save it as text in UTF-8"),
    ReaderError: ("contains a character that YAML does not have", "save it as text in UTF-8"),
    RecursionError: ("nested too deeply, or contains itself", "correct the file"),
}
# Characters of web pages and editors, and those of a keyboard.
COPIED = str.maketrans("“”‘’–—−\xa0", "\"\"''--- ", "\r")
# In the value of an override: a quoted text, or text without quotes, brackets and commas.
WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.?|[^\\"'(){}\[\],])+""")

PARSER, FIELDS = OverridesParser.create(), flat_fields(Config)


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
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    for key, value in given.items():
        group, _, name = key.rpartition(".")
        holder = values.get(group) if group else values
        if key in FIELDS and isinstance(holder, dict) and "$" not in value:
            holder[name] = typed_value(key, value)
    return values


def typed_value(key: str, value: str) -> object:
    """Returns the value of the override KEY=VALUE; of a text setting, what was typed."""
    texts = (value, in_quotes(value, (int, float, bool, NoneType)))
    plain, quoted = (PARSER.parse_override(f"{key}={text}").value() for text in texts)
    return keep_text(FIELDS[key].annotation, plain, quoted, value)


def in_quotes(value: str, kinds: Collection[type]) -> str:
    """Returns the value of an override with quotes around words that Hydra reads as these types."""

    def quote(found: re.Match) -> str:
        word = found[0].strip()
        is_kind = word[:1] not in "'\"" and type(PARSER.parse_rule(word, "primitive")) in kinds
        return f'"{word}"' if is_kind else found[0]

    return WORD.sub(quote, value)


def takes_text(key: str) -> bool:
    return key in FIELDS and is_text(FIELDS[key].annotation)


def with_quoted_numbers(override: str) -> str:
    """Returns an override with quotes around the numbers of a text setting."""
    key, equals, value = override.partition("=")
    is_call = re.match(r"\w+\(", value)  # range(1,3)
    if is_call or not takes_text(key.lstrip("+")):
        return override
    return f"{key}{equals}{in_quotes(value, (int, float))}"


def problems_of_values(key: str, values: Sequence[str]) -> list[Problem]:
    """Returns the problem of the first value, as in an override, that this setting cannot have."""
    for value in values:
        if key in FIELDS and "$" not in value:
            tree = nested(flat(default_values()) | {key: typed_value(key, value)})
            found = [each for each in validate(Config, tree, rules=False)[1] if each.key == key]
            if found:
                return found
    return []


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
        text, plain = error.override, error.override.translate(COPIED)
        key, equals, value = plain.partition("=")
        hint = quoting(text)
        if plain != text:
            hint = f"type {plain.strip()}" + f"; {hint}" * takes_text(key)
            return [Problem(text, NO_VALUE, "contains characters of a page or editor", hint)]
        if value[:1] + value[-1:] == "()":
            hint = f"a list is {shlex.quote(f'{key}=[{value[1:-1]}]')}; {hint}"
        invalid = Problem(text, NO_VALUE, "not a valid Hydra override", hint)
        return [invalid if equals else not_a_setting(text, "data.path")]
    if isinstance(error, tuple(UNREADABLE)) and (found := unreadable_files(arguments)):
        return found
    if isinstance(error, MissingConfigException) and error.options:
        group, _, value = error.missing_cfg_file.rpartition("/")
        hint = f"use one of {', '.join(error.options)}"
        if group == "data" and os.path.exists(value):
            hint = not_a_setting(value, "data.path").hint
        if any(Path(each, group, f"{value}.yml").is_file() for each in folders_of(arguments)):
            hint = f"rename {value}.yml to {value}.yaml"
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
    if "defaults : bool" in said:
        hint = 'write the choice in quotes, as in - override /wandb: "off"'
    if found := re.match(r"Interpolation key 'hydra\.(.*)' not found", said):
        hint = f"write ${{hydra:{found[1]}}}"
    if said.startswith("Config group override must be"):  # null or false
        for key, value in (text.split("=", 1) for text in arguments if "=" in text):
            if key in GROUPS and value.lower() in ("null", "true", "false"):
                names = sorted(path.stem for path in (CONFIGS / key).iterdir())
                return [Problem(key, value, f"no such {key}", f"use one of {', '.join(names)}")]
    if key := getattr(error, "full_key", None):
        return [Problem(key, NO_VALUE, reason, hint)]
    for text in arguments:  # which one the message quotes
        key, equals, value = text.partition("=")
        key = key.lstrip("+~")
        if key and re.search(rf"'[+~]*{re.escape(key)}[=']", said):
            return [Problem(key, value if equals else NO_VALUE, reason, hint)]
    return [Problem("command line", NO_VALUE, reason, hint)]


def unreadable_files(arguments: Sequence[str]) -> list[Problem]:
    """Returns a problem for each YAML file in the user's folders with an error of UNREADABLE."""
    problems, patterns = [], ("*.yaml", "*/*.yaml")
    found = [folder.glob(pattern) for folder in folders_of(arguments) for pattern in patterns]
    for path in itertools.chain(*found):
        try:
            OmegaConf.load(path) if path.is_file() else None
        except tuple(UNREADABLE) as error:
            problems.append(Problem(os.path.relpath(path), NO_VALUE, *UNREADABLE[type(error)]))
        except (*ERRORS, OSError):
            continue  # has another message
    return problems


def folders_of(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders of settings that the command line adds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    given = parser.parse_known_args(list(arguments))[0].config_dir
    return [*map(Path, given + re.findall(r"file://([^,'\"\]]+)", " ".join(arguments)))]


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
