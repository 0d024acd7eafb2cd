"""Estimates memory and time of a training run. Needs no GPU and no data.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

The time follows from the FLOPs of the model and `utilisation`, the fraction of the peak FLOP/s that
training reaches, which is a range where it was not measured.
"""

import functools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from clearhead.config import Config, compose
from clearhead.config.command_line import (
    OutFile,
    ScriptConfig,
    command_line,
    parse,
    show_help,
    write_out,
)
from clearhead.config.schema import AboveZero, DataConfig, Positive, known_settings
from clearhead.config.validation import unknown_key
from clearhead.errors import ConfigError, refuse
from clearhead.parallel.launch import check_ranks
from clearhead.tokens import TRAINED
from clearhead.tokens.tokenizer_json import load_tokenizer

if TYPE_CHECKING:  # at run time, torch is imported only after the settings were checked
    from clearhead.parallel.memory import Job


class Kind(NamedTuple):
    """A type of device."""

    title: str  # of a GPU: the name that the driver reports, for its peak FLOP/s
    memory: float  # bytes
    precision: str = "bf16"  # of trainer.precision=auto


KINDS = {
    "b200": Kind("B200", 180e9),
    "h200": Kind("H200", 141e9),
    "h100": Kind("H100 80GB HBM3", 80e9),
    "a100": Kind("A100-SXM4-80GB", 80e9),
    "a100-40gb": Kind("A100-SXM4-40GB", 40e9),
    "l40s": Kind("L40S", 48e9),
    "l4": Kind("L4", 24e9),
    "a10": Kind("A10", 24e9),
    "a6000": Kind("RTX A6000", 48e9),
    "t4": Kind("T4", 16e9, "fp16"),
    "rtx5090": Kind("RTX 5090", 32e9),
    "rtx4090": Kind("RTX 4090", 24e9),
    "rtx4070": Kind("RTX 4070", 12e9),
    "rtx4060ti": Kind("RTX 4060 Ti", 8e9),
    "rtx3090": Kind("RTX 3090", 24e9),
    "rtx3060": Kind("RTX 3060", 12e9),
    "apple": Kind("Apple M", 16e9, "fp32"),
    "cpu": Kind("CPU (2 cores, Zen 5)", 24e9),
}
# FLOP/s in bf16 and fp32, measured: matrix products on two cores of a server.
CPU_PEAK = (800e9, 200e9)
# Fraction of the peak that training reached in benchmarks/results/2026-11-21-base-cpu.json.
CPU_UTILISATION = {"bf16": 0.36, "fp32": 0.83}
# One H100, GPT-2 small (layers, width), windows, dropout: 2026-11-27-gpu-check-h100.json.
H100_RUN, H100_UTILISATION = ("h100", 1, "bf16", True, 12, 768, 1024, 0), 0.396
# Published training runs of GPT-2, on A100 and H100, reached half to one and a half of this.
GPU_UTILISATION, RANGE = 0.4, (0.5, 1.5)


class PlanConfig(ScriptConfig):
    """python -m scripts.plan [SETTING OF train.py ...] [KEY=VALUE ...]"""

    devices: Positive = Field(1, description="number of devices, one rank on each")
    kind: Literal[*KINDS] = Field(  # pyrefly: ignore
        "h100", description=f"device: {', '.join(KINDS)}"
    )
    memory: AboveZero | None = Field(
        None, description="GB (10^9 bytes) of each device, of a Mac with Apple M; null: of its kind"
    )
    tokens: AboveZero | None = Field(
        None, description="tokens to train on; null: trainer.max_steps times tokens per step"
    )
    utilisation: Annotated[AboveZero, Field(le=1)] | None = Field(
        None, description="fraction of the peak FLOP/s; null: measured, or a range"
    )
    out: OutFile = Field("", description="JSON file for the results")


def make_plan(config: Config, plan: PlanConfig) -> dict:
    """Returns the estimate (bytes, seconds). Raises ConfigError as train.py does."""
    from clearhead.parallel import hardware, memory  # import torch

    if config.model.vocab_size is None:
        config = config.with_values({"model.vocab_size": vocab_size(config.data)})
    trainer, kind = config.trainer, KINDS[plan.kind]
    per_token = memory.meta_model(config.model).flops_per_token(config.data.max_length)
    if trainer.max_steps is None and not plan.tokens:
        reason = "trainer.max_minutes and trainer.save_at_words do not set the number of steps"
        refuse([("tokens", plan.tokens, reason, "set tokens, such as tokens=1e6")])
    tokens = plan.tokens or (trainer.max_steps or 0) * trainer.batch_size * config.data.max_length
    job = planned_job(config, plan, per_token * tokens)
    if plan.memory and "kind" not in plan.model_fields_set:  # of a GPU that is not known
        kind = Kind(f"GPU of {plan.memory:g} GB", 1e9 * plan.memory)
    # On a Mac, torch.mps.recommended_max_memory() is two thirds or more.
    part = 2 / 3 if plan.kind == "apple" else 1
    device_memory = part * (kind.memory if plan.memory is None else 1e9 * plan.memory)
    fits = functools.partial(memory.fits, job, memory=device_memory)
    largest = memory.largest_micro_batch(job.windows_per_rank, fits)
    micro = trainer.micro_batch_size
    micro = min(micro, job.windows_per_rank) if isinstance(micro, int) else largest or 1
    parts = memory.estimate(job, micro)
    share, bounds, source = utilisation(job, plan)
    peak = hardware.Peak(*CPU_PEAK) if plan.kind == "cpu" else hardware.peak_named(kind.title)
    flops = peak and (peak.fp32 if job.precision == "fp32" else peak.half)
    rate = flops and plan.devices * share * flops / per_token
    return {
        "parameters": job.parameters,
        "flops_per_token": per_token,
        "devices": plan.devices,
        "kind": kind.title,
        "strategy": job.strategy,
        "precision": job.precision,
        "compiled": job.compiled,
        "batch_size": trainer.batch_size,
        "micro_batch_size": micro,
        "micro_batches": math.ceil(job.windows_per_rank / micro),
        "largest_micro_batch": largest,
        "memory": parts | {"total": sum(parts.values())},
        "device_memory": device_memory,
        "fits": fits(micro),
        "utilisation": share,
        "utilisation_source": source,
        "tokens_per_second": rate,
        "tokens": tokens,
        "tokens_of_headline": plan.tokens or 1e10,
        "seconds": rate and tokens / rate,
        "bounds": bounds,
    }


def planned_job(config: Config, plan: PlanConfig, flops: float) -> "Job":
    """Returns the training on these devices, with automatic settings as train.py chooses them.
    flops: of the whole training. Raises ConfigError."""
    from clearhead.parallel import memory
    from clearhead.parallel.device import WORTH_COMPILING

    trainer, strategy = config.trainer, config.parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if plan.devices > 1 else "single"
    refuse(check_ranks(strategy, plan.devices, trainer.batch_size))
    device = {"apple": "mps", "cpu": "cpu"}.get(plan.kind, "cuda")
    is_worth = flops / plan.devices >= WORTH_COMPILING.get(device, math.inf)
    compiled = is_worth if trainer.compile == "auto" else trainer.compile
    precision = KINDS[plan.kind].precision if trainer.precision == "auto" else trainer.precision
    return memory.Job(config, strategy, plan.devices, precision, device, compiled)


def vocab_size(data: DataConfig) -> int:
    """Returns the size of the vocabulary. Raises ConfigError if it is not known."""
    if data.tokenizer != TRAINED:
        return load_tokenizer(data.tokenizer).n_vocab
    if data.vocab_size is None:
        reason = "the size of the vocabulary follows from the text, which the plan does not read"
        refuse([("data.vocab_size", None, reason, "give a number")])
    return data.vocab_size


def utilisation(job: "Job", plan: PlanConfig) -> tuple[float, tuple[float, ...], str]:
    """Returns (fraction of the peak FLOP/s, multiples of it that are as likely, its source)."""
    model, length = job.config.model, job.config.data.max_length
    of_model = (model.num_layers, model.emb_dim, length, model.dropout)
    if plan.utilisation is not None:
        return plan.utilisation, (1,), "as given"
    share, bounds, source = GPU_UTILISATION, RANGE, "published runs"
    if plan.kind == "cpu" and job.precision in CPU_UTILISATION:
        share, bounds, source = CPU_UTILISATION[job.precision], (1,), "measured"
    elif (plan.kind, plan.devices, job.precision, job.compiled, *of_model) == H100_RUN:
        share, bounds, source = H100_UTILISATION, (1,), "measured"
    if job.config.trainer.activation_checkpointing:
        # The backward pass costs 2 forward passes; recomputation adds at most 1: 4 instead of 3.
        return 0.75 * share, bounds, f"{source}, less a quarter for activation checkpointing"
    return share, bounds, source


def text_of(config: Config, plan: dict) -> str:
    """Returns the estimate as text, at most 100 columns wide."""
    from clearhead.parallel.memory import PARTS

    def span(value: float, show: Callable = "{:,.0f}".format, power: int = 1) -> str:
        return " to ".join(map(show, sorted(value * each**power for each in plan["bounds"])))

    model, length, needed = config.model, config.data.max_length, plan["memory"]
    shards = f", 1/{plan['devices']} per device" if plan["strategy"] == "fsdp" else ""
    parts = PARTS | {name: PARTS[name] + shards for name in ("weights", "optimizer")}
    parts["total"] = f"of {plan['device_memory'] / 1e9:.0f} GB per device"
    rows = [
        f"  {name:<13} {words:<52}{needed[name] / 1e9:>8.1f}"
        for name, words in parts.items()
        if needed[name] > 0
    ]
    hours, speed = "", "Speed    unknown: give the kind= of a GPU with published FLOP/s"
    if rate := plan["tokens_per_second"]:
        of = plan["tokens_of_headline"]
        hours = span(of / rate / 3600, "{:,.1f}".format, -1)
        hours = plan["fits"] * f"; {hours} hours for {of / 1e9:g} billion tokens"
        time = span(plan["seconds"], lambda each: str(timedelta(seconds=round(each))), -1)
        speed = f"""\
Speed    {span(rate)} tokens/s with utilisation={span(plan["utilisation"], "{:.2f}".format)} \
({plan["utilisation_source"]})
Time     {time} for {plan["tokens"]:,.0f} tokens, \
{plan["tokens"] / (plan["batch_size"] * length):,.0f} steps"""
    return f"""\
{"fits" if plan["fits"] else "does NOT fit"} on {plan["devices"]} x {plan["kind"]}: batch of \
{plan["batch_size"]:,} windows{hours}

Model    {plan["parameters"]:,} parameters: {model.num_layers} layers of {model.num_heads} heads, \
{model.emb_dim} wide; windows of {length:,} tokens
Devices  {plan["strategy"]}, {plan["precision"]}, {"" if plan["compiled"] else "not "}compiled; \
micro-batches on each: {plan["micro_batches"]} of {plan["micro_batch_size"]} windows

{"Peak memory per device":<68}{"GB":>8}
{chr(10).join(rows)}
  largest micro-batch that fits: {plan["largest_micro_batch"] or "none, one window does not fit"}

{speed}

These are estimates, without validation, samples and checkpoints."""


def composed(arguments: list[str]) -> tuple[Config, PlanConfig]:
    """Returns the settings of training and of the plan. ConfigError lists the problems of both."""
    own, found, problems = list(PlanConfig.model_fields), [], []
    mine = [text for text in arguments if text.partition("=")[0] in own]
    others = [text for text in arguments if text not in mine]
    for read in (lambda: parse(PlanConfig, mine), lambda: of_training(others)):
        try:
            found.append(read())
        except ConfigError as error:
            problems += error.problems
    known = [*own, *known_settings()]
    unknown = {text.partition("=")[0] for text in others} - {*known}
    refuse([unknown_key(*p[:2], known) if p.key in unknown else p for p in problems])
    plan, config = found
    return config, plan


def of_training(overrides: list[str]) -> Config:
    """Returns the settings of a training command; data.path may be missing."""
    try:
        return compose(overrides)
    except ConfigError:
        return compose([*overrides, "data.path=any"])


def main() -> None:
    with command_line() as arguments:
        if not {"-h", "--help"}.isdisjoint(arguments):
            return show_help(PlanConfig)
        config, plan = composed(arguments)
        found = make_plan(config, plan)
        print(text_of(config, found))
        if plan.out:
            write_out(plan.out, found)


if __name__ == "__main__":
    main()
