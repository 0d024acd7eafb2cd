"""The micro-batch that fits into memory: the check before a run, the search for the largest, and
the suggestion when memory has run out.

The memory of a step is estimated by formula (training/planning/memory.py); on a GPU the search also
tries steps.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from errors import OutOfMemoryError
from model import GPT
from training.distributed.strategy import Strategy
from training.optim.optimizers import matrices_of
from training.planning.memory import USABLE, Memory, estimate, largest_micro_batch, oversized

if TYPE_CHECKING:
    from training.config.schema import Config

CGROUP = Path("/sys/fs/cgroup")  # of a container: its own limits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch says that memory ran out, on any device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def what_would_fit(
    settings: "Config", strategy: Strategy, windows: int, intact: str
) -> OutOfMemoryError:
    """The error of a step that ran out of memory, with a suggestion that keeps the batch.

    windows: of the micro-batch that did not fit. intact: the checkpoint to resume from, in words.
    """
    trainer = settings.trainer
    share = trainer.batch_size // strategy.world_size
    smaller = smaller_micro_batch(trainer.batch_size, strategy.world_size, windows)
    if smaller is not None:
        hint = (
            f"use trainer.micro_batch_size={smaller}: {share // smaller} micro-batches per step on "
            f"each device keep the batch of {trainer.batch_size}"
        )
    elif not trainer.activation_checkpointing:
        hint = "use trainer.activation_checkpointing=true: a third more work in far less memory"
    elif strategy.name != "fsdp":
        hint = "use parallel=fsdp on several devices, or a smaller model"
    else:
        hint = "use more devices, a smaller data.max_length or a smaller model"
    tokens = f"{windows} windows of {settings.data.max_length} tokens"
    reason = f"{tokens} do not fit into the memory of {strategy.device}"
    return OutOfMemoryError("trainer.micro_batch_size", windows, reason, f"{hint}; {intact}")


def smaller_micro_batch(
    batch_size: int, world_size: int = 1, micro_batch_size: int | str | None = None
) -> int | None:
    """A micro-batch to try when memory has run out; the batch of a step stays the same.

    batch_size: windows per step, over all ranks. micro_batch_size: the present setting; None and
    "auto" mean the whole share. The largest divisor of the share that is at most half of the
    present size; None when that is one window already.
    """
    share = batch_size // world_size
    present = micro_batch_size if isinstance(micro_batch_size, int) else share
    return largest_micro_batch(share, lambda windows: windows <= present // 2)


# ---------------------------------------------------------------------------- before a run


def check_memory(settings: "Config", strategy: Strategy) -> tuple[list[tuple], list[str]]:
    """Compares what a run needs with the memory of its device, before anything is allocated.

    Returns problems (key, value, reason, hint) and notes. It is a problem when weights, gradients
    and moments, or on a CPU a step, need more memory than there is; a note when a step on a CPU
    may need more than is free now. On a GPU a step that does not fit ends the run at once with
    the error of `what_would_fit`.
    """
    trainer, model = settings.trainer, settings.model
    share, asked = trainer.batch_size // strategy.world_size, trainer.micro_batch_size
    windows = 1 if asked == "auto" else min(share, asked or share)
    memory, is_cpu = memory_of(strategy.device), strategy.device.type == "cpu"
    limit = memory + (swap_space() if is_cpu else 0)

    def needed(number: int) -> Memory:
        # Whether compile=auto compiles is not known yet; compiled, a step needs less.
        return estimate_step(settings, strategy, number, trainer.compile is not False)

    def allocated(number: int) -> float:  # without the allocator's waste, which is a guess
        return needed(number).total - needed(number).slack

    has = f"and device {strategy.device} has {_gb(limit)}"
    key = oversized(model)
    states = 2 * needed(1).weights + needed(1).optimizer
    if states > limit:
        reason = f"weights, gradients and moments need {_gb(states)}, {has}"
        hint = "use less, or a smaller model, such as model=gpt2-nano"
        return [(f"model.{key}", getattr(model, key), reason, hint)], []
    if not is_cpu:
        return [], []
    tokens = f"of {settings.data.max_length} tokens"
    if min(allocated(windows), allocated(1)) > limit:
        reason = f"a step with one window {tokens} needs {_gb(allocated(1))}, {has}"
        hint = "use a smaller model, a smaller data.max_length"
        if not trainer.activation_checkpointing:
            hint += " or trainer.activation_checkpointing=true"
        return [(f"model.{key}", getattr(model, key), reason, hint)], []
    spare = spare_memory() / _local_processes()
    free = spare + needed(1).libraries if spare else math.inf  # the libraries are loaded already

    def largest() -> int | None:
        usable = min(USABLE * memory, free)
        return largest_micro_batch(share, lambda n: n < windows and needed(n).total <= usable)

    key = "trainer.batch_size" if asked is None else "trainer.micro_batch_size"
    value = trainer.batch_size if asked is None else asked
    reason = f"{windows} windows {tokens} at a time need about {_gb(needed(windows).total)}"
    if allocated(windows) > limit:
        hint = f"use trainer.micro_batch_size={largest() or 1}, which keeps the batch"
        return [(key, value, f"{reason}, {has}", hint)], []
    if needed(windows).total > free:
        fits = largest()
        hint = f"use trainer.micro_batch_size={fits}" if fits else "close other programs"
        return [], [f"{key}={value}: {reason}, and {_gb(free)} are free; {hint}"]
    return [], []


def estimate_step(settings: "Config", strategy: Strategy, windows: int, compiled: bool) -> Memory:
    """The estimate for a step of a run with micro-batches of `windows`."""
    return estimate(
        settings.model,
        windows,
        settings.data.max_length,
        precision=strategy.precision,
        strategy=strategy.name,
        world_size=strategy.world_size,
        accumulating=windows < settings.trainer.batch_size // strategy.world_size,
        activation_checkpointing=settings.trainer.activation_checkpointing,
        reshard_after_forward=settings.parallel.reshard_after_forward,
        device=strategy.device.type,
        compiled=compiled,
        optimizer=settings.optimizer.name,
    )


def _gb(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"


# ---------------------------------------------------------------- trainer.micro_batch_size=auto


def find_micro_batch(settings: "Config", strategy: Strategy, model: GPT, compiled: bool) -> int:
    """The largest micro-batch that fits, in windows, of those that divide a rank's share evenly.

    By estimate; on a GPU that holds the whole model the search starts at the estimate and tries
    each size: two forward and backward passes next to an optimizer's moments. A sharded model is
    not tried: its ranks would wait for one that ran out of memory. All ranks find the same. Trials
    run the model uncompiled and leave no trace in it; dropout is seeded at every step, so they do
    not change training.
    """
    share = settings.trainer.batch_size // strategy.world_size
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    usable = USABLE * memory_of(strategy.device)
    fitting = [n for n in sizes if estimate_step(settings, strategy, n, compiled).total <= usable]
    # The largest that fits, although a smaller one may not: accumulating needs memory of its own.
    start = sizes.index(fitting[-1]) if fitting else 0
    start = -strategy.all_reduce_max(-start)  # the smallest of all ranks
    if strategy.device.type != "cuda" or strategy.name == "fsdp":
        return sizes[start]
    return search(sizes, start, lambda size: _fits(size, settings, strategy, model))


def search(sizes: list[int], start: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits, searched upwards or downwards from sizes[start].

    The smallest when none fits: the error of the step then says more than this could.
    """
    if fits(sizes[start]):
        while start + 1 < len(sizes) and fits(sizes[start + 1]):
            start += 1
        return sizes[start]
    while start > 0:
        start -= 1
        if fits(sizes[start]):
            break
    return sizes[start]


def _fits(windows: int, settings: "Config", strategy: Strategy, model: GPT) -> bool:
    """Whether a step with micro-batches of this size runs through on all ranks' GPUs."""
    shape = windows, settings.data.max_length
    torch.cuda.set_per_process_memory_fraction(USABLE, strategy.device)
    failed, moments = False, None
    try:
        once = set(matrices_of(model)) if settings.optimizer.name == "muon" else set()
        moments = [
            torch.empty_like(p) for p in model.parameters() for _ in range(1 if p in once else 2)
        ]
        # The model without DDP around it: nothing here waits for another rank.
        for _ in range(2):  # the second next to the gradients of the first
            token_ids = torch.zeros(shape, dtype=torch.long, device=strategy.device)
            with strategy.autocast():
                _, loss = model(token_ids, token_ids)
            loss.backward()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    finally:
        del moments
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, strategy.device)
    return not strategy.all_reduce_max(failed)


# ------------------------------------------------------------------- the memory of a machine


def memory_of(device: torch.device) -> float:
    """Bytes that this process may use of its device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _cgroup_limit("memory.max")) / _local_processes()


def swap_space() -> float:
    """Bytes of swap that this process may use; 0 where that is unknown."""
    return min(_meminfo("SwapTotal"), _cgroup_limit("memory.swap.max")) / _local_processes()


def spare_memory() -> float:
    """Bytes of the machine's memory that no process uses; 0 where that is unknown."""
    spare, limit = _meminfo("MemAvailable"), _cgroup_limit("memory.max")
    if not math.isfinite(limit):
        return spare
    used = int((CGROUP / "memory.current").read_text())
    statistics = (CGROUP / "memory.stat").read_text()
    files = re.search(r"^inactive_file (\d+)", statistics, re.M)  # freed when memory is needed
    return min(spare, limit - used + int(files[1]))


def _local_processes() -> int:
    """The number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _meminfo(key: str) -> float:
    """A line of /proc/meminfo in bytes; 0 without one."""
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:  # not Linux
        return 0
    return 1024 * int(found[1]) if found else 0


def _cgroup_limit(file: str) -> float:
    """A limit of the container in bytes; infinity without a container or a limit."""
    try:
        return int((CGROUP / file).read_text())
    except (OSError, ValueError):  # ValueError: "max"
        return math.inf
