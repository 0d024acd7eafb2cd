"""The settings of a training run: types, ranges, choices, and what has to fit together.

One pydantic model for each group of configs/; default values and meanings are in the YAML files.
The types are in values.py, with `validate`, which returns every problem.
"""

import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, StrictBool, ValidationInfo, field_validator

from errors import refuse, show
from training.config.values import (  # noqa: F401 other modules import the types from here
    AboveZero,
    AutoOrBool,
    Count,
    Device,
    Fractional,
    Name,
    NonNegative,
    Paths,
    Positive,
    Precision,
    Seed,
    Sentence,
    Settings,
    Text,
    flat,
    flat_fields,
    groups_of,
    rejected,
    validate,
)
from training.config.yaml_files import default_values

VOCABULARIES = {"gpt2": 50257, "byte": 257}  # token ids of each tokenizer
MOST_PARAMETERS = 10**13  # of a model; no machine holds more
MOST_PROMPTS = 20  # of the lens: every page holds all prompts
MOST_PICTURE_FILES = 900  # of a run: dashboards become slow beyond a thousand files


class Group(Settings):
    """One group of settings."""

    @classmethod
    def with_defaults(cls, **values: object) -> Self:
        """The group with the default values of configs/ and these. Raises ConfigError."""
        group = next(name for name, schema in GROUPS.items() if schema is cls)
        made, problems = validate(cls, default_values()[group] | values)
        refuse([p._replace(key=f"{group}.{p.key.removeprefix(f'{group}.')}") for p in problems])
        return made


class ModelSettings(Group):
    """The model's shape; model.ModelConfig has the same fields."""

    vocab_size: Positive
    context_length: Positive
    emb_dim: Positive
    num_layers: Positive
    dropout: Fractional
    num_heads: Positive
    qkv_bias: StrictBool
    attention: Literal["sdpa", "explicit", "einsum", "per_head", "flex"]

    @field_validator("num_heads")
    @classmethod
    def _divides_width(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("emb_dim", heads)
        if width % heads:
            nearest = min(_divisors(width), key=lambda divisor: abs(divisor - heads))
            reason = f"emb_dim={width} cannot be split into {heads} equal heads"
            raise rejected(reason, f"use a divisor of {width}, such as {nearest}")
        return heads

    @field_validator("attention")
    @classmethod
    def _has_dropout(cls, kernel: str, info: ValidationInfo) -> str:
        if kernel == "flex" and info.data.get("dropout", 0) > 0:
            reason = "FlexAttention has no dropout on attention weights"
            raise rejected(reason, "set model.dropout=0 or use model.attention=sdpa")
        return kernel


def _divisors(number: int) -> list[int]:
    """Some divisors, 1 among them; the small ones and their counterparts."""
    small = [n for n in range(1, min(number, 10_000) + 1) if number % n == 0]
    return small + [number // n for n in small]


class DataConfig(Group):
    """Which text or token files, and how they are cut into windows."""

    synthetic: Literal["induction"] | None
    tokenizer: Literal["gpt2", "byte"]
    max_length: Positive
    path: Paths | None
    weights: Annotated[list[AboveZero], Field(min_length=1)] | None
    val_path: Paths | None
    text_key: Name
    stride: Positive | None
    within_documents: StrictBool
    val_fraction: Fractional
    endoftext: Literal["token", "text"]
    verify: AutoOrBool

    @field_validator("path")
    @classmethod
    def _one_source(cls, path: object, info: ValidationInfo) -> object:
        synthetic = info.data.get("synthetic")
        if path is None and not synthetic and "synthetic" in info.data:
            hint = "set data.path=FILE, or the folder that scripts.prepare_data wrote"
            raise rejected("no text given", hint)
        if path is not None and synthetic:
            hint = "give one of the two: data=induction, or data.synthetic=null"
            raise rejected("data.synthetic makes its own sequences", hint)
        length = info.data.get("max_length", 64)
        if synthetic and (info.data.get("tokenizer") != "byte" or not 16 <= length <= 124):
            reason = "needs data.tokenizer=byte and data.max_length from 16 to 124"
            raise rejected(reason, "use data=induction as it is", "data.synthetic")
        return path

    @field_validator("weights")
    @classmethod
    def _one_per_path(cls, weights: list[float] | None, info: ValidationInfo) -> object:
        path = info.data.get("path")
        entries = len(path) if isinstance(path, list) else 1
        if weights is not None and "path" in info.data and len(weights) != entries:
            hint = "give one weight for each, such as [0.7,0.3]"
            raise rejected(f"data.path has {entries} entries", hint)
        return weights


class OptimizerConfig(Group):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"]
    lr: AboveZero
    weight_decay: NonNegative
    betas: Annotated[list[Fractional], Field(min_length=2, max_length=2)]
    eps: AboveZero
    schedule: Literal["wsd", "cosine", "constant"]
    min_lr_ratio: Annotated[NonNegative, Field(le=1)]
    decay_fraction: Annotated[AboveZero, Field(le=1)]
    matrix_lr: AboveZero | None
    momentum: Fractional
    nesterov: StrictBool
    ns_steps: Annotated[Positive, Field(le=20)]


class TrainerConfig(Group):
    """The loop: how long, in which portions, how often it evaluates, and on what it runs."""

    max_steps: Positive
    batch_size: Annotated[Positive, Field(le=2**24)]
    micro_batch_size: Positive | Literal["auto"] | None
    activation_checkpointing: StrictBool
    warmup_steps: Count | None
    grad_clip: NonNegative
    eval_every: Count | None
    eval_windows: Positive | None
    log_every: Positive | None
    save_every: Count
    keep: Positive
    precision: Precision
    compile: AutoOrBool
    device: Device
    profile: StrictBool
    on_nonfinite: Literal["skip", "stop"]
    max_skips: Positive
    resume: StrictBool | Name
    resume_override: StrictBool
    init_from: Name | None
    sample_prompt: Text
    sample_tokens: Annotated[Count, Field(le=100_000)]

    @field_validator("micro_batch_size")
    @classmethod
    def _within_batch(cls, micro: int | str | None, info: ValidationInfo) -> object:
        batch = info.data.get("batch_size")
        if isinstance(micro, int) and batch and micro > batch:
            hint = "use a part of the batch, or null for the whole"
            raise rejected(f"must be at most batch_size={batch}", hint)
        return micro

    @field_validator("warmup_steps")
    @classmethod
    def _within_run(cls, warmup: int | None, info: ValidationInfo) -> object:
        steps = info.data.get("max_steps")
        if warmup and steps and warmup > steps:
            raise rejected(f"the run ends after max_steps={steps}", "use fewer, or null")
        return warmup

    @field_validator("resume")
    @classmethod
    def _is_a_choice(cls, resume: bool | str) -> bool | str:
        if resume is True:
            raise rejected("is not a choice", "use auto, must, false or a path")
        return resume


class LensSettings(Group):
    """What the lens shows, and how often; lens.config.LensConfig has the same fields."""

    every: Count | None
    max_tokens: Annotated[Positive, Field(ge=2, le=1024)]
    repeated: Annotated[Count, Field(le=127)]
    prompts: Annotated[list[Sentence], Field(max_length=MOST_PROMPTS)]
    layers: list[Count]
    frames: Annotated[Positive, Field(ge=2, le=200)]

    @field_validator("repeated")
    @classmethod
    def _repeats(cls, repeated: int) -> int:
        if repeated == 1:
            raise rejected("must be 0, or from 2 to 127", "use 24")
        return repeated

    @field_validator("prompts")
    @classmethod
    def _has_something_to_show(cls, prompts: list[str], info: ValidationInfo) -> list[str]:
        known = {"every": 0, "repeated": 0, "max_tokens": 64} | info.data
        repeats = known["repeated"] > 0 and known["max_tokens"] >= 5
        if known["every"] != 0 and not prompts and not repeats:
            raise rejected("there is nothing to show", "give a prompt, or use lens=off")
        return prompts

    @field_validator("layers")
    @classmethod
    def _few_files(cls, layers: list[int], info: ValidationInfo) -> list[int]:
        sequences = len(info.data.get("prompts", [])) + (info.data.get("repeated", 0) > 0)
        pictures = sequences * (1 + len(layers))
        if 2 * (pictures + 1) > MOST_PICTURE_FILES:  # with their pages, at the start and the end
            reason = f"{pictures} pictures at each step; a run may have {MOST_PICTURE_FILES} files"
            raise rejected(reason, "use fewer layers or fewer lens.prompts")
        return layers


class ParallelConfig(Group):
    """How several processes share the work."""

    strategy: Literal["auto", "single", "ddp", "fsdp"]
    timeout: Annotated[Positive, Field(lt=1800)]
    reshard_after_forward: StrictBool


Label = Annotated[Name, Field(max_length=128)]


class WandbConfig(Group):
    """The run on Weights & Biases. Lengths are those that W&B accepts."""

    mode: Literal["auto", "online", "offline", "disabled"]
    entity: Name | None
    project: Label
    name: Label | None
    group: Label | None
    job_type: Annotated[Name, Field(max_length=64)]
    tags: list[Annotated[Sentence, Field(max_length=64)]]
    notes: Name | None
    log_model: StrictBool | Literal["best", "last"]
    alerts: StrictBool

    @field_validator("project")
    @classmethod
    def _no_separators(cls, project: str) -> str:
        if bad := sorted(set(project) & set("/\\#?%:")):
            hint = "a team is wandb.entity=TEAM" if bad == ["/"] else "use - or _"
            raise rejected(f"W&B accepts no {' '.join(bad)} in it", hint)
        return project

    @field_validator("log_model")
    @classmethod
    def _is_a_choice(cls, log_model: bool | str) -> bool | str:
        if log_model is True:
            raise rejected("is not a choice", "use best, last, or false for none")
        return log_model

    def wanted(self) -> str:
        """The mode; with auto, the one in the environment if there is one."""
        return os.environ.get("WANDB_MODE", "auto") if self.mode == "auto" else self.mode

    def ignored(self) -> list[str]:
        """A note for each setting that has no effect because W&B is off."""
        asked = {"log_model": self.log_model, "alerts": self.alerts}
        is_off = self.wanted() == "disabled"
        return [
            f"wandb.{key}={show(value)}: no effect, because W&B is off"
            for key, value in asked.items()
            if value and is_off
        ]


# ------------------------------------------------------------------------------------ the whole


@dataclass
class Overrides:
    """A command line that resumes a run by its path, until the settings of that run are known."""

    values: dict  # all settings, as composed from configs/ and the command line
    keys: list[str]  # settings and groups that the command line names


class Config(Settings):
    """All settings of a training run, in the order of configs/config.yaml."""

    seed: Seed
    name: Name | None
    debug: StrictBool
    runs_dir: Name
    model: ModelSettings
    data: DataConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    lens: LensSettings
    parallel: ParallelConfig
    wandb: WandbConfig

    # Set where trainer.resume is a path, until `stored.complete` has merged that run's settings.
    _overrides: Overrides | None = PrivateAttr(None)

    @property
    def overrides(self) -> Overrides | None:
        """What the command line adds to the settings of the run that trainer.resume names."""
        return self._overrides

    @overrides.setter
    def overrides(self, overrides: Overrides) -> None:
        self._overrides = overrides

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str | None) -> str | None:
        if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]{0,127}", name):
            hint = "use letters, digits and . _ - only, at most 128"
            raise rejected("becomes the folder runs/<name>", hint)
        return name

    @field_validator("model")
    @classmethod
    def _can_exist(cls, model: ModelSettings) -> ModelSettings:
        rows = model.vocab_size + model.context_length + 12 * model.num_layers * model.emb_dim
        if (parameters := rows * model.emb_dim) > MOST_PARAMETERS:
            hint = "use a smaller model.emb_dim, num_layers or vocab_size"
            raise rejected(f"has {parameters:.0e} parameters, which no machine holds", hint)
        return model

    @field_validator("data")
    @classmethod
    def _fits_model(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        if not (model := info.data.get("model")):
            return data
        if data.max_length > (most := model.context_length):
            reason = f"the model reads at most model.context_length={most} tokens"
            raise rejected(reason, f"use data.max_length={most} or less", "data.max_length")
        if model.vocab_size < (needed := VOCABULARIES[data.tokenizer]):
            reason = f"data.tokenizer={data.tokenizer} has {needed} ids"
            raise rejected(reason, f"use {needed} or more", "model.vocab_size")
        return data

    @field_validator("lens")
    @classmethod
    def _layers_exist(cls, lens: LensSettings, info: ValidationInfo) -> LensSettings:
        model = info.data.get("model")
        if model and any(layer >= model.num_layers for layer in lens.layers):
            reason = f"the model has layers 0 to {model.num_layers - 1}"
            raise rejected(reason, "leave the others out", "lens.layers")
        return lens


GROUPS = groups_of(Config)
PLAIN = tuple(key for key in Config.model_fields if key not in GROUPS)


def known_settings() -> list[str]:
    """The keys of all settings, and the groups."""
    return [*flat_fields(Config), *GROUPS, "experiment"]
