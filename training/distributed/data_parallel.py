"""Several processes that train one model: DDP and FSDP on torch.distributed.

See training/distributed/strategy.py, whose interface this is. Imported when there are several
processes only.
"""

import atexit
import contextlib
import datetime
import functools
import gc
import json
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from errors import (
    DEBUG,
    NO_VALUE,
    ClearheadError,
    OtherRankError,
    Problem,
    RankLostError,
    exit_code_of,
    message_of,
    problems_of,
    show,
)
from model import GPT, ModelConfig
from training.distributed.strategy import Strategy, started_by


@dataclass
class DDP(Strategy):
    """Every rank holds the whole model and a part of each batch."""

    timeout: int = 600  # seconds
    name: ClassVar[str] = "ddp"

    def __post_init__(self):
        super().__post_init__()
        on_gpu = self.device.type == "cuda"
        limit = datetime.timedelta(seconds=self.timeout)
        if not dist.is_initialized():
            # Of two ways to notice a lost rank, the CPUs' comes first: it raises an error that
            # can be told, where NCCL's ends the process.
            grace = datetime.timedelta(seconds=60 if on_gpu else 0)
            store, rank, world_size = meet(limit)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=limit + grace,
            )
            atexit.register(leave)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.agreeing = dist.new_group(backend="gloo", timeout=limit) if on_gpu else None
        self.wrapped: DistributedDataParallel | None = None

    @property
    def command(self) -> list[str]:
        return started_by()

    def describe(self) -> str:
        return f"{super().describe()}, {self.world_size} ranks ({self.name})"

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """Built on the main rank, whose parameters the others receive."""
        source = self.on_rank_0(build)
        model = self.shell(config).train()
        parameters = dict(source.named_parameters()) if source else {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                self.fill(parameter, parameters.get(name))
        return model

    def shell(self, config: ModelConfig) -> GPT:
        """A model on the device whose parameters hold nothing yet."""
        with torch.device("meta"):
            model = GPT(config)
        return self.split(model).to_empty(device=self.device)

    def split(self, model: GPT) -> GPT:
        """A model without memory, as this rank will hold it."""
        return model

    def fill(self, parameter: Tensor, whole: Tensor | None) -> None:
        parameter.copy_(self.scatter(whole, parameter))

    def _wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self.compile(model, self.wrapped) if compiled else self.wrapped

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        return self.wrapped.no_sync() if more_to_come else contextlib.nullcontext()

    def gather(self, tensor: Tensor, copy: bool = True) -> Tensor | None:
        return super().gather(tensor, copy) if self.is_rank_0 else None

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        mine = whole.to(like.device, like.dtype) if self.is_rank_0 else torch.empty_like(like)
        mine = mine.contiguous()
        dist.broadcast(mine, src=0, group=self.agreeing if like.device.type == "cpu" else None)
        return mine

    # --------------------------------------------------------------------------- agreement

    def all_reduce_sum(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def item(self, value: Tensor | float) -> float:
        # First the CPUs: a device that waits for a rank that is gone cannot be waited for.
        self.all_reduce_max(0)
        return super().item(value)

    def synchronize(self) -> None:
        self.all_reduce_max(0)
        super().synchronize()

    def all_reduce_max(self, value: int) -> int:
        return int(self._reduced([value], dist.ReduceOp.MAX)[0])

    def broadcast(self, value: object) -> object:
        return self._told_by(0, value)

    def _reduced(self, values, operation) -> list[float]:
        """In double precision, in which counts of tokens are exact."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, operation, group=self.agreeing)
        return numbers.tolist()

    def _told_by(self, rank: int, value: object) -> object:
        text = json.dumps(value).encode() if self.rank == rank else b""
        length = self.all_reduce_max(len(text))
        letters = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
        dist.broadcast(letters, src=rank, group=self.agreeing)
        return json.loads(bytes(letters.tolist()))

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        # The lowest rank that has failed tells the others.
        order = self.world_size - self.rank if error is not None else 0
        if (first := self.all_reduce_max(order)) == 0:
            return
        speaker = self.world_size - first
        told = None
        if self.rank == speaker:
            plain = [
                (key, None if value is NO_VALUE else show(value), reason, hint)
                for key, value, reason, hint in problems_of(error, DEBUG)
            ]
            told = [exit_code_of(error), socket.gethostname(), plain]
        exit_code, host, problems = self._told_by(speaker, told)
        if self.rank == speaker == 0 and error is not None:
            raise error
        where = f" (on rank {speaker}, {host})" if speaker > 0 else ""
        problems = [
            Problem(key, NO_VALUE if value is None else value, f"{reason}{where}", hint)
            for key, value, reason, hint in problems
        ]
        raise OtherRankError(problems, exit_code) from error

    def is_lost_rank(self, error: BaseException) -> bool:
        if isinstance(error, ClearheadError):
            return False
        signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out")
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        )

    def close(self, exit_code: int) -> None:
        """Waits for the main rank, which has more to write: torchrun and Slurm end all ranks when
        one has ended.

        After a failure others may be gone, and what waits for them on a GPU would keep this
        process from ending: it ends without, as soon as the error is told.
        """
        if exit_code in (0, 143):
            with contextlib.suppress(RuntimeError):  # it is late to complain
                self.all_reduce_max(0)
        elif self.device.type == "cuda" and _sweep.job == 0:
            atexit.register(_leave, exit_code)


@dataclass
class FSDP(DDP):
    """Every rank holds its share of each parameter, gradient and moment (FSDP2)."""

    reshard_after_forward: bool = True
    name: ClassVar[str] = "fsdp"

    def __post_init__(self):
        super().__post_init__()
        self.model: GPT | None = None

    def split(self, model: GPT) -> GPT:
        """Shards a model that has no memory yet, so that no rank ever holds the whole of it.

        The matrices of a block are gathered in the precision of the products, half the bytes to
        send. All else stays in fp32, gathered for the whole step: embeddings and norms, and with
        them the residual stream, as in one process.
        """
        reduced = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
        of_products = MixedPrecisionPolicy(param_dtype=self.dtype, **reduced)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in model.blocks:
            fully_shard(
                [block.attn, block.mlp],  # in one message
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=of_products,
            )
        # About changing in place what a branch returns; nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**reduced))

    def fill(self, parameter: Tensor, whole: Tensor | None) -> None:
        parameter.to_local().copy_(self.scatter(whole, parameter).to_local())

    def _wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        """The model itself; its blocks are compiled each by itself, between the gatherings."""
        self.model = model
        if compiled:
            self.compile_blocks(model)
        return model

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        self.model.set_requires_gradient_sync(not more_to_come)
        if not self.reshard_after_forward:  # gathered once a step, then, not once a micro-batch
            self.model.set_reshard_after_backward(not more_to_come)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        try:
            with super().inference(model):
                yield
        finally:
            # What a forward without backward leaves gathered would be stale after the next step.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def total_norm(self, model: torch.nn.Module) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()

    def probing(self, model: GPT) -> contextlib.AbstractContextManager:
        """In the run's precision: that is what the parameters are gathered in."""
        return self.inference(model)

    def gather(self, tensor: Tensor, copy: bool = True) -> Tensor | None:
        # One tensor at a time is whole on each device, and only the main rank keeps it.
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return super().gather(whole, copy)

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().scatter(whole, like)
        empty = functools.partial(torch.empty, like.shape, dtype=like.dtype, device=like.device)
        whole = whole.to(like.device, like.dtype) if self.is_rank_0 else empty()
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=0)


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave() -> None:
    """Ends what the ranks have together, where they have anything. Whoever waits for this one gets
    an error instead."""
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(limit: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """(A store that all ranks share, this rank, how many there are); RankLostError when they do not
    find each other within the time limit."""
    if _sweep.store is not None:
        return _sweep.begin_job(), _sweep.rank, _sweep.world_size
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        if not _met:  # of one process; the main rank may have the store, and others are using it
            _met.append(next(dist.rendezvous("env://", timeout=limit)))
        store, rank, world_size = _met[0]
        return fresh(store, rank, world_size, limit), rank, world_size
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            fix = "use another, as in torchrun --master-port=29501"
            raise RankLostError("MASTER_PORT", port, "another program has it", fix) from error
        said = message_of(error).partition(". ")[0].rstrip(".")
        cause = f"the ranks did not meet at {address}:{port} ({said})"
        fix = f"start all {os.environ['WORLD_SIZE']} of them, with the same address and port"
        raise RankLostError("parallel.timeout", limit.seconds, cause, fix) from error


def fresh(store: dist.Store, rank: int, world_size: int, limit: datetime.timedelta) -> dist.Store:
    """A part of the store that no earlier start of these ranks has written to.

    torchrun keeps one store over its restarts, and in it the addresses of processes that are gone
    (pytorch issue 135712). So rank 0 draws a word for this start, and tells it to each rank in
    answer to a word that this rank has drawn: no old answer can be that. Raises DistStoreError
    after the time limit.
    """
    word, until = secrets.token_hex(8), time.monotonic() + limit.total_seconds()
    silent = set(range(1, world_size)) if rank == 0 else {rank}
    if rank > 0:
        store.set(f"hello/{rank}", word)
    while silent:
        if time.monotonic() > until:
            raise dist.DistStoreError(f"no answer of rank {min(silent) if rank == 0 else 0}")
        for other in sorted(silent):
            hello, welcome = f"hello/{other}", f"welcome/{other}"
            if rank == 0 and store.check([f"heard/{word}/{other}"]):
                silent.remove(other)
            elif rank == 0 and store.check([hello]):
                store.set(welcome, f"{store.get(hello).decode()} {word}")
            elif rank > 0 and store.check([welcome]):
                mine, answer = store.get(welcome).decode().split()
                if mine == word:
                    store.set(f"heard/{answer}/{rank}", "")
                    word, silent = answer, set()
        time.sleep(0.01)
    return dist.PrefixStore(word, store)


# ------------------------------------------------------------------------------------- a sweep


@dataclass
class Sweep:
    """The jobs that the ranks of a sweep do one after the other (training/reporting/sweep.py).

    Where one rank fails, the others are in the midst of a job and wait for it. So each job has a
    process group of its own, which whoever fails leaves: the others get an error then. What they
    agree on between two jobs they tell each other by the store, in which every job has its part.
    """

    store: dist.Store | None = None  # None: no sweep
    rank: int = 0
    world_size: int = 1
    limit: datetime.timedelta = datetime.timedelta()
    job: int = 0

    def begin(self, value: str, limit: datetime.timedelta) -> str:
        """The ranks meet, for all of the sweep. The main rank's value, on every rank."""
        forget_sweep()
        self.store, self.rank, self.world_size = meet(limit)
        self.limit = limit
        if self.rank == 0:
            self.store.set("sweep", value)
        return self.store.get("sweep").decode()

    def begin_job(self) -> dist.Store:
        """A part of the store for this job's process group, once all ranks have come to make it;
        RankLostError when one has ended the job before, or does not come."""
        self.store.set(f"begun/{self.job}/{self.rank}", "")

        def one_has_ended() -> bool:
            ranks = range(self.world_size)
            return any(self.store.check([f"ended/{self.job}/{rank}"]) for rank in ranks)

        self._wait("begun", one_has_ended)
        return dist.PrefixStore(f"job/{self.job}", self.store)

    def end_job(self, outcome: list, alone: bool) -> list[list]:
        """What each rank says of the job, in their order, once it is over on all. alone: this one
        is leaving, and does not wait for the others."""
        failed = outcome[0] != 0
        if failed and dist.is_initialized() and dist.get_backend() == "nccl":
            # Nothing else ends what a GPU waits for in vain.
            dist.distributed_c10d._abort_process_group()
        leave()
        gc.collect()  # what still holds a connection would keep the others waiting
        self.store.set(f"ended/{self.job}/{self.rank}", json.dumps(outcome))
        if alone:
            return [outcome]
        self._wait("ended", lambda: False)
        told = [self.store.get(f"ended/{self.job}/{rank}") for rank in range(self.world_size)]
        return [json.loads(value) for value in told]

    def _wait(self, what: str, in_vain: Callable[[], bool]) -> None:
        """Until all ranks have come so far."""
        # Whoever waits in a collective does so for as long, and then comes here.
        until = time.monotonic() + 2 * self.limit.total_seconds()
        missing = list(range(self.world_size))
        while missing:
            missing = [r for r in missing if not self.store.check([f"{what}/{self.job}/{r}"])]
            if missing and (in_vain() or time.monotonic() > until):
                raise RankLostError(
                    "parallel.timeout",
                    self.limit.seconds,
                    f"rank {missing[0]} is gone or did not answer",
                    "rerun the same command",
                )
            time.sleep(0.01 if missing else 0)


_sweep = Sweep()
_met: list[tuple[dist.Store, int, int]] = []  # as of rendezvous


def begin_sweep(value: str, timeout: int) -> str:
    """Before the first job of a sweep; see Sweep.begin. timeout: in seconds."""
    return _sweep.begin(value, datetime.timedelta(seconds=timeout))


def begin_job(number: int) -> None:
    _sweep.job = number


def end_job(outcome: list, alone: bool) -> list[list]:
    """Raises RankLostError when not all ranks come."""
    try:
        return _sweep.end_job(outcome, alone)
    except dist.DistError as error:  # the main rank, which has the store, is gone
        raise RankLostError(
            "parallel.timeout",
            _sweep.limit.seconds,
            f"the ranks lost each other ({message_of(error)})",
            "rerun the same command",
        ) from error


def end_sweep() -> None:
    """After the last job; the main rank may have the store, so it waits for the others."""
    if _sweep.store is None:
        return
    begin_job(_sweep.job + 1)
    with contextlib.suppress(RuntimeError):
        _sweep.end_job([0], alone=_sweep.rank > 0)


def forget_sweep() -> None:
    """What this process does next with other ranks is no part of a sweep."""
    leave()
    _sweep.store, _sweep.job = None, 0
