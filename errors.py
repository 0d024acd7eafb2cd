"""Errors that a user sees: types with fields, formatted as one line per problem.

    optimizer.lr=-1.0: must be positive; use 6e-4
    KEY=VALUE: REASON; HINT

Every error that is expected is a `ClearheadError` with the fields key, value, reason, hint and
exit_code. `training/config/command_line.py` prints it and ends the process with its exit code. No
code decides anything by the text of such a message.

Exit codes: 0 finished, 2 configuration, 3 data or checkpoint, 4 failed while running, 130 and 143
stopped by SIGINT and SIGTERM.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

NO_VALUE = ...  # the value of a problem that has none; the same object in every process
DEBUG_HINT = "run again with debug=true for the traceback"  # the hint of an error that is not ours
# The hint of an error about weights or losses that are NaN or inf.
DIVERGENCE_HINT = "use a smaller optimizer.lr, more trainer.warmup_steps or trainer.precision=fp32"
LONGEST_VALUE = 300  # characters of a key or a value that are shown
LONGEST_MESSAGE = 1000  # characters of another library's message that are shown
# Settings whose value must not be shown in a terminal or a log file.
SECRET = re.compile(
    r"api_?key|secret|passw|credential|(auth|access|bearer|hub|hf|github|wandb)_?token",
    re.IGNORECASE,
)
# Control characters (a terminal obeys them: title, clipboard, colours, cursor), characters that
# reverse the direction of the text after them, and lone surrogates.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# --------------------------------------------------------------------------------- formatting


class Problem(NamedTuple):
    """One thing that is wrong."""

    key: str  # the setting; "" when there is none
    value: object  # NO_VALUE when there is none
    reason: str
    hint: str  # "" when there is none


class UnknownSetting(Problem):
    """The problem of a key that does not exist."""


def format_problem(problem: Problem) -> str:
    """The problem as one line without control characters or secrets."""
    key, value, reason, hint = problem
    what = shorten(key) if value is NO_VALUE else f"{shorten(key)}={shorten(as_yaml(value))}"
    if SECRET.search(key.partition("=")[0]):
        what = f"{key.partition('=')[0]}=(not shown)"
        hint = "keys and passwords are no settings; programs read them from the environment"
    message = f"{what}: {reason}" if what else reason
    return sanitize(f"{message}; {hint}" if hint else message, keep="")


def format_error(error: BaseException, hint: str = "") -> str:
    """The error as the user sees it, one line per problem. hint: where it is not one of ours."""
    return "\n".join(map(format_problem, problems_of(error, hint)))


def problems_of(error: BaseException, hint: str = "") -> list[Problem]:
    """The problems of an error of ours; the type and message of any other error."""
    if isinstance(error, ClearheadError):
        return error.problems
    reason = f"{type(error).__name__}: {message_of(error) or 'no message'}"
    return [Problem("", NO_VALUE, reason, hint)]


def message_of(error: BaseException) -> str:
    """The message of another library's error, without line breaks, truncated."""
    return shorten(" ".join(str(error).split()), LONGEST_MESSAGE)


def as_yaml(value: object) -> str:
    """A value as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def shorten(text: str, most: int = LONGEST_VALUE) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def sanitize(text: str, keep: str = "\n\t") -> str:
    """The text with control characters escaped, such as \\x1b; those in `keep` stay."""
    escaped = lambda found: found[0].encode("unicode_escape").decode()  # noqa: E731
    return UNSAFE.sub(lambda found: found[0] if found[0] in keep else escaped(found), text)


# ------------------------------------------------------------------------------------- errors


class ClearheadError(Exception):
    """Something went wrong that the user can act on."""

    exit_code = 4
    # Whether a rank other than 0 prints it too: it may be the only one that knows.
    print_on_this_rank = False

    def __init__(self, key: str, value: object, reason: str, hint: str):
        super().__init__(key, value, reason, hint)
        self.key, self.value, self.reason, self.hint = key, value, reason, hint

    @property
    def problems(self) -> list[Problem]:
        return [Problem(self.key, self.value, self.reason, self.hint)]

    @property
    def without_hint(self) -> str:
        """What is wrong, in one line, where something else is said about what happens next."""
        return format_problem(self.problems[0]._replace(hint=""))

    def __str__(self) -> str:
        return "\n".join(map(format_problem, self.problems))


class ConfigError(ClearheadError, ValueError):
    """Settings that cannot be used. Holds every problem; the fields are those of the first."""

    exit_code = 2
    problems: list[Problem] = []  # noqa: RUF012 each instance has its own

    def __init__(self, problems: list[Problem]):
        self.problems = [p if isinstance(p, Problem) else Problem(*p) for p in problems]
        super().__init__(*self.problems[0])
        self.args = (self.problems,)  # what a copy in another process is made from

    @property
    def print_on_this_rank(self) -> bool:
        """Once on each machine, since the command or the device there may be another."""
        return os.environ.get("LOCAL_RANK") == "0"


class DataError(ClearheadError, ValueError):
    """Texts or token files that cannot be used."""

    exit_code = 3


class CheckpointError(ClearheadError, ValueError):
    """A checkpoint or a model that cannot be used."""

    exit_code = 3


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or is not what was written: an older one may do."""

    def __init__(self, file: object, reason: str):
        super().__init__("checkpoint", file, reason, "use another one")
        self.args = (file, reason)


class RunError(ClearheadError, RuntimeError):
    """A run cannot start, continue or end as it should."""


class RunDirectoryError(RunError):
    """The directory of a run is another run's, locked, or not writable."""

    exit_code = 2


class RunFileError(RunDirectoryError):
    """A file in the directory of a run is not one that a run writes."""

    exit_code = 3


class DivergedError(RunError):
    """The loss or its gradient is NaN or inf. Raised on all ranks."""


class NotSavedError(RunError):
    """The last checkpoint of a run could not be written."""


class OutOfMemoryError(RunError):
    """A step needs more memory than the device of this rank has."""

    print_on_this_rank = True


class PreparationError(RunError):
    """Preparing token files ended early; finished shards are kept."""


class RankLostError(ClearheadError, RuntimeError):
    """A rank died or timed out."""

    @property
    def print_on_this_rank(self) -> bool:
        """Once more on rank 0's machine, and on each other: rank 0 may be the one that died."""
        return os.environ.get("LOCAL_RANK") == "1"


class OtherRankError(ClearheadError, RuntimeError):
    """An error of one rank, raised on all the others with its problems and exit code."""

    def __init__(self, problems: list[Problem], exit_code: int):
        super().__init__(*problems[0])
        self._problems, self.exit_code = [Problem(*p) for p in problems], exit_code
        self.args = (self._problems, exit_code)

    @property
    def problems(self) -> list[Problem]:
        return self._problems


def refuse(problems: list[Problem]) -> None:
    """Raises ConfigError when there are any."""
    if problems:
        raise ConfigError(problems)


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a process that ends with this error; 0 without one."""
    if isinstance(error, SystemExit):
        return error.code or 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 0 if error is None else getattr(error, "exit_code", 4)


@contextlib.contextmanager
def best_effort(what: str, debug: bool = False, prefix: str = "") -> Iterator[None]:
    """For what only shows a run and must not end it: an error inside becomes a line on stderr.

    what: what failed, in words. debug: raises it instead. prefix: such as "rank 1: ".
    """
    try:
        yield
    except Exception as error:
        if debug:
            raise
        print(f"{prefix}{what} ({format_error(error)})", file=sys.stderr)
