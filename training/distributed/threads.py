"""Checks the number of threads of torch on a CPU: whether there are as many free cores.

The threads wait for each other after each operation. If one of them shares its core with another
program, all are slow: two threads on a busy machine are several times slower than one
(docs/benchmarks.md). The number is never changed automatically, because it changes the rounding and
so the results. Linux only.
"""

import math
import os
import time
from pathlib import Path

import torch

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


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


def available_cores(proc: Path = PROC, groups: Path = CONTROL_GROUPS) -> float:
    """Returns how many cores this process may use: its affinity, at most the quota of its control
    groups (v2 or v1). A container has such a quota, which torch does not read."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / "cpu" if controllers else groups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limits.append(quota(folder))
    return min(limits)


def quota(folder: Path) -> float:
    """Returns the number of cores that a control group may use; inf without a limit."""
    if (file := folder / "cpu.max").exists():
        limit, period = file.read_text().split()
    elif (file := folder / "cpu.cfs_quota_us").exists():
        limit, period = file.read_text(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return int(limit) / int(period) if limit.strip() not in ("max", "-1") else math.inf


def busy_seconds(stat: str, cores: set[int], nice: bool) -> float:
    """Returns how long these cores were busy since the start of the machine. stat: the text of
    /proc/stat. nice: also count processes of low priority, which hardly slow down the others."""
    ticks = 0
    for name, *times in map(str.split, stat.splitlines()):
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, low, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + low * nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class ThreadCheck:
    """Measures, from its creation on, how many cores other processes use.

    ranks: processes of this training on this machine. With several, the use is not measured.
    """

    def __init__(self, ranks: int = 1, proc: Path = PROC):
        self.ranks, self.proc, self.started = ranks, proc, time.monotonic()
        self.is_linux = (proc / "stat").exists()
        self.before = self._used_by_others()

    def notes(self, device: torch.device) -> list[str]:
        """Returns the notes for the user of a run on this device."""
        if device.type != "cpu" or not self.is_linux:
            return []
        used = 0.0
        if self.ranks == 1:
            used = (self._used_by_others() - self.before) / (time.monotonic() - self.started)
        note = thread_note(torch.get_num_threads(), available_cores(self.proc), used, self.ranks)
        return [note] if note else []

    def _used_by_others(self) -> float:
        """Returns the seconds that other processes have used the cores of this process."""
        if not self.is_linux:
            return 0.0
        stat, cores = (self.proc / "stat").read_text(), os.sched_getaffinity(0)
        return busy_seconds(stat, cores, nice=os.nice(0) > 0) - sum(os.times()[:4])
