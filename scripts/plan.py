"""Memory, time and cost of a training run, before a machine is rented for it.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

Takes the settings of train.py and those below. Nothing is trained and no GPU is needed. Memory
comes from the formulas of training/planning/memory.py, time from the FLOPs of the model and
`utilisation`, the share of the device's peak FLOP/s that training reaches: measured where
training/planning/devices.py has a figure for the device, else assumed, and printed as such.
"""

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
from training.distributed.launch import check_ranks
from training.planning import memory
from training.planning.devices import ASSUMED_UTILISATION, KINDS, WORTH_COMPILING


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

    settings: Config
    plan: PlanConfig
    strategy: str  # single | ddp | fsdp
    precision: str  # fp32 | bf16 | fp16
    tokens: float  # of the whole run
    compiled: bool

    @property
    def share(self) -> int:
        """Windows of a step on one device."""
        return self.settings.trainer.batch_size // self.plan.devices

    @property
    def largest(self) -> int | None:
        """The largest micro-batch that fits; None when not even one window does."""
        return memory.largest_micro_batch(self.share, self.fits)

    @property
    def micro(self) -> int:
        """Windows of a micro-batch: as set, or the largest that fits for null or auto."""
        chosen = self.settings.trainer.micro_batch_size
        return min(chosen, self.share) if isinstance(chosen, int) else self.largest or 1

    def memory(self, windows: int) -> memory.Memory:
        """Peak memory of one device with micro-batches of `windows`."""
        return memory.estimate(
            self.settings.model,
            windows,
            self.settings.data.max_length,
            precision=self.precision,
            strategy=self.strategy,
            world_size=self.plan.devices,
            accumulating=windows < self.share,
            activation_checkpointing=self.settings.trainer.activation_checkpointing,
            reshard_after_forward=self.settings.parallel.reshard_after_forward,
            device=device_of(self.plan),
            compiled=self.compiled,
            optimizer=self.settings.optimizer.name,
        )

    def fits(self, windows: int) -> bool:
        return self.memory(windows).total <= memory.USABLE * KINDS[self.plan.kind].memory


def device_of(plan: PlanConfig) -> str:
    return "cpu" if plan.kind == "cpu" else "cuda"


def flops_per_token(settings: Config) -> float:
    """FLOPs to train on one token, as in GPT.flops_per_token, without importing torch."""
    model = settings.model
    matrices = memory.block_matrices(model) * model.num_layers + model.vocab_size * model.emb_dim
    scores = model.num_layers * model.emb_dim * (settings.data.max_length + 1)
    return 6 * (matrices + scores)


def job_of(settings: Config, plan: PlanConfig) -> Job:
    """The job of these settings. Raises ConfigError as training would."""
    trainer, strategy = settings.trainer, settings.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if plan.devices > 1 else "single"
    refuse(check_ranks(strategy, plan.devices, trainer.batch_size))
    tokens = plan.tokens or trainer.max_steps * trainer.batch_size * settings.data.max_length
    compiled = trainer.compile is True
    if trainer.compile == "auto":
        worth = WORTH_COMPILING[device_of(plan)]
        compiled = flops_per_token(settings) * tokens / plan.devices >= worth
    precision = "bf16" if trainer.precision == "auto" else trainer.precision
    return Job(settings, plan, strategy, precision, tokens, compiled)


def utilisation(job: Job) -> tuple[float, str]:
    """(share of the peak FLOP/s, its source)."""
    if job.plan.utilisation is not None:
        return job.plan.utilisation, "as given"
    measured = KINDS[job.plan.kind].measured
    share, file = measured.get(job.precision, (ASSUMED_UTILISATION, ""))
    source = f"measured, {file}" if file else "assumed"
    if job.settings.trainer.activation_checkpointing:
        # Forward, backward and at most the forward again: 4 units instead of 3.
        return 0.75 * share, f"{source}, less a quarter for activation checkpointing"
    return share, source


def figures(job: Job) -> dict:
    """The whole plan as JSON types. Bytes, seconds, US dollars."""
    plan, kind, micro = job.plan, KINDS[job.plan.kind], job.micro
    share, source = utilisation(job)
    peak = kind.fp32 if job.precision == "fp32" else kind.flops
    rate = plan.devices * share * peak / flops_per_token(job.settings)
    price = kind.price if plan.price is None else plan.price
    needed = job.memory(micro)
    return {
        "parameters": memory.num_parameters(job.settings.model),
        "flops_per_token": flops_per_token(job.settings),
        "devices": plan.devices,
        "kind": kind.title,
        "strategy": job.strategy,
        "precision": job.precision,
        "compiled": job.compiled,
        "batch_size": job.settings.trainer.batch_size,
        "micro_batch_size": micro,
        "micro_batches": math.ceil(job.share / micro),
        "largest_micro_batch": job.largest,
        "memory": needed.parts() | {"total": needed.total, "moment": needed.moment},
        "fits": job.fits(micro),
        "utilisation": share,
        "utilisation_source": source,
        "tokens_per_second": rate,
        "tokens": job.tokens,
        "seconds": job.tokens / rate,
        "price": price,
        "cost": job.tokens / rate / 3600 * plan.devices * price,
    }


PARTS = {
    "weights": "fp32",
    "gradients": "fp32",
    "optimizer": "moments, fp32",
    "casts": "of the weights, in the precision of the products",
    "gathered": "weights of other ranks, while they are needed",
    "activations": "kept by forward for backward",
    "logits": "of the cross-entropy, a piece at a time",
    "working": "gradients in flight, buffers of collectives",
    "slack": "lost by the allocator",
    "libraries": "the process without a model",
}


def text_of(job: Job, plan: dict) -> str:
    """The plan as text, at most 100 columns wide."""
    model, length, needed = job.settings.model, job.settings.data.max_length, plan["memory"]
    how = [job.strategy, job.precision, "compiled" if job.compiled else "not compiled"]
    if job.settings.trainer.activation_checkpointing:
        how.append("activation checkpointing")
    row = lambda name, words, size: f"  {name:<13} {words:<52}{size / 1e9:>8.1f}"  # noqa: E731
    sharded = ("weights", "optimizer") if job.strategy == "fsdp" else ()
    parts = {
        name: words + (f", 1/{plan['devices']} of them" if name in sharded else "")
        for name, words in PARTS.items()
        if needed[name] > 0
    }
    room = f"{plan['kind']} has {KINDS[job.plan.kind].memory / 1e9:.0f} GB"
    steps = plan["tokens"] / (plan["batch_size"] * length)
    return f"""\
Model    {plan["parameters"]:,} parameters: {model.num_layers} layers of {model.num_heads} heads, \
{model.emb_dim} wide
Devices  {plan["devices"]} x {plan["kind"]}: {", ".join(how)}
Batch    {plan["batch_size"]:,} windows of {length:,} tokens; on each device \
{plan["micro_batches"]} x {plan["micro_batch_size"]} windows

{"Peak memory of a device":<68}{"GB":>8}
{chr(10).join(row(name, words, needed[name]) for name, words in parts.items())}
{row("total", f"{room}: {'fits' if plan['fits'] else 'does NOT fit'}", needed["total"])}
  largest micro-batch that fits: {plan["largest_micro_batch"] or "none, not even one window"}

Speed    {plan["tokens_per_second"]:,.0f} tokens/s with utilisation={plan["utilisation"]:.2f} \
({plan["utilisation_source"]})
Time     {timedelta(seconds=round(plan["seconds"]))} for {plan["tokens"]:,.0f} tokens, \
{steps:,.0f} steps
Cost     ${plan["cost"]:,.2f} at ${plan["price"]:.2f} per device and hour

Estimates. Time is FLOPs / (devices x peak x utilisation): communication, validation,
samples and checkpoints count only as far as the utilisation includes them."""


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
        return compose(overrides)
    except ConfigError as error:
        refuse([problem for problem in error.problems if problem[:2] != ("data.path", None)])
        return compose([*overrides, "data.path=none"])


def main() -> None:
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        show_help(PlanConfig)
        print("\nAll settings of a training command are taken too: python train.py --help")
        return
    with errors_in_one_line(debug="debug=true" in arguments):
        job = job_of(*composed(arguments))
        plan = figures(job)
        print(text_of(job, plan))
        if job.plan.out:
            write_out(job.plan.out, plan)


if __name__ == "__main__":
    main()
