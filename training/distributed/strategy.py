"""The processes that train one model together, behind one object.

The loop asks this object for a mean, a backward pass or a tensor to be saved, and never asks
which rank it is:

    Strategy        one process on one device
    ranks.py DDP    several, each with the whole model; the gradients are averaged (Li et al. 2020)
             FSDP   several, each with its share of every parameter, gradient and moment; a block's
                    parameters are gathered when it is computed (ZeRO-3, Rajbhandari et al. 2020)

torchrun starts the processes and tells each its rank. Tensors travel over NCCL between GPUs and
over gloo between CPUs; what the processes have to agree on (a count, a signal, an error) travels
between their CPUs always, so that a GPU is never waited for.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from model import GPT, ModelConfig
from training.distributed import device as devices
from training.ops import cpu
from training.ops.cross_entropy import head_loss

if TYPE_CHECKING:
    from training.optim.nonfinite import NonFiniteCheck

STRATEGIES = ("auto", "single", "ddp", "fsdp")
LONGEST_TIMEOUT = 1800  # seconds; a run that hangs should not hold its machines for longer


@dataclass
class ParallelConfig:
    """How several processes share the work."""

    strategy: str = "auto"  # auto | single | ddp | fsdp
    timeout: int = 600  # seconds until a rank that does not answer ends the run
    reshard_after_forward: bool = True  # fsdp: false keeps gathered weights until backward

    def problems(self) -> list[tuple[str, object, str, str]]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if self.strategy not in STRATEGIES:
            fix = f"use one of {', '.join(STRATEGIES)}"
            found.append(("strategy", self.strategy, "no such strategy", fix))
        if not 1 <= self.timeout < LONGEST_TIMEOUT:
            cause = f"must be from 1 to below {LONGEST_TIMEOUT} seconds"
            found.append(("timeout", self.timeout, cause, "use 600"))
        return found


# ------------------------------------------------------------------------------ one process


@dataclass
class Strategy:
    """One process on one device, and the interface of several. Made by `start`."""

    device: torch.device
    dtype: torch.dtype  # what matrix products run in; parameters stay in fp32
    rank: int = 0
    world_size: int = 1
    name: ClassVar[str] = "single"

    def __post_init__(self):
        # Does nothing unless the products are in fp16.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.eager: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    @property
    def is_rank_0(self) -> bool:
        """True on the rank that prints, logs and writes files."""
        return self.rank == 0

    @property
    def precision(self) -> str:
        """What the settings call `dtype`."""
        return next(name for name, dtype in devices.DTYPES.items() if dtype == self.dtype)

    @property
    def label(self) -> str:
        """What this rank's own words begin with."""
        return "" if self.is_rank_0 else f"rank {self.rank}: "

    @property
    def command(self) -> list[str]:
        """How the processes were started."""
        return ["python"]

    def describe(self) -> str:
        """What to tell the user: on what, in what precision, with how many ranks."""
        return f"on {self.device} in {str(self.dtype).removeprefix('torch.')}"

    # ------------------------------------------------------------------ model and precision

    def prepare_model(self, config: ModelConfig, build: Callable[[], GPT]) -> GPT:
        """The model that build() makes, on the device: what is saved, validated, looked into."""
        return build().to(self.device).train()

    def wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        """A second handle on a placed model, with the same parameters: the one to train."""
        model.head_loss = head_loss
        if self.device.type == "cpu":
            cpu.speed_up(model, self.dtype, compiled)
        return self._wrap(model, compiled)

    def _wrap(self, model: GPT, compiled: bool) -> torch.nn.Module:
        return self.compile(model, model) if compiled else model

    def compile(self, model: GPT, handle: torch.nn.Module) -> torch.nn.Module:
        """What to train instead of `handle`. On a GPU that is compiled as a whole. On a CPU each
        block of the model is: they share their code, so that it takes seconds, and what they leave
        out, embeddings and loss, is faster without (docs/benchmarks.md)."""
        if self.device.type != "cpu":
            return torch.compile(handle)
        self.compile_blocks(model)
        return handle

    def compile_blocks(self, model: GPT) -> None:
        """In place; only training runs the compiled code."""
        for block in model.blocks:
            block.compile()
        self.eager = functools.partial(torch.compiler.set_stance, "force_eager")

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products in `dtype`, everything delicate in fp32; does nothing for fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        """Eval mode, no gradients, the run's precision; afterwards all is as it was."""
        was_training = model.training
        model.eval()
        try:
            with self.eager(), torch.no_grad(), self.autocast():
                yield
        finally:
            model.train(was_training)

    def probing(self, model: GPT) -> contextlib.AbstractContextManager:
        """Around forward passes that look into a model: in full precision where it is at hand."""
        return self.eager()

    # ------------------------------------------------------------------------------ tensors

    def pinned(self, *tensors: Tensor) -> list[Tensor]:
        """Host tensors where a GPU can fetch them by itself; as they are for other devices."""
        return [tensor.pin_memory() if self.device.type == "cuda" else tensor for tensor in tensors]

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies host tensors to the device; on a GPU the copy overlaps with what it is doing."""
        overlaps = self.device.type == "cuda"  # elsewhere the host's copy could change under it
        return [t.to(self.device, non_blocking=overlaps) for t in self.pinned(*tensors)]

    def gather(self, tensor: Tensor, copy: bool = True) -> Tensor | None:
        """A parameter or moment as a whole, on the CPU of the main rank; None on the others.

        On all ranks, in the same order. copy: also of what is on the CPU already.
        """
        return tensor.detach().to("cpu", copy=copy).contiguous()

    def scatter(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """What this rank holds of a tensor that the main rank has: placed as `like` is.

        On all ranks, in the same order; `whole` is None on the others.
        """
        return whole.to(like.device, like.dtype)

    # ------------------------------------------------------------------------- gradient step

    def reseed(self, seed: int, step: int) -> None:
        """Sets the random state of a step's dropout: a function of (seed, step, rank).

        So there is no state to save, and a run that goes on draws what it would have drawn.
        """
        mixed = np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(mixed[0]))

    def no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch; the ranks exchange gradients only when
        no more of this step is to come."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, scaled up in fp16 so that small ones do not vanish."""
        # An infinite loss may have finite gradients. 0 x inf is NaN, which they are then, and when
        # they have been summed, on all ranks; of any other loss this changes no bit.
        loss = loss * (1 + 0 * loss.detach())
        self.scaler.scale(loss).backward()

    def update(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        grad_clip: float,
        guard: "NonFiniteCheck",
    ) -> Tensor:
        """Clips the gradients to norm grad_clip (0: not at all), takes the step, clears them.

        The step is left out where the guard says so. Returns the norm before clipping, on the
        device.
        """
        self.scaler.unscale_(optimizer)
        grad_norm = self.total_norm(model)
        leave_out = guard.found_inf(grad_norm, self.scaler.scale(torch.ones_like(grad_norm)))
        if optimizer.defaults.get("fused"):
            # Its kernel divides the gradients while it reads them anyway, and changes nothing where
            # the step is left out; nobody waits to see.
            optimizer.grad_scale = None
            if grad_clip > 0:
                optimizer.grad_scale = ((grad_norm + 1e-6) / grad_clip).clamp(min=1)
            optimizer.found_inf = leave_out
            optimizer.step()
        elif not leave_out:
            if grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, grad_norm)
            optimizer.step()
        if self.scaler.is_enabled():
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def total_norm(self, model: torch.nn.Module) -> Tensor:
        """The Euclidean norm of all gradients together, (), the same on all ranks."""
        grads = [p.grad for p in model.parameters()]
        if self.device.type == "cpu":  # as fast as memory is, which vector_norm is not
            # In parts: how exactly a long one is summed up differs by processor, to a thousandth.
            parts = [part for grad in grads for part in grad.flatten().split(2**20)]
            return torch.stack([torch.dot(part, part) for part in parts]).sum().sqrt()
        return torch.nn.utils.get_total_norm(grads)

    def synchronize(self) -> None:
        """Waits until the device has done all it was given, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --------------------------------------------------------------------------- agreement

    def all_reduce_sum(self, *values: float) -> list[float]:
        """The sums of some numbers over all ranks."""
        return list(values)

    def item(self, value: Tensor | float) -> float:
        """A number that is still on the device; waits for it."""
        return float(value)

    def all_reduce_mean(self, values: list[Tensor]) -> list[float]:
        """Their means over all ranks, as numbers; waits for the device."""
        if not values:
            return []
        self.synchronize()
        totals = self.all_reduce_sum(*torch.stack(values).tolist())
        return [total / self.world_size for total in totals]

    def all_reduce_max(self, value: int) -> int:
        """The largest of all ranks' values."""
        return value

    def broadcast(self, value: object) -> object:
        """The main rank's value, on every rank. Anything that JSON can hold."""
        return value

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """What fails inside on one rank fails on all of them: the others would wait for it.

        Nothing inside may wait for another rank.
        """
        yield

    def on_rank_0(self, action: Callable[[], object]) -> object:
        """What action() returns, on the main rank; None on the others. Errors are raised on all."""
        result = None
        with self.raise_on_all_ranks():
            if self.is_rank_0:
                result = action()
        return result

    def is_lost_rank(self, error: BaseException) -> bool:
        """Whether an error means that another rank is gone or does not answer."""
        return False

    def close(self, exit_code: int) -> None:
        """At the end of a run, when all is written."""


# ------------------------------------------------------------------------------------- starting


def launched() -> bool:
    """Whether torchrun (or something like it) started this process as one of several or of one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_count() -> int:
    """How many processes were started together."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def started_by() -> list[str]:
    """The program that started this process, with what makes another start equal."""
    if not launched():
        return ["python"]
    ranks = rank_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    nodes = [f"--nnodes={ranks // here}", "..."] if here < ranks else []
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    again = [f"--max-restarts={restarts}"] if restarts != "0" else []
    return ["torchrun", *nodes, f"--nproc_per_node={here}", *again]


def check(config: ParallelConfig, device: str, batch_size: int | None) -> list[tuple]:
    """What of the way the command was started does not fit: (key, value, reason, hint) each.

    batch_size: windows per optimizer step over all ranks; None while it is not known.
    """
    if launched() and (problems := check_launch()):
        return problems
    ranks = rank_count()
    strategy, key = config.strategy, "parallel"
    if not launched() and strategy in ("ddp", "fsdp"):
        fix = f"start it with torchrun --nproc_per_node=N train.py parallel={strategy} ..."
        return [(key, strategy, "started as one process, without torchrun", fix)]
    if not launched() and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        cause = "srun started it several times, and none knows of the others"
        fix = "let srun start torchrun, once a machine, as scripts/slurm.sh does"
        return [(key, strategy, cause, fix)]
    found = check_ranks(strategy, ranks, batch_size)
    if ranks > 1 and device == "mps":
        cause = "several processes cannot share it"
        found.append(("trainer.device", device, cause, "use trainer.device=cpu"))
    return found


def check_launch() -> list[tuple]:
    """Variables that the launcher did not set, as (key, value, reason, hint)."""
    numbers = ("WORLD_SIZE", "RANK", "MASTER_PORT", *({"LOCAL_RANK"} & os.environ.keys()))
    for key in (*numbers, "MASTER_ADDR"):
        value = os.environ.get(key, "")
        if not value or (key in numbers and not value.isdecimal()):
            wrong = "no number" if value else "missing"
            cause = f"is {wrong}, and a launcher sets it for each rank"
            return [(key, value, cause, "start it with torchrun --nproc_per_node=N train.py ...")]
    if not int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
        cause = f"there are {os.environ['WORLD_SIZE']} ranks, counted from 0"
        return [("RANK", os.environ["RANK"], cause, "start it with torchrun")]
    return []


def check_ranks(strategy: str, ranks: int, batch_size: int | None) -> list[tuple]:
    """What does not fit a number of ranks: (key, value, reason, hint) for each problem."""
    found = []
    if strategy == "single" and ranks > 1:
        cause = f"started as {ranks} processes, which would all train the same"
        fix = "use parallel=auto, or start it without torchrun"
        found.append(("parallel", strategy, cause, fix))
    if batch_size is not None and batch_size % ranks != 0:
        cause = f"cannot be shared out evenly over {ranks} ranks"
        fix = f"use a multiple of {ranks}, such as {-(-batch_size // ranks) * ranks}"
        found.append(("trainer.batch_size", batch_size, cause, fix))
    return found


def start(config: ParallelConfig, device: str, precision: str, seed: int) -> Strategy:
    """Chooses the device, the precision and the strategy; joins the other ranks.

    device: auto | cpu | cuda | mps. precision: auto | fp32 | bf16 | fp16. `check`, here and in
    training/distributed/device.py, has made sure that they can be had.
    """
    ranks = rank_count()
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ddp" if ranks > 1 else "single"
    if strategy != "single" and device == "auto" and devices.best_device() == "mps":
        device = "cpu"
    chosen = devices.prepare(device, seed)
    dtype = devices.DTYPES.get(precision) or devices.best_dtype(chosen)
    if strategy == "single":
        return Strategy(chosen, dtype)
    from training.distributed.data_parallel import DDP, FSDP

    if strategy == "ddp":
        return DDP(chosen, dtype, timeout=config.timeout)
    return FSDP(
        chosen, dtype, timeout=config.timeout, reshard_after_forward=config.reshard_after_forward
    )
