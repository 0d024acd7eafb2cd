"""scripts/prepare_data.py when interrupted, killed, on a full disk, or started twice: the same
command resumes, and finished shards are kept.
"""

import contextlib
import functools
import itertools
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from helpers import NO_NETWORK, REPOSITORY
from helpers.ranks import processes_of, started, wait_for_exit, wait_until
from helpers.refusals import printed_keys, time_limit
from helpers.tally import CAMPAIGN
from helpers.texts import (
    check_kept,
    check_manifest,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    prepare,
    prepare_half,
    write_collection,
    write_source,
)

from scripts.prepare_data import main

ARGUMENTS = ["data.path=held", "out=out", "shard_tokens=400", "data.tokenizer=byte"]
TEXTS = [("txt", [f"Text {n}, some words of it. " * 50]) for n in range(6)]  # six tasks


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, stdout, stderr) of the command, run in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


# Each process runs this first. All tasks but the first wait until the file "hold" is removed, as
# does the second worker while it starts. SIGINT is enabled because pytest may ignore it, as
# background processes do.
HOOK = f"""
import os, runpy, signal, sys, time
runpy.run_path({str(NO_NETWORK / "sitecustomize.py")!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
real = os.fsync
def fsync(file):
    path = os.readlink(f"/proc/self/fd/{{file}}")
    first = os.path.basename(path).startswith(("shard_00000", "00000", "plan"))
    while not first and not os.path.isdir(path) and os.path.exists("hold"):
        time.sleep(0.005)
    real(file)
os.fsync = fsync
parent = os.getppid()
if "--multiprocessing-fork" in sys.orig_argv:
    try:
        open("first", "x").close()
    except FileExistsError:
        while os.path.exists("hold") and os.getppid() == parent:
            time.sleep(0.005)
"""


@pytest.fixture
def start(tmp_path):
    """start() -> the command in a separate process group; one task of six is finished."""
    (tmp_path / "hold").touch()
    write_collection(tmp_path / "held", TEXTS)
    hook = write_source(tmp_path / "hook" / "sitecustomize.py", [HOOK]).parent
    command = ("-m", "scripts.prepare_data", *ARGUMENTS, "workers=2")
    with started(tmp_path) as start_process:

        def run(*arguments):
            process = start_process(*command, *arguments, PYTHONPATH=f"{hook}:{REPOSITORY}")
            wait_until(lambda: finished_shards(tmp_path / "out"), process)
            return process

        yield run


@pytest.fixture
def resumed(here, tmp_path):
    """resumed() -> reruns the command, which keeps the finished tasks and does the others."""

    def run():
        out = tmp_path / "out"
        kept = finished_shards(out)
        code, _, errors = here(*ARGUMENTS)
        assert (code, errors) == (0, "")
        check_kept(out, kept)
        check_manifest(out, json.loads((out / "manifest.json").read_text()), "byte", 400)
        assert ids_of(out) == expected_ids(in_order(TEXTS), "byte")
        return kept

    return run


def test_killed_before_each_file_operation(here, tmp_path):
    """A forked process ends there without handlers or cleanup, as with SIGKILL."""
    texts = write_collection(tmp_path / "texts", TEXTS[:2])
    recipe = {"tokenizer": "byte", "shard_tokens": 700}
    prepare(texts, tmp_path / "whole", **recipe)
    expected = files_of(tmp_path / "whole")

    def end_before(number: int) -> None:
        """Ends the process before this one of its file operations."""
        left = itertools.count(number, -1)

        def operation(real, *args, **kwargs):
            if next(left) == 0:
                os._exit(9)
            return real(*args, **kwargs)

        for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, functools.partial(operation, getattr(os, name)))

    for number in range(1000):
        out = tmp_path / f"out{number}"
        if (pid := os.fork()) == 0:
            try:
                end_before(number)
                prepare(texts, out, **recipe)
                os._exit(0)
            finally:
                os._exit(1)
        with time_limit():
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        kept = finished_shards(out)
        arguments = (*ARGUMENTS, f"data.path={texts}", f"out={out.name}", "shard_tokens=700")
        code, _, errors = here(*arguments)
        assert (code, errors) == (0, ""), number
        check_kept(out, kept)
        assert files_of(out) == expected, number
        if exit_code != 9:
            break
    assert exit_code == 0
    assert number > 20


SIGNALS = [
    (signal.SIGINT, "all", {130}),  # Ctrl-C in a terminal
    (signal.SIGINT, "the workers", {0}),  # which do not get it, not even while they start
    (signal.SIGKILL, "a worker", {4}),  # as by the out-of-memory killer
]
MORE_SIGNALS = [
    (signal.SIGTERM, "main", {143, -signal.SIGTERM}),
    (signal.SIGKILL, "main", {-signal.SIGKILL}),
]


@pytest.mark.parametrize(("number", "whom", "codes"), SIGNALS + MORE_SIGNALS * CAMPAIGN)
def test_stopped_by_a_signal(start, resumed, tmp_path, number, whom, codes):
    """No process remains, no traceback is printed, and the same command resumes."""
    process = start()
    cmdlines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(process)}
    workers = [pid for pid, line in cmdlines.items() if b"spawn_main" in line]
    assert len(workers) == 2
    if whom == "all":
        os.killpg(process.pid, number)
    else:
        pids = {"main": [process.pid], "a worker": workers[:1], "the workers": workers}
        for pid in pids[whom]:
            os.kill(pid, number)
    if whom == "the workers":
        (tmp_path / "hold").unlink()
    assert wait_for_exit(process) in codes
    keys = printed_keys(process.log.read_text())
    assert whom != "a worker" or keys[-1] == "workers"
    with time_limit():
        while processes_of(process):
            time.sleep(0.005)
    assert resumed()


def test_two_at_the_same_time(start, here, resumed, tmp_path):
    """A second process is refused."""
    process = start()
    code, _, errors = here(*ARGUMENTS)
    assert (code, printed_keys(errors)) == (3, ["out"])
    (tmp_path / "hold").unlink()
    assert wait_for_exit(process) == 0
    resumed()


@contextlib.contextmanager
def limited_file_size(size: int):
    """Files of this process cannot grow above `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk(here, tmp_path):
    """Simulated by a limit on the file size, which the first task does not reach."""
    collection = [("txt", ["Short. " * 6000]), ("txt", ["A text of some length. " * 9000])]
    write_collection(tmp_path / "web", collection)
    arguments = [*ARGUMENTS, "data.path=web", "shard_tokens=60000"]
    with limited_file_size(100_000):
        code, _, errors = here(*arguments)
    assert (code, printed_keys(errors)) == (4, ["out"])
    assert finished_shards(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.part-*"))
    assert here(*arguments)[0] == 0
    assert ids_of(tmp_path / "out") == expected_ids(collection, "byte")


def test_moved_texts_are_the_same_texts(resumed, tmp_path):
    texts = write_collection(tmp_path / "b", TEXTS)
    prepare_half(texts, tmp_path / "out", shard_tokens=400, tokenizer="byte")
    (tmp_path / "b").rename(tmp_path / "held")
    assert resumed()
