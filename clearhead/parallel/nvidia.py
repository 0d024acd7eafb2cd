"""The NVIDIA GPUs of a machine: whether torch can use them, and which one a process uses."""

import ctypes
import hashlib
import os
import re
import sys

import torch

from clearhead.parallel import launch

LIBRARY_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH: kernel module and library differ
TORCH = "https://pytorch.org/get-started/locally"


def unusable_gpu(here: int) -> tuple[str, str] | None:
    """Returns (reason, hint) if this machine has an NVIDIA GPU that this process, one of `here` on
    this machine, cannot use.

    Otherwise device=auto would train on the CPU and say nothing. That includes a CPU build of
    torch, which `pip install torch` installs on Windows. None without a GPU, and without a visible
    one: CUDA_VISIBLE_DEVICES="", a container or a job without GPUs.
    """
    if torch.cuda.is_available():
        return _too_few_gpus(here) or _no_code_for_this_gpu()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if is_hidden or (driver := nvidia_driver()) is None:
        return None
    (version, cuda), needs = driver, torch.version.cuda
    has = f"this machine has an NVIDIA GPU, but torch {torch.__version__}"
    if needs is None:
        return f"{has} is built without CUDA", f"install torch for CUDA {cuda} or older ({TORCH})"
    if cuda < int(needs.partition(".")[0]):
        reason = f"{has} needs a driver for CUDA {needs}, and driver {version} is for CUDA {cuda}"
        return reason, f"update the driver, or install torch for CUDA {cuda} ({TORCH})"
    named = f", CUDA_VISIBLE_DEVICES={visible}" if visible else ""
    hint = "python -c 'import torch; torch.cuda.init()' shows the error; restart the machine"
    return f"{has} cannot use it (driver {version}{named})", hint


def _too_few_gpus(here: int) -> tuple[str, str] | None:
    """Returns (reason, hint) if there are fewer GPUs than processes, `here`, on this machine.

    A process that sees one GPU by CUDA_VISIBLE_DEVICES was given it by the launcher, such as
    torchrun --virtual-local-rank; then build_strategy checks that no other process has the same.
    """
    gpus = torch.cuda.device_count()
    if here <= gpus or (gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        return None
    reason = f"{here} processes were started, but the number of GPUs is {gpus}"
    return reason, f"use --nproc_per_node={gpus}"


def _no_code_for_this_gpu() -> tuple[str, str] | None:
    """Returns (reason, hint) if this build of torch has no code for the GPU of this process.

    Machine code (sm_) runs on GPUs with the same major and no smaller minor number of their compute
    capability, PTX (compute_) on all later ones. With the suffix a, both run on this one only; with
    f, on GPUs with the same major number.
    """
    built = [] if torch.version.hip else torch.cuda.get_arch_list()
    major, minor = of_gpu = torch.cuda.get_device_capability(gpu_index())
    known = []
    for name in built:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)):
            return None  # of a later toolkit
        kind, first, last, suffix = parts.groups()
        known.append(of_code := (int(first), int(last)))
        is_portable = kind == "compute" and not suffix
        same = of_code == of_gpu or (of_code[0] == major and suffix != "a")
        if of_code <= of_gpu and (same or is_portable):
            return None
    if not known:
        return None
    gpu = f"{torch.cuda.get_device_name(gpu_index())} has compute capability {major}.{minor}"
    reason = f"{gpu}, but torch {torch.__version__} is built for {' '.join(built)}"
    which = "a newer torch" if of_gpu > min(known) else "torch for an older CUDA, such as 12.6"
    return reason, f"install {which} ({TORCH})"


def nvidia_driver() -> tuple[str, int] | None:
    """Returns (version of the NVIDIA driver, major number of the newest CUDA that it supports).

    None without a driver or without a GPU that this process may open. Asks NVML, a library that
    all drivers include and that works with any version of CUDA.
    """
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        if (status := nvml.nvmlInit_v2()) != 0:
            return ("was updated without a restart", 99) if status == LIBRARY_MISMATCH else None
        count, cuda, handle = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p()
        version = ctypes.create_string_buffer(96)
        nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))  # 12020 for CUDA 12.2
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))  # includes GPUs without permission
        opened = [
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            for index in range(count.value)
        ]
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one from before 2018
        return None
    return (version.value.decode(), cuda.value // 1000) if 0 in opened else None


def gpu_index() -> int:
    """Returns the index of the GPU of this process among those that it sees."""
    local_rank = launch.local_rank()
    return local_rank if torch.cuda.device_count() > 1 else 0


def gpu_id(device: torch.device) -> int:
    """Returns a number of 48 bits that differs between GPUs, also of different machines."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:6], "big")
