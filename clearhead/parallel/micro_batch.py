"""Micro-batch size and memory: check before a run, search for the largest size that fits, and the
error when a step runs out of memory. Estimates: memory.py.
"""

from collections.abc import Callable

import torch

from clearhead.config.schema import Config
from clearhead.errors import OutOfMemoryError
from clearhead.parallel.hardware import available_memory, memory_of
from clearhead.parallel.memory import LIBRARIES, Job, estimate, fits, largest_micro_batch
from clearhead.parallel.strategy import Strategy


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of torch means that memory ran out, on any device."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def out_of_memory_error(
    config: Config, strategy: Strategy, windows: int, intact: str
) -> OutOfMemoryError:
    """Returns the error of a step that ran out of memory, with a hint that keeps the batch size.

    windows: size of the micro-batch that did not fit. intact: text about the newest checkpoint.
    """
    tokens = f"{windows} windows of {config.data.max_length} tokens"
    reason = f"{tokens} do not fit into the memory of {strategy.device}"
    hint = _hint(config, strategy, lambda smaller: smaller <= windows // 2)
    return OutOfMemoryError("trainer.micro_batch_size", windows, reason, f"{hint}; {intact}")


def _hint(config: Config, strategy: Strategy, fits: Callable[[int], bool]) -> str:
    """Returns a hint: the largest micro-batch size for which fits(windows) holds, or a setting."""
    trainer = config.trainer
    per_rank = trainer.batch_size // strategy.world_size
    if smaller := largest_micro_batch(per_rank, fits):
        return (
            f"use trainer.micro_batch_size={smaller}: {per_rank // smaller} micro-batches per step "
            f"on each device keep the batch size of {trainer.batch_size}"
        )
    if not trainer.activation_checkpointing:
        return "use trainer.activation_checkpointing=true, which needs far less memory"
    if strategy.name != "fsdp":
        return "use parallel=fsdp on several devices, or a smaller model"
    return "use more devices, a smaller data.max_length or a smaller model"


def check_memory(config: Config, strategy: Strategy) -> list[tuple]:
    """Returns a problem (key, value, reason, hint) if weights, gradients and moments need more
    memory than the device has; on a CPU, also if a step does; on a GPU, if the copy of a checkpoint
    needs more memory than the machine has. Allocates nothing.

    Without this check, the system would kill the process without a message. A step that does not
    fit on a GPU raises `out_of_memory_error`.
    """
    trainer, limit = config.trainer, memory_of(strategy.device)
    # It is not known yet whether compile=auto compiles. A compiled step needs less memory.
    job = job_of(config, strategy, trainer.compile is not False)
    asked = trainer.micro_batch_size
    windows = 1 if asked == "auto" else min(job.windows_per_rank, asked or job.windows_per_rank)
    parts, has = estimate(job, windows), f"and {strategy.device} has {limit / 1e9:,.1f} GB"
    if strategy.device.type == "cuda":
        has += " of free memory"
    states, total = 2 * parts["weights"] + parts["optimizer"], sum(parts.values())
    parameters = f"{job.parameters:,} parameters"
    if states > limit:
        reason = f"weights, gradients and moments need {states / 1e9:,.1f} GB, {has}"
        return [("model", parameters, reason, "use a smaller model, such as model=gpt2-nano")]
    # A free notebook has a GPU of 16 GB and 13 GB of main memory: GPT-2 large fits on the GPU, and
    # its first checkpoint would end the process.
    copy, available = 12 * job.parameters, available_memory()
    if strategy.device.type != "cpu" and strategy.is_rank_0 and 0 < available < copy:
        reason = f"a checkpoint needs {copy / 1e9:,.1f} GB of main memory, "
        reason += f"and {available / 1e9:,.1f} GB are available"
        hint = "use a machine with more main memory, or a smaller model"
        return [("model", parameters, reason, hint)]
    # Without the slack of the allocator, which is uncertain.
    if strategy.device.type != "cpu" or total - parts["slack"] <= limit:
        return []
    tokens = f"{windows} windows of {config.data.max_length} tokens"
    reason = f"a step with {tokens} needs about {total / 1e9:,.1f} GB, {has}"
    hint = _hint(config, strategy, lambda n: n < windows and fits(job, n, limit))
    key = "trainer.batch_size" if asked is None else "trainer.micro_batch_size"
    return [(key, trainer.batch_size if asked is None else asked, reason, hint)]


def find_micro_batch(config: Config, strategy: Strategy, compiled: bool) -> int:
    """Returns the value of trainer.micro_batch_size=auto: the largest divisor of the windows per
    rank whose estimate fits on all ranks; 1 if none fits."""
    job, limit = job_of(config, strategy, compiled), memory_of(strategy.device)
    if strategy.device.type == "cuda":
        limit += LIBRARIES["cuda"]  # in the estimate, and no longer free
    found = largest_micro_batch(job.windows_per_rank, lambda n: fits(job, n, limit)) or 1
    return -strategy.all_reduce_max(-found)


def job_of(config: Config, strategy: Strategy, compiled: bool) -> Job:
    device = strategy.device.type
    return Job(config, strategy.name, strategy.world_size, strategy.precision, device, compiled)
