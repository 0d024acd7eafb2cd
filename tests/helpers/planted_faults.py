"""What goes wrong inside of a training, planted by the fork server before it begins.

    {"crash": {"at": 7}, "bad_loss": {"steps": [3], "value": "nan"}}

Each is a function of FAULTS, called with what stands beside its name. "The saver" is the thread
that writes checkpoints (training/saving.py).
"""

import builtins
import errno
import functools
import hashlib
import io
import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import durable
import train
from training import checkpoint, saving


def plant(faults: dict[str, dict]) -> None:
    for name, how in faults.items():
        FAULTS[name](**how)


def replace(owner: object, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """wrap(what is there) takes its place."""
    setattr(owner, name, wrap(getattr(owner, name)))


def before_step(step: int, action: Callable[[train.Trainer], None]) -> None:
    """Does something when this step is about to begin, once."""

    def wrap(real):
        def wrapper(trainer):
            if trainer.state.step == step and not done:
                done.append(step)
                action(trainer)
            return real(trainer)

        return wrapper

    done = []
    replace(train.Trainer, "step", wrap)


# --------------------------------------------------------------------------------------- crashes


class Operations:
    """Counts what the saver does to the disk, from the beginning of the second checkpoint until
    the older one is gone, and ends the process before operation `at`, as SIGKILL does.

    names: a file that gets the names of the operations so far, one a line. lost: a file that gets,
    at the crash, what a loss of power could undo, of all threads and since the process began:

        {"files": {path: bytes that the disk has}, "names": [what was done to names, in order]}
    """

    def __init__(self, at: int | None = None, names: str | None = None, lost: str | None = None):
        self.at, self.names, self.lost = at, names, lost
        self.count = 0
        self.saves = 0
        self.active = False
        self.root = os.getcwd() + os.sep
        self.written: dict[int, int] = {}  # bytes that the disk has, of each file written to
        self.unsynced: list[dict] = []  # changes of names that the disk may not have
        self.kept = 0
        self.guard = threading.RLock()
        self.link, self.kill = os.link, os.kill
        self.open, self.readlink, self.stat = builtins.open, os.readlink, os.stat
        replace(saving.Saver, "_save", self._save)
        replace(checkpoint, "save_file", self._save_file)
        for name in ("unlink", "remove", "rmdir", "mkdir", "symlink", "replace", "rename"):
            replace(os, name, functools.partial(self._names, name))
        for name in ("fsync", "chmod"):
            replace(os, name, functools.partial(self._plain, name))
        opening = self._open(builtins.open)
        builtins.open = io.open = opening

    # what counts

    def _save(self, real):
        def wrapper(*arguments):
            self.saves += 1
            self.active = self.saves == 2
            try:
                return real(*arguments)
            finally:
                self.active = False

        return wrapper

    def before(self, name: str, path: object) -> None:
        """Here the process may end."""
        if not self.active or not threading.current_thread().name.startswith("saver"):
            return
        self.count += 1
        if self.names:
            with self.open(self.names, "a") as file:
                file.write(f"{name} {os.path.relpath(str(path))}\n")
        if self.count == self.at:
            if self.lost:
                with self.open(self.lost, "w") as file:
                    json.dump(self._losses(), file)
            self.kill(os.getpid(), signal.SIGKILL)

    def _losses(self) -> dict:
        files = {}
        for folder, _, names in os.walk(self.root + "runs"):
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path) and self.stat(path).st_ino in self.written:
                    files[path] = self.written[self.stat(path).st_ino]
        return {"files": files, "names": self.unsynced}

    # what is wrapped

    def _concerns(self, path: str) -> bool:
        """Whether it is below runs/, or the folder where that has its name."""
        return path.startswith(self.root + "runs") or path + os.sep == self.root

    def _path(self, path: object, folder: int | None = None) -> str:
        """Absolute; folder: a descriptor that a name is relative to."""
        if isinstance(path, int):
            return self.readlink(f"/proc/self/fd/{path}")
        base = self.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
        return os.path.normpath(os.path.join(base, os.fspath(path)))

    def _open(self, real):
        def wrapper(path, mode="r", *arguments, **options):
            if isinstance(path, int) or not set(mode) & set("wax+"):
                return real(path, mode, *arguments, **options)
            full = self._path(path)
            if not self._concerns(full):
                return real(path, mode, *arguments, **options)
            with self.guard:
                self.before("open", full)
                is_new = not os.path.lexists(full)
                file = real(path, mode, *arguments, **options)
                self._changed(full, is_new)
                self.before("opened", full)
            return file

        return wrapper

    def _changed(self, path: str, is_new: bool) -> None:
        number = self.stat(path).st_ino
        if is_new or number not in self.written:  # what was there before, the disk has
            self.written[number] = 0 if is_new else self.stat(path).st_size
        if is_new:
            self._note("create", path)

    def _save_file(self, real):
        def wrapper(tensors, path, *arguments):
            full = self._path(path)
            with self.guard:
                self.before("save_file", full)
            real(tensors, path, *arguments)
            with self.guard:
                self._changed(full, is_new=True)
                if self.active and self.count + 1 == self.at:
                    os.truncate(full, self.stat(full).st_size // 2)
                self.before("half of", full)

        return wrapper

    def _plain(self, name, real):
        def wrapper(path, *arguments, **options):
            full = self._path(path)
            if not self._concerns(full):
                return real(path, *arguments, **options)
            with self.guard:
                self.before(name, full)
                result = real(path, *arguments, **options)
                if name == "fsync":
                    about = self.stat(full)
                    self.unsynced = [e for e in self.unsynced if os.path.dirname(e["path"]) != full]
                    if about.st_ino in self.written:
                        self.written[about.st_ino] = about.st_size
            return result

        return wrapper

    def _names(self, name, real):
        def wrapper(path, *arguments, **options):
            if name == "symlink":
                where, full = arguments[0], self._path(arguments[0], options.get("dir_fd"))
            else:
                where, full = path, self._path(path, options.get("dir_fd"))
            if not self._concerns(full):
                return real(path, *arguments, **options)
            with self.guard:
                self.before(name, where if os.path.isabs(os.fspath(where)) else full)
                old = source = None
                if name in ("replace", "rename"):
                    source, full = full, self._path(arguments[0])
                    old = self._keep(full)
                elif name in ("unlink", "remove"):
                    old = self._keep(full)
                result = real(path, *arguments, **options)
                self._note(name, full, source=source, old=old)
            return result

        return wrapper

    def _note(self, name: str, path: str, **more: str | None) -> None:
        self.unsynced.append({"what": name, "path": path, **more})

    def _keep(self, path: str) -> str | None:
        """A second name for a file that is about to lose its own."""
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if not self.lost or not os.path.lexists(path) or is_folder:
            return None
        self.kept += 1
        kept = f"{self.lost}.{self.kept}"
        self.link(path, kept, follow_symlinks=False)
        return kept


# ------------------------------------------------------------------------------------ full disks


def failing(
    what: str, code: str, steps: list[int], times: int | None = None, only: str = ""
) -> None:
    """An operation of the saver fails with an error, such as ENOSPC, at the checkpoints of these
    steps; times: at most so often, only: on paths with this end. what: os.NAME, or save_file."""
    left, now = [times], [0]

    def save(real):
        def wrapper(saver, tensors, state):
            now[:] = [state["step"] if isinstance(state, dict) else state.step]
            return real(saver, tensors, state)

        return wrapper

    def path_of(arguments) -> str:
        (path, *_) = [found for found in arguments if isinstance(found, int | str | Path)]
        return os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)

    def wrap(real):
        def wrapper(*arguments, **options):
            in_saver = threading.current_thread().name.startswith("saver")
            due = in_saver and now[0] in steps and left[0] != 0
            if not due or not path_of(arguments).endswith(only):
                return real(*arguments, **options)
            if left[0]:
                left[0] -= 1
            number = getattr(errno, code)
            raise OSError(number, os.strerror(number))

        return wrapper

    replace(saving.Saver, "_save", save)
    owner, name = (os, what[3:]) if what.startswith("os.") else (checkpoint, what)
    replace(owner, name, wrap)
    saving.RETRY_AFTER = 0


def little_room(before: int, until: int | None, size: int) -> None:
    """No file may become larger than so many bytes, from a step until another: the kernel takes
    what is left of a write and then refuses it (EFBIG)."""
    saving.RETRY_AFTER = 0
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(value):
        def set_limit(trainer):
            trainer.tell_not_saved(trainer.saved_so_far()[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, (value, hard))

        return set_limit

    before_step(before, limit(size))
    if until is not None:
        before_step(until, limit(hard))


BALLAST = Path("runs/ballast")


def fill_up(path: Path, leave: int = 0) -> None:
    """A file that takes what its disk has, but for so many bytes."""
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - leave))


def full_disk(before: int, until: int | None, leave: int) -> None:
    """The disk of runs/ is full, but for so many bytes, from a step until another."""
    saving.RETRY_AFTER = 0

    def fill(trainer):
        trainer.saved_so_far()
        fill_up(BALLAST, leave)

    def empty(trainer):
        trainer.tell_not_saved(trainer.saved_so_far()[1])
        BALLAST.unlink()

    before_step(before, fill)
    if until is not None:
        before_step(until, empty)


def shell(before: int, until: int | None, commands: list[str]) -> None:
    """A command before one step, and another before a later one."""
    saving.RETRY_AFTER = 0

    def call(command):
        def run(trainer):
            trainer.tell_not_saved(trainer.saved_so_far()[1])
            assert os.system(command) == 0

        return run

    before_step(before, call(commands[0]))
    if until is not None:
        before_step(until, call(commands[1]))


# --------------------------------------------------------------------------------------- signals


def signals(each: list[dict]) -> None:
    """The process gets signals: each {"name", "step", "when"}. when: before a step; before one, but
    after the checkpoint in the making ("saved"); in the midst of the first checkpoint that is
    written from that step on; while it starts, at a part that is built; or between a small file's
    writing and its naming, step counting them."""

    def send(name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def while_saving(name: str, step: int) -> None:
        def writing(real):
            def wrapper(saver, folder, tensors, state):
                now[:] = [state["step"] if isinstance(state, dict) else state.step]
                return real(saver, folder, tensors, state)

            return wrapper

        def save_file(real):
            def wrapper(tensors, path, *arguments):
                real(tensors, path, *arguments)
                if now and now[0] >= step and not done:
                    done.append(step)
                    send(name)

            return wrapper

        now, done = [], []
        replace(saving.Saver, "_write", writing)
        replace(checkpoint, "save_file", save_file)

    def while_starting(name: str, part: int) -> None:
        parts = ("find_checkpoint", "load_data", "build_model", "build_optimizer", "open_run")

        def building(real):
            def wrapper(trainer):
                real(trainer)
                send(name)

            return wrapper

        replace(train.Trainer, parts[part], building)

    def while_writing(name: str, number: int) -> None:
        def rename(real):
            def wrapper(part, path):
                written.append(path)
                if len(written) == number + 1:
                    send(name)
                return real(part, path)

            return wrapper

        written = []
        replace(durable, "rename", rename)

    for one in each:
        if one["when"] == "writing":
            while_writing(one["name"], one["step"])
        elif one["when"] == "starting":
            while_starting(one["name"], one["step"])
        elif one["when"] == "saving":
            while_saving(one["name"], one["step"])
        elif one["when"] == "saved":
            before_step(one["step"], lambda t, name=one["name"]: (t.saved_so_far(), send(name)))
        else:
            before_step(one["step"], lambda _, name=one["name"]: send(name))


# --------------------------------------------------------------------------------- bad numbers


def bad_loss(steps: list[int], value: str, rank: int = 0) -> None:
    """The loss of these steps (the first is 1) is no number, on one rank: nan, by which all
    gradients are, or inf, with gradients that are finite."""
    import torch

    from model import GPT

    now = []

    def step(real):
        def wrapper(trainer):
            now[:] = [trainer.state.step + 1]
            return real(trainer)

        return wrapper

    def forward(real):
        def wrapper(model, *arguments, **options):
            logits, loss = real(model, *arguments, **options)
            mine = int(os.environ.get("RANK", "0")) == rank
            if model.training and mine and now[0] in steps:
                loss = loss * torch.nan if value == "nan" else loss + torch.inf
            return logits, loss

        return wrapper

    replace(train.Trainer, "step", step)
    replace(GPT, "forward", forward)


def watch_parameters(file: str) -> None:
    """Writes what the parameters and the optimizer's moments are before and after every step:
    a line of JSON, [step, before, after]."""

    def digest(trainer) -> str:
        found = hashlib.sha256()
        for parameter in trainer.model.parameters():
            state = trainer.optimizer.state.get(parameter, {})
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()

    def wrap(real):
        def wrapper(trainer):
            before = digest(trainer)
            try:
                return real(trainer)
            finally:
                line = json.dumps([trainer.state.step, before, digest(trainer)])
                path = Path(f"{file}{os.environ.get('RANK', '')}")
                with open(path, "a") as opened:
                    opened.write(line + "\n")

        return wrapper

    replace(train.Trainer, "step", wrap)


# ------------------------------------------------------------------------------------- meeting


def wait_at(step: int, file: str) -> None:
    """Stands still before a step until a file is there, and says so in another."""

    def wait(_):
        Path(f"{file}.reached").touch()
        while not os.path.exists(file):
            threading.Event().wait(0.002)

    before_step(step, wait)


FAULTS = {
    "crash": Operations,
    "failing": failing,
    "little_room": little_room,
    "full_disk": full_disk,
    "shell": shell,
    "signals": signals,
    "bad_loss": bad_loss,
    "watch_parameters": watch_parameters,
    "wait_at": wait_at,
}
