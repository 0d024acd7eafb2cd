"""Settings of benchmarks/training.py and benchmarks/generate.py, and their validation."""

import difflib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.tables import TABLES
from errors import ConfigError, Problem, refuse
from training.config.command_line import compose, parse
from training.config.schema import Settings

NAMES = ("ours", "transformers", "nanogpt", "llms_from_scratch")
OPTIMIZER_SETTINGS = ("lr", "weight_decay", "betas", "eps")


@dataclass
class TrainingBenchmark:
    """python -m benchmarks.training [model=NAME] [model.KEY=VALUE ...] [KEY=VALUE ...]"""

    model: str = field(default="gpt2-small", metadata={"help": "as in training"})
    batch_size: int = field(default=4, metadata={"help": "windows per step"})
    length: int = field(default=256, metadata={"help": "tokens per window"})
    nanogpt: str = field(default="", metadata={"help": "the folder of a checkout of nanoGPT"})
    llms_from_scratch: str = field(
        default="", metadata={"help": "the folder of a checkout of LLMs-from-scratch"}
    )
    implementations: str = field(
        default="all", metadata={"help": f"all that are available, or some of {','.join(NAMES)}"}
    )
    table: str = field(default="both", metadata={"help": "both | shipped | equalised"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    precision: str = field(
        default="auto", metadata={"help": "of the equalised table: auto | fp32 | bf16"}
    )
    compile: str | bool = field(
        default="auto", metadata={"help": "auto: where possible; false: none"}
    )
    rounds: int = field(default=5, metadata={"help": "in each, every variant runs some steps"})
    steps: int = field(default=3, metadata={"help": "timed steps of a round"})
    settle: int = field(default=2, metadata={"help": "untimed steps before them"})
    warmup: int = field(default=2, metadata={"help": "untimed steps before the first round"})
    roofline_seconds: float = field(
        default=0.3, metadata={"help": "for each product measured; 0: no roofline"}
    )
    seed: int = field(default=0, metadata={"help": "of the weights and the tokens"})
    out: str = field(default="", metadata={"help": "a JSON file for everything measured"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """Problems as (key, value, reason, hint)."""
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
LEAST["roofline_seconds"] = 0
CHOICES = {
    "table": ("both", *TABLES),
    "device": ("auto", "cpu", "cuda", "mps"),
    "precision": ("auto", "fp32", "bf16"),
    "compile": ("auto", True, False),
}


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


def composed(arguments: list[str]) -> tuple[TrainingBenchmark, Settings]:
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


@dataclass
class GenerationBenchmark:
    """python -m benchmarks.generate [model=NAME] [KEY=VALUE ...]"""

    model: str = field(default="gpt2-small", metadata={"help": "as in training"})
    batch_sizes: list[int] = field(
        default_factory=lambda: [1, 8], metadata={"help": "texts at once, one table each"}
    )
    prompt_tokens: int = field(default=64, metadata={"help": "tokens per prompt"})
    num_tokens: int = field(default=64, metadata={"help": "new tokens per text"})
    rounds: int = field(default=5, metadata={"help": "runs of each implementation"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    seed: int = field(default=0, metadata={"help": "of the weights and the prompts"})
    out: str = field(default="", metadata={"help": "a JSON file for everything measured"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """Problems as (key, value, reason, hint)."""
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
            found.append(("out", self.out, "is not a file in an existing folder", "name another"))
        return found
