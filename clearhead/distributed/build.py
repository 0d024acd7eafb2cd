"""Builds the distributed strategy of a run: one process, DDP or FSDP."""

from clearhead.config.schema import ParallelConfig
from clearhead.distributed import device as devices
from clearhead.distributed.launch import rank_count
from clearhead.distributed.strategy import Strategy


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
    from clearhead.distributed.ddp import DDP
    from clearhead.distributed.fsdp import FSDP

    if name == "ddp":
        return DDP(chosen, dtype, timeout=config.timeout)
    reshard = config.reshard_after_forward
    return FSDP(chosen, dtype, timeout=config.timeout, reshard_after_forward=reshard)
