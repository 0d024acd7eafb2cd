"""Faults that the fork server plants in a training before it starts.

    {"crash": {"at": 7}, "infinite_loss": {"steps": [3]}}

Each key is a function in FAULTS; its value has the arguments. "The saver" is the thread that writes
checkpoints (clearhead/checkpoint/saving.py).
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import train
from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import saving
from clearhead.run import stop
from clearhead.run.run import Run


def plant(faults: dict[str, dict]) -> None:
    for name, how in faults.items():
        FAULTS[name](**how)


def replace(owner: object, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Replaces a function by wrap(function)."""
    setattr(owner, name, wrap(getattr(owner, name)))


def on_call(function: str, before: Callable) -> None:
    """Calls before(*arguments) before each call of a function, such as train.train_step."""
    owner, _, name = function.rpartition(".")

    def wrap(real):
        def wrapper(*arguments, **options):
            before(*arguments)
            return real(*arguments, **options)

        return wrapper

    replace(pkgutil.resolve_name(owner), name, wrap)


def in_saver() -> bool:
    return threading.current_thread().name.startswith("saver")


def before_step(step: int | None, action: Callable[[Run], None]) -> None:
    """Calls action(run) before this step starts. step=None: never."""

    def at_its_step(run):
        if run.state.step == step:
            action(run)

    on_call("train.train_step", at_its_step)


WRITING = os.O_WRONLY | os.O_RDWR
# Audit events of Python: positions of the path and of the directory descriptor in their arguments.
EVENTS = {"os.remove": (0, 1), "os.rmdir": (0, 1), "os.mkdir": (0, 2), "os.symlink": (1, 2)}


class Operations:
    """Counts the disk operations of the saver for the second checkpoint, until the first checkpoint
    is removed, and kills the process before operation `at`.

    names: file to which the names of the operations are written, one per line. lost: file to which,
    at the crash, all changes are written that a loss of power could undo:

        {"files": {path: bytes that are on the disk}, "names": [changes of names, in order]}
    """

    def __init__(self, at: int | None = None, names: str | None = None, lost: str | None = None):
        self.at, self.names, self.lost = at, names, lost
        self.count = self.saves = self.kept = 0
        self.root = os.path.join(os.getcwd(), "runs")
        self.on_disk: dict[int, int] = {}  # by inode: the size at the last fsync
        self.unsynced: list[dict] = []  # changes of names that may not be on disk yet
        self.lock = threading.RLock()
        on_call("clearhead.checkpoint.saving.Saver.save", self._count_saves)
        replace(checkpoint, "save_file", self._save_file)
        replace(os, "fsync", self._fsync)
        sys.addaudithook(self._watch)

    def _count_saves(self, *_) -> None:
        self.saves += 1  # training has waited for the previous checkpoint

    def _point(self, what: str, path: str) -> None:
        """Counts an operation, and kills the process if it is operation `at`."""
        if self.saves != 2 or not in_saver():
            return
        self.count += 1
        if self.names:
            with open(self.names, "a") as file:
                file.write(f"{what} {os.path.relpath(path)}\n")
        if self.count == self.at:
            if what == "half of":
                os.truncate(path, os.path.getsize(path) // 2)
            if self.lost:
                files = {
                    str(file): self.on_disk.get(file.stat().st_ino, 0)
                    for file in Path(self.root).rglob("*")
                    if file.is_file() and not file.is_symlink()
                }
                Path(self.lost).write_text(json.dumps({"files": files, "names": self.unsynced}))
            os.kill(os.getpid(), signal.SIGKILL)

    def _watch(self, event: str, arguments: tuple) -> None:
        if event == "os.rename":
            source, path, of_source, folder = arguments
            self._operation("rename", path, folder, self._path(source, of_source))
        elif event in EVENTS:
            self._operation(event[3:], *(arguments[place] for place in EVENTS[event]))
        elif event == "open" and not isinstance(arguments[0], int) and arguments[2] & WRITING:
            self._operation("open", arguments[0])

    def _path(self, path: object, folder: int = -1) -> str:
        """Returns the absolute path. folder: descriptor of the directory of a relative path."""
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
        return os.path.normpath(os.path.join(base, os.fspath(path)))

    def _operation(self, what: str, path: object, folder: int = -1, source: str = "") -> None:
        """Records a change of a name or of the content of a file, before it is made."""
        path, old = self._path(path, folder), None
        if path != self.root and not path.startswith(self.root + os.sep):
            return
        with self.lock:
            self._point(what, path)
            exists = os.path.lexists(path)
            loses_name = exists and what in ("rename", "remove") and not os.path.isdir(path)
            if loses_name and self.lost:
                self.kept += 1
                old = f"{self.lost}.{self.kept}"  # a hard link
                os.link(path, old, follow_symlinks=False)
            for change in self.unsynced:  # paths in a directory that is renamed
                if source and change["path"].startswith(source + os.sep):
                    change["path"] = path + change["path"].removeprefix(source)
            if not exists or what in ("rename", "remove", "rmdir"):
                self.unsynced.append({"what": what, "path": path, "source": source, "old": old})

    def _save_file(self, real):
        def wrapper(tensors, path, *arguments):
            self._operation("open", path)
            real(tensors, path, *arguments)
            self._point("half of", str(path))

        return wrapper

    def _fsync(self, real):
        def wrapper(number):
            path, about = os.readlink(f"/proc/self/fd/{number}"), os.fstat(number)
            with self.lock:
                self._point("fsync", path)
                real(number)
                self.unsynced = [e for e in self.unsynced if os.path.dirname(e["path"]) != path]
                self.on_disk[about.st_ino] = about.st_size

        return wrapper


def failing(what: str, code: str, steps: list[int], times: int | None, only: str = "") -> None:
    """Makes an operation of the saver fail, for example with ENOSPC, at checkpoints of these steps.
    times: maximum number of failures. only: suffix of the path. what: os.NAME, or save_file."""
    left, now = math.inf if times is None else times, {"step": 0}

    def fail(*arguments):
        nonlocal left
        if not in_saver() or now["step"] not in steps or left == 0:
            return
        (path, *_) = [found for found in arguments if isinstance(found, int | str | Path)]
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if path.endswith(only):
            left -= 1
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    on_call(
        "clearhead.checkpoint.saving.Saver.save", lambda _, __, state: now.update(step=state.step)
    )
    on_call(what if "." in what else f"clearhead.checkpoint.format.{what}", fail)
    saving.RETRY_AFTER = 0


def between(before: int, until: int | None, begin: Callable, end: Callable) -> None:
    """Calls begin() before one step and end() before a later step. Both wait for a pending save."""

    def after_pending_save(action):
        def act(run):
            run.checkpointer.wait(run.state)
            action()

        return act

    saving.RETRY_AFTER = 0
    before_step(before, after_pending_save(begin))
    before_step(until, after_pending_save(end))


def file_size_limit(before: int, until: int | None, size: int) -> None:
    """Limits the size of files: the kernel writes a part of the data and then fails with EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    set_limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    between(before, until, lambda: set_limit((size, hard)), lambda: set_limit((hard, hard)))


BALLAST = Path("runs/ballast")


def fill_up(path: Path, leave: int = 0) -> None:
    """Writes a file that fills its disk, except for `leave` bytes."""
    with open(path, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):  # until the disk is full
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - leave))


def full_disk(before: int, until: int | None, leave: int) -> None:
    between(before, until, lambda: fill_up(BALLAST, leave), BALLAST.unlink)


def interrupt(each: list[dict]) -> None:
    """Sends signals to the process and raises errors, in this order.

    Each is a dict: "what": a signal name or the text of an error; "at": a function, such as
    train.train_step; "call": the number of the call, from 1, counted after the previous interrupt;
    "when": "before" the call, "after" it, "held": after it, and the call does not return, or
    "saved": before it, after a pending save. The main thread handles a signal: "held" is for a call
    of another thread, which could go on until then.
    """
    left = [{"call": 1, "when": "before"} | event for event in each]

    def act(what: str) -> None:
        if not what.startswith("SIG"):
            raise RuntimeError(what)
        os.kill(os.getpid(), signal.Signals[what])

    def wrap(at, real):
        def wrapper(*arguments, **options):
            is_next = bool(left) and left[0]["at"] == at
            if is_next:
                left[0]["call"] -= 1
            if not is_next or left[0]["call"]:
                return real(*arguments, **options)
            event = left.pop(0)
            if event["when"] == "saved":
                arguments[0].checkpointer.wait(arguments[0].state)
            is_after = event["when"] in ("after", "held")
            if not is_after:
                act(event["what"])
            result = real(*arguments, **options)
            if is_after:
                act(event["what"])
            while event["when"] == "held":
                time.sleep(1)
            return result

        return wrapper

    for at in {event["at"] for event in each}:
        owner, _, name = at.rpartition(".")
        replace(pkgutil.resolve_name(owner), name, functools.partial(wrap, at))


def infinite_loss(steps: list[int]) -> None:
    """Makes the loss of these steps (from 1) inf, with finite gradients."""
    from model import GPT

    now = {"step": 0}

    def forward(real):
        def wrapper(model, *arguments, **options):
            logits, loss = real(model, *arguments, **options)
            if model.training and now["step"] in steps:
                loss = loss + math.inf
            return logits, loss

        return wrapper

    on_call("train.train_step", lambda run: now.update(step=run.state.step + 1))
    replace(GPT, "forward", forward)


def watch_parameters(file: str) -> None:
    """Appends [step, before, after] to the file at each step: digests of parameters and moments."""

    def digest(run) -> str:
        found = hashlib.sha256()
        for parameter in run.model.parameters():
            state = run.optimizer.state.get(parameter, {})
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()

    def wrap(real):
        def wrapper(run):
            before = digest(run)
            try:
                return real(run)
            finally:
                with open(file, "a") as opened:
                    opened.write(json.dumps([run.state.step, before, digest(run)]) + "\n")

        return wrapper

    replace(train, "train_step", wrap)


def watch_parts(file: str) -> None:
    """Appends the name of each part of the training to a file when it begins."""
    parts = ("train.train_step", "train.save", "clearhead.run.run.Run.evaluate")
    parts += ("clearhead.run.run.Run.sample", "clearhead.run.run.Run.finish")
    parts += ("headlens.lens.Lens.snapshot", "clearhead.run.lens_runner.ablate_heads")
    parts += ("clearhead.output.run_log.RunLog.log",)

    def write(name: str) -> None:
        with open(file, "a") as opened:
            opened.write(f"{name.rpartition('.')[2]}\n")

    for name in parts:
        on_call(name, lambda *_, name=name: write(name))


def out_of_time(step: int) -> None:
    """Leaves no time for another step after this one. Until then, no time is used."""
    steps = itertools.count(1)
    replace(stop.TimeLimit, "start_step", lambda _: lambda _: float(next(steps) == step))


def wait_at(step: int, file: str) -> None:
    """Creates the file FILE.reached before a step, then waits until FILE exists."""

    def wait(_):
        Path(f"{file}.reached").touch()
        while not os.path.exists(file):
            threading.Event().wait(0.002)

    before_step(step, wait)


def slow(seconds: float, part: str = "") -> None:
    """Delays a function on this rank; without a name, everything except training steps."""
    parts = ["run.run.Run.evaluate", "run.run.Run.sample", "run.build.open_log"]
    parts += ["run.build.model_from_tensors", "checkpoint.format.write"]
    parts = [*(f"clearhead.{part}" for part in parts), "headlens.lens.Lens.snapshot"]
    for name in [part] if part else parts:
        on_call(name, lambda *_: time.sleep(seconds))


def compiler(backend: str) -> None:
    """Uses another backend in torch.compile, because the default takes a minute."""
    import torch

    replace(torch, "compile", lambda real: functools.partial(real, backend=backend))


def no_memory() -> None:
    """Simulates that this rank has no memory for the copy of a checkpoint."""
    replace(saving, "available_memory", lambda _: lambda: 0)


def frozen(modules: list[str]) -> None:
    """Freezes the parameters of modules of the model before training."""

    def freeze(run):
        for name in modules:
            run.model.get_submodule(name).requires_grad_(False)

    on_call("train.fit", freeze)


FUNCTIONS = (failing, file_size_limit, full_disk, interrupt, infinite_loss, watch_parameters)
FUNCTIONS += (watch_parts, out_of_time, wait_at, slow, compiler, no_memory, frozen)
FAULTS = {"crash": Operations} | {function.__name__: function for function in FUNCTIONS}
