"""Kinds of devices, in figures: what their makers state, and what renting one costs about.

The prices are round figures of late 2026 for an hour of one device, on demand;
they are there to compare plans with, and yours are given with price=.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of device. Bandwidths are per device and direction, in bytes per second."""

    title: str  # as its driver names it, or part of that
    flops: float  # dense bf16 FLOP/s
    fp32: float  # FLOP/s of products in fp32 proper, which is what training asks for; no TF32
    memory: float  # bytes
    bandwidth: float  # of that memory
    link: float  # between the devices of one machine (NVLink, or PCIe)
    network: float  # between machines, each device's share
    per_machine: int  # devices that usually stand together
    price: float  # US dollars an hour


# The last line is no data sheet: two cores of a server as measured (docs/benchmarks.md), products
# in bf16 and fp32, memory as fused AdamW moves it; its link is gloo within one machine.
KINDS = {
    "b200": Kind("B200", 2250e12, 75e12, 180e9, 8e12, 900e9, 50e9, 8, 5.0),
    "h200": Kind("H200", 989e12, 67e12, 141e9, 4.8e12, 450e9, 50e9, 8, 3.5),
    "h100": Kind("H100", 989e12, 67e12, 80e9, 3.35e12, 450e9, 50e9, 8, 2.5),
    "a100": Kind("A100", 312e12, 19.5e12, 80e9, 2.0e12, 300e9, 25e9, 8, 1.5),
    "a100-40gb": Kind("A100-SXM4-40GB", 312e12, 19.5e12, 40e9, 1.55e12, 300e9, 25e9, 8, 1.2),
    "l40s": Kind("L40S", 362e12, 91e12, 48e9, 0.86e12, 32e9, 12.5e9, 8, 1.0),
    "l4": Kind("L4", 121e12, 30e12, 24e9, 0.3e12, 16e9, 6.25e9, 8, 0.7),
    "rtx4090": Kind("RTX 4090", 165e12, 82e12, 24e9, 1.0e12, 32e9, 3e9, 4, 0.4),
    "cpu": Kind("CPU (2 cores, Zen 5)", 800e9, 200e9, 24e9, 70e9, 2e9, 1e9, 1, 0.1),
}


# FLOPs of a run, on a device, from which on compilation is earned back (docs/benchmarks.md).
WORTH_COMPILING = {"cpu": 4e14, "cuda": 2e16}


def kind_named(device_name: str) -> Kind | None:
    """The kind of a device that its driver calls so; None when it is none of these."""
    matches = [k for k in KINDS.values() if re.search(rf"\b{re.escape(k.title)}\b", device_name)]
    return max(matches, key=lambda kind: len(kind.title), default=None)
