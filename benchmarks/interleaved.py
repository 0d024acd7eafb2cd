"""Taking turns: how the steps of benchmarks/training.py are timed, and what the times mean.

All contenders stand ready, and each has a turn of some steps in every round. Between turns changes
what is the process's and no contender's own: what the C library does with freed memory, TF32.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles

import torch
import torch._inductor.config

from benchmarks.equivalence import check_first_step, exact_norm
from benchmarks.implementations import Batch, Contender, Row
from training.distributed.device import keep_freed_memory
from training.distributed.strategy import Strategy


def return_freed_memory(device: str) -> None:
    """Undoes keep_freed_memory (training/distributed/device.py), which every start on a CPU calls.

    glibc adapts two thresholds to what a program frees, until one of them is set, as keeping freed
    memory does. Here they are set to where adapting ends: 32 MiB for memory of its own mapping,
    twice that for giving back the end of the heap. That is as in an untouched process, or kinder:
    steps of nanoGPT had as many page faults as there, or up to a fifth fewer. A threshold of 128
    KiB, where adapting begins, would cost the others twice the faults. Where the heap is in pieces,
    one that another's turn has left may serve them without faults: the tables show how many.
    """
    if device != "cpu" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4  # malloc.h
    libc.mallopt(m_mmap_max, 65536)
    libc.mallopt(m_mmap_threshold, 32 * 2**20)
    libc.mallopt(m_trim_threshold, 64 * 2**20)
    libc.malloc_trim(0)  # nobody lives on what another has kept


@contextlib.contextmanager
def freed_memory(kept: bool, device: str) -> Iterator[None]:
    """What the C library does with freed memory during one contender's turn."""
    if kept:
        keep_freed_memory()
    else:
        return_freed_memory(device)
    try:
        yield
    finally:
        return_freed_memory(device)


@contextlib.contextmanager
def surroundings(row: Row, device: str) -> Iterator[None]:
    """What is the process's and not a contender's, as a row has it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if row.tf32 else before)
    try:
        with freed_memory(row.kept, device):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def page_faults() -> int:
    """Of this process so far: pages that the system had to provide. What kept memory saves."""
    try:
        import resource
    except ImportError:  # no such thing on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Lap:
    """Times between marks: by the clock, and on a GPU by its own, so that no step waits."""

    def __init__(self, parallel: Strategy):
        self.parallel, self.marks = parallel, []
        parallel.synchronize()
        self.mark()

    def mark(self) -> None:
        if self.parallel.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            if self.parallel.device.type == "mps":
                torch.mps.synchronize()
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        self.parallel.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.parallel.device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


class Entry:
    """A row while it is measured, and what was measured."""

    def __init__(self, row: Row, make: Callable[[Row], Contender], parallel: Strategy):
        self.row, self.parallel = row, parallel
        self.turns: list[list[float]] = []  # of each round, the seconds of its steps
        self.peak = 0
        self.before = self.allocated()
        self.faults = 0  # of pages, in steps that count
        # What stays, the optimizer's state too, is not allocated in kept memory: above it that
        # could not be given back, and others would live on it in their turns.
        self.beginning = dataclasses.replace(row, kept=False)
        with surroundings(self.beginning, parallel.device.type):
            self.contender = make(row)
        self.fused = bool(self.contender.optimizer.param_groups[0].get("fused"))

    def allocated(self) -> int:
        cuda = self.parallel.device.type == "cuda"
        return torch.cuda.memory_allocated(self.parallel.device) if cuda else 0

    def first(self, batches: list[Batch], warmup: int, expected: tuple[float, float]) -> None:
        """The first step by itself, with the compilation if there is one, and more to warm up."""
        with surroundings(self.beginning, self.parallel.device.type):
            lap = Lap(self.parallel)
            with exact_norm(self.contender.model) as squares:
                loss, _ = self.contender.step(*batches[0])
            lap.mark()
            (self.first_seconds,) = lap.seconds()
            self.loss, self.norm = float(loss), math.sqrt(sum(map(float, squares)))
            check_first_step(self.row, self.loss, self.norm, expected)
            self.resident = self.allocated() - self.before
        with surroundings(self.row, self.parallel.device.type):
            for _ in range(warmup):
                self.step(batches)

    def step(self, batches: list[Batch]) -> None:
        self.contender.step(*batches[self.contender.steps % len(batches)])

    def turn(self, batches: list[Batch], steps: int, settle: int) -> None:
        """A turn: steps that do not count, as memory that is kept grows for two of them and the
        caches hold another's, then those that do."""
        device = self.parallel.device
        with surroundings(self.row, device.type):
            others = self.allocated() - self.resident
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            for _ in range(settle):
                self.step(batches)
            lap, before = Lap(self.parallel), page_faults()
            for _ in range(steps):
                self.step(batches)
                lap.mark()
            self.turns.append(lap.seconds())
            self.faults += page_faults() - before
            if device.type == "cuda":
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(device) - others)

    def free(self) -> None:
        del self.contender
        gc.collect()
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()


def order(contenders: int, rounds: int) -> list[list[int]]:
    """Whose turn it is: A B C, C B A, A B C and so on, so that none is always after the same."""
    forth = list(range(contenders))
    return [forth if turn % 2 == 0 else forth[::-1] for turn in range(rounds)]


def measure(
    rows: list[Row],
    make: Callable[[Row], Contender],
    batches: list[Batch],
    expected: dict[bool, tuple[float, float]],
    parallel: Strategy,
    rounds: int,
    steps: int,
    settle: int,
    warmup: int,
    one_at_a_time: bool,
) -> list[Entry]:
    """Takes the turns of all rows. expected: our first loss and gradient norm, padded or not."""
    if any(row.compiled for row in rows):
        torch._dynamo.reset()  # what an earlier table has compiled must not count for this one,
        torch._inductor.config.force_disable_caches = True  # nor what an earlier run has
    entries = []
    for row in rows:
        entry = Entry(row, make, parallel)
        entry.first(batches, warmup, expected[row.padded])
        entries.append(entry)
        if one_at_a_time:
            for _ in range(rounds):
                entry.turn(batches, steps, settle)
            entry.free()
    if not one_at_a_time:
        for turn in order(len(rows), rounds):
            for number in turn:
                entries[number].turn(batches, steps, settle)
        for entry in entries:
            entry.free()
    return entries


# ---------------------------------------------------------------------------- what it means


def spread(turns: list[list[float]]) -> dict[str, float]:
    """The median and quartiles of all steps."""
    times = sorted(seconds for turn in turns for seconds in turn)
    low, middle, high = quantiles(times, n=4, method="inclusive") if times[1:] else times * 3
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def ratio(own: list[list[float]], other: list[list[float]]) -> dict[str, float]:
    """How many times as fast one is as another. Both had a turn in each round, in the same minute:
    of each round the ratio of the median steps, and of these the median, least and most."""
    each = [median(b) / median(a) for a, b in zip(own, other, strict=True)]
    return {"median": median(each), "least": min(each), "most": max(each)}


def table(entries: list[Entry], tokens: int, flops: float, ceilings: dict | None) -> list[dict]:
    """The rows of a table, as JSON can hold them. tokens: of a step; flops: of one token."""
    rows = []
    for entry in entries:
        row, found = entry.row, spread(entry.turns)
        speed = tokens / found["median"]
        figures = {
            "name": row.name,
            "project": row.project,
            "precision": row.precision,
            "compiled": row.compiled,
            "fused_adamw": entry.fused,
            "freed_memory_kept": row.kept,
            "vocabulary_padded": row.padded,
            "tf32": row.tf32,
            "first_step_seconds": entry.first_seconds,
            "first_loss": entry.loss,
            "first_grad_norm": entry.norm,
            "page_faults_per_step": entry.faults / sum(map(len, entry.turns)),
            "step_seconds": found | {"all": entry.turns},
            "tokens_per_second": speed,
            "flops_per_second": speed * flops,
        }
        if ceilings:
            best = ceilings["products"][row.precision]
            figures["share_of_best"] = speed / best["best_tokens_per_second"]
            figures["share_of_own"] = speed / best["own_tokens_per_second"]
        if entry.peak:
            figures["peak_memory_bytes"] = entry.peak
        others = [other for other in entries if other is not entry]
        figures["times_as_fast_as"] = {o.row.name: ratio(entry.turns, o.turns) for o in others}
        rows.append(figures)
    return rows
