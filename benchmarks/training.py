"""How fast this trainer is beside others, on this machine: the same model, data and mathematics.

    python -m benchmarks.training model=gpt2-small batch_size=4 length=256
    python -m benchmarks.training nanogpt=../nanoGPT llms_from_scratch=../LLMs

Whole optimizer steps (forward, backward, clipping, AdamW) of all contenders in one process, on the
same random tokens, beginning with the same weights, without dropout. First each contender has to
compute the same loss, gradient norm and update as ours; one that does not ends the command with
exit code 4. Then they take turns, A B C, C B A and so on, so that what the machine does meanwhile
meets all of them.

Two tables. As shipped: each as its own project runs it on this device when nothing is asked for.
Equalised: all in the same precision and compiled. Ratios are of the same round; ceilings are
measured in the same process. Who is compared, and how: benchmarks/implementations.py.
"""

import dataclasses
import datetime
import difflib
import importlib.util
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from errors import ConfigError, Problem, refuse
from training.config.command_line import compose, errors_in_one_line, parse, show_help, write_out
from training.config.schema import REPOSITORY, Settings
from training.reporting.machine import git, machine

if TYPE_CHECKING:
    import torch

NAMES = ("ours", "transformers", "nanogpt", "llms_from_scratch")
TABLES = {
    "shipped": "As shipped: each as its own project runs it on this device",
    "equalised": "Equalised: the same precision for all, compiled where that is possible",
}
BATCHES = 4  # in rotation
OF_OPTIMIZER = ("lr", "weight_decay", "betas", "eps")


@dataclass
class BenchmarkConfig:
    """python -m benchmarks.training [model=NAME] [model.KEY=VALUE ...] [KEY=VALUE ...]"""

    model: str = field(default="gpt2-small", metadata={"help": "as in training"})
    batch_size: int = field(default=4, metadata={"help": "windows of a step"})
    length: int = field(default=256, metadata={"help": "tokens of a window"})
    nanogpt: str = field(default="", metadata={"help": "the folder of a checkout of nanoGPT"})
    llms_from_scratch: str = field(
        default="", metadata={"help": "the folder of a checkout of LLMs-from-scratch"}
    )
    contenders: str = field(
        default="all", metadata={"help": f"all that are there, or some of {','.join(NAMES)}"}
    )
    table: str = field(default="both", metadata={"help": "both | shipped | equalised"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    precision: str = field(
        default="auto", metadata={"help": "of the equalised table: auto | fp32 | bf16"}
    )
    compile: str | bool = field(
        default="auto", metadata={"help": "auto: where it can be; false: nobody"}
    )
    rounds: int = field(default=5, metadata={"help": "turns of each contender"})
    steps: int = field(default=3, metadata={"help": "of a turn, after those that do not count"})
    settle: int = field(default=2, metadata={"help": "steps at its beginning that do not count"})
    warmup: int = field(default=2, metadata={"help": "steps after the first, before all turns"})
    ceiling_seconds: float = field(
        default=0.3, metadata={"help": "for each product measured; 0: no ceilings"}
    )
    one_at_a_time: bool = field(
        default=False, metadata={"help": "true: less memory, and no turns; drift then counts"}
    )
    seed: int = field(default=0, metadata={"help": "of the weights and the tokens"})
    out: str = field(default="", metadata={"help": "a JSON file for everything measured"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        for key, least in LEAST.items():
            if not getattr(self, key) >= least:
                fix = f"use {least} or more"
                found.append((key, getattr(self, key), f"must be at least {least}", fix))
        if self.seed >= 2**63:
            found.append(("seed", self.seed, "must be below 2^63", "use seed=0"))
        for key, choices in CHOICES.items():
            if (value := getattr(self, key)) not in choices:
                names = ", ".join(str(choice).lower() for choice in choices)
                found.append((key, value, "no such choice", f"use one of {names}"))
        found += checkout_problems(self) + name_problems(self)
        if self.out and Path(self.out).is_dir():
            found.append(("out", self.out, "is a folder", "give the name of a file in it"))
        elif self.out and not Path(self.out).absolute().parent.is_dir():
            found.append(("out", self.out, "no such folder", "make it, or name another"))
        return found


LEAST = {"batch_size": 1, "length": 1, "rounds": 1, "steps": 1, "settle": 0, "warmup": 0, "seed": 0}
LEAST["ceiling_seconds"] = 0
CHOICES = {
    "table": ("both", *TABLES),
    "device": ("auto", "cpu", "cuda", "mps"),
    "precision": ("auto", "fp32", "bf16"),
    "compile": ("auto", True, False),
}


# --------------------------------------------------------------------------------- settings


def checkout_problems(settings: BenchmarkConfig) -> list[Problem]:
    """Folders that hold no checkout of what they should."""
    found = []
    if not settings.nanogpt and not settings.llms_from_scratch:
        return found  # and torch, which they need, is not loaded to check
    from benchmarks.implementations import CHECKOUTS

    for key, project in CHECKOUTS.items():
        folder = getattr(settings, key)
        if folder and project.file_in(folder) is None:
            cause = (
                f"there is no {project.files[0]} in it" if Path(folder).is_dir() else "no folder"
            )
            fix = f"name the folder of a checkout of {project.title}"
            found.append((key, folder, cause, fix))
    return found


def name_problems(settings: BenchmarkConfig) -> list[Problem]:
    """Contenders that are asked for and not there."""
    found, value = [], settings.contenders
    for name in asked(value):
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            fix = f"did you mean {near[0]}?" if near else f"use some of {','.join(NAMES)}, or all"
            found.append(("contenders", value, f"there is no {name or 'such contender'}", fix))
        elif name == "transformers" and importlib.util.find_spec(name) is None:
            found.append(("contenders", value, f"{name} is not installed", f"pip install {name}"))
        elif hasattr(settings, name) and not getattr(settings, name):
            fix = f"give {name}=FOLDER, a checkout of it"
            found.append(("contenders", value, f"{name} is no package", fix))
    return found


def asked(names: str) -> list[str]:
    """The contenders that a setting names; none of them for all."""
    return [] if names == "all" else [name.strip() for name in names.strip("[]").split(",")]


def chosen(settings: BenchmarkConfig) -> list[str]:
    """The contenders that take part, ours first."""
    there = [name for name in NAMES if getattr(settings, name, "here")]
    if importlib.util.find_spec("transformers") is None:
        there.remove("transformers")
    return [name for name in there if name in (asked(settings.contenders) or NAMES)]


def composed(arguments: list[str]) -> tuple[BenchmarkConfig, Settings]:
    """The settings of the benchmark, and those of training that the model and optimizer are from;
    ConfigError with the problems of both."""
    theirs = [text for text in arguments if text.startswith(("model.", "optimizer."))]
    problems, own, training = [], None, None
    for text in theirs:
        key, _, value = text.partition("=")
        if key in ("model.dropout", "model.qkv_bias"):
            cause = "all train without dropout" if key == "model.dropout" else "the others have it"
            problems.append((key, value, cause, "leave it out"))
        if key.startswith("optimizer.") and key.partition(".")[2] not in OF_OPTIMIZER:
            fix = f"the optimizer's settings here are {', '.join(OF_OPTIMIZER)}"
            problems.append((key, value, "plays no part", fix))
    try:
        own = parse(BenchmarkConfig, [text for text in arguments if text not in theirs])
    except ConfigError as error:
        problems += error.problems
    refuse(problems)
    # No text is read. Bytes are the smallest vocabulary that a model has to fit.
    fixed = ["model.dropout=0", "data.tokenizer=byte", "data.max_length=1", "data.stride=null"]
    training = compose([f"model={own.model}", *theirs, *fixed])
    if own.length > training.model.context_length:
        cause = f"the model reads at most {training.model.context_length} tokens"
        fix = f"use length={training.model.context_length} or less"
        refuse([("length", own.length, cause, fix)])
    return own, training


def provenance(settings: BenchmarkConfig, arguments: list[str], device: "torch.device") -> dict:
    """Where the figures are from; of the machine's folders, names alone."""
    import torch

    def bare(key: str, value: object) -> object:
        return Path(str(value)).name if key in ("nanogpt", "llms_from_scratch", "out") else value

    typed = [text.partition("=") for text in arguments]
    packages = ("torch", "numpy", "transformers")
    there = tuple(name for name in packages if importlib.util.find_spec(name))
    found = {
        "what": "whole optimizer steps of several projects: the same model, tokens, mathematics",
        "command": shlex.join(
            ["python", "-m", "benchmarks.training", *(f"{k}{e}{bare(k, v)}" for k, e, v in typed)]
        ),
        "date": datetime.date.today().isoformat(),
        **machine(there),
        "uncommitted_changes": bool(git(REPOSITORY, "status", "--porcelain")),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "settings": {key: bare(key, value) for key, value in vars(settings).items()},
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


# ---------------------------------------------------------------------------------- output


def told_head(results: dict) -> str:
    where = f"{results['cores']} cores of {results['processor']}, threads: {results['threads']}"
    changed = ", with changes" if results["uncommitted_changes"] else ""
    settings = results["settings"]
    versions = " ".join(f"{n} {results[n]}" for n in ("torch", "transformers") if n in results)
    return "\n".join(
        [
            f"{settings['model']}, {results['parameters']:,} parameters; a step has "
            f"{settings['batch_size']} windows of {settings['length']} tokens",
            f"on {results.get('gpu', where)}",
            f"{versions}; commit {results['commit']}{changed}",
        ]
    )


def told_agreement(results: dict) -> str:
    lines = [f"{'The same computation, in fp32':<32}{'loss':>14}{'gradient norm':>16}{'after':>14}"]
    for key, found in results["agreement"].items():
        figures = f"{found['loss']:>14.6f}{found['grad_norm']:>16.6f}{found['loss_after']:>14.6f}"
        note = "  (its GELU set to tanh)" if found["own_gelu"] else ""
        lines.append(f"  {key:<30}{figures}{note}")
    return "\n".join(lines)


def told_ceilings(ceilings: dict) -> str:
    lines = ["Ceilings                                 GFLOP/s   tokens/s"]
    for precision, found in ceilings["products"].items():
        shape = " x ".join(map(str, found["best_shape"]))
        for words, rate, speed in (
            (f"{precision}, best: {shape}", found["best"], found["best_tokens_per_second"]),
            (f"{precision}, the step's own", found["own"], found["own_tokens_per_second"]),
        ):
            lines.append(f"  {words:<36}{rate / 1e9:>10,.0f}{speed:>11,.0f}")
    return "\n".join([*lines, f"  copying memory: {ceilings['copy'] / 1e9:,.1f} GB/s"])


def told_table(name: str, rows: list[dict]) -> str:
    lines = [TABLES[name]]
    for row in rows:
        how = {
            row["precision"]: True,
            "compiled": row["compiled"],
            "fused AdamW": row["fused_adamw"],
            "freed memory kept": row["freed_memory_kept"],
            "padded vocabulary": row["vocabulary_padded"],
            "TF32": row["tf32"],
        }
        lines.append(f"  {row['name']:<26}{', '.join(words for words, so in how.items() if so)}")
    shares = "share_of_best" in rows[0]
    peak = any("peak_memory_bytes" in row for row in rows)
    # On a GPU there is its peak memory, elsewhere what allocating costs: pages newly provided.
    last = "GB" if peak else "faults"
    head = f"  {'':<26}{'first, s':>9}{'ms a step':>11}{'quartiles':>18}{'tokens/s':>10}"
    head += f"{'of best':>8}{'of own':>7}" if shares else ""
    lines += ["", head + f"{last:>9}"]
    for row in rows:
        step = row["step_seconds"]
        quartiles = f"{1e3 * step['lower_quartile']:,.1f}-{1e3 * step['upper_quartile']:,.1f}"
        line = f"  {row['name']:<26}{row['first_step_seconds']:>9.1f}{1e3 * step['median']:>11,.1f}"
        line += f"{quartiles:>18}{row['tokens_per_second']:>10,.0f}"
        line += f"{row['share_of_best']:>8.0%}{row['share_of_own']:>7.0%}" if shares else ""
        faults = f"{row['page_faults_per_step']:>9,.0f}"
        lines.append(line + (f"{row['peak_memory_bytes'] / 1e9:>9.1f}" if peak else faults))
    subjects = [row for row in rows if row["project"] == "ours"] or rows[:1]
    if len(rows) > 1:
        heads = "".join(f"{subject['name'] + ' is':>24}" for subject in subjects)
        lines += ["", f"  {'so many times as fast as':<26}{heads}"]
    for row in rows if len(rows) > 1 else []:
        line = f"  {row['name']:<26}"
        for subject in subjects:
            found = subject["times_as_fast_as"].get(row["name"])
            words = "{median:.2f} ({least:.2f}-{most:.2f})".format(**found) if found else ""
            line += f"{words:>24}"
        if row not in subjects or len(subjects) > 1:
            lines.append(line.rstrip())
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- command


def run(settings: BenchmarkConfig, training: Settings, arguments: list[str]) -> None:
    import torch

    from benchmarks import equivalence as agreement
    from benchmarks import implementations as contenders
    from benchmarks import interleaved as turns
    from benchmarks.roofline import ceilings
    from model import GPT
    from training.distributed import device as devices
    from training.distributed.launch import ParallelConfig, check
    from training.distributed.strategy import build_strategy

    alone = ParallelConfig(strategy="single")
    refuse(check(alone, settings.device, settings.batch_size))
    refuse(devices.check(settings.device, settings.precision))
    projects = {}
    for name in chosen(settings):
        folder = getattr(settings, name, None)
        projects[name] = contenders.PROJECTS[name](*[folder] if folder else [])
    parallel = build_strategy(alone, settings.device, "auto", settings.seed)
    device, best = parallel.device, parallel.dtype
    compiles = settings.compile
    if compiles == "auto":
        compiles = device.type in ("cpu", "cuda") and devices.can_compile(device)
    turns.return_freed_memory(device.type)  # outside the turns of those who keep it
    tables = {}
    for name in TABLES if settings.table == "both" else [settings.table]:
        by_default = (device.type, best, compiles, training.model.vocab_size)
        alike = (device.type, devices.DTYPES.get(settings.precision, best), compiles)
        tables[name] = [
            row
            for project in projects.values()
            for row in (
                project.shipped(*by_default) if name == "shipped" else project.equalised(*alike)
            )
        ]

    weights = GPT(training.model)
    random = torch.Generator().manual_seed(settings.seed)
    shape = (BATCHES, settings.batch_size, settings.length + 1)
    ids = torch.randint(training.model.vocab_size, shape, generator=random).to(device)
    batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]

    results = provenance(settings, arguments, device)
    results["parameters"] = weights.num_parameters()
    results["flops_per_token"] = weights.flops_per_token(settings.length)
    results["projects"] = {name: project.source() for name, project in projects.items()}
    print(told_head(results), end="\n\n", flush=True)

    setup = (training.optimizer, parallel, settings.seed)
    found = agreement.check_projects(list(projects.values()), weights, batches[0], *setup)
    results["agreement"] = {name: dataclasses.asdict(each) for name, each in found.items()}
    print(told_agreement(results), flush=True)
    rows = [row for each in tables.values() for row in each]
    pads = {row.padded for row in rows}
    expected = {pad: agreement.reference(weights, batches[0], parallel, pad) for pad in pads}

    results["ceilings"] = None
    if settings.ceiling_seconds > 0:
        precisions = sorted({"fp32", *(row.precision for row in rows)})
        step = (weights, settings.batch_size, settings.length)
        results["ceilings"] = ceilings(*step, precisions, device, settings.ceiling_seconds)
        print("\n" + told_ceilings(results["ceilings"]), flush=True)

    def make(row: contenders.Row) -> contenders.Contender:
        return projects[row.project].contender(row, weights, *setup)

    tokens = settings.batch_size * settings.length
    keys = ("rounds", "steps", "settle", "warmup", "one_at_a_time")
    how = {key: getattr(settings, key) for key in keys}
    results["tables"] = {}
    for name, each in tables.items():
        entries = turns.measure(each, make, batches, expected, parallel, **how)
        figures = turns.table(entries, tokens, results["flops_per_token"], results["ceilings"])
        taken = [[each[n].name for n in turn] for turn in turns.order(len(each), settings.rounds)]
        taken = "one after the other" if settings.one_at_a_time else taken
        results["tables"][name] = {"turns": taken, "rows": figures}
        print("\n" + told_table(name, figures), flush=True)
    if settings.out:
        write_out(settings.out, results)


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help(BenchmarkConfig)
        print("\nAlso model.KEY=VALUE and optimizer.KEY=VALUE as in training: train.py --help")
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        run(*composed(arguments), arguments)


if __name__ == "__main__":
    main()
