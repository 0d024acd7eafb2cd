"""The run directory: its name, its lock and its settings files.

runs/NAME/.lock            locked while a process writes here; has the process id and host name
          run.json         all settings, read by programs
          config.yaml      all settings, for users; programs do not parse it
          tokenizer.json   the tokenizer, unless data.tokenizer is gpt2 or byte
          validation.json  the validation after the last step
          summary.json     the result; written last, when everything else of a run is done
"""

import contextlib
import errno
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from clearhead.config.stored import SETTINGS_JSON
from clearhead.errors import RunDirectoryError, RunFileError
from clearhead.files import (
    as_json,
    atomic_write,
    fsync,
    make_folder,
    read_object,
    remove_temporary_files,
)
from clearhead.tokens.token_stream import Checksums, checksum_of_all
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.tokenizer_json import TOKENIZER, stored

LOCK, CONFIG_YAML = ".lock", "config.yaml"
SUMMARY_JSON, VALIDATION_JSON = "summary.json", "validation.json"
OPTIMIZER = "optimizer.safetensors"  # in a checkpoint; the other files: checkpoint/format.py
# These files are opened for writing; all others are written to a temporary name and renamed.
OPENED_IN_PLACE = (LOCK, "metrics.jsonl", "samples.jsonl", "starts.jsonl")
# Errors of flock on a file system without locks.
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
WAIT_FOR_PREDECESSOR = 30  # seconds; torchrun restarts processes before the old ones have ended


def create(runs: Path, name: str | None, model_name: str) -> Path:
    """Creates runs/<name> if it does not exist. Without a name, creates runs/DATE_TIME_MODEL."""
    if name is not None:
        make_folder(runs / name)
        return runs / name
    make_folder(runs)
    wanted = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{model_name}"
    for number in itertools.count(1):  # several runs may start within a second
        folder = runs / (wanted if number == 1 else f"{wanted}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            fsync(runs)
            return folder


@contextlib.contextmanager
def writable(runs: Path) -> Iterator[None]:
    """Raises RunDirectoryError for an OSError inside the context."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or runs} cannot be written ({error.strerror})"
        hint = "use a writable directory or another name"
        raise RunDirectoryError("runs_dir", runs, reason, hint) from error


def lock_directory(folder: Path) -> contextlib.AbstractContextManager:
    """Locks a run directory and removes temporary files of killed processes from it. Returns a
    context; the lock is released when the context or the process ends.

    Only warns if the file system has no locks. Raises RunDirectoryError if another process has the
    lock or the directory is not writable, and RunFileError if a file is a link, a FIFO or a device.
    """
    for name in OPENED_IN_PLACE:
        file = folder / name
        if file.is_symlink() or (file.exists() and not file.is_file()):
            reason = f"{file} is not a regular file"
            raise RunFileError("name", folder.name, reason, "remove it, or use another name")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    path, timeout = folder / LOCK, WAIT_FOR_PREDECESSOR if restarted else 0
    with writable(folder.parent):
        try:
            lock = FileLock(path).acquire(timeout=timeout)
        except Timeout:
            holder = ""
            with contextlib.suppress(PermissionError):  # Windows: a locked file cannot be read
                holder = path.read_text(encoding="utf-8", errors="replace").strip()
            reason = f"{folder} is in use by another process ({holder or 'unknown'})"
            hint = "wait until it ends, or use another name"
            if holder == _this_process():
                reason = f"{folder} is in use by a run that was built in this process"
                hint = "close that run with run.close(), or use another name"
            raise RunDirectoryError("name", folder.name, reason, hint) from None
        except OSError as error:
            if error.errno not in LOCKS_UNSUPPORTED:
                raise
            reason = f"this file system does not support locks ({error.strerror})"
            print(f"{folder}: {reason}; do not start two runs here", file=sys.stderr)
            lock = contextlib.nullcontext()
        else:
            with contextlib.suppress(PermissionError):  # Windows: nor written
                path.write_text(f"{_this_process()}\n", encoding="utf-8")
        for part in (folder, folder / "attention"):
            remove_temporary_files(part)
    return lock


def is_locked(folder: Path) -> bool:
    """Returns whether a process has locked a run directory, because it trains there. False if that
    is not known: the directory is not writable, or its file system has no locks."""
    if not (folder / LOCK).is_file():
        return False
    try:
        with FileLock(folder / LOCK).acquire(timeout=0):
            return False
    except OSError as error:
        return isinstance(error, Timeout)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def write_settings(run: Path, settings: dict, checksums: Checksums, tokenizer: Tokenizer) -> None:
    """Writes all settings of a run to run.json and config.yaml, and its tokenizer to
    tokenizer.json, unless data.tokenizer is gpt2 or byte. run.json also has a checksum of the
    tokens, because the text at a path may change, and the name of the tokenizer."""
    import yaml

    if content := stored(tokenizer, settings["data"]["tokenizer"]):
        atomic_write(run / TOKENIZER, content)
    content = {"settings": settings, "data": checksum_of_all(checksums)}
    content["tokenizer"] = tokenizer.name
    atomic_write(run / SETTINGS_JSON, as_json(content))
    # Not with OmegaConf, which interprets "${" in a prompt as an interpolation.
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    atomic_write(run / CONFIG_YAML, text.encode())


def summarized_step(run: Path) -> int | None:
    """Returns the last step of a finished run; None if summary.json is missing or invalid."""
    return read_object(run / SUMMARY_JSON).get("steps")


def final_validation(folder: Path, step: int) -> dict:
    """Returns validation.json (run/evaluation.py); {} if there is none of this step: the run has
    not ended, or was resumed."""
    found = read_object(folder / VALIDATION_JSON)
    return found if found.get("step") == step else {}


def optimizer_states(run: Path) -> list[Path]:
    """Returns the files with optimizer states in a run, sorted by step. None is behind a link
    if the path of the run contains none."""
    states = sorted(run.glob(f"checkpoints/step_*/{OPTIMIZER}"))
    return [file for file in states if "." not in file.parent.name and file.resolve() == file]
