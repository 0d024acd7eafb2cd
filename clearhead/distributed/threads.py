"""Checks the number of threads of torch on a CPU: whether there are as many free cores.

The threads wait for each other after each operation. If one of them shares its core with another
program, all are slow: two threads on a busy machine are several times slower than one
(docs/benchmarks.md). The number is never changed automatically, because it changes the rounding and
so the results. Linux only.
"""

import contextlib
import os
import time
from pathlib import Path

import torch

STAT, QUOTA = Path("/proc/stat"), Path("/sys/fs/cgroup/cpu.max")


def thread_note(threads: int, cores: float, used: float, ranks: int = 1) -> str | None:
    """Returns a line for the user if each rank has more threads than free cores.

    cores: cores that the ranks of this machine may use. used: how many of them other processes use.
    """
    free = max(1, int((cores - used) / ranks + 0.5))
    if threads <= free:
        return None
    reason = f"{cores:g} cores are available" + (f" to {ranks} ranks" if ranks > 1 else "")
    if used >= 0.5:
        reason += f" and other processes use {used:.1f} of them"
    return f"torch uses {threads} threads, but {reason}; trainer.threads={free} is probably faster"


def available_cores() -> float:
    """Returns how many cores this process may use: its affinity, at most the quota of its container
    (cgroup v2), which torch does not read."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
        quota, period = map(int, QUOTA.read_text(encoding="ascii").split())
        cores = min(cores, quota / period)
    return cores


def busy_seconds(stat: str, cores: set[int]) -> float:
    """Returns how long these cores were busy since the start of the machine. stat: the text of
    /proc/stat. Processes of low priority do not count, because they hardly slow down the others."""
    ticks = 0
    for name, *times in map(str.split, stat.splitlines()):
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, _, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class ThreadCheck:
    """Measures, from its creation on, how many cores other processes use.

    ranks: processes of this training on this machine. With several, the use is not measured.
    """

    def __init__(self, ranks: int = 1):
        self.ranks, self.started = ranks, time.monotonic()
        self.before = used_by_others()

    def notes(self, device: torch.device) -> list[str]:
        """Returns the notes for the user of a run on this device."""
        if device.type != "cpu" or self.before is None:
            return []
        used = 0.0
        if self.ranks == 1 and (now := used_by_others()) is not None:
            used = (now - self.before) / (time.monotonic() - self.started)
        note = thread_note(torch.get_num_threads(), available_cores(), used, self.ranks)
        return [note] if note else []


def used_by_others() -> float | None:
    """Returns the seconds that other processes have used the cores of this process; None if the
    system does not tell."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not Linux
        stat, cores = STAT.read_text(encoding="ascii"), os.sched_getaffinity(0)
        return busy_seconds(stat, cores) - sum(os.times()[:4])
