"""Trainings by several ranks: their settings, how tests start processes and compare runs."""

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

from helpers import NO_NETWORK, REPOSITORY, TEXT, TINY
from helpers.runs import rows

TIMEOUT = 600  # seconds until a test gives up waiting; nothing is expected to take so long
SHORT = 8  # steps of most runs
STRATEGIES = ("ddp", "fsdp")

# One process and several differ by rounding. The bias of W_key has a gradient of zero but for
# rounding, which Adam would amplify at a large rate.
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
    "trainer.keep_checkpoints=9",
    "optimizer.lr=1e-3",
    "data.path=text.txt",
    "parallel.timeout=120",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")


def write_texts(folder: Path) -> Path:
    """Texts to train on: one text, and one of short documents, whose windows are filled up."""
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
    """Of a process: no network, no account, no cache."""
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
    """start(*command, **environment) -> a process that goes on, its words in the file .log; at
    the end nothing is left of it, nor of what it started."""
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
    """The living processes that came of one, itself too, with these variables. torchrun gives each
    rank its own session, so processes are found by their environment."""
    wanted = {text.encode() for text in (f"TEST_MARK={process.log}", *variables)}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def rank_of(process: subprocess.Popen, rank: int) -> int | None:
    """The process of one rank that torchrun started, None while there is none."""
    return min(processes_of(process, f"RANK={rank}"), default=None)  # it may have started others


def wait_until(happens: Callable[[], object], *processes: subprocess.Popen) -> None:
    """Waits for something that is certain to come while these processes live."""
    deadline = time.monotonic() + TIMEOUT
    while not happens():
        for process in processes:
            assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < deadline, [process.log.read_text() for process in processes]
        time.sleep(0.005)


def wait_for_exit(process: subprocess.Popen) -> int:
    """Its exit code, once it has come to its end."""
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there after {TIMEOUT} s:\n{process.log.read_text()}")


LIBRARY_LINE = re.compile(r"\[(W|E|I|rank|Gloo)|W\d{4} |\S+\.py:\d+: \w*Warning|  \S")


def without_library_lines(text: str) -> str:
    """Without the lines that torch, gloo and Python's warnings write."""
    return "".join(line for line in text.splitlines(keepends=True) if not LIBRARY_LINE.match(line))


def values(run: Path, key: str) -> dict[int, float]:
    """One column of the log, by step."""
    return {row["step"]: row[key] for row in rows(run) if key in row}


def check_same_losses(run: Path, other: Path, after: int = 0, rel: float = 1e-5) -> None:
    """Two runs have the same losses and norms after a step, but for rounding."""
    for key, precision in [("train/loss", rel), ("val/loss", rel), ("train/grad_norm", 10 * rel)]:
        mine, theirs = values(run, key), values(other, key)
        theirs = {step: value for step, value in theirs.items() if step > after}
        assert theirs
        assert {step: mine[step] for step in mine if step > after} == pytest.approx(
            theirs, rel=precision
        ), key


def last(run: Path, step: int | None = None) -> Path:
    """A run's checkpoint."""
    return run / "checkpoints" / ("last" if step is None else f"step_{step:08d}")


def check_same_tensors(checkpoint: Path, other: Path, most: float = 1e-5) -> None:
    """Two checkpoints have the same tensors, by names, shapes and types, and about the same
    parameters."""
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


def check_same_bytes(run: Path, other: Path) -> None:
    """Two runs have the same final parameters and moments, bit for bit."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (last(run) / file).read_bytes() == (last(other) / file).read_bytes(), file
