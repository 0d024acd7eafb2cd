"""What measured figures are from: processor, commit and versions of packages."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

from training.config.yaml_files import REPOSITORY

PACKAGES = ("torch", "numpy", "tiktoken", "gigatoken")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict:
    """What figures are from: processor, commit, versions."""
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
    """What git says of a folder; nothing where it is no checkout, or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()
