"""The run directory: its name, its lock and its settings.

runs/<name>/.lock          locked while a process writes there; says which
            run.json       the settings, for programs
            config.yaml    the settings, for people: no program reads them from there
"""

import contextlib
import errno
import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from errors import RunDirectoryError, RunFileError
from files import atomic_write, fsync, make_folder, read_json, remove_temporary_files
from training.config.other_names import rename_stored

LOCK, SETTINGS_JSON, CONFIG_YAML = ".lock", "run.json", "config.yaml"
# Opened in place; all other files are replaced by rename.
OPENED_IN_PLACE = (LOCK, "metrics.jsonl", "samples.jsonl")
# What flock fails with where the file system has no locks.
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
WAIT_FOR_PREDECESSOR = 30  # seconds; torchrun restarts processes while the others end


def create(runs: Path, name: str | None, model_name: str) -> Path:
    """Creates runs/<name>, which may exist; without a name a new one named by date and model."""
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
    """Raises RunDirectoryError for an OSError inside."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename or runs} cannot be written ({error.strerror})"
        hint = "give a folder that can be written, or another name"
        raise RunDirectoryError("runs_dir", runs, reason, hint) from error


def lock_directory(folder: Path) -> contextlib.AbstractContextManager:
    """Locks a run directory, and removes what a killed process left unfinished there. The lock ends
    with the context that is returned, or with the process.

    Where the file system has no locks, a line says so. Raises RunDirectoryError when another
    process has it or it cannot be written to, RunFileError when it has a link, a FIFO or a device
    among its files.
    """
    for name in OPENED_IN_PLACE:
        file = folder / name
        if file.is_symlink() or (file.exists() and not file.is_file()):
            cause = f"{file} is not a regular file"
            raise RunFileError("name", folder.name, cause, "remove it, or give another name")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    path, timeout = folder / LOCK, WAIT_FOR_PREDECESSOR if restarted else 0
    with writable(folder.parent):
        try:
            lock = FileLock(path).acquire(timeout=timeout)
        except Timeout:
            holder = path.read_text(encoding="utf-8", errors="replace").strip()
            cause = f"{folder} is being written by another process ({holder or 'unknown'})"
            fix = "wait for it, or give another name"
            raise RunDirectoryError("name", folder.name, cause, fix) from None
        except OSError as error:
            if error.errno not in LOCKS_UNSUPPORTED:
                raise
            words = f"{folder}: its file system has no locks ({error.strerror}); start one run"
            print(f"{words} at a time there", file=sys.stderr)
            lock = contextlib.nullcontext()
        else:
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        for part in (folder, folder / "attention", folder / "profile"):
            remove_temporary_files(part)
    return lock


def write_settings(run: Path, settings: dict) -> None:
    """Writes the resolved settings of a run, for programs and for people."""
    import yaml

    atomic_write(
        run / SETTINGS_JSON, (json.dumps({"settings": settings}, indent=1) + "\n").encode()
    )
    # Not by OmegaConf, for which a "${" in a prompt is a reference.
    atomic_write(
        run / CONFIG_YAML, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode()
    )


def settings_of(run: Path) -> dict | None:
    """The resolved settings of a run; None where none can be read."""
    try:
        settings = read_json(run / SETTINGS_JSON)["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rename_stored(settings) if isinstance(settings, dict) else None


def has_other_files(folder: Path) -> bool:
    """Whether something else than a run is there: something, and no settings of a run."""
    if not folder.is_dir() or settings_of(folder) is not None:
        return False
    ours = {LOCK, SETTINGS_JSON, CONFIG_YAML}  # and what they are called in the making
    return any(entry.name.partition(".part")[0] not in ours for entry in folder.iterdir())


def check_new(folder: Path) -> None:
    """Raises RunDirectoryError when another process has begun a run there meanwhile."""
    if settings_of(folder) is not None or (folder / "checkpoints").exists():
        cause = f"another process has begun {folder} just now"
        raise RunDirectoryError("name", folder.name, cause, "give another name")
