"""Writes checkpoints atomically in a background thread.

1. Write the files to step_00000100.part, flush them to disk (fsync), rename it to step_00000100.
2. Update the links `last` and `best`.
3. Rename older checkpoints to step_*.part and remove them.

So a directory without .part is always complete. After the first save, a complete checkpoint always
exists. The next start of the run removes the .part directories of killed processes.
"""

import contextlib
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.format import State, Tensors
from clearhead.checkpoint.tensors import all_finite
from clearhead.errors import DIVERGENCE_HINT, NO_VALUE, DivergedError, NotSavedError, message_of
from clearhead.files import fsync, remove, rename

RETRY_AFTER = 2  # seconds until the second attempt to write a checkpoint


class Saver:
    """Writes the checkpoints of a run, one at a time.

    run: the run directory, locked by this process. keep: number of newest checkpoints to keep; the
    best one is kept too. tokenizer: the content of tokenizer.json, None if there is none.
    resumed: the state of the checkpoint from which the run resumes, if any.
    """

    def __init__(
        self, run: Path, keep: int, tokenizer: bytes | None = None, resumed: State | None = None
    ):
        self.run, self.folder, self.keep = run, run / "checkpoints", keep
        self.tokenizer = tokenizer
        self.saved = resumed.step if resumed else 0  # the last step that is known to be on disk
        self._links_work = True
        self._pending: tuple[int, Future] | None = None
        self._clean_up(resumed.step if resumed else 0)
        if resumed:
            self._link(resumed.best_step)  # the killed process may not have done this
            self._prune(resumed.best_step)

    def _clean_up(self, newest: int) -> None:
        """Removes incomplete checkpoints. Renames others after step `newest`: they are damaged,
        because the run resumes from `newest`."""
        for part in self.folder.glob("*.part"):
            remove(part)
        for folder in listing.list_checkpoints(self.run):
            if listing.step_of(folder) > newest:
                aside = folder
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}.damaged")
                rename(folder, aside)
                what = f"damaged, renamed to {aside.name}; the run resumes from step {newest}"
                print(f"checkpoint={folder}: {what}", file=sys.stderr)

    def save(self, tensors: Tensors, state: State) -> None:
        """Starts writing a checkpoint. The tensors must not change until `wait` returns."""
        self.wait()
        # A new thread for each checkpoint: the NaN check (aminmax) starts OpenMP threads, which end
        # with their parent thread. While they exist, a training step takes 10 % longer
        # (benchmarks/results/2026-11-22-saving-cpu.json).
        thread = ThreadPoolExecutor(1, "saver")
        self._pending = state.step, thread.submit(self._save, tensors, asdict(state))
        thread.shutdown(wait=False)  # the thread ends after this task

    def wait(self) -> NotSavedError | None:
        """Waits for the pending checkpoint; returns the error if it could not be written.

        Raises DivergedError if its tensors contain NaN or inf.
        """
        if self._pending is None:
            return None
        step, writing = self._pending
        writing.exception()  # waits; if it is interrupted here, `close` waits
        self._pending = None
        try:
            writing.result()
            return None
        except (OSError, SafetensorError) as error:
            cause = getattr(error, "strerror", None) or message_of(error)
            with contextlib.suppress(OSError):
                cause += f", {_format_size(shutil.disk_usage(self.run).free)} free on this disk"
            folder, reason = self.folder / _folder_name(step), f"could not be written ({cause})"
            return NotSavedError("checkpoint", str(folder), reason, "free disk space there")

    def close(self) -> None:
        """Waits for the pending checkpoint and ignores errors."""
        if self._pending:
            self._pending[1].exception()

    def disk_space_notes(self, size: float) -> list[str]:
        """Returns a note if the checkpoints, `size` bytes each, may not fit on the disk."""
        missing = max(0, self.keep - len(listing.list_checkpoints(self.run))) + 2
        free = shutil.disk_usage(self.run).free
        if free > missing * size:
            return []
        kept = f"the newest {self.keep} and the best checkpoint, {_format_size(size)} each"
        reason = f"{kept}, may not fit on the disk ({_format_size(free)} free)"
        return [f"trainer.keep={self.keep}: {reason}"]

    # ----------------------------------------------------------- in the background thread

    def _save(self, tensors: Tensors, state: dict) -> None:
        for name, tensor in (tensors[0] | tensors[1]).items():
            if not all_finite(tensor):  # do not replace a good checkpoint
                reason = f"contains NaN or inf after step {state['step']}"
                raise DivergedError(name, NO_VALUE, reason, DIVERGENCE_HINT)
        folder = self.folder / _folder_name(state["step"])
        try:
            self._write(folder, tensors, state)
        except (OSError, SafetensorError):
            time.sleep(RETRY_AFTER)  # disk space or a file server may be available again
            self._write(folder, tensors, state)
        self.saved = state["step"]
        self._link(state["best_step"])
        self._prune(state["best_step"])

    def _write(self, folder: Path, tensors: Tensors, state: dict) -> None:
        if folder.exists():  # complete; the rename may not be flushed yet
            fsync(self.folder)
            return
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)  # not its parents: the run directory may have been removed
        fsync(self.run)
        part.mkdir()
        try:
            checkpoint.write(part, tensors, state, self.tokenizer)
            rename(part, folder)
        except (OSError, SafetensorError):
            shutil.rmtree(part, ignore_errors=True)  # free the space on a full disk
            raise

    def _link(self, best_step: int | None) -> None:
        """Points the links `last` to the newest and `best` to the best checkpoint, if there is one.
        Only users need them, so an error is only a warning: some file systems have no links."""
        names = [folder.name for folder in listing.list_checkpoints(self.run)]
        best = None if best_step is None else _folder_name(best_step)
        try:
            _set_link(self.folder / "best", best if best in names else None)
            _set_link(self.folder / "last", names[0])
        except OSError as error:
            if self._links_work:
                print(
                    f"{self.folder}: cannot create the links best and last ({error})",
                    file=sys.stderr,
                )
            self._links_work = False

    def _prune(self, best_step: int | None) -> None:
        for old in listing.list_checkpoints(self.run)[self.keep :]:
            if listing.step_of(old) == best_step:
                continue
            part = old.with_name(old.name + ".part")
            try:
                os.replace(old, part)
                shutil.rmtree(part)
            except OSError as error:
                print(
                    f"checkpoint={old}: cannot be removed ({error.strerror or error})",
                    file=sys.stderr,
                )


def _format_size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _folder_name(step: int) -> str:
    return f"step_{step:08d}"


def _set_link(link: Path, target: str | None) -> None:
    """Points a link to a file in its directory, atomically except on Windows. target=None removes
    the link."""
    if target is None:
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or os.readlink(link) != target:
        fresh = link.with_name(link.name + ".part")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        try:
            rename(fresh, link)
        except PermissionError:  # Windows does not replace a link to a folder
            link.unlink()
            rename(fresh, link)
