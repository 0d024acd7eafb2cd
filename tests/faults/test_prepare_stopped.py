"""scripts/prepare_data.py, stopped, killed, out of room, given twice: the same command goes on, and
what was finished stays as it was.

CAMPAIGN_KILLS=20 before it kills that often.
"""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import NO_NETWORK, REPOSITORY
from helpers.refusals import check_refusal
from helpers.texts import (
    SMALL,
    check_kept,
    check_manifest,
    every_kind,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    write_collection,
    write_source,
)

from scripts.prepare_data import main

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "6"))
PATIENCE = 60  # seconds until a test gives up waiting; nothing is expected to take so long


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, out, err) of the command, run in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return every_kind(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def start(tmp_path):
    """start(*arguments) -> the command as a process that goes on, with a group of its own."""
    started = []

    def run(*arguments, path=(), **options):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        path = [*path, NO_NETWORK, REPOSITORY]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
        }
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.prepare_data", *map(str, arguments)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in group_of(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def group_of(process: subprocess.Popen) -> list[int]:
    """The processes that a command started, itself too, as far as they live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
                continue
            if int(group) == process.pid and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(happens, process: subprocess.Popen | None = None) -> None:
    """Waits for something that is certain to come; the process has to be alive when it does."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ------------------------------------------------------------------------------ stopped and gone on


def test_killed_at_any_moment_it_goes_on_to_the_same_end(start, tmp_path, texts):
    """SIGKILL for the main process only; the command is given again at once, while its workers may
    still notice that they are orphans."""
    log = open(tmp_path / "log", "w")  # noqa: SIM115 closed below; pipes would be waited for

    def begin(out):
        arguments = [f"data.path={texts.folder}", f"out={out}", SMALL, "engine=tiktoken"]
        return start(*arguments, "workers=2", stdout=log, stderr=log)

    begun = time.monotonic()
    assert begin("whole").wait(PATIENCE) == 0
    duration = time.monotonic() - begun
    expected = files_of(tmp_path / "whole")

    chance = random.Random(20)
    moments = [(n + chance.random()) / KILLS * duration for n in range(KILLS)]
    chance.shuffle(moments)
    kept = attempts = completed = 0
    while moments:
        attempts += 1
        assert attempts < 10 * KILLS
        out = tmp_path / f"out{completed}"
        before = finished_shards(out)
        kept += len(before)
        process, begun = begin(out.name), time.monotonic()
        try:
            code = process.wait(moments[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            moments.pop()
        else:
            assert code == 0, (tmp_path / "log").read_text()
            assert files_of(out) == expected
            completed += 1
            moments[-1] = chance.random() * (time.monotonic() - begun)  # else waited for in vain
        check_kept(out, before)
    out = tmp_path / f"out{completed}"
    before = finished_shards(out)
    assert begin(out.name).wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    check_kept(out, before)
    assert files_of(out) == expected
    log.close()
    print(f"{KILLS} kills over {duration:.1f} s each, {attempts} attempts, {kept} shards kept")


# At the start of every process of a preparation: the first task goes through, all else waits for a
# file to go away. So a test finds the preparation in its midst for as long as it likes.
HOLD = """
import os, runpy, time
runpy.run_path({no_network!r})
real = os.fsync
def fsync(file):
    path = os.readlink(f"/proc/self/fd/{{file}}")
    first = os.path.basename(path).startswith(("shard_00000", "00000", "plan"))
    free = first or os.path.isdir(path)
    while not free and os.path.exists({hold!r}):
        time.sleep(0.005)
    real(file)
os.fsync = fsync
"""
HELD = ["data.path=held", "out=out", "shard_tokens=400", "engine=tiktoken"]
HELD_TEXTS = [("txt", [f"Text {n}, some words of it. " * 50]) for n in range(6)]


@pytest.fixture
def held(start, tmp_path):
    """held(...) -> a process of which one task of six is done, and more not until `let_go`."""
    write_collection(tmp_path / "held", HELD_TEXTS)
    values = {"no_network": str(NO_NETWORK / "sitecustomize.py"), "hold": str(tmp_path / "hold")}
    write_source(tmp_path / "hook" / "sitecustomize.py", [HOLD.format(**values)])
    (tmp_path / "hold").touch()

    def run(*arguments):
        process = start(*HELD, "workers=2", *arguments, path=[tmp_path / "hook"])
        wait_until(lambda: finished_shards(tmp_path / "out"), process)
        return process

    return run


@pytest.fixture
def let_go(tmp_path):
    """let_go(process) -> its exit code, stdout and stderr, when nothing holds it any more."""

    def run(process):
        (tmp_path / "hold").unlink()
        output = process.communicate(timeout=PATIENCE)
        return process.returncode, *output

    return run


def check_goes_on(command, out: Path, *arguments) -> None:
    """The same command finishes what was stopped, and keeps what was finished."""
    kept = finished_shards(out)
    assert kept
    done = command("scripts.prepare_data", *HELD, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("going on: ")
    check_kept(out, kept)
    manifest = json.loads((out / "manifest.json").read_text())
    check_manifest(out, manifest, "gpt2", 400)
    assert ids_of(out) == expected_ids(in_order(HELD_TEXTS))


def stopped_by(process, number: int, group: bool = False) -> tuple[int, str]:
    """Sends a signal and waits for the end, of orphans too; (exit code, stderr)."""
    (os.killpg if group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not group_of(process))
    return process.returncode, errors


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_how_to_go_on(held, command, tmp_path, workers):
    """A terminal sends it to the whole group."""
    code, errors = stopped_by(held(f"workers={workers}"), signal.SIGINT, group=True)
    assert (code, errors) == (130, "stopped; the same command goes on from here\n")
    check_goes_on(command, tmp_path / "out", f"workers={workers}")


def test_ctrl_c_is_not_the_workers_affair(held, let_go, tmp_path):
    process = held()
    for pid in group_of(process):
        if b"spawn_main" in command_line(pid):
            os.kill(pid, signal.SIGINT)
    code, _, errors = let_go(process)
    assert (code, errors) == (0, "")
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


def test_ctrl_c_while_the_workers_begin(start, tmp_path):
    """Holds the workers while they are starting, before anything of ours is imported."""
    write_collection(tmp_path / "held", HELD_TEXTS)
    hook = (
        "import os, runpy, sys, time\n"
        f"runpy.run_path({str(NO_NETWORK / 'sitecustomize.py')!r})\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        f"    open(f'{tmp_path}/hook/begun-{{os.getpid()}}', 'w').close()\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        time.sleep(0.005)\n"
    )
    write_source(tmp_path / "hook" / "sitecustomize.py", [hook])
    process = start(*HELD, "workers=2", path=[tmp_path / "hook"])
    wait_until(lambda: len(list(tmp_path.glob("hook/begun-*"))) == 2, process)
    for path in tmp_path.glob("hook/begun-*"):
        with contextlib.suppress(ProcessLookupError):  # where one dies, the other is stopped
            os.kill(int(path.name.partition("-")[2]), signal.SIGINT)
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")  # as the main process was not asked to stop


@pytest.mark.parametrize("group", [False, True])
def test_sigterm_leaves_no_orphans(held, command, tmp_path, group):
    code, errors = stopped_by(held(), signal.SIGTERM, group)
    assert code in (143, -signal.SIGTERM)
    assert "Traceback" not in errors
    check_goes_on(command, tmp_path / "out")


def test_a_worker_that_is_killed_ends_the_command_in_one_line(held, command, tmp_path):
    """As the kernel does when memory runs out."""
    process = held()
    workers = [p for p in group_of(process) if b"spawn_main" in command_line(p)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors.count("\n")) == (4, 1)
    wait_until(lambda: not group_of(process))
    check_goes_on(command, tmp_path / "out")


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_full_disk_ends_it_in_one_line_and_it_goes_on(start, tmp_path):
    """A limit on the size of files stands for the disk; the first task stays below it."""
    collection = [("txt", ["Short. " * 6000]), ("txt", ["A text of some length. " * 9000])]
    write_collection(tmp_path / "web", collection)
    base = ["data.path=web", "out=out", "data.tokenizer=byte", "shard_tokens=60000", "workers=1"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(*base, preexec_fn=limit)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4
    check_refusal(errors, "out=out", "cannot be written (File too large)", "the same command goes")
    kept = finished_shards(tmp_path / "out")
    assert list(kept) == ["shard_00000_00.bin"]
    assert start(*base).wait(PATIENCE) == 0
    check_kept(tmp_path / "out", kept)
    assert ids_of(tmp_path / "out") == expected_ids(collection, "byte")
    assert not list((tmp_path / "out").glob("*.part-*"))


def test_two_at_the_same_time_are_refused(held, let_go, command, tmp_path):
    first = held()
    before = finished_shards(tmp_path / "out")
    second = command("scripts.prepare_data", *HELD, "workers=2")
    assert second.returncode == 3
    check_refusal(second.stderr, "out=out", "is being prepared by another process", "wait for it")
    check_kept(tmp_path / "out", before)
    code, told, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert told.splitlines()[-1] == "train on them: python train.py data=shards data.path=out"
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


@pytest.mark.parametrize("part", ["1/1", "2/3"])
def test_another_division_at_the_same_time_is_refused(held, let_go, command, part):
    first = held("part=1/2")
    second = command("scripts.prepare_data", *HELD, f"part={part}")
    code, _, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert second.returncode == 3
    check_refusal(second.stderr, "out=out", "is being prepared by another process", "wait for it")


def test_the_other_part_at_the_same_time_is_not(held, let_go, command, tmp_path):
    first = held("part=1/2")
    second = command("scripts.prepare_data", *HELD, "workers=2", "part=2/2")
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout.splitlines()[-1] == "part 2/2 is done; 2 tasks of other parts are not yet"
    code, told, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert told.splitlines()[-1] == "train on them: python train.py data=shards data.path=out"
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


def test_stopped_behind_the_manifest(here, tmp_path, monkeypatch):
    path = write_source(tmp_path / "a.txt", ["Some words."])
    with monkeypatch.context() as patch:

        def stop(*_args, **_kwargs):
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", stop)
        assert here(f"data.path={path}", "out=out")[0] == 130
    assert (tmp_path / "out" / "manifest.json").exists()
    code, out, _ = here(f"data.path={path}", "out=out")
    assert code == 0
    assert out.startswith("out is complete already\n")
    assert not (tmp_path / "out" / "preparing").exists()


def test_stopped_while_the_manifest_is_written(here, tmp_path, monkeypatch):
    path = write_source(tmp_path / "a.txt", ["Some words."])
    real = os.replace
    with monkeypatch.context() as patch:

        def stop(source, target):
            if Path(target).name == "manifest.json":
                raise KeyboardInterrupt
            real(source, target)

        patch.setattr(os, "replace", stop)
        patch.setattr(os, "getpid", lambda: 7)  # of another process, then
        assert here(f"data.path={path}", "out=out")[0] == 130
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert here(f"data.path={path}", "out=out")[0] == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    check_manifest(tmp_path / "out", manifest, "gpt2", 10**8)


def test_moved_texts_are_the_same_texts(here, tmp_path):
    path = write_source(tmp_path / "a" / "a.txt", ["Some words of a text. " * 20])
    assert here(f"data.path={path}", "out=out", "shard_tokens=30", "part=1/2")[0] == 0
    path.parent.rename(tmp_path / "b")
    code, out, _ = here(f"data.path={tmp_path}/b", "out=out", "shard_tokens=30")
    assert code == 0
    assert out.startswith("going on: ")
    (tmp_path / "b").rename(tmp_path / "c")
    assert "complete already\n" in here("data.path=c/*.txt", "out=out", "shard_tokens=30")[1]
