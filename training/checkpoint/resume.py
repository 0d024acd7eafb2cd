"""Where a run starts: new, from its own checkpoint, or as a branch of another run.

Nothing here changes anything on disk except for locking the run directory.
"""

import contextlib
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from errors import CheckpointError, Problem, as_yaml, refuse
from training.checkpoint import format as checkpoint
from training.checkpoint import listing
from training.checkpoint.format import State
from training.checkpoint.run_directory import has_other_files, lock_directory, settings_of
from training.config.stored import OF_THE_MACHINE, complete, different_settings, resolve_auto
from training.config.yaml_files import flat
from training.distributed.launch import launch_command
from training.distributed.strategy import Strategy

if TYPE_CHECKING:
    from training.config.schema import Config

# Part of a model's tensors: no override makes the weights of a checkpoint fit another one.
FIXED_BY_WEIGHTS = {
    f"model.{key}" for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "qkv_bias")
}
# What may differ between a run and its continuation without changing what is computed: groups, and
# settings of other groups. A new setting is not free to change until it is listed.
FREE_TRAINER_SETTINGS = (
    *("max_steps", "micro_batch_size", "activation_checkpointing", "compile", "device", "profile"),
    *("eval_every", "eval_windows", "log_every", "save_every", "keep_checkpoints", "sample_prompt"),
    *("sample_tokens", "on_nonfinite", "max_skips", "resume", "resume_override", "init_from"),
)
FREE_TO_CHANGE = {
    *("name", "debug", "runs_dir", "parallel", "lens", "wandb", "model.attention"),
    *("data.path", "data.val_path", "data.verify"),  # what is there is compared by its checksums
    *(f"trainer.{key}" for key in FREE_TRAINER_SETTINGS),
}


@dataclass
class Start:
    """What a run starts from. The same on all ranks."""

    checkpoint: Path | None = None  # None: a new run
    state: State | None = None  # of that checkpoint
    in_place: bool = False  # whether its run continues in its own directory; else this is a branch
    locked: Path | None = None  # the run directory, where rank 0 has locked it already


def resume_settings(
    config: "Config", strategy: Strategy, notes: list[str]
) -> tuple["Config", bool]:
    """(The settings, whether they are those of the run that trainer.resume names, on top of which
    come those of the command line.) On all ranks; rank 0 reads the run."""
    stored = strategy.broadcast(strategy.on_rank_0(lambda: stored_settings(config)))
    if not stored:
        return config, False
    changed = []
    with strategy.raise_on_all_ranks():
        if config.overrides is not None:  # else `check_same_settings` refuses this rank's settings
            config, changed = complete(config, *stored)
    if changed:
        notes.append(f"settings from {stored[0]}, overridden: {', '.join(changed)}")
    return config, True


def check_same_settings(config: "Config", strategy: Strategy) -> None:
    """Raises ConfigError on all ranks where they were started with different settings."""
    mine = json.loads(json.dumps(config.model_dump()))
    of_rank_0 = strategy.broadcast(mine)
    with strategy.raise_on_all_ranks():
        refuse(different_settings(mine, of_rank_0, strategy.rank))


def find_start(
    config: "Config", strategy: Strategy, closing: contextlib.ExitStack, notes: list[str]
) -> Start:
    """What the run starts from. Rank 0 finds it, and locks the run directory if there is one until
    `closing` is closed.

    Settings that follow from others (warmup_steps=null) become those of the checkpoint, or are
    chosen. Raises ConfigError for settings that would make it another run.
    """
    locked = None

    def find() -> tuple[str, dict, bool] | None:
        nonlocal locked
        own = own_directory(config)
        # A run that has checkpoints needs no other files.
        if own and own.is_dir() and (listing.has_checkpoint(own) or not has_other_files(own)):
            closing.enter_context(lock_directory(own))  # no other process changes it from here on
            locked = own
        if (found := find_resume_checkpoint(config)) is None:
            return None
        return str(found), asdict(checkpoint.load_state(found)), is_in_place(found, config)

    # Other ranks may not see the directory.
    shared = strategy.broadcast(strategy.on_rank_0(find))
    if shared is None:
        resolve_auto(config)
        return Start(locked=locked)
    found, values, in_place = shared
    state = State.from_values(values)
    resolve_auto(config, state.settings)
    source = own_directory(config) if in_place and config.name else config.trainer.resume
    problems = changed_settings(state.settings, config.model_dump(), source)
    if config.trainer.resume_override:
        notes += [f"{key}={value}: {reason}" for key, value, reason, _ in problems]
        problems = [problem for problem in problems if problem.key in FIXED_BY_WEIGHTS]
    if not in_place and state.step >= config.trainer.max_steps:
        reason = f"{found} is of step {state.step}, nothing is left to train"
        hint = "a new run from it needs more steps"
        problems.append(Problem("trainer.max_steps", config.trainer.max_steps, reason, hint))
    with strategy.raise_on_all_ranks():
        refuse(problems)
    return Start(Path(found), state, in_place, locked)


def own_directory(config: "Config") -> Path | None:
    """The run directory that the settings name; None for a new one, named by the clock."""
    if config.name:
        return Path(config.runs_dir) / config.name
    if (resume := config.trainer.resume) in ("auto", "must", False):
        return None
    path = Path(resume)
    if listing.is_checkpoint(path):
        return listing.run_directory_of(path.resolve())
    return path if listing.has_checkpoint(path) else None


def is_in_place(found: Path, config: "Config") -> bool:
    """Whether a checkpoint belongs to the run directory that the settings name."""
    own = own_directory(config)
    # Either may be a link to another disk.
    return own is not None and found.resolve().parent == (own / "checkpoints").resolve()


def stored_settings(config: "Config") -> tuple[str, dict] | None:
    """(Checkpoint, its settings) of the run that trainer.resume names; None where it names none.

    Raises CheckpointError when there is no checkpoint, or its settings cannot be read.
    """
    if config.overrides is None:
        return None
    path, own = config.trainer.resume, own_directory(config)
    if own and is_branch_of(own, path):
        path = own
    # Damage is reported when the checkpoint itself is read.
    found = listing.find_checkpoint(
        path, "trainer.resume", (checkpoint.STATE,), warn=lambda line: None
    )
    return str(found), checkpoint.load_state(found).settings


def find_resume_checkpoint(config: "Config") -> Path | None:
    """The checkpoint to resume; None for a new run. Damaged checkpoints of a run are skipped.

    trainer.resume=auto: resume when the run has a checkpoint. must: it has to have one. false: the
    run must not exist. A path: resume that one, in place or as a branch. Raises ConfigError,
    CheckpointError when no checkpoint can be read.
    """
    resume, run = config.trainer.resume, own_directory(config) if config.name else None
    has_any = run is not None and listing.has_checkpoint(run)
    if resume is False and (has_any or (run and settings_of(run))):
        hint = "give another name, or trainer.resume=auto to continue it"
        refuse([Problem("name", config.name, f"{run} holds a run", hint)])
    if has_any and (resume in ("auto", "must") or is_branch_of(run, resume)):
        return listing.find_checkpoint(run, "name", checkpoint.FILES)
    if resume == "must":
        hint = "give the name= of a run that has a checkpoint, or trainer.resume=auto"
        refuse([Problem("trainer.resume", "must", "there is nothing to resume", hint)])
    found = None
    if resume not in ("auto", False):
        found = find_named_checkpoint(resume)
        if is_in_place(found, config):
            check_is_newest(found, resume)
            return found
        if has_any:
            hint = f"trainer.resume={run} continues it, or give a new name"
            refuse([Problem("name", config.name, f"{run} holds another run", hint)])
    if run:
        check_directory(run, config)
    return found


def find_named_checkpoint(resume: str) -> Path:
    """The checkpoint that trainer.resume=PATH means."""
    path = Path(resume).resolve()
    is_copy = listing.is_checkpoint(path) and listing.run_directory_of(path) is None
    if is_copy and not (path / checkpoint.OPTIMIZER).exists():
        reason = f"has no {checkpoint.OPTIMIZER}, like a model from W&B"
        hint = f"{shlex.quote(f'trainer.init_from={resume}')} starts a new run with its weights"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    return listing.find_checkpoint(resume, "trainer.resume", checkpoint.FILES)


def is_branch_of(run: Path, resume: str) -> bool:
    """Whether a run with checkpoints began as a branch of what trainer.resume names: it continues
    when the same command is rerun, as Slurm does after a requeue."""
    if not listing.has_checkpoint(run):
        return False
    trainer = (settings_of(run) or settings_of_newest(run)).get("trainer")
    return isinstance(trainer, dict) and trainer.get("resume") == resume


def settings_of_newest(run: Path) -> dict:
    """The settings of the newest checkpoint whose state can be read; empty without one."""
    for folder in listing.list_checkpoints(run):
        with contextlib.suppress(CheckpointError):
            return dict(checkpoint.load_state(folder).settings)
    return {}


def check_is_newest(found: Path, resume: str) -> None:
    """Refuses to resume in place from a checkpoint that is named and not the newest: what the run
    did since would be overwritten."""
    newest = listing.newest_step(run := listing.run_directory_of(found))
    if listing.is_checkpoint(Path(resume)) and listing.step_of(found) < newest:
        reason = f"{run} has a newer checkpoint, of step {newest}"
        hint = "give name=NEW to branch off there, or resume the run itself"
        refuse([Problem("trainer.resume", resume, reason, hint)])


def check_directory(run: Path, config: "Config") -> None:
    """Refuses a directory for a new run that holds something else, or a run of other settings that
    has no checkpoint yet. The same run is started again there."""
    if has_other_files(run):
        reason = f"{run} holds something other than a run"
        refuse([Problem("name", run.name, reason, "give another name")])
    if (before := settings_of(run)) is None:
        return
    now = config.model_dump()
    if config.trainer.warmup_steps is None:  # follows from others
        del now["trainer"]["warmup_steps"]
    hint = f"give another name, or remove {run}"
    problems = changed_settings(before, now, run)
    refuse([p._replace(reason=f"{p.reason}, and has no checkpoint", hint=hint) for p in problems])


def changed_settings(saved: dict, now: dict, run: object) -> list[Problem]:
    """A problem for each setting that would make the resumed run another one."""
    problems = []
    saved = flat(saved)
    saved.setdefault("optimizer.name", "adamw")  # of checkpoints from before there was a choice
    for key, value in flat(now).items():
        # A setting that the checkpoint does not have came later and left things as they were.
        is_free = FREE_TO_CHANGE & {key, key.partition(".")[0]}
        if is_free or key not in saved or value == saved[key]:
            continue
        hint = f"use {key}={as_yaml(saved[key])}, or start a new run with another name="
        if key not in FIXED_BY_WEIGHTS:
            hint += ", or trainer.resume_override=true to continue anyway"
        problems.append(Problem(key, value, f"{run} was trained with {as_yaml(saved[key])}", hint))
    return problems


def resume_command(directory: Path, is_saved: bool = False) -> str:
    """How to resume a run after a stop: "resume with: COMMAND", or the setting that continues the
    sweep that the run is a job of.

    is_saved: whether the checkpoint has the settings of this command; then only those of this
    machine are repeated.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        folder = shlex.quote(f"hydra.sweep.dir={HydraConfig.get().sweep.dir}")
        return f"run the sweep again with {folder}"
    kept = []
    for text in sys.argv[1:]:
        key = text.lstrip("+-")
        of_the_machine = "=" not in text or key.startswith(("config-dir=", *OF_THE_MACHINE))
        if of_the_machine or not (is_saved or key.startswith("trainer.resume=")):
            kept.append(text)
    command = [*launch_command(), sys.argv[0], *kept, f"trainer.resume={directory}"]
    return f"resume with: {shlex.join(command)}"
