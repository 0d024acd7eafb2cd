"""Generation speed of clearhead and transformers, in one process.

    python -m benchmarks.generate model=gpt2-small batch_sizes=[1,8]    # 2 tables
    python -m benchmarks.generate prompt_tokens=[32,512] max_new_tokens=[24,256]    # 8 tables

Both decode greedily with the same weights and prompts: transformers with generate(), clearhead with
the code of generate.py. First all tokens in fp32 are compared. If they differ, the command exits
with code 4. Then the runs are interleaved. The speed is the median of tokens per second, reading
the prompt included; the speedup is the median of the ratios to transformers in the same precision
within each round, with the smallest and the largest one.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
from pydantic import Field

from benchmarks.equivalence import NotEquivalent
from benchmarks.implementations import transformers_model
from benchmarks.timing import interleave, origin, show_speedup, speedup
from clearhead.compute.specialize import specialize_for_generation
from clearhead.config import compose
from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Device, Name, Positive
from clearhead.errors import NO_VALUE, refuse
from clearhead.models.decoding import KVCache, Sampling, generate
from clearhead.parallel import device as devices
from model import GPT, ModelConfig

SEED = 0  # for the weights and the prompts
Counts = Annotated[list[Positive], Field(min_length=1)]
# (prompts (B, T), number of new tokens) -> the new ids of each prompt
Generate = Callable[[torch.Tensor, int], list[list[int]]]


class GenerationBenchmark(ScriptConfig):
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="model group of train.py")
    batch_sizes: Counts = Field([1, 8], description="numbers of texts generated at once")
    prompt_tokens: Counts = Field([64], description="tokens per prompt")
    max_new_tokens: Counts = Field([64], description="new tokens per prompt")
    rounds: Positive = Field(5, description="measurements of each implementation")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(GenerationBenchmark)
def main(settings: GenerationBenchmark) -> None:
    refuse(devices.check(settings.device))
    config = ModelConfig(**compose([f"model={settings.model}"]).model.model_dump())
    device = devices.prepare(settings.device, SEED)
    weights = GPT(config).eval()
    results = origin("benchmarks.generate", device, ("transformers",)) | {"tables": {}}
    for batch_size in settings.batch_sizes:
        work = implementations(weights, batch_size, device)
        for length, count in itertools.product(settings.prompt_tokens, settings.max_new_tokens):
            random = torch.Generator().manual_seed(SEED)
            prompts = torch.randint(config.vocab_size, (batch_size, length), generator=random)
            rows = measure(work, prompts, count, settings.rounds, device)
            title = f"{batch_size} x {length} + {count} tokens"
            results["tables"][title] = {"rows": rows}
            print(f"{title:<24}{'tokens/s':>10}  speedup over transformers, same precision")
            for row in rows:
                figures = f"{row['tokens_per_second']:>10.1f}  {show_speedup(row['ratio'])}"
                print(f"  {row['name']:<22}{figures}", flush=True)
    if settings.out:
        write_out(settings.out, results)


def measure(
    work: dict[str, Generate], prompts: torch.Tensor, count: int, rounds: int, device: torch.device
) -> list[dict]:
    """Returns the rows of a table, for `count` new tokens. The first runs, which are not timed,
    also create caches and compile."""
    theirs, ours, *_ = [run(prompts, count) for run in work.values()]
    if theirs != ours:
        reason = "the tokens of clearhead and transformers differ in fp32"
        raise NotEquivalent("generation", NO_VALUE, reason, "check the version of transformers")
    calls = {name: functools.partial(run, prompts, count) for name, run in work.items()}
    seconds = interleave(calls, rounds, device)
    return [
        {
            "name": name,
            "tokens_per_second": len(prompts) * count / median(own),
            "ratio": speedup(own, seconds[name.replace("clearhead", "transformers")]),
            "seconds": own,
        }
        for name, own in seconds.items()
    ]


def implementations(weights: GPT, batch_size: int, device: torch.device) -> dict[str, Generate]:
    """Returns both in fp32 and in the fastest precision of the device."""
    theirs = transformers_model(weights, use_cache=True)
    used = (torch.float32, devices.best_dtype(device))
    dtypes = {name: dtype for name, dtype in devices.DTYPES.items() if dtype in used}
    work: dict[str, Generate] = {}
    for name, dtype in dtypes.items():
        model = copy.deepcopy(theirs).to(device, dtype)
        work[f"transformers, {name}"] = functools.partial(by_transformers, model)
        work[f"clearhead, {name}"] = by_clearhead(weights, batch_size, device, dtype)
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


def by_clearhead(gpt: GPT, batch_size: int, device: torch.device, dtype: torch.dtype) -> Generate:
    """Returns a function that generates as generate.py does for a long text."""
    to_compile = device.type == "cuda"  # as generate.py does, but here a failure is an error
    compiler = devices.compiled_step(to_compile, device, 0)
    model = copy.deepcopy(gpt).to(device)
    specialize_for_generation(model, dtype, batch_size, to_compile=compiler is not None)
    cache = KVCache(gpt.config.context_length, compiler) if compiler else None

    def generate_ids(prompts: torch.Tensor, max_new_tokens: int) -> list[list[int]]:
        greedy = Sampling(temperature=0)
        steps = generate(model, prompts.tolist(), max_new_tokens, greedy, cache=cache)
        return [list(row) for row in zip(*steps, strict=True)]

    return generate_ids


if __name__ == "__main__":
    main()
