"""Which checkpoints a run has, and which one a path means."""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from errors import CheckpointError, DamagedCheckpointError
from training.checkpoint.format import CHECKPOINT_NAME, MODEL, STATE, verify


def run_directory_of(folder: Path) -> Path | None:
    """The run directory of a checkpoint; None for one that was copied elsewhere."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest first."""
    found = [p for p in (run / "checkpoints").glob("step_*") if CHECKPOINT_NAME.fullmatch(p.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def newest_step(run: Path) -> int:
    """The step of a run's newest checkpoint, 0 when there is none."""
    return max((step_of(folder) for folder in list_checkpoints(run)), default=0)


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint, damaged or not, and not a run."""
    return (path / STATE).is_file() or bool(CHECKPOINT_NAME.fullmatch(path.resolve().name))


def has_checkpoint(run: Path) -> bool:
    """Whether a run has, or had, a checkpoint."""
    return bool(list_checkpoints(run)) or (run / "checkpoints" / "last").is_symlink()


def find_checkpoint(
    path: str | Path,
    key: str = "checkpoint",
    names: tuple[str, ...] = (STATE, MODEL),
    warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Path:
    """The checkpoint that a path means: itself, or the newest intact one of a run directory.

    names: the files that are needed; their checksums are verified. A damaged checkpoint of a run is
    skipped with a warning; a damaged one that the path names is refused. Raises CheckpointError for
    the setting `key` when there is none.
    """
    path = Path(path)
    if is_checkpoint(path):
        folder = path.resolve()  # once: `last` may lead to another one a moment later
        try:
            verify(folder, names)
        except DamagedCheckpointError:
            if path.resolve() == folder:
                raise
            return find_checkpoint(path, key, names, warn)  # pruned meanwhile
        return folder
    damage, last = None, path / "checkpoints" / "last"
    if last.is_symlink() and not last.exists():
        damage = DamagedCheckpointError(last, "its target is missing")
    for folder in list_checkpoints(path):
        try:
            verify(folder, names)
        except DamagedCheckpointError as error:
            if not os.path.lexists(folder):  # pruned by the run, which is training
                return find_checkpoint(path, key, names, warn)
            damage = damage or error
            continue
        if damage:
            warn(f"{damage.without_hint}; resuming from {folder.name} instead")
        return folder.resolve()
    if damage:
        raise damage
    if not path.exists() and not path.is_symlink():
        near = similar_run(path)
        hint = f"did you mean {near}?" if near else "give a run or a checkpoint"
        raise CheckpointError(key, path, "no such directory", hint)
    hint = "give runs/NAME or runs/NAME/checkpoints/step_..."
    if (path / "last").exists():
        hint = f"did you mean {path / 'last'}?"
    raise CheckpointError(key, path, "has no checkpoint", hint)


def similar_run(path: Path) -> Path | None:
    """The run in runs/ that a wrong path may mean: its name alone, or misspelt."""
    runs = {folder.name: folder for folder in Path("runs").glob("*/") if folder.is_dir()}
    near = difflib.get_close_matches(path.name, runs, n=1, cutoff=0.7)
    return runs[near[0]] if near else None
