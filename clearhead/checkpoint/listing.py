"""Lists the checkpoints of a run, finds the checkpoint for a path, and says which directory is a
run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clearhead.checkpoint.format import CHECKPOINT_NAME, MODEL, STATE, verify
from clearhead.checkpoint.run_directory import CONFIG_YAML, LOCK
from clearhead.config.stored import SETTINGS_JSON, settings_of
from clearhead.errors import CheckpointError, DamagedCheckpointError
from clearhead.tokens.tokenizer_json import TOKENIZER

Found, Content = TypeVar("Found", Path, Path | None), TypeVar("Content")


def run_directory_of(folder: Path) -> Path | None:
    """Returns the run directory of a checkpoint; None if the checkpoint is not in one."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def list_checkpoints(run: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, newest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if CHECKPOINT_NAME.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def newest_step(run: Path) -> int:
    """Returns the step of a run's newest checkpoint, 0 without one."""
    return max((step_of(folder) for folder in list_checkpoints(run)), default=0)


def is_checkpoint(path: Path) -> bool:
    """Returns whether a path is a checkpoint, intact or damaged, and not a run directory."""
    return (path / STATE).is_file() or bool(CHECKPOINT_NAME.fullmatch(path.resolve().name))


def has_checkpoint(run: Path) -> bool:
    """Returns whether a run has or had a checkpoint: a link `last` may remain."""
    return bool(list_checkpoints(run)) or (run / "checkpoints" / "last").is_symlink()


def is_run(folder: Path) -> bool:
    """Returns whether a directory is a run: it has a valid run.json, or has or had a checkpoint."""
    return settings_of(folder) is not None or has_checkpoint(folder)


def has_other_files(folder: Path) -> bool:
    """Returns whether a directory contains files but is not a run."""
    if not folder.is_dir() or is_run(folder):
        return False
    # Also as NAME.part-..., before they are complete.
    ours = {LOCK, SETTINGS_JSON, CONFIG_YAML, TOKENIZER}
    return any(entry.name.partition(".part")[0] not in ours for entry in folder.iterdir())


def find_checkpoint(
    path: str | Path,
    key: str = "checkpoint",
    names: tuple[str, ...] = (STATE, MODEL),
) -> Path:
    """Returns the checkpoint at a path, or the newest intact checkpoint of a run directory.

    Verifies the checksums of the files `names`. In a run directory, a damaged checkpoint is skipped
    with a line on stderr. Raises CheckpointError, naming the setting `key`, if there is no
    checkpoint, and DamagedCheckpointError if the path is a damaged one or all are damaged.
    """
    path = Path(path)
    if is_checkpoint(path):
        folder = path.resolve()  # resolve once: training may change `last` at any time
        try:
            verify(folder, names)
        except DamagedCheckpointError:
            if path.resolve() == folder:
                raise
            return find_checkpoint(path, key, names)  # it was removed meanwhile
        return folder
    damage, last = None, path / "checkpoints" / "last"
    if last.is_symlink() and not last.exists():
        damage = DamagedCheckpointError(last, "the target of this link does not exist")
    for folder in list_checkpoints(path):
        try:
            verify(folder, names)
        except DamagedCheckpointError as error:
            if not os.path.lexists(folder):  # a training process has removed it
                return find_checkpoint(path, key, names)
            damage = damage or error
            continue
        if damage:
            print(f"{damage.without_hint}; using {folder.name} instead", file=sys.stderr)
        return folder.resolve()
    if damage:
        raise damage
    if not path.exists() and not path.is_symlink():
        hint = "give a run directory or a checkpoint"
        raise CheckpointError(key, path, "directory not found", hint)
    hint = "give runs/NAME or runs/NAME/checkpoints/step_..."
    raise CheckpointError(key, path, "contains no checkpoint", hint)


def read_found(
    find: Callable[[], Found], read: Callable[[Found], Content]
) -> tuple[Found, Content]:
    """Returns (find(), read(find())). Searches again if a training process has replaced the
    checkpoint by a newer one in the meantime."""
    folder = find()
    try:
        return folder, read(folder)
    except DamagedCheckpointError:
        if folder.exists():
            raise
    return read_found(find, read)
