"""Peak FLOP/s, memory and price of devices, for scripts.plan and for the MFU of a run.

FLOP/s and memory are from data sheets. Prices are rounded on-demand prices of late 2026 per device
and hour; `scripts.plan price=` overrides them.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A device type."""

    title: str  # the name that the driver reports, or a part of it
    flops: float  # dense bf16 FLOP/s
    fp32: float  # fp32 FLOP/s without TF32; training does not use TF32
    memory: float  # bytes
    price: float  # US dollars per hour


KINDS = {
    "b200": Kind("B200", 2250e12, 75e12, 180e9, 5.0),
    "h200": Kind("H200", 989e12, 67e12, 141e9, 3.5),
    "h100": Kind("H100", 989e12, 67e12, 80e9, 2.5),
    "a100": Kind("A100", 312e12, 19.5e12, 80e9, 1.5),
    "a100-40gb": Kind("A100-SXM4-40GB", 312e12, 19.5e12, 40e9, 1.2),
    "l40s": Kind("L40S", 362e12, 91e12, 48e9, 1.0),
    "l4": Kind("L4", 121e12, 30e12, 24e9, 0.7),
    "rtx4090": Kind("RTX 4090", 165e12, 82e12, 24e9, 0.4),
    # Measured: matrix products on two cores of a server.
    "cpu": Kind("CPU (2 cores, Zen 5)", 800e9, 200e9, 24e9, 0.1),
}
# Fraction of the peak that training reached in benchmarks/results/2026-11-21-base-cpu.json.
MEASURED_UTILISATION = {("cpu", "bf16"): 0.36, ("cpu", "fp32"): 0.83}
# Assumed if not measured: rounded from published GPU training runs of larger GPT-2 models. Small
# models reach less.
ASSUMED_UTILISATION = 0.4

# Above this number of FLOPs per device and run, compilation saves time (docs/results.md).
WORTH_COMPILING = {"cpu": 4e14, "cuda": 2e16}


def kind_named(device_name: str) -> Kind | None:
    """Returns the device type with this driver name; None if unknown."""
    matches = [k for k in KINDS.values() if re.search(rf"\b{re.escape(k.title)}\b", device_name)]
    return max(matches, key=lambda kind: len(kind.title), default=None)
