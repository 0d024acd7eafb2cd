"""Roofline: the measured limits of a device for a training step of benchmarks/training.py.

Matrix products and a memory copy are timed on random data, in the process of the benchmark. They
give two limits: the FLOPs of a step at the rate of the fastest product tried here, and the time of
the step's own products run sequentially with nothing between them.

Shapes: N positions of a step (B windows of T tokens), C emb_dim, H heads, D head_dim, V vocabulary,
L layers.
"""

import time
from collections.abc import Callable

import torch

from model import GPT, ModelConfig
from training.distributed.device import DTYPES

SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}  # sizes of the square products to time
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
Shape = tuple[int, int, int]  # m, k, n of (m, k) @ (k, n)


def measure_roofline(
    model: GPT,
    batch_size: int,
    length: int,
    precisions: list[str],
    device: torch.device,
    seconds: float,
) -> dict:
    """Rates in FLOP/s and bytes/s; `seconds` are spent on each shape."""
    results: dict = {"products": {}, "copy": copy_rate(device, seconds)}
    kind = "cuda" if device.type == "cuda" else "cpu"
    for precision in precisions:
        dtype = DTYPES[precision]
        rates = {(n, n, n): product_rate((n, n, n), dtype, device, seconds) for n in SQUARES[kind]}
        step_seconds = 0.0
        for shape, times, which in step_products(model.config, batch_size, length):
            windows = batch_size * model.config.num_heads if which == "attention" else 1
            rate = product_rate(shape, dtype, device, seconds, which, windows)
            rates[shape] = max(rate, rates.get(shape, 0.0))
            step_seconds += times * flops(shape) / rate
        best = max(rates, key=lambda shape: rates[shape])
        positions = batch_size * length
        results["products"][precision] = {
            "best": rates[best],
            "best_shape": best,
            "best_tokens_per_second": rates[best] / model.flops_per_token(length),
            "own": positions * model.flops_per_token(length) / step_seconds,
            "own_tokens_per_second": positions / step_seconds,
            "rates": {" x ".join(map(str, shape)): rate for shape, rate in rates.items()},
        }
    return results


def flops(shape: Shape) -> int:
    m, k, n = shape
    return 2 * m * k * n


def step_products(
    config: ModelConfig, batch_size: int, length: int
) -> list[tuple[Shape, float, str]]:
    """The matrix products of a training step: (shape, count, layout in memory).

    Queries, keys and values are one product, which is at least as fast as three. Attention is
    windows x heads products in one batch, and half of each, which is what causal attention needs.
    """
    n, c, v = batch_size * length, config.emb_dim, config.vocab_size
    found: list[tuple[Shape, float, str]] = []
    for inner, outer, times in (
        (c, 3 * c, config.num_layers),
        (c, c, config.num_layers),
        (c, 4 * c, config.num_layers),
        (4 * c, c, config.num_layers),
        (c, v, 1),
    ):
        found.append(((n, inner, outer), times, "forward"))
        found.append(((n, outer, inner), times, "input gradient"))
        found.append(((outer, n, inner), times, "weight gradient"))
    d = c // config.num_heads
    halves = batch_size * config.num_heads * config.num_layers / 2
    # Scores and the gradient of the weights; context vectors and three more gradients.
    found.append(((length, d, length), 2 * halves, "attention"))
    found.append(((length, length, d), 4 * halves, "attention"))
    return found


def product_rate(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    which: str = "forward",
    windows: int = 1,
) -> float:
    """FLOP/s of one product with the memory layout that it has in a step."""
    m, k, n = shape

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    if which == "attention":
        a, b = random(windows, m, k), random(windows, k, n)
    elif which == "weight gradient":  # (N, outer), transposed, with (N, inner)
        a, b = random(k, m).t(), random(k, n)
    elif which == "forward":  # with the transposed weight of a Linear
        a, b = random(m, k), random(n, k).t()
    else:
        a, b = random(m, k), random(k, n)
    return windows * flops(shape) / least_seconds(lambda: a @ b, device, seconds)


def copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second read and written by a copy."""
    size = COPY_BYTES["cuda" if device.type == "cuda" else "cpu"]
    source = torch.zeros(size // 4, device=device) + 1  # written, so that every page exists
    target = source.clone()
    return 2 * size / least_seconds(lambda: target.copy_(source), device, seconds)


def least_seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one call: the least mean of five groups of calls that take `seconds` in all."""

    def mean_of(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / calls

    mean_of(1)  # the first call selects its kernel
    calls = max(1, int(seconds / 5 / mean_of(1)))
    return min(mean_of(calls) for _ in range(5))
