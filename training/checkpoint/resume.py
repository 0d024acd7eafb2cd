"""How a run begins: new, from a checkpoint of its own or another's, or from given weights.

Nothing here changes anything on disk. What does not fit comes back as a list of problems, each
(key, value, reason, hint), and the caller refuses it (see training/config/schema.py).
"""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml

from errors import Problem
from interop.huggingface import load_reader
from model import GPT, ModelConfig
from training.checkpoint import format as checkpoint
from training.checkpoint.run_directory import (
    RUNS,
    is_occupied,
    name_before_restart,
    settings_of,
    was_cut_off,
)

if TYPE_CHECKING:
    from training.config.schema import Settings

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "model"
# Of a model, what its weights have to have; for positions there is a rule.
SHAPE = ("vocab_size", "emb_dim", "num_heads", "num_layers", "qkv_bias")
# Part of a model's tensors: no override makes the weights of a checkpoint fit another one.
FIXED = {
    f"model.{key}" for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "qkv_bias")
}
OVERRIDE = "trainer.resume_override=true to continue anyway"
# What may differ between a run and its continuation without changing what is computed.
FREE_TO_CHANGE = {
    "name",
    "debug",
    "parallel",
    "lens",
    "wandb",
    "model.attention",
    "data.path",  # what is there is compared by its checksums
    "data.val_path",
    "data.verify",
    "trainer.max_steps",
    "trainer.micro_batch_size",
    "trainer.activation_checkpointing",
    "trainer.eval_every",
    "trainer.eval_windows",
    "trainer.log_every",
    "trainer.save_every",
    "trainer.keep",
    "trainer.compile",
    "trainer.device",
    "trainer.profile",
    "trainer.resume",
    "trainer.resume_override",
    "trainer.on_nonfinite",
    "trainer.max_skips",
    "trainer.init_from",
    "trainer.sample_prompt",
    "trainer.sample_tokens",
}

# What older checkpoints were trained with and do not say.
BEFORE_THERE_WAS_A_CHOICE = {"optimizer": {"name": "adamw"}}


def own_directory(settings: "Settings") -> Path | None:
    """The directory that this start will write to, None for a new one named by the clock."""
    if name := settings.name or name_before_restart():
        return RUNS / name
    if (resume := settings.trainer.resume) in ("auto", "must", False):
        return None
    path = Path(resume)
    if checkpoint.is_checkpoint(path):
        return checkpoint.run_of(path.resolve())
    return path if checkpoint.has_checkpoint(path) else None


def goes_on(found: Path | None, settings: "Settings") -> bool:
    """Whether the run of a checkpoint goes on where it is; else this is a branch, or a new run."""
    own = own_directory(settings)
    if found is None or own is None:
        return False
    # Either may be a link to another disk.
    return found.resolve().parent == (own / "checkpoints").resolve()


def stored_settings(settings: "Settings") -> tuple[str, dict] | None:
    """(Checkpoint, its settings) of the run that trainer.resume names; None where it names none.

    Raises CheckpointError when there is no checkpoint, or its settings cannot be read.
    """
    if settings.overrides is None:
        return None
    name = settings.name or name_before_restart()
    run = RUNS / name if name else None
    restarted = run is not None and was_cut_off(run) and checkpoint.has_checkpoint(run)
    path = run if restarted else settings.trainer.resume
    # Damage is reported when the checkpoint itself is read.
    found = checkpoint.find(path, "trainer.resume", (checkpoint.STATE,), warn=lambda line: None)
    stored = checkpoint.load_state(found).settings
    for group, values in BEFORE_THERE_WAS_A_CHOICE.items():
        if isinstance(stored.get(group), dict):
            stored[group] = values | stored[group]
    return str(found), stored


def find_checkpoint(settings: "Settings") -> tuple[Path | None, list["Problem"]]:
    """The checkpoint to go on from, None for a new run, and what is wrong with the wish.

    trainer.resume=auto: go on when runs/<name> has a checkpoint. must: it has to have one.
    false: there must be no such run. A path: that one. Of a run, damaged checkpoints are passed
    over. Raises CheckpointError when none can be read.
    """
    resume, name = settings.trainer.resume, settings.name or name_before_restart()
    run = RUNS / name if name else None
    has_any = run is not None and checkpoint.has_checkpoint(run)
    if run and was_cut_off(run) and (has_any or resume in ("must", False)):
        resume = "auto"  # a path was the beginning of this run
    if resume not in ("auto", "must", False):
        path = Path(resume).resolve()
        is_copy = checkpoint.is_checkpoint(path) and checkpoint.run_of(path) is None
        if is_copy and not (path / checkpoint.OPTIMIZER).exists():
            cause = f"has no {checkpoint.OPTIMIZER}, as a model from W&B"
            fix = f"{shlex.quote(f'trainer.init_from={resume}')} begins a new run with its weights"
            return None, [("trainer.resume", resume, cause, fix)]
        found = checkpoint.find(resume, "trainer.resume", checkpoint.FILES)
        if not goes_on(found, settings):
            if not has_any:
                return found, holds_another(run, settings)
            fix = f"trainer.resume={run} continues it, or give a new name"
            return None, [("name", name, f"{run} holds a run of its own", fix)]
        # Of a run that is named, the newest usable checkpoint was found.
        return found, going_back(found, settings) if checkpoint.is_checkpoint(Path(resume)) else []
    if resume is False and (has_any or (run and settings_of(run))):
        fix = "give another name, or trainer.resume=auto to go on"
        return None, [("name", name, f"{run} holds a run", fix)]
    if has_any:
        return checkpoint.find(run, "name", checkpoint.FILES), []
    if resume == "must":
        fix = "give the name= of a run that has a checkpoint, or trainer.resume=auto"
        return None, [("trainer.resume", "must", "there is nothing to resume", fix)]
    return None, holds_another(run, settings)


def holds_another(run: Path | None, settings: "Settings") -> list["Problem"]:
    """What is in the way where a run is to begin: another that came to no checkpoint yet, or
    something that is no run at all. The same one, begun again, is written over."""
    if run is None or was_cut_off(run):
        return []
    if is_occupied(run):
        return [("name", run.name, f"{run} holds something else than a run", "give another name")]
    if (before := settings_of(run)) is None:
        return []
    now = asdict(settings)
    if settings.trainer.warmup_steps is None:  # follows from others
        del now["trainer"]["warmup_steps"]
    found = changed_settings(before, now, run)
    fix = f"give another name, or remove {run}"
    return [(key, value, f"{cause}, and has no checkpoint", fix) for key, value, cause, _ in found]


def going_back(found: Path, settings: "Settings") -> list["Problem"]:
    """The problem of going on, in place, from a checkpoint that is not its run's newest.

    It would overwrite what the run did since.
    """
    run = checkpoint.run_of(found)
    newest = checkpoint.newest_step(run)
    if checkpoint.load_state(found).step >= newest:
        return []
    cause = f"{run} has gone on to step {newest}"
    fix = "give name=NEW to branch off there, or resume the run itself"
    return [("trainer.resume", settings.trainer.resume, cause, fix)]


def changed_settings(saved: dict, now: dict, run: Path) -> list["Problem"]:
    """A problem for each setting that would make the continuation another run."""
    problems = []
    for group, values in now.items():
        if group in FREE_TO_CHANGE:
            continue
        if not isinstance(values, dict):
            pairs = [(group, values, saved.get(group))]
        else:
            before = saved.get(group) if isinstance(saved.get(group), dict) else {}
            # A setting that the checkpoint does not know came later, and left things as they were.
            before = BEFORE_THERE_WAS_A_CHOICE.get(group, {}) | before
            known = {key: value for key, value in values.items() if key in before}
            pairs = [(f"{group}.{key}", value, before[key]) for key, value in known.items()]
        for key, value, before in pairs:
            if key not in FREE_TO_CHANGE and value != before:
                cause = f"{run} was trained with {before}"
                as_typed = "null" if before is None else before
                fix = f"use {key}={as_typed}, or start a new run with another name="
                if key not in FIXED:
                    fix += f", or {OVERRIDE}"
                problems.append((key, value, cause, fix))
    return problems


def initial_weights(settings: "Settings") -> tuple[GPT | None, list["Problem"], list[str]]:
    """A model with the weights of trainer.init_from, what does not fit the settings, and what
    there is to know.

    Dropout and the kernel are this run's choice; the weights fit all of them. Biases of queries,
    keys and values that the weights lack begin as zeros; for positions see `positions`.
    """
    source, wanted = settings.trainer.init_from, settings.model
    reader = load_reader(source, "trainer.init_from")
    given, theirs = reader.model.config, f"the weights of trainer.init_from={source}"
    differing = {key for key in SHAPE if getattr(given, key) != getattr(wanted, key)}
    if wanted.qkv_bias:
        differing.discard("qkv_bias")
    preset = preset_like(given) if len(differing) > 1 else None
    problems = []
    for key in SHAPE:
        if key in differing:
            have = str(getattr(given, key)).lower()
            fix = f"use model={preset}" if preset else f"use model.{key}={have}"
            cause = f"{theirs} have {have}"
            problems.append((f"model.{key}", getattr(wanted, key), cause, fix))
    if (name := settings.data.tokenizer) != (needed := reader.tokenizer_name):
        cause = f"{theirs} were trained with {needed}"
        problems.append(("data.tokenizer", name, cause, f"use data.tokenizer={needed}"))
    if problems:
        return None, problems, []
    weights = reader.model.state_dict()
    weights["pos_emb.weight"], notes = positions(
        weights["pos_emb.weight"], reader.window, wanted.context_length, settings.data.max_length
    )
    with torch.device("meta"):  # nothing is held twice
        fresh = GPT(wanted)
    for name, parameter in fresh.named_parameters():
        if name not in weights:  # a bias
            weights[name] = torch.zeros(parameter.shape)
    fresh.load_state_dict(weights, assign=True)
    return fresh, [], notes


def positions(
    learned: torch.Tensor, window: int, context_length: int, used: int
) -> tuple[torch.Tensor, list[str]]:
    """Position vectors (context_length, C) from a model's (S, C), of which `window` have learned
    something; and what there is to know, when the run will use `used` of them.

    A shorter context has the first of them. A longer one has the learned ones again and again, as
    Longformer's began (Beltagy et al. 2020): near positions then look as they did.
    """
    rows = learned[torch.arange(context_length) % window]
    known = f"the weights know {window} positions"
    if context_length < window:
        return rows, [f"model.context_length={context_length}: {known}; the first are taken"]
    if used > window or len(learned) != context_length > window:
        again = f"position {window} begins as position 0, and so on"
        within = f"data.max_length={window} stays within them"
        return rows, [f"model.context_length={context_length}: {known}; {again}; {within}"]
    return rows, []


def preset_like(config: ModelConfig) -> str | None:
    """The model=NAME of configs/ whose weights have these shapes, but for the context length."""
    for file in sorted(PRESETS.glob("*.yaml")):
        preset = yaml.safe_load(file.read_text(encoding="utf-8"))
        if all(preset[key] == getattr(config, key) for key in SHAPE):
            return file.stem
    return None
