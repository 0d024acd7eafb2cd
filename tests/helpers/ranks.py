"""Trainings with several ranks: settings, starting of processes, comparison of runs."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers import NO_NETWORK, REPOSITORY, TEXT, TIMEOUT, TINY
from helpers.runs import rows

SHORT = 8  # steps of most runs
STRATEGIES = ("ddp", "fsdp")

# Settings with which one process and several ranks differ only by rounding. The gradient of the
# bias of W_key is zero except for rounding, which Adam amplifies at a large learning rate.
COMPARABLE = (
    *TINY,
    "model.dropout=0",
    f"trainer.max_steps={SHORT}",
    "trainer.warmup_steps=2",
    "trainer.micro_batch_size=2",
    "trainer.grad_clip=0.5",
    "trainer.sample_tokens=0",
    "trainer.eval_every=4",
    "trainer.eval_windows=7",
    "trainer.save_every=4",
    "trainer.keep=9",
    "optimizer.lr=1e-3",
    "data.path=text.txt",
    "parallel.timeout=1000",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")


def write_texts(folder: Path) -> Path:
    """Writes a text, and a file of short documents, whose windows are padded."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    documents = [{"text": line * (1 + n % 4)} for n, line in enumerate(TEXT.splitlines())]
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (folder / "short.jsonl").write_text(lines, encoding="utf-8")
    return folder


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(**more: object) -> dict[str, str]:
    """Returns the environment of a process: no network, no W&B account, no cache."""
    path = [NO_NETWORK, REPOSITORY, REPOSITORY / "tests"]
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    fixed = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    return kept | fixed | {key: str(value) for key, value in more.items()}


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Yields start(*command, **environment), which starts a process with its output in process.log.
    At the end these processes and all their children are killed."""
    processes = []

    def start(*command: object, **more: object) -> subprocess.Popen:
        log = folder / f"log{len(processes)}"
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=folder,
                env=environment(HOME=folder, TEST_MARK=log, **more),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        process.log = log
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            for pid in processes_of(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def processes_of(process: subprocess.Popen, *variables: str) -> list[int]:
    """Returns the running processes that a process started, and itself, with these variables.
    torchrun gives each rank a session, so processes are found by their environment."""
    wanted = {text.encode() for text in (f"TEST_MARK={process.log}", *variables)}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def rank_of(process: subprocess.Popen, rank: int) -> int | None:
    """Returns the process of a rank that torchrun started; None if there is none."""
    return min(processes_of(process, f"RANK={rank}"), default=None)  # the rank may have children


def wait_until(happens: Callable[[], object], *processes: subprocess.Popen) -> None:
    """Waits until happens() is true. Fails if one of the processes ends before."""
    deadline = time.monotonic() + TIMEOUT
    while not happens():
        for process in processes:
            assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < deadline, [process.log.read_text() for process in processes]
        time.sleep(0.02)


def wait_for_exit(process: subprocess.Popen) -> int:
    """Waits until a process ends. Returns its exit code."""
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {TIMEOUT} s:\n{process.log.read_text()}")


LIBRARY_LINE = re.compile(r"\[(W|E|I|rank|Gloo)|W\d{4} |\S+\.py:\d+: \w*Warning|  \S")


def without_library_lines(text: str) -> str:
    """Returns the text without lines from torch, gloo and Python warnings."""
    return "".join(line for line in text.splitlines(keepends=True) if not LIBRARY_LINE.match(line))


def values(run: Path, key: str) -> dict[int, float]:
    """Returns one column of the log, by step."""
    return {row["step"]: row[key] for row in rows(run) if key in row}


def check_same_losses(run: Path, other: Path, after: int = 0, rel: float = 1e-5) -> None:
    """Checks that two runs have the same losses and norms after a step, except for rounding."""
    for key, precision in [("train/loss", rel), ("val/loss", rel), ("train/grad_norm", 10 * rel)]:
        mine, theirs = values(run, key), values(other, key)
        theirs = {step: value for step, value in theirs.items() if step > after}
        assert theirs
        assert {step: mine[step] for step in mine if step > after} == pytest.approx(
            theirs, rel=precision
        ), key


def last(run: Path, step: int | None = None) -> Path:
    """Returns a checkpoint of a run."""
    return run / "checkpoints" / ("last" if step is None else f"step_{step:08d}")


def check_same_tensors(checkpoint: Path, other: Path, most: float = 1e-5) -> None:
    """Checks that two checkpoints have tensors of the same names, shapes and types, and parameters
    that differ by less than `most`."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = load_file(checkpoint / file), load_file(other / file)
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (mine[name].shape, mine[name].dtype) == (tensor.shape, tensor.dtype), name
            assert mine[name].is_contiguous()
            if file.startswith("model"):
                assert float((mine[name] - tensor).abs().max()) < most, name


def runs_in(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir())


def check_same_bytes(run: Path, other: Path, step: int | None = None) -> None:
    """Checks that two runs have the same parameters and moments, bit for bit. step=None: the last
    step."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = ((last(each, step) / file).read_bytes() for each in (run, other))
        is_same = mine == theirs  # pytest would take minutes to show the difference of bytes
        assert is_same, file
