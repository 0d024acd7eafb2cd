"""Training speed of clearhead, transformers and nanoGPT: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256 nanogpt=../nanoGPT

Measures complete optimizer steps (forward, backward, clipping, AdamW) in one process, with the same
random tokens and weights, without dropout. First an equivalence check compares loss, gradient norm
and update of each implementation with ours. If they differ, the command exits with code 4.

There are two tables. As shipped: each project with its default settings on this device. Equalised:
all in the same precision and compiled. benchmarks/implementations.py defines the rows.
"""

import dataclasses
import functools
import gc
import importlib.util
import time
from statistics import median
from typing import Literal

import torch
from pydantic import Field

from benchmarks import equivalence
from benchmarks.implementations import (
    Implementation,
    NanoGPT,
    Ours,
    Transformers,
    Variant,
    set_freed_memory,
    variants,
)
from benchmarks.timing import interleave, origin, show_speedup, speedup
from clearhead.config import Config, compose
from clearhead.config.command_line import (
    InFolder,
    OutFile,
    ScriptConfig,
    settings_command,
    write_out,
)
from clearhead.config.schema import Device, Name, ParallelConfig, Positive
from clearhead.errors import refuse
from clearhead.parallel import device as devices
from clearhead.parallel.device import build_strategy
from clearhead.parallel.strategy import Strategy
from model import GPT, ModelConfig

SEED = 0  # for the weights and the tokens
BATCHES = 4  # used in rotation
TITLES = {
    "shipped": "As shipped: each project with its default settings on this device",
    "equalised": "Equalised: the same precision for all, compiled where possible",
}


class TrainingBenchmark(ScriptConfig):
    """python -m benchmarks.training [model=NAME] [nanogpt=FOLDER] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="model group of train.py")
    batch_size: Positive = Field(4, description="windows per step")
    length: Positive = Field(256, description="tokens per window")
    nanogpt: InFolder | None = Field(None, description="folder of a checkout of nanoGPT")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto | fp32 | bf16")
    compile: bool = Field(True, description="false: do not use torch.compile")
    rounds: Positive = Field(5, description="measurements of each row of a table")
    steps: Positive | None = Field(
        None, description="timed steps per measurement; null: 3, on a GPU 20"
    )
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(TrainingBenchmark)
def main(settings: TrainingBenchmark) -> None:
    config = compose([f"model={settings.model}", "model.dropout=0"])
    refuse(devices.check(settings.device, settings.precision))
    single = ParallelConfig.with_defaults(strategy="single")
    strategy = build_strategy(single, settings.device, settings.precision, SEED)
    if settings.precision == "auto":  # never fp16: the other projects do not scale the loss here
        dtype = devices.best_wide_dtype(strategy.device)
        strategy = dataclasses.replace(strategy, dtype=dtype)
    comparison = Comparison(settings, config, strategy)
    weights = comparison.weights
    checked = equivalence.check_implementations(
        comparison.kinds, weights, comparison.batches[0], config.optimizer, strategy
    )
    for name, figures in checked.items():
        print(f"equivalence check in fp32, {name}: {figures}")
    results = origin("benchmarks.training", strategy.device, ("numpy",)) | {
        "settings": settings.model_dump(mode="json", exclude={"debug", "out"}),
        "parameters": weights.num_parameters(),
        "flops_per_token": weights.flops_per_token(settings.length),
        "equivalence": checked,
        "tables": {},
    }
    print(f"{settings.model}, {results['parameters']:,} parameters, commit {results['commit']}")
    compiles = settings.compile and devices.can_compile(strategy.device)
    for name, rows in variants(strategy.device.type, strategy.dtype, compiles).items():
        measured = comparison.measure(
            [row for row in rows if row.implementation in comparison.kinds]
        )
        results["tables"][name] = {"rows": measured}
        print(f"\n{TITLES[name]}\n{text_table(measured)}", flush=True)
    if settings.out:
        write_out(settings.out, results)


class Comparison:
    """The implementations, with the weights and batches that all of them use."""

    def __init__(self, settings: TrainingBenchmark, config: Config, strategy: Strategy):
        self.settings, self.optimizer, self.strategy = settings, config.optimizer, strategy
        self.steps = settings.steps or (20 if strategy.device.type == "cuda" else 3)
        self.weights = GPT(ModelConfig(**config.model.model_dump()))
        self.kinds = {"ours": Ours}
        if importlib.util.find_spec("transformers"):
            self.kinds["transformers"] = Transformers
        if settings.nanogpt:
            self.kinds["nanogpt"] = functools.partial(NanoGPT, settings.nanogpt)
        random = torch.Generator().manual_seed(SEED)
        shape = (BATCHES, settings.batch_size, settings.length + 1)
        ids = torch.randint(config.model.vocab_size, shape, generator=random).to(strategy.device)
        # input_ids and target_ids, (batch_size, length) each
        self.batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]

    def measure(self, rows: list[Variant]) -> list[dict]:
        """Times the rows of one table and returns their results."""
        device = self.strategy.device
        torch.compiler.reset()  # removes the compiled code of the previous table
        gc.collect()  # and its models
        started = {row.name: self.start(row) for row in rows}
        work = {name: functools.partial(self.step, each) for name, (each, _) in started.items()}
        seconds = interleave(
            work,
            self.settings.rounds,
            device,
            self.steps,
            lambda name: set_freed_memory(started[name][0].variant.keeps_memory, device),
        )
        ours = [seconds[row.name] for row in rows if row.implementation == "ours"][-1]
        tokens = self.settings.batch_size * self.settings.length
        figures = [first for _, first in started.values()]
        for found in figures:
            own = seconds[found["name"]]
            found["step_seconds"] = own
            found["tokens_per_second"] = tokens / median(own)
            found["ours_is_times_as_fast"] = speedup(ours, own)
        return figures

    def start(self, row: Variant) -> tuple[Implementation, dict]:
        """Runs the first step of a row, which includes compilation."""
        set_freed_memory(row.keeps_memory, self.strategy.device)
        implementation = self.kinds[row.implementation](
            row, self.weights, self.optimizer, self.strategy
        )
        started = time.perf_counter()
        loss, norm = equivalence.first_step(implementation, self.batches[0])
        seconds = time.perf_counter() - started
        return implementation, {
            "name": row.name,
            "project": row.implementation,
            "precision": implementation.strategy.precision,
            "compiled": row.compiled,
            "freed_memory_kept": row.keeps_memory,
            "fused_adamw": bool(implementation.optimizer.defaults.get("fused")),
            "first_step_seconds": seconds,
            "first_loss": loss,
            "first_grad_norm": norm,
        }

    def step(self, implementation: Implementation) -> None:
        implementation.step(*self.batches[implementation.steps % BATCHES])


def text_table(rows: list[dict]) -> str:
    head = f"{'first, s':>9}{'ms/step':>10}{'tokens/s':>10}"
    lines = [f"  {'':<26}{head}  our last row is N times as fast"]
    for row in rows:
        options = [row["precision"]] + ["compiled"] * row["compiled"]
        lines.append(
            f"  {row['name']:<26}{row['first_step_seconds']:>9.1f}"
            f"{1e3 * median(row['step_seconds']):>10,.1f}{row['tokens_per_second']:>10,.0f}"
            f"  {show_speedup(row['ours_is_times_as_fast'])}  {', '.join(options)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
