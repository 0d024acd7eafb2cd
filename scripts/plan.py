"""Estimates memory and time of a training run. Needs no GPU and no data.

    python -m scripts.plan model=gpt2-xl data=text trainer.batch_size=512 parallel=fsdp \\
        devices=64 kind=h100 tokens=10e9

The settings are those of train.py and of PlanConfig. The formulas for memory are in
parallel/memory.py. The time is computed from the FLOPs of the model and `utilisation`, the
fraction of the peak FLOP/s that training reaches. The utilisation is measured for CPUs and assumed
for GPUs; the output states which.
"""

import math
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
    from clearhead.parallel.hardware import Peak
    from clearhead.parallel.memory import Job


class Kind(NamedTuple):
    """A type of device. All have bf16."""

    title: str
    gpu: str  # the name that the driver reports, for its peak FLOP/s; "" for a CPU
    memory: float  # bytes


KINDS = {
    "b200": Kind("B200", "B200", 180e9),
    "h200": Kind("H200", "H200", 141e9),
    "h100": Kind("H100", "H100 80GB HBM3", 80e9),
    "a100": Kind("A100", "A100-SXM4-80GB", 80e9),
    "a100-40gb": Kind("A100-SXM4-40GB", "A100-SXM4-40GB", 40e9),
    "l40s": Kind("L40S", "L40S", 48e9),
    "l4": Kind("L4", "L4", 24e9),
    "rtx4090": Kind("RTX 4090", "RTX 4090", 24e9),
    "cpu": Kind("CPU (2 cores, Zen 5)", "", 24e9),
}
# FLOP/s in bf16 and fp32, measured: matrix products on two cores of a server.
CPU_PEAK = (800e9, 200e9)
# Fraction of the peak that training reached in benchmarks/results/2026-11-21-base-cpu.json.
CPU_UTILISATION = {"bf16": 0.36, "fp32": 0.83}
# Assumed: rounded from published training runs of larger GPT-2 models. Small models reach less.
GPU_UTILISATION = 0.4


class PlanConfig(ScriptConfig):
    """python -m scripts.plan [SETTING OF train.py ...] [KEY=VALUE ...]"""

    devices: Positive = Field(1, description="number of devices, one rank on each")
    kind: Literal[*KINDS] = Field(  # pyrefly: ignore
        "h100", description=f"device: {', '.join(KINDS)}"
    )
    memory: AboveZero | None = Field(
        None, description="GB (10^9 bytes) of each device; null: of its kind"
    )
    tokens: AboveZero | None = Field(
        None, description="tokens to train on; null: trainer.max_steps times tokens per step"
    )
    utilisation: Annotated[AboveZero, Field(le=1)] | None = Field(
        None, description="fraction of the peak FLOP/s; null: measured, or assumed"
    )
    out: OutFile = Field("", description="JSON file for the results")


def make_plan(config: Config, plan: PlanConfig) -> dict:
    """Returns the estimate (bytes, seconds). Raises ConfigError as train.py does."""
    from clearhead.parallel import memory  # imports torch

    if config.model.vocab_size is None:
        config = config.with_values({"model.vocab_size": vocab_size(config.data)})
    trainer, kind = config.trainer, KINDS[plan.kind]
    per_token = memory.meta_model(config.model).flops_per_token(config.data.max_length)
    if trainer.max_steps is None and not plan.tokens:
        reason = "trainer.max_minutes limits the time, not the number of steps"
        refuse([("tokens", plan.tokens, reason, "set tokens, such as tokens=1e6")])
    tokens = plan.tokens or (trainer.max_steps or 0) * trainer.batch_size * config.data.max_length
    job = planned_job(config, plan, per_token * tokens)
    device_memory = kind.memory if plan.memory is None else 1e9 * plan.memory

    def fits(windows: int) -> bool:
        return memory.fits(job, windows, device_memory)

    largest = memory.largest_micro_batch(job.windows_per_rank, fits)
    micro = trainer.micro_batch_size
    micro = min(micro, job.windows_per_rank) if isinstance(micro, int) else largest or 1
    parts = memory.estimate(job, micro)
    share, source = utilisation(config, plan, job.precision)
    peak = peak_of(kind)
    flops = peak.fp32 if job.precision == "fp32" else peak.half
    rate = plan.devices * share * flops / per_token
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
        "seconds": tokens / rate,
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
    device = "cpu" if plan.kind == "cpu" else "cuda"
    compiled = trainer.compile is True
    if trainer.compile == "auto":
        compiled = flops / plan.devices >= WORTH_COMPILING[device]
    precision = "bf16" if trainer.precision == "auto" else trainer.precision
    return memory.Job(config, strategy, plan.devices, precision, device, compiled)


def vocab_size(data: DataConfig) -> int:
    """Returns the size of the vocabulary. Raises ConfigError if it is not trained yet and
    data.vocab_size is null."""
    if data.tokenizer != TRAINED:
        return load_tokenizer(data.tokenizer).n_vocab
    if data.vocab_size is None:
        reason = "the size of the vocabulary follows from the text, which the plan does not read"
        refuse([("data.vocab_size", None, reason, "give a number")])
    return data.vocab_size


def peak_of(kind: Kind) -> "Peak":
    from clearhead.parallel.hardware import Peak, peak_named

    return peak_named(kind.gpu) or Peak(*CPU_PEAK)


def utilisation(config: Config, plan: PlanConfig, precision: str) -> tuple[float, str]:
    """Returns (fraction of the peak FLOP/s, its source)."""
    if plan.utilisation is not None:
        return plan.utilisation, "as given"
    if plan.kind == "cpu" and precision in CPU_UTILISATION:
        share, source = CPU_UTILISATION[precision], "measured"
    else:
        share, source = GPU_UTILISATION, "assumed"
    if config.trainer.activation_checkpointing:
        # The backward pass costs 2 forward passes; recomputation adds at most 1: 4 instead of 3.
        return 0.75 * share, f"{source}, less a quarter for activation checkpointing"
    return share, source


def text_of(config: Config, plan: dict) -> str:
    """Returns the estimate as text, at most 100 columns wide."""
    from clearhead.parallel.memory import PARTS

    model, length, needed = config.model, config.data.max_length, plan["memory"]
    how = [plan["strategy"], plan["precision"], "compiled" if plan["compiled"] else "not compiled"]
    if config.trainer.activation_checkpointing:
        how.append("activation checkpointing")
    shards = f", 1/{plan['devices']} per device" if plan["strategy"] == "fsdp" else ""
    parts = PARTS | {name: PARTS[name] + shards for name in ("weights", "optimizer")}
    room = f"{plan['device_memory'] / 1e9:.0f} GB per device"
    parts["total"] = f"{room}: {'fits' if plan['fits'] else 'does NOT fit'}"
    rows = [
        f"  {name:<13} {words:<52}{needed[name] / 1e9:>8.1f}"
        for name, words in parts.items()
        if needed[name] > 0
    ]
    steps = plan["tokens"] / (plan["batch_size"] * length)
    return f"""\
Model    {plan["parameters"]:,} parameters: {model.num_layers} layers of {model.num_heads} heads, \
{model.emb_dim} wide
Devices  {plan["devices"]} x {plan["kind"]}: {", ".join(how)}
Batch    {plan["batch_size"]:,} windows of {length:,} tokens; on each device \
{plan["micro_batches"]} x {plan["micro_batch_size"]} windows

{"Peak memory per device":<68}{"GB":>8}
{chr(10).join(rows)}
  largest micro-batch that fits: {plan["largest_micro_batch"] or "none, one window does not fit"}

Speed    {plan["tokens_per_second"]:,.0f} tokens/s with utilisation={plan["utilisation"]:.2f} \
({plan["utilisation_source"]})
Time     {timedelta(seconds=round(plan["seconds"]))} for {plan["tokens"]:,.0f} tokens, \
{steps:,.0f} steps

These are estimates. Time = FLOPs / (devices x peak FLOP/s x utilisation). Communication,
validation, samples and checkpoints are included only if the utilisation includes them."""


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
            show_help(PlanConfig)
            print("\nAll settings of train.py are accepted too: python train.py --help")
            return
        config, plan = composed(arguments)
        found = make_plan(config, plan)
        print(text_of(config, found))
        if plan.out:
            write_out(plan.out, found)


if __name__ == "__main__":
    main()
