"""Error types for users, and their format: one line per problem.

    KEY=VALUE: REASON; HINT
    optimizer.lr=-1.0: must be greater than 0; see --help

Every error that a user can cause is a `ClearheadError` with the attributes key, value, reason, hint
and exit_code. `config/command_line.py` prints it and exits with its exit code. Code must
not depend on the text of a message. `never_fail` keeps a closed terminal from ending a training.

Exit codes: 0 finished, 2 configuration, 3 data or checkpoint, 4 failed while running, 130 stopped
by SIGINT, 143 stopped by SIGTERM, SIGUSR1 or SIGHUP.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, NamedTuple

NO_VALUE = ...  # Problem.value if there is none; `...` is the same object in every process
DEBUG_HINT = "rerun with debug=true to see the traceback"  # for errors that are not ClearheadError
# For weights, gradients or losses that are NaN or inf.
DIVERGENCE_HINT = "use a smaller optimizer.lr, more trainer.warmup_steps or trainer.precision=fp32"
# For such gradients of a finite loss on a GPU. torch prefers cuDNN's attention on H100 and newer
# GPUs, and its gradients are NaN for some inputs (PyTorch issue 196678).
CUDNN_HINT = "set TORCH_CUDNN_SDPA_DEPRIORITIZED=1, which avoids the attention of cuDNN"
MAX_VALUE_CHARS = 300  # characters printed of a key or a value
MAX_MESSAGE_CHARS = 1000  # characters printed of another library's message
# Keys of settings whose value must not be printed or logged.
SECRET = re.compile(
    r"api_?key|secret|passw|credential|(auth|access|bearer|hub|hf|github|wandb)_?token",
    re.IGNORECASE,
)
# Control characters (they could change the title, clipboard, colours or cursor of a terminal),
# characters that change the text direction, and lone surrogates.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# --------------------------------------------------------------------------------- formatting


class Problem(NamedTuple):
    """One problem with a setting, a file or the run."""

    key: str  # of the setting; may be ""
    value: object  # of the setting; may be NO_VALUE
    reason: str
    hint: str  # what the user can do; may be ""


def format_problem(problem: Problem) -> str:
    """Formats a problem as one line, without control characters or secrets."""
    key, value, reason, hint = problem
    subject = shorten(key) if value is NO_VALUE else f"{shorten(key)}={shorten(as_yaml(value))}"
    if SECRET.search(key.partition("=")[0]):
        subject = f"{key.partition('=')[0]}=(not shown)"
        hint = "keys and passwords are not settings; use environment variables"
    message = ": ".join(part for part in (subject, reason) if part)
    return sanitize(f"{message}; {hint}" if hint else message, keep="")


def format_error(error: BaseException, hint: str = "") -> str:
    """Formats an error, one line per problem. hint: for errors other than ClearheadError."""
    return "\n".join(map(format_problem, problems_of(error, hint)))


def problems_of(error: BaseException, hint: str = "") -> list[Problem]:
    """Returns the problems of a ClearheadError; of any other error, its type and message."""
    if isinstance(error, ClearheadError):
        return error.problems
    reason = f"{type(error).__name__}: {message_of(error) or 'no message'}"
    return [Problem("", NO_VALUE, reason, hint)]


def message_of(error: BaseException) -> str:
    """Returns the message of another library's error, truncated and without line breaks."""
    return shorten(" ".join(str(error).split()), MAX_MESSAGE_CHARS)


def as_yaml(value: object) -> str:
    """Formats a value as in a YAML file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def shorten(text: str, most: int = MAX_VALUE_CHARS) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def sanitize(text: str, keep: str = "\n\t") -> str:
    """Escapes unsafe characters (UNSAFE), for example as \\x1b, except those in `keep`."""
    escaped = lambda found: found[0].encode("unicode_escape").decode()  # noqa: E731
    return UNSAFE.sub(lambda found: found[0] if found[0] in keep else escaped(found), text)


# ------------------------------------------------------------------------------------- errors


class ClearheadError(Exception):
    """Base class of all errors with a message for the user."""

    exit_code = 4
    print_on_this_rank = False  # True: printed even if this rank is not rank 0

    def __init__(self, key: str, value: object, reason: str, hint: str):
        super().__init__(key, value, reason, hint)
        self.key, self.value, self.reason, self.hint = key, value, reason, hint

    @property
    def problems(self) -> list[Problem]:
        return [Problem(self.key, self.value, self.reason, self.hint)]

    @property
    def without_hint(self) -> str:
        """Returns the message without its hint, in one line."""
        return format_problem(self.problems[0]._replace(hint=""))

    def __str__(self) -> str:
        return "\n".join(map(format_problem, self.problems))


class ConfigError(ClearheadError, ValueError):
    """Invalid settings. Holds all problems; its attributes are those of the first problem."""

    exit_code = 2
    problems: list[Problem] = []  # noqa: RUF012 set in __init__

    def __init__(self, problems: list[Problem]):
        self.problems = [p if isinstance(p, Problem) else Problem(*p) for p in problems]
        super().__init__(*self.problems[0][:4])
        self.args = (self.problems,)  # for a copy in another process: the arguments of __init__

    @property
    def print_on_this_rank(self) -> bool:
        """True for local rank 0: the command or devices of its machine may differ from rank 0's."""
        return os.environ.get("LOCAL_RANK", "0") == "0"


class DataError(ClearheadError, ValueError):
    """Invalid or missing text files or token files."""

    exit_code = 3


class CheckpointError(ClearheadError, ValueError):
    """An invalid or missing checkpoint or model."""

    exit_code = 3


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or damaged. An older checkpoint may be intact."""

    def __init__(self, file: object, reason: str):
        super().__init__("checkpoint", file, reason, "use another checkpoint")
        self.args = (file, reason)


class RunError(ClearheadError, RuntimeError):
    """A run cannot start or continue, or it failed."""


class RunDirectoryError(RunError):
    """A run directory belongs to another run, is locked, or is not writable."""

    exit_code = 2


class RunFileError(RunDirectoryError):
    """A file in a run directory is not valid."""

    exit_code = 3


class DivergedError(RunError):
    """The loss, a gradient or a weight is NaN or inf. Raised on all ranks."""


class NotSavedError(RunError):
    """The last checkpoint of a run could not be written."""


class OutOfMemoryError(RunError):
    """A step needs more memory than the device of this rank has."""

    print_on_this_rank = True


class PreparationError(RunError):
    """The preparation of token files failed. Finished shards are kept."""


class RankLostError(ClearheadError, RuntimeError):
    """A rank died or timed out."""

    @property
    def print_on_this_rank(self) -> bool:
        """True for local rank 1 of each machine, as rank 0 may be the rank that died, and for a
        rank that is alone on its machine, as far as the launcher tells."""
        is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
        return is_alone or os.environ.get("LOCAL_RANK") == "1"


class OtherRankError(ClearheadError, RuntimeError):
    """An error of one rank, raised on all other ranks with the same problems and exit code."""

    def __init__(self, problems: list[Problem], exit_code: int):
        super().__init__(*problems[0][:4])
        self._problems, self.exit_code = [Problem(*p) for p in problems], exit_code
        self.args = (self._problems, exit_code)

    @property
    def problems(self) -> list[Problem]:
        return self._problems


def refuse(problems: list[Problem]) -> None:
    """Raises ConfigError if the list is not empty."""
    if problems:
        raise ConfigError(problems)


def exit_code_of(error: BaseException | None) -> int:
    """Returns the exit code of a process that ends with this error; 0 for None."""
    if isinstance(error, SystemExit):
        return error.code or 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 0 if error is None else getattr(error, "exit_code", 4)


@contextlib.contextmanager
def best_effort(what: str, debug: bool = False, prefix: str = "") -> Iterator[list[Exception]]:
    """Prints an error of the enclosed code to stderr instead of raising it. Yields a list, to which
    it appends the error.

    For logging and plots, which must not end a run. what: the message, such as "run.html: could
    not be written". debug: raise the error. prefix: for example "rank 1: ".
    """
    errors: list[Exception] = []
    try:
        yield errors
    except Exception as error:
        if debug:
            raise
        errors.append(error)
        print(f"{prefix}{what} ({format_error(error)})", file=sys.stderr)


class NeverFailing:
    """A text stream that discards what it cannot write: the terminal was closed, the reader of a
    pipe has ended, or the disk of a redirected output is full."""

    def __init__(self, stream: IO[str] | None):
        """stream: None if the shell has closed it."""
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def never_fail() -> None:
    """Keeps errors of stdout and stderr from ending the training, for the rest of the process."""
    sys.stdout, sys.stderr = NeverFailing(sys.stdout), NeverFailing(sys.stderr)
