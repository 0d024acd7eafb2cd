"""Device of a process: selection, precision and compilation.

All commands that run a model use it. Communication between processes is in
distributed/strategy.py.
"""

import ctypes
import functools
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable

import torch

from clearhead.distributed import launch
from clearhead.distributed.hardware import WORTH_COMPILING, kind_named

STEPS_WORTH_COMPILING = 2_000  # decoding steps; compiling takes as long as thousands of them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check(
    device: str, precision: str = "auto", group: str = ""
) -> list[tuple[str, object, str, str]]:
    """Returns a problem (key, value, reason, hint) for each setting this machine does not support.

    group: prefix of the settings, "trainer." or "".
    """
    found = []
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in available and not available[device]():
        reason = "not available on this machine or in this build of torch"
        found.append((group + "device", device, reason, f"use {group}device=auto or cpu"))
        return found
    chosen = best_device() if device == "auto" else device
    here, gpus = launch.local_ranks(), torch.cuda.device_count()
    if chosen == "cuda" and here > gpus:
        reason = f"{here} processes were started, but the number of GPUs is {gpus}"
        found.append((group + "device", device, reason, f"use --nproc_per_node={gpus}"))
    if precision in ("bf16", "fp16") and chosen == "mps":
        reason = "PyTorch's attention on MPS may attend to later tokens in half precision"
        found.append((group + "precision", precision, reason, f"use {group}precision=auto"))
    elif precision == "fp16" and chosen != "cuda":
        reason = f"needs a CUDA device, but the device is {chosen}"
        found.append((group + "precision", precision, reason, f"use {group}precision=auto"))
    if precision == "bf16" and chosen == "cuda" and not torch.cuda.is_bf16_supported(False):
        reason = "this GPU does not support bf16"
        found.append((group + "precision", precision, reason, f"use {group}precision=auto or fp16"))
    return found


def prepare(device: str, seed: int, threads: int | None = None) -> torch.device:
    """Returns the device for a setting (auto | cpu | cuda | mps), and seeds the random generators.
    With several GPUs, each process uses the GPU with index LOCAL_RANK.

    threads: the number of CPU threads of operations; None: PyTorch's choice.
    """
    if threads:
        torch.set_num_threads(threads)
    chosen = best_device() if device == "auto" else device
    if chosen == "cpu":
        keep_freed_memory()
    elif chosen == "cuda":
        torch.cuda.set_device(launch.number("LOCAL_RANK", 0))
        chosen = f"cuda:{torch.cuda.current_device()}"
    torch.manual_seed(seed)  # of all devices
    return torch.device(chosen)


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 if the hardware has bf16 matrix products, else fp32; never fp16. On MPS, fp32:
    PyTorch's causal attention may attend to later tokens in half precision (issue 195910)."""
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":  # emulated bf16 is slow
        has = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
        fast = any(has.get(flag) for flag in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


def should_compile(device: torch.device, training_flops: float) -> bool:
    """Returns whether to compile the model. training_flops: of the complete run, on this device.

    True if the run is long enough to save more time than compilation takes. On two CPU cores it
    takes 10 to 20 s and saves up to a tenth of each step, almost nothing with dropout
    (docs/results.md). On a GPU, a run of half a minute is long enough.
    """
    worth = WORTH_COMPILING.get(device.type, float("inf"))
    return training_flops >= worth and can_compile(device)


def compiled_step(choice: str | bool, device: torch.device, steps: int) -> Callable | None:
    """Returns the function that compiles a decoding step (inference/decoding.py), or None.

    auto: on a GPU with enough steps, because small models wait for kernel launches there."""
    worth = device.type == "cuda" and steps >= STEPS_WORTH_COMPILING and can_compile(device)
    if choice is False or (choice == "auto" and not worth):
        return None
    if choice == "auto":
        torch._dynamo.config.suppress_errors = True  # runs uncompiled if the compiler fails
    graphs = {"mode": "reduce-overhead"} if device.type == "cuda" else {}
    return functools.partial(torch.compile, dynamic=False, **graphs)


def can_compile(device: torch.device) -> bool:
    """Returns whether this machine has the compiler that torch.compile needs."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense bf16 FLOP/s of this GPU from its data sheet; None if unknown."""
    if device.type != "cuda":
        return None
    kind = kind_named(torch.cuda.get_device_name(device))
    return kind.flops if kind else None


def keep_freed_memory() -> None:
    """Configures malloc to keep freed memory instead of returning it to the system. A step on a CPU
    allocates and frees gigabytes of activations. By default glibc maps each large tensor again, and
    the page faults take a third of the step (docs/results.md)."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
