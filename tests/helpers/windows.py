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


def remove_features() -> None:
    _import, _open, _fsync, _stat = builtins.__import__, os.open, os.fsync, os.stat
    _open_text, _cdll, _named = io.open, ctypes.CDLL, tempfile.NamedTemporaryFile
    _unlink = os.unlink
    shutil._use_fd_functions = False  # rmtree calls os.unlink with a path, as on Windows

    def import_module(name, *rest, **options):
        if name in MODULES and called_by_clearhead():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in NAMES and called_by_clearhead():
            return reduced[name]
        return _import(name, *rest, **options)

    def open_number(path, flags, *rest, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return _open(path, flags, *rest, **options)

    def fsync(number):
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        _fsync(number)

    def check_exists(path):
        if str(path).startswith(SYSTEM_FILES) and str(path) != os.devnull:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    def stat(path, *rest, **options):
        check_exists(path)
        return _stat(path, *rest, **options)

    def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        check_exists(file)
        if "b" not in mode and newline is None and set(mode) & set("wax"):
            newline = "\r\n"
        opened = _open_text(file, mode, buffering, encoding, errors, newline, **more)
        if not isinstance(file, int):  # another handle cannot use a locked file
            try:
                fcntl.flock(opened.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(opened.fileno(), fcntl.LOCK_UN)
            except BlockingIOError:
                opened.close()
                raise PermissionError(errno.EACCES, "Permission denied", str(file)) from None
        return opened

    def opened_paths():
        numbers = os.listdir("/proc/self/fd")
        found = [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers]
        with _open_text("/proc/self/maps") as maps:
            return found + [line.split(maxsplit=5)[5].strip() for line in maps if "/" in line]

    def unless_opened(change):
        """Returns the function with a check that no path is open or mapped in this process."""

        def changed(*paths, **options):
            for path in map(os.path.realpath, paths):
                if "/.filelock-" in path:  # filelock probes how Linux locks files
                    continue
                if any(each == path or each.startswith(f"{path}/") for each in opened_paths()):
                    raise PermissionError(errno.EACCES, "The process cannot access the file", path)
            return change(*paths, **options)

        return changed

    def symlink(source, link, *rest, **options):
        raise OSError(errno.EINVAL, "A required privilege is not held by the client", str(link))

    def cdll(name, *rest, **options):
        if name is None and called_by_clearhead():
            raise TypeError("argument of type 'NoneType' is not iterable")
        return _cdll(name, *rest, **options)

    def named_temporary_file(*arguments, **options):
        """While the file is open, its name opens nothing."""
        file = _named(*arguments, **options | {"delete": False})
        _unlink(file.name)
        return file

    os.open, os.fsync, os.stat, os.symlink = open_number, fsync, stat, symlink
    os.replace, os.rename = unless_opened(os.replace), unless_opened(os.rename)
    os.unlink = os.remove = unless_opened(os.unlink)
    tempfile.NamedTemporaryFile = named_temporary_file
    ctypes.CDLL, io.open, builtins.open = cdll, open_file, open_file
    platform.libc_ver = lambda: ("", "")
    reduced = {name: types.ModuleType(name) for name in NAMES}  # for the code of clearhead
    for name, module in reduced.items():
        vars(module).update(vars(sys.modules[name]))
        for removed in NAMES[name].split():
            delattr(module, removed)
    builtins.__import__ = import_module


def main() -> None:
    for name in LIBRARIES.split():
        __import__(name)
    sys.path.insert(0, str(REPOSITORY))
    remove_features()
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
