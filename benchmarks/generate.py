"""How fast text is generated, beside transformers, in one process.

    python -m benchmarks.generate model=gpt2-small batch_sizes=[1,8]

Both write greedily from the same weights and prompts, each as it is used by itself: transformers by
generate(), ours as generate.py does. First they have to agree: in fp32 on every token, else
nothing is timed (exit code 4). Then they take turns, A B C, C B A. A figure is the median of the
tokens a second, a ratio the median of the ratios within each round.
"""

import copy
import datetime
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

from errors import NO_VALUE, Problem, refuse
from training.config.command_line import compose, settings_command, write_out
from training.reporting.machine import machine

if TYPE_CHECKING:
    import torch


@dataclass
class BenchmarkConfig:
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: str = field(default="gpt2-small", metadata={"help": "as in training"})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 8], metadata={"help": "texts at once, one table each"}
    )
    prompt_tokens: int = field(default=64, metadata={"help": "of each prompt"})
    num_tokens: int = field(default=64, metadata={"help": "added to each"})
    rounds: int = field(default=5, metadata={"help": "turns of each contender"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    seed: int = field(default=0, metadata={"help": "of the weights and the prompts"})
    out: str = field(default="", metadata={"help": "a JSON file for everything measured"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        for key in ("prompt_tokens", "num_tokens", "rounds"):
            if getattr(self, key) < 1:
                found.append((key, getattr(self, key), "must be at least 1", "use 1 or more"))
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            found.append(("batch_sizes", self.batch_sizes, "must be at least 1", "use [1,8]"))
        if not 0 <= self.seed < 2**63:
            found.append(("seed", self.seed, "must be from 0 to 2^63 - 1", "use seed=0"))
        if self.device not in ("auto", "cpu", "cuda", "mps"):
            found.append(("device", self.device, "no such device", "use auto, cpu, cuda or mps"))
        above = Path(self.out).absolute().parent
        if self.out and (Path(self.out).is_dir() or not above.is_dir()):
            found.append(("out", self.out, "is no file in a folder that exists", "name another"))
        return found


@settings_command(BenchmarkConfig)
def main(settings: BenchmarkConfig) -> None:
    import torch

    from benchmarks.implementations import Disagreement, Transformers
    from model import GPT
    from training.distributed import device as devices

    refuse(devices.check(settings.device))
    config = compose([f"model={settings.model}"]).model
    if (needed := settings.prompt_tokens + settings.num_tokens) > config.context_length:
        cause = f"with prompt_tokens={settings.prompt_tokens} the text has {needed} tokens, and the"
        cause += f" model reads {config.context_length}: there transformers' would end"
        refuse([("num_tokens", settings.num_tokens, cause, "use fewer")])
    place = devices.prepare(settings.device, settings.seed)
    best = devices.best_dtype(place)
    weights = GPT(config).eval()
    library = Transformers()
    theirs = library.build(config).eval()
    theirs.load_state_dict(library.tensors(weights), strict=False)
    theirs.config.use_cache = theirs.generation_config.use_cache = True
    theirs.to(place)
    random = torch.Generator().manual_seed(settings.seed)
    results = {
        "what": "tokens a second of greedy generation: the same weights and prompts",
        "command": shlex.join(["python", "-m", "benchmarks.generate", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        **machine(("torch", "transformers")),
        "threads": torch.get_num_threads(),
        "device": str(place),
        "tables": {},
    }
    for rows in settings.batch_sizes:
        shape = (rows, settings.prompt_tokens)
        prompts = torch.randint(config.vocab_size, shape, generator=random)
        writers = {
            "transformers, fp32": of_transformers(theirs, settings.num_tokens),
            "clearhead, fp32": of_ours(weights, torch.float32, place, rows, settings.num_tokens),
        }
        if best != torch.float32:
            half = copy.deepcopy(theirs).to(best)
            writers["transformers, bf16"] = of_transformers(half, settings.num_tokens)
            writers["clearhead, bf16"] = of_ours(weights, best, place, rows, settings.num_tokens)
        told, ours = (writers[name](prompts) for name in list(writers)[:2])
        if told != ours:
            cause = "ours and transformers' tokens differ in fp32"
            raise Disagreement("generation", NO_VALUE, cause, "no speed is measured")
        measured = in_turns(writers, prompts, settings.rounds)
        table = figures(measured, rows * settings.num_tokens)
        results["tables"][str(rows)] = table
        print(told_table(rows, settings, table), flush=True)
    if settings.out:
        write_out(settings.out, results)


Writer = Callable[["torch.Tensor"], list[list[int]]]  # prompts (B, T) -> new tokens


def of_transformers(model, num_tokens: int) -> Writer:
    import torch

    def write(prompts: torch.Tensor) -> list[list[int]]:
        ids = prompts.to(model.device)
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return whole[:, ids.shape[1] :].tolist()

    return write


def of_ours(weights, dtype, place, rows: int, num_tokens: int) -> Writer:
    import torch

    from inference.cache import KVCache
    from inference.decoding import Sampling, generate
    from inference.packed_weights import freeze
    from training.distributed.device import compiled_step

    compiled = compiled_step("auto", place, 10**6)  # as for a long text
    model = freeze(copy.deepcopy(weights).to(place), dtype, rows, to_compile=compiled is not None)
    cache = KVCache(weights.config.context_length, compiled) if compiled else None

    def write(prompts: torch.Tensor) -> list[list[int]]:
        greedy = Sampling(temperature=0)
        steps = generate(model, prompts.tolist(), num_tokens, greedy, cache=cache)
        return [list(row) for row in zip(*steps, strict=True)]

    return write


def in_turns(writers: dict[str, Writer], prompts, rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, by contender; a turn before them does not count."""
    seconds = {name: [] for name in writers}
    for turn in range(rounds + 1):
        for name in list(writers)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            writers[name](prompts)  # its tokens are on the host: the device has done its work
            if turn > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def figures(seconds: dict[str, list[float]], tokens: int) -> list[dict]:
    """Tokens a second and their quartiles, and how many times the first contender's."""
    first = next(iter(seconds.values()))
    table = []
    for name, each in seconds.items():
        ratios = [before / now for before, now in zip(first, each, strict=True)]
        table.append(
            {
                "name": name,
                "tokens_per_second": median(tokens / s for s in each),
                "ratio": median(ratios),
                "quartiles": spread(ratios),
                "seconds": each,
            }
        )
    return table


def spread(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return low, high


def told_table(rows: int, settings: BenchmarkConfig, table: list[dict]) -> str:
    lines = [
        f"{rows} {'text' if rows == 1 else 'texts'} at once, {settings.num_tokens} tokens after "
        f"{settings.prompt_tokens} each",
        f"  {'':<22}{'tokens/s':>10}{'x the first':>13}   quartiles",
    ]
    for row in table:
        low, high = row["quartiles"]
        lines.append(
            f"  {row['name']:<22}{row['tokens_per_second']:>10.1f}{row['ratio']:>13.2f}   "
            f"{low:.2f} to {high:.2f}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
