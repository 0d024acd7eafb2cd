"""Command lines of scripts (key=value, --help), and errors as one line each.

    @settings_command(MyConfig)  # a ScriptConfig
    def main(config: MyConfig) -> None: ...

The command line of train.py is Hydra's: training/config/application.py.
"""

import contextlib
import inspect
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from errors import (
    DEBUG_HINT,
    NO_VALUE,
    ClearheadError,
    Problem,
    as_yaml,
    exit_code_of,
    format_error,
    refuse,
)
from files import atomic_write
from training.config.other_names import current_names, unknown_key
from training.config.schema import flat_fields, groups_of, rejected, validate
from training.config.yaml_files import CONFIGS, defaults_and_meanings, flat, nested

WAIT_FOR_RANK_0 = 10  # seconds


class ScriptGroup(BaseModel):
    """Settings of a command, given as text. Text settings are taken as typed."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="wrap")
    @classmethod
    def _from_text(cls, value: object, validated: ValidatorFunctionWrapHandler) -> object:
        """null and [a,b] are YAML where the setting takes such a value."""
        if isinstance(value, str) and (value == "null" or value[:1] + value[-1:] == "[]"):
            with contextlib.suppress(ValueError, RecursionError, yaml.YAMLError):
                return validated(yaml.safe_load(value))
        return validated(value)  # pydantic reads numbers, true and false


class ScriptConfig(ScriptGroup):
    """The settings of a command without groups of YAML files. The docstring is the usage line."""

    debug: bool = Field(False, description="true: errors with their traceback")


def _writable_file(path: str) -> str:
    """Refuses a path that is a folder, or in a folder that does not exist."""
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path)))):
        raise rejected("cannot be written there", "give the name of a file in an existing folder")
    return path


OutFile = Annotated[str, AfterValidator(_writable_file)]  # "" for none
Schema = TypeVar("Schema", bound=ScriptConfig)


def settings_command(schema: type[Schema]) -> Callable:
    """Makes run(config) a command whose settings are one pydantic model: key=value and --help."""

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
    """key=value arguments as an instance of the schema; ConfigError lists every problem."""
    fields, problems = flat_fields(schema), []
    values: dict[str, object] = {}
    for text in current_names(arguments, fields):
        key, equals, raw = text.partition("=")
        if text.startswith("-"):
            problems.append(unknown_option(text, list(fields)))
        elif not equals:
            likely = next((key for key in ("checkpoint", "data.path", "runs") if key in fields), "")
            hint = meant(text, likely)
            problems.append(Problem(text, NO_VALUE, "is not of the form key=value", hint))
        elif key not in fields:
            problems.append(unknown_key(key, raw, list(fields)))
        else:
            values[key] = raw
    empty: dict = {group: {} for group in groups_of(schema)}  # names what is missing in a group
    config, more = validate(schema, empty | nested(values))
    refuse(problems + more)
    return config


def show_help(schema: type[BaseModel]) -> None:
    """Prints what a script takes: its usage line, each setting with its meaning and default."""
    print(inspect.cleandoc(schema.__doc__), end="\n\n")
    fields = sorted(flat_fields(schema).items(), key=lambda item: item[0] == "debug")
    rows = [
        (key, field.description, "required" if field.is_required() else as_yaml(field.default))
        for key, field in fields
    ]
    _print_table(rows)


def show_settings(config: BaseModel) -> None:
    """Prints what train.py takes: groups and their choices, each setting with its meaning and the
    value that the rest of the command line gives it."""
    print(USAGE)
    print("Groups (GROUP=CHOICE)")
    for folder in sorted(path for path in CONFIGS.iterdir() if path.is_dir()):
        print(f"  {folder.name:<10} {' | '.join(sorted(p.stem for p in folder.glob('*.yaml')))}")
    print("\nSettings (KEY=VALUE), their meaning and [value]")
    meanings, values = defaults_and_meanings(), flat(config.model_dump())
    _print_table([(key, meaning, as_yaml(values[key])) for key, (_, meaning) in meanings.items()])
    print("\nAll options, -m and --cfg among them: python train.py --hydra-help")


USAGE = """\
Train GPT-2 from a text and watch its attention heads learn.

python train.py [GROUP=CHOICE ...] [KEY=VALUE ...]
  python train.py model=gpt2-nano                     a small model
  python train.py data.path=my.txt                    your own text
  python train.py trainer.max_steps=20 optimizer.lr=3e-4
  python train.py -m optimizer.lr=1e-3,3e-4           one run for each value
  python train.py --cfg job                           show the settings, train nothing
"""


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    """Rows of (key, meaning, value)."""
    width = max(len(key) for key, _, _ in rows)
    for key, meaning, value in rows:
        print(f"  {key:<{width}} {meaning} [{value}]")


def meant(text: str, key: str) -> str:
    """The hint for an argument that is no setting: an existing file may be the value of `key`."""
    if key and os.path.exists(text):
        return f"did you mean {shlex.quote(f'{key}={text}')}?"
    return "write key=value without blanks, or with quotes around it: 'key=some words'"


def unknown_option(text: str, known: Sequence[str]) -> Problem:
    """The problem of an option that does not exist: --max-steps=2 is trainer.max_steps=2."""
    option, _, value = text.partition("=")
    hint = unknown_key(option.lstrip("-").replace("-", "_"), value, known).hint
    return Problem(option, NO_VALUE, "no such option", f"settings have no dashes; {hint}")


def write_out(path: str, content: bytes | dict, key: str = "out") -> None:
    """Writes a command's results to a file, atomically; a dict as JSON. Raises ConfigError."""
    if isinstance(content, dict):
        content = (json.dumps(content, indent=1) + "\n").encode()
    try:
        atomic_write(Path(path), content)
    except OSError as error:
        reason = error.strerror or str(error)
        refuse([Problem(key, str(path), reason, "write it to another place")])


@contextlib.contextmanager
def command_line() -> Iterator[list[str]]:
    """The arguments of a script, whose errors inside are one line each."""
    with errors_in_one_line(debug="debug=true" in sys.argv):
        try:
            yield sys.argv[1:]
            print(end="", flush=True)
        except BrokenPipeError:  # as with `| head`; Python would report it again at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def errors_in_one_line(debug: bool = False) -> Iterator[None]:
    """Turns an exception into its one line on stderr and its exit code; debug: the traceback.

    Ranks other than 0 print only what that rank alone knows.
    """
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
