"""Saving the state of a run. `Checkpointer`, a component of a run on every rank, collects it and
tracks the best checkpoint. On rank 0 a `Saver` writes checkpoints in a background thread:

1. Write the files to step_00000100.part, flush them to disk (fsync), rename it to step_00000100.
2. Update the links `last` and `best`, and those of trainer.save_at_words, such as `chck_20M`.
3. Rename older checkpoints to step_*.part and remove them.

The last step is saved before its validation; afterwards, its state.json is replaced.

So a directory without .part is always complete. After the first save, a complete checkpoint always
exists. The next start of the run removes the .part directories of killed processes.
"""

import contextlib
import math
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.format import State, Tensors
from clearhead.checkpoint.resume import resume_command
from clearhead.checkpoint.tensors import all_finite, collect
from clearhead.errors import DIVERGENCE_HINT, NO_VALUE, DivergedError, NotSavedError, message_of
from clearhead.files import fsync, remove, remove_temporary_files, rename
from clearhead.parallel.hardware import available_memory
from clearhead.parallel.strategy import Strategy
from model import GPT

RETRY_AFTER = 2  # seconds until the second attempt to write a checkpoint


@dataclass
class Checkpointer:
    """Saves the state of a run. All ranks call its methods together, except where noted."""

    directory: Path  # the run directory
    saver: "Saver | None"  # None on ranks other than 0
    strategy: Strategy
    model: GPT
    optimizer: torch.optim.Optimizer
    named_steps: dict[int, list[str]]  # steps to save, with the names of links to the checkpoints
    _pins: bool | None = None  # whether copies from a GPU are pinned
    _best_before: tuple[float | None, int | None] = (None, None)

    def update_best(self, state: State, val_loss: float, eval_every: int) -> bool:
        """Stores a validation loss in the state if it is the lowest, and counts it for
        trainer.patience if it is one of those every eval_every steps. Returns whether it is the
        lowest."""
        self.wait(state)  # a best checkpoint that could not be written does not count
        is_best = val_loss < (math.inf if state.best_loss is None else state.best_loss)
        # The end of a run has a validation that a longer run does not have: it does not count.
        if eval_every and state.step % eval_every == 0 and not state.ended_early:
            state.worse_validations = 0 if is_best else state.worse_validations + 1
        if is_best:
            self._best_before = state.best_loss, state.best_step
            state.best_loss, state.best_step = val_loss, state.step
        return is_best

    def save(self, state: State, is_last: bool) -> None:
        """Saves a checkpoint. It is written while training continues if the host has enough memory
        for a copy of the tensors. is_last: no step follows, so no copy is needed."""
        state.scaler = self.strategy.scaler.state_dict() or None
        # When training on the CPU, the copy must leave enough memory for a training step. Pinned
        # memory is kept for the next checkpoint, up to twice the size of the tensors. Rank 0 makes
        # the copy, so it decides.
        has_memory = available_memory() > 24 * self.model.num_parameters()
        if self._pins is None:  # later, the pinned memory is no longer available
            self._pins = self.strategy.device.type == "cuda" and has_memory
        copy = self.strategy.device.type != "cpu" or has_memory
        copy, is_last = self.strategy.broadcast([copy, is_last])
        to_copy = copy and not is_last
        tensors = collect(self.model, self.optimizer, self.strategy, to_copy, self._pins)
        if self.saver:
            self.saver.save(tensors, state)
        if not copy and not is_last:
            self.wait(state)

    def complete(self, state: State) -> None:
        """Replaces the state of the checkpoint of this step if it was saved before the evaluation.
        A rank may call this without the others."""
        if self.saver and self.saver.is_early and state.row is None:
            self.saver.save(None, state)

    def wait(self, state: State) -> int:
        """Waits for the pending checkpoint. Returns the step of the last checkpoint known to be on
        disk, 0 without one. Only warns if writing failed, because the next write may succeed."""
        saved, failed = self._wait(state)
        if failed and self.strategy.is_rank_0:
            print(f"{failed}; training continues", file=sys.stderr)
        return saved

    def finish(self, state: State) -> None:
        """Waits for the pending checkpoint. Raises NotSavedError if it could not be written."""
        _, failed = self._wait(state)
        if failed:
            raise failed

    def _wait(self, state: State) -> tuple[int, NotSavedError | None]:
        def wait() -> tuple[int, int, tuple | None]:
            failed = self.saver.wait()
            return listing.newest_step(self.directory), self.saver.saved, failed and failed.args

        newest, saved, failed = self.strategy.broadcast(self.strategy.on_rank_0(wait))
        if failed and state.best_step is not None and state.best_step > newest:
            state.best_loss, state.best_step = self._best_before
        return saved, failed and NotSavedError(*failed)

    # --------------------------- for error messages; a rank may call these without the others

    def newest_step(self) -> int:
        """Waits for the pending checkpoint; returns the newest checkpoint's step, 0 without one."""
        if self.saver:
            with contextlib.suppress(Exception):
                self.saver.wait()
        return listing.newest_step(self.directory)

    def describe(self) -> str:
        """Returns which checkpoint is intact, for an error message."""
        step = self.newest_step()
        return f"the checkpoint of step {step} is intact" if step else "no checkpoint was saved yet"

    def how_to_resume(self) -> str:
        """Returns how to resume the run, for an error message."""
        return resume_command(self.directory) if self.newest_step() else "rerun the same command"


class Saver:
    """Writes the checkpoints of a run, one at a time.

    run: the run directory, locked by this process. keep: number of newest checkpoints to keep; the
    best one and those of named_steps (see Checkpointer) are kept too. tokenizer: the content of
    tokenizer.json, None if there is none. resumed: the state of the checkpoint from which the run
    resumes, if any.
    """

    def __init__(
        self,
        run: Path,
        keep: int,
        named_steps: dict[int, list[str]],
        tokenizer: bytes | None = None,
        resumed: State | None = None,
    ):
        self.run, self.folder = run, run / "checkpoints"
        self.keep, self.named_steps = keep, named_steps
        self.tokenizer = tokenizer
        self.saved = resumed.step if resumed else 0  # the last step that is known to be on disk
        # Whether it was saved before its evaluation.
        self.is_early = resumed is not None and resumed.row is not None
        self._links_work = True
        self._pending: tuple[int, Future] | None = None
        self._clean_up(resumed.step if resumed else 0)
        if resumed:
            checkpoint.drop_old_checksum(self.folder / _folder_name(resumed.step))
            self._link(resumed.best_step)  # the killed process may not have done this
            self._prune(resumed.best_step)

    def _clean_up(self, newest: int) -> None:
        """Removes incomplete checkpoints. Renames others after step `newest`: they are damaged,
        because the run resumes from `newest`."""
        for part in self.folder.glob("*.part"):
            remove(part)
        for folder in listing.list_checkpoints(self.run):
            remove_temporary_files(folder)
            if listing.step_of(folder) > newest:
                aside = folder
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}.damaged")
                rename(folder, aside)
                what = f"damaged, renamed to {aside.name}; the run resumes from step {newest}"
                print(f"checkpoint={folder}: {what}", file=sys.stderr)

    def save(self, tensors: Tensors | None, state: State) -> None:
        """Starts writing a checkpoint, or with None, the state of the last one. The tensors must
        not change until `wait` returns."""
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
        # If it is interrupted here, `close` waits. With a timeout, because a signal that arrives
        # immediately before a wait does not end it: CPython handles it after the wait.
        while not wait_for([writing], timeout=1).done:
            pass
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

    # ----------------------------------------------------------- in the background thread

    def _save(self, tensors: Tensors | None, state: dict) -> None:
        for name, tensor in (tensors[0] | tensors[1] if tensors else {}).items():
            if not all_finite(tensor):  # do not replace a good checkpoint
                reason = f"contains NaN or inf after step {state['step']}"
                raise DivergedError(name, NO_VALUE, reason, DIVERGENCE_HINT)
        folder = self.folder / _folder_name(state["step"])
        try:
            self._write(folder, tensors, state)
        except (OSError, SafetensorError):
            time.sleep(RETRY_AFTER)  # disk space or a file server may be available again
            self._write(folder, tensors, state)
        self.saved, self.is_early = state["step"], state["row"] is not None
        self._link(state["best_step"])
        self._prune(state["best_step"])

    def _write(self, folder: Path, tensors: Tensors | None, state: dict) -> None:
        if tensors is None:
            checkpoint.replace_state(folder, state)
            return
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
        """Points the links `last` to the newest and `best` to the best checkpoint, if there is one,
        and those of named_steps to theirs. Only users need them, so an error is only a warning:
        some file systems have no links."""
        names = [folder.name for folder in listing.list_checkpoints(self.run)]
        best = None if best_step is None else _folder_name(best_step)
        try:
            _set_link(self.folder / "best", best if best in names else None)
            _set_link(self.folder / "last", names[0])
            for step in map(listing.step_of, map(Path, names)):
                for name in self.named_steps.get(step, ()):
                    _set_link(self.folder / name, _folder_name(step))
        except OSError as error:
            if self._links_work:
                print(
                    f"{self.folder}: cannot create the links best and last ({error})",
                    file=sys.stderr,
                )
            self._links_work = False

    def _prune(self, best_step: int | None) -> None:
        for old in listing.list_checkpoints(self.run)[self.keep :]:
            if listing.step_of(old) in (best_step, *self.named_steps):
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
