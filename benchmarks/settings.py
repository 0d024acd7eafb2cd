"""Settings of benchmarks/training.py and benchmarks/generate.py, and their validation."""

import difflib
import importlib.util
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from errors import ConfigError, Problem, refuse
from training.config import Config, compose
from training.config.command_line import OutFile, ScriptConfig, parse
from training.config.schema import AutoOrBool, Count, Device, Name, NonNegative, Positive, Seed

NAMES = ("ours", "transformers", "nanogpt", "llms_from_scratch")
OPTIMIZER_SETTINGS = ("lr", "weight_decay", "betas", "eps")


class TrainingBenchmark(ScriptConfig):
    """python -m benchmarks.training [model=NAME] [model.KEY=VALUE ...] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="as in training")
    batch_size: Positive = Field(4, description="windows per step")
    length: Positive = Field(256, description="tokens per window")
    nanogpt: str = Field("", description="the folder of a checkout of nanoGPT")
    llms_from_scratch: str = Field("", description="the folder of a checkout of LLMs-from-scratch")
    implementations: str = Field(
        "all", description=f"all that are available, or some of {','.join(NAMES)}"
    )
    table: Literal["both", "shipped", "equalised"] = Field(
        "both", description="both | shipped | equalised"
    )
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the equalised table: auto | fp32 | bf16"
    )
    compile: AutoOrBool = Field("auto", description="auto: where possible; false: none")
    rounds: Positive = Field(5, description="in each, every variant runs some steps")
    steps: Positive = Field(3, description="timed steps of a round")
    settle: Count = Field(2, description="untimed steps before them")
    warmup: Count = Field(2, description="untimed steps before the first round")
    roofline_seconds: NonNegative = Field(
        0.3, description="for each product measured; 0: no roofline"
    )
    seed: Seed = Field(0, description="of the weights and the tokens")
    out: OutFile = Field("", description="a JSON file for everything measured")


# --------------------------------------------------------------------------------- settings


def checkout_problems(settings: TrainingBenchmark) -> list[Problem]:
    """Folders that are not a checkout of the project."""
    found = []
    if not settings.nanogpt and not settings.llms_from_scratch:
        return found  # and torch, which they need, is not loaded to check
    from benchmarks.implementations import CHECKOUTS

    for key, project in CHECKOUTS.items():
        folder = getattr(settings, key)
        if folder and project.find_file(folder) is None:
            missing = f"has no file {project.files[0]}"
            cause = missing if Path(folder).is_dir() else "no such folder"
            fix = f"name the folder of a checkout of {project.title}"
            found.append((key, folder, cause, fix))
    return found


def name_problems(settings: TrainingBenchmark) -> list[Problem]:
    """Implementations that are named and not available."""
    found, value = [], settings.implementations
    for name in asked(value):
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            fix = f"did you mean {near[0]}?" if near else f"use some of {','.join(NAMES)}, or all"
            found.append(("implementations", value, f"unknown: {name or value}", fix))
        elif name == "transformers" and importlib.util.find_spec(name) is None:
            found.append(
                ("implementations", value, f"{name} is not installed", f"pip install {name}")
            )
        elif hasattr(settings, name) and not getattr(settings, name):
            fix = f"give {name}=FOLDER, a checkout of it"
            found.append(("implementations", value, f"{name} is no package", fix))
    return found


def asked(names: str) -> list[str]:
    """The implementations that a setting names; empty for all."""
    return [] if names == "all" else [name.strip() for name in names.strip("[]").split(",")]


def chosen(settings: TrainingBenchmark) -> list[str]:
    """The names of the implementations to compare, ours first."""
    there = [name for name in NAMES if getattr(settings, name, "here")]
    if importlib.util.find_spec("transformers") is None:
        there.remove("transformers")
    return [name for name in there if name in (asked(settings.implementations) or NAMES)]


def composed(arguments: list[str]) -> tuple[TrainingBenchmark, Config]:
    """The settings of the benchmark, and training settings for the model and the optimizer;
    ConfigError with the problems of both."""
    theirs = [text for text in arguments if text.startswith(("model.", "optimizer."))]
    problems, own, training = [], None, None
    for text in theirs:
        key, _, value = text.partition("=")
        if key in ("model.dropout", "model.qkv_bias"):
            reason = "fixed, so that all implementations train the same model"
            problems.append((key, value, reason, "leave it out"))
        if key.startswith("optimizer.") and key.partition(".")[2] not in OPTIMIZER_SETTINGS:
            fix = f"the optimizer's settings here are {', '.join(OPTIMIZER_SETTINGS)}"
            problems.append((key, value, "has no effect here", fix))
    try:
        own = parse(TrainingBenchmark, [text for text in arguments if text not in theirs])
        problems += checkout_problems(own) + name_problems(own)
    except ConfigError as error:
        problems += error.problems
    refuse(problems)
    # No text is read. The byte tokenizer fits every vocab_size.
    fixed = ["model.dropout=0", "data.tokenizer=byte", "data.max_length=1", "data.stride=null"]
    training = compose([f"model={own.model}", *theirs, *fixed])
    if own.length > training.model.context_length:
        cause = f"the model reads at most {training.model.context_length} tokens"
        fix = f"use length={training.model.context_length} or less"
        refuse([("length", own.length, cause, fix)])
    return own, training


class GenerationBenchmark(ScriptConfig):
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: Name = Field("gpt2-small", description="as in training")
    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = Field(
        [1, 8], description="texts at once, one table each"
    )
    prompt_tokens: Positive = Field(64, description="tokens per prompt")
    num_tokens: Positive = Field(64, description="new tokens per text")
    rounds: Positive = Field(5, description="runs of each implementation")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    seed: Seed = Field(0, description="of the weights and the prompts")
    out: OutFile = Field("", description="a JSON file for everything measured")
