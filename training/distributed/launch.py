"""How this process was started: alone, or by torchrun as one of several ranks.

Reads the environment variables that torchrun sets for each process; needs no torch.
"""

import os

from training.config.schema import ParallelConfig

TORCHRUN = "start it with torchrun --nproc_per_node=N train.py"


def launched() -> bool:
    """Whether torchrun (or a program like it) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_count() -> int:
    """The number of processes that were started together."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def launch_command() -> list[str]:
    """The program that started this process, with the options that an equal start needs."""
    if not launched():
        return ["python"]
    ranks = rank_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    nodes = [f"--nnodes={ranks // local}", "..."] if local < ranks else []
    restarts = [f"--max-restarts={max_restarts()}"] if max_restarts() else []
    return ["torchrun", *nodes, f"--nproc_per_node={local}", *restarts]


def max_restarts() -> int:
    """How often torchrun starts all ranks again after one has died."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def check(config: ParallelConfig, batch_size: int | None) -> list[tuple]:
    """Settings that do not fit the number of processes: (key, value, reason, hint) for each.

    batch_size: windows per optimizer step over all ranks; None while it is not known.
    """
    strategy, key = config.strategy, "parallel"
    if not launched() and strategy in ("ddp", "fsdp"):
        hint = f"{TORCHRUN} parallel={strategy} ..."
        return [(key, strategy, "started as one process, without torchrun", hint)]
    if not launched() and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        reason = "srun started several processes that do not know of each other"
        hint = "let srun start one torchrun per machine, as scripts/slurm.sh does"
        return [(key, strategy, reason, hint)]
    return check_ranks(strategy, rank_count(), batch_size)


def check_ranks(strategy: str, ranks: int, batch_size: int | None) -> list[tuple]:
    """Settings that do not fit a number of ranks: (key, value, reason, hint) for each."""
    problems = []
    if strategy == "single" and ranks > 1:
        reason = f"started as {ranks} processes, which would all train the same"
        hint = "use parallel=auto, or start it without torchrun"
        problems.append(("parallel", strategy, reason, hint))
    if batch_size is not None and batch_size % ranks != 0:
        reason = f"cannot be divided evenly among {ranks} ranks"
        hint = f"use a multiple of {ranks}, such as {-(-batch_size // ranks) * ranks}"
        problems.append(("trainer.batch_size", batch_size, reason, hint))
    return problems
