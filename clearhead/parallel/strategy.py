"""Distributed strategy of a run: one interface for a single process, DDP and FSDP.

    Strategy        one process on one device
    ddp.py DDP      several processes, each with the complete model; gradients are averaged
                    (Li et al. 2020)
    ddp.py FSDP     several processes, each with a shard of every parameter, gradient and moment;
                    the parameters of a block are gathered to compute it
                    (ZeRO-3, Rajbhandari et al. 2020)

The training loop uses this interface and contains no code for specific ranks. torchrun starts the
processes. NCCL sends tensors between GPUs, gloo between CPUs. Counts, signals and errors are always
sent between CPUs, so that no rank waits for a GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clearhead.compute.optimizers import NonFiniteCheck
from clearhead.compute.specialize import specialize
from clearhead.errors import NO_VALUE, refuse
from model import GPT, ModelConfig, model_without_values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Strategy:
    """One process on one device; the base class of DDP and FSDP."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; parameters stay in fp32
    rank: int = 0
    world_size: int = 1
    name: ClassVar[str] = "single"
    compiles_blocks: ClassVar[bool] = False  # on a GPU: separate blocks, not the complete model

    def __post_init__(self):
        # Enabled for fp16 only.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.eager: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank prints, logs and writes files."""
        return self.rank == 0

    @property
    def precision(self) -> str:
        """The value of trainer.precision for `dtype`."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def label(self) -> str:
        """Prefix of this rank's messages; empty on rank 0."""
        return "" if self.is_rank_0 else f"rank {self.rank}: "

    def describe(self) -> str:
        """Returns device, precision and number of ranks as text."""
        ranks = f", {self.world_size} ranks ({self.name})" if self.name != "single" else ""
        gpu = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"on {self.device}{gpu} in {str(self.dtype).removeprefix('torch.')}{ranks}"

    # ------------------------------------------------------------------ model and precision

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """Returns build() on the device; FSDP shards it. Checkpoints, validation and attention
        snapshots use this model."""
        return build().to(self.device).train()

    def new_model(self, config: ModelConfig) -> GPT:
        """Returns a model with initial weights. They are drawn on the device, because one CPU core
        takes half a minute for GPT-2 XL; so they differ from those of GPT(config)."""
        model = self.shard(model_without_values(config)).to_empty(device=self.device).train()
        model.init_weights(self.normal_)
        return model

    def shard(self, model: GPT) -> GPT:
        """Returns this rank's version of a model on the meta device."""
        return model

    def normal_(self, parameter: Tensor, std: float) -> None:
        """Draws this rank's part of a parameter: the values do not depend on the strategy."""
        parameter.normal_(std=std)

    def wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        """Returns the module to train. It shares the parameters of a prepared model. compiled: on
        a GPU, compile the complete model (FSDP: each block). On a CPU, compile each block, because
        embeddings and loss are faster uncompiled (docs/results.md)."""
        by_block = compiled and (self.device.type == "cpu" or self.compiles_blocks)
        specialize(model, self.device, compile_blocks=by_block)
        self.wrapped = self._wrap(model)
        if by_block:  # only training uses the compiled code
            self.eager = functools.partial(torch.compiler.set_stance, "force_eager")
        elif compiled:
            return torch.compile(self.wrapped)
        return self.wrapped

    def _wrap(self, model: GPT) -> torch.nn.Module:
        return model

    def autocast(self) -> contextlib.AbstractContextManager:
        """Returns a context: matrix products in `dtype`, everything else in fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        """Sets eval mode, no gradients and the precision of the run; restores the mode at exit."""
        was_training = model.training
        model.eval()
        try:
            with self.eager(), torch.no_grad(), self.autocast():
                yield
        finally:
            model.train(was_training)

    # ------------------------------------------------------------------------------ tensors

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies host tensors to the device; on a GPU the copy overlaps with computation."""
        if self.device.type != "cuda":  # a non-blocking copy could read changed data
            return [tensor.to(self.device) for tensor in tensors]
        # A tensor that is not contiguous would be copied to pageable memory first, and the copy
        # from there waits for the work before it.
        pinned = [tensor.contiguous().pin_memory() for tensor in tensors]
        return [tensor.to(self.device, non_blocking=True) for tensor in pinned]

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """Returns this rank's part of `whole`, with the dtype and placement of `like`. All ranks
        must call it, in the same order. `whole` is None on ranks other than 0."""
        # A copy: `whole` is mapped to the file, and Windows does not remove a mapped file.
        return whole.to(like.device, like.dtype, copy=True)

    # ------------------------------------------------------------------------- gradient step

    def start_training(self, model: GPT) -> None:
        """Call it before the first step. Parameters may be frozen (requires_grad) until then.
        Raises ConfigError if all are."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            hint = "call requires_grad_(True) for the parameters to train"
            refuse([("model", NO_VALUE, "all parameters are frozen", hint)])

    def reseed(self, seed: int, step: int) -> None:
        """Seeds the dropout of a step with a function of (seed, step, rank). A resumed run draws
        the same numbers, and checkpoints need no random state."""
        mixed = np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(mixed[0]))

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        """Returns a context for forward and backward of a micro-batch. Ranks exchange gradients if
        more_to_come is false: in the last micro-batch of a step only."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` to .grad (fp16: multiplied by the loss scale)."""
        # An infinite loss may have finite gradients. 0 x inf is NaN and makes them NaN; after the
        # sum over ranks they are NaN on all ranks. A finite loss is multiplied by exactly 1.
        loss = loss * (1 + 0 * loss.detach())
        self.scaler.scale(loss).backward()

    def update(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_clip: float,
        nonfinite: NonFiniteCheck,
    ) -> Tensor:
        """Clips gradients to norm grad_clip (0: no clipping), calls step(), clears gradients. The
        non-finite check may skip the step. Returns the norm before clipping, (), on the device."""
        self.scaler.unscale_(optimizer)
        grad_norm = self.total_norm(model)
        found_inf = nonfinite.found_inf(grad_norm, self.scaler.scale(torch.ones_like(grad_norm)))
        if optimizer.defaults.get("fused"):
            # The fused kernel divides the gradients while it reads them and does nothing in a
            # skipped step, so the host does not wait for the device.
            optimizer.grad_scale = None
            if grad_clip > 0:
                optimizer.grad_scale = ((grad_norm + 1e-6) / grad_clip).clamp(min=1)
            optimizer.found_inf = found_inf
            optimizer.step()
        elif not found_inf:
            if grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, grad_norm)
            optimizer.step()
        if self.scaler.is_enabled():
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def total_norm(self, model: torch.nn.Module) -> Tensor:
        """Returns the Euclidean norm of all gradients together, (), equal on all ranks."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]  # else it is frozen
        if self.device.type == "cpu":  # torch.dot reaches memory bandwidth, vector_norm does not
            # In chunks, because rounding errors of long dot products reach 1e-3 on some CPUs.
            parts = [part for grad in grads for part in grad.flatten().split(2**20)]
            return torch.stack([torch.dot(part, part) for part in parts]).sum().sqrt()
        return torch.nn.utils.get_total_norm(grads)

    def synchronize(self) -> None:
        """Waits until the device has finished its work. Call it before reading a clock."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    # --------------------------------------------------------------------------- collectives

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Returns the sum of each value over all ranks."""
        return list(values)

    def all_reduce_max(self, value: int) -> int:
        """Returns the maximum over all ranks."""
        return value

    def all_reduce_mean(self, values: list[Tensor]) -> list[float]:
        """Returns the means of scalars over all ranks. Waits for the device."""
        if not values:
            return []
        self.synchronize()
        totals = self.all_reduce_sum(*torch.stack(values).tolist())
        return [total / self.world_size for total in totals]

    def wait_for_rank_0(self) -> None:
        """Waits until rank 0 calls this too: it may write or upload gigabytes before."""

    def broadcast(self, value: object) -> object:
        """Returns the value of rank 0 on every rank. Values are JSON types."""
        return value

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises an error of one rank on all ranks, so that the others do not wait for it.
        Code inside must not wait for other ranks."""
        yield

    def on_rank_0(self, action: Callable[[], object]) -> object:
        """Returns action() on rank 0, None on the others. Raises errors on all ranks."""
        result = None
        with self.raise_on_all_ranks():
            if self.is_rank_0:
                result = action()
        return result

    def is_lost_rank(self, error: BaseException) -> bool:
        """Returns whether an error means that another rank died or timed out."""
        return False

    def close(self, exit_code: int) -> None:
        """Closes the strategy at the end of a run, after everything is written."""
