"""Builds the distributed strategy of a run: one process, DDP or FSDP."""

import os

from clearhead.config.schema import ParallelConfig
from clearhead.errors import refuse
from clearhead.parallel import device as devices
from clearhead.parallel.launch import rank_count
from clearhead.parallel.strategy import Strategy


def build_strategy(
    config: ParallelConfig, device: str, precision: str, seed: int, threads: int | None = None
) -> Strategy:
    """Chooses device, precision and strategy, and joins the process group.

    device: auto | cpu | cuda | mps. precision: auto | fp32 | bf16 | fp16. threads: of the CPU.
    Call `check` of launch.py and of device.py first.
    """
    name = config.strategy
    if name == "auto":
        name = "ddp" if rank_count() > 1 else "single"
    if name != "single" and device == "auto" and devices.best_device() == "mps":
        device = "cpu"
    chosen = devices.prepare(device, seed, threads)
    dtype = devices.DTYPES.get(precision) or devices.best_dtype(chosen)
    if name == "single":
        return Strategy(chosen, dtype)
    # A single process saves the 0.6 s that these imports take.
    from clearhead.parallel.ddp import DDP
    from clearhead.parallel.fsdp import FSDP

    if name == "ddp":
        strategy = DDP(chosen, dtype, timeout=config.timeout)
    else:
        reshard = config.reshard_after_forward
        strategy = FSDP(chosen, dtype, timeout=config.timeout, reshard_after_forward=reshard)
    if chosen.type == "cuda":
        refuse(shared_gpus(strategy, devices.gpu_id(chosen)))
    return strategy


def shared_gpus(strategy: Strategy, gpu: int) -> list[tuple]:
    """Returns a problem (key, value, reason, hint), on all ranks, if two ranks have the same GPU.
    NCCL would fail later. gpu: a number below 2^53 of the GPU of this rank."""
    ranks = range(strategy.world_size)
    gpus = strategy.all_reduce_sum(*(gpu * (rank == strategy.rank) for rank in ranks))
    if len(set(gpus)) == len(gpus):
        return []
    reason = f"{strategy.world_size} ranks have {len(set(gpus))} GPUs"
    hint = "start one process for each GPU; its launcher has to set LOCAL_RANK"
    return [("LOCAL_RANK", os.environ.get("LOCAL_RANK"), reason, hint)]
