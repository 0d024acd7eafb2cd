"""What a training run will take, before a machine is rented for it: memory, time, money.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

Takes the settings of the training command as they are, and some of its own. Nothing is trained and
no GPU is needed: memory comes from training/memory.py, time from the arithmetic below, and how much
of a device's peak is reached from benchmarks/results/ where it was measured there, else it is
assumed. Every assumption is printed. What the plan leaves out: validation, samples, the lens,
checkpoints, loading, compilation.
"""

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from training import memory
from training.command import compose, errors_in_one_line, parse
from training.config import NO_VALUE, REPOSITORY, ConfigError, Problem, Settings, refuse, shown
from training.hardware import KINDS, Kind

if typing.TYPE_CHECKING:
    from model import ModelConfig

RESULTS = REPOSITORY / "benchmarks" / "results"
MOST_DEVICES = 1024  # how far the advice looks

# What is assumed of every machine; printed with each plan in which it counts.
BUS = 0.8  # the share of a stated bandwidth that collectives reach
OPTIMIZER_BYTES = 40  # moved per parameter: AdamW reads 16, writes 12; clipping reads 8, writes 4
LAUNCH = {True: 0.15e-3, False: 0.6e-3}  # seconds of a block on the host, by compiled; GPUs only


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
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
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
        if self.out and not Path(self.out).absolute().parent.is_dir():
            found.append(("out", self.out, "no such folder", "make it, or name another"))
        return found


@dataclass(frozen=True)
class Job:
    """A run on some devices: all that memory and speed depend on."""

    model: "ModelConfig"
    kind: Kind
    devices: int
    per_machine: int
    strategy: str  # single | ddp | fsdp
    precision: str  # fp32 | bf16 | fp16
    compiled: bool
    checkpointing: bool
    reshard: bool
    length: int  # tokens in a window
    batch: int  # windows in a step, over all devices
    micro: int  # windows at once on a device
    tokens: float  # of the whole run

    @property
    def device(self) -> str:
        return "cpu" if self.kind is KINDS["cpu"] else "cuda"

    @property
    def share(self) -> int:
        """Windows of a step on a device."""
        return self.batch // self.devices

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.share / self.micro)

    def memory(self, windows: int | None = None) -> memory.Memory:
        """Of one device, with micro-batches of so many windows (by default the job's own)."""
        windows = windows or self.micro
        return memory.estimate(
            self.model,
            windows,
            self.length,
            precision=self.precision,
            strategy=self.strategy,
            world_size=self.devices,
            accumulating=windows < self.share,
            activation_checkpointing=self.checkpointing,
            reshard_after_forward=self.reshard,
            device=self.device,
            compiled=self.compiled,
        )

    def fits(self, windows: int | None = None) -> bool:
        return self.memory(windows).total <= self.kind.memory

    def largest(self) -> int | None:
        """The largest micro-batch that fits; None when not even one window does."""
        return memory.largest_micro_batch(self.share, self.fits)


def flops_per_token(job: Job) -> float:
    """FLOPs to train on one token, as GPT.flops_per_token counts them; recomputation is extra."""
    from model import GPT

    # The formula needs the configuration alone, and a model of this size takes its time.
    return GPT.flops_per_token(types.SimpleNamespace(config=job.model), job.length)


# ------------------------------------------------------------------------------------ speed


@dataclass(frozen=True)
class Speed:
    """One optimizer step, in seconds, and what follows from it."""

    compute: float
    optimizer: float
    communication: dict[str, tuple[float, float]]  # name -> (bytes of a device, seconds) a step
    exposed: float  # of the communication, what nothing hides
    step: float
    tokens_per_second: float
    mfu: float  # of the stated bf16 peak, without recomputation
    launch_bound: bool


def speed(job: Job, utilisation: float) -> Speed:
    """How fast a job goes when products reach `utilisation` of their peak.

    Communication hides behind what can be computed meanwhile: a DDP all-reduce behind the last
    micro-batch's backward, all but the tied embedding, whose gradient is there at the very end;
    the blocks of FSDP behind the forward and backward of other blocks, all but the first; its
    root, which is gathered first and reduced last, behind nothing. On a CPU nothing hides: the same
    cores do both.
    """
    config, n = job.model, job.devices
    c = memory.width(job.precision)
    per_token = flops_per_token(job)
    peak = job.kind.fp32 if job.precision == "fp32" else job.kind.flops
    layers, channels = config.num_layers, config.emb_dim
    again = (24 * channels**2 + 2 * channels * (job.length + 1)) * layers  # the blocks' forward
    work = per_token + (again if job.checkpointing else 0)
    positions = job.share * job.length  # of a device in a step
    products = positions * work / (peak * utilisation)
    launches = 0.0
    if job.device == "cuda":
        launches = job.micro_batches * layers * LAUNCH[job.compiled]
        launches *= 4 / 3 if job.checkpointing else 1
    compute = max(products, launches)
    parameters = memory.num_parameters(config)
    held = parameters / n if job.strategy == "fsdp" else parameters
    optimizer = OPTIMIZER_BYTES * held / job.kind.bandwidth

    forward = compute / job.micro_batches * (per_token / 3) / work
    backward = compute / job.micro_batches - forward
    if n == 1 or job.strategy == "single":
        communication, exposed = {}, 0.0
    elif job.strategy == "ddp":
        communication, exposed = _ddp(job, backward)
    else:
        communication, exposed = _fsdp(job, c, forward, backward)
    if job.device == "cpu":
        exposed = sum(seconds for _, seconds in communication.values())
    step = compute + optimizer + exposed
    rate = job.batch * job.length / step
    return Speed(
        compute=compute,
        optimizer=optimizer,
        communication=communication,
        exposed=exposed,
        step=step,
        tokens_per_second=rate,
        mfu=per_token * rate / (n * job.kind.flops),
        launch_bound=launches > products,
    )


def bus(job: Job) -> float:
    """Bytes per second that pass each device in a ring over all of them: BUS of the slowest link.

    Inside a machine that is `link`. Between machines a ring has one connection, but there are as
    many rings as network ports, each with its part of the data: all ports of a machine together,
    or `link` where that is less.
    """
    if job.devices <= job.per_machine:
        return BUS * job.kind.link
    return BUS * min(job.kind.link, job.kind.network * job.per_machine)


def latency(job: Job, collective: str) -> float:
    """Seconds of a collective without data, assumed: the sum over a tree (all-reduce) 20 us and as
    much again for each doubling of the ranks; gathering and scattering around a ring 20 us and
    2 us for each rank."""
    n = job.devices
    return 20e-6 * (1 + math.log2(n)) if collective == "all-reduce" else 20e-6 + 2e-6 * (n - 1)


def _ddp(job: Job, backward: float) -> tuple[dict, float]:
    """A ring's all-reduce of S bytes sends 2 (N - 1) / N S from each device (Patarasu and Yuan
    2009); DDP sends fp32 gradients in buckets of 25 MB (Li et al. 2020)."""
    n, channels = job.devices, job.model.emb_dim
    sent = 2 * (n - 1) / n * 4
    whole = sent * memory.num_parameters(job.model)
    buckets = math.ceil(4 * memory.num_parameters(job.model) / 25e6)
    seconds = whole / bus(job) + buckets * latency(job, "all-reduce")
    last = sent * job.model.vocab_size * channels / bus(job) + latency(job, "all-reduce")
    return {"all-reduce": (whole, seconds)}, last + max(0.0, seconds - last - backward)


def _fsdp(job: Job, c: int, forward: float, backward: float) -> tuple[dict, float]:
    """All-gathers of each block for forward and, when resharded, for backward; one reduce-scatter
    of fp32 gradients a step. Each sends (N - 1) / N of its bytes from each device."""
    n, layers, times = job.devices, job.model.num_layers, job.micro_batches
    part, ring = (n - 1) / n / bus(job), latency(job, "ring")
    block, root = memory.block_parameters(job.model), memory.root_parameters(job.model)
    gather, gather_root = c * block * part + ring, 4 * root * part + ring
    reduce, reduce_root = 4 * block * part + ring, 4 * root * part + ring
    gathers = 2 * times if job.reshard else 1  # of each block, in a step
    roots = times if job.reshard else 1
    exposed = roots * gather_root + reduce_root
    rounds = times if job.reshard else 1
    exposed += rounds * (gather + max(0.0, (layers - 1) * gather - forward))
    in_backward = layers * gather if job.reshard else 0.0
    exposed += (times - 1) * max(0.0, in_backward - backward)
    exposed += max(0.0, in_backward + layers * reduce - backward)
    share = (n - 1) / n
    gathered = share * (gathers * layers * c * block + roots * 4 * root)
    reduced = share * 4 * (layers * block + root)
    return {
        "all-gather": (gathered, gathers * layers * gather + roots * gather_root),
        "reduce-scatter": (reduced, layers * reduce + reduce_root),
    }, exposed


# ------------------------------------------------------------------- measured and assumed


@dataclass(frozen=True)
class Measured:
    """A training run that was measured."""

    job: Job
    tokens_per_second: float  # the median
    source: str  # file and run


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
            job = job_of(of_training(overrides), PlanConfig(devices=devices, kind=kind))
            name = run.get("name", settings)
            yield Measured(job, median(rates), f"{path.name}, {name}")


def reached(measured: Measured) -> float:
    """The utilisation at which `speed` gives what was measured; by halving, as it only grows."""
    low, high = 1e-4, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        slower = speed(measured.job, middle).tokens_per_second < measured.tokens_per_second
        low, high = (middle, high) if slower else (low, middle)
    return low


def utilisation(job: Job, measured: list[Measured]) -> tuple[float, str]:
    """(share of the products' peak that is reached, where that is from).

    From the nearest of the measured runs on this kind that is in the same precision, compiled or
    not as this, and of a model at most four times as large or small. Else assumed.
    """

    def distance(other: Job) -> float:
        sizes = [memory.num_parameters(j.model) for j in (job, other)]
        positions = [j.micro * j.length for j in (job, other)]
        apart = sum(abs(math.log(a / b)) for a, b in (sizes, positions))
        apart += (job.model.dropout > 0) != (other.model.dropout > 0)
        apart += job.checkpointing != other.checkpointing
        return apart + abs(math.log(job.devices / other.devices)) / 4

    def alike(other: Job) -> bool:
        sizes = [memory.num_parameters(j.model) for j in (job, other)]
        return (
            other.kind is job.kind
            and other.precision == job.precision
            and other.compiled == job.compiled
            and max(sizes) <= 4 * min(sizes)
        )

    near = sorted((m for m in measured if alike(m.job)), key=lambda m: distance(m.job))
    if near:
        share = reached(near[0])
        return share, f"measured: {share:.0%} of the products' peak ({near[0].source})"
    share = assumed_utilisation(job)
    return share, f"assumed: {share:.0%} of the products' peak; not measured yet"


def assumed_utilisation(job: Job) -> float:
    """The share of the products' peak while a step computes, where nobody has measured it.

    On GPUs round figures of other GPT-2 implementations: 0.50 compiled and 0.40 eager from 1,024
    channels on, 0.10 less below, and less again below 512, as small matrices fill no GPU; in fp32
    0.10 more. On the CPU what others reach there, of the measured rate of single products.
    """
    if job.device == "cpu":
        return 0.75 if job.precision == "fp32" else 0.35
    channels = job.model.emb_dim
    share = 0.50 if job.compiled else 0.40
    share -= 0.0 if channels >= 1024 else 0.10 if channels >= 512 else 0.20
    return share + (0.10 if job.precision == "fp32" else 0.0)


# ----------------------------------------------------------------------------- settings -> job


def job_of(settings: Settings, plan: PlanConfig) -> Job:
    """The job that these settings make, with the largest micro-batch that fits where they leave it
    open. Raises ConfigError as training would."""
    trainer, kind = settings.trainer, KINDS[plan.kind]
    strategy = settings.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if plan.devices > 1 else "single"
    on_cpu = plan.kind == "cpu"
    problems = []
    if strategy == "single" and plan.devices > 1:
        cause = f"started as {plan.devices} processes, which would all train the same"
        fix = "use parallel=auto, or start it without torchrun"
        problems.append(("parallel", strategy, cause, fix))
    if trainer.batch_size % plan.devices != 0:
        cause = f"cannot be shared out evenly over {plan.devices} ranks"
        nearest = math.ceil(trainer.batch_size / plan.devices) * plan.devices
        fix = f"use a multiple of {plan.devices}, such as {nearest}"
        problems.append(("trainer.batch_size", trainer.batch_size, cause, fix))
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
    )
    if trainer.compile == "auto":
        # As training/device.py decides it, in FLOPs on a device.
        worth = 2e15 if on_cpu else 2e16
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
    larger = {name: size for name, size in larger.items() if size >= job.memory().total}
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
    single = dataclasses.replace(single, micro=single.largest() or job.micro)
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
    "optimizer": "AdamW: two moments, fp32",
    "casts": "of the weights, in the precision of the products",
    "gathered": "other ranks' weights while they are computed with",
    "activations": "kept by forward for backward",
    "logits": "the cross-entropy's tensors of windows x tokens x vocabulary",
    "working": "gradients on their way, buffers of collectives",
    "slack": "held by the allocator, of no use",
    "libraries": "the process without a model",
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
    row("optimizer", "bound by the memory's bandwidth", step["optimizer"])
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
        f"{how}: the allocator wastes {slack:.0%}; {gigabytes(libraries)} GB of libraries",
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
        return compose(overrides)
    except ConfigError as error:
        serious = [problem for problem in error.problems if problem[:2] != ("data.path", None)]
        refuse(serious)
        return compose([*overrides, "data.path=none"])


def _own_key(problem: Problem, own: set[str]) -> Problem:
    """A mistyped key of the plan's own is answered with that, not with one of training's."""
    key, value, cause, fix = problem
    near = difflib.get_close_matches(key, sorted(own), n=1, cutoff=0.7)
    if cause == "no such setting" and near:
        fix = f"did you mean {near[0]}?"
    return key, value, cause, fix


def show_help() -> None:
    print(PlanConfig.__doc__, end="\n\n")
    for each in dataclasses.fields(PlanConfig):
        print(f"  {each.name:<14} {each.metadata['help']}  [{shown(each.default)}]")
    print("\nAll settings of a training command are taken too: python train.py --help")


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help()
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        settings, chosen = composed(arguments)
        job = job_of(settings, chosen)
        price = job.kind.price if chosen.price is None else chosen.price
        plan = figures(job, price, list(measurements(chosen.kind)))
        print(told(job, plan, settings))
        if chosen.out:
            Path(chosen.out).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
