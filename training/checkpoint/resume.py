"""Where a run starts: new, from its own checkpoint, or as a branch of another run.

Nothing here changes anything on disk except for locking the run directory.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from errors import Problem, refuse, show
from training.checkpoint import format as checkpoint
from training.checkpoint import listing
from training.checkpoint.format import State
from training.checkpoint.run_directory import is_occupied, settings_of
from training.config.stored import OF_THE_MACHINE, complete, different_settings, resolve_auto
from training.config.yaml_files import flat
from training.distributed.launch import launch_command
from training.distributed.strategy import Strategy

if TYPE_CHECKING:
    from training.config.schema import Config

# Part of a model's tensors: no override makes the weights of a checkpoint fit another one.
FIXED = {
    f"model.{key}" for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "qkv_bias")
}
OVERRIDE = "trainer.resume_override=true to continue anyway"
# What may differ between a run and its continuation without changing what is computed.
FREE_TO_CHANGE = {
    "name",
    "debug",
    "runs_dir",
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
    if not stored or config.overrides is None:
        return config, bool(stored)
    with strategy.raise_on_all_ranks():
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
    config: "Config", strategy: Strategy, lock: Callable[[Path], None], notes: list[str]
) -> Start:
    """What the run starts from; rank 0 looks, and locks the run directory if there is one.

    Settings that follow from others (warmup_steps=null) become those of the checkpoint, or are
    chosen. Raises ConfigError for settings that would make it another run.
    """
    locked = None

    def look() -> tuple[str, dict, bool, str] | None:
        nonlocal locked
        own = own_directory(config)
        # A run that has checkpoints needs no other files.
        is_run = own and (listing.has_checkpoint(own) or not is_occupied(own))
        if is_run and own.is_dir():
            lock(own)  # no other process changes it from here on
            locked = own
        found, problems = find_checkpoint(config)
        refuse(problems)
        if not found:
            return None
        in_place = is_in_place(found, config)
        run = own if in_place else listing.run_of(found) or found
        return str(found), asdict(checkpoint.load_state(found)), in_place, str(run)

    # Other ranks may not see the directory.
    shared = strategy.broadcast(strategy.on_rank_0(look))
    found, values, in_place, run = shared or (None, None, False, None)
    state = State.from_values(values) if values else None
    resolve_auto(config, state.settings if state else {})
    if state is None:
        return Start(locked=locked)
    problems = changed_settings(state.settings, config.model_dump(), Path(run))
    if config.trainer.resume_override:
        notes += [f"{key}={value}: {reason}" for key, value, reason, _ in problems]
        problems = [problem for problem in problems if problem[0] in FIXED]
    if not in_place and state.step >= config.trainer.max_steps:
        reason = f"{found} is of step {state.step}, nothing is left to train"
        hint = "a new run from it needs more steps"
        problems.append(("trainer.max_steps", config.trainer.max_steps, reason, hint))
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
        return listing.run_of(path.resolve())
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
    if own and is_this_branch(own, path):
        path = own
    # Damage is reported when the checkpoint itself is read.
    found = listing.find(path, "trainer.resume", (checkpoint.STATE,), warn=lambda line: None)
    stored = checkpoint.load_state(found).settings
    for group, values in BEFORE_THERE_WAS_A_CHOICE.items():
        if isinstance(stored.get(group), dict):
            stored[group] = values | stored[group]
    return str(found), stored


def find_checkpoint(config: "Config") -> tuple[Path | None, list[Problem]]:
    """(The checkpoint to resume, None for a new run; problems with the settings).

    trainer.resume=auto: resume when the run has a checkpoint. must: it has to have one. false: the
    run must not exist. A path: resume that one. Damaged checkpoints of a run are skipped. Raises
    CheckpointError when none can be read.
    """
    resume, run = config.trainer.resume, config.name and own_directory(config)
    has_any = bool(run) and listing.has_checkpoint(run)
    if has_any and is_this_branch(run, resume):
        resume = "auto"
    if resume not in ("auto", "must", False):
        return _find_named(config, resume, run, has_any)
    if resume is False and (has_any or (run and settings_of(run))):
        hint = "give another name, or trainer.resume=auto to continue it"
        return None, [Problem("name", config.name, f"{run} holds a run", hint)]
    if has_any:
        return listing.find(run, "name", checkpoint.FILES), []
    if resume == "must":
        hint = "give the name= of a run that has a checkpoint, or trainer.resume=auto"
        return None, [Problem("trainer.resume", "must", "there is nothing to resume", hint)]
    return None, other_content(run, config)


def _find_named(
    config: "Config", resume: str, run: Path | None, has_any: bool
) -> tuple[Path | None, list[Problem]]:
    """find_checkpoint for trainer.resume=PATH: in place, or as a branch in the directory `run`."""
    path = Path(resume).resolve()
    is_copy = listing.is_checkpoint(path) and listing.run_of(path) is None
    if is_copy and not (path / checkpoint.OPTIMIZER).exists():
        reason = f"has no {checkpoint.OPTIMIZER}, like a model from W&B"
        hint = f"{shlex.quote(f'trainer.init_from={resume}')} starts a new run with its weights"
        return None, [Problem("trainer.resume", resume, reason, hint)]
    found = listing.find(resume, "trainer.resume", checkpoint.FILES)
    if is_in_place(found, config):
        return found, older_than_newest(found, config) if listing.is_checkpoint(path) else []
    if has_any:
        hint = f"trainer.resume={run} continues it, or give a new name"
        return None, [Problem("name", config.name, f"{run} holds another run", hint)]
    return found, other_content(run, config)


def is_this_branch(run: Path, resume: str | bool) -> bool:
    """Whether a run began as a branch of what trainer.resume names: it continues when the same
    command is rerun, as Slurm does after a requeue."""
    if not isinstance(resume, str) or resume in ("auto", "must"):
        return False
    trainer = (settings_of(run) or {}).get("trainer")
    began_so = isinstance(trainer, dict) and trainer.get("resume") == resume
    return began_so and listing.has_checkpoint(run)


def other_content(run: Path | None, config: "Config") -> list[Problem]:
    """The problem of a directory for a new run that holds something else, or a run of other
    settings that has no checkpoint yet. The same run is started again there."""
    if run is None:
        return []
    if is_occupied(run):
        reason = f"{run} holds something other than a run"
        return [Problem("name", run.name, reason, "give another name")]
    if (before := settings_of(run)) is None:
        return []
    now = config.model_dump()
    if config.trainer.warmup_steps is None:  # follows from others
        del now["trainer"]["warmup_steps"]
    hint = f"give another name, or remove {run}"
    return [
        problem._replace(reason=f"{problem.reason}, and has no checkpoint", hint=hint)
        for problem in changed_settings(before, now, run)
    ]


def older_than_newest(found: Path, config: "Config") -> list[Problem]:
    """The problem of resuming in place from a checkpoint that is not the newest: what the run did
    since would be overwritten."""
    run = listing.run_of(found)
    newest = listing.newest_step(run)
    if listing.step_of(found) >= newest:
        return []
    hint = "give name=NEW to branch off there, or resume the run itself"
    reason = f"{run} has a newer checkpoint, of step {newest}"
    return [Problem("trainer.resume", config.trainer.resume, reason, hint)]


def changed_settings(saved: dict, now: dict, run: Path) -> list[Problem]:
    """A problem for each setting that would make the resumed run another one."""
    problems = []
    saved, now = flat(BEFORE_THERE_WAS_A_CHOICE) | flat(saved), flat(now)
    for key, value in now.items():
        # A setting that the checkpoint does not have came later and left things as they were.
        is_free = key in FREE_TO_CHANGE or key.partition(".")[0] in FREE_TO_CHANGE
        if is_free or key not in saved or value == saved[key]:
            continue
        hint = f"use {key}={show(saved[key])}, or start a new run with another name="
        if key not in FIXED:
            hint += f", or {OVERRIDE}"
        problems.append(Problem(key, value, f"{run} was trained with {show(saved[key])}", hint))
    return problems


def resume_command(directory: Path, is_saved: bool = False) -> str:
    """How to resume a run after a stop: "resume with: COMMAND".

    is_saved: whether the checkpoint has the settings of this command; then only those of this
    machine are repeated.
    """
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        return "rerun this job's command"
    kept = []
    for text in sys.argv[1:]:
        key = text.lstrip("+-")
        of_the_machine = "=" not in text or key.startswith(("config-dir=", *OF_THE_MACHINE))
        if of_the_machine or not (is_saved or key.startswith("trainer.resume=")):
            kept.append(text)
    command = [*launch_command(), sys.argv[0], *kept, f"trainer.resume={directory}"]
    return f"resume with: {shlex.join(command)}"
