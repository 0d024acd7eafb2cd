"""Rendezvous of the ranks and creation of the process group, also after torchrun restarts."""

import atexit
import datetime
import os
import secrets
import socket
import time

import torch.distributed as dist

from clearhead.errors import RankLostError, message_of, refuse
from clearhead.parallel import launch

CONNECT = datetime.timedelta(seconds=10)  # for a server that accepts connections


def join(backend: str, timeout: int) -> None:
    """Creates the default process group if it does not exist; it is destroyed at exit.

    timeout: seconds, for the rendezvous and each collective. Raises RankLostError if the rendezvous
    fails.
    """
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


def _rendezvous(limit: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Returns (a store that all ranks share, this rank, the number of ranks).

    Waits in Python, in short attempts: signals have no effect during a call of C++.
    """
    ranks, rank = launch.number("WORLD_SIZE", least=1), launch.number("RANK")
    port, address = launch.number("MASTER_PORT", most=65535), os.environ.get("MASTER_ADDR", "")
    if not address:
        refuse([("MASTER_ADDR", None, "the environment variable is not set", launch.TORCHRUN)])
    # torchrun has started the server; otherwise rank 0 starts it.
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        deadline = time.monotonic() + limit.total_seconds()
        while not (is_server or _answers(address, port)):
            _pause(deadline, "no answer")
        store = dist.TCPStore(
            address, port, ranks, is_server, CONNECT, wait_for_workers=False, multi_tenant=True
        )
        store.set_timeout(limit)
        return _new_prefix(store, rank, ranks, deadline), rank, ranks
    except dist.DistError as error:
        said = message_of(error).partition(". ")[0].rstrip(".")
        reason = f"rendezvous at {address}:{port} failed ({said})"
        hint = f"start all {ranks} ranks with the same address and port"
        raise RankLostError("parallel.timeout", limit.seconds, reason, hint) from error


def _answers(address: str, port: int) -> bool:
    """Returns whether a server accepts connections within a second."""
    try:
        socket.create_connection((address, port), timeout=1).close()
        return True
    except OSError:
        return False


def _pause(deadline: float, reason: str) -> None:
    """Waits before the next attempt. Raises DistStoreError after the deadline, or when torchrun has
    ended."""
    if time.monotonic() > deadline or launch.torchrun_died():
        raise dist.DistStoreError("torchrun has ended" if launch.torchrun_died() else reason)
    time.sleep(0.01)


def _new_prefix(store: dist.Store, rank: int, world_size: int, deadline: float) -> dist.Store:
    """Returns the store with a prefix that no earlier start of these ranks has used.

    torchrun keeps one store over its restarts, with the addresses of dead processes (pytorch issue
    135712), and its restart count differs between machines. So rank 0 draws a random prefix. Every
    other rank draws a random word and receives the prefix under that word, so the answer cannot be
    an old one. Raises DistStoreError after the deadline.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"hello/{rank}", word)
        while not store.check([f"welcome/{word}"]):
            _pause(deadline, "rank 0 did not answer")
        prefix = store.get(f"welcome/{word}").decode()
        store.set(f"heard/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    for other in range(1, world_size):
        hello = f"hello/{other}"
        while not store.check([f"heard/{word}/{other}"]):
            if store.check([hello]):  # may be of an earlier start; the new one follows
                store.set(f"welcome/{store.get(hello).decode()}", word)
            _pause(deadline, f"rank {other} did not answer")
    return dist.PrefixStore(word, store)
