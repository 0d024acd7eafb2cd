"""The rules of resuming, for run/start.py: from which checkpoint, and what may change. The command
that resumes a run after it stopped."""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from attention import SCORES
from clearhead.checkpoint import listing
from clearhead.checkpoint.format import FILES, FORMAT, State, load_state
from clearhead.checkpoint.run_directory import summarized_step
from clearhead.config.application import is_in_sweep, override
from clearhead.config.automatic import AUTOMATIC
from clearhead.config.schema import Config
from clearhead.config.stored import (
    ADDED,
    OF_THE_LAUNCH,
    OF_THE_MACHINE,
    PROMPTS,
    dropped_settings,
    is_of,
    names_run,
    settings_of,
)
from clearhead.config.validation import validate
from clearhead.config.yaml_files import flat, nested
from clearhead.errors import CheckpointError, Problem, as_yaml, format_problem, refuse, shorten
from clearhead.parallel.launch import launch_command
from clearhead.parallel.strategy import Strategy
from clearhead.tokens import TRAINED, VOCABULARIES

# A resumed run keeps these settings and groups, which determine its weights, its optimizer state
# and the order of its data. All others may be changed. The tokens are compared by checksum.
FIXED = {"seed", "data", "optimizer.name", "trainer.batch_size", "trainer.save_at_words"}
FIXED |= {
    f"model.{key}"
    for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "num_heads", "qkv_bias")
}

# Changes of these are not reported. A sweep sets wandb.group to the name of its directory.
MAY_DIFFER = (*OF_THE_LAUNCH, "data.path", "data.val_path", "wandb.group")


@dataclass
class ResumePoint:
    """The checkpoint from which a run is resumed."""

    folder: Path
    state: State
    was_finished: bool  # no step is left, and summary.json was written after the last


def find_resume_point(config: Config, strategy: Strategy) -> ResumePoint | None:
    """Returns the newest intact checkpoint of the run that the settings name, None for a new run.
    On all ranks; rank 0 reads the run directory, to which the others may have no access. Raises
    ConfigError, or CheckpointError if no checkpoint can be read."""

    def find() -> tuple[str, dict, int | None] | None:
        run = Path(config.runs_dir, config.name) if config.name else None
        if not is_resumed(run, config):
            return None
        path = run
        if names_run(resume := config.trainer.resume) and listing.is_checkpoint(Path(resume)):
            path = Path(resume)
        folder = listing.find_checkpoint(path, "name", FILES)
        if path != run and listing.step_of(folder) < (newest := listing.newest_step(run)):
            # Resuming would overwrite later steps.
            reason = f"{run} has a newer checkpoint (step {newest})"
            hint = f"use trainer.resume={run}, or a new run with trainer.init_from={folder}"
            refuse([Problem("trainer.resume", folder, reason, hint)])
        return str(folder), asdict(load_state(folder)), summarized_step(run)

    found = strategy.broadcast(strategy.on_rank_0(find))
    if found is None:
        return None
    folder, values, summarized = found
    state = State.from_values(values)
    was_finished = state.has_ended(config.trainer) and state.step == summarized
    return ResumePoint(Path(folder), state, was_finished)


def is_resumed(run: Path | None, config: Config) -> bool:
    """Returns whether a run is resumed. run: the directory of a run with a name.

    trainer.resume=auto resumes if the run has a checkpoint; must and a path require one; false
    requires that the run does not exist. Raises ConfigError, also if the directory of a new run
    contains something else.
    """
    resume, has_any = config.trainer.resume, run is not None and listing.has_checkpoint(run)
    if resume is False and run and listing.is_run(run):
        hint = "use another name, or trainer.resume=auto to resume it"
        refuse([Problem("name", config.name, f"{run} already contains a run", hint)])
    if not has_any and resume not in ("auto", False):
        hint = "set name= to a run with a checkpoint, or use trainer.resume=auto"
        if names_run(resume):
            hint = "rerun the command that started it, without trainer.resume"
        reason = f"{run} has no checkpoint" if run else "name is not set"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    if run and not has_any:
        if listing.has_other_files(run):
            reason = f"{run} contains files that do not belong to a run"
            refuse([Problem("name", run.name, reason, "use another name")])
        # A run that has no checkpoint yet starts again, from step 0.
        problems = changed_settings(settings_of(run) or {}, config.model_dump(), run)
        hint = f"use another name, or remove {run}"
        refuse([p._replace(reason=f"{p.reason} before", hint=hint) for p in problems])
    return has_any


def settings_to_resume(
    point: ResumePoint, config: Config, strategy: Strategy, notes: list[str]
) -> Config:
    """Returns the config with the values of the checkpoint for settings that are null. Appends a
    note about settings that have changed. Raises ConfigError if they must not change, and
    CheckpointError if stored values are not valid.

    In a sweep, no setting may change: its table would have results of other settings."""
    saved, now = flat(point.state.settings), flat(config.model_dump())
    now |= {key: value for key, value in ADDED.items() if key not in saved}
    steps = ["trainer.max_steps"] * (not now["trainer.max_minutes"])  # with trainer.save_at_words
    for key in ("model.vocab_size", *AUTOMATIC, *PROMPTS, *steps):
        # Not the 0 of a lens that was off, nor the empty list of one without prompts.
        if now[key] is None and (saved.get(key) or not key.startswith("lens.")):
            now[key] = saved.get(key)
    config, problems = validate(Config, nested(now))
    if problems:
        reason, hint = format_problem(problems[0]._replace(hint="")), f"give {problems[0].key}="
        raise CheckpointError("checkpoint", point.folder, reason, hint)
    run = Path(config.runs_dir, config.name)
    with strategy.raise_on_all_ranks():
        below = [] if point.was_finished else point.state.exceeded_limits(config.trainer)
        refuse(dropped_settings(saved, run) + changed_settings(saved, now, run) + below)
        limit, key = config.trainer.max_minutes, "trainer.max_minutes"
        if point.state.format < FORMAT and limit and saved.get(key):
            reason = f"version 3, which trained {run}, did not store the used time"
            refuse([Problem(key, limit, reason, f"use {key}=null, or version 3")])
    changes = {
        key: (value, saved[key])
        for key, value in now.items()
        if value not in ("auto", saved.get(key, value)) and not is_of(key, MAY_DIFFER)
    }
    if is_in_sweep():
        hint = "use another name or hydra.sweep.dir, or rerun the command that started the sweep"
        reason = f"{run} was trained with "
        refuse([Problem(k, new, reason + as_yaml(old), hint) for k, (new, old) in changes.items()])
    named = [
        f"{key}={shorten(as_yaml(new))} (was {shorten(as_yaml(old))})"
        for key, (new, old) in changes.items()
    ]
    if named and point.was_finished:
        notes.append(f"not used, because the run has finished: {', '.join(named)}")
    elif named:
        notes.append(f"resuming with other settings than before: {', '.join(named)}")
    return config


def changed_settings(saved: dict, now: dict, run: object) -> list[Problem]:
    """Returns a problem for each setting that must not differ from the saved one."""
    saved, now = flat(saved), flat(now)  # flat also accepts flat settings
    # A setting that is not in the checkpoint was added later; it is not compared.
    changed = {key: value for key, value in now.items() if value != saved.get(key, value)}
    kernels = {saved.get("model.attention"), now.get("model.attention")}
    fixed = FIXED | ({"model.attention"} if kernels & SCORES.keys() else set())
    changed = {
        key: value
        for key, value in changed.items()
        if is_of(key, fixed) and key not in ("data.path", "data.val_path")
    }
    if not {s.get("data.tokenizer") for s in (saved, now)} & {*VOCABULARIES, TRAINED}:
        changed.pop("data.tokenizer", None)  # of two directories, the tokenizers are compared
    if "data.tokenizer" in changed or now.get("model.vocab_size") is None:
        changed.pop("model.vocab_size", None)  # it follows
    other = "or start a new run with another name"
    return [
        Problem(key, value, f"{run} was trained with {before}", f"use {key}={before}, {other}")
        for key, value, before in ((k, v, as_yaml(saved[k])) for k, v in changed.items())
    ]


def longer(config: Config, state: State) -> str:
    """Returns the settings with which a finished run trains further."""
    trainer, changes = config.trainer, []
    if trainer.max_steps and state.step >= trainer.max_steps:
        changes.append(f"trainer.max_steps above {state.step}")
    if state.used_time(trainer) >= 1:
        changes.append(f"trainer.max_minutes above {state.minutes:g}")
    if state.should_stop_early(trainer):
        changes.append("a larger trainer.patience, or trainer.patience=null")
    return " and ".join(changes)


def resume_command(directory: Path) -> str:
    """Returns how to resume a run after it stopped: "resume with: COMMAND", for a job of a sweep
    how to resume the sweep, and in a notebook or a program of the user the expression.

    The command contains the settings of this machine; the others are in the run directory.
    """
    overrides = [override("trainer.resume", directory)]
    if is_in_sweep():
        folder = shlex.quote(f"hydra.sweep.dir={HydraConfig.get().sweep.dir}")
        return f"rerun the same command with {folder}"
    if Path(sys.argv[0]).stem != "train":
        return f"resume with: fit(build_run(compose({overrides})))"
    of_machine = ("config-dir=", *OF_THE_MACHINE)
    kept = [t for t in sys.argv[1:] if "=" not in t or t.lstrip("+-").startswith(of_machine)]
    command = [*launch_command(), sys.argv[0], *kept, *overrides]
    return f"resume with: {shlex.join(command)}"
