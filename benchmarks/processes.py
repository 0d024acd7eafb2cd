"""Runs a Python program with a time limit and records how its output grows (benchmarks/gpu.py)."""

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from clearhead.files import REPOSITORY

END_SECONDS = 45  # from SIGTERM to SIGKILL; torchrun waits 30 s for its processes
POLL_SECONDS = 0.005


@dataclass
class Finished:
    """A program that has ended. exit_code: None if it was stopped at the time limit. grown: the
    time in seconds at which the output had each size in bytes."""

    exit_code: int | None
    output: str
    grown: dict[int, float]


def run_python(arguments: str, file: Path, limit: float, environment: dict[str, str]) -> Finished:
    """Runs Python in the folder of the repository, at most `limit` seconds. file: for the output,
    because a pipe would stay open as long as a process that the program has started."""
    started, signals, grown = time.monotonic(), [signal.SIGKILL, signal.SIGTERM], {}
    words = [sys.executable, *shlex.split(arguments)]
    with file.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env=os.environ | environment,
            start_new_session=True,  # so that signals reach all its processes
        )
        try:
            while process.poll() is None:
                seconds = time.monotonic() - started
                grown.setdefault(file.stat().st_size, seconds)
                if signals and seconds > limit + END_SECONDS * (2 - len(signals)):
                    os.killpg(process.pid, signals.pop())
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # this program is interrupted
                os.killpg(process.pid, signal.SIGTERM)
    text = file.read_text(encoding="utf-8", errors="replace")
    return Finished(process.returncode if len(signals) == 2 else None, text, grown)
