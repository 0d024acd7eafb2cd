"""Settings that follow from others, and the settings of an earlier run as the base of a new one.

Nothing that a run has stored is interpolated, imported or executed: its settings are plain values
that have to pass the schema.
"""

import copy
from pathlib import Path

from errors import (
    CheckpointError,
    Problem,
    format_problem,
    refuse,
    shorten,
    show,
)
from training.config.schema import (
    GROUPS,
    Config,
    Overrides,
    Rejected,
    Settings,
    flat,
    known_settings,
    validate,
)
from training.config.yaml_files import REPOSITORY, default_values

SAMPLE = ("corpus", "sample.txt")  # the text of data=sample
# Settings of one launch on one machine, and those that say which run it is. A run that is resumed
# by its path has all others from its checkpoint.
OF_THE_MACHINE = ("debug", "parallel", "trainer.device")
OF_THE_LAUNCH = (*OF_THE_MACHINE, "name", "runs_dir", "trainer.resume", "trainer.resume_override")
# They follow from other settings where they are null; a longer run keeps them: resolve_auto.
FOLLOWING = (
    "trainer.warmup_steps",
    "trainer.eval_every",
    "trainer.eval_windows",
    "trainer.log_every",
)
# What may differ between the ranks of a run. Data are compared by their checksums.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}


def resolve_auto(config: Config, before: dict | None = None) -> None:
    """Sets the settings that are null and follow from others.

    before: the settings of the run that is resumed, which keeps its values.
    """
    trainer, steps = config.trainer, config.trainer.max_steps
    before = {group: known for group, known in (before or {}).items() if isinstance(known, dict)}
    of_trainer, of_lens = before.get("trainer", {}), before.get("lens", {})
    # With 12 steps of warm-up the loss of GPT-2 small jumps by four nats (docs/benchmarks.md).
    _resolve(trainer, "warmup_steps", of_trainer, min(max(steps // 10, 24), 2000, steps // 5))
    _resolve(trainer, "eval_every", of_trainer, min(max(steps // 10, 40), 1000))
    # A validation window costs at most a third of a training window: below 1 % of the time, except
    # in the smallest runs, where fewer windows would tell too little.
    between = trainer.batch_size * (trainer.eval_every or steps)
    _resolve(trainer, "eval_windows", of_trainer, min(max(between * 2 // 100, 8), 400))
    _resolve(trainer, "log_every", of_trainer, max(steps // 500, 1))
    was_off = of_lens.get("every") == 0  # and now it is asked for
    _resolve(config.lens, "every", {} if was_off else of_lens, min(max(steps // 20, 40), 1000))


def _resolve(settings: Settings, key: str, before: dict, value: int) -> None:
    if getattr(settings, key) is None:
        setattr(settings, key, before[key] if type(before.get(key)) is int else value)


def config_from(values: dict, keys: list[str]) -> tuple[Config | None, list[Problem]]:
    """The config of composed plain values, and every problem.

    keys: settings and groups that the command line names. Where trainer.resume is a path, the
    result has the settings of this launch and its overrides, for `complete`: whether the others fit
    together is known once they are combined with those of the run.
    """
    trainer = values.get("trainer")
    resume = trainer.get("resume") if isinstance(trainer, dict) else None
    if not isinstance(resume, str) or resume in ("", "auto", "must"):
        return validate(Config, values)
    launch = default_values()
    for key in OF_THE_LAUNCH:
        copy_setting(key, values, launch)
    config, problems = validate(Config, launch)
    others = [p for p in validate(Config, values)[1] if not isinstance(p, Rejected)]
    if problems := others + [p for p in problems if p not in others]:
        return None, problems
    config._overrides = Overrides(values, keys)
    return config, []


def complete(config: Config, found: str, stored: dict) -> tuple[Config, list[str]]:
    """The stored settings of a run with the command line's on top, and which ones have changed.

    found, stored: as of `training.checkpoint.resume.stored_settings`. Unknown stored settings are
    ignored. Raises CheckpointError for stored values that cannot be used, ConfigError for what the
    command line makes of them.
    """
    overrides, own_run = config.overrides, Path(found).parent.parent
    base = _with_stored(overrides.values, found, stored)
    launch = config.model_dump()  # a sweep may have named its job there
    for key in OF_THE_LAUNCH:
        copy_setting(key, launch, base)
    merged = copy.deepcopy(base)
    for key in FOLLOWING:
        group, _, name = key.partition(".")
        merged[group][name] = None
    if config.name not in (None, own_run.name):  # a branch is another run on W&B
        merged["wandb"]["name"] = None
    merged["wandb"]["group"] = config.wandb.group or merged["wandb"]["group"]
    known = known_settings()
    named = [key for key in overrides.keys if key in known and key != "experiment"]
    if "experiment" in overrides.keys:
        named += GROUPS
    for key in named:
        copy_setting(key, overrides.values, merged)
    result, problems = validate(Config, merged)
    of_the_run = [p for p in problems if not any(f"{p.key}.".startswith(f"{k}.") for k in named)]
    if len(of_the_run) == len(problems) > 0:
        cause = format_problem(problems[0]._replace(hint=""))
        fix = f"give another {problems[0].key}, or use another checkpoint"
        raise CheckpointError("checkpoint", found, cause, fix)
    refuse(problems)
    before = flat(base)
    changed = [
        f"{key}={shorten(show(value))} (was {shorten(show(before.get(key)))})"
        for key, value in flat(merged).items()
        if value != before.get(key) and not (value is None and key in FOLLOWING)
    ]
    return result, changed


def _with_stored(values: dict, found: str, stored: dict) -> dict:
    """Plain values with the stored settings of a run on top."""
    base = copy.deepcopy(values)
    for key in base.keys() - GROUPS.keys():
        base[key] = stored.get(key, base[key])
    for group, schema in GROUPS.items():
        known = stored.get(group, {})
        if not isinstance(known, dict):
            cause = f"settings.{group} is not a group of settings"
            raise CheckpointError("checkpoint", found, cause, "use another checkpoint")
        base[group] |= {key: value for key, value in known.items() if key in schema.model_fields}
    path = base["data"]["path"]
    is_sample = isinstance(path, str) and Path(path).parts[-2:] == SAMPLE
    if is_sample and not Path(path).exists():  # the repository was in another folder
        base["data"]["path"] = str(REPOSITORY.joinpath(*SAMPLE))
    return base


def copy_setting(key: str, source: dict, target: dict) -> None:
    """Copies a setting (trainer.device) or a whole group (trainer) of plain values."""
    group, _, name = key.partition(".")
    if not name:
        target[group] = copy.deepcopy(source[group])
    elif name in source[group]:  # a file of the user's own may lack it
        target[group][name] = source[group][name]


def different_settings(settings: dict, of_rank_0: dict, rank: int) -> list[Problem]:
    """The problems of a rank that was started with other settings than rank 0; both plain."""
    theirs, fix = flat(of_rank_0), "start all ranks with the same settings"
    return [
        Problem(key, value, f"on rank {rank}, {show(theirs.get(key))} on rank 0", fix)
        for key, value in flat(settings).items()
        if key not in OF_ONE_RANK and value != theirs.get(key)
    ]
