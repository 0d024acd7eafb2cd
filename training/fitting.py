"""Micro-batches and memory: the largest that fits, and what to do when one did not.

How much a step needs is estimated by formula (training/memory.py); on a GPU it is also tried.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from training.errors import OutOfMemory
from training.memory import USABLE, estimate, smaller_micro_batch
from training.optim import matrices_of

if TYPE_CHECKING:
    from model import GPT
    from training.config import Settings
    from training.parallel import Parallel


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch's says that memory ran out, on whatever device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def what_would_fit(
    settings: "Settings", parallel: "Parallel", windows: int, intact: str
) -> OutOfMemory:
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
    elif parallel.strategy != "fsdp":
        fix = "use parallel=fsdp on several devices, or a smaller model"
    else:
        fix = "use more devices, a smaller data.max_length or a smaller model"
    cause = f"{windows} windows of {settings.data.max_length} tokens do not fit into the memory of "
    return OutOfMemory(
        f"trainer.micro_batch_size={windows}: {cause}{parallel.device}; {fix}; {intact}"
    )


def find_micro_batch(
    settings: "Settings", parallel: "Parallel", model: "GPT", compiled: bool
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
        needed = estimate(
            settings.model,
            windows,
            settings.data.max_length,
            precision=parallel.precision,
            strategy=parallel.strategy,
            world_size=parallel.world_size,
            accumulating=windows < share,
            activation_checkpointing=settings.trainer.activation_checkpointing,
            reshard_after_forward=settings.parallel.reshard_after_forward,
            device=parallel.device.type,
            compiled=compiled,
            optimizer=settings.optimizer.name,
        )
        return needed.total <= USABLE * memory_of(parallel.device)

    # The last, not the first that does not fit: accumulating costs more than a larger whole share.
    start = max((place for place, size in enumerate(sizes) if estimated(size)), default=0)
    start = -parallel.largest(-start)  # the smallest of all ranks'
    if parallel.device.type != "cuda" or parallel.strategy == "fsdp":
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
    return machine / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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


def _fits(windows: int, settings: "Settings", parallel: "Parallel", model: "GPT") -> bool:
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
    return not parallel.largest(failed)
