"""Micro-batches and memory: the check before a run, the largest that fits, what to do when one
did not.

How much a step needs is estimated by formula (training/planning/memory.py); on a GPU it is also
tried.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from errors import OutOfMemoryError
from training.optim.optimizers import matrices_of
from training.planning.memory import (
    USABLE,
    Memory,
    estimate,
    largest_micro_batch,
    oversized,
    smaller_micro_batch,
)

if TYPE_CHECKING:
    from model import GPT
    from training.config.schema import Settings
    from training.distributed.strategy import Strategy


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch's says that memory ran out, on whatever device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def what_would_fit(
    settings: "Settings", parallel: "Strategy", windows: int, intact: str
) -> OutOfMemoryError:
    """The error of a step that found no room: what keeps the batch, and the steps as they were.

    windows: of the micro-batch that did not fit. intact: what there is to go on from.
    """
    trainer = settings.trainer
    share = trainer.batch_size // parallel.world_size
    smaller = smaller_micro_batch(trainer.batch_size, parallel.world_size, windows)
    if smaller is not None:
        fix = (
            f"use trainer.micro_batch_size={smaller}: {share // smaller} micro-batches a step on "
            f"each device keep the batch of {trainer.batch_size}"
        )
    elif not trainer.activation_checkpointing:
        fix = "use trainer.activation_checkpointing=true, a third more work in far less memory"
    elif parallel.name != "fsdp":
        fix = "use parallel=fsdp on several devices, or a smaller model"
    else:
        fix = "use more devices, a smaller data.max_length or a smaller model"
    cause = f"{windows} windows of {settings.data.max_length} tokens do not fit into the memory of "
    return OutOfMemoryError(
        "trainer.micro_batch_size", windows, f"{cause}{parallel.device}", f"{fix}; {intact}"
    )


def check_memory(settings: "Settings", parallel: "Strategy") -> tuple[list[tuple], list[str]]:
    """Compares what a run needs with the memory of its device, before anything is allocated.

    Returns problems (key, value, reason, hint) and notes. A problem: the weights, gradients and
    moments need more than there is, on any device, or on a CPU a step does. A note: a step on a CPU
    may need more than is free now. On a GPU a step that does not fit ends the run at once, and
    `what_would_fit` says so.
    """
    trainer, device, model = settings.trainer, parallel.device, settings.model
    share, asked = trainer.batch_size // parallel.world_size, trainer.micro_batch_size
    windows = 1 if asked == "auto" else min(share, asked or share)
    memory, is_cpu = memory_of(device), device.type == "cpu"
    room = memory + (swap_space() if is_cpu else 0)

    def needed(number: int) -> Memory:
        # Whether compile=auto compiles is not known yet; compiled, a step needs less.
        return needed_by_step(settings, parallel, number, trainer.compile is not False)

    def allocated(number: int) -> float:  # an estimate of the heap's waste must not refuse a run
        return needed(number).total - needed(number).slack

    spare = spare_memory() / _processes()
    free = spare + needed(1).libraries if spare else math.inf  # those are loaded already

    def largest() -> int | None:
        limit = min(USABLE * memory, free)
        return largest_micro_batch(share, lambda n: n < windows and needed(n).total <= limit)

    there_is = f"and device {device} has {_gb(room)}"
    blamed = f"model.{oversized(model)}", getattr(model, oversized(model))
    states = 2 * needed(1).weights + needed(1).optimizer
    if states > room:
        cause = f"weights, gradients and moments need {_gb(states)}, {there_is}"
        fix = "use less, or a smaller model, such as model=gpt2-nano"
        return [(*blamed, cause, fix)], []
    if not is_cpu:
        return [], []
    tokens = f"of {settings.data.max_length} tokens"
    if allocated(windows) > room and (windows == 1 or allocated(1) > room):
        cause = f"a step with one window {tokens} needs {_gb(allocated(1))}, {there_is}"
        fix = "use a smaller model, a smaller data.max_length"
        if not trainer.activation_checkpointing:
            fix += " or trainer.activation_checkpointing=true"
        return [(*blamed, cause, fix)], []
    key = "batch_size" if asked is None else "micro_batch_size"
    value = getattr(trainer, key)
    cause = f"{windows} windows {tokens} at a time need about {_gb(needed(windows).total)}"
    if allocated(windows) > room:
        fix = f"use trainer.micro_batch_size={largest() or 1}, which keeps the batch"
        return [(f"trainer.{key}", value, f"{cause}, {there_is}", fix)], []
    if needed(windows).total > free:
        fits = largest()
        fix = f"use trainer.micro_batch_size={fits}" if fits else "close other programs"
        return [], [f"trainer.{key}={value}: {cause}, and {_gb(free)} are free; {fix}"]
    return [], []


def needed_by_step(
    settings: "Settings", parallel: "Strategy", windows: int, compiled: bool
) -> Memory:
    """The estimate for a step of a run with micro-batches of `windows`."""
    return estimate(
        settings.model,
        windows,
        settings.data.max_length,
        precision=parallel.precision,
        strategy=parallel.name,
        world_size=parallel.world_size,
        accumulating=windows < settings.trainer.batch_size // parallel.world_size,
        activation_checkpointing=settings.trainer.activation_checkpointing,
        reshard_after_forward=settings.parallel.reshard_after_forward,
        device=parallel.device.type,
        compiled=compiled,
        optimizer=settings.optimizer.name,
    )


def _gb(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"


def find_micro_batch(
    settings: "Settings", parallel: "Strategy", model: "GPT", compiled: bool
) -> int:
    """The most windows at once that fit, of those that divide a rank's share evenly.

    By estimate; on a GPU that holds the whole model the estimate is where trials begin, each of
    two forward and backward passes beside an optimizer's moments. A sharded model is not tried:
    its ranks would wait for one whose memory ran out. All ranks find the same. Trials run the
    model as it is when not compiled and leave no trace in it, and dropout is seeded at every step,
    so that they change nothing that is trained.
    """
    share = settings.trainer.batch_size // parallel.world_size
    sizes = [n for n in range(1, share + 1) if share % n == 0]

    def estimated(windows: int) -> bool:
        needed = needed_by_step(settings, parallel, windows, compiled)
        return needed.total <= USABLE * memory_of(parallel.device)

    # The last, not the first that does not fit: accumulating costs more than a larger whole share.
    start = max((place for place, size in enumerate(sizes) if estimated(size)), default=0)
    start = -parallel.all_reduce_max(-start)  # the smallest of all ranks'
    if parallel.device.type != "cuda" or parallel.name == "fsdp":
        return sizes[start]
    return search(sizes, start, lambda size: _fits(size, settings, parallel, model))


def search(sizes: list[int], start: int, fits: Callable[[int], bool]) -> int:
    """The largest of some sizes that fits, upwards or downwards from sizes[start].

    The smallest when none does: the error that comes then says more than this could.
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


def memory_of(device: torch.device) -> float:
    """Bytes that this process may use of its device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        machine = min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine / _processes()


def swap_space() -> float:
    """Bytes of swap that this process may use; 0 where that cannot be known."""
    try:
        swap = 1024 * int(re.search(r"SwapTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
        with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
            swap = min(swap, int(Path("/sys/fs/cgroup/memory.swap.max").read_text()))
        return swap / _processes()
    except (OSError, TypeError):
        return 0


def _processes() -> int:
    """How many processes of the run share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def spare_memory() -> float:
    """Bytes of the machine's memory that nobody uses; 0 where that cannot be known."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        spare = int(found[1]) * 1024
        with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
            group = Path("/sys/fs/cgroup")
            used = int((group / "memory.current").read_text())
            files = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
            limit = int((group / "memory.max").read_text())
            spare = min(spare, limit - used + int(files[1]))  # files go when memory is wanted
        return spare
    except (OSError, TypeError):
        return 0


def _fits(windows: int, settings: "Settings", parallel: "Strategy", model: "GPT") -> bool:
    """Whether a step with micro-batches of this size runs through on all ranks' GPUs."""
    shape = windows, settings.data.max_length
    torch.cuda.set_per_process_memory_fraction(USABLE, parallel.device)
    failed, moments = False, None
    try:
        once = set(matrices_of(model)) if settings.optimizer.name == "muon" else set()
        moments = [
            torch.empty_like(p) for p in model.parameters() for _ in range(1 if p in once else 2)
        ]
        # The bare model, without DDP around it: nothing here waits for another rank.
        for _ in range(2):  # the second beside the gradients of the first
            token_ids = torch.zeros(shape, dtype=torch.long, device=parallel.device)
            with parallel.autocast():
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
        torch.cuda.set_per_process_memory_fraction(1.0, parallel.device)
    return not parallel.all_reduce_max(failed)
