"""The comparison of benchmarks/generate.py: equivalence check and interleaved timing."""

import copy
import functools
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.equivalence import NotEquivalent
from benchmarks.implementations import transformers_model
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

SEED = 0  # for the weights and the prompts
Generate = Callable[[], list[list[int]]]  # returns the new ids of each prompt


def compare(settings: GenerationBenchmark) -> None:
    """Checks that both generate the same ids, times them, prints and writes the results."""
    refuse(devices.check(settings.device))
    config = ModelConfig(**compose([f"model={settings.model}"]).model.model_dump())
    if (needed := settings.prompt_tokens + settings.max_new_tokens) > config.context_length:
        reason = f"prompt and new tokens are {needed} tokens; the context of the model is "
        reason += f"{config.context_length}"
        refuse([("max_new_tokens", settings.max_new_tokens, reason, "use fewer")])
    device = devices.prepare(settings.device, SEED)
    weights = GPT(config).eval()
    results = origin("benchmarks.generate", device, ("torch", "transformers")) | {"tables": {}}
    for batch_size in settings.batch_sizes:
        random = torch.Generator().manual_seed(SEED)
        shape = (batch_size, settings.prompt_tokens)
        prompts = torch.randint(config.vocab_size, shape, generator=random)  # (B, T)
        work = implementations(weights, prompts, settings.max_new_tokens, device)
        theirs, ours, *_ = [run() for run in work.values()]  # also creates caches and compiles
        if theirs != ours:
            reason = "the tokens of clearhead and transformers differ in fp32"
            raise NotEquivalent("generation", NO_VALUE, reason, "check the version of transformers")
        timed = {name: functools.partial(seconds_of, run) for name, run in work.items()}
        seconds = interleave(timed, settings.rounds)
        rows = [
            {
                "name": name,
                "tokens_per_second": batch_size * settings.max_new_tokens / median(own),
                "ratio": speedup(own, seconds["transformers, fp32"]),
                "seconds": own,
            }
            for name, own in seconds.items()
        ]
        results["tables"][str(batch_size)] = rows
        print(f"batch size {batch_size}: tokens/s, ratio to the first row")
        for row in rows:
            figures = f"{row['tokens_per_second']:>10.1f}  {show_speedup(row['ratio'])}"
            print(f"  {row['name']:<22}{figures}", flush=True)
    if settings.out:
        write_out(settings.out, results)


def implementations(
    weights: GPT, prompts: torch.Tensor, max_new_tokens: int, device: torch.device
) -> dict[str, Generate]:
    """Returns both in fp32 and in the fastest precision of the device. prompts: (B, T)."""
    theirs = transformers_model(weights, use_cache=True)
    best = devices.best_dtype(device)
    dtypes = {"fp32": torch.float32} | ({} if best == torch.float32 else {"bf16": best})
    work: dict[str, Generate] = {}
    for name, dtype in dtypes.items():
        model = copy.deepcopy(theirs).to(device, dtype)
        work[f"transformers, {name}"] = functools.partial(
            by_transformers, model, prompts, max_new_tokens
        )
        work[f"clearhead, {name}"] = by_clearhead(weights, prompts, max_new_tokens, device, dtype)
    return work


def by_transformers(model, prompts: torch.Tensor, max_new_tokens: int) -> list[list[int]]:
    ids = prompts.to(model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[:, ids.shape[1] :].tolist()


def by_clearhead(
    gpt: GPT, prompts: torch.Tensor, max_new_tokens: int, device: torch.device, dtype: torch.dtype
) -> Generate:
    """Returns a function that generates as generate.py does for a long text."""
    compiler = devices.compiled_step("auto", device, 10**6)
    model = copy.deepcopy(gpt).to(device)
    pack_weights(model, dtype, len(prompts), to_compile=compiler is not None)
    cache = KVCache(gpt.config.context_length, compiler) if compiler else None

    def generate_ids() -> list[list[int]]:
        greedy = Sampling(temperature=0)
        steps = generate(model, prompts.tolist(), max_new_tokens, greedy, cache=cache)
        return [list(row) for row in zip(*steps, strict=True)]

    return generate_ids


def seconds_of(run: Generate) -> float:
    started = time.perf_counter()
    run()  # returns lists, so the device has finished
    return time.perf_counter() - started
