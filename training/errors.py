"""What ends a run while it runs: each error has its exit code, and is told in one line.

Errors of settings, data and checkpoints stand beside what raises them: ConfigError (2) in
training/config.py, DataError (3) in tokens/, CheckpointError (3) in training/checkpoint.py.
"""

import os

LONGEST = 1000  # characters of what a library says


def one_line(error: BaseException) -> str:
    """What an error says, as one line; of ours, the lines that it is worded in."""
    if hasattr(error, "exit_code"):
        return str(error)
    return f"{type(error).__name__}: {words(error) or 'no further word'}"


def exit_code_of(error: BaseException | None) -> int:
    """What a process ends with after this error; 0 after none."""
    if isinstance(error, SystemExit):
        return error.code or 0
    return 0 if error is None else getattr(error, "exit_code", 4)


def words(error: BaseException) -> str:
    """What an error says, without line breaks; the beginning, where it quotes something endless."""
    said = " ".join(str(error).split())
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


class RunDirectoryError(RuntimeError):
    """A run's directory that cannot be had: another run's, in use, or not writable."""

    exit_code = 2


class RunFileError(RunDirectoryError):
    """A file of a run's directory that is not what a run writes."""

    exit_code = 3


# What to do about numbers that grew beyond all bounds.
LESS = "use a smaller optimizer.lr, more trainer.warmup_steps or trainer.precision=fp32"


class Diverged(RuntimeError):
    """The loss or its gradient is no longer a number. On all ranks."""

    exit_code = 4


class NotSaved(RuntimeError):
    """The last checkpoint of a run could not be written."""

    exit_code = 4


class LostPeer(RuntimeError):
    """Another rank is gone, or stands still."""

    exit_code = 4

    @property
    def of_one_rank(self) -> bool:
        """Whether to tell it here too: the main rank may be the one that is gone."""
        return os.environ.get("LOCAL_RANK") == "1"


class PeerError(RuntimeError):
    """What some rank has found wrong, raised on all of them."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class OutOfMemory(RuntimeError):
    """A step needs more memory than the device of this rank has."""

    exit_code = 4
    of_one_rank = True
