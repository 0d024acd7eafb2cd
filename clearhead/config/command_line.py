"""Command line of scripts (KEY=VALUE, --help) and the format of errors: one line per problem.

    @settings_command(MyConfig)  # a subclass of ScriptConfig
    def main(config: MyConfig) -> None: ...

The command line of train.py: config/application.py.
"""

import contextlib
import inspect
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, DirectoryPath, Field

from clearhead.config.schema import Name, Settings, rejected
from clearhead.config.validation import flat_fields, groups_of, unknown_key, validate
from clearhead.config.yaml_files import nested, table
from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    UNSAFE,
    ClearheadError,
    Problem,
    RankLostError,
    as_yaml,
    exit_code_of,
    format_error,
    message_of,
    refuse,
)
from clearhead.files import (
    as_json,
    atomic_write,
    fsync,
    make_folder,
    remove_temporary_files,
    rename,
    temporary_name,
)

WAIT_FOR_RANK_0 = 10  # seconds
SYNTAX = re.compile(r"\s*[\[{\"']")  # the beginning of a list, a mapping or a quoted text
# Raised for values that are not YAML, such as [a.
UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError)


class ScriptConfig(Settings):
    """Base class of the settings of a script. The docstring of a subclass is its usage line."""

    # Settings that are taken as typed, except for a list of quoted texts: ["one","two"].
    free_text: ClassVar[tuple[str, ...]] = ()

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
        remove_temporary_files(path.parent, path.name)  # of a killed command
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


InFolder = Annotated[DirectoryPath, Field(strict=False)]  # strict=False: from a text
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
                if not {"-h", "--help"}.isdisjoint(arguments):
                    return show_help(schema)
                # So that temporary files are removed and workers end.
                before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
                try:
                    run(parse(schema, arguments))
                finally:
                    signal.signal(signal.SIGTERM, before)

        return main

    return decorate


def parse(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Parses KEY=VALUE arguments, with values in YAML, into the schema. Raises ConfigError with all
    problems."""
    fields, values, problems = flat_fields(schema), {}, []
    for text in arguments:
        key, equals, raw = text.partition("=")
        if not equals:
            problems.append(not_a_setting(text or "''"))
        elif key not in fields:
            problems.append(unknown_key(key, raw, list(fields)))
        elif key in schema.free_text and not re.match(r"\[\s*[\"']", raw):
            values[key] = raw
        else:
            try:
                values[key] = yaml_value(raw)
            except UNREADABLE:
                hint = f"quote a text: '{key}=\"TEXT\"'"
                problems.append(Problem(key, raw, "not valid YAML", hint))
    empty: dict = {group: {} for group in groups_of(schema)}  # to report missing settings of groups
    config, more = validate(schema, empty | nested(values))
    unreadable = {problem.key for problem in problems}
    refuse(problems + [problem for problem in more if problem.key not in unreadable])
    return config


def not_a_setting(text: str) -> Problem:
    """Returns the problem of an argument without an equals sign."""
    hint = "quote a value with blanks: 'KEY=some words'"
    return Problem(text, NO_VALUE, "not of the form KEY=VALUE", hint)


def yaml_value(text: str) -> object:
    """Returns a value as YAML: a number, true, false, null, or what begins like a list, mapping or
    a quoted text. Any other value is the text itself. Raises one of UNREADABLE."""
    may_be_text = not SYNTAX.match(text) and not UNSAFE.search(text)
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"_={text}"]))["_"]
    except UNREADABLE:
        if may_be_text:
            return text
        raise
    plain = text.strip()
    is_number = isinstance(value, int | float) and " " not in plain  # not "7 #x.txt"
    is_value = is_number or plain in ("", "~", "null", "Null", "NULL")
    return plain if may_be_text and not is_value else value


def show_help(schema: type[BaseModel]) -> None:
    """Prints the usage line of a script and the meaning and default value of each setting."""
    print(inspect.cleandoc(schema.__doc__), end="\n\n")
    fields = sorted(flat_fields(schema).items(), key=lambda item: item[0] == "debug")
    rows = [
        (key, field.description, "required" if field.is_required() else as_yaml(field.default))
        for key, field in fields
    ]
    print(table(rows))


def write_out(path: str, content: bytes | Iterable[bytes] | dict) -> None:
    """Writes results, or pieces of them, to a file, atomically; a dict as JSON. Raises
    ConfigError."""
    if isinstance(content, dict):
        content = as_json(content)
    with refuse_unwritable(path):
        atomic_write(Path(path), content)


@contextlib.contextmanager
def refuse_unwritable(path: str) -> Iterator[None]:
    """Raises ConfigError for an OSError inside the context."""
    try:
        yield
    except OSError as error:
        refuse([("out", path, error.strerror or message_of(error), "give another path")])


@contextlib.contextmanager
def command_line() -> Iterator[list[str]]:
    """Yields the arguments of a script. Errors inside are printed as one line per problem."""
    spin_briefly()
    with errors_in_one_line(debug="debug=true" in sys.argv):
        try:
            yield sys.argv[1:]
            print(end="", flush=True)
        except BrokenPipeError:  # `| head` closes stdout; Python would report it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def spin_briefly() -> None:
    """Makes threads of torch that wait for each other sleep soon, instead of occupying a core for
    long, unless the user has chosen. Beside another program, training is then three times as fast,
    and alone not slower (docs/settings.md). Call it before torch is imported, which reads the
    variable."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # 30 times less than without a policy


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
            # Rank 0 has it too, unless it was lost; torchrun ends all ranks soon.
            if rank != "0" and expected and not isinstance(error, RankLostError):
                time.sleep(WAIT_FOR_RANK_0)
            if rank == "0" or not expected or error.print_on_this_rank:
                prefix = "" if rank == "0" else f"rank {rank}: "
                print(f"{prefix}{format_error(error, DEBUG_HINT)}", file=sys.stderr)
        sys.exit(exit_code_of(error))
