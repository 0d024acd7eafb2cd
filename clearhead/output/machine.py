"""Processor, commit and package versions: published with measurements, recorded by every run."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from clearhead.files import REPOSITORY
from clearhead.parallel.launch import launch_command

PACKAGES = ("numpy", "tiktoken", "gigatoken")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict:
    """Returns the number of cores, the processor, the system, the commit and the versions of
    Python, torch and packages.

    torch: with its build, such as 2.13.0+cu130, which the version of the package may lack. cuda:
    the CUDA version of that build; None for a CPU build.
    """
    import torch

    linux = hasattr(os, "sched_getaffinity")
    return {
        "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count(),
        "processor": processor(),
        "system": platform.platform(),
        "commit": git(REPOSITORY, "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: package_version(name) for name in packages},
    }


def processor() -> str:
    """Returns the name of the processor. In a virtual machine the name may be the same for several
    generations, but family and model differ."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    keys = ("model name", "cpu family", "model")
    found = [re.findall(rf"^{key}\s*: (.+)", text, re.MULTILINE) for key in keys]
    if not all(found):
        return platform.processor() if sys.platform == "win32" else platform.machine()
    return "{} (family {}, model {})".format(*(values[0] for values in found))


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(device: str, ranks: int) -> dict:
    """Returns what a run records when it starts: time, command line, commit, device, versions.

    clean: whether the tracked files are those of the commit; None without git. device: such as
    cuda:0.
    """
    import torch

    known = machine((*PACKAGES, "hydra-core", "wandb"))
    changes = git(REPOSITORY, "status", "--porcelain", "--untracked-files=no")
    kind = device.partition(":")[0]
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([*launch_command(), *sys.argv]),
        "clean": not changes if known["commit"] else None,
        "device": name,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        **known,
    }


def git(folder: Path, *arguments: str) -> str:
    """Returns the output of a git command in a folder; "" without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True)
    except OSError:
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
