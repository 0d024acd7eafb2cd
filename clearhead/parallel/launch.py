"""How this process was started: alone, or as a rank by torchrun.

Reads the environment variables that torchrun and other launchers set; does not import torch.
"""

import os

from clearhead.config.schema import ParallelConfig
from clearhead.errors import Problem, refuse

PARENT_PID = os.getppid()
TORCHRUN = "start it with torchrun --nproc_per_node=N train.py"
# The number of a process on its machine: torchrun, srun, Open MPI, other MPI.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def launched() -> bool:
    """Returns whether torchrun, or a similar program, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_count() -> int:
    """Returns the number of processes that were started together."""
    return number("WORLD_SIZE", least=1) if launched() else 1


def local_ranks() -> int:
    """Returns the number of these processes on this machine; 1 if the launcher does not tell."""
    return number("LOCAL_WORLD_SIZE", 1, least=1)


def local_rank() -> int:
    """Returns the number of this process on its machine; 0 if the launcher does not tell."""
    if not launched():  # srun numbers single processes too
        return 0
    return number(next((name for name in LOCAL_RANKS if name in os.environ), "LOCAL_RANK"), 0)


def launch_command() -> list[str]:
    """Returns the command that starts these processes again, without train.py and its arguments."""
    if not launched():
        return ["python"]
    ranks = rank_count()
    local = number("LOCAL_WORLD_SIZE", ranks, least=1)
    nodes = [f"--nnodes={ranks // local}", "..."] if local < ranks else []
    restarts = [f"--max-restarts={max_restarts()}"] if max_restarts() else []
    return ["torchrun", *nodes, f"--nproc_per_node={local}", *restarts]


def max_restarts() -> int:
    """Returns how often torchrun restarts all ranks after one has died."""
    return number("TORCHELASTIC_MAX_RESTARTS", 0)


def number(name: str, default: int | None = None, least: int = 0, most: int = 2**31) -> int:
    """Returns the value of an environment variable of the launcher. Raises ConfigError if it is not
    an integer from `least` to `most`, or if it is missing and has no default."""
    if (text := os.environ.get(name)) is None and default is not None:
        return default
    if text is None or not (text.isdecimal() and least <= int(text[:12]) <= most):
        reason = "is not set" if text is None else f"must be an integer from {least} to {most}"
        refuse([Problem(name, text, f"the environment variable {reason}", TORCHRUN)])
    return int(text)


def torchrun_died() -> bool:
    """Returns whether the torchrun that started this process has ended: nothing would stop it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT_PID


def check(config: ParallelConfig, batch_size: int | None) -> list[tuple]:
    """Returns a problem (key, value, reason, hint) for each setting that does not fit the launch.

    batch_size: windows per optimizer step over all ranks; None if it is not known yet.
    """
    strategy, key = config.strategy, "parallel"
    if not launched() and strategy in ("ddp", "fsdp"):
        hint = f"{TORCHRUN} parallel={strategy} ..."
        return [(key, strategy, "needs several processes, but there is only one", hint)]
    if not launched() and number("SLURM_STEP_NUM_TASKS", 1) > 1:
        reason = "srun started several processes without a process group"
        hint = "let srun start one torchrun per machine, as scripts/slurm.sh does"
        return [(key, strategy, reason, hint)]
    return check_ranks(strategy, rank_count(), batch_size)


def check_ranks(strategy: str, ranks: int, batch_size: int | None) -> list[tuple]:
    """Returns a problem (key, value, reason, hint) for each setting that does not fit `ranks`."""
    problems = []
    if strategy == "single" and ranks > 1:
        reason = f"is for one process, but {ranks} were started"
        hint = "use parallel=auto, or start it without torchrun"
        problems.append(("parallel", strategy, reason, hint))
    if batch_size is not None and batch_size % ranks != 0:
        reason = f"must be a multiple of the number of ranks, {ranks}"
        hint = f"use {-(-batch_size // ranks) * ranks}"
        problems.append(("trainer.batch_size", batch_size, reason, hint))
    return problems
