"""A run's directory: whose it is, who may write to it, and what started it.

runs/<name>/.lock          held while a process writes there; says which
            launch.json    what has started the run, to know a restart of it
            run.json       the settings, for programs
            config.yaml    the settings, for people: no program reads them from there
"""

import contextlib
import json
import os
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from errors import NO_VALUE, RunDirectoryError, RunFileError
from files import NO_LOCKS, atomic_write, lock, make_folder, read_json, sync

RUNS = Path("runs")
LOCK, MARK, RECORD, CONFIG = ".lock", "launch.json", "run.json", "config.yaml"
# Opened in place; all other files are replaced by rename.
REGULAR = (LOCK, MARK, "metrics.jsonl", "samples.jsonl")
WAIT_FOR_PREDECESSOR = 30  # seconds
started_here: list[Path] = []  # the runs of this process; a multirun has several


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


def take(folder: Path) -> IO[str] | None:
    """Locks a run's directory until the file that is returned is closed or the process ends.

    None where the file system has no locks. Raises RunDirectoryError when another process has it
    or it cannot be written to, RunFileError when it has a link, a FIFO or a device among its files.
    """
    for name in REGULAR:
        file = folder / name
        if file.is_symlink() or (file.exists() and not file.is_file()):
            cause = f"{file} is not a regular file"
            raise RunFileError("name", folder.name, cause, "remove it, or give another name")
    patience = WAIT_FOR_PREDECESSOR if is_restart() else 0  # it is being ended just now
    until = time.monotonic() + patience
    with writable(folder):
        while True:
            try:
                file = lock(folder / LOCK)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = (folder / LOCK).read_text(encoding="utf-8", errors="replace").strip()
                    raise RunDirectoryError(
                        "name",
                        folder.name,
                        f"{folder} is being written by another process ({holder or 'unknown'})",
                        "wait for it, or give another name",
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                words = f"{folder}: its file system has no locks ({error.strerror}); start one run"
                print(f"{words} at a time there", file=sys.stderr)
                return None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file


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
    ours = {LOCK, MARK, RECORD, CONFIG}  # and what they are called in the making
    return any(entry.name.partition(".part")[0] not in ours for entry in folder.iterdir())


def check_new(folder: Path) -> None:
    """Raises RunDirectoryError when another process has begun a run there meanwhile."""
    if settings_of(folder) is not None or (folder / "checkpoints").exists():
        cause = f"another process has begun {folder} just now"
        raise RunDirectoryError("name", folder.name, cause, "give another name")


# --------------------------------------------------------------------------- what has started it


def is_restart() -> bool:
    """Whether torchrun has started these processes after earlier ones."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _launch() -> dict[str, str]:
    """What tells this start of a run from any other, and stays when it is started anew.

    torchrun starts its processes again when one has died: with the same parent, which began at
    the same time. Slurm starts a job again that it has put back into the queue.
    """
    found = {}
    if job := os.environ.get("TORCHELASTIC_RUN_ID"):
        agent = os.getppid()
        began = ""
        with contextlib.suppress(OSError):  # not everywhere; clock ticks since boot
            began = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
        found["torchrun"] = f"{job} {socket.gethostname()} {agent} {began} {len(started_here)}"
    if job := os.environ.get("SLURM_JOB_ID"):
        found["slurm"] = job
    return found


def mark_launch(folder: Path) -> None:
    """Notes in a run's directory what has started it."""
    if launch := _launch():
        atomic_write(folder / MARK, json.dumps(launch).encode())
    started_here.append(folder)


def was_cut_off(run: Path, by_slurm: bool = True) -> bool:
    """Whether this very start made the run before, so that it has to go on, whatever the settings
    say: they were fulfilled then."""
    try:
        before = read_json(run / MARK)
    except (OSError, ValueError):
        return False
    if not isinstance(before, dict):
        return False
    now = _launch()
    requeued = by_slurm and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    keys = {"torchrun", "slurm"} if requeued else {"torchrun"}
    return any(before.get(key) == now[key] for key in keys & now.keys())


def mark_sweep(folder: Path) -> None:
    """Notes in a sweep's directory what has started it; before its first run."""
    if launch := _launch():
        atomic_write(folder / MARK, json.dumps(launch).encode())


def sweep_before_restart(sweeps: Path) -> Path | None:
    """The sweep's directory that torchrun began this one in before, if it did."""
    marks = sorted(sweeps.glob(f"*/{MARK}"))
    return next((m.parent for m in marks if was_cut_off(m.parent, by_slurm=False)), None)


def name_before_restart() -> str | None:
    """The name of the run that this one was before torchrun started the processes anew.

    For runs without a name of their own, which is chosen by the clock.
    """
    runs = (mark.parent for mark in RUNS.glob(f"*/{MARK}"))
    return next((run.name for run in runs if was_cut_off(run, by_slurm=False)), None)
