"""The comparison of benchmarks/generate.py: equivalence check and interleaved timing."""

import copy
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.implementations import NotEquivalent, Transformers
from benchmarks.settings import GenerationBenchmark
from benchmarks.timing import interleave, origin, show_speedup, speedup
from errors import NO_VALUE, refuse
from inference.cache import KVCache
from inference.decoding import Sampling, generate
from inference.packed_weights import pack_weights
from model import GPT, ModelConfig
from training.config import compose
from training.config.command_line import write_out
from training.distributed import device as devices

SEED = 0  # of the weights and the prompts
Generator = Callable[[torch.Tensor], list[list[int]]]  # prompts (B, T) -> new ids of each


def compare(settings: GenerationBenchmark) -> None:
    """Checks that both generate the same ids, times them, prints and writes the figures."""
    refuse(devices.check(settings.device))
    config = ModelConfig(**compose([f"model={settings.model}"]).model.model_dump())
    if (needed := settings.prompt_tokens + settings.num_tokens) > config.context_length:
        reason = f"with the prompt {needed} tokens, more than the {config.context_length} "
        reason += "of the model's context"
        refuse([("num_tokens", settings.num_tokens, reason, "use fewer")])
    device = devices.prepare(settings.device, SEED)
    weights = GPT(config).eval()
    results = origin("benchmarks.generate", device, ("torch", "transformers")) | {"tables": {}}
    for batch_size in settings.batch_sizes:
        random = torch.Generator().manual_seed(SEED)
        shape = (batch_size, settings.prompt_tokens)
        prompts = torch.randint(config.vocab_size, shape, generator=random)
        generators = build_generators(weights, device, batch_size, settings.num_tokens)
        theirs, ours = (generators[name](prompts) for name in list(generators)[:2])
        if theirs != ours:
            reason = "the tokens of clearhead and transformers differ in fp32"
            raise NotEquivalent("generation", NO_VALUE, reason, "no speed is measured")
        rows = measure(generators, prompts, settings.rounds, batch_size * settings.num_tokens)
        results["tables"][str(batch_size)] = rows
        print(f"texts at once: {batch_size}; tokens/s, times as fast as the first")
        for row in rows:
            figures = f"{row['tokens_per_second']:>10.1f}  {show_speedup(row['ratio'])}"
            print(f"  {row['name']:<22}{figures}", flush=True)
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


def measure(
    generators: dict[str, Generator], prompts: torch.Tensor, rounds: int, tokens: int
) -> list[dict]:
    """Tokens per second of each implementation, and how many times as fast as the first it is."""

    def timed(generator: Generator) -> float:
        started = time.perf_counter()
        generator(prompts)  # returns lists, so the device has finished
        return time.perf_counter() - started

    work = {name: lambda each=each: timed(each) for name, each in generators.items()}
    interleave(work, rounds=1)  # not counted: caches are made, code is compiled
    seconds = interleave(work, rounds)
    first = next(iter(seconds.values()))
    return [
        {
            "name": name,
            "tokens_per_second": tokens / median(own),
            "ratio": speedup(own, first),
            "seconds": own,
        }
        for name, own in seconds.items()
    ]
