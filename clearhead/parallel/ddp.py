"""DDP: every rank holds the complete model and trains on its part of each batch. And how the ranks
find each other, also after torchrun restarts."""

import atexit
import contextlib
import datetime
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    ClearheadError,
    OtherRankError,
    Problem,
    RankLostError,
    as_yaml,
    exit_code_of,
    message_of,
    problems_of,
    refuse,
)
from clearhead.parallel import launch
from clearhead.parallel.strategy import Strategy
from model import GPT, ModelConfig, model_without_values

CONNECT = datetime.timedelta(seconds=10)  # for a server that accepts connections


@dataclass
class DDP(Strategy):
    """Data parallelism: gradients are averaged over ranks after the last micro-batch of a step."""

    timeout: int = 600  # seconds
    name: ClassVar[str] = "ddp"

    def __post_init__(self):
        super().__post_init__()
        on_gpu = self.device.type == "cuda"
        join_process_group("nccl" if on_gpu else "gloo", self.timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # For collectives between CPUs. None: the default group, which uses gloo already.
        limit = datetime.timedelta(seconds=self.timeout)
        self.cpu_group = dist.new_group(backend="gloo", timeout=limit) if on_gpu else None

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """Calls build() on rank 0 and sends the parameters to the other ranks."""
        source = self.on_rank_0(build)
        model = self.shard(model_without_values(config)).to_empty(device=self.device).train()
        parameters = dict(source.named_parameters()) if source else {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.scatter(parameters.get(name), parameter))
        return model

    def shard(self, model: GPT) -> GPT:
        """Returns this rank's version of a model on the meta device."""
        return model

    def _wrap(self, model: GPT) -> torch.nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def start_training(self, model: GPT) -> None:
        super().start_training(model)
        is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
        if is_frozen and isinstance(self.wrapped, DistributedDataParallel):
            # It waits for the gradients of all parameters that were trainable when it was built.
            self.wrapped.__init__(model, gradient_as_bucket_view=True)

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        return self.wrapped.no_sync() if more_to_come else contextlib.nullcontext()

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        mine = whole.to(like.device, like.dtype) if self.is_rank_0 else torch.empty_like(like)
        mine = mine.contiguous()
        dist.broadcast(mine, src=0, group=self.cpu_group if like.device.type == "cpu" else None)
        return mine

    # --------------------------------------------------------------------------- collectives

    def start_all_reduce_sum(self, *values: float) -> Callable[[], list[float]]:
        return self._start_all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: int) -> int:
        return int(self._start_all_reduce([value], dist.ReduceOp.MAX)()[0])

    def _start_all_reduce(self, values, operation) -> Callable[[], list[float]]:
        """Reduces in float64, which represents token counts exactly."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        work = dist.all_reduce(numbers, operation, group=self.cpu_group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return numbers.tolist()

        return wait

    def synchronize(self) -> None:
        # A GPU that waits for a dead rank cannot be interrupted, so the CPUs synchronize first.
        self.all_reduce_max(0)
        super().synchronize()

    def broadcast(self, value: object) -> object:
        return self._broadcast_from(0, value)

    def _broadcast_from(self, rank: int, value: object) -> object:
        """Broadcasts JSON, because dist.broadcast_object_list unpickles data of other ranks."""
        text = json.dumps(value).encode() if self.rank == rank else b""
        length = self.all_reduce_max(len(text))
        buffer = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
        dist.broadcast(buffer, src=rank, group=self.cpu_group)
        return json.loads(bytes(buffer.tolist()))

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        # The lowest rank that failed sends its error to the others.
        order = self.world_size - self.rank if error is not None else 0
        if (first := self.all_reduce_max(order)) == 0:
            return
        sender = self.world_size - first
        message = None
        if self.rank == sender:
            plain = [
                (p.key, None if p.value is NO_VALUE else as_yaml(p.value), p.reason, p.hint)
                for p in problems_of(error, DEBUG_HINT)
            ]
            message = [exit_code_of(error), socket.gethostname(), plain]
        exit_code, host, problems = self._broadcast_from(sender, message)
        if error is not None and self.rank == sender == 0:
            raise error
        where = f" (on rank {sender}, {host})" if sender > 0 else ""
        problems = [
            Problem(key, NO_VALUE if value is None else value, f"{reason}{where}", hint)
            for key, value, reason, hint in problems
        ]
        raise OtherRankError(problems, exit_code) from error

    def is_lost_rank(self, error: BaseException) -> bool:
        if isinstance(error, ClearheadError):
            return False
        signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out")
        signs += ("pair closure",)  # of a collective during which another one timed out
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        )

    def close(self, exit_code: int) -> None:
        """Waits for rank 0, which writes files last: torchrun and Slurm stop all ranks when one
        exits. After an error, other ranks may be dead, and GPU work that waits for them would keep
        this process alive. So on a GPU, the process exits without cleanup after printing it."""
        if exit_code in (0, 143):
            with contextlib.suppress(RuntimeError):  # the run is complete
                self.all_reduce_max(0)
        elif self.device.type == "cuda":
            atexit.register(_exit_at_once, exit_code)


def _exit_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


# ----------------------------------------------------------------------------- process group


def join_process_group(backend: str, timeout: int) -> None:
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
