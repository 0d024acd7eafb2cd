"""How the benchmarks measure time, and the origin of their results."""

import datetime
import shlex
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from clearhead.config.yaml_files import REPOSITORY
from clearhead.parallel.hardware import git, machine

Work = dict[str, Callable[[], object]]


def interleave(
    work: Work,
    rounds: int,
    device: torch.device,
    calls: int = 1,
    before: Callable[[str], object] | None = None,
) -> dict[str, list[float]]:
    """Returns the mean seconds per call in each round, by name.

    Every round runs all: A B C, then C B A. So changes in the speed of the machine affect all of
    them. before: called with the name when its turn begins; with it, the first call of a turn is
    not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: -1 if number % 2 else 1]:
            if before:
                before(name)
                work[name]()
            synchronize(device)
            started = time.perf_counter()
            for _ in range(calls):
                work[name]()
            synchronize(device)
            seconds[name].append((time.perf_counter() - started) / calls)
    return seconds


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def speedup(own: list[float], other: list[float]) -> dict[str, float]:
    """Returns the speedup of `own` over `other`: median, minimum ("least") and maximum ("most") of
    the ratios within each round."""
    ratios = [theirs / ours for ours, theirs in zip(own, other, strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


def show_speedup(found: dict[str, float]) -> str:
    return "{median:.2f} ({least:.2f}-{most:.2f})".format(**found)


def origin(module: str, device: torch.device, packages: tuple[str, ...]) -> dict:
    """Returns command, date, commit, hardware and versions. Without git or a repository, the commit
    is "" and uncommitted_changes is None."""
    known = machine(packages)
    changes = bool(git(REPOSITORY, "status", "--porcelain"))
    found = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **known,
        "uncommitted_changes": changes if known["commit"] else None,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
