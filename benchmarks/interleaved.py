"""Interleaved timing: how benchmarks/training.py times steps, and what is computed from the times.

All variants are set up first. In every round each of them runs some steps, in the order A B C, then
C B A. Settings of the whole process that differ between variants (what the C library does with
freed memory, TF32) change between them.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles

import torch
import torch._inductor.config

from benchmarks.equivalence import check_first_step, exact_norm
from benchmarks.implementations import Variant
from benchmarks.runner import Batch, Runner
from training.distributed.device import keep_freed_memory
from training.distributed.strategy import Strategy


def return_freed_memory(device: str) -> None:
    """Undoes keep_freed_memory (training/distributed/device.py), which a start on a CPU calls.

    glibc adapts two thresholds to what a program frees, until one of them is set. This sets them to
    their adapted values: 32 MiB for memory with its own mapping, 64 MiB for returning the end of
    the heap. nanoGPT's steps then had as many page faults as in a process of their own, or up to a
    fifth fewer; with 128 KiB, where glibc starts, they had twice as many.
    """
    if device != "cpu" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4  # malloc.h
    libc.mallopt(m_mmap_max, 65536)
    libc.mallopt(m_mmap_threshold, 32 * 2**20)
    libc.mallopt(m_trim_threshold, 64 * 2**20)
    libc.malloc_trim(0)  # no variant uses what another one has kept


@contextlib.contextmanager
def process_settings(variant: Variant, device: str) -> Iterator[None]:
    """The settings of the process that a variant asks for: freed memory and TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if variant.tf32 else before)
    if variant.keeps_memory:
        keep_freed_memory()
    else:
        return_freed_memory(device)
    try:
        yield
    finally:
        return_freed_memory(device)
        torch.set_float32_matmul_precision(before)


def page_faults() -> int:
    """Pages that the system has given to this process so far. Keeping freed memory saves some."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Timer:
    """Seconds between marks. On a GPU they are CUDA events, so that no step waits for another."""

    def __init__(self, strategy: Strategy):
        self.strategy, self.marks = strategy, []
        strategy.synchronize()
        self.mark()

    def mark(self) -> None:
        if self.strategy.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            if self.strategy.device.type == "mps":
                torch.mps.synchronize()
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        self.strategy.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.strategy.device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


class Measurement:
    """A variant while it is measured, and its figures."""

    def __init__(self, variant: Variant, make: Callable[[Variant], Runner], strategy: Strategy):
        self.variant, self.strategy = variant, strategy
        self.rounds: list[list[float]] = []  # seconds of the steps of each round
        self.peak_bytes = 0
        self.page_faults = 0  # in timed steps
        self.allocated_before = self.allocated()
        # Parameters and optimizer state are not allocated in kept memory: it could not be returned
        # to the system afterwards, and other variants would use it.
        self.at_start = dataclasses.replace(variant, keeps_memory=False)
        with process_settings(self.at_start, strategy.device.type):
            self.runner = make(variant)
        self.fused = bool(self.runner.optimizer.param_groups[0].get("fused"))

    def allocated(self) -> int:
        cuda = self.strategy.device.type == "cuda"
        return torch.cuda.memory_allocated(self.strategy.device) if cuda else 0

    def first_step(self, batches: list[Batch], warmup: int, expected: tuple[float, float]) -> None:
        """Times and checks the first step, which compiles, and runs `warmup` more."""
        with process_settings(self.at_start, self.strategy.device.type):
            timer = Timer(self.strategy)
            with exact_norm(self.runner.model) as squares:
                loss, _ = self.runner.step(*batches[0])
            timer.mark()
            (self.first_seconds,) = timer.seconds()
            self.loss, self.norm = float(loss), math.sqrt(sum(map(float, squares)))
            check_first_step(self.variant, self.loss, self.norm, expected)
            self.resident = self.allocated() - self.allocated_before
        with process_settings(self.variant, self.strategy.device.type):
            for _ in range(warmup):
                self.step(batches)

    def step(self, batches: list[Batch]) -> None:
        self.runner.step(*batches[self.runner.steps % len(batches)])

    def run_round(self, batches: list[Batch], steps: int, settle: int) -> None:
        """Runs `settle` untimed steps, until memory and caches have settled, and `steps` timed
        ones."""
        device = self.strategy.device
        with process_settings(self.variant, device.type):
            others = self.allocated() - self.resident
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            for _ in range(settle):
                self.step(batches)
            timer, before = Timer(self.strategy), page_faults()
            for _ in range(steps):
                self.step(batches)
                timer.mark()
            self.rounds.append(timer.seconds())
            self.page_faults += page_faults() - before
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - others
                self.peak_bytes = max(self.peak_bytes, peak)


def order(variants: int, rounds: int) -> list[list[int]]:
    """Of each round the indices of the variants: 0 1 2, then 2 1 0, and so on."""
    forward = list(range(variants))
    return [forward if number % 2 == 0 else forward[::-1] for number in range(rounds)]


def measure(
    variants: list[Variant],
    make: Callable[[Variant], Runner],
    batches: list[Batch],
    expected: dict[bool, tuple[float, float]],
    strategy: Strategy,
    rounds: int,
    steps: int,
    settle: int,
    warmup: int,
) -> list[Measurement]:
    """Measures all variants. expected: our first loss and gradient norm, by `variant.padded`."""
    if any(variant.compiled for variant in variants):
        torch._dynamo.reset()  # compiled code of an earlier table,
        torch._inductor.config.force_disable_caches = True  # or an earlier run, must not be reused
    measurements = []
    for variant in variants:
        measurement = Measurement(variant, make, strategy)
        measurement.first_step(batches, warmup, expected[variant.padded])
        measurements.append(measurement)
    for indices in order(len(variants), rounds):
        for index in indices:
            measurements[index].run_round(batches, steps, settle)
    for measurement in measurements:
        del measurement.runner
    gc.collect()
    if strategy.device.type == "cuda":
        torch.cuda.empty_cache()
    return measurements


def spread(rounds: list[list[float]]) -> dict[str, float]:
    """Median and quartiles of all steps."""
    times = sorted(seconds for each in rounds for seconds in each)
    low, middle, high = quantiles(times, n=4, method="inclusive") if times[1:] else times * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def speedup(own: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    """How many times as fast one variant is as another: median, least and most over the rounds.

    The ratio is taken within each round, whose steps ran in the same minute.
    """
    ratios = [median(b) / median(a) for a, b in zip(own, other, strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


def table(
    measurements: list[Measurement], tokens: int, flops: float, roofline: dict | None
) -> list[dict]:
    """The rows of a table for JSON. tokens: of a step; flops: of one token."""
    rows = []
    for measured in measurements:
        variant, seconds = measured.variant, spread(measured.rounds)
        speed = tokens / seconds["median"]
        row = {
            "name": variant.name,
            "project": variant.implementation,
            "precision": variant.precision,
            "compiled": variant.compiled,
            "fused_adamw": measured.fused,
            "freed_memory_kept": variant.keeps_memory,
            "vocabulary_padded": variant.padded,
            "tf32": variant.tf32,
            "first_step_seconds": measured.first_seconds,
            "first_loss": measured.loss,
            "first_grad_norm": measured.norm,
            "page_faults_per_step": measured.page_faults / sum(map(len, measured.rounds)),
            "step_seconds": seconds | {"all": measured.rounds},
            "tokens_per_second": speed,
            "flops_per_second": speed * flops,
        }
        if roofline:
            best = roofline["products"][variant.precision]
            row["share_of_best"] = speed / best["best_tokens_per_second"]
            row["share_of_own"] = speed / best["own_tokens_per_second"]
        if measured.peak_bytes:
            row["peak_memory_bytes"] = measured.peak_bytes
        others = [other for other in measurements if other is not measured]
        row["times_as_fast_as"] = {
            other.variant.name: speedup(measured.rounds, other.rounds) for other in others
        }
        rows.append(row)
    return rows
