"""The comparison of benchmarks/training.py: equivalence check, roofline, interleaved timing."""

import dataclasses
import datetime
import importlib.util
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import equivalence, interleaved
from benchmarks.implementations import CHECKOUTS, IMPLEMENTATIONS, Implementation, Target, Variant
from benchmarks.roofline import measure_roofline
from benchmarks.runner import Batch, Runner, make_runner
from benchmarks.settings import TrainingBenchmark, chosen
from benchmarks.tables import TABLES, equivalence_table, header, roofline_table, speed_table
from errors import refuse
from model import GPT, ModelConfig
from training.config import Config
from training.config.command_line import write_out
from training.config.schema import OptimizerConfig, ParallelConfig
from training.config.yaml_files import REPOSITORY
from training.distributed import device as devices
from training.distributed.build import build_strategy
from training.distributed.launch import check
from training.distributed.strategy import Strategy
from training.reporting.machine import git, machine

BATCHES = 4  # used in rotation


def compare(settings: TrainingBenchmark, training: Config, arguments: list[str]) -> None:
    """Checks that all implementations are equivalent, times them, prints and writes the figures."""
    strategy = start_strategy(settings)
    weights = GPT(ModelConfig(**training.model.model_dump()))
    comparison = Comparison(settings, weights, training.optimizer, strategy)
    results = provenance(settings, arguments, strategy.device)
    results["parameters"] = weights.num_parameters()
    results["flops_per_token"] = weights.flops_per_token(settings.length)
    results["projects"] = {n: each.source() for n, each in comparison.implementations.items()}
    print(header(results), end="\n\n", flush=True)
    results["equivalence"] = comparison.check_equivalence()
    print(equivalence_table(results), flush=True)
    results["roofline"] = None
    if settings.roofline_seconds > 0:
        results["roofline"] = comparison.measure_roofline()
        print("\n" + roofline_table(results["roofline"]), flush=True)
    results["tables"] = {}
    for name, variants in comparison.variants.items():
        measured = comparison.measure(variants)
        tokens, flops = settings.batch_size * settings.length, results["flops_per_token"]
        rows = interleaved.table(measured, tokens, flops, results["roofline"])
        order = interleaved.order(len(variants), settings.rounds)
        names = [[variants[index].name for index in indices] for indices in order]
        results["tables"][name] = {"order": names, "rows": rows}
        print("\n" + speed_table(name, rows), flush=True)
    if settings.out:
        write_out(settings.out, results)


def start_strategy(settings: TrainingBenchmark) -> Strategy:
    """One process on the device of the settings, with the best precision of that device."""
    single = ParallelConfig.with_defaults(strategy="single")
    refuse(check(single, settings.batch_size))
    refuse(devices.check(settings.device, settings.precision))
    strategy = build_strategy(single, settings.device, "auto", settings.seed)
    interleaved.return_freed_memory(strategy.device.type)
    return strategy


class Comparison:
    """The implementations, their variants, and the weights and batches that all of them use."""

    def __init__(
        self,
        settings: TrainingBenchmark,
        weights: GPT,
        optimizer: OptimizerConfig,
        strategy: Strategy,
    ):
        self.settings, self.weights, self.strategy = settings, weights, strategy
        self.setup = (optimizer, strategy, settings.seed)
        self.implementations: dict[str, Implementation] = {
            name: IMPLEMENTATIONS[name](*[getattr(settings, name)] if name in CHECKOUTS else [])
            for name in chosen(settings)
        }
        self.variants = self.build_variants()
        self.batches = self.random_batches()

    def build_variants(self) -> dict[str, list[Variant]]:
        """The variants of each table."""
        device, compiles = self.strategy.device, self.settings.compile
        if compiles == "auto":
            compiles = device.type in ("cpu", "cuda") and devices.can_compile(device)
        vocab_size = self.weights.config.vocab_size
        target = Target(device.type, self.strategy.dtype, bool(compiles), vocab_size)
        dtype = devices.DTYPES.get(self.settings.precision, target.dtype)
        equal = dataclasses.replace(target, dtype=dtype)
        make: dict[str, Callable[[Implementation], list[Variant]]] = {
            "shipped": lambda implementation: implementation.shipped(target),
            "equalised": lambda implementation: implementation.equalised(equal),
        }
        return {
            name: [
                variant for each in self.implementations.values() for variant in make[name](each)
            ]
            for name in TABLES
            if self.settings.table in ("both", name)
        }

    def random_batches(self) -> list[Batch]:
        """input_ids and target_ids, (batch_size, length) each."""
        random = torch.Generator().manual_seed(self.settings.seed)
        shape = (BATCHES, self.settings.batch_size, self.settings.length + 1)
        ids = torch.randint(self.weights.config.vocab_size, shape, generator=random)
        ids = ids.to(self.strategy.device)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]

    def check_equivalence(self) -> dict[str, dict]:
        every = list(self.implementations.values())
        checked = equivalence.check_implementations(
            every, self.weights, self.batches[0], *self.setup
        )
        return {name: dataclasses.asdict(figures) for name, figures in checked.items()}

    def measure_roofline(self) -> dict:
        precisions = {"fp32"}
        precisions |= {each.precision for variants in self.variants.values() for each in variants}
        shape = (self.settings.batch_size, self.settings.length)
        seconds = self.settings.roofline_seconds
        device = self.strategy.device
        return measure_roofline(self.weights, *shape, sorted(precisions), device, seconds)

    def measure(self, variants: list[Variant]) -> list[interleaved.Measurement]:
        """Times the variants of one table."""
        expected = {
            pad: equivalence.reference(self.weights, self.batches[0], self.strategy, pad)
            for pad in {variant.padded for variant in variants}
        }

        def make(variant: Variant) -> Runner:
            implementation = self.implementations[variant.implementation]
            return make_runner(variant, implementation, self.weights, *self.setup)

        counts = {k: getattr(self.settings, k) for k in ("rounds", "steps", "settle", "warmup")}
        return interleaved.measure(variants, make, self.batches, expected, self.strategy, **counts)


def provenance(settings: TrainingBenchmark, arguments: list[str], device: torch.device) -> dict:
    """Command, date, machine and settings; of folders only their names."""

    def shown(key: str, value: object) -> object:
        return Path(str(value)).name if key in ("nanogpt", "llms_from_scratch", "out") else value

    typed = [text.partition("=") for text in arguments]
    words = [f"{key}{sign}{shown(key, value)}" for key, sign, value in typed]
    packages = [n for n in ("torch", "numpy", "transformers") if importlib.util.find_spec(n)]
    found = {
        "what": "whole optimizer steps of several projects: the same model, tokens, mathematics",
        "command": shlex.join(["python", "-m", "benchmarks.training", *words]),
        "date": datetime.date.today().isoformat(),
        **machine(tuple(packages)),
        "uncommitted_changes": bool(git(REPOSITORY, "status", "--porcelain")),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "settings": {key: shown(key, value) for key, value in vars(settings).items()},
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
