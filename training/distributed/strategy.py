"""The strategy of a run: one process, DDP or FSDP, behind one interface.

The training loop calls this object for a backward pass, a mean over ranks or a tensor to save, and
does not ask which rank it is:

    Strategy        one process on one device
    ddp.py DDP      several; each holds the whole model, gradients are averaged (Li et al. 2020)
    fsdp.py FSDP    several; each holds a shard of every parameter, gradient and moment, and gathers
                    a block's parameters to compute it (ZeRO-3, Rajbhandari et al. 2020)

torchrun starts the processes and gives each its rank. Tensors travel over NCCL between GPUs and
over gloo between CPUs. Counts, signals and errors travel between the CPUs always, so that no rank
has to wait for a GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from model import GPT, ModelConfig
from training.distributed import device as devices
from training.ops import cpu
from training.ops.cross_entropy import head_loss
from training.optim.optimizers import NonFiniteCheck


@dataclass
class Strategy:
    """One process on one device; DDP and FSDP override what differs."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; parameters stay in fp32
    rank: int = 0
    world_size: int = 1
    name: ClassVar[str] = "single"
    compiles_blocks: ClassVar[bool] = False  # on a GPU too, not the model as a whole

    def __post_init__(self):
        # Does nothing unless the matrix products are in fp16.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.eager: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    @property
    def is_rank_0(self) -> bool:
        """True on the rank that prints, logs and writes files."""
        return self.rank == 0

    @property
    def precision(self) -> str:
        """The value of trainer.precision that means `dtype`."""
        return next(name for name, dtype in devices.DTYPES.items() if dtype == self.dtype)

    @property
    def label(self) -> str:
        """Prefix of this rank's messages; empty on rank 0."""
        return "" if self.is_rank_0 else f"rank {self.rank}: "

    def describe(self) -> str:
        """Device, precision and number of ranks, for the summary of a run."""
        ranks = f", {self.world_size} ranks ({self.name})" if self.name != "single" else ""
        return f"on {self.device} in {str(self.dtype).removeprefix('torch.')}{ranks}"

    # ------------------------------------------------------------------ model and precision

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """The model that build() returns, on the device (FSDP: sharded): the one that is saved,
        validated and read by the lens."""
        return build().to(self.device).train()

    def wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        """The module to train: it shares the parameters of a prepared model and may be compiled.

        On a GPU it is compiled as a whole; on a CPU each block of the model is: blocks share
        compiled code, which takes seconds, and embeddings and loss are faster without
        (docs/benchmarks.md).
        """
        model.head_loss = head_loss
        if self.device.type == "cpu":
            cpu.use_cpu_kernels(model)
        self.wrapped = self._wrap(model)
        if not compiled:
            return self.wrapped
        if self.device.type != "cpu" and not self.compiles_blocks:
            return torch.compile(self.wrapped)
        for block in model.blocks:
            block.compile()  # in place; only training runs the compiled code
        self.eager = functools.partial(torch.compiler.set_stance, "force_eager")
        return self.wrapped

    def _wrap(self, model: GPT) -> torch.nn.Module:
        return model

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products in `dtype`, the rest in fp32; does nothing for fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        """Eval mode without gradients in the run's precision; restores the mode afterwards."""
        was_training = model.training
        model.eval()
        try:
            with self.eager(), torch.no_grad(), self.autocast():
                yield
        finally:
            model.train(was_training)

    def probing(self, model: GPT) -> contextlib.AbstractContextManager:
        """Around forward passes of the lens: in fp32, with FSDP in the run's precision."""
        return self.eager()

    # ------------------------------------------------------------------------------ tensors

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies host tensors to the device; on a GPU the copy overlaps with computation."""
        if self.device.type != "cuda":  # a copy that overlaps could read what changes meanwhile
            return [tensor.to(self.device) for tensor in tensors]
        return [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]

    def gather(self, tensor: Tensor, copy: bool = True) -> Tensor | None:
        """The whole of a parameter or moment on the CPU of rank 0; None on the other ranks.

        Called on all ranks in the same order. copy: copies tensors that are on the CPU already.
        """
        return tensor.detach().to("cpu", copy=copy).contiguous()

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """This rank's part of a tensor of rank 0, with the dtype and placement of `like`.

        Called on all ranks in the same order; `whole` is None on the others.
        """
        return whole.to(like.device, like.dtype)

    # ------------------------------------------------------------------------- gradient step

    def reseed(self, seed: int, step: int) -> None:
        """Seeds the dropout of a step as a function of (seed, step, rank).

        So there is no random state to save, and a resumed run draws the same numbers.
        """
        mixed = np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(mixed[0]))

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch: ranks exchange gradients only in the last
        micro-batch of a step, when more_to_come is false."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss` (fp16: multiplied by the loss scale)."""
        # An infinite loss may have finite gradients. 0 x inf is NaN, which makes them NaN, after
        # the sum over ranks on all ranks. For a finite loss no bit changes.
        loss = loss * (1 + 0 * loss.detach())
        self.scaler.scale(loss).backward()

    def update(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_clip: float,
        nonfinite: NonFiniteCheck,
    ) -> Tensor:
        """Clips the gradients to norm grad_clip (0: does not clip), steps, clears the gradients.

        The step is skipped where the non-finite check says so. Returns the norm before clipping,
        (), on the device.
        """
        self.scaler.unscale_(optimizer)
        grad_norm = self.total_norm(model)
        found_inf = nonfinite.found_inf(grad_norm, self.scaler.scale(torch.ones_like(grad_norm)))
        if optimizer.defaults.get("fused"):
            # The fused kernel divides the gradients as it reads them and changes nothing in a
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
        """The Euclidean norm of all gradients together, (), equal on all ranks."""
        grads = [p.grad for p in model.parameters()]
        if self.device.type == "cpu":  # torch.dot reads at memory speed, vector_norm does not
            # In pieces: the rounding of a long dot product differs by processor, up to 1e-3.
            parts = [part for grad in grads for part in grad.flatten().split(2**20)]
            return torch.stack([torch.dot(part, part) for part in parts]).sum().sqrt()
        return torch.nn.utils.get_total_norm(grads)

    def synchronize(self) -> None:
        """Waits until the device has finished its work, before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --------------------------------------------------------------------------- collectives

    def all_reduce_sum(self, *values: float) -> list[float]:
        """The sum of each value over all ranks."""
        return list(values)

    def all_reduce_max(self, value: int) -> int:
        """The largest of all ranks' values."""
        return value

    def all_reduce_mean(self, values: list[Tensor]) -> list[float]:
        """The means of some scalars over all ranks, as numbers; waits for the device."""
        if not values:
            return []
        self.synchronize()
        totals = self.all_reduce_sum(*torch.stack(values).tolist())
        return [total / self.world_size for total in totals]

    def broadcast(self, value: object) -> object:
        """Rank 0's value on every rank: any value that JSON can hold."""
        return value

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """An error inside on one rank is raised on all ranks, which would otherwise wait for it.

        Nothing inside may wait for another rank.
        """
        yield

    def on_rank_0(self, action: Callable[[], object]) -> object:
        """The result of action() on rank 0, None on the others. Errors are raised on all ranks."""
        result = None
        with self.raise_on_all_ranks():
            if self.is_rank_0:
                result = action()
        return result

    def is_lost_rank(self, error: BaseException) -> bool:
        """Whether an error means that another rank died or timed out."""
        return False

    def close(self, exit_code: int) -> None:
        """Called at the end of a run, after everything is written."""
