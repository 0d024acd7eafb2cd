"""What a training run will take, before a machine is rented for it: memory, time, money.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

Takes the settings of the training command as they are, and some of its own. Nothing is trained and
no GPU is needed: memory comes from training/planning/memory.py, time from
training/planning/throughput.py, and how much of a device's peak is reached from benchmarks/results/
where it was measured there, else it is assumed. Every assumption is printed.
"""

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from errors import NO_VALUE, ConfigError, Problem, UnknownSetting, refuse
from training.config.command_line import compose, errors_in_one_line, parse, show_help, write_out
from training.config.other_names import same_purpose
from training.config.schema import REPOSITORY, Settings, complete
from training.planning import memory
from training.planning.devices import KINDS, WORTH_COMPILING
from training.planning.throughput import (
    BUS,
    LAUNCH,
    Job,
    Measured,
    bus,
    flops_per_token,
    speed,
    utilisation,
)

RESULTS = REPOSITORY / "benchmarks" / "results"
MOST_DEVICES = 1024  # how far the advice looks


@dataclass
class PlanConfig:
    """python -m scripts.plan [SETTING OF train.py ...] [KEY=VALUE ...]"""

    devices: int = field(default=1, metadata={"help": "how many, one rank on each"})
    kind: str = field(default="h100", metadata={"help": f"of what kind: {', '.join(KINDS)}"})
    tokens: float | None = field(
        default=None, metadata={"help": "to train on; null: trainer.max_steps times the batch"}
    )
    price: float | None = field(
        default=None, metadata={"help": "US dollars for an hour of a device; null: a round figure"}
    )
    per_machine: int | None = field(
        default=None, metadata={"help": "devices in a machine; null: what is usual for the kind"}
    )
    out: str = field(default="", metadata={"help": "a JSON file for all figures"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        for key in ("devices", "per_machine"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                found.append((key, getattr(self, key), "must be at least 1", "use 1 or more"))
        if self.kind not in KINDS:
            near = difflib.get_close_matches(self.kind.lower(), KINDS, n=1)
            fix = f"did you mean kind={near[0]}?" if near else f"use one of {', '.join(KINDS)}"
            found.append(("kind", self.kind, "no such kind of device", fix))
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            found.append(("tokens", self.tokens, "must be more than 0", "use 10e9 or so"))
        if self.price is not None and not 0 <= self.price < math.inf:
            found.append(("price", self.price, "must not be negative", "use 2.5 or so"))
        if self.out and Path(self.out).is_dir():
            found.append(("out", self.out, "is a folder", "give the name of a file in it"))
        elif self.out and not Path(self.out).absolute().parent.is_dir():
            found.append(("out", self.out, "no such folder", "make it, or name another"))
        return found


# ------------------------------------------------------------------- what was measured


def measurements(kind: str, folder: Path = RESULTS) -> Iterator[Measured]:
    """The measured training runs on devices of this kind, from JSON files of the form

        {"command": "python train.py OVERRIDES SETTINGS", "kind": "h100",
         "runs": [{"settings": "OVERRIDES", "devices": 8, "tokens_per_second": [1, 2, 3]}]}

    `kind` and `devices` may stand at either place. Files and runs of another form are of other
    matters, and settings that are not plain overrides (a run with something replaced in the code)
    say nothing about the code as it is. A file without a kind is a CPU's when its torch was built
    for one, and then of one process.
    """
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        runs = results.get("runs") if isinstance(results, dict) else None
        for run in runs if isinstance(runs, list) else []:
            run = run if isinstance(run, dict) else {}
            rates, settings = run.get("tokens_per_second"), run.get("settings")
            if not isinstance(settings, str) or not isinstance(rates, list) or not rates:
                continue
            of_cpu = "+cpu" in str(results.get("versions", {}).get("torch"))
            devices = run.get("devices", results.get("devices", 1))
            plain = "cpu" if of_cpu and devices == 1 else None
            is_plain = all("=" in text for text in settings.split())
            if run.get("kind", results.get("kind", plain)) != kind or not is_plain:
                continue
            overrides = results.get("command", "").split() + settings.split()
            overrides = [text for text in overrides if "=" in text]
            try:
                job = job_of(of_training(overrides), PlanConfig(devices=devices, kind=kind))
            except ConfigError:
                continue  # of settings that are called otherwise by now
            name = run.get("name", settings)
            yield Measured(job, median(rates), f"{path.name}, {name}")


# ----------------------------------------------------------------------------- settings -> job


def job_of(settings: Settings, plan: PlanConfig) -> Job:
    """The job that these settings make, with the largest micro-batch that fits where they leave it
    open. Raises ConfigError as training would."""
    from training.distributed.launch import check_ranks

    trainer, kind = settings.trainer, KINDS[plan.kind]
    strategy = settings.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if plan.devices > 1 else "single"
    on_cpu = plan.kind == "cpu"
    problems = check_ranks(strategy, plan.devices, trainer.batch_size)
    if trainer.device not in ("auto", "cpu" if on_cpu else "cuda"):
        cause = f"kind={plan.kind} is none"
        problems.append(("trainer.device", trainer.device, cause, "use trainer.device=auto"))
    if on_cpu and trainer.precision == "fp16":
        cause = "half precision needs a GPU, and this runs on cpu"
        problems.append(("trainer.precision", "fp16", cause, "use trainer.precision=auto"))
    refuse(problems)
    length, batch = settings.data.max_length, trainer.batch_size
    job = Job(
        model=settings.model,
        kind=kind,
        devices=plan.devices,
        per_machine=plan.per_machine or kind.per_machine,
        strategy=strategy,
        precision="bf16" if trainer.precision == "auto" else trainer.precision,
        compiled=trainer.compile is True,
        checkpointing=trainer.activation_checkpointing,
        reshard=settings.parallel.reshard_after_forward,
        length=length,
        batch=batch,
        micro=batch // plan.devices,
        tokens=plan.tokens or trainer.max_steps * batch * length,
        optimizer=settings.optimizer.name,
        ns_steps=settings.optimizer.ns_steps,
    )
    if trainer.compile == "auto":
        worth = WORTH_COMPILING["cpu" if on_cpu else "cuda"]
        long_enough = flops_per_token(job) * job.tokens / job.devices >= worth
        job = dataclasses.replace(job, compiled=long_enough)
    if isinstance(trainer.micro_batch_size, int):
        return dataclasses.replace(job, micro=min(trainer.micro_batch_size, job.share))
    return dataclasses.replace(job, micro=job.largest() or 1)


def advice(job: Job) -> list[str]:
    """What would make a job fit that does not, as settings, each with what a device needs then."""

    def line(settings: str, other: Job) -> str:
        return f"{settings}: {gigabytes(other.memory().total)} GB"

    found = []
    if job.micro > 1 and (windows := job.largest()):
        smaller = dataclasses.replace(job, micro=windows)
        found.append(line(f"trainer.micro_batch_size={windows}", smaller))
    changes = []
    if not job.checkpointing:
        changes.append(("trainer.activation_checkpointing=true", {"checkpointing": True}))
    if job.strategy != "fsdp" and job.devices > 1:
        changes.append(("parallel=fsdp", {"strategy": "fsdp"}))
        both = {"strategy": "fsdp", "checkpointing": True}
        changes.append(("parallel=fsdp trainer.activation_checkpointing=true", both))
    more = job.devices * 2
    while more <= MOST_DEVICES and job.batch % more == 0:
        change = {"strategy": "fsdp", "devices": more}
        changes.append((f"parallel=fsdp devices={more}", change))
        both = change | {"checkpointing": True}
        words = f"parallel=fsdp devices={more} trainer.activation_checkpointing=true"
        changes.append((words, both))
        more *= 2
    for words, change in changes:
        other = dataclasses.replace(job, **change)
        if windows := other.largest():
            other = dataclasses.replace(other, micro=min(windows, job.micro))
            if windows < other.share:
                words += f" trainer.micro_batch_size={other.micro}"
            if other.fits():
                found.append(line(words, other))
        if len(found) == 4:
            break
    larger = {name: kind.memory for name, kind in KINDS.items() if name != "cpu"}
    needed = job.memory().total / memory.USABLE
    larger = {name: size for name, size in larger.items() if size >= needed}
    if larger:
        name = min(larger, key=larger.get)
        found.append(f"kind={name}: has {larger[name] / 1e9:.0f} GB")
    return found


# ------------------------------------------------------------------------------------ output


def gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}" if number >= 0.05e9 else "<0.1"


def rounded(number: float, digits: int = 2) -> str:
    """Two digits and no more: 1234567 -> 1,200,000; 0.01234 -> 0.012."""
    if number == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(number)))
    return f"{round(number, places):,.{max(0, places)}f}"


def amount(number: float) -> str:
    """A count in words: 1.2 k, 3.4 M, 10 B."""
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{rounded(seconds / size)} {unit}"
    return f"{rounded(seconds)} seconds"


def figures(job: Job, price: float, measured: list[Measured]) -> dict:
    """Everything that a plan says, as JSON can hold it. Bytes, seconds, US dollars."""
    share, source = utilisation(job, measured)
    fast, needed = speed(job, share), job.memory()
    # One device with the whole batch, in micro-batches as large as fit: what scaling is held to.
    single = dataclasses.replace(job, devices=1, strategy="single")
    single = dataclasses.replace(single, micro=single.all_reduce_max() or job.micro)
    alone = speed(single, share).tokens_per_second
    seconds = job.tokens / fast.tokens_per_second
    return {
        "parameters": memory.num_parameters(job.model),
        "flops_per_token": flops_per_token(job),
        "devices": job.devices,
        "kind": job.kind.title,
        "strategy": job.strategy,
        "precision": job.precision,
        "compiled": job.compiled,
        "batch_size": job.batch,
        "micro_batch_size": job.micro,
        "micro_batches": job.micro_batches,
        "largest_micro_batch": job.largest(),
        "memory": needed.parts() | {"total": needed.total, "moment": needed.moment},
        "fits": job.fits(),
        "advice": [] if job.fits() else advice(job),
        "utilisation": share,
        "utilisation_source": source,
        "step": dataclasses.asdict(fast),
        "tokens_per_second": fast.tokens_per_second,
        "mfu": fast.mfu,
        "scaling_efficiency": fast.tokens_per_second / job.devices / alone,
        "tokens": job.tokens,
        "seconds": seconds,
        "price": price,
        "cost": seconds / 3600 * job.devices * price,
    }


def told(job: Job, plan: dict, settings: Settings) -> str:
    """The plan as text, at most 100 columns wide."""
    lines = head_lines(job, plan)
    lines += ["", *memory_lines(job, plan, settings)]
    if plan["fits"]:
        lines += ["", *step_lines(job, plan), "", *result_lines(job, plan)]
    return "\n".join([*lines, "", *assumption_lines(job, plan)])


def head_lines(job: Job, plan: dict) -> list[str]:
    model, n = job.model, job.devices
    where = f"{n} x {job.kind.title}"
    if n > job.per_machine:
        where += f", {job.per_machine} in a machine"
    how = [job.strategy, job.precision, "compiled" if job.compiled else "not compiled"]
    if job.checkpointing:
        how.append("activation checkpointing")
    if job.strategy == "fsdp" and not job.reshard:
        how.append("not resharded after forward")
    parts = f"{job.micro_batches} micro-batches of {job.micro}"
    if job.micro_batches == 1:
        parts = f"1 micro-batch of {job.micro}"
    return [
        f"Model    {plan['parameters']:,} parameters: {model.num_layers} layers of "
        f"{model.num_heads} heads, {model.emb_dim} wide",
        f"         {rounded(plan['flops_per_token'] / 1e9)} GFLOP to train on a token, "
        f"windows of {job.length:,}",
        f"Devices  {where}: {', '.join(how)}",
        f"Batch    {job.batch:,} windows, {amount(job.batch * job.length)} tokens; "
        f"{job.share:,} windows a device in {parts}",
    ]


WORDS = {
    "weights": "fp32",
    "gradients": "fp32",
    "optimizer": "",  # by its name
    "casts": "of the weights, in the precision of the products",
    "gathered": "other ranks' weights while they are computed with",
    "activations": "kept by forward for backward",
    "logits": "the cross-entropy's tensors of windows x tokens x vocabulary",
    "working": "gradients on their way, buffers of collectives",
    "slack": "held by the allocator, of no use",
    "libraries": "the process without a model",
}
OPTIMIZERS = {
    "adamw": "AdamW: two moments, fp32",
    "muon": "Muon: one of a block's matrices, AdamW's two, fp32",
}
MOMENTS = {
    "loss": "when the loss is computed",
    "head": "when the backward begins",
    "last block": "when the backward is in the last block",
    "end": "when the backward ends",
}


def memory_lines(job: Job, plan: dict, settings: Settings) -> list[str]:
    needed = plan["memory"]
    title = f"Memory of a device, {MOMENTS[needed['moment']]}"
    lines = [f"{title:<78}{'GB':>8}"]
    sharded = ("weights", "optimizer") if job.strategy == "fsdp" else ()
    for name, words in WORDS.items():
        if needed[name] > 0:
            words = words or OPTIMIZERS[job.optimizer]
            words += f", 1/{job.devices} of them" if name in sharded and job.devices > 1 else ""
            lines.append(f"  {name:<13} {words:<62}{gigabytes(needed[name]):>8}")
    verdict = "fits" if plan["fits"] else "does NOT fit"
    of = f"{job.kind.title} has {job.kind.memory / 1e9:.0f} GB: {verdict}"
    lines.append(f"  {'total':<13} {of:<62}{gigabytes(needed['total']):>8}")
    if (largest := plan["largest_micro_batch"]) is None:
        lines.append("  not even one window at a time fits")
    else:
        word = f"  the largest micro-batch that fits: {largest}"
        chosen = settings.trainer.micro_batch_size
        if chosen is None and largest < job.share:
            word += f"; give trainer.micro_batch_size={largest}, or training takes {job.share}"
        lines.append(word)
    if not plan["fits"]:
        lines += ["  what would fit:", *(f"    {text}" for text in plan["advice"])]
        if not plan["advice"]:
            lines.append(f"    nothing up to {MOST_DEVICES} devices with this batch")
    return lines


def step_lines(job: Job, plan: dict) -> list[str]:
    step = plan["step"]
    lines = [f"{'A step':<78}{'ms':>8}"]

    def row(name: str, words: str, seconds: float) -> None:
        lines.append(f"  {name:<13} {words:<62}{milliseconds(seconds):>8}")

    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:,.{1 if step['step'] < 1 else 0}f}"

    bound = "bound by the host, which launches kernels" if step["launch_bound"] else ""
    row("compute", bound, step["compute"])
    with_products = "Muon's products, with DDP all of them on each device"
    bound = with_products if job.optimizer == "muon" else "bound by the memory's bandwidth"
    row("optimizer", bound, step["optimizer"])
    if step["communication"]:
        row("communication", "what is not hidden behind computing", step["exposed"])
    row("total", "", step["step"])
    for name, (sent, seconds) in step["communication"].items():
        lines.append(
            f"  {name}: {rounded(sent / 1e9)} GB from each device, "
            f"{milliseconds(seconds)} ms, {rounded(bus(job) / 1e9)} GB/s"
        )
    if step["communication"]:
        total = sum(seconds for _, seconds in step["communication"].values())
        lines.append(f"  hidden: {max(0.0, 1 - step['exposed'] / total):.0%} of the communication")
    return lines


def result_lines(job: Job, plan: dict) -> list[str]:
    rate, steps = plan["tokens_per_second"], plan["tokens"] / (job.batch * job.length)
    each = f"; {rounded(rate / job.devices)} on each device" if job.devices > 1 else ""
    lines = [f"Speed    {rounded(rate)} tokens a second{each}; MFU {plan['mfu']:.0%}"]
    if job.devices > 1:
        lines.append(
            f"         {plan['scaling_efficiency']:.0%} of {job.devices} times one device's speed"
        )
    lines += [
        f"Time     {duration(plan['seconds'])} for {amount(plan['tokens'])} tokens, "
        f"{rounded(steps, 3)} steps",
        f"Cost     ${rounded(plan['cost'])} at ${plan['price']:.2f} for an hour of a device",
    ]
    return lines


def assumption_lines(job: Job, plan: dict) -> list[str]:
    """What the figures stand on, each marked as measured, stated or assumed."""
    kind, cpu = job.kind, job.device == "cpu"
    peak = kind.fp32 if job.precision == "fp32" else kind.flops
    source = "measured" if cpu else "stated"
    slack = memory.SLACK[job.device]
    libraries = memory.LIBRARIES[job.device] + (memory.NCCL if not cpu and job.devices > 1 else 0)
    how = "measured" if cpu else "assumed"
    products, moved = rounded(peak / 1e12, 3), rounded(kind.bandwidth / 1e9, 3)
    lines = [
        plan["utilisation_source"],
        f"{source}: {products} TFLOP/s of products, {moved} GB/s of memory",
        f"{how}: the allocator wastes {slack:.0%}; {1 - memory.USABLE:.0%} of the memory stay "
        f"free; {gigabytes(libraries)} GB of libraries",
    ]
    if job.compiled:
        lines.append("assumed: what the compiler keeps for backward; compilation is not counted")
    if job.devices > 1:
        over = job.devices > job.per_machine
        link = f"{rounded(kind.link / 1e9)} GB/s a device inside a machine"
        link += f", {rounded(kind.network / 1e9)} between machines" if over else ""
        lines.append(f"{source if not cpu else 'assumed'}: {link}")
        hops = "20 us and 20 us a doubling" if job.strategy == "ddp" else "20 us and 2 us a rank"
        lines.append(f"assumed: collectives reach {BUS:.0%} of that; each waits {hops}")
    if plan["step"]["launch_bound"]:
        launch = rounded(LAUNCH[job.compiled] * 1e3)
        lines.append(f"assumed: {launch} ms of the host's time for a block, forward and backward")
    lines += [
        "assumed: prices are round figures of late 2026; price= takes yours",
        "not counted: validation, samples, the lens, checkpoints, starting",
    ]
    return ["These figures are estimates. They stand on", *(f"  {line}" for line in lines)]


# ----------------------------------------------------------------------------------- command


def composed(arguments: list[str]) -> tuple[Settings, PlanConfig]:
    """The settings of training and those of the plan; ConfigError with the problems of both."""
    own = {f.name for f in dataclasses.fields(PlanConfig)}
    mine = [text for text in arguments if text.partition("=")[0] in own]
    others = [text for text in arguments if text not in mine]
    problems, settings, plan = [], None, None
    for option in [text for text in others if text.startswith("-")]:
        others.remove(option)
        problems.append((option, NO_VALUE, "no such option", "see --help"))
    try:
        plan = parse(PlanConfig, mine)
    except ConfigError as error:
        problems += error.problems
    try:
        settings = of_training(others)
    except ConfigError as error:
        problems += [_own_key(problem, own) for problem in error.problems]
    refuse(problems)
    return settings, plan


def of_training(overrides: list[str]) -> Settings:
    """The settings of a training command; there need be no text yet, so that data=text without
    data.path is no mistake here."""
    try:
        settings = compose(overrides)
    except ConfigError as error:
        serious = [problem for problem in error.problems if problem[:2] != ("data.path", None)]
        refuse(serious)
        return compose([*overrides, "data.path=none"])
    if settings.overrides:
        from training.checkpoint.resume import stored_settings

        settings, _ = complete(settings, *stored_settings(settings))
    return settings


def _own_key(problem: Problem, own: set[str]) -> Problem:
    """A mistyped key of the plan's own is answered with that, not with one of training's."""
    key, value, cause, _ = problem
    found = same_purpose(key, sorted(own))
    near = [found[0]] if found else difflib.get_close_matches(key, sorted(own), n=1, cutoff=0.7)
    if isinstance(problem, UnknownSetting) and near:
        return Problem(key, value, cause, f"did you mean {near[0]}?")
    return problem


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help(PlanConfig)
        print("\nAll settings of a training command are taken too: python train.py --help")
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        settings, chosen = composed(arguments)
        job = job_of(settings, chosen)
        price = job.kind.price if chosen.price is None else chosen.price
        plan = figures(job, price, list(measurements(chosen.kind)))
        print(told(job, plan, settings))
        if chosen.out:
            write_out(chosen.out, plan)


if __name__ == "__main__":
    main()
