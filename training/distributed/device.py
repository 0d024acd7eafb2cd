"""The device that a process computes on: which one, in which precision, and when to compile.

Used by every command; the processes of one run are in training/distributed/strategy.py.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable

import torch

from training.planning.devices import WORTH_COMPILING, kind_named

STEPS_WORTH_COMPILING = 2_000  # of decoding: compiling takes as long as some thousand steps without
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(
    device: str, precision: str = "auto", group: str = ""
) -> list[tuple[str, object, str, str]]:
    """What this machine lacks: (key, value, reason, hint) for each problem.

    group: "trainer." if the settings have that prefix.
    """
    found = []
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in available and not available[device]():
        reason = "this machine (or this build of torch) has none"
        found.append((group + "device", device, reason, f"use {group}device=auto or cpu"))
        return found
    chosen = best_device() if device == "auto" else device
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if chosen == "cuda" and here > gpus:
        reason = f"{here} processes on a machine with {gpus} of them"
        found.append((group + "device", device, reason, f"use --nproc_per_node={gpus}"))
    if precision == "fp16" and chosen != "cuda":
        reason = f"half precision needs a GPU, and this runs on {chosen}"
        found.append((group + "precision", precision, reason, f"use {group}precision=auto"))
    if precision == "bf16" and chosen == "cuda" and not torch.cuda.is_bf16_supported(False):
        reason = "this GPU has no bf16"
        found.append((group + "precision", precision, reason, f"use {group}precision=auto or fp16"))
    return found


def prepare(device: str, seed: int) -> torch.device:
    """The device for a setting (auto | cpu | cuda | mps); seeds its random generators.

    Of several GPUs each process of a machine gets one, as torchrun numbers them.
    """
    chosen = best_device() if device == "auto" else device
    if chosen == "cpu":
        keep_freed_memory()
    elif chosen == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        chosen = f"cuda:{torch.cuda.current_device()}"
    torch.manual_seed(seed)  # every device's default generator
    return torch.device(chosen)


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies in it, else fp32; fp16 only when the user sets it."""
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":  # emulated products are slow
        has = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
        fast = any(has.get(flag) for flag in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


def should_compile(choice: str | bool, device: torch.device, training_flops: float) -> bool:
    """Whether to compile the model. training_flops: of the whole run, on this device.

    auto: when the run is long enough to save more time than compiling takes. On two CPU cores that
    is 10 to 20 s, for up to a tenth of each step, almost nothing with dropout (docs/benchmarks.md);
    on a GPU half a minute of training is enough.
    """
    if choice != "auto":
        return bool(choice)
    worth = WORTH_COMPILING.get(device.type, float("inf"))
    if training_flops < worth or not can_compile(device):
        return False
    torch._dynamo.config.suppress_errors = True  # runs uncompiled when the compiler fails
    return True


def compiled_step(choice: str | bool, device: torch.device, steps: int) -> Callable | None:
    """The function that compiles a decoding step (inference/decoding.py); None: do not compile.

    auto: on a GPU, where a small model waits for kernel launches, when there are enough steps."""
    worth = device.type == "cuda" and steps >= STEPS_WORTH_COMPILING and can_compile(device)
    if choice is False or (choice == "auto" and not worth):
        return None
    if choice == "auto":
        torch._dynamo.config.suppress_errors = True
    graphs = {"mode": "reduce-overhead"} if device.type == "cuda" else {}
    return functools.partial(torch.compile, dynamic=False, **graphs)


def can_compile(device: torch.device) -> bool:
    """Whether this machine has what torch.compile needs."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of this GPU as its maker states it; None when unknown."""
    if device.type != "cuda":
        return None
    kind = kind_named(torch.cuda.get_device_name(device))
    return kind.flops if kind else None


def keep_freed_memory() -> None:
    """Tells the C library to keep freed memory instead of returning it to the system.

    A step on a CPU allocates and frees gigabytes of activations; by default each large tensor is
    mapped again, and the page faults take a third of the step (docs/benchmarks.md).
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
