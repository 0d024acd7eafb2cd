"""DDP and FSDP: every rank trains on its part of each batch. With DDP it holds the complete model,
with FSDP a shard of each parameter, gradient and moment."""

import atexit
import contextlib
import datetime
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from clearhead.errors import (
    DEBUG_HINT,
    NO_VALUE,
    ClearheadError,
    OtherRankError,
    Problem,
    as_yaml,
    exit_code_of,
    problems_of,
)
from clearhead.parallel.launch import join_process_group
from clearhead.parallel.strategy import Strategy
from model import GPT, ModelConfig, model_without_values

NO_LIMIT = datetime.timedelta(days=30)  # gloo needs a timeout


@dataclass
class DDP(Strategy):
    """Data parallelism: gradients are averaged over ranks after the last micro-batch of a step."""

    timeout: int = 600  # seconds
    name: ClassVar[str] = "ddp"

    def __post_init__(self):
        super().__post_init__()
        on_gpu = self.device.type == "cuda"
        join_process_group(self.device, self.timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # For collectives between CPUs. None: the default group, which uses gloo already.
        limit = datetime.timedelta(seconds=self.timeout)
        self.cpu_group = dist.new_group(backend="gloo", timeout=limit) if on_gpu else None
        self.unlimited_group = dist.new_group(backend="gloo", timeout=NO_LIMIT)

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """Calls build() on rank 0 and sends the parameters to the other ranks."""
        source = self.on_rank_0(build)
        model = self.shard(model_without_values(config)).to_empty(device=self.device).train()
        parameters = dict(source.named_parameters()) if source else {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.scatter(parameters.get(name), parameter))
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

    def all_reduce_sum(self, *values: float) -> list[float]:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def all_reduce_max(self, value: int) -> int:
        return int(self._all_reduce([value], dist.ReduceOp.MAX)[0])

    def _all_reduce(self, values: Iterable[float], operation: dist.ReduceOp) -> list[float]:
        """Reduces in float64, which represents token counts exactly."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, operation, group=self.cpu_group)
        return numbers.tolist()

    def synchronize(self) -> None:
        # A GPU that waits for a dead rank cannot be interrupted, so the CPUs synchronize first.
        self.all_reduce_max(0)
        super().synchronize()

    def wait_for_rank_0(self) -> None:
        """Waits until rank 0 calls this too. Rank 0 may have to write or upload gigabytes before,
        so the others wait without a limit: they notice when it dies. Rank 0 waits for the others
        at most `timeout`."""
        arrived = dist.broadcast(torch.zeros(1), src=0, group=self.unlimited_group, async_op=True)
        arrived.wait(datetime.timedelta(seconds=self.timeout) if self.is_rank_0 else NO_LIMIT)

    def broadcast(self, value: object) -> object:
        self.wait_for_rank_0()
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
        self.wait_for_rank_0()
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
        # Of a collective during which another one timed out, and of wait_for_rank_0.
        signs += ("pair closure", "Operation timed out")
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        )

    def close(self, exit_code: int) -> None:
        """Waits for rank 0, which writes files last: torchrun and Slurm stop all ranks when one
        exits. After an error, other ranks may be dead, and GPU work that waits for them would keep
        this process alive. So on a GPU, the process exits without cleanup after printing it."""
        if exit_code in (0, 143):
            with contextlib.suppress(RuntimeError):  # the run is complete
                self.wait_for_rank_0()
        elif self.device.type == "cuda":
            atexit.register(_exit_at_once, exit_code)


def _exit_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@dataclass
class FSDP(DDP):
    """Fully sharded data parallelism (FSDP2 of PyTorch)."""

    name: ClassVar[str] = "fsdp"
    compiles_blocks: ClassVar[bool] = True  # parameters are gathered between blocks

    def shard(self, model: GPT) -> GPT:
        """Shards a model on the meta device, before memory for its parameters is allocated.

        Attention and MLP of a block are gathered together, in the precision of matrix products,
        which halves the bytes to send. Embeddings and all norms are gathered in fp32 for the
        complete step, so norms and residual stream are in fp32, as in a single process. No module
        inside a block has hooks, because each one would cut its compiled code.
        """
        fp32 = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        of_blocks = {p for b in model.blocks for m in (b.attn, b.mlp) for p in m.parameters()}
        # The complete model first: after fully_shard(block), the norms of the block would be
        # parameters of no group.
        policy = MixedPrecisionPolicy(**fp32)
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=of_blocks)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, **fp32)
        for b in model.blocks:
            norms = {*b.attn_norm.parameters(), *b.mlp_norm.parameters()}
            fully_shard(b, mesh=mesh, mp_policy=policy, ignored_params=norms)
        return model

    def normal_(self, parameter: Tensor, std: float) -> None:
        whole = torch.empty(parameter.shape, device=self.device).normal_(std=std)
        on = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_tensor(whole, *on, src_data_rank=None))  # sends nothing

    def _wrap(self, model: GPT) -> torch.nn.Module:
        return model

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        self.wrapped.set_requires_gradient_sync(not more_to_come)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        try:
            with super().inference(model):
                yield
        finally:
            # After a forward without backward, the gathered parameters would become outdated.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def total_norm(self, model: torch.nn.Module) -> Tensor:
        grads = [p.grad for p in model.parameters() if p.grad is not None]  # else it is frozen
        return torch.nn.utils.get_total_norm(grads).full_tensor()

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return super().scatter(whole, like)
        on = {"device": like.device, "dtype": like.dtype}
        whole = whole.to(**on) if self.is_rank_0 else torch.empty(like.shape, **on)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=0)
