"""How this process was started, alone or as a rank by torchrun, and how the ranks find each other,
also after torchrun restarts.

Reads the environment variables that torchrun and other launchers set. torch is imported only to
join the process group.
"""

import atexit
import contextlib
import datetime
import ipaddress
import os
import secrets
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.config.schema import ParallelConfig
from clearhead.errors import Problem, RankLostError, message_of, refuse

if sys.platform == "linux":
    import fcntl
if TYPE_CHECKING:
    import torch
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


def join_process_group(device: "torch.device", timeout: int) -> None:
    """Creates the default process group if it does not exist; it is destroyed at exit. It uses NCCL
    on a GPU, else gloo.

    timeout: seconds, for the rendezvous and each collective. Raises RankLostError if the ranks do
    not find each other.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    ranks = number("WORLD_SIZE", least=1)
    rank = number("RANK", most=ranks - 1)
    port, address = number("MASTER_PORT", most=65535), os.environ.get("MASTER_ADDR", "")
    if not address:
        refuse([("MASTER_ADDR", None, "the environment variable is not set", TORCHRUN)])
    on_gpu, limit = device.type == "cuda", datetime.timedelta(seconds=timeout)
    # CPU collectives must time out first: gloo raises an error, whereas NCCL ends the process.
    grace = datetime.timedelta(seconds=60 if on_gpu else 0)
    more = {"timeout": limit + grace, "device_id": device if on_gpu else None}
    try:
        store = _rendezvous(address, port, rank, ranks, limit)
        if sys.platform == "linux":
            _choose_interface(address, port, store, rank, ranks)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, **more)
    except (RuntimeError, OSError) as error:
        said = message_of(error).partition(". ")[0].rstrip(".")
        reason = f"rendezvous at {address}:{port} failed ({said})"
        hint = f"start all {ranks} ranks with the same address and port"
        if "Mesh" in said:
            hint = "set GLOO_SOCKET_IFNAME to the network interface that connects the machines"
        raise RankLostError("parallel.timeout", timeout, reason, hint) from error
    atexit.register(dist.destroy_process_group)  # other ranks that wait get an error


def _choose_interface(address: str, port: int, store: "Store", rank: int, ranks: int) -> None:
    """Lets gloo use the network interface that connects this machine with that of rank 0, unless
    the user has set its variable. By default it uses the address of the host name, which Debian and
    Ubuntu map to 127.0.1.1: other machines cannot reach it. NCCL finds interfaces itself."""
    with socket.create_connection((address, port), timeout=CONNECT.seconds) as connection:
        mine, reached = connection.getsockname()[0], connection.getpeername()[0]
    store.set(f"reached/{rank}", reached)
    if ipaddress.ip_address(mine).is_loopback:
        # MASTER_ADDR may be the name of this machine: other machines know its address.
        seen = [key.decode() for key in store.multi_get([f"reached/{n}" for n in range(ranks)])]
        mine = next((text for text in seen if not ipaddress.ip_address(text).is_loopback), mine)
    if name := _interface(mine):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface(address: str) -> str | None:
    """Returns the name of the network interface that has an address; None if it is not found."""
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return "lo"
    if ip.version == 6:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((line[-1] for line in lines if line[0] == ip.packed.hex()), None)
    siocgifaddr = 0x8915  # linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(any_socket, siocgifaddr, request)[20:24] == ip.packed:
                    return name
    return None


def _rendezvous(
    address: str, port: int, rank: int, ranks: int, limit: datetime.timedelta
) -> "Store":
    """Returns a store that all ranks share.

    Waits in Python, in short attempts: signals have no effect during a call of C++.
    """
    import torch.distributed as dist

    # torchrun has started the server; otherwise rank 0 starts it.
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rank == 0 and not of_torchrun
    deadline = time.monotonic() + limit.total_seconds()
    while not (is_server or _answers(address, port, of_torchrun)):
        _pause(deadline, "no answer")
    store = dist.TCPStore(
        address, port, ranks, is_server, CONNECT, wait_for_workers=False, multi_tenant=True
    )
    store.set_timeout(limit)
    return dist.PrefixStore(_new_prefix(store, rank, ranks, deadline), store)


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
