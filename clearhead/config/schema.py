"""Schema of the settings of a training run: types, ranges, choices and rules between settings.

There is one pydantic model per group of configs/. The YAML files have the default values and the
descriptions. config/validation.py checks values with this schema.
"""

import ast
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from clearhead.config.validation import (
    FOLDER_NAME,
    NO_SEPARATORS,
    flat_fields,
    groups_of,
    validate,
)
from clearhead.config.yaml_files import default_values, nested
from clearhead.errors import refuse
from clearhead.files import REPOSITORY
from clearhead.tokens import MAX_VOCABULARY, MIXTURE_BLOCK, TRAINED, VOCABULARIES
from headlens import LensConfig

MAX_PROMPTS = 20  # every page of a snapshot contains all prompts


def rejected(reason: str, hint: str, key: str = "") -> PydanticCustomError:
    """Returns the error for a validator. key: the setting, if it is not the validated one."""
    return PydanticCustomError("rejected", "{reason}", {"reason": reason, "hint": hint, "key": key})


def rule(check: Callable[[Any, dict], None]) -> AfterValidator:
    """Returns a validator that calls check(value, others), which raises `rejected`.

    others: the valid settings above this one in its class. `validate(..., rules=False)` skips it.
    """

    def checked(value: object, info: ValidationInfo) -> object:
        if not info.context:
            check(value, info.data)
        return value

    return AfterValidator(checked)


def _to_int(value: object) -> object:
    """Accepts 1e5 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, BeforeValidator(_to_int), Field(ge=0, le=10**15)]
Positive = Annotated[int, BeforeValidator(_to_int), Field(ge=1, le=10**15)]
Seed = Annotated[int, BeforeValidator(_to_int), Field(ge=0, le=2**63 - 1)]
NonNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
Fractional = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=0)]  # min_length: pydantic checks that it is UTF-8
Name = Annotated[Text, Field(min_length=1)]
Sentence = Annotated[Text, Field(pattern=r"\S")]
Checkpoint = Annotated[
    Name, Field(description="run (last checkpoint), checkpoint, Hugging Face directory or hub:NAME")
]
Names = Name | Annotated[list[Name], Field(min_length=1)]
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Threads = Annotated[
    Annotated[Positive, Field(le=1024)] | None,
    Field(description="number of CPU threads; null: one per core, or OMP_NUM_THREADS"),
]
AutoOrBool = bool | Literal["auto"]


class Settings(BaseModel):
    """Base class. Unknown settings are errors; values are not converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def with_defaults(cls, **values: object) -> Self:
        """Returns a group with these values and defaults for all others. Raises ConfigError."""
        group = next(name for name, schema in GROUPS.items() if schema is cls)
        made, problems = validate(cls, default_values()[group] | values)
        refuse([p._replace(key=f"{group}.{p.key.removeprefix(f'{group}.')}") for p in problems])
        return made


def _attention_constants() -> dict[str, ast.expr]:
    """Returns the constants of attention.py, which declares the attention kernels, as syntax trees:
    to import it would import torch, which takes a second."""
    tree = ast.parse((REPOSITORY / "attention.py").read_text(encoding="utf-8"))
    return {node.target.id: node.value for node in tree.body if isinstance(node, ast.AnnAssign)}


_constants = _attention_constants()
KERNEL_NAMES = tuple(key.value for key in _constants["KERNELS"].keys)
NO_DROPOUT = ast.literal_eval(_constants["NO_DROPOUT"])
KernelName = Literal[KERNEL_NAMES]  # pyrefly: ignore


@rule
def _divides_width(heads: int, others: dict) -> None:
    width = others.get("emb_dim", heads)
    if width % heads:
        raise rejected(f"is not a divisor of model.emb_dim={width}", f"use a divisor of {width}")


@rule
def _has_dropout(kernel: str, others: dict) -> None:
    if kernel in NO_DROPOUT and others.get("dropout", 0) > 0:
        hint = "set model.dropout=0 or use model.attention=sdpa"
        raise rejected("does not support dropout on attention weights", hint)


class ModelSettings(Settings):
    """Architecture of the model: the fields of model.ModelConfig, with limits."""

    vocab_size: Positive | None
    context_length: Positive
    emb_dim: Positive
    num_heads: Annotated[Positive, _divides_width]
    num_layers: Positive
    dropout: Fractional
    qkv_bias: bool
    attention: Annotated[KernelName, _has_dropout]


def _is_encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError as error:
        raise rejected("no such text encoding", "for example utf-8, cp1252, shift_jis") from error
    return name


Encoding = Annotated[Name, AfterValidator(_is_encoding)]


@rule
def _one_source(path: object, others: dict) -> None:
    synthetic = others.get("synthetic")
    if path is None and not synthetic and "synthetic" in others:
        hint = "set data.path to a text file, or to the output folder of scripts.prepare_data"
        raise rejected("no data given", hint)
    if path is not None and synthetic:
        reason = f"cannot be combined with data.synthetic={synthetic}, which generates the data"
        raise rejected(reason, "use data=induction, or set data.synthetic=null")
    length = others.get("max_length", 64)
    if synthetic and (others.get("tokenizer") != "byte" or not 16 <= length <= 124):
        reason = "needs data.tokenizer=byte and data.max_length from 16 to 124"
        raise rejected(reason, "use data=induction without other data settings", "data.synthetic")


@rule
def _one_per_path(weights: list[float] | None, others: dict) -> None:
    path = others.get("path")
    entries = len(path) if isinstance(path, list) else 1
    if weights is not None and "path" in others and len(weights) != entries:
        reason = f"number of weights: {len(weights)}; number of entries of data.path: {entries}"
        raise rejected(reason, "give one weight per entry, such as [0.7,0.3]")
    if weights and min(weights) * MIXTURE_BLOCK < sum(weights):
        reason = f"a weight is less than 1/{MIXTURE_BLOCK:,} of their sum"
        raise rejected(reason, "use a larger weight, or leave this entry out")


@rule
def _of_trained(vocab_size: int | None, others: dict) -> None:
    name = others.get("tokenizer")
    if vocab_size is not None and name not in (None, TRAINED):
        reason = f"data.tokenizer={name} has its own vocabulary"
        raise rejected(reason, f"use null, or data.tokenizer={TRAINED}")


def is_tokenizer(name: str) -> bool:
    """Returns whether data.tokenizer can have this value: a name, or a path that exists. A run that
    is resumed needs no path, because its tokenizer is in the checkpoint."""
    return name in (*VOCABULARIES, TRAINED) or os.path.exists(os.path.expanduser(name))


@rule
def _not_shifted(within_documents: bool, others: dict) -> None:
    if within_documents and others.get("shift"):
        reason = "cannot be combined with data.shift: the first window starts with the document"
        raise rejected(reason, "set data.shift=false")


VocabSize = Annotated[Positive, Field(ge=258, le=MAX_VOCABULARY)]


class DataConfig(Settings):
    """Text files or token files, and how they are split into windows."""

    synthetic: Literal["induction"] | None
    tokenizer: Name
    vocab_size: Annotated[VocabSize | None, _of_trained]
    max_length: Positive
    path: Annotated[Names | None, _one_source]
    weights: Annotated[list[AboveZero] | None, _one_per_path]
    val_path: Names | None
    text_key: Names
    encoding: Encoding
    trim: bool
    stride: Positive | None
    shift: bool
    within_documents: Annotated[bool, _not_shifted]
    val_fraction: Fractional


class OptimizerConfig(Settings):
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
    out_proj_lr_ratio: AboveZero
    momentum: Fractional


@rule
def _within_batch(micro: int | str | None, others: dict) -> None:
    batch = others.get("batch_size")
    if isinstance(micro, int) and batch and micro > batch:
        hint = "use a smaller number, or null for the complete batch"
        raise rejected(f"must be at most trainer.batch_size={batch}", hint)


def _default_steps(steps: object, info: ValidationInfo) -> object:
    is_limited = info.data.get("max_minutes") or info.data.get("save_at_words")
    return 120 if steps is None and not is_limited else steps


class TrainerConfig(Settings):
    """The training loop: length, batch, evaluation, checkpoints, device and precision."""

    max_minutes: AboveZero | None
    save_at_words: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None
    max_steps: Annotated[Positive | None, BeforeValidator(_default_steps)]
    patience: Positive | None
    batch_size: Annotated[Positive, Field(le=2**24)]
    micro_batch_size: Annotated[Positive | Literal["auto"] | None, _within_batch]
    activation_checkpointing: bool
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
    threads: Threads
    resume: Literal[False] | Name
    init_from: Name | None
    sample_prompt: Text | None
    sample_tokens: Annotated[Count, Field(le=100_000)]


@rule
def _has_a_prompt(prompts: list[str] | None, others: dict) -> None:
    known = {"every": 0, "repeat_length": 0, "max_tokens": 64} | others
    repeats = known["repeat_length"] > 0 and known["max_tokens"] >= 5
    if known["every"] != 0 and prompts == [] and not repeats:
        raise rejected("attention snapshots need a prompt", "give a prompt, or use lens=off")


MaxTokens = Annotated[Positive, Field(ge=2, le=1024)]
RepeatLength = Literal[0] | Annotated[Positive, Field(ge=2, le=127)]


def _off(value: object) -> object:
    return "off" if value is False else value  # YAML reads off as false


class LensSettings(Settings, LensConfig):
    """Attention snapshots: LensConfig with limits."""

    every: Count | None
    max_percent: Annotated[AboveZero, Field(le=100)] | None
    max_tokens: MaxTokens
    repeat_length: RepeatLength
    prompts: Annotated[
        Annotated[list[Sentence], Field(max_length=MAX_PROMPTS)] | None, _has_a_prompt
    ]
    ablation: Annotated[Literal["auto", "exact", "off"], BeforeValidator(_off)]


class ParallelConfig(Settings):
    """Distributed training."""

    strategy: Literal["auto", "single", "ddp", "fsdp"]
    timeout: Annotated[Positive, Field(lt=1800)]


Label = Annotated[Name, Field(max_length=128)]


def _tags(value: object) -> object:
    """Splits tags at commas, as W&B splits WANDB_TAGS."""
    return [tag for tag in value.split(",") if tag] if isinstance(value, str) else value


class WandbConfig(Settings):
    """Weights & Biases. The maximum lengths are those of W&B."""

    mode: Literal["auto", "online", "offline", "disabled"]
    entity: Name | None
    project: Annotated[Label, Field(pattern=NO_SEPARATORS)]
    group: Label | None
    tags: Annotated[list[Annotated[Sentence, Field(max_length=64)]], BeforeValidator(_tags)]
    log_model: Literal[False, "best", "last"]


@rule
def _fits_model(data: DataConfig, others: dict) -> None:
    if not (model := others.get("model")):
        return
    if data.max_length > (most := model.context_length):
        reason = f"must be at most model.context_length={most}"
        raise rejected(reason, f"use data.max_length={most} or less", "data.max_length")


@rule
def _reads_words(trainer: TrainerConfig, others: dict) -> None:
    first, last = trainer.save_at_words or (0, 0)
    if last < first:
        raise rejected("FIRST is above LAST", "use [FIRST,LAST]", "trainer.save_at_words")
    if last and (data := others.get("data")) and data.synthetic:
        reason = f"data.synthetic={data.synthetic} has no words"
        raise rejected(reason, "use null", "trainer.save_at_words")


class Config(Settings):
    """All settings of a training run, in the order of configs/config.yaml."""

    seed: Seed
    name: Annotated[Text, Field(pattern=FOLDER_NAME)] | None
    debug: bool
    runs_dir: Name
    model: ModelSettings
    data: Annotated[DataConfig, _fits_model]
    optimizer: OptimizerConfig
    trainer: Annotated[TrainerConfig, _reads_words]
    lens: LensSettings
    parallel: ParallelConfig
    wandb: WandbConfig

    def with_values(self, values: dict[str, object]) -> Self:
        """Returns a copy with other values, by dotted key, which are not validated."""
        tree = nested(values)
        groups = {
            key: getattr(self, key).model_copy(update=tree[key])
            for key in GROUPS.keys() & tree.keys()
        }
        return self.model_copy(update=tree | groups)


GROUPS = groups_of(Config)


def known_settings() -> list[str]:
    """Returns the keys of all settings and groups."""
    return [*flat_fields(Config), *GROUPS, "experiment", "from"]
