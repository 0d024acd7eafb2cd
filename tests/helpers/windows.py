"""Runs commands in a process that lacks what Python on Windows lacks, as far as Linux can pretend.

    python tests/helpers/windows.py '[["train.py", "name=a"], ["scripts.evaluate", ...]]'

The output of each command ends with a line "exit CODE". sys.platform and os.name stay as they are,
because other libraries depend on them, and these libraries are imported before anything is removed.
Start it with ENVIRONMENT.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import json
import os
import platform
import runpy
import shutil
import signal  # noqa: F401 in sys.modules
import sys
import tempfile
import types
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Text files and names are ASCII without an explicit encoding; pipes are cp1252.
ENVIRONMENT = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENT |= {"PYTHONIOENCODING": "cp1252:strict"}
LIBRARIES = (
    "torch numpy hydra omegaconf pydantic yaml tiktoken gigatoken.gigatoken_rs rich.progress"
)
LIBRARIES += " safetensors.torch filelock PIL.Image torch._dynamo torch.profiler unittest.mock"
MODULES = ("resource", "fcntl", "pwd", "grp", "termios")
NAMES = {
    "os": "sysconf sched_getaffinity O_NONBLOCK O_DIRECTORY fork getuid mkfifo killpg statvfs",
    "signal": "SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGKILL pause pthread_kill",
}
SYSTEM_FILES = ("/proc", "/sys", "/dev")


def called_by_clearhead() -> bool:
    """Returns whether the caller of the caller is code of this repository."""
    file = sys._getframe(2).f_globals.get("__file__") or ""
    return file.startswith(str(REPOSITORY)) and ".venv" not in file


def denied(path: object) -> PermissionError:
    return PermissionError(errno.EACCES, "Permission denied", str(path))


def remove_modules() -> None:
    """Removes MODULES, NAMES and CDLL(None), for the code of clearhead only."""
    import_anything, load_library = builtins.__import__, ctypes.CDLL
    reduced = {name: types.ModuleType(name) for name in NAMES}
    for name, module in reduced.items():
        vars(module).update(vars(sys.modules[name]))
        for removed in NAMES[name].split():
            delattr(module, removed)

    def import_module(name, *rest, **options):
        if name in MODULES and called_by_clearhead():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in NAMES and called_by_clearhead():
            return reduced[name]
        return import_anything(name, *rest, **options)

    def cdll(name, *rest, **options):
        if name is None and called_by_clearhead():
            raise TypeError("argument of type 'NoneType' is not iterable")
        return load_library(name, *rest, **options)

    builtins.__import__, ctypes.CDLL = import_module, cdll
    platform.libc_ver = lambda: ("", "")


def restrict_descriptors() -> None:
    """os.open opens no folder. os.fsync needs a file that is open for writing."""
    open_path, flush = os.open, os.fsync

    def open_file(path, flags, *rest, **options):
        if os.path.isdir(path):
            raise denied(path)
        return open_path(path, flags, *rest, **options)

    def fsync(number):
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flush(number)

    os.open, os.fsync = open_file, fsync


def restrict_files() -> None:
    """There are no SYSTEM_FILES. Text files have the line ends of Windows. A locked file cannot be
    read. While a temporary file is open, its name opens nothing."""
    stat_path, open_path, temporary = os.stat, io.open, tempfile.NamedTemporaryFile
    unlink = os.unlink

    def check_exists(path):
        if str(path).startswith(SYSTEM_FILES) and str(path) != os.devnull:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    def stat(path, *rest, **options):
        check_exists(path)
        return stat_path(path, *rest, **options)

    def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        check_exists(file)
        if "b" not in mode and newline is None and set(mode) & set("wax"):
            newline = "\r\n"
        opened = open_path(file, mode, buffering, encoding, errors, newline, **more)
        if not isinstance(file, int):
            try:
                fcntl.flock(opened.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(opened.fileno(), fcntl.LOCK_UN)
            except BlockingIOError:
                opened.close()
                raise denied(file) from None
        return opened

    def named_temporary_file(*arguments, **options):
        file = temporary(*arguments, **options | {"delete": False})
        unlink(file.name)
        return file

    os.stat, io.open, builtins.open = stat, open_file, open_file
    tempfile.NamedTemporaryFile = named_temporary_file


def restrict_changes() -> None:
    """No open or mapped file is renamed or removed. There are no links."""
    open_text = io.open
    shutil._use_fd_functions = False  # rmtree calls os.unlink with a path, as on Windows

    def opened_paths():
        numbers = os.listdir("/proc/self/fd")
        found = [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers]
        with open_text("/proc/self/maps") as maps:
            return found + [line.split(maxsplit=5)[5].strip() for line in maps if "/" in line]

    def unless_opened(change):
        def changed(*paths, **options):
            for path in map(os.path.realpath, paths):
                if "/.filelock-" in path:  # filelock probes how Linux locks files
                    continue
                if any(each == path or each.startswith(f"{path}/") for each in opened_paths()):
                    raise denied(path)
            return change(*paths, **options)

        return changed

    def symlink(source, link, *rest, **options):
        raise OSError(errno.EINVAL, "A required privilege is not held by the client", str(link))

    os.replace, os.rename = unless_opened(os.replace), unless_opened(os.rename)
    os.unlink = os.remove = unless_opened(os.unlink)
    os.symlink = symlink


def main() -> None:
    for name in LIBRARIES.split():
        __import__(name)
    restrict_changes()
    restrict_files()
    restrict_descriptors()
    remove_modules()
    for script, *arguments in json.loads(sys.argv[1]):
        sys.argv = [script, *arguments]
        code = 0
        try:
            if script.endswith(".py"):
                runpy.run_path(str(REPOSITORY / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        except SystemExit as stopped:
            code = stopped.code or 0
        print(f"exit {code}", flush=True)


if __name__ == "__main__":
    main()
