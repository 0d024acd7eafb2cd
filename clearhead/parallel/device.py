"""Device of a process: its checks, selection, strategy, precision and compilation."""

import contextlib
import functools
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable

import torch

from clearhead.compute.cross_entropy import has_triton
from clearhead.config.schema import ParallelConfig
from clearhead.parallel import launch
from clearhead.parallel.hardware import keep_freed_memory
from clearhead.parallel.strategy import DTYPES, Strategy

# Above this number of FLOPs per device and run, compilation saves time (docs/results.md).
WORTH_COMPILING = {"cpu": 4e14, "cuda": 2e16}
STEPS_WORTH_COMPILING = 2_000  # decoding steps; compiling takes as long as thousands of them


def check(
    device: str, precision: str = "auto", group: str = ""
) -> list[tuple[str, object, str, str]]:
    """Returns a problem (key, value, reason, hint) for each setting this machine does not support.

    group: prefix of the settings, "trainer." or "".
    """
    found = []
    here = max(launch.local_ranks(), launch.local_rank() + 1)  # not every launcher tells both
    with warnings.catch_warnings(action="ignore"):  # torch's, of several lines, about these faults
        fault = unusable_gpu(here) if device in ("auto", "cuda") else None
    if fault:
        reason, hint = fault
        return [(group + "device", device, reason, f"{hint}, or use {group}device=cpu")]
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in available and not available[device]():
        reason = "not available on this machine or in this build of torch"
        return [(group + "device", device, reason, f"use {group}device=auto or cpu")]
    chosen = best_device() if device == "auto" else device
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


def unusable_gpu(here: int) -> tuple[str, str] | None:
    """Returns (reason, hint) if this machine has an NVIDIA GPU that this process, one of `here` on
    this machine, cannot use: otherwise device=auto would train on the CPU and say nothing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        # A process that sees one GPU was given it by the launcher, such as torchrun
        # --virtual-local-rank.
        if here <= gpus or (gpus == 1 and visible is not None):
            return None
        reason = f"{here} processes were started, but the number of GPUs is {gpus}"
        return reason, f"use --nproc_per_node={gpus}"
    is_hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if is_hidden or not has_nvidia_gpu():
        return None
    reason = f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use"
    hint = "python -c 'import torch; torch.cuda.init()' says why; update the driver, or install "
    return reason, hint + "torch for its CUDA version (https://pytorch.org/get-started/locally)"


def has_nvidia_gpu() -> bool:
    """Returns whether the NVIDIA driver has a GPU that this process may open."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no driver
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        return listed.startswith("GPU") or "version mismatch" in listed  # needs a restart
    return False


def gpu_index() -> int:
    """Returns the index of the GPU of this process among those that it sees."""
    local_rank = launch.local_rank()
    return local_rank if torch.cuda.device_count() > 1 else 0


def prepare(device: str, seed: int, threads: int | None = None) -> torch.device:
    """Returns the device for a setting (auto | cpu | cuda | mps), and seeds the random generators.
    With several GPUs, each process uses the one with the number of its local rank.

    threads: the number of CPU threads of operations; None: PyTorch's choice.
    """
    if threads:
        torch.set_num_threads(threads)
    chosen = best_device() if device == "auto" else device
    if chosen == "cpu":
        keep_freed_memory()
    elif chosen == "cuda":
        torch.cuda.set_device(gpu_index())
        chosen = f"cuda:{torch.cuda.current_device()}"
    torch.manual_seed(seed)  # of all devices
    return torch.device(chosen)


def build_strategy(
    config: ParallelConfig, device: str, precision: str, seed: int, threads: int | None = None
) -> Strategy:
    """Chooses device, precision and strategy, and joins the process group.

    device: auto | cpu | cuda | mps. precision: auto | fp32 | bf16 | fp16. threads: of the CPU.
    Call `check` and that of launch.py first.
    """
    name = config.strategy
    if name == "auto":
        name = "ddp" if launch.rank_count() > 1 else "single"
    if name != "single" and device == "auto" and best_device() == "mps":
        device = "cpu"
    chosen = prepare(device, seed, threads)
    dtype = DTYPES.get(precision) or best_dtype(chosen)
    if name == "single":
        return Strategy(chosen, dtype)
    # A single process saves the 0.6 s that these imports take.
    from clearhead.parallel.ddp import DDP, FSDP

    return (DDP if name == "ddp" else FSDP)(chosen, dtype, timeout=config.timeout)


def best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_dtype(device: torch.device) -> torch.dtype:
    """Returns the fastest precision of matrix products: bf16 if the hardware has them in bf16; fp16
    on GPUs that have them in fp16 only (V100, T4: capability 7.0 to 7.5); else fp32.

    Training in fp16 scales the loss (strategy.py). On MPS, fp32: PyTorch's causal
    attention may attend to later tokens in half precision (issue 195910).
    """
    if (wide := best_wide_dtype(device)) == torch.bfloat16 or device.type != "cuda":
        return wide
    return torch.float16 if torch.cuda.get_device_capability(device) >= (7, 0) else wide


def best_wide_dtype(device: torch.device) -> torch.dtype:
    """Returns bf16 if the hardware has bf16 matrix products, else fp32: the fastest precision with
    the range of fp32. For Muon: entries of gradients are often below 6e-8, which is 0 in fp16."""
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
    """Returns the function that compiles a decoding step (models/decoding.py), or None.

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
        return has_triton()
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))
