"""The micro-batch that fits into memory: the check before a run, the search for the largest, and
the suggestion when memory has run out.

The memory of a step is estimated by formula (training/planning/memory.py).
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from errors import OutOfMemoryError
from training.config.schema import Config
from training.distributed.strategy import Strategy
from training.planning.memory import Job, estimate, fits, largest_micro_batch, num_parameters

CGROUP = Path("/sys/fs/cgroup")  # of a container: its own limits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch says that memory ran out, on any device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def out_of_memory_error(
    settings: Config, strategy: Strategy, windows: int, intact: str
) -> OutOfMemoryError:
    """The error of a step that ran out of memory, with a suggestion that keeps the batch.

    windows: of the micro-batch that did not fit. intact: the checkpoint to resume from, in words.
    """
    tokens = f"{windows} windows of {settings.data.max_length} tokens"
    reason = f"{tokens} do not fit into the memory of {strategy.device}"
    hint = _hint(settings, strategy, lambda smaller: smaller <= windows // 2)
    return OutOfMemoryError("trainer.micro_batch_size", windows, reason, f"{hint}; {intact}")


def _hint(settings: Config, strategy: Strategy, fits: Callable[[int], bool]) -> str:
    """What needs less memory: the largest micro-batch for which fits(windows) holds, else another
    setting."""
    trainer = settings.trainer
    share = trainer.batch_size // strategy.world_size
    if smaller := largest_micro_batch(share, fits):
        return (
            f"use trainer.micro_batch_size={smaller}: {share // smaller} micro-batches per step on "
            f"each device keep the batch of {trainer.batch_size}"
        )
    if not trainer.activation_checkpointing:
        return "use trainer.activation_checkpointing=true: a third more work in far less memory"
    if strategy.name != "fsdp":
        return "use parallel=fsdp on several devices, or a smaller model"
    return "use more devices, a smaller data.max_length or a smaller model"


def check_memory(settings: Config, strategy: Strategy) -> list[tuple]:
    """Problems (key, value, reason, hint), before anything is allocated: weights, gradients and
    moments, or on a CPU a step, need more memory than the device has.

    On a CPU the process would be killed without a message. On a GPU a step that does not fit ends
    with the error of `out_of_memory_error`.
    """
    trainer, limit = settings.trainer, memory_of(strategy.device)
    # Whether compile=auto compiles is not known yet; compiled, a step needs less.
    job = job_of(settings, strategy, trainer.compile is not False)
    asked = trainer.micro_batch_size
    windows = 1 if asked == "auto" else min(job.windows_per_rank, asked or job.windows_per_rank)
    parts, has = estimate(job, windows), f"and {strategy.device} has {limit / 1e9:,.1f} GB"
    states, total = 2 * parts["weights"] + parts["optimizer"], sum(parts.values())
    if states > limit:
        reason = f"weights, gradients and moments need {states / 1e9:,.1f} GB, {has}"
        parameters = f"{num_parameters(settings.model):,} parameters"
        return [("model", parameters, reason, "use a smaller model, such as model=gpt2-nano")]
    # Without the slack of the allocator, which is a guess.
    if strategy.device.type != "cpu" or total - parts["slack"] <= limit:
        return []
    tokens = f"{windows} windows of {settings.data.max_length} tokens"
    reason = f"{tokens} at a time need about {total / 1e9:,.1f} GB, {has}"
    hint = _hint(settings, strategy, lambda n: n < windows and fits(job, n, limit))
    key = "trainer.batch_size" if asked is None else "trainer.micro_batch_size"
    return [(key, trainer.batch_size if asked is None else asked, reason, hint)]


def find_micro_batch(settings: Config, strategy: Strategy, compiled: bool) -> int:
    """trainer.micro_batch_size=auto: the largest that is estimated to fit on all ranks, in windows,
    of those that divide a rank's share evenly; 1 when none is."""
    job, limit = job_of(settings, strategy, compiled), memory_of(strategy.device)
    found = largest_micro_batch(job.windows_per_rank, lambda n: fits(job, n, limit)) or 1
    return -strategy.all_reduce_max(-found)


def job_of(settings: Config, strategy: Strategy, compiled: bool) -> Job:
    device = strategy.device.type
    return Job(settings, strategy.name, strategy.world_size, strategy.precision, device, compiled)


# ------------------------------------------------------------------- the memory of a machine


def memory_of(device: torch.device) -> float:
    """Bytes that this process may use of its device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(machine, _container_limit()) / processes


def available_memory() -> float:
    """Bytes of the machine's memory that no process uses; 0 where that is unknown."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return 0
    spare = 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)[1])
    limit = _container_limit()
    if not math.isfinite(limit):
        return spare
    used = int((CGROUP / "memory.current").read_text())
    statistics = (CGROUP / "memory.stat").read_text()
    files = re.search(r"^inactive_file (\d+)", statistics, re.M)  # freed when memory is needed
    return min(spare, limit - used + int(files[1]))


def _container_limit() -> float:
    """Bytes of memory that the container may use; infinity without a container or a limit."""
    try:
        return int((CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # ValueError: "max"
        return math.inf
