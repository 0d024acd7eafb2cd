"""Peak FLOP/s, memory and price of devices, for scripts.plan and for the MFU of a run.

FLOP/s and memory are from data sheets. Prices are rounded on-demand prices of late 2026 per device
and hour; `scripts.plan price=` overrides them.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Peak(NamedTuple):
    """Peak FLOP/s of a device, without sparsity."""

    half: float  # matrix products in bf16 and fp16 with sums in fp32, as in PyTorch
    fp32: float  # without TF32; training does not use TF32


# By the name that the driver reports, without NVIDIA, Tesla and GeForce: a pattern for the complete
# name. A name with another suffix is another device: RTX 4090 D, RTX 4090 Laptop GPU, or a MIG
# slice, "H100 80GB HBM3 MIG 1g.10gb". Data sheets often give the value with sparsity, which is
# twice as large. On GeForce cards, sums in fp32 halve the speed of fp16.
PEAKS = {
    # Data sheets of GB300 NVL72, GB200 NVL72, HGX B300 and HGX B200, divided by their GPUs.
    r"GB[23]00": Peak(2500e12, 80e12),
    r"B[23]00( SXM6 AC)?": Peak(2250e12, 75e12),
    # Data sheets of H200, GH200, H100 (SXM, NVL) and, in its first edition, H100 PCIe.
    r"H200|GH200 \w+( HBM3e)?|H100 80GB HBM3": Peak(989e12, 67e12),
    r"H[12]00 NVL": Peak(835e12, 60e12),
    r"H100 PCIe": Peak(756e12, 51e12),
    r"H20(-3e)?": Peak(148e12, 44e12),
    # Data sheets of A100, A10 and A10G (of AWS).
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": Peak(312e12, 19.5e12),
    r"A10": Peak(125e12, 31.2e12),
    r"A10G": Peak(70e12, 35e12),
    # White papers "NVIDIA Ampere GA102", "NVIDIA Ada" (GeForce and professional) and "NVIDIA RTX
    # Blackwell"; data sheets of L40S and L4.
    r"RTX A6000": Peak(154.8e12, 38.7e12),
    r"RTX 3090": Peak(71e12, 35.6e12),
    r"L40S": Peak(362e12, 91.6e12),
    r"L4": Peak(121e12, 30.3e12),
    r"RTX 6000 Ada Generation": Peak(364e12, 91.1e12),
    r"RTX 4090": Peak(165.2e12, 82.6e12),
    r"RTX 5090": Peak(209.5e12, 104.8e12),
    # Data sheets of T4 and V100. These have fp16 and no bf16.
    r"T4": Peak(65e12, 8.1e12),
    r"V100S-PCIE-32GB": Peak(130e12, 16.4e12),
    r"V100-SXM[23]-\d+GB(-LS)?": Peak(125e12, 15.7e12),
    r"V100-PCIE-\d+GB": Peak(112e12, 14e12),
}
# Apple publishes no FLOP/s of matrix products, so a run on MPS has no MFU.


def peak_named(device_name: str) -> Peak | None:
    """Returns the peak FLOP/s of the device with this driver name; None if unknown."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device_name)
    return next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), None)


@dataclass(frozen=True)
class Kind:
    """A device type of scripts.plan. All have bf16."""

    title: str
    peak: Peak
    memory: float  # bytes
    price: float  # US dollars per hour


def _kind(title: str, device_name: str, memory: float, price: float) -> Kind:
    peak = peak_named(device_name)
    assert peak, device_name
    return Kind(title, peak, memory, price)


KINDS = {
    "b200": _kind("B200", "B200", 180e9, 5.0),
    "h200": _kind("H200", "H200", 141e9, 3.5),
    "h100": _kind("H100", "H100 80GB HBM3", 80e9, 2.5),
    "a100": _kind("A100", "A100-SXM4-80GB", 80e9, 1.5),
    "a100-40gb": _kind("A100-SXM4-40GB", "A100-SXM4-40GB", 40e9, 1.2),
    "l40s": _kind("L40S", "L40S", 48e9, 1.0),
    "l4": _kind("L4", "L4", 24e9, 0.7),
    "rtx4090": _kind("RTX 4090", "RTX 4090", 24e9, 0.4),
    # Measured: matrix products on two cores of a server.
    "cpu": Kind("CPU (2 cores, Zen 5)", Peak(800e9, 200e9), 24e9, 0.1),
}
# Fraction of the peak that training reached in benchmarks/results/2026-11-21-base-cpu.json.
MEASURED_UTILISATION = {("cpu", "bf16"): 0.36, ("cpu", "fp32"): 0.83}
# Assumed if not measured: rounded from published GPU training runs of larger GPT-2 models. Small
# models reach less.
ASSUMED_UTILISATION = 0.4

# Above this number of FLOPs per device and run, compilation saves time (docs/results.md).
WORTH_COMPILING = {"cpu": 4e14, "cuda": 2e16}
