"""Memory of a device: how much this process may use, how much is free, how much it has used."""

import math
import os
import platform
import re
import sys
from pathlib import Path

import torch

from clearhead.parallel import launch

try:
    import resource
except ImportError:  # Windows
    resource = None

CGROUP = Path("/sys/fs/cgroup")  # limits of a container
ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch; both are read


def memory_of(device: torch.device) -> float:
    """Returns the bytes of device memory that this process may use; infinity if unknown. On a GPU,
    these are the free memory and what torch has reserved: other processes may use the rest."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    machine = math.inf
    if hasattr(os, "sysconf"):  # not on Windows
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _container_limit()) / launch.local_ranks()


def use_expandable_segments() -> None:
    """Makes torch extend segments of GPU memory instead of adding others, unless the user has
    configured its allocator. Call it before CUDA is initialized, which reads the setting.

    For FSDP, whose parameters and gradients of many sizes leave gaps between them. A single process
    and DDP gain little, and they also run where torch cannot extend segments: in Linux on Windows
    (WSL), on virtual GPUs, on boards with a GPU.
    """
    is_native = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if is_native and not any(name in os.environ for name in ALLOC_CONF):
        os.environ[ALLOC_CONF[0]] = "expandable_segments:True"


def available_memory() -> float:
    """Returns the bytes of free memory of the machine; 0 if unknown."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:  # not Linux
        return 0
    spare = 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)[1])
    limit = _container_limit()
    if not math.isfinite(limit):
        return spare
    used = int((CGROUP / "memory.current").read_text())
    statistics = (CGROUP / "memory.stat").read_text()
    # The page cache is freed on demand, also the active part, such as a checkpoint that was read.
    files = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)", statistics, re.M)))
    return min(spare, limit - used + files)


def free_pinned_memory() -> None:
    """Frees the pinned memory that torch keeps after copies from and to a GPU: a later run of this
    process, of a sweep or in a notebook, checks the available memory. No effect in torch 2.11."""
    if torch.cuda.is_initialized() and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def _container_limit() -> float:
    """Returns the memory limit of the container in bytes; infinity without a limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # ValueError: "max"
        return math.inf


def peak_memory() -> int | None:
    """Returns the peak bytes of this process: reserved by torch on a GPU, else resident; None if
    unknown."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    if resource is None:
        return None
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found * (1 if sys.platform == "darwin" else 1024)
