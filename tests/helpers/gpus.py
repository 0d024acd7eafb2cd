"""Functions of torch.cuda, and NVIDIA's driver, as on a machine with GPUs."""

import ctypes

import torch

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # of torch 2.13 for CUDA 13.0


def pretend_gpus(
    monkeypatch,
    name: str = "NVIDIA H100 80GB HBM3",
    capability: tuple[int, int] = (9, 0),
    count: int = 1,
    built: str = WHEEL,
) -> None:
    """Replaces the functions that describe GPUs. Nothing can be computed on them."""
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "get_arch_list": built.split,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
    }
    for function, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, function, replacement)


class NVML:
    """The functions of NVIDIA's library that describe the driver. init: the status of its start.
    gpus: for each GPU, whether this process may open it."""

    def __init__(self, version="535.183.01", cuda=12020, gpus=(True,), init=0):
        self.version, self.cuda, self.gpus, self.init = version.encode(), cuda, gpus, init

    def nvmlInit_v2(self):
        return self.init

    def nvmlSystemGetDriverVersion(self, text, length):
        text.value = self.version
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number):
        number._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, number):
        number._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0 if self.gpus[index.value] else 4  # NVML_ERROR_NO_PERMISSION

    def nvmlShutdown(self):
        return 0


def pretend_driver(monkeypatch, nvml: NVML | None, build: str | None = "13.0") -> None:
    """A machine with this driver (None: without one), on which torch finds no GPU. build: the CUDA
    version for which torch was built; None: a CPU build."""
    load = ctypes.CDLL

    def library(name, *rest, **options):
        if name not in ("libnvidia-ml.so.1", "nvml.dll"):
            return load(name, *rest, **options)
        if nvml is None:
            raise OSError(f"{name}: cannot open shared object file")
        return nvml

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
