"""Command line of scripts (KEY=VALUE, --help) and the format of errors: one line per problem.

    @settings_command(MyConfig)  # a subclass of ScriptConfig
    def main(config: MyConfig) -> None: ...

The command line of train.py: config/application.py.
"""

import contextlib
import inspect
import json
import os
import re
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from clearhead.config.schema import Name, rejected
from clearhead.config.validation import flat_fields, groups_of, unknown_key, validate
from clearhead.config.yaml_files import nested, table
from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    ClearheadError,
    Problem,
    as_yaml,
    exit_code_of,
    format_error,
    message_of,
    refuse,
)
from clearhead.files import atomic_write, fsync, make_folder, rename, temporary_name

WAIT_FOR_RANK_0 = 10  # seconds


class ScriptGroup(BaseModel):
    """A group of settings of a script. Values are text, which pydantic converts."""

    model_config = ConfigDict(extra="forbid")
    lists_in_quotes: ClassVar[tuple[str, ...]] = ()  # settings: [a b] is a text, ["a b"] a list

    @field_validator("*", mode="wrap")
    @classmethod
    def _from_text(
        cls, value: object, validated: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        """Reads null and [a,b] if the setting accepts the result, else as text."""
        opening = r"\[\s*[\"']" if info.field_name in cls.lists_in_quotes else r"\["
        if value == "null" or (
            isinstance(value, str) and re.fullmatch(rf"(?s){opening}.*\]", value)
        ):
            try:  # BaseLoader keeps each element as it was typed
                return validated(None if value == "null" else yaml.load(value, yaml.BaseLoader))
            except (ValueError, RecursionError, yaml.YAMLError):
                with contextlib.suppress(ValueError):
                    return validated(value)
                raise
        return validated(value)


class ScriptConfig(ScriptGroup):
    """Base class of the settings of a script. The docstring of a subclass is its usage line."""

    debug: bool = Field(False, description="true: print errors with their traceback")


def _writable_file(path: str) -> str:
    """Raises `rejected` for a folder, a device, or a path in a folder that does not exist."""
    special = os.path.exists(path) and not os.path.isfile(path)
    if path and (special or not os.path.isdir(os.path.dirname(os.path.abspath(path)))):
        raise rejected("not a file in an existing folder", "give the path of a file")
    return path


def _new_folder(path: str) -> str:
    """Raises `rejected` for anything but an empty folder or a path that does not exist."""
    folder = Path(path)
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.is_symlink() or (folder.exists() and not is_empty):
        raise rejected("already exists", "use a folder that does not exist")
    return path


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[Path]:
    """Yields a folder for the files of `out`, which exists afterwards, completely or not at all.
    Raises ConfigError for an OSError inside the context."""
    path = Path(os.path.abspath(out))
    part = temporary_name(path)
    try:
        make_folder(part)
        yield part
        for file in (*part.iterdir(), part):
            fsync(file)
        rename(part, path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or message_of(error)})"
        refuse([("out", out, reason, "free disk space, or use another folder")])
    finally:
        shutil.rmtree(part, ignore_errors=True)


OutFile = Annotated[str, AfterValidator(_writable_file)]  # "": no file
OutFolder = Annotated[
    Name, AfterValidator(_new_folder), Field(description="folder to write; must not exist")
]
Schema = TypeVar("Schema", bound=ScriptConfig)


def settings_command(schema: type[Schema]) -> Callable:
    """Returns a decorator: run(config) becomes a command with the settings of `schema`."""

    def decorate(run: Callable[[Schema], None]) -> Callable[[], None]:
        def main() -> None:
            with command_line() as arguments:
                if {"-h", "--help"}.isdisjoint(arguments):
                    run(parse(schema, arguments))
                else:
                    show_help(schema)

        return main

    return decorate


def parse(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Parses KEY=VALUE arguments into the schema. Raises ConfigError with all problems."""
    fields, problems = flat_fields(schema), []
    values: dict[str, object] = {}
    for text in arguments:
        key, equals, raw = text.lstrip("-").partition("=")
        if is_option := text.startswith("-"):
            problems.append(unknown_option(text, list(fields)))
        if equals and key in fields:
            values[key] = raw
        elif is_option:
            continue
        elif not equals:
            likely = next((key for key in ("checkpoint", "data.path", "runs") if key in fields), "")
            problems.append(not_a_setting(text, likely))
        else:
            problems.append(unknown_key(key, raw, list(fields)))
    empty: dict = {group: {} for group in groups_of(schema)}  # to report missing settings of groups
    config, more = validate(schema, empty | nested(values))
    refuse(problems + more)
    return config


def show_help(schema: type[BaseModel]) -> None:
    """Prints the usage line of a script and the meaning and default value of each setting."""
    print(inspect.cleandoc(schema.__doc__), end="\n\n")
    fields = sorted(flat_fields(schema).items(), key=lambda item: item[0] == "debug")
    rows = [
        (key, field.description, "required" if field.is_required() else as_yaml(field.default))
        for key, field in fields
    ]
    print(table(rows))


def not_a_setting(text: str, key: str) -> Problem:
    """Returns the problem of an argument without "=". The hint for an existing file is KEY=FILE."""
    hint = "write KEY=VALUE; if it contains blanks, quote it: 'KEY=some words'"
    if key and os.path.exists(text):
        hint = f"did you mean {shlex.quote(f'{key}={text}')}?"
    return Problem(
        text if text.strip() else repr(text), NO_VALUE, "not of the form KEY=VALUE", hint
    )


def unknown_option(text: str, known: Sequence[str]) -> Problem:
    """Returns the problem of an unknown option. The hint is the setting or the most similar one."""
    option, _, value = text.partition("=")
    key = option.lstrip("-").replace("-", "_")
    if key in known:
        hint = f"write {shlex.quote(f'{key}={value}') if value else f'{key}=VALUE'} (without --)"
    else:
        hint = f"write settings without dashes; {unknown_key(key, value, known).hint}"
    if "WANDB_SWEEP_ID" in os.environ:  # its agent writes --KEY=VALUE for ${args}
        hint += "; in the file of a W&B sweep, use ${args_no_hyphens} in place of ${args}"
    return Problem(option, NO_VALUE, "no such option", hint)


def write_out(path: str, content: bytes | Iterable[bytes] | dict, key: str = "out") -> None:
    """Writes results, or pieces of them, to a file, atomically; a dict as JSON. Raises
    ConfigError."""
    if isinstance(content, dict):
        content = (json.dumps(content, indent=1) + "\n").encode()
    try:
        atomic_write(Path(path), content)
    except OSError as error:
        reason = error.strerror or str(error)
        refuse([Problem(key, str(path), reason, "give another path")])


@contextlib.contextmanager
def command_line() -> Iterator[list[str]]:
    """Yields the arguments of a script. Errors inside are printed as one line per problem."""
    with errors_in_one_line(debug="debug=true" in sys.argv):
        try:
            yield sys.argv[1:]
            print(end="", flush=True)
        except BrokenPipeError:  # `| head` closes stdout; Python would report it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def errors_in_one_line(debug: bool = False) -> Iterator[None]:
    """Prints an error as one line per problem (debug: its traceback) and exits with its exit code.
    Ranks other than 0 print only errors that rank 0 may not have.

    Prints "?" for characters that the encoding of stdout does not have: on Windows, the encoding of
    a pipe may be cp1252."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        rank, expected = os.environ.get("RANK", "0"), isinstance(error, ClearheadError)
        if debug:
            traceback.print_exception(error)
        elif not isinstance(error, KeyboardInterrupt):
            if rank != "0" and expected:  # rank 0 has it too; torchrun ends all ranks soon
                time.sleep(WAIT_FOR_RANK_0)
            if rank == "0" or not expected or error.print_on_this_rank:
                prefix = "" if rank == "0" else f"rank {rank}: "
                print(f"{prefix}{format_error(error, DEBUG_HINT)}", file=sys.stderr)
        sys.exit(exit_code_of(error))
