"""Automatic values of settings, and the stored settings of a run that is resumed or repeated.

Stored settings are plain values that the schema checks. They are never interpolated or executed.
"""

import glob
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from clearhead.config.schema import GROUPS, UNLIMITED, Config, WandbConfig, is_tokenizer
from clearhead.config.validation import validate
from clearhead.config.yaml_files import flat, nested
from clearhead.errors import (
    NO_VALUE,
    CheckpointError,
    DataError,
    Problem,
    as_yaml,
    format_problem,
    refuse,
    shorten,
)
from clearhead.files import REPOSITORY, read_object
from clearhead.tokens import HUB, TRAINED, VOCABULARIES
from headlens import LensConfig

SETTINGS_JSON = "run.json"  # in a run directory
SAMPLE = ("corpus", "sample.txt")  # the file of data=sample
# These settings belong to one start of a run. With trainer.resume=PATH, all others come from the
# checkpoint, unless they are on the command line.
OF_THE_MACHINE = ("debug", "parallel", "trainer.device")
OF_THE_LAUNCH = (*OF_THE_MACHINE, "name", "runs_dir", "trainer.resume", "trainer.resume_override")
OF_THE_LAUNCH += ("wandb.id",)
# If these are null, `with_automatic_values` sets them. A resumed run keeps their values.
AUTOMATIC = (
    "model.vocab_size",
    "trainer.warmup_steps",
    "trainer.eval_every",
    "trainer.eval_windows",
    "trainer.log_every",
)
LOG_EVERY_ON_GPU = 10  # at least: the host waits for the GPU at each row, and then it for the host
# If these are null, passages of the text are chosen (clearhead/run/prompts.py). A resumed run keeps
# them, also if its data have changed.
PROMPTS = ("lens.prompts", "trainer.sample_prompt")
# Settings that may differ between the ranks of a run. Data are compared by checksum.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}


def with_automatic_values(
    config: Config, before: dict | None = None, on_gpu: bool = False
) -> Config:
    """Returns the config with values for the automatic settings that are null.

    before: the settings of the run that is resumed; it keeps its values. on_gpu: whether the model
    is trained on a GPU.
    """
    trainer, known, values = config.trainer, flat(before or {}), {}
    given, max_steps = flat(config.model_dump()), trainer.max_steps
    planned = known.get("trainer.max_steps")
    if trainer.max_minutes and type(planned) is int:
        # The first start has measured the steps. With trainer.resume=PATH, all settings come from
        # the run, so a given number of steps is a new one.
        keeps = known.get("trainer.max_minutes") and not names_run(trainer.resume)
        if keeps or max_steps == UNLIMITED:
            max_steps = values["trainer.max_steps"] = min(max_steps, planned)

    def complete(key: str, automatic: int | None) -> int:
        if given[key] is None:
            values[key] = known[key] if type(known.get(key)) is int else automatic
        return values.get(key, given[key])

    complete("model.vocab_size", None)  # that of the tokenizer, which is not known here

    steps = trainer.schedule_steps or max_steps
    complete("trainer.warmup_steps", automatic_warmup(steps))
    eval_every = complete("trainer.eval_every", min(max(steps // 10, 40), 1000))
    # A validation window takes at most a third of the time of a training window: validation takes
    # less than 1 % of the time, except in very short runs, which validate on at least 8 windows.
    between = trainer.batch_size * (eval_every or steps)
    complete("trainer.eval_windows", min(max(between * 2 // 100, 8), 400))
    complete("trainer.log_every", max(steps // 500, LOG_EVERY_ON_GPU if on_gpu else 1))
    if known.get("lens.every") == 0:  # the lens was off and is now on
        del known["lens.every"]
    complete("lens.every", LensConfig().interval(steps))
    prompts = {key: known[key] for key in PROMPTS if given[key] is None and known.get(key)}
    if prompts and validate(Config, nested(given | prompts))[0]:  # the checkpoint may be damaged
        values |= prompts
    return config.with_values(values)


def with_validation_per_epoch(config: Config, train_windows: int) -> Config:
    """Returns the config with validations at most one epoch apart if trainer.patience may end the
    run, because a small text overfits within a few epochs."""
    trainer = config.trainer
    if not trainer.patience:
        return config
    epoch = math.ceil(train_windows / trainer.batch_size)  # steps
    return config.with_values({"trainer.eval_every": min(trainer.eval_every, max(epoch, 20))})


def names_run(resume: object) -> bool:
    """Returns whether trainer.resume is the path of a run or checkpoint."""
    return isinstance(resume, str) and resume not in ("auto", "must")


def automatic_warmup(max_steps: int) -> int:
    # With 12 warm-up steps, the loss of GPT-2 small rises by four nats (docs/results.md).
    return min(max(max_steps // 10, 24), 2000, max_steps // 5)


def config_from(values: dict, overrides: Sequence[str]) -> Config:
    """Returns the config for composed values. Raises ConfigError with all problems.

    overrides: the command line. If trainer.resume is a path, the rules between settings are checked
    later, by `complete`, with the settings of that run. `from` adds the settings of a run here.
    """
    source = values.pop("from", None)
    is_path = source is not None or names_run(flat(values).get("trainer.resume"))
    config, problems = validate(Config, values, rules=not is_path)
    refuse(problems)
    if not is_tokenizer(name := config.data.tokenizer):
        reason, hint = "no such tokenizer or directory", "use gpt2, byte, bpe or a directory"
        refuse([Problem("data.tokenizer", name, reason, hint)])
    if is_path:
        keys = (text.partition("=")[0] for text in overrides)
        config._given = [key.lstrip("+~").partition("@")[0] for key in keys]
        if source is None:
            return config
        config = _with_settings_of(str(source), config)
    if config.model.vocab_size is None and config.data.tokenizer in VOCABULARIES:
        return config.with_values({"model.vocab_size": VOCABULARIES[config.data.tokenizer]})
    return config


def _with_settings_of(source: str, config: Config) -> Config:
    """Returns the config for a new run with the settings of the run in the directory `source`.
    Raises CheckpointError, ConfigError, or DataError if its data are not found from here."""
    if "experiment" in config.given:
        hint = "remove one of them, or give single settings or groups"
        refuse([Problem("experiment", NO_VALUE, "sets all groups, as `from` does", hint)])
    if names_run(config.trainer.resume):
        reason, hint = "names a second run", "remove it, or remove from"
        refuse([Problem("trainer.resume", config.trainer.resume, reason, hint)])
    if (stored := settings_of(Path(source))) is None:
        reason = f"contains no run (no valid {SETTINGS_JSON})"
        raise CheckpointError("from", source, reason, "give the directory of a run")
    if config.name and Path(config.runs_dir, config.name).resolve() == Path(source).resolve():
        reason, hint = f"is the run {source} itself", "give another name, or none"
        refuse([Problem("name", config.name, reason, hint)])
    given, (config, _) = config.given, complete(config, source, stored, is_new=True)
    for key, value in (("data.path", config.data.path), ("data.val_path", config.data.val_path)):
        for path in [value] if isinstance(value, str) else value or []:
            is_here = path.startswith((HUB, "/", "~")) or os.path.exists(path)
            if not (is_of(key, given) or is_here or glob.glob(path, recursive=True)):
                reason = f"{source} has this path, which does not exist in {os.getcwd()}"
                raise DataError(key, path, reason, f"give {key}=PATH")
    return config


def settings_of(run: Path) -> dict | None:
    """Returns all settings of a run; None if run.json is missing or invalid."""
    settings = read_object(run / SETTINGS_JSON).get("settings")
    return settings if isinstance(settings, dict) else None


def complete(
    config: Config, found: str, stored: dict, is_new: bool = False
) -> tuple[Config, list[str]]:
    """Returns (the stored settings of a run, overridden by the command line; the changes as text).

    found, stored: a checkpoint and its settings, or a run directory and its settings if `is_new`.
    Unknown stored settings are ignored. Raises CheckpointError for invalid stored settings,
    ConfigError for invalid overrides.
    """
    key = "from" if is_new else "checkpoint"
    given, known = flat(config.model_dump()), flat(stored)
    if broken := sorted(GROUPS.keys() & known.keys()):
        reason = f"its stored {broken[0]} must be a group of settings"
        raise CheckpointError(key, found, reason, f"use another {key}")
    before = given | {
        name: known[name] for name in given.keys() & known.keys() if not is_of(name, OF_THE_LAUNCH)
    }
    path = before["data.path"]
    is_sample = isinstance(path, str) and Path(path).parts[-2:] == SAMPLE
    if is_sample and not Path(path).exists():  # the repository was moved
        before["data.path"] = str(REPOSITORY.joinpath(*SAMPLE))
    if is_new and before["data.tokenizer"] not in (*VOCABULARIES, TRAINED):
        before["data.tokenizer"] = found  # the run has a copy of the tokenizer
    merged = without_automatic(before) if is_new else before | dict.fromkeys(AUTOMATIC)
    groups = {key.partition(".")[0] for key in config.given}
    if is_new and "data" in groups:  # the prompts were passages of another text
        merged |= {key: None for key in PROMPTS if merged[key]}
    if is_new or config.name not in (None, Path(found).parent.parent.name):
        merged["wandb.name"] = None  # it is another run on W&B
    merged["wandb.group"] = given["wandb.group"] or before["wandb.group"]  # a sweep sets its own
    names = [*config.given, *GROUPS] if "experiment" in config.given else config.given
    named = {key: value for key, value in given.items() if is_of(key, names)}
    # wandb=online is meant for the mode only.
    defaults = flat({"wandb": WandbConfig.with_defaults().model_dump()})
    named = {
        key: value
        for key, value in named.items()
        if key in names or key == "wandb.mode" or value != defaults.get(key, ...)
    }
    merged |= named
    if is_new and named.get("trainer.max_minutes"):  # not the number that fitted into another time
        merged["trainer.max_steps"] = named.get("trainer.max_steps")
    result, problems = validate(Config, nested(merged))
    if problems and not any(problem.key in named for problem in problems):
        reason = format_problem(problems[0]._replace(hint=""))
        hint = f"give another {problems[0].key}, or use another {key}"
        raise CheckpointError(key, found, reason, hint)
    refuse(problems)
    changed = [
        f"{key}={shorten(as_yaml(value))} (was {shorten(as_yaml(before[key]))})"
        for key, value in merged.items()
        if value not in (before[key], UNLIMITED)
        and (value is not None or key not in (*AUTOMATIC, *PROMPTS))
    ]
    return result, changed


def without_automatic(settings: dict) -> dict:
    """Returns settings by dotted key, with null for those that have their automatic value: a run
    with another number of steps has others."""
    automatic, size = {}, settings["model.vocab_size"]
    if VOCABULARIES.get(settings["data.tokenizer"], size) == size:
        automatic["model.vocab_size"] = None
    for key in (*AUTOMATIC, "lens.every"):
        config, _ = validate(Config, nested(settings | {key: None}))
        for on_gpu in (False, True) if config else ():
            values = flat(with_automatic_values(config, on_gpu=on_gpu).model_dump())
            if values[key] == settings[key]:
                automatic[key] = None
    return settings | automatic


def is_of(key: str, names: Collection[str]) -> bool:
    """Returns whether `names` contains this setting or its group."""
    return key in names or key.partition(".")[0] in names


def different_settings(settings: dict, of_rank_0: dict, rank: int) -> list[Problem]:
    """Returns a problem for each setting of this rank that differs from rank 0."""
    theirs, hint = flat(of_rank_0), "start all ranks with the same settings"
    return [
        Problem(
            key, value, f"rank {rank} has this value, rank 0 has {as_yaml(theirs.get(key))}", hint
        )
        for key, value in flat(settings).items()
        if key not in OF_ONE_RANK and value != theirs.get(key)
    ]
