"""Processor, commit and package versions, which are published with measurements."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

from training.config.yaml_files import REPOSITORY

PACKAGES = ("torch", "numpy", "tiktoken", "gigatoken")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict:
    """Returns the number of cores, the processor, the commit and the versions of packages."""
    linux = hasattr(os, "sched_getaffinity")
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return {
        "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count(),
        "processor": models[0] if models else platform.machine(),
        "commit": git(REPOSITORY, "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def git(folder: Path, *arguments: str) -> str:
    """Returns the output of a git command in a folder; "" without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
