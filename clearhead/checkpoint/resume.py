"""Decides how a run starts: as a new run, or resumed from its newest checkpoint.

The functions here write nothing to the run directory, except for its lock. Locking removes the
temporary files of killed processes.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from attention import SCORES
from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.format import State
from clearhead.checkpoint.run_directory import (
    has_other_files,
    lock_directory,
    settings_of,
    summarized_step,
)
from clearhead.config.automatic import AUTOMATIC
from clearhead.config.compose import override
from clearhead.config.job import is_in_sweep
from clearhead.config.schema import Config
from clearhead.config.stored import OF_THE_LAUNCH, OF_THE_MACHINE, PROMPTS, is_of, names_run
from clearhead.config.validation import validate
from clearhead.config.yaml_files import flat, nested
from clearhead.errors import CheckpointError, Problem, as_yaml, format_problem, refuse, shorten
from clearhead.parallel.launch import launch_command
from clearhead.parallel.strategy import Strategy
from clearhead.tokens import TRAINED, VOCABULARIES

# A resumed run keeps these settings and groups, which determine its weights, its optimizer state
# and the order of its data. All others may be changed. The tokens are compared by checksum.
FIXED = {"seed", "data", "optimizer.name", "trainer.batch_size"}
FIXED |= {
    f"model.{key}"
    for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "num_heads", "qkv_bias")
}
# Settings that may differ between the ranks of a run. Data are compared by checksum.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}


@dataclass
class Start:
    """How a run starts. The same on all ranks, except `locked`."""

    checkpoint: Path | None = None  # None: a new run
    state: State | None = None  # of the checkpoint
    locked: Path | None = None  # on rank 0: the run directory if it is locked already
    was_finished: bool = False  # True: no step is left, and summary.json was written after the last


def check_same_settings(config: Config, strategy: Strategy) -> None:
    """Raises ConfigError on all ranks if any rank has other settings than rank 0."""
    settings = json.loads(json.dumps(config.model_dump()))
    theirs = flat(strategy.broadcast(settings))
    hint = "start all ranks with the same settings"
    problems = [
        Problem(
            key,
            value,
            f"rank {strategy.rank} has this value, rank 0 has {as_yaml(theirs.get(key))}",
            hint,
        )
        for key, value in flat(settings).items()
        if key not in OF_ONE_RANK and value != theirs.get(key)
    ]
    with strategy.raise_on_all_ranks():
        refuse(problems)


def find_start(
    config: Config,
    strategy: Strategy,
    closing: contextlib.ExitStack,
    notes: list[str],
) -> tuple[Config, Start]:
    """Decides how the run starts. Rank 0 searches for a checkpoint and locks an existing run
    directory until `closing` is closed. Returns the config with the values of the checkpoint for
    settings that are null.

    Raises ConfigError if a setting differs that must be the same as in the checkpoint.
    """
    locked = None

    def find() -> tuple[str, dict, int | None] | None:
        nonlocal locked
        run = Path(config.runs_dir, config.name) if config.name else None
        # Settings files may be missing from a run with checkpoints.
        if run and run.is_dir() and (listing.has_checkpoint(run) or not has_other_files(run)):
            closing.enter_context(lock_directory(run))  # no other process can change it now
            locked = run
        if (found := find_resume_checkpoint(config, run)) is None:
            return None
        return str(found), asdict(checkpoint.load_state(found)), summarized_step(run)

    # Other ranks may have no access to the directory.
    shared = strategy.broadcast(strategy.on_rank_0(find))
    if shared is None:
        return config, Start(locked=locked)
    found, values, summarized = shared
    state = State.from_values(values)
    config = with_values_of(config, found, state.settings)
    run = Path(config.runs_dir, config.name)
    with strategy.raise_on_all_ranks():
        refuse(changed_settings(state.settings, config.model_dump(), run))
    if changes := other_changes(state.settings, config):
        notes.append(f"resuming with other settings than before: {', '.join(changes)}")
    was_finished = state.has_ended(config.trainer) and state.step == summarized
    return config, Start(Path(found), state, locked, was_finished)


def with_values_of(config: Config, found: str, stored: dict) -> Config:
    """Returns the config with the values of a checkpoint for settings that are null. Raises
    CheckpointError if they are not valid. A stored 0, as for a lens that was off, is not used.
    """
    known, now = flat(stored), flat(config.model_dump())
    for key in ("model.vocab_size", *AUTOMATIC, *PROMPTS):
        if now[key] is None and known.get(key):
            now[key] = known[key]
    complete, problems = validate(Config, nested(now))
    if problems:
        reason = format_problem(problems[0]._replace(hint=""))
        raise CheckpointError("checkpoint", found, reason, f"give another {problems[0].key}")
    return complete


def longer(config: Config, state: State) -> str:
    """Returns the settings with which a finished run trains further."""
    trainer, changes = config.trainer, []
    if trainer.max_steps and state.step >= trainer.max_steps:
        changes.append(f"trainer.max_steps above {state.step}")
    if state.used_time(trainer) >= 1:
        changes.append(f"trainer.max_minutes above {trainer.max_minutes:g}")
    if state.should_stop_early(trainer):
        changes.append("a larger trainer.patience, or trainer.patience=null")
    return " and ".join(changes)


def long_warmup(config: Config) -> list[str]:
    """Returns a note if most steps are warm-up, as with the settings of a longer run."""
    steps, warmup = config.trainer.max_steps, config.trainer.warmup_steps
    if steps is None or 2 * warmup <= steps:
        return []
    reason = f"the learning rate rises in most of the {steps:,} steps"
    return [f"trainer.warmup_steps={warmup}: {reason}; use fewer"]


def find_resume_checkpoint(config: Config, run: Path | None) -> Path | None:
    """Returns the checkpoint to resume; None for a new run. Skips damaged checkpoints.

    run: the directory of a run with a name. trainer.resume=auto resumes if the run has a
    checkpoint; must and a path require one; false requires that the run does not exist. Raises
    ConfigError, or CheckpointError if no checkpoint can be read.
    """
    resume = config.trainer.resume
    has_any = run is not None and listing.has_checkpoint(run)
    if resume is False and (has_any or (run and settings_of(run))):
        hint = "use another name, or trainer.resume=auto to resume it"
        refuse([Problem("name", config.name, f"{run} already contains a run", hint)])
    if not has_any and resume not in ("auto", False):
        hint = "set name= to a run with a checkpoint, or use trainer.resume=auto"
        reason = f"{run} has no checkpoint" if run else "name is not set"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    if has_any:
        found = listing.find_checkpoint(run, "name", checkpoint.FILES)
        if names_run(resume) and listing.is_checkpoint(Path(resume)):
            found = listing.find_checkpoint(resume, "trainer.resume", checkpoint.FILES)
            check_is_newest(found, run)
        return found
    if run:
        check_directory(run, config)
    return None


def check_is_newest(found: Path, run: Path) -> None:
    """Raises ConfigError if a checkpoint given by its path is not the newest of its run: resuming
    from it would overwrite later steps."""
    if listing.step_of(found) < (newest := listing.newest_step(run)):
        reason = f"{run} has a newer checkpoint (step {newest})"
        hint = f"use trainer.resume={run}, or a new run with trainer.init_from={found}"
        refuse([Problem("trainer.resume", found, reason, hint)])


def check_directory(run: Path, config: Config) -> None:
    """Raises ConfigError if the directory for a new run contains other files, or a run that has no
    checkpoint and other settings. With the same settings, that run starts from step 0."""
    if has_other_files(run):
        reason = f"{run} contains files that do not belong to a run"
        refuse([Problem("name", run.name, reason, "use another name")])
    if (before := settings_of(run)) is None:
        return
    problems = changed_settings(before, config.model_dump(), run)
    hint = f"use another name, or remove {run}"
    refuse([p._replace(reason=f"{p.reason}, and has no checkpoint", hint=hint) for p in problems])


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
        if is_of(key, fixed) and key not in ("data.path", "data.val_path", "data.verify")
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


def other_changes(saved: dict, config: Config) -> list[str]:
    """Returns a text for each setting that a resumed run has changed, except for its machine."""
    saved, ignored = flat(saved), (*OF_THE_LAUNCH, "data.path", "data.val_path")
    return [
        f"{key}={shorten(as_yaml(value))} (was {shorten(as_yaml(saved[key]))})"
        for key, value in flat(config.model_dump()).items()
        if value != saved.get(key, value) and not is_of(key, ignored)
    ]


def resume_command(directory: Path, is_saved: bool = False, changes: Sequence[str] = ()) -> str:
    """Returns how to resume a run after it stopped: "resume with: COMMAND", for a job of a sweep
    how to resume the sweep, and in a notebook or a program of the user the expression.

    is_saved: whether the checkpoint has the settings of this process. If so, the returned command
    contains only the settings of this machine. changes: further overrides, not for a sweep.
    """
    overrides = [override("trainer.resume", directory), *changes]
    if is_in_sweep():
        folder = shlex.quote(f"hydra.sweep.dir={HydraConfig.get().sweep.dir}")
        return f"rerun the same command with {folder}"
    if Path(sys.argv[0]).stem != "train":
        return f"resume with: fit(build_run(compose({overrides})))"
    kept = []
    for text in sys.argv[1:]:
        key = text.lstrip("+-")
        of_the_machine = "=" not in text or key.startswith(("config-dir=", *OF_THE_MACHINE))
        if of_the_machine or not (is_saved or key.startswith("trainer.resume=")):
            kept.append(text)
    command = [*launch_command(), sys.argv[0], *kept, *overrides]
    return f"resume with: {shlex.join(command)}"
