"""Programs that gpu.py and gpus.py start, alone or on each rank; rank 0 writes their results.

    python -m benchmarks.ranks steps OUT.json SETTING ...    # of train.py
    torchrun --nproc_per_node=8 -m benchmarks.ranks all_reduce OUT.json DEVICE MEGABYTES

`steps` measures the speed of training steps, and then their kernels by class with torch.profiler.
BUCKET_MB, an environment variable, is the size of the gradient buckets of DDP.
"""

import functools
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from clearhead.config import compose
from clearhead.config.schema import ParallelConfig
from clearhead.files import as_json
from clearhead.parallel import ddp
from clearhead.parallel.device import build_strategy
from clearhead.parallel.hardware import peak_memory
from clearhead.run.build import build_run
from train import train_step

STEPS, PROFILED = 20, 3  # steps that are timed, and then profiled
# The class of a kernel is the first one whose pattern its name contains. Names of Inductor list the
# operations that a kernel fuses, so its own prefix comes first; its templates are mostly products.
OTHER = "norms and elementwise"
CLASSES = {
    "communication": "nccl|c10d",
    "templates of Inductor": "^triton_tem",
    OTHER: "^triton_",
    "attention": "flash|fmha|sdpa|scaled_dot_product",
    "loss": "cross_entropy",
    "products": "gemm|nvjet|cutlass|xmma|splitk|::(add|b)?mm$",
    "optimizer": "multi_tensor_apply|adam",
    "copies": "^mem(cpy|set)",
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the events of a trace
COLLECTIVE = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def steps(*settings: str) -> dict:
    """Returns tokens/s, peak memory and the profile of training steps."""
    if megabytes := os.environ.get("BUCKET_MB"):
        ddp.DistributedDataParallel = functools.partial(
            ddp.DistributedDataParallel, bucket_cap_mb=float(megabytes)
        )
    run = build_run(compose(settings))
    count = STEPS if run.strategy.device.type == "cuda" else 2  # on a CPU, speed does not matter
    with run:
        for _ in range(count // 2):  # compiles, and finds the fastest kernels
            train_step(run)
        run.strategy.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            train_step(run)
        run.strategy.synchronize()
        speed = count * run.metrics.tokens_per_step / (time.perf_counter() - began)
        when = torch.profiler.schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/trace.json"
            write = lambda profiled: profiled.export_chrome_trace(path)  # noqa: E731
            with torch.profiler.profile(schedule=when, on_trace_ready=write) as profiled:
                for number in range(1 + PROFILED):
                    train_step(run)
                    if number in (0, PROFILED):  # the trace has complete steps, and their gaps
                        run.strategy.synchronize()
                    profiled.step()
            events = json.loads(Path(path).read_text())["traceEvents"]
    return {
        "parameters": run.model.num_parameters(),
        "tokens_per_second": speed,
        "peak_gb": peak_memory() / 1e9,
    } | profile(events)


def profile(events: list[dict]) -> dict:
    """Returns the profile of a step from a trace of PROFILED steps: milliseconds by class, of
    communication during which nothing is computed (exposed), and without a kernel (idle); numbers
    of kernels, of collectives by kind and of synchronisations; the slowest kernels."""
    events = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in events if event["cat"] in ON_GPU]
    kernels = kernels or [event for event in events if event["cat"] == "cpu_op"]
    by_class, by_name, sent, spans = Counter(), Counter(), Counter(), {}
    for event in kernels:
        name, start, ms = event["name"], event["ts"] / 1e3, event["dur"] / 1e3
        kind = next((k for k, p in CLASSES.items() if re.search(p, name, re.IGNORECASE)), OTHER)
        by_class[kind] += ms / PROFILED
        by_name[name] += ms / PROFILED
        spans.setdefault(kind == "communication", []).append((start, start + ms))
        if kind == "communication" and (found := COLLECTIVE.search(name.lower())):
            sent[found[0].replace("_", "")] += 1 / PROFILED
    computed, all_spans = spans[False], spans[False] + spans.get(True, [])
    whole = max(end for _, end in all_spans) - min(start for start, _ in all_spans)
    return {
        "ms": dict(by_class.most_common()),
        "exposed_ms": (busy(all_spans) - busy(computed)) / PROFILED,
        "idle_ms": (whole - busy(all_spans)) / PROFILED,
        "kernels": len(kernels) / PROFILED,
        "sent": dict(sent),
        "synchronisations": sum(event["name"] in WAITS for event in events) / PROFILED,
        "slowest": by_name.most_common(20),
    }


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of (start, end) intervals."""
    total, latest = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return total


def all_reduce(device: str, megabytes: str) -> dict:
    """Returns the GB/s with which a tensor of all ranks is summed: its size divided by the time,
    the median of five."""
    strategy = build_strategy(ParallelConfig.with_defaults(strategy="ddp"), device, "fp32", 0)
    tensor = torch.ones(int(megabytes) * 2**18, device=strategy.device)
    seconds = []
    for _ in range(6):
        strategy.synchronize()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        strategy.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"gb_per_second": tensor.nbytes / 1e9 / median(seconds[1:])}


if __name__ == "__main__":
    program, out, *arguments = sys.argv[1:]
    found = {"steps": steps, "all_reduce": all_reduce}[program](*arguments)
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_bytes(as_json(found))
