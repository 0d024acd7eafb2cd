"""Rendezvous of the ranks and creation of the process group, also after torchrun restarts."""

import atexit
import datetime
import os
import secrets
import time

import torch.distributed as dist

from clearhead.errors import RankLostError, message_of


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
    """Returns (a store that all ranks share, this rank, the number of ranks)."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
        return _new_prefix(store, rank, world_size, limit), rank, world_size
    except dist.DistError as error:
        said = message_of(error).partition(". ")[0].rstrip(".")
        reason = f"rendezvous at {address}:{port} failed ({said})"
        hint = f"start all {os.environ['WORLD_SIZE']} ranks with the same address and port"
        raise RankLostError("parallel.timeout", limit.seconds, reason, hint) from error


def _new_prefix(
    store: dist.Store, rank: int, world_size: int, limit: datetime.timedelta
) -> dist.Store:
    """Returns the store with a prefix that no earlier start of these ranks has used.

    torchrun keeps one store over its restarts, with the addresses of dead processes (pytorch issue
    135712), and its restart count differs between machines. So rank 0 draws a random prefix. Every
    other rank draws a random word and receives the prefix under that word, so the answer cannot be
    an old one. Raises DistStoreError after the time limit.
    """
    word = secrets.token_hex(8)
    if rank > 0:
        store.set(f"hello/{rank}", word)
        prefix = store.get(f"welcome/{word}").decode()  # waits until it is set
        store.set(f"heard/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline = time.monotonic() + limit.total_seconds()
    for other in range(1, world_size):
        hello = f"hello/{other}"
        while not store.check([f"heard/{word}/{other}"]):
            if store.check([hello]):  # may be of an earlier start; the new one follows
                store.set(f"welcome/{store.get(hello).decode()}", word)
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"rank {other} did not answer")
            time.sleep(0.01)
    return dist.PrefixStore(word, store)
