"""compose(["model=gpt2-nano", ...]) for notebooks; messages for the errors of Hydra."""

import argparse
import contextlib
import difflib
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import hydra
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.reader import ReaderError

from clearhead.config.command_line import not_a_setting
from clearhead.config.schema import GROUPS, Config, known_settings
from clearhead.config.stored import config_from
from clearhead.config.validation import unknown_key
from clearhead.config.yaml_files import CONFIGS
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
HINTS = {  # better ones than in the message of Hydra: pattern of the message, hint
    r"(?s).*defaults : bool": 'write the choice in quotes, as in - override /wandb: "off"',
    r"Interpolation key 'hydra\.(.*)' not found": r"write ${hydra:\1}",
}
# Characters of web pages and editors, and those of a keyboard.
COPIED = str.maketrans("“”‘’–—−\xa0", "\"\"''--- ", "\r")


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
        return [invalid_override(error.override)]
    if isinstance(error, tuple(UNREADABLE)) and (found := unreadable_files(arguments)):
        return found
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return [unknown_choice(group, name, error.options, arguments)]
    if error.__cause__ and (not str(error) or str(error).startswith("Error merging override")):
        error = error.__cause__
    if mark := getattr(error, "problem_mark", None):  # invalid YAML
        where = f"{os.path.relpath(mark.name)}:{mark.line + 1}"
        return [Problem(where, NO_VALUE, error.problem, "correct the file")]
    given = [text.partition("=") for text in arguments if not text.startswith("-")]
    said = str(error).strip() or type(error).__name__
    if unknown := re.match(r"Could not override '([^']+)'", said):
        known = known_settings()
        wrong = [
            unknown_key(key, value, known)
            for key, _, value in given
            if key == unknown[1] or (key.partition(".")[0] in GROUPS and key not in known)
        ]
        return wrong or [unknown_key(unknown[1], NO_VALUE, known)]
    if several := re.match(r"Ambiguous value for argument '((.*?)=(.*))'\n", said):
        reason = "several values are a sweep, which needs -m"
        return [Problem(several[2], several[3], reason, quoting(several[1]))]
    if said.startswith("Config group override must be"):  # such as wandb=null
        for key, _, value in given:
            if key in GROUPS and value.lower() in ("null", "true", "false"):
                names = sorted(path.stem for path in (CONFIGS / key).iterdir())
                return [unknown_choice(key, value, names, arguments)]
    return [problem_as_said(error, said, given)]


def invalid_override(text: str) -> Problem:
    """Returns the problem of an argument that is not in Hydra's grammar."""
    plain = text.translate(COPIED)
    key, equals, value = plain.partition("=")
    hint = quoting(text)
    if plain != text:
        hint = f"type {plain.strip()}; {hint}"
        return Problem(text, NO_VALUE, "contains characters of a page or editor", hint)
    if not equals:
        return not_a_setting(text, "data.path")
    if value[:1] + value[-1:] == "()":
        hint = f"a list is {shlex.quote(f'{key}=[{value[1:-1]}]')}; {hint}"
    return Problem(text, NO_VALUE, "not a valid Hydra override", hint)


def unknown_choice(
    group: str, name: str, options: Sequence[str], arguments: Sequence[str]
) -> Problem:
    """Returns the problem of a group of settings that has no file of this name."""
    hint = f"use one of {', '.join(options)}"
    if near := nearest_choice(name, options):
        hint = f"did you mean {group}={near}? {hint}"
    if group == "data" and os.path.exists(name):
        hint = not_a_setting(name, "data.path").hint
    if any(Path(each, group, f"{name}.yml").is_file() for each in folders_of(arguments)):
        hint = f"rename {name}.yml to {name}.yaml"
    return Problem(group, name, f"no such {group}", hint)


def nearest_choice(name: str, options: Sequence[str]) -> str | None:
    """Returns the choice that was probably meant, such as off for disabled, and gpt2-nano for nano;
    None if that is not clear."""
    name = name.lower().replace("_", "-")
    name = "off" if name in ("disabled", "none", "null", "false", "no") else name
    if name in options:
        return name
    near = [option for option in options if option.startswith(name) or name in option.split("-")]
    near = near or difflib.get_close_matches(name, options, n=1)
    return near[0] if len(near) == 1 else None


def problem_as_said(error: Exception, said: str, given: Sequence[tuple]) -> Problem:
    """Returns a problem with Hydra's own message: its first sentence is the reason."""
    first, *more = [line.strip() for line in said.splitlines()]
    if first.endswith(":") and more:
        first = f"{first} {more.pop(0)}"
    hint = "; ".join(line for line in more if not line.startswith(("full_key", "object_type")))
    for pattern, better in HINTS.items():
        if found := re.match(pattern, said):
            hint = found.expand(better)
    named = getattr(error, "full_key", None) or "command line", NO_VALUE
    for key, equals, value in given:  # which one the message quotes
        key = key.lstrip("+~")
        quoted = key and re.search(rf"'[+~]*{re.escape(key)}[=']", said)
        if quoted and named[0] == "command line":
            named = key, value if equals else NO_VALUE
    return Problem(*named, first.rstrip("."), hint or "see --help")


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


def override(key: str, text: object) -> str:
    """Returns KEY=TEXT for Hydra, with quotes if the text is not a plain path with a slash."""
    if re.fullmatch(r"[\w.+-]*/[\w./+ -]*", str(text), re.ASCII):
        return f"{key}={text}"
    return f"{key}={QuotedString(str(text), Quote.double).with_quotes()}"


def quoting(text: str) -> str:
    """Returns a hint: how to quote a value with a comma, a bracket, a quote or an accent."""
    key, _, value = text.partition("=")
    if value.startswith("[") and value.endswith("]"):
        items = [override("", item.strip(" \"'"))[1:] for item in value[1:-1].split(",")]
        return "write " + shlex.quote(shorten(f"{key}=[{','.join(items)}]"))
    return "if the value is text, write " + shlex.quote(override(key, shorten(value)))
