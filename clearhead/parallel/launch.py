"""How this process was started, alone or as a rank by torchrun, and how the ranks find each other,
also after torchrun restarts.

Reads the environment variables that torchrun and other launchers set. torch is imported only to
join the process group.
"""

import atexit
import datetime
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from clearhead.config.schema import ParallelConfig
from clearhead.errors import Problem, RankLostError, message_of, refuse

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT = datetime.timedelta(seconds=10)  # for a server that accepts connections
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


# ----------------------------------------------------------------------------- process group


def join_process_group(backend: str, timeout: int) -> None:
    """Creates the default process group if it does not exist; it is destroyed at exit.

    timeout: seconds, for the rendezvous and each collective. Raises RankLostError if the rendezvous
    fails.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    limit = datetime.timedelta(seconds=timeout)
    store, rank, world_size = _rendezvous(limit)
    # CPU collectives must time out first: gloo raises an error, whereas NCCL ends the process.
    grace = datetime.timedelta(seconds=60 if backend == "nccl" else 0)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=limit + grace
    )
    atexit.register(dist.destroy_process_group)  # other ranks that wait get an error


def _rendezvous(limit: datetime.timedelta) -> tuple["Store", int, int]:
    """Returns (a store that all ranks share, this rank, the number of ranks).

    Waits in Python, in short attempts: signals have no effect during a call of C++.
    """
    import torch.distributed as dist

    ranks = number("WORLD_SIZE", least=1)
    rank = number("RANK", most=ranks - 1)
    port, address = number("MASTER_PORT", most=65535), os.environ.get("MASTER_ADDR", "")
    if not address:
        refuse([("MASTER_ADDR", None, "the environment variable is not set", TORCHRUN)])
    # torchrun has started the server; otherwise rank 0 starts it.
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rank == 0 and not of_torchrun
    try:
        deadline = time.monotonic() + limit.total_seconds()
        while not (is_server or _answers(address, port, of_torchrun)):
            _pause(deadline, "no answer")
        store = dist.TCPStore(
            address, port, ranks, is_server, CONNECT, wait_for_workers=False, multi_tenant=True
        )
        store.set_timeout(limit)
        prefix = _new_prefix(store, rank, ranks, deadline)
        return dist.PrefixStore(prefix, store), rank, ranks
    except (dist.DistError, TimeoutError) as error:
        said = message_of(error).partition(". ")[0].rstrip(".")
        reason = f"rendezvous at {address}:{port} failed ({said})"
        hint = f"start all {ranks} ranks with the same address and port"
        raise RankLostError("parallel.timeout", limit.seconds, reason, hint) from error


def _answers(address: str, port: int, of_torchrun: bool) -> bool:
    """Returns whether a server accepts connections within a second. Raises TimeoutError if that of
    torchrun, which is there before the ranks, does not exist: torchrun has ended, maybe so early
    that PARENT_PID is another process."""
    try:
        socket.create_connection((address, port), timeout=1).close()
        return True
    except OSError as error:
        if of_torchrun and isinstance(error, ConnectionRefusedError):
            raise TimeoutError("torchrun has ended") from error
        return False


def _pause(deadline: float, reason: str) -> None:
    """Waits before the next attempt. Raises TimeoutError after the deadline, or when torchrun has
    ended."""
    if time.monotonic() > deadline or torchrun_died():
        raise TimeoutError("torchrun has ended" if torchrun_died() else reason)
    time.sleep(0.01)


def _new_prefix(store: "Store", rank: int, world_size: int, deadline: float) -> str:
    """Returns a prefix for keys of the store that no earlier start of these ranks has used.

    torchrun keeps one store over its restarts, with the addresses of dead processes (pytorch issue
    135712), and its restart count differs between machines. So rank 0 draws a random prefix. Every
    other rank draws a random word and receives the prefix under that word, so the answer cannot be
    an old one. Raises TimeoutError after the deadline.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"hello/{rank}", word)
        while not store.check([f"welcome/{word}"]):
            _pause(deadline, "rank 0 did not answer")
        prefix = store.get(f"welcome/{word}").decode()
        store.set(f"heard/{prefix}/{rank}", "")
        return prefix
    for other in range(1, world_size):
        hello = f"hello/{other}"
        while not store.check([f"heard/{word}/{other}"]):
            if store.check([hello]):  # may be of an earlier start; the new one follows
                store.set(f"welcome/{store.get(hello).decode()}", word)
            _pause(deadline, f"rank {other} did not answer")
    return word
