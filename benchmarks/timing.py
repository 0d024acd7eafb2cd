"""Interleaved timing and provenance of results, for benchmarks/training.py and generate.py."""

import datetime
import shlex
import sys
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from clearhead.config.yaml_files import REPOSITORY
from clearhead.output.machine import git, machine

T = TypeVar("T")  # seconds of a call, or of its parts


def interleave(work: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Returns the seconds that each call returns, by name. Every round runs all calls: A B C, then
    C B A. So changes in the speed of the machine affect all of them."""
    seconds: dict[str, list[T]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: -1 if number % 2 else 1]:
            seconds[name].append(work[name]())
    return seconds


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
