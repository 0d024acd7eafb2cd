"""scripts/prepare_data.py, interrupted, killed, on a full disk, or started twice: the same command
resumes it, and finished shards are kept.

CAMPAIGN_KILLS=20 kills it that often at random moments too.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import NO_NETWORK, REPOSITORY
from helpers.refusals import printed_keys
from helpers.texts import (
    check_kept,
    check_manifest,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    prepare,
    write_collection,
    write_source,
)

from scripts.prepare_data import main

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "0"))
PATIENCE = 60  # seconds until a test fails that waits

ARGUMENTS = ["data.path=held", "out=out", "shard_tokens=400", "data.tokenizer=byte"]
TEXTS = [("txt", [f"Text {n}, some words of it. " * 50]) for n in range(6)]  # six tasks


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, out, err) of the command, run in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


@pytest.fixture
def start(tmp_path):
    """start(*arguments) -> the command as a process that is running, in a process group of its
    own. hook: code that each of its processes runs first."""
    started = []
    write_collection(tmp_path / "held", TEXTS)

    def run(*arguments, hook=""):
        # pytest itself may run with SIGINT ignored, as background processes do.
        start = (
            "import os, runpy, signal, sys, time\n"
            f"runpy.run_path({str(NO_NETWORK / 'sitecustomize.py')!r})\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        )
        write_source(tmp_path / "hook" / "sitecustomize.py", [start + hook])
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)}
        env |= {"PYTHONPATH": f"{tmp_path / 'hook'}{os.pathsep}{REPOSITORY}"}
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.prepare_data", *ARGUMENTS, "workers=2", *arguments],
            cwd=tmp_path,
            env=env | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in group_of(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def group_of(process: subprocess.Popen) -> list[int]:
    """The processes of a command that are running."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                state, _, group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
                if int(group) == process.pid and state != "Z":
                    found.append(int(entry.name))
    return found


def workers_of(process: subprocess.Popen) -> list[int]:
    group = group_of(process)
    return [pid for pid in group if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until(happens, process: subprocess.Popen | None = None) -> None:
    """Waits for something that is certain to happen while the process is running."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


# The first task is finished; everything else waits until a file is removed.
HOLD = """
real = os.fsync
def fsync(file):
    path = os.readlink(f"/proc/self/fd/{file}")
    first = os.path.basename(path).startswith(("shard_00000", "00000", "plan"))
    free = first or os.path.isdir(path)
    while not free and os.path.exists("hold"):
        time.sleep(0.005)
    real(file)
os.fsync = fsync
"""


@pytest.fixture
def held(start, tmp_path):
    """held(...) -> a process of which one task of six is finished, and the others wait."""

    def run(*arguments):
        (tmp_path / "hold").touch()
        process = start(*arguments, hook=HOLD)
        wait_until(lambda: finished_shards(tmp_path / "out"), process)
        return process

    return run


@pytest.fixture
def resumed(here, tmp_path):
    """resumed() -> the same command finishes what was stopped, and keeps what was finished."""

    def run():
        kept = finished_shards(tmp_path / "out")
        code, _, errors = here(*ARGUMENTS)
        assert (code, errors) == (0, "")
        check_kept(tmp_path / "out", kept)
        check_finished(tmp_path / "out")
        return kept

    return run


def check_finished(out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    check_manifest(out, manifest, "byte", 400)
    assert ids_of(out) == expected_ids(in_order(TEXTS), "byte")


# ----------------------------------------------------------------------------------------- stopped


def test_killed_before_each_file_operation(here, tmp_path, monkeypatch):
    """A forked process ends there as if by SIGKILL: without any handler or cleanup."""
    texts = write_collection(tmp_path / "texts", TEXTS[:2])
    prepare(texts, tmp_path / "whole", tokenizer="byte", shard_tokens=700)
    expected = files_of(tmp_path / "whole")
    arguments = [f"data.path={texts}", "data.tokenizer=byte", "shard_tokens=700"]
    real = {name: getattr(os, name) for name in ("replace", "fsync", "mkdir", "unlink", "rmdir")}

    def end_before(number: int) -> None:
        """Ends the process before this one of its file operations."""
        left = itertools.count(number, -1)

        def operation(name, *args, **kwargs):
            if next(left) == 0:
                os._exit(9)
            return None if name == "fsync" else real[name](*args, **kwargs)

        for name in real:
            setattr(os, name, functools.partial(operation, name))

    for number in itertools.count():
        out, code = tmp_path / f"out{number}", 1
        pid = os.fork()
        if pid == 0:
            try:
                end_before(number)
                prepare(texts, out, tokenizer="byte", shard_tokens=700)
                code = 0
            finally:
                os._exit(code)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended in (0, 9), number
        kept = finished_shards(out)
        code, _, errors = here(*arguments, f"out={out.name}")
        assert (code, errors) == (0, ""), number
        check_kept(out, kept)
        assert files_of(out) == expected, number
        if ended == 0:
            break
    assert number > 30


def test_killed_main_process(held, resumed, tmp_path):
    """SIGKILL for the main process only. Its workers end, though nothing tells them to, and the
    same command can be started at once."""
    process = held()
    process.kill()
    process.wait()
    assert resumed()
    wait_until(lambda: not group_of(process))


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment(start, resumed, number):
    process = start()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(4 * random.Random(number).random())
    process.kill()
    process.wait()
    resumed()


def ended_by(process, number: int, group: bool) -> tuple[int, str]:
    """Sends a signal and waits for the end of all processes; (exit code, stderr)."""
    (os.killpg if group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not group_of(process))
    return process.returncode, errors


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["Ctrl-C in a terminal", "SIGTERM", "SIGTERM for all"],
)
def test_stopped_by_a_signal(held, resumed, number, group):
    """No process is left, no traceback is printed, and the same command resumes."""
    code, errors = ended_by(held(), number, group)
    if number == signal.SIGINT:
        assert (code, errors.count("\n")) == (130, 1)
    else:
        assert code in (143, -signal.SIGTERM)
    assert "Traceback" not in errors
    assert resumed()


def test_interrupt_while_the_workers_start(start, tmp_path):
    """SIGINT for the workers only, before anything of the program is imported, has no effect."""
    hook = (
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        "    open(f'hook/begun-{os.getpid()}', 'w').close()\n"
        "    while not os.path.exists('go'):\n"
        "        time.sleep(0.005)\n"
    )
    process = start(hook=hook)
    wait_until(lambda: len(list(tmp_path.glob("hook/begun-*"))) == 2, process)
    for path in tmp_path.glob("hook/begun-*"):
        with contextlib.suppress(ProcessLookupError):  # where one ends, the other is stopped
            os.kill(int(path.name.partition("-")[2]), signal.SIGINT)
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    check_finished(tmp_path / "out")


def test_killed_worker(held, resumed):
    """As the kernel does when memory runs out: one line, and no process is left."""
    process = held()
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed_keys(errors)) == (4, ["workers"])
    wait_until(lambda: not group_of(process))
    assert resumed()


def test_two_at_the_same_time(held, here, tmp_path):
    """The same part and another division are refused; another part is not. An interrupt of the
    workers alone has no effect."""
    process = held("part=1/2")
    for pid in workers_of(process):
        os.kill(pid, signal.SIGINT)
    before = finished_shards(tmp_path / "out")
    for part in ("1/2", "1/1", "2/3"):
        code, _, errors = here(*ARGUMENTS, f"part={part}")
        assert (code, printed_keys(errors)) == (3, ["out"]), part
    code, out, errors = here(*ARGUMENTS, "part=2/2")
    assert (code, errors) == (0, "")
    assert re.findall(r"\d+", out.splitlines()[-1]) == ["2", "2", "2"]  # two tasks are left
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    assert before
    check_finished(tmp_path / "out")


def test_full_disk(here, tmp_path):
    """A limit on the size of files stands for the disk. The first task stays below it."""
    collection = [("txt", ["Short. " * 6000]), ("txt", ["A text of some length. " * 9000])]
    write_collection(tmp_path / "web", collection)
    arguments = ["data.path=web", "out=out", "data.tokenizer=byte", "shard_tokens=60000"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, _, errors = here(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, printed_keys(errors)) == (4, ["out"])
    assert os.strerror(errno.EFBIG) in errors
    kept = finished_shards(tmp_path / "out")
    assert kept
    assert not list((tmp_path / "out").glob("*.part-*"))
    assert here(*arguments)[0] == 0
    check_kept(tmp_path / "out", kept)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    check_manifest(tmp_path / "out", manifest, "byte", 60_000)
    assert ids_of(tmp_path / "out") == expected_ids(collection, "byte")


def test_moved_texts_are_the_same_texts(here, tmp_path):
    write_collection(tmp_path / "held", TEXTS)
    out = tmp_path / "out"
    assert here(*ARGUMENTS, "part=1/2")[0] == 0
    kept = finished_shards(out)
    (tmp_path / "held").rename(tmp_path / "b")
    assert here(*ARGUMENTS, "data.path=b")[0] == 0
    check_kept(out, kept)
    check_finished(out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (tmp_path / "b").rename(tmp_path / "c")
    assert here(*ARGUMENTS, "data.path=c/*/*.txt")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
