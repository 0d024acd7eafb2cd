"""Where the model runs: device, precision, seeds, and the ranks behind one object.

The loop asks this object for a mean, a backward pass or a place on the device, and never asks
which rank it is. One process on one device so far; the interface is what several ranks need.
"""

import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Parallel:
    """One process on one device. Made by `start`."""

    device: torch.device
    dtype: torch.dtype  # what matrix products run in; parameters stay in fp32
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        # Does nothing unless the products are in fp16.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, logs and writes files."""
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager:
        """Matrix products in `dtype`, everything delicate in fp32; does nothing for fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def pinned(self, *tensors: Tensor) -> list[Tensor]:
        """Host tensors where a GPU can fetch them by itself; as they are for other devices."""
        return [tensor.pin_memory() if self.device.type == "cuda" else tensor for tensor in tensors]

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies host tensors to the device; on a GPU the copy overlaps with what it is doing."""
        overlaps = self.device.type == "cuda"  # elsewhere the host's copy could change under it
        return [t.to(self.device, non_blocking=overlaps) for t in self.pinned(*tensors)]

    @contextlib.contextmanager
    def inference(self, model: torch.nn.Module) -> Iterator[None]:
        """Eval mode, no gradients, the run's precision; afterwards all is as it was."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            model.train(was_training)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`, scaled up in fp16 so that small ones do not vanish."""
        self.scaler.scale(loss).backward()

    def update(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float
    ) -> Tensor:
        """Clips the gradients to norm grad_clip (0: not at all), takes the step, clears them.

        Returns the norm before clipping, on the device.
        """
        self.scaler.unscale_(optimizer)
        limit = grad_clip if grad_clip > 0 else float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def mean(self, value: Tensor | float) -> float:
        """The mean over all ranks, as a number; waits for the device."""
        return float(value)

    def synchronize(self) -> None:
        """Waits until the device has done all it was given, so that a clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def start(device: str, precision: str, seed: int) -> Parallel:
    """Chooses device and precision, seeds the generators, prepares the process for training.

    device: auto | cpu | cuda | mps. precision: auto | fp32 | bf16 | fp16. `check` has made sure
    that the machine has what is asked for.
    """
    chosen = _best_device() if device == "auto" else device
    if chosen == "cpu":
        keep_freed_memory()
    torch.manual_seed(seed)  # every device's default generator; it drives dropout and the start
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return Parallel(torch.device(chosen), dtype or _best_dtype(chosen))


def check(
    device: str, precision: str = "auto", group: str = ""
) -> list[tuple[str, object, str, str]]:
    """What this machine lacks of what is asked for: (key, value, cause, fix) for each problem.

    group: "trainer." where the settings have that prefix.
    """
    found = []
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in available and not available[device]():
        cause = "this machine (or this build of torch) has none"
        found.append((group + "device", device, cause, f"use {group}device=auto or cpu"))
        return found
    chosen = _best_device() if device == "auto" else device
    if precision == "fp16" and chosen != "cuda":
        cause = f"half precision needs a GPU, and this runs on {chosen}"
        found.append((group + "precision", precision, cause, f"use {group}precision=auto"))
    if precision == "bf16" and chosen == "cuda" and not torch.cuda.is_bf16_supported(False):
        cause = "this GPU has no bf16"
        found.append((group + "precision", precision, cause, f"use {group}precision=auto or fp16"))
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        cause = f"started as {ranks} processes, and training runs in one so far"
        found.append(("WORLD_SIZE", ranks, cause, "start it as python train.py"))
    return found


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _best_dtype(device: str) -> torch.dtype:
    """bf16 where the hardware multiplies in it, else fp32. fp16 needs care: on request only."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device == "cpu":
        fast = _cpu_has_bf16()
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def _cpu_has_bf16() -> bool:
    """Whether the processor has bf16 products (AVX512-BF16, AMX); emulated ones are slow."""
    if not hasattr(torch.cpu, "get_capabilities"):  # older than torch 2.12
        flags = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, flag, bool)() for flag in flags)
    has = torch.cpu.get_capabilities()
    return any(has.get(flag, False) for flag in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def compiled(
    model: torch.nn.Module, choice: str | bool, device: torch.device, training_flops: float
) -> torch.nn.Module:
    """A second handle on the model, compiled or not; the model itself stays as it is.

    auto: compile where the run is long enough to earn the compilation back. On two CPU cores it
    takes some 40 s and was measured to save 2 % of each step (docs/benchmarks.md), so it pays
    after an hour; on a GPU fused kernels save far more, and half a minute of work suffices.
    """
    worth = {"cpu": 2e15, "cuda": 2e16}.get(device.type, float("inf"))
    if choice is False or (
        choice == "auto" and (training_flops < worth or not _can_compile(device))
    ):
        return model
    if choice == "auto":  # nobody asked for it, so a compiler that fails must not end the run
        torch._dynamo.config.suppress_errors = True
    return torch.compile(model)


def _can_compile(device: torch.device) -> bool:
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s that NVIDIA's data sheet states for this GPU; None when unknown."""
    if device.type != "cuda":
        return None
    stated = {
        "B200": 2250e12,
        "H200": 989e12,
        "H100": 989e12,
        "A100": 312e12,
        "L40S": 362e12,
        "L4": 121e12,
    }
    name = torch.cuda.get_device_name(device)
    return next((flops for model, flops in stated.items() if model in name), None)


def keep_freed_memory() -> None:
    """Tells the C library to keep freed memory instead of returning it to the system.

    A step on CPU allocates and frees gigabytes of activations; by default each large tensor is
    mapped afresh, and the page faults cost a third of the step (docs/benchmarks.md).
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
