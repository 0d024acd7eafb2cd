"""The run directory: its name, its lock and its settings.

runs/<name>/.lock          locked while a process writes there; says which
            run.json       the settings, for programs
            config.yaml    the settings, for people: no program reads them from there
"""

import contextlib
import errno
import json
import os
import socket
import sys
from datetime import datetime
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from errors import NO_VALUE, RunDirectoryError, RunFileError
from files import atomic_write, make_folder, read_json, sync

RUNS = Path("runs")
LOCK, RECORD, CONFIG = ".lock", "run.json", "config.yaml"
# Opened in place; all other files are replaced by rename.
REGULAR = (LOCK, "metrics.jsonl", "samples.jsonl")
# What flock fails with where the file system has no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
WAIT_FOR_PREDECESSOR = 30  # seconds; torchrun restarts processes while the others end


# ------------------------------------------------------------------------------------- having it


def create(name: str | None, model_name: str, runs: Path | None = None) -> Path:
    """Makes runs/<name>, if need be; by default a new one named after date and model."""
    runs = runs or RUNS
    if name is not None:
        folder = runs / name
        make_folder(folder)
        return folder
    return make_new(runs / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{model_name}")


def make_new(wanted: Path) -> Path:
    """Makes a folder of this name that was not there, with a number after it if need be: several
    processes may start within a second."""
    for number in range(1, 10_000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}_{number}")
        try:
            make_folder(wanted.parent)
            folder.mkdir()
            sync(wanted.parent)
        except FileExistsError:
            if not wanted.parent.is_dir():
                raise
            continue
        return folder
    raise RunDirectoryError("name", wanted.name, "thousands of runs have it", "give another name")


@contextlib.contextmanager
def writable(folder: Path):
    """Tells in one line that a run's directory cannot be written to."""
    try:
        yield
    except OSError as error:
        key, value = ("runs/", NO_VALUE) if folder == RUNS else ("name", folder.name)
        cause = f"{error.filename or folder} cannot be written ({error.strerror})"
        fix = "start where runs/ can be written, or give another name"
        raise RunDirectoryError(key, value, cause, fix) from error


def take(folder: Path) -> AcquireReturnProxy | None:
    """Locks a run directory; the lock ends with the context that is returned, or with the process.

    None where the file system has no locks. Raises RunDirectoryError when another process has it
    or it cannot be written to, RunFileError when it has a link, a FIFO or a device among its files.
    """
    for name in REGULAR:
        file = folder / name
        if file.is_symlink() or (file.exists() and not file.is_file()):
            cause = f"{file} is not a regular file"
            raise RunFileError("name", folder.name, cause, "remove it, or give another name")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    path, timeout = folder / LOCK, WAIT_FOR_PREDECESSOR if restarted else 0
    with writable(folder):
        try:
            lock = FileLock(path).acquire(timeout=timeout)
        except Timeout:
            holder = path.read_text(encoding="utf-8", errors="replace").strip()
            cause = f"{folder} is being written by another process ({holder or 'unknown'})"
            fix = "wait for it, or give another name"
            raise RunDirectoryError("name", folder.name, cause, fix) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            words = f"{folder}: its file system has no locks ({error.strerror}); start one run"
            print(f"{words} at a time there", file=sys.stderr)
            return None
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


def write_settings(run: Path, settings: dict) -> None:
    """Writes the resolved settings of a run, for programs and for people."""
    import yaml

    atomic_write(run / RECORD, (json.dumps({"settings": settings}, indent=1) + "\n").encode())
    # Not by OmegaConf, for which a "${" in a prompt is a reference.
    atomic_write(
        run / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode()
    )


def settings_of(run: Path) -> dict | None:
    """The resolved settings of a run; None where none can be read.

    Runs written before run.json existed have them in their checkpoints alone.
    """
    states = sorted((run / "checkpoints").glob("step_*/state.json"), reverse=True)
    for file in (run / RECORD, *states):
        try:
            settings = read_json(file)["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(settings, dict):
            return settings
    return None


def is_occupied(folder: Path) -> bool:
    """Whether something else than a run is there: something, and no settings of a run."""
    if not folder.is_dir() or settings_of(folder) is not None:
        return False
    ours = {LOCK, RECORD, CONFIG}  # and what they are called in the making
    return any(entry.name.partition(".part")[0] not in ours for entry in folder.iterdir())


def check_new(folder: Path) -> None:
    """Raises RunDirectoryError when another process has begun a run there meanwhile."""
    if settings_of(folder) is not None or (folder / "checkpoints").exists():
        cause = f"another process has begun {folder} just now"
        raise RunDirectoryError("name", folder.name, cause, "give another name")
