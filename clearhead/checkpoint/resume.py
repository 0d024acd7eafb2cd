"""Decides how a run starts: as a new run, resumed from its checkpoint, or as a branch of another.

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
from clearhead.checkpoint.format import State, Tensors
from clearhead.checkpoint.run_directory import (
    has_other_files,
    lock_directory,
    settings_of,
    summarized_step,
)
from clearhead.checkpoint.tensors import read_tensors
from clearhead.compute.optimizers import learning_rate
from clearhead.config.compose import override
from clearhead.config.job import is_in_sweep
from clearhead.config.schema import Config
from clearhead.config.stored import (
    AUTOMATIC,
    OF_THE_MACHINE,
    complete,
    different_settings,
    names_run,
    with_automatic_values,
)
from clearhead.config.yaml_files import flat
from clearhead.errors import DataError, Problem, as_yaml, refuse
from clearhead.parallel.launch import launch_command
from clearhead.parallel.strategy import Strategy
from clearhead.tokens import TRAINED, VOCABULARIES
from clearhead.tokens.token_stream import Checksums, check_checksums

# These settings determine the parameters' shapes, so trainer.resume_override does not apply.
FIXED_BY_WEIGHTS = {
    f"model.{key}" for key in ("vocab_size", "context_length", "emb_dim", "num_layers", "qkv_bias")
}
# Settings and groups that may be changed when a run is resumed. Only the length of the run changes
# what it learns. All others, also those added later, must keep their values.
FREE_TRAINER_SETTINGS = (
    *("max_minutes", "max_steps", "patience", "schedule_steps", "micro_batch_size", "compile"),
    *("device", "activation_checkpointing", "profile", "eval_every", "eval_windows", "log_every"),
    *("save_every", "keep", "sample_prompt", "sample_tokens", "max_skips"),
    *("threads", "resume", "resume_override", "init_from"),
)
FREE_TO_CHANGE = {
    *("name", "debug", "runs_dir", "parallel", "lens", "wandb", "model.attention"),
    *("data.path", "data.val_path", "data.verify"),  # the tokens are compared by checksum
    *(f"trainer.{key}" for key in FREE_TRAINER_SETTINGS),
}


@dataclass
class Start:
    """How a run starts. The same on all ranks, except `locked`."""

    checkpoint: Path | None = None  # None: a new run
    state: State | None = None  # of the checkpoint
    in_place: bool = False  # True: resumes in the run directory of the checkpoint; False: a branch
    # On rank 0: the tensors of model and optimizer, mapped to the files. A branch reads a run that
    # may be training, which then may remove the checkpoint.
    tensors: Tensors | None = None
    locked: Path | None = None  # on rank 0: the run directory if it is locked already
    was_finished: bool = False  # True: no step is left, and summary.json was written after the last


def complete_settings(config: Config, strategy: Strategy, notes: list[str]) -> Config:
    """Returns the settings. If trainer.resume is the path of a run, its settings are used,
    overridden by the command line, and config.given is None then. On all ranks; rank 0 reads the
    files.

    Raises CheckpointError if there is no checkpoint or its settings cannot be read.
    """

    def read() -> tuple[str, dict] | None:
        if config.given is None:
            return None
        path, own = config.trainer.resume, own_directory(config)
        if own and is_branch_of(own, path):
            path = own
        # No warning about damage here: find_start reports it.
        files = (checkpoint.STATE,)
        found, state = listing.read_found(
            lambda: listing.find_checkpoint(path, "trainer.resume", files, lambda line: None),
            checkpoint.load_state,
        )
        return str(found), state.settings

    shared = strategy.broadcast(strategy.on_rank_0(read))
    if shared is None:
        return config
    (found, settings), changed = shared, []
    with strategy.raise_on_all_ranks():
        if config.given is not None:  # otherwise check_same_settings raises
            config, changed = complete(config, found, settings)
    if changed:
        notes.append(f"using the settings saved in {found}, except {', '.join(changed)}")
    return config


def check_same_settings(config: Config, strategy: Strategy) -> None:
    """Raises ConfigError on all ranks if any rank has other settings than rank 0."""
    settings = json.loads(json.dumps(config.model_dump()))
    of_rank_0 = strategy.broadcast(settings)
    with strategy.raise_on_all_ranks():
        refuse(different_settings(settings, of_rank_0, strategy.rank))


def find_start(
    config: Config,
    strategy: Strategy,
    closing: contextlib.ExitStack,
    notes: list[str],
) -> tuple[Config, Start]:
    """Decides how the run starts. Rank 0 searches for a checkpoint and locks an existing run
    directory until `closing` is closed. Returns the config with automatic settings (such as
    warmup_steps=null): the checkpoint's values, or computed.

    Raises ConfigError if a setting differs that must be the same as in the checkpoint.
    """
    locked = state = tensors = None
    on_gpu = strategy.device.type != "cpu"

    def find() -> tuple[str, dict, bool, int | None] | None:
        nonlocal locked, state, tensors
        own = own_directory(config)
        # Settings files may be missing from a run with checkpoints.
        if own and own.is_dir() and (listing.has_checkpoint(own) or not has_other_files(own)):
            closing.enter_context(lock_directory(own))  # no other process can change it now
            locked = own

        def read(found: Path | None) -> tuple:
            if found is None:
                return None, None
            files = (found / checkpoint.MODEL, found / checkpoint.OPTIMIZER)
            return checkpoint.load_state(found), tuple(map(read_tensors, files))

        found, (state, tensors) = listing.read_found(lambda: find_resume_checkpoint(config), read)
        if found is None:
            return None
        return str(found), asdict(state), is_in_place(found, config), own and summarized_step(own)

    # Other ranks may have no access to the directory.
    shared = strategy.broadcast(strategy.on_rank_0(find))
    if shared is None:
        if not config.trainer.max_minutes:  # otherwise max_steps is not known yet
            config = with_automatic_values(config, on_gpu=on_gpu)
        return config, Start(locked=locked)
    found, values, in_place, summarized = shared
    state = state or State.from_values(values)
    config = with_automatic_values(config, state.settings, on_gpu)
    source = own_directory(config) if in_place and config.name else config.trainer.resume
    problems = changed_settings(state.settings, config.model_dump(), source)
    if config.trainer.resume_override:
        notes += [f"{key}={value}: {reason}" for key, value, reason, *_ in problems]
        problems = [problem for problem in problems if problem.key in FIXED_BY_WEIGHTS]
    if not in_place and state.step >= config.trainer.max_steps:
        reason = f"the checkpoint {found} has already reached step {state.step}"
        hint = f"to train further, use {longer(config, state)}"
        problems.append(Problem("trainer.max_steps", config.trainer.max_steps, reason, hint))
    with strategy.raise_on_all_ranks():
        refuse(problems)
    was_finished = state.has_ended(config.trainer) and state.step == summarized
    return config, Start(Path(found), state, in_place, tensors, locked, was_finished)


def longer(config: Config, state: State) -> str:
    """Returns the settings with which a finished run trains further."""
    trainer, changes = config.trainer, []
    if state.step >= trainer.max_steps:
        changes.append(f"trainer.max_steps above {state.step}")
        if trainer.max_minutes and not names_run(trainer.resume):  # they keep the number of steps
            changes.append("trainer.max_minutes=null")
    if state.should_stop_early(trainer):
        changes.append("a larger trainer.patience, or trainer.patience=null")
    return " and ".join(changes)


def raised_rate(config: Config, state: State) -> list[str]:
    """Returns a note if the learning rate rises where a run is resumed: the schedule has more steps
    than before, and the rate had decayed."""
    trainer, before = config.trainer, state.settings["trainer"]
    ended = before.get("schedule_steps") or before.get("max_steps")
    is_number = type(ended) is int and 0 < ended < 2**53
    if not is_number or state.step < trainer.warmup_steps:
        return []
    steps = trainer.schedule_steps or trainer.max_steps
    old = learning_rate(max(state.step - 1, 0), config.optimizer, trainer.warmup_steps, ended)
    new = learning_rate(state.step, config.optimizer, trainer.warmup_steps, steps)
    if new <= old:
        return []
    change = f"the learning rate rises from {old:.2g} to {new:.2g}, because its schedule now has"
    keep = f"trainer.schedule_steps={ended} keeps it low"
    return [
        f"optimizer.lr={config.optimizer.lr}: {change} {steps:,} steps instead of {ended:,}; {keep}"
    ]


def long_warmup(config: Config) -> list[str]:
    """Returns a note if most steps are warm-up, as with the settings of a longer run."""
    trainer = config.trainer
    steps = trainer.schedule_steps or trainer.max_steps
    if 2 * trainer.warmup_steps <= steps:
        return []
    reason = f"the learning rate rises in most of the {steps:,} steps"
    return [f"trainer.warmup_steps={trainer.warmup_steps}: {reason}; use fewer"]


def own_directory(config: Config) -> Path | None:
    """Returns the run directory given by the settings; None for a new one named by the date."""
    if config.name:
        return Path(config.runs_dir) / config.name
    if (resume := config.trainer.resume) in ("auto", "must", False):
        return None
    path = Path(resume)
    if listing.is_checkpoint(path):
        return listing.run_directory_of(path.resolve())
    return path if listing.has_checkpoint(path) else None


def is_in_place(found: Path, config: Config) -> bool:
    """Returns whether a checkpoint is in the run directory given by the settings."""
    own = own_directory(config)
    # resolve: either may be a symbolic link.
    return own is not None and found.resolve().parent == (own / "checkpoints").resolve()


def find_resume_checkpoint(config: Config) -> Path | None:
    """Returns the checkpoint to resume; None for a new run. Skips damaged checkpoints of a run.

    trainer.resume=auto resumes if the run has a checkpoint; must requires one; false requires that
    the run does not exist; a path resumes that run or checkpoint, in place or as a branch. Raises
    ConfigError, or CheckpointError if no checkpoint can be read.
    """
    resume, run = config.trainer.resume, own_directory(config) if config.name else None
    has_any = run is not None and listing.has_checkpoint(run)
    if resume is False and (has_any or (run and settings_of(run))):
        hint = "use another name, or trainer.resume=auto to resume it"
        refuse([Problem("name", config.name, f"{run} already contains a run", hint)])
    if has_any and (resume in ("auto", "must") or is_branch_of(run, resume)):
        return listing.find_checkpoint(run, "name", checkpoint.FILES)
    if resume == "must":
        hint = "set name= to a run with a checkpoint, or use trainer.resume=auto"
        reason = f"{run} has no checkpoint" if run else "name is not set"
        refuse([Problem("trainer.resume", "must", reason, hint)])
    found = None
    if resume not in ("auto", False):
        found = find_named_checkpoint(resume)
        if is_in_place(found, config):
            check_is_newest(found, resume)
            return found
        if has_any:
            hint = f"use trainer.resume={run} to resume it, or another name"
            refuse([Problem("name", config.name, f"{run} already contains another run", hint)])
    if run:
        check_directory(run, config)
    return found


def find_named_checkpoint(resume: str) -> Path:
    """Returns the checkpoint for trainer.resume=PATH."""
    path = Path(resume).resolve()
    is_copy = listing.is_checkpoint(path) and listing.run_directory_of(path) is None
    if is_copy and not (path / checkpoint.OPTIMIZER).exists():
        reason = f"has no {checkpoint.OPTIMIZER} (a model downloaded from W&B has none)"
        hint = f"start a new run from its weights: {shlex.quote(f'trainer.init_from={resume}')}"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    return listing.find_checkpoint(resume, "trainer.resume", checkpoint.FILES)


def is_branch_of(run: Path, resume: str) -> bool:
    """Returns whether a run with checkpoints was started as a branch with trainer.resume=`resume`.
    Rerunning its command, as Slurm does after a requeue, then resumes the branch."""
    if not listing.has_checkpoint(run):
        return False
    trainer = (settings_of(run) or {}).get("trainer")
    return isinstance(trainer, dict) and trainer.get("resume") == resume


def check_is_newest(found: Path, resume: str) -> None:
    """Raises ConfigError if a checkpoint given by its path is not the newest of its run: resuming
    from it would overwrite later steps."""
    newest = listing.newest_step(run := listing.run_directory_of(found))
    if listing.is_checkpoint(Path(resume)) and listing.step_of(found) < newest:
        reason = f"{run} has a newer checkpoint (step {newest})"
        hint = f"use name=NEW to start a branch, or trainer.resume={run} for the newest"
        refuse([Problem("trainer.resume", resume, reason, hint)])


def check_directory(run: Path, config: Config) -> None:
    """Raises ConfigError if the directory for a new run contains other files, or a run that has no
    checkpoint and other settings. With the same settings, that run starts from step 0."""
    if has_other_files(run):
        reason = f"{run} contains files that do not belong to a run"
        refuse([Problem("name", run.name, reason, "use another name")])
    if (before := settings_of(run)) is None:
        return
    now = flat(config.model_dump())
    now = {key: value for key, value in now.items() if value is not None or key not in AUTOMATIC}
    hint = f"use another name, or remove {run}"
    problems = changed_settings(before, now, run)
    refuse([p._replace(reason=f"{p.reason}, and has no checkpoint", hint=hint) for p in problems])


def changed_settings(saved: dict, now: dict, run: object) -> list[Problem]:
    """Returns a problem for each setting that must not differ from the saved one."""
    saved, now = flat(saved), flat(now)  # flat also accepts flat settings
    free = free_to_change({saved.get("model.attention"), now.get("model.attention")})
    # A setting that is not in the checkpoint was added later; it is not compared.
    changed = {key: value for key, value in now.items() if value != saved.get(key, value)}
    changed = {k: v for k, v in changed.items() if not free & {k, k.partition(".")[0]}}
    if not {s.get("data.tokenizer") for s in (saved, now)} & {*VOCABULARIES, TRAINED}:
        changed.pop("data.tokenizer", None)  # of two directories, the tokenizers are compared
    if "data.tokenizer" in changed:
        changed.pop("model.vocab_size", None)  # it follows
    other = "or start a new run with another name"
    if not FIXED_BY_WEIGHTS & changed.keys():
        other += ", or trainer.resume_override=true to resume anyway"
    return [
        Problem(key, value, f"{run} was trained with {before}", f"use {key}={before}, {other}")
        for key, value, before in ((k, v, as_yaml(saved[k])) for k, v in changed.items())
    ]


def free_to_change(kernels: set) -> set[str]:
    """Returns FREE_TO_CHANGE, without the kernel if one of these computes another formula."""
    return FREE_TO_CHANGE - ({"model.attention"} if kernels & SCORES.keys() else set())


def changed_data(config: Config, state: State, checksums: Checksums) -> DataError | None:
    """Returns an error if the tokens of the data differ from those of the checkpoint."""
    ended = f" {longer(config, state)}" * (state.step >= config.trainer.max_steps)
    hint = f"to continue the run with them, add trainer.resume_override=true{ended}; "
    hint += "for a new run, use another name"
    if config.data.weights and any(isinstance(checksum, list) for _, checksum in state.data or []):
        reason = "version 3, which wrote the checkpoint, read the mixture in another order"
        return DataError("data.weights", config.data.weights, reason, hint)
    try:
        check_checksums(state.data or [], checksums, config.data.path, "the checkpoint", hint)
    except DataError as error:
        paths = state.settings["data"].get("path"), config.data.path
        before, now = (path if isinstance(path, list) else [path] for path in paths)
        if len(before) != len(now):
            kinds = {"added": [p for p in now if p not in before]}
            kinds["removed"] = [p for p in before if p not in now]
            changes = [f"{kind}: {', '.join(map(str, ps))}" for kind, ps in kinds.items() if ps]
            sources = f"{len(before)} source{'s' * (len(before) > 1)}"
            error.reason = "; ".join([f"the run had {sources}, now {len(now)}", *changes])
        return error
    return None


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
