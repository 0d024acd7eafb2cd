"""The comparison of benchmarks/training.py: equivalence check, interleaved timing, tables."""

import dataclasses
import gc
import importlib.util
import time
from statistics import median

import torch

from benchmarks.equivalence import check_first_step, check_implementations, reference
from benchmarks.implementations import NanoGPT, Ours, Transformers, Variant, variants
from benchmarks.runner import Batch, OurRunner, Runner, set_freed_memory
from benchmarks.settings import TrainingBenchmark
from benchmarks.timing import interleave, origin, show_speedup, speedup
from errors import refuse
from model import GPT, ModelConfig
from training.config import Config, compose
from training.config.command_line import write_out
from training.config.schema import ParallelConfig
from training.distributed import device as devices
from training.distributed.build import build_strategy
from training.distributed.strategy import Strategy

SEED = 0  # of the weights and the tokens
BATCHES = 4  # used in rotation
TITLES = {
    "shipped": "As shipped: each as its own project runs it on this device",
    "equalised": "Equalised: the same precision for all, compiled where that is possible",
}


def compare(settings: TrainingBenchmark) -> None:
    """Checks that all implementations are equivalent, times them, prints and writes the figures."""
    config = compose([f"model={settings.model}", "model.dropout=0"])
    if settings.length > config.model.context_length:
        reason = f"the model reads at most {config.model.context_length} tokens"
        refuse([("length", settings.length, reason, "use less")])
    refuse(devices.check(settings.device, settings.precision))
    single = ParallelConfig.with_defaults(strategy="single")
    strategy = build_strategy(single, settings.device, settings.precision, SEED)
    comparison = Comparison(settings, config, strategy)
    weights = comparison.weights
    results = origin("benchmarks.training", strategy.device, ("torch", "numpy")) | {
        "settings": settings.model_dump(exclude={"debug", "out"}),
        "parameters": weights.num_parameters(),
        "flops_per_token": weights.flops_per_token(settings.length),
        "projects": {name: each.source() for name, each in comparison.implementations.items()},
        "equivalence": comparison.check_equivalence(),
        "tables": {},
    }
    print(f"{settings.model}, {results['parameters']:,} parameters, commit {results['commit']}")
    compiles = settings.compile and devices.can_compile(strategy.device)
    tables = variants(strategy.device.type, strategy.dtype, compiles)
    for name, rows in tables.items():
        measured = comparison.measure(
            [row for row in rows if row.implementation in comparison.implementations]
        )
        results["tables"][name] = {"rows": measured}
        print(f"\n{TITLES[name]}\n{text_table(measured)}", flush=True)
    if settings.out:
        write_out(settings.out, results)


class Comparison:
    """The implementations, and the weights and batches that all of them use."""

    def __init__(self, settings: TrainingBenchmark, config: Config, strategy: Strategy):
        self.settings, self.optimizer, self.strategy = settings, config.optimizer, strategy
        self.weights = GPT(ModelConfig(**config.model.model_dump()))
        self.implementations = {"ours": Ours()}
        if importlib.util.find_spec("transformers"):
            self.implementations["transformers"] = Transformers()
        if settings.nanogpt:
            self.implementations["nanogpt"] = NanoGPT(settings.nanogpt)
        random = torch.Generator().manual_seed(SEED)
        shape = (BATCHES, settings.batch_size, settings.length + 1)
        ids = torch.randint(config.model.vocab_size, shape, generator=random)
        # input_ids and target_ids, (batch_size, length) each
        self.batches: list[Batch] = [
            (each[:, :-1].contiguous(), each[:, 1:].contiguous())
            for each in ids.to(strategy.device)
        ]

    def check_equivalence(self) -> dict[str, dict]:
        every, batch, device = self.implementations, self.batches[0], self.strategy.device
        checked = check_implementations(every, self.weights, batch, self.optimizer, device)
        for name, found in checked.items():
            print(f"equivalence check in fp32, {name}: {found}")
        return {name: dataclasses.asdict(found) for name, found in checked.items()}

    def measure(self, rows: list[Variant]) -> list[dict]:
        """Times the rows of one table."""
        torch.compiler.reset()  # compiled code of the table before
        figures, work = [], {}
        for row in rows:
            runner, first = self.start(row)
            figures.append(first)
            work[row.name] = lambda runner=runner: self.time_round(runner)
        seconds = interleave(work, self.settings.rounds)
        ours = [seconds[row.name] for row in rows if row.implementation == "ours"][-1]
        tokens = self.settings.batch_size * self.settings.length
        for found in figures:
            own = seconds[found["name"]]
            found["step_seconds"] = own
            found["tokens_per_second"] = tokens / median(own)
            found["ours_is_times_as_fast"] = speedup(ours, own)
        del work, runner
        gc.collect()
        return figures

    def start(self, row: Variant) -> tuple[Runner, dict]:
        """Runs and checks the first step of a row, which also compiles."""
        implementation = self.implementations[row.implementation]
        kind = OurRunner if row.implementation == "ours" else Runner
        expected = reference(implementation.prepare(self.weights), self.batches[0], self.strategy)
        set_freed_memory(row.keeps_memory, self.strategy.device)
        runner = kind(row, implementation, self.weights, self.optimizer, self.strategy)
        started = time.perf_counter()
        loss, norm = map(float, runner.step(*self.batches[0]))
        seconds = time.perf_counter() - started
        check_first_step(row, loss, norm, expected)
        return runner, {
            "name": row.name,
            "project": row.implementation,
            "precision": row.precision,
            "compiled": row.compiled,
            "freed_memory_kept": row.keeps_memory,
            "fused_adamw": bool(runner.optimizer.defaults.get("fused")),
            "first_step_seconds": seconds,
            "first_loss": loss,
            "first_grad_norm": norm,
        }

    def time_round(self, runner: Runner) -> float:
        """Mean seconds of a step, after one that is not timed."""
        set_freed_memory(runner.variant.keeps_memory, self.strategy.device)
        runner.step(*self.batches[runner.steps % BATCHES])
        synchronize(self.strategy.device)
        started = time.perf_counter()
        for _ in range(self.settings.steps):
            runner.step(*self.batches[runner.steps % BATCHES])
        synchronize(self.strategy.device)
        return (time.perf_counter() - started) / self.settings.steps


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished its work, before a clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def text_table(rows: list[dict]) -> str:
    lines = [
        f"  {'':<26}{'first, s':>9}{'ms/step':>10}{'tokens/s':>10}  our last row is N x as fast"
    ]
    for row in rows:
        options = [row["precision"]] + ["compiled"] * row["compiled"]
        lines.append(
            f"  {row['name']:<26}{row['first_step_seconds']:>9.1f}"
            f"{1e3 * median(row['step_seconds']):>10,.1f}{row['tokens_per_second']:>10,.0f}"
            f"  {show_speedup(row['ours_is_times_as_fast'])}  {', '.join(options)}"
        )
    return "\n".join(lines)
