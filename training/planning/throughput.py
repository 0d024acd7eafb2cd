"""How fast training goes on devices of a kind: arithmetic, and what it is held to.

Computing takes its FLOPs at some share of the stated peak, measured where it was, else assumed;
communication takes its bytes at some share of the stated bandwidth, and hides behind computing
where the strategy lets it. Used by scripts/plan.py; memory stands in training/planning/memory.py.
What is left out: validation, samples, the lens, checkpoints, loading, compilation.
"""

import math
import types
import typing
from dataclasses import dataclass

from training.planning import memory
from training.planning.devices import KINDS, Kind

if typing.TYPE_CHECKING:
    from model import ModelConfig

# What is assumed of every machine; printed with each plan in which it counts.
BUS = 0.8  # the share of a stated bandwidth that collectives reach
OPTIMIZER_BYTES = 40  # moved per parameter: AdamW reads 16, writes 12; clipping reads 8, writes 4
LAUNCH = {True: 0.15e-3, False: 0.6e-3}  # seconds of a block on the host, by compiled; GPUs only


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
    optimizer: str = "adamw"  # | muon
    ns_steps: int = 5  # of Muon

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
            optimizer=self.optimizer,
        )

    def fits(self, windows: int | None = None) -> bool:
        return self.memory(windows).total <= memory.USABLE * self.kind.memory

    def largest(self) -> int | None:
        """The largest micro-batch that fits; None when not even one window does."""
        return memory.largest_micro_batch(self.share, self.fits)


def flops_per_token(job: Job) -> float:
    """FLOPs to train on one token, as GPT.flops_per_token counts them; recomputation is extra."""
    from model import GPT

    # The formula needs the configuration alone, and a model of this size takes its time.
    return GPT.flops_per_token(types.SimpleNamespace(config=job.model), job.length)


def muon_flops(job: Job) -> float:
    """FLOPs of Muon's products for all matrices, in a step: with DDP on each device.

    An iteration for (m, n), m <= n, is two products of 2 m^2 n and one of 2 m^3: for the four
    (C, C) and the two (C, 4 C) of a block 60 C^3 in all.
    """
    return 60 * job.model.emb_dim**3 * job.model.num_layers * job.ns_steps


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
    if job.optimizer == "muon":  # which multiplies in bf16, whatever the model does
        alone = muon_flops(job) / (n if job.strategy == "fsdp" else 1)
        optimizer += alone / (job.kind.flops * utilisation)

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
