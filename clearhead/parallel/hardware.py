"""The machine of this process: memory and peak FLOP/s of its devices; processor, commit and package
versions, which are published with measurements and recorded by every run.
"""

import contextlib
import ctypes
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from clearhead.files import REPOSITORY
from clearhead.parallel.launch import launch_command, local_ranks
from clearhead.tokens.encoding import available_cores

try:
    import resource
except ImportError:  # Windows
    resource = None

CGROUP = Path("/sys/fs/cgroup")  # limits of a container
ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of torch; both are read
PACKAGES = ("numpy", "tiktoken")
TASKS = Path("/proc/self/task")  # a folder for each thread of this process, on Linux
# Without other programs, the threads of a training get 0.98 of the time in which they could run;
# two threads and an endless loop on two cores get 0.67.
MIN_SHARE = 0.7

# ------------------------------------------------------------------------ memory of a device


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
    return min(machine, _container_limit()) / local_ranks()


def use_expandable_segments() -> None:
    """Makes torch extend segments of GPU memory instead of adding others, unless the user has
    configured its allocator. For FSDP, whose parameters and gradients of many sizes leave gaps.
    Call it before CUDA is initialized, which reads the setting."""
    if not any(name in os.environ for name in ALLOC_CONF):
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


def keep_freed_memory() -> None:
    """Configures malloc to keep freed memory instead of returning it to the system. A step on a CPU
    allocates and frees gigabytes of activations. By default glibc maps each large tensor again, and
    the page faults take a third of the step (docs/results.md)."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


# ------------------------------------------------------------------------------- busy cores


def thread_times() -> tuple[Counter[str], Counter[str]]:
    """Returns of each thread of this process the nanoseconds in which it has run, and in which it
    could run but waited for a core (proc(5), schedstat); nothing outside of Linux."""
    ran, waited = Counter(), Counter()
    for file in TASKS.glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            times = file.read_text(encoding="ascii").split()
            ran[file.parent.name], waited[file.parent.name] = int(times[0]), int(times[1])
    return ran, waited


class CoreTime:
    """Finds out whether other programs, or the CPU limit of a container, slow this process down.

    threads: of its operations.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self.seconds = 20.0  # between two measurements; ten times as many after each line
        self.since, self.before = time.monotonic(), thread_times()

    def line(self) -> str:
        """Returns a line for the user if the threads have waited for cores since the last
        measurement; "" if not, or if there is no new measurement."""
        elapsed = time.monotonic() - self.since
        if elapsed < self.seconds:
            return ""
        before, self.before = self.before, thread_times()
        self.since += elapsed
        ran, waited = ((n - o).total() / 1e9 for n, o in zip(self.before, before, strict=True))
        cores = min(self.threads, available_cores())
        # Threads of this process that wait for each other use all cores: no other program does.
        if ran >= MIN_SHARE * min(ran + waited, cores * elapsed):
            return ""
        self.seconds *= 10
        cause = "other programs, or a container's limit, use the cores"
        text = f"note: {cause}: training got {ran / (ran + waited):.0%} of the CPU time it needed"
        return text + "; trainer.threads=1 may be faster" * (self.threads > 1)


# -------------------------------------------------------------------------------- peak FLOP/s


class Peak(NamedTuple):
    """Peak FLOP/s of a device, without sparsity."""

    half: float  # matrix products in bf16 and fp16 with sums in fp32, as in PyTorch
    fp32: float  # without TF32; training does not use TF32


# By the name that the driver reports, without NVIDIA, Tesla and GeForce: a pattern for the complete
# name. A name with another suffix is another device: RTX 4090 D, RTX 4090 Laptop GPU, or a MIG
# slice, "H100 80GB HBM3 MIG 1g.10gb". Data sheets often give the value with sparsity, which is
# twice as large. On GeForce cards, sums in fp32 halve the speed of fp16.
PEAKS = {
    # Data sheets of GB300 NVL72, GB200 NVL72, HGX B300 and HGX B200, divided by their GPUs.
    r"GB[23]00": Peak(2500e12, 80e12),
    r"B[23]00( SXM6 AC)?": Peak(2250e12, 75e12),
    # Data sheets of H200, GH200, H100 (SXM, NVL) and, in its first edition, H100 PCIe.
    r"H200|GH200 \w+( HBM3e)?|H100 80GB HBM3": Peak(989e12, 67e12),
    r"H[12]00 NVL": Peak(835e12, 60e12),
    r"H100 PCIe": Peak(756e12, 51e12),
    r"H20(-3e)?": Peak(148e12, 44e12),
    # Data sheets of A100, A10 and A10G (of AWS).
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": Peak(312e12, 19.5e12),
    r"A10": Peak(125e12, 31.2e12),
    r"A10G": Peak(70e12, 35e12),
    # White papers "NVIDIA Ampere GA102", "NVIDIA Ada" (GeForce and professional) and "NVIDIA RTX
    # Blackwell"; data sheets of L40S and L4. 3060, 4070 and 4060 Ti: cores x 2 x boost clock, and
    # twice that in half precision, which gives the values of the white papers for larger cards.
    r"RTX A6000": Peak(154.8e12, 38.7e12),
    r"RTX 3090": Peak(71e12, 35.6e12),
    r"RTX 3060": Peak(25.5e12, 12.7e12),
    r"L40S": Peak(362e12, 91.6e12),
    r"L4": Peak(121e12, 30.3e12),
    r"RTX 6000 Ada Generation": Peak(364e12, 91.1e12),
    r"RTX 4090": Peak(165.2e12, 82.6e12),
    r"RTX 4070": Peak(58.3e12, 29.1e12),
    r"RTX 4060 Ti": Peak(44.1e12, 22.1e12),
    r"RTX 5090": Peak(209.5e12, 104.8e12),
    # Data sheets of T4 and V100. These have fp16 and no bf16.
    r"T4": Peak(65e12, 8.1e12),
    r"V100S-PCIE-32GB": Peak(130e12, 16.4e12),
    r"V100-SXM[23]-\d+GB(-LS)?": Peak(125e12, 15.7e12),
    r"V100-PCIE-\d+GB": Peak(112e12, 14e12),
}
# Apple publishes no FLOP/s of matrix products, so a run on MPS has no MFU.


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of matrix products in this precision; None if unknown."""
    peak = peak_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return None
    return peak.fp32 if dtype == torch.float32 else peak.half


def peak_named(device_name: str) -> Peak | None:
    """Returns the peak FLOP/s of the device with this driver name; None if unknown."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device_name)
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)


# ------------------------------------------------------------------------ processor and versions


def machine(packages: tuple[str, ...] = PACKAGES) -> dict:
    """Returns the number of cores, the processor, the system, the commit and the versions of
    Python, torch and packages.

    torch: with its build, such as 2.13.0+cu130, which the version of the package may lack. cuda:
    the CUDA version of that build; None for a CPU build.
    """
    return {
        "cores": available_cores(),
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
