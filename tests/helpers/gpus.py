"""Functions of torch.cuda as on a machine with GPUs."""

import torch


def pretend_gpus(
    monkeypatch,
    name: str = "NVIDIA H100 80GB HBM3",
    capability: tuple[int, int] = (9, 0),
    count: int = 1,
) -> None:
    """Replaces the functions that describe GPUs. Nothing can be computed on them."""
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
    }
    for function, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, function, replacement)
