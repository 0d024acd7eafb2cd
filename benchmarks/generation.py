"""The comparison of benchmarks/generate.py: equivalence check and interleaved timing."""

import copy
import datetime
import shlex
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

from benchmarks.implementations import Transformers
from benchmarks.runner import NotEquivalent
from benchmarks.settings import GenerationBenchmark
from errors import NO_VALUE, refuse
from inference.cache import KVCache
from inference.decoding import Sampling, generate
from inference.packed_weights import pack_weights
from model import GPT, ModelConfig
from training.config import compose
from training.config.command_line import write_out
from training.distributed import device as devices
from training.reporting.machine import machine

Generator = Callable[[torch.Tensor], list[list[int]]]  # prompts (B, T) -> new ids of each


def compare(settings: GenerationBenchmark) -> None:
    """Checks that both generate the same ids, times them, prints and writes the figures."""
    refuse(devices.check(settings.device))
    config = ModelConfig(**compose([f"model={settings.model}"]).model.model_dump())
    if (needed := settings.prompt_tokens + settings.num_tokens) > config.context_length:
        reason = f"prompt_tokens={settings.prompt_tokens} and these are {needed} tokens, more than"
        reason += f" the model's context_length={config.context_length}"
        refuse([("num_tokens", settings.num_tokens, reason, "use fewer")])
    device = devices.prepare(settings.device, settings.seed)
    weights = GPT(config).eval()
    random = torch.Generator().manual_seed(settings.seed)
    results = {
        "what": "tokens a second of greedy generation: the same weights and prompts",
        "command": shlex.join(["python", "-m", "benchmarks.generate", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **machine(("torch", "transformers")),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "tables": {},
    }
    for batch_size in settings.batch_sizes:
        shape = (batch_size, settings.prompt_tokens)
        prompts = torch.randint(config.vocab_size, shape, generator=random)
        generators = build_generators(weights, device, batch_size, settings.num_tokens)
        theirs, ours = (generators[name](prompts) for name in list(generators)[:2])
        if theirs != ours:
            reason = "the tokens of clearhead and transformers differ in fp32"
            raise NotEquivalent("generation", NO_VALUE, reason, "no speed is measured")
        measured = time_interleaved(generators, prompts, settings.rounds)
        rows = table(measured, batch_size * settings.num_tokens)
        results["tables"][str(batch_size)] = rows
        print(text_table(batch_size, settings, rows), flush=True)
    if settings.out:
        write_out(settings.out, results)


def build_generators(
    weights: GPT, device: torch.device, batch_size: int, num_tokens: int
) -> dict[str, Generator]:
    """Both implementations in fp32, and in the best precision of the device if that is another."""
    library = Transformers()
    theirs = library.build(weights.config).eval()
    theirs.load_state_dict(library.convert(weights), strict=False)
    theirs.config.use_cache = theirs.generation_config.use_cache = True
    theirs.to(device)
    best = devices.best_dtype(device)
    dtypes = {"fp32": torch.float32} | ({} if best == torch.float32 else {"bf16": best})
    generators = {}
    for name, dtype in dtypes.items():
        model = copy.deepcopy(theirs).to(dtype)
        generators[f"transformers, {name}"] = transformers_generator(model, num_tokens)
        own = our_generator(weights, dtype, device, batch_size, num_tokens)
        generators[f"clearhead, {name}"] = own
    return generators


def transformers_generator(model, num_tokens: int) -> Generator:
    def generate_ids(prompts: torch.Tensor) -> list[list[int]]:
        ids = prompts.to(model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output[:, ids.shape[1] :].tolist()

    return generate_ids


def our_generator(
    weights: GPT, dtype: torch.dtype, device: torch.device, batch_size: int, num_tokens: int
) -> Generator:
    compiled = devices.compiled_step("auto", device, 10**6)  # as for a long text
    model = copy.deepcopy(weights).to(device)
    model = pack_weights(model, dtype, batch_size, to_compile=compiled is not None)
    cache = KVCache(weights.config.context_length, compiled) if compiled else None

    def generate_ids(prompts: torch.Tensor) -> list[list[int]]:
        greedy = Sampling(temperature=0)
        steps = generate(model, prompts.tolist(), num_tokens, greedy, cache=cache)
        return [list(row) for row in zip(*steps, strict=True)]

    return generate_ids


def time_interleaved(
    generators: dict[str, Generator], prompts: torch.Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each run, by implementation; one untimed run before them."""
    seconds = {name: [] for name in generators}
    for number in range(rounds + 1):
        for name in list(generators)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            generators[name](prompts)  # returns lists, so the device has finished
            if number > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def table(seconds: dict[str, list[float]], tokens: int) -> list[dict]:
    """Tokens per second, and the ratio to the first implementation with its quartiles."""
    first = next(iter(seconds.values()))
    rows = []
    for name, each in seconds.items():
        ratios = [before / now for before, now in zip(first, each, strict=True)]
        rows.append(
            {
                "name": name,
                "tokens_per_second": median(tokens / s for s in each),
                "ratio": median(ratios),
                "quartiles": spread(ratios),
                "seconds": each,
            }
        )
    return rows


def spread(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, high


def text_table(batch_size: int, settings: GenerationBenchmark, rows: list[dict]) -> str:
    lines = [
        f"texts at once: {batch_size}; new tokens: {settings.num_tokens}, after "
        f"{settings.prompt_tokens} each",
        f"  {'':<22}{'tokens/s':>10}{'x the first':>13}   quartiles",
    ]
    for row in rows:
        low, high = row["quartiles"]
        lines.append(
            f"  {row['name']:<22}{row['tokens_per_second']:>10.1f}{row['ratio']:>13.2f}   "
            f"{low:.2f} to {high:.2f}"
        )
    return "\n".join(lines) + "\n"
