"""Memory, time and cost of a training run, before a machine is rented for it.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

Takes the settings of train.py and some of its own. Nothing is trained and no GPU is needed. Memory
comes from the formulas of training/planning/memory.py, time from the FLOPs of the model and
`utilisation`, the share of the device's peak FLOP/s that training reaches: measured where
training/planning/devices.py has a figure for the device, else assumed, and printed as such.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from errors import ConfigError, UnknownSetting, refuse
from training.config import Config, compose
from training.config.command_line import (
    OutFile,
    ScriptConfig,
    errors_in_one_line,
    parse,
    show_help,
    write_out,
)
from training.config.other_names import nearest, unknown_key
from training.config.schema import AboveZero, NonNegative, Positive
from training.config.stored import complete
from training.distributed.launch import check_ranks
from training.planning import memory
from training.planning.devices import ASSUMED_UTILISATION, KINDS, WORTH_COMPILING, Kind

MOST_DEVICES = 1024  # the largest number of devices that is suggested


class PlanConfig(ScriptConfig):
    """python -m scripts.plan [SETTING OF train.py ...] [KEY=VALUE ...]"""

    devices: Positive = Field(1, description="number of devices, one rank on each")
    kind: Literal["b200", "h200", "h100", "a100", "a100-40gb", "l40s", "l4", "rtx4090", "cpu"] = (
        Field("h100", description=f"kind of device: {', '.join(KINDS)}")
    )
    tokens: AboveZero | None = Field(
        None, description="tokens to train on; null: trainer.max_steps times the batch"
    )
    utilisation: Annotated[AboveZero, Field(le=1)] | None = Field(
        None, description="fraction of the peak FLOP/s; null: measured, else assumed"
    )
    price: NonNegative | None = Field(
        None, description="US dollars per device and hour; null: a round figure"
    )
    out: OutFile = Field("", description="a JSON file for all figures")


@dataclass(frozen=True)
class Job:
    """A training run on some devices: everything that memory and time depend on."""

    kind: Kind
    devices: int
    tokens: float  # of the whole run
    settings: Config
    strategy: str  # single | ddp | fsdp
    precision: str  # fp32 | bf16 | fp16
    compiled: bool
    checkpointing: bool  # activation checkpointing
    micro: int  # windows of a micro-batch on one device

    @property
    def device(self) -> str:
        return "cpu" if self.kind is KINDS["cpu"] else "cuda"

    @property
    def share(self) -> int:
        """Windows of a step on one device."""
        return self.settings.trainer.batch_size // self.devices

    def memory(self, windows: int | None = None) -> memory.Memory:
        """Peak memory of one device. windows: of a micro-batch, by default `micro`."""
        windows = windows or self.micro
        return memory.estimate(
            self.settings.model,
            windows,
            self.settings.data.max_length,
            precision=self.precision,
            strategy=self.strategy,
            world_size=self.devices,
            accumulating=windows < self.share,
            activation_checkpointing=self.checkpointing,
            reshard_after_forward=self.settings.parallel.reshard_after_forward,
            device=self.device,
            compiled=self.compiled,
            optimizer=self.settings.optimizer.name,
        )

    def fits(self, windows: int | None = None) -> bool:
        return self.memory(windows).total <= memory.USABLE * self.kind.memory

    def largest(self) -> int | None:
        """The largest micro-batch that fits; None when not even one window does."""
        return memory.largest_micro_batch(self.share, self.fits)


def flops_per_token(settings: Config) -> float:
    """FLOPs to train on one token, as in GPT.flops_per_token, without importing torch."""
    model = settings.model
    matrices = memory.block_matrices(model) * model.num_layers + model.vocab_size * model.emb_dim
    scores = model.num_layers * model.emb_dim * (settings.data.max_length + 1)
    return 6 * (matrices + scores)


def job_of(settings: Config, plan: PlanConfig) -> Job:
    """The job of these settings, with the largest micro-batch that fits where trainer.
    micro_batch_size is null or auto. Raises ConfigError as training would."""
    trainer, kind = settings.trainer, KINDS[plan.kind]
    strategy = settings.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if plan.devices > 1 else "single"
    device = "cpu" if plan.kind == "cpu" else "cuda"
    problems = check_ranks(strategy, plan.devices, trainer.batch_size)
    if trainer.device not in ("auto", device):
        reason = f"kind={plan.kind} is not such a device"
        problems.append(("trainer.device", trainer.device, reason, "use trainer.device=auto"))
    if device == "cpu" and trainer.precision == "fp16":
        reason = "half precision needs a GPU"
        problems.append(("trainer.precision", "fp16", reason, "use trainer.precision=auto"))
    refuse(problems)
    tokens = plan.tokens or trainer.max_steps * trainer.batch_size * settings.data.max_length
    compiled = trainer.compile is True
    if trainer.compile == "auto":
        compiled = flops_per_token(settings) * tokens / plan.devices >= WORTH_COMPILING[device]
    job = Job(
        kind=kind,
        devices=plan.devices,
        tokens=tokens,
        settings=settings,
        strategy=strategy,
        precision="bf16" if trainer.precision == "auto" else trainer.precision,
        compiled=compiled,
        checkpointing=trainer.activation_checkpointing,
        micro=trainer.batch_size // plan.devices,
    )
    if isinstance(trainer.micro_batch_size, int):
        return dataclasses.replace(job, micro=min(trainer.micro_batch_size, job.share))
    return dataclasses.replace(job, micro=job.largest() or 1)


# ----------------------------------------------------------------------------------- figures


def utilisation(job: Job, chosen: float | None) -> tuple[float, str]:
    """(share of the peak FLOP/s, its source). chosen: by the user."""
    if chosen is not None:
        return chosen, "as given"
    share, file = job.kind.measured.get(job.precision, (ASSUMED_UTILISATION, ""))
    source = f"measured, {file}" if file else "assumed"
    if job.checkpointing:  # forward, backward and at most the forward again: 4 units instead of 3
        return 0.75 * share, f"{source}, less a quarter for activation checkpointing"
    return share, source


def figures(job: Job, plan: PlanConfig) -> dict:
    """The whole plan as JSON types. Bytes, seconds, US dollars."""
    share, source = utilisation(job, plan.utilisation)
    peak = job.kind.fp32 if job.precision == "fp32" else job.kind.flops
    rate = job.devices * share * peak / flops_per_token(job.settings)
    price = job.kind.price if plan.price is None else plan.price
    needed = job.memory()
    return {
        "parameters": memory.num_parameters(job.settings.model),
        "flops_per_token": flops_per_token(job.settings),
        "devices": job.devices,
        "kind": job.kind.title,
        "strategy": job.strategy,
        "precision": job.precision,
        "compiled": job.compiled,
        "batch_size": job.settings.trainer.batch_size,
        "micro_batch_size": job.micro,
        "micro_batches": math.ceil(job.share / job.micro),
        "largest_micro_batch": job.largest(),
        "memory": needed.parts() | {"total": needed.total, "moment": needed.moment},
        "fits": job.fits(),
        "advice": [] if job.fits() else advice(job),
        "utilisation": share,
        "utilisation_source": source,
        "tokens_per_second": rate,
        "tokens": job.tokens,
        "seconds": job.tokens / rate,
        "price": price,
        "cost": job.tokens / rate / 3600 * job.devices * price,
    }


def advice(job: Job) -> list[str]:
    """Settings with which a job fits that does not, with the memory that a device needs then."""
    changes = [("", {}), ("trainer.activation_checkpointing=true", {"checkpointing": True})]
    devices = job.devices if job.devices > 1 else 2
    while devices <= MOST_DEVICES and job.settings.trainer.batch_size % devices == 0:
        change = {"strategy": "fsdp", "devices": devices}
        words = f"parallel=fsdp devices={devices}"
        changes.append((words, change))
        words += " trainer.activation_checkpointing=true"
        changes.append((words, change | {"checkpointing": True}))
        devices *= 2
    found = []
    for words, change in changes:
        other = dataclasses.replace(job, **change)
        if windows := other.largest():
            other = dataclasses.replace(other, micro=min(windows, job.micro))
            if windows < other.share:
                words += f" trainer.micro_batch_size={other.micro}"
            if words and other.fits():
                found.append(f"{words.strip()}: {gigabytes(other.memory().total)} GB")
    needed = job.memory().total / memory.USABLE
    larger = [name for name, kind in KINDS.items() if name != "cpu" and kind.memory >= needed]
    smallest = min(larger, key=lambda name: KINDS[name].memory, default=None)
    kinds = [f"kind={smallest}: has {KINDS[smallest].memory / 1e9:.0f} GB"] if smallest else []
    return found[:4] + kinds


# ------------------------------------------------------------------------------------ output


def gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}" if number >= 0.05e9 else "<0.1"


def rounded(number: float) -> str:
    """Two significant digits: 1234567 -> 1,200,000; 0.01234 -> 0.012."""
    if number == 0:
        return "0"
    places = 1 - math.floor(math.log10(abs(number)))
    return f"{round(number, places):,.{max(0, places)}f}"


PARTS = {
    "weights": "fp32",
    "gradients": "fp32",
    "optimizer": {"adamw": "two moments, fp32", "muon": "one moment of matrices, two of the rest"},
    "casts": "of the weights, in the precision of the products",
    "gathered": "weights of other ranks, while they are needed",
    "activations": "kept by forward for backward",
    "logits": "of the cross-entropy, a piece at a time",
    "working": "gradients in flight, buffers of collectives",
    "slack": "lost by the allocator",
    "libraries": "the process without a model",
}


def memory_lines(job: Job, plan: dict) -> list[str]:
    needed = plan["memory"]
    lines = [f"{'Peak memory of a device':<68}{'GB':>8}"]
    sharded = ("weights", "optimizer") if job.strategy == "fsdp" else ()
    for name, words in PARTS.items():
        if needed[name] > 0:
            words = (
                words
                if isinstance(words, str)
                else words.get(job.settings.optimizer.name, words["adamw"])
            )
            words += f", 1/{job.devices} of them" if name in sharded else ""
            lines.append(f"  {name:<13} {words:<52}{gigabytes(needed[name]):>8}")
    verdict = "fits" if plan["fits"] else "does NOT fit"
    verdict = f"{job.kind.title} has {job.kind.memory / 1e9:.0f} GB: {verdict}"
    lines.append(f"  {'total':<13} {verdict:<52}{gigabytes(needed['total']):>8}")
    if largest := plan["largest_micro_batch"]:
        lines.append(f"  largest micro-batch that fits: trainer.micro_batch_size={largest}")
    else:
        lines.append("  not even one window at a time fits")
    if not plan["fits"]:
        nothing = [f"nothing up to {MOST_DEVICES} devices with this batch"]
        lines += ["  what would fit:", *(f"    {text}" for text in plan["advice"] or nothing)]
    return lines


def text_of(job: Job, plan: dict) -> str:
    """The plan as text, at most 100 columns wide."""
    model, length = job.settings.model, job.settings.data.max_length
    batch, steps = plan["batch_size"], plan["tokens"] / (plan["batch_size"] * length)
    time = timedelta(seconds=round(plan["seconds"]))
    how = [job.strategy, job.precision, "compiled" if job.compiled else "not compiled"]
    how += ["activation checkpointing"] if job.checkpointing else []
    lines = [
        f"Model    {plan['parameters']:,} parameters: {model.num_layers} layers of "
        f"{model.num_heads} heads, {model.emb_dim} wide",
        f"Devices  {job.devices} x {job.kind.title}: {', '.join(how)}",
        f"Batch    {batch:,} windows of {length:,} tokens; on each device "
        f"{plan['micro_batches']} x {job.micro} windows",
        "",
        *memory_lines(job, plan),
        "",
    ]
    if plan["fits"]:
        lines += [
            f"Speed    {rounded(plan['tokens_per_second'])} tokens/s with "
            f"utilisation={plan['utilisation']:.2f} ({plan['utilisation_source']})",
            f"Time     {time} for {plan['tokens']:,.0f} tokens, {steps:,.0f} steps",
            f"Cost     ${rounded(plan['cost'])} at ${plan['price']:.2f} per device and hour",
            "",
        ]
    return "\n".join(
        [
            *lines,
            "Estimates. Time is FLOPs / (devices x peak x utilisation): communication, validation,",
            "samples and checkpoints count only as far as the utilisation includes them.",
        ]
    )


# ----------------------------------------------------------------------------------- command


def composed(arguments: list[str]) -> tuple[Config, PlanConfig]:
    """The settings of training and those of the plan; ConfigError with the problems of both."""
    own = list(PlanConfig.model_fields)
    mine = [text for text in arguments if text.startswith("-") or text.partition("=")[0] in own]
    others = [text for text in arguments if text not in mine]
    problems, settings, plan = [], None, None
    try:
        plan = parse(PlanConfig, mine)
    except ConfigError as error:
        problems += error.problems
    try:
        settings = of_training(others)
    except ConfigError as error:
        for problem in error.problems:
            meant = isinstance(problem, UnknownSetting) and nearest(problem.key, own)
            problems.append(unknown_key(problem.key, problem.value, own) if meant else problem)
    refuse(problems)
    return settings, plan


def of_training(overrides: list[str]) -> Config:
    """The settings of a training command; data=text needs no data.path here."""
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


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help(PlanConfig)
        print("\nAll settings of a training command are taken too: python train.py --help")
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        settings, chosen = composed(arguments)
        job = job_of(settings, chosen)
        plan = figures(job, chosen)
        print(text_of(job, plan))
        if chosen.out:
            write_out(chosen.out, plan)


if __name__ == "__main__":
    main()
