"""What a training run can be told, as typed dataclasses, and every problem with it at once.

Each group of settings has a dataclass beside the code that it configures; `build` fills them all
from plain values. A problem is a tuple (key, value, reason, hint) and is shown as the line
`key=value: reason; hint`. How the values get here from the command line:
training/config/command_line.py.
"""

import copy
import dataclasses
import difflib
import importlib
import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from errors import NO_VALUE, CheckpointError, Problem, UnknownSetting, refuse, shorten, show

if typing.TYPE_CHECKING:
    from data import DataConfig
    from lens import LensConfig
    from model import ModelConfig
    from training.distributed.launch import ParallelConfig
    from training.optim.optimizers import OptimizerConfig
    from training.reporting.wandb_run import WandbConfig

from training.checkpoint.run_directory import flat
from training.config.other_names import same_purpose

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
SAMPLE = ("corpus", "sample.txt")  # the text of data=sample

LARGEST = 10**15  # of every number but a seed
MOST_PARAMETERS = 10**13


@dataclass
class TrainerConfig:
    """The loop: how long, in what portions, how often it looks up, and on what it runs."""

    max_steps: int = 120  # optimizer steps
    batch_size: int = 2  # windows per optimizer step, over all ranks
    # windows at once on a device; null: the whole share; auto: the most that fit (GPU)
    micro_batch_size: int | str | None = None
    activation_checkpointing: bool = False  # compute activations again in backward: less memory
    # the learning rate rises; null: a tenth of the run, 24 to 2000 steps, at most a fifth of it
    warmup_steps: int | None = None
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    # steps between validations; 0: only at the start and end; null: a tenth of the run, 40 to 1000
    eval_every: int | None = None
    # at most so many windows, always the same; null: 2 % of what is trained on between, 8 to 400
    eval_windows: int | None = None
    log_every: int | None = None  # steps between lines in the log; null: some 500 lines in a run
    save_every: int = 500  # steps between checkpoints, besides the best and last; 0: only those
    keep: int = 2  # how many of the newest checkpoints stay, besides the best
    precision: str = "auto"  # auto | fp32 | bf16 | fp16
    compile: str | bool = "auto"  # auto | true | false
    device: str = "auto"  # auto | cpu | cuda | mps
    profile: bool = False  # true: where the time of a step goes, into runs/<name>/profile/
    on_nonfinite: str = "skip"  # skip | stop: a step whose loss or gradient is no number
    max_skips: int = 10  # so many in a row end the run
    resume: str | bool = "auto"  # auto | must | false | the directory of a run or checkpoint
    resume_override: bool = False  # true: continue although a setting or the data changed
    init_from: str | None = None  # weights to start from: a run, a Hugging Face directory, hub:NAME
    sample_prompt: str = "The"  # what the sample text at each validation continues
    sample_tokens: int = 40  # its length; 0: no samples

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        for key in ("max_steps", "batch_size", "eval_windows", "log_every", "keep", "max_skips"):
            value = getattr(self, key)
            if value is not None and value < 1:
                found.append((key, value, "must be at least 1", "use 1 or more"))
        for key in ("warmup_steps", "eval_every", "save_every", "sample_tokens"):
            if (getattr(self, key) or 0) < 0:
                found.append((key, getattr(self, key), "must not be negative", "use 0 or more"))
        if not 0 <= self.grad_clip < math.inf:
            found.append(
                ("grad_clip", self.grad_clip, "must not be negative", "use 1.0, or 0 for none")
            )
        micro, batch = self.micro_batch_size, self.batch_size
        if isinstance(micro, str) and micro != "auto":
            fix = "use a whole number, auto, or null for the whole share"
            found.append(("micro_batch_size", micro, "no such choice", fix))
        elif isinstance(micro, int) and not 1 <= micro <= max(1, batch):
            cause = f"must be from 1 to batch_size={batch}"
            found.append(("micro_batch_size", micro, cause, "use a part of the batch, or null"))
        if self.batch_size > 2**24:
            fix = "use at most 16777216 windows a step"
            found.append(("batch_size", self.batch_size, "no memory holds such a batch", fix))
        if self.sample_tokens > 100_000:
            fix = "use at most 100000"
            found.append(("sample_tokens", self.sample_tokens, "such a sample never ends", fix))
        if (self.warmup_steps or 0) > self.max_steps > 0:
            cause = f"the run ends after max_steps={self.max_steps}"
            found.append(("warmup_steps", self.warmup_steps, cause, "use fewer"))
        choices = {
            "precision": ("auto", "fp32", "bf16", "fp16"),
            "compile": ("auto", True, False),
            "device": ("auto", "cpu", "cuda", "mps"),
            "on_nonfinite": ("skip", "stop"),
        }
        for key, allowed in choices.items():
            if (value := getattr(self, key)) not in allowed:
                names = ", ".join(str(choice).lower() for choice in allowed)
                found.append((key, value, "no such choice", f"use one of {names}"))
        if self.resume is True or self.resume == "":
            found.append(
                ("resume", self.resume, "no such choice", "use auto, must, false or a path")
            )
        return found

    def choose(self, before: dict) -> None:
        """Settles what is left open. `before` has the settings of the run that goes on: one that
        is made longer keeps its warmup, and validates on the windows it had."""
        tenth = self.max_steps // 10
        # With 12 steps of warm-up the loss of GPT-2 small jumps by four nats (docs/benchmarks.md).
        warmup = min(max(tenth, 24), 2000, self.max_steps // 5)
        self._settle("warmup_steps", before, warmup)
        self._settle("eval_every", before, min(max(tenth, 40), 1000))
        # A window costs a third of what it costs in training, or less: so it takes below 1 % of the
        # time, except in the smallest runs, where fewer windows would tell too little.
        between = self.batch_size * (self.eval_every or self.max_steps)
        self._settle("eval_windows", before, min(max(between * 2 // 100, 8), 400))
        self._settle("log_every", before, max(self.max_steps // 500, 1))

    def _settle(self, key: str, before: dict, value: int) -> None:
        if getattr(self, key) is None:
            known = isinstance(before.get(key), int)
            setattr(self, key, before[key] if known else value)


@dataclass
class Overrides:
    """What the command line says on top of the settings of the run that trainer.resume names."""

    values: dict  # all settings, as composed from configs/ and the command line
    keys: list[str]  # settings and groups that the command line names


@dataclass
class Settings:
    """Everything a training run is told. The order is that of configs/config.yaml."""

    # Set where trainer.resume names a directory: until `complete` has put the settings of
    # that run under them, only those in OF_THE_LAUNCH are valid.
    overrides: typing.ClassVar[Overrides | None] = None

    seed: int
    name: str | None  # the run's directory is runs/<name>; null: date, time and model
    debug: bool  # true: errors come with their traceback
    model: "ModelConfig"
    data: "DataConfig"
    optimizer: "OptimizerConfig"
    trainer: TrainerConfig
    lens: "LensConfig"
    parallel: "ParallelConfig"
    wandb: "WandbConfig"


# Where each group's dataclass lives. Loaded when needed: model and data bring torch along.
GROUPS = {
    "model": ("model", "ModelConfig"),
    "data": ("data", "DataConfig"),
    "optimizer": ("training.optim.optimizers", "OptimizerConfig"),
    "trainer": ("training.config.schema", "TrainerConfig"),
    "lens": ("lens", "LensConfig"),
    "parallel": ("training.distributed.launch", "ParallelConfig"),
    "wandb": ("training.reporting.wandb_run", "WandbConfig"),
}
PLAIN = {"seed": int, "name": str | None, "debug": bool}
# Settings of one launch on one machine, and those that say which run it is. A run that is resumed
# by its path has all others from its checkpoint.
OF_THE_MACHINE = ("debug", "parallel", "trainer.device")
OF_THE_LAUNCH = (*OF_THE_MACHINE, "name", "trainer.resume", "trainer.resume_override")

# They follow from other settings where they are null, and a longer run keeps them:
# TrainerConfig.choose.
FOLLOWING = (
    "trainer.warmup_steps",
    "trainer.eval_every",
    "trainer.eval_windows",
    "trainer.log_every",
)
# What may differ between the ranks of a run. Data are compared by their checksums.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}


# -------------------------------------------------------------------- values -> settings


def fill(schema: type, values: dict, prefix: str = "") -> tuple[object | None, list[Problem]]:
    """An instance of the dataclass `schema` from plain values, or None, and every problem found.

    Fields that are absent keep their defaults; the dataclass's own `problems()` is asked last.
    """
    hints = typing.get_type_hints(schema)
    merged = {}  # the defaults, then what was given
    for field in dataclasses.fields(schema):
        if field.default is not dataclasses.MISSING:
            merged[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            merged[field.name] = field.default_factory()
    found = []
    for key, value in values.items():
        if key not in hints:
            known = [prefix + name for name in hints]
            found.append(unknown_key(f"{prefix}{key}", value, known))  # in YAML a key may be 1
            continue
        try:
            merged[key] = coerce(value, hints[key])
        except TypeError as error:
            default = merged.get(key)
            fix = "see --help" if default in (None, "") else f"such as {show(default)}"
            if isinstance(default, list):  # as a shell passes it on, without blanks
                fix = f"such as [{','.join(map(show, default or [value]))}]"
            found.append((prefix + key, value, str(error), fix))
            merged.setdefault(key, value)
    missing = [name for name in hints if name not in merged]
    found += [
        (prefix + name, NO_VALUE, "missing", f"give it as {prefix}{name}=...") for name in missing
    ]
    defaults = {f.name: f.default for f in dataclasses.fields(schema)}
    for name, value in merged.items():
        if name != "seed" and any(LARGEST < abs(v) < math.inf for v in _numbers(value)):
            cause, fix = "is too large a number", f"use at most {LARGEST:g}"
            found.append((prefix + name, value, cause, fix))
            if defaults[name] is not dataclasses.MISSING:
                merged[name] = defaults[name]  # what follows may count up to it
    if not missing:
        named = {problem[0] for problem in found}
        # Asked of a look-alike: an instance with problems may refuse to exist.
        for key, *rest in schema.problems(types.SimpleNamespace(**merged)):
            if prefix + key not in named:
                found.append((prefix + key, *rest))
    named = {problem[0] for problem in found}
    for name, value in merged.items():
        if prefix + name not in named and not all(map(_is_finite, _numbers(value))):
            found.append((prefix + name, value, "must be a finite number", "see --help"))
    return (None if found else schema(**merged)), found


def _numbers(value: object) -> list[int | float]:
    """The numbers in a setting's value."""
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an int may be too large for a float


def coerce(value: object, hint: object) -> object:
    """The value as the type that the dataclass asks for; TypeError says what it should be."""
    if isinstance(hint, types.UnionType):
        choices = typing.get_args(hint)
        for choice in sorted(choices, key=lambda choice: choice is not type(value)):
            try:
                return coerce(value, choice)
            except TypeError:
                if choice is type(value):  # nearly right: what is wrong is not its type
                    raise
        raise TypeError(f"must be {_name(hint)}")
    if value is None and hint is type(None):
        return None
    if dataclasses.is_dataclass(hint) and isinstance(value, hint):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 1e5 steps
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if hint is str and isinstance(value, str | int | float):
        text = show(value) if isinstance(value, int) else str(value)
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise TypeError("must be text in UTF-8")
        return text
    if typing.get_origin(hint) is list and isinstance(value, list | tuple):
        return [coerce(item, typing.get_args(hint)[0]) for item in value]
    raise TypeError(f"must be {_name(hint)}")


def _name(hint: object) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if isinstance(hint, types.UnionType):
        return " or ".join(_name(choice) for choice in typing.get_args(hint))
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is list:
        return f"a list of {_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return names[hint]


def unknown_key(key: str, value: object, known: list[str]) -> UnknownSetting:
    """The problem of a key that does not exist. The hint: the setting that another project calls
    so, else one of the same name in another group, else the nearest name, its own group first."""
    group, _, last = key.rpartition(".")
    if found := same_purpose(last, known):
        setting, remark = found
        return UnknownSetting(
            key, value, "no such setting", f"use {setting}{remark and f' ({remark})'}"
        )
    there = [name for name in known if name.rpartition(".")[0] == group]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += [name for name in there if last and name.rpartition(".")[2].startswith(last)]
    for names in (there, known):
        # Without their groups: a group that two names share makes any two of them look alike.
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        hits = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
        near += [by_last[hit] for hit in hits]
    if near:
        return UnknownSetting(key, value, "no such setting", f"did you mean {near[0]}?")
    names = ", ".join(name.rpartition(".")[2] for name in there)
    fix = f"{group} has {names}" if group and there else "--help lists all settings"
    return UnknownSetting(key, value, "no such setting", fix)


def schema_of(group: str) -> type:
    """The dataclass of a group of settings."""
    module, name = GROUPS[group]
    return getattr(importlib.import_module(module), name)


def build(values: dict, touched: set[str] | None = None) -> tuple[Settings | None, list[Problem]]:
    """Typed settings from the composed plain values, and every problem found.

    With `touched`, only those groups are checked and no settings returned: the others are as
    shipped, and some of them would load torch.
    """
    parts, problems = {}, []
    for key, value in values.items():
        if key in PLAIN:
            try:
                parts[key] = coerce(value, PLAIN[key])
            except TypeError as error:
                problems.append((key, value, str(error), "see configs/config.yaml"))
        elif key in GROUPS:
            if touched is None or key in touched:
                if not isinstance(value, dict):
                    problems.append((key, value, "is a group of settings", f"use {key}.NAME=VALUE"))
                    continue
                parts[key], found = fill(schema_of(key), value, f"{key}.")
                problems += found + _unusable_texts(key, value)
        else:
            problems.append(unknown_key(str(key), value, [*PLAIN, *GROUPS]))
    name = parts.get("name")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=,+-]{0,127}", name):
        cause = "becomes the folder runs/<name>"
        fix = "use letters, digits and . _ - only, at most 128"
        problems.append(("name", name, cause, fix))
    if not 0 <= (seed := parts.get("seed", 0)) < 2**63:
        problems.append(("seed", seed, "must be from 0 to 2^63 - 1", "use seed=0"))
    problems += cross_problems(parts)
    return (Settings(**parts) if not problems and touched is None else None), problems


def names_a_run(values: dict) -> bool:
    """Whether trainer.resume is the path of a run or checkpoint, whose settings are the base."""
    trainer = values.get("trainer")
    resume = trainer.get("resume") if isinstance(trainer, dict) else None
    return isinstance(resume, str) and resume not in ("", "auto", "must")


def build_launch(
    values: dict, keys: list[str], shipped: dict
) -> tuple[Settings | None, list[Problem]]:
    """As `build`, of a command line that resumes a run by its path: settings to be completed.

    keys: what the command line names. shipped: the values without a command line. Whether the
    others fit can be said only when they are combined with those of the run.
    """
    launch = copy.deepcopy(shipped)
    for key in OF_THE_LAUNCH:
        copy_setting(key, values, launch)
    settings, problems = build(launch)
    for key in keys:
        group, _, name = key.partition(".")
        if group in GROUPS and name in values[group] and key not in OF_THE_LAUNCH:
            try:
                coerce(values[group][name], typing.get_type_hints(schema_of(group))[name])
            except TypeError as error:
                problems.append((key, values[group][name], str(error), "see --help"))
    if settings:
        settings.overrides = Overrides(values, keys)
    return settings, problems


def copy_setting(key: str, source: dict, target: dict) -> None:
    """Copies a setting (trainer.device) or a whole group (trainer) of plain values."""
    group, _, name = key.partition(".")
    if not name:
        target[group] = copy.deepcopy(source[group])
    elif name in source[group]:  # a file of the user's own may lack it
        target[group][name] = source[group][name]


def complete(settings: Settings, found: str, stored: dict) -> tuple[Settings, list[str]]:
    """The stored settings of a run with the command line's on top, and which ones have changed.

    found, stored: as of `training.checkpoint.resume.stored_settings`. Unknown stored settings are
    ignored. Raises CheckpointError for stored values that cannot be used, ConfigError for what the
    command line makes of them.
    """
    overrides, own_run = settings.overrides, Path(found).parent.parent
    base = copy.deepcopy(overrides.values)
    for key in PLAIN.keys() & stored.keys():
        base[key] = stored[key]
    for group in GROUPS:
        values = stored.get(group, {})
        if not isinstance(values, dict):
            cause = f"settings.{group} is not a group of settings"
            raise CheckpointError("checkpoint", found, cause, "use another checkpoint")
        known = {field.name for field in dataclasses.fields(schema_of(group))}
        base[group] |= {key: value for key, value in values.items() if key in known}
    _find_sample(base["data"])
    ours = dataclasses.asdict(settings)  # a sweep has named its job there
    for key in OF_THE_LAUNCH:
        copy_setting(key, ours, base)
    merged = copy.deepcopy(base)
    for key in FOLLOWING:
        group, _, name = key.partition(".")
        merged[group][name] = None
    if settings.name not in (None, own_run.name):  # a branch is another run on W&B
        merged["wandb"]["name"] = None
    merged["wandb"]["group"] = settings.wandb.group or merged["wandb"]["group"]
    named = [key for key in overrides.keys if not key.startswith("hydra")]
    if "experiment" in named:
        named = [*(key for key in named if key != "experiment"), *GROUPS]
    for key in named:
        copy_setting(key, overrides.values, merged)
    result, problems = build(merged)
    of_the_run = [p for p in problems if not any(f"{p[0]}.".startswith(f"{k}.") for k in named)]
    if len(of_the_run) == len(problems) > 0:
        key, value, cause, _ = problems[0]
        cause = f"{key}={shorten(show(value))}: {cause}"
        fix = f"give another {key}, or use another checkpoint"
        raise CheckpointError("checkpoint", found, cause, fix)
    refuse(problems)
    before = flat(base)
    changed = [
        f"{key}={shorten(show(value))} (was {shorten(show(before.get(key)))})"
        for key, value in flat(merged).items()
        if value != before.get(key) and not (value is None and key in FOLLOWING)
    ]
    return result, changed


def _find_sample(data: dict) -> None:
    """Replaces the path of the sample text in settings of `data` where this repository was in
    another folder, or on another machine."""
    path = data["path"]
    if isinstance(path, str) and Path(path).parts[-2:] == SAMPLE and not Path(path).exists():
        data["path"] = str(REPOSITORY.joinpath(*SAMPLE))


def different_settings(settings: dict, of_rank_0: dict, rank: int) -> list[Problem]:
    """The problem of a rank that was started with other settings than rank 0; both plain."""
    theirs = flat(of_rank_0)
    found = [
        (key, f"{show(theirs.get(key))} on rank 0, {show(value)} on rank {rank}")
        for key, value in flat(settings).items()
        if key not in OF_ONE_RANK and value != theirs.get(key)
    ]
    if not found:
        return []
    (key, cause), *more = found[:3]
    cause = "; ".join([cause, *(f"{key}: {values}" for key, values in more)])
    return [(key, NO_VALUE, cause, "start all ranks with the same settings")]


# Texts that name something. Empty, each would quietly mean what null says aloud.
NAMES = {
    "data.path": None,
    "data.val_path": "use null to validate on a part of data.path",
    "data.text_key": "use data.text_key=text",
    "trainer.resume": None,
    "trainer.init_from": "name a run, a directory or hub:NAME; null for random weights",
    "wandb.name": "use null for the run's name",
    "wandb.entity": "use null for the one of your key",
    "wandb.group": "use null for none",
    "wandb.job_type": "use wandb.job_type=train",
    "wandb.notes": "use null for none",
}


def _unusable_texts(group: str, values: dict) -> list[Problem]:
    """What is wrong with the names among a group's texts."""
    found = []
    for key, fix_empty in NAMES.items():
        value = values.get(key.partition(".")[2]) if key.startswith(f"{group}.") else None
        if value == "" and fix_empty:
            found.append((key, value, "is empty", fix_empty))
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                found.append((key, text, "no name has a zero character", "check the name"))
    return found


def cross_problems(parts: dict) -> list[Problem]:
    """What does not fit together across groups."""
    from_data, from_model = parts.get("data"), parts.get("model")
    if from_data is None or from_model is None:
        return []
    from tokens.tokenizers import TOKENIZERS
    from training.planning.memory import oversized

    found = []
    m = from_model
    parameters = (m.vocab_size + m.context_length) * m.emb_dim + 12 * m.num_layers * m.emb_dim**2
    if parameters > MOST_PARAMETERS:
        key = oversized(m)
        cause = f"makes a model of {parameters:.0e} parameters, which no machine holds"
        found.append((f"model.{key}", vars(m)[key], cause, "use less, or model=gpt2-small"))
    for layer in parts["lens"].layers if parts.get("lens") else ():
        if layer >= from_model.num_layers:
            cause = f"the model has layers 0 to {from_model.num_layers - 1}"
            found.append(("lens.layers", layer, cause, "leave it out"))
    if from_data.max_length > from_model.context_length:
        cause = f"the model reads at most model.context_length={from_model.context_length} tokens"
        fix = f"use data.max_length={from_model.context_length} or less"
        found.append(("data.max_length", from_data.max_length, cause, fix))
    needed = TOKENIZERS[from_data.tokenizer]
    if from_model.vocab_size < needed:
        cause = f"data.tokenizer={from_data.tokenizer} has {needed} ids"
        found.append(("model.vocab_size", from_model.vocab_size, cause, f"use {needed} or more"))
    return found
