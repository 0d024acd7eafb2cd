"""Decides how a run starts: as a new run, or resumed from its newest checkpoint.

`start(config)` returns the complete config, the checkpoint and what was read on the way, or refuses
in one line per problem. Nothing changes the config after that. Nothing is written to the run
directory, except for its lock. clearhead/config/stored.py has added the settings of the run that
`from=` or trainer.resume=PATH names before. trainer.init_from: clearhead/run/init_from.py.
"""

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import changed_settings, other_changes
from clearhead.checkpoint.run_directory import (
    has_other_files,
    lock_directory,
    settings_of,
    summarized_step,
)
from clearhead.config.automatic import AUTOMATIC, automatic_values
from clearhead.config.schema import Config
from clearhead.config.stored import PROMPTS, names_run, refuse_dropped
from clearhead.config.validation import validate
from clearhead.config.yaml_files import flat, nested
from clearhead.errors import CheckpointError, DataError, Problem, as_yaml, format_problem, refuse
from clearhead.parallel import device
from clearhead.parallel.memory import check_memory, find_micro_batch, meta_model
from clearhead.parallel.strategy import Strategy
from clearhead.run.prompts import choose_prompts
from clearhead.run.tokenizer import find_tokenizer, short_tokens, vocabulary_size
from clearhead.tokens.token_stream import check_checksums
from clearhead.tokens.tokenizer import Tokenizer
from data import LoadedData, load_datasets

# Settings that may differ between the ranks of a run. Data are compared by checksum.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}


@dataclass
class Found:
    """The checkpoint to resume. The same on all ranks, except `locked`."""

    checkpoint: Path | None = None  # None: a new run
    state: State | None = None  # of the checkpoint
    summarized: int | None = None  # the step in summary.json, which is written last
    locked: Path | None = None  # on rank 0: the run directory if it is locked already


@dataclass
class Start:
    """What is known before the model is built."""

    config: Config  # without settings that are null because they follow from something else
    strategy: Strategy
    closing: contextlib.ExitStack  # closes the components, the last opened first
    found: Found
    tokenizer: Tokenizer
    data: LoadedData
    is_compiled: bool
    was_finished: bool  # no step is left, and summary.json was written after the last
    notes: list[str]  # for the user


def start(config: Config, strategy: Strategy, closing: contextlib.ExitStack) -> Start:
    """Decides how the run starts. Called on all ranks; rank 0 reads the run directory and locks it
    until `closing` is closed. Raises a ClearheadError."""
    check_same_settings(config, strategy)
    found, notes = find_checkpoint(config, strategy, closing), []
    if found.state:
        config = with_values_of(found, config)
        refuse_or_note_changes(found, config, strategy, notes)
    tokenizer = find_tokenizer(config, strategy, found.checkpoint, notes)
    config = config.with_values({"model.vocab_size": vocabulary_size(config, tokenizer)})
    with strategy.raise_on_all_ranks():  # other machines may have less memory
        refuse(check_memory(config, strategy))
    data = load_data(config, strategy, tokenizer, found.state)
    if found.state is None:
        notes += short_tokens(config, tokenizer, data)
    is_compiled = should_compile(config, strategy, notes)
    config = complete(config, strategy, tokenizer, data, is_compiled)
    ended = found.state is not None and found.state.has_ended(config.trainer)
    was_finished = ended and found.state.step == found.summarized
    if ended and not was_finished:
        refuse(found.state.exceeded_limits(config.trainer))
    notes = data.notes + notes
    return Start(
        config, strategy, closing, found, tokenizer, data, is_compiled, was_finished, notes
    )


def check_same_settings(config: Config, strategy: Strategy) -> None:
    """Raises ConfigError on all ranks if any rank has other settings than rank 0."""
    settings = json.loads(json.dumps(config.model_dump()))
    theirs, rank = flat(strategy.broadcast(settings)), strategy.rank
    hint = "start all ranks with the same settings"
    problems = [
        Problem(key, value, f"rank {rank} has this value, rank 0 has {as_yaml(before)}", hint)
        for key, value in flat(settings).items()
        if key not in OF_ONE_RANK and value != (before := theirs.get(key))
    ]
    with strategy.raise_on_all_ranks():
        refuse(problems)


# -------------------------------------------------------------------------- the checkpoint


def find_checkpoint(config: Config, strategy: Strategy, closing: contextlib.ExitStack) -> Found:
    """Returns the newest intact checkpoint of the run that the settings name, if there is one.
    Locking removes temporary files of killed processes. Raises ConfigError, or CheckpointError if
    no checkpoint can be read."""
    locked = None

    def find() -> tuple[str | None, dict | None, int | None]:
        nonlocal locked
        run = Path(config.runs_dir, config.name) if config.name else None
        # Settings files may be missing from a run with checkpoints.
        if run and run.is_dir() and (listing.has_checkpoint(run) or not has_other_files(run)):
            closing.enter_context(lock_directory(run))  # no other process can change it now
            locked = run
        if not is_resumed(run, config):
            return None, None, None
        path = run
        if names_run(resume := config.trainer.resume) and listing.is_checkpoint(Path(resume)):
            path = resume
        folder = listing.find_checkpoint(path, "name", checkpoint.FILES)
        refuse_older(folder, run, is_given=path != run)
        return str(folder), asdict(checkpoint.load_state(folder)), summarized_step(run)

    # Other ranks may have no access to the directory.
    folder, state, summarized = strategy.broadcast(strategy.on_rank_0(find))
    if folder is None:
        return Found(locked=locked)
    return Found(Path(folder), State.from_values(state), summarized, locked)


def is_resumed(run: Path | None, config: Config) -> bool:
    """Returns whether a run is resumed. run: the directory of a run with a name.

    trainer.resume=auto resumes if the run has a checkpoint; must and a path require one; false
    requires that the run does not exist. Raises ConfigError, also if the directory of a new run
    contains something else.
    """
    resume, has_any = config.trainer.resume, run is not None and listing.has_checkpoint(run)
    if resume is False and (has_any or (run and settings_of(run))):
        hint = "use another name, or trainer.resume=auto to resume it"
        refuse([Problem("name", config.name, f"{run} already contains a run", hint)])
    if not has_any and resume not in ("auto", False):
        hint = "set name= to a run with a checkpoint, or use trainer.resume=auto"
        if names_run(resume):
            hint = "rerun the command that started it, without trainer.resume"
        reason = f"{run} has no checkpoint" if run else "name is not set"
        refuse([Problem("trainer.resume", resume, reason, hint)])
    if run and not has_any:
        if has_other_files(run):
            reason = f"{run} contains files that do not belong to a run"
            refuse([Problem("name", run.name, reason, "use another name")])
        # A run that has no checkpoint yet starts again, from step 0.
        problems = changed_settings(settings_of(run) or {}, config.model_dump(), run)
        hint = f"use another name, or remove {run}"
        refuse([p._replace(reason=f"{p.reason} before", hint=hint) for p in problems])
    return has_any


def refuse_older(folder: Path, run: Path, is_given: bool) -> None:
    """Raises ConfigError if a checkpoint given by its path is not the newest of its run: resuming
    from it would overwrite later steps."""
    if is_given and listing.step_of(folder) < (newest := listing.newest_step(run)):
        reason = f"{run} has a newer checkpoint (step {newest})"
        hint = f"use trainer.resume={run}, or a new run with trainer.init_from={folder}"
        refuse([Problem("trainer.resume", folder, reason, hint)])


def with_values_of(found: Found, config: Config) -> Config:
    """Returns the config with the values of the checkpoint for settings that are null. Raises
    CheckpointError if they are not valid. A stored 0, as for a lens that was off, is not used."""
    known, now = flat(found.state.settings), flat(config.model_dump())
    for key in ("model.vocab_size", *AUTOMATIC, *PROMPTS):
        if now[key] is None and known.get(key):
            now[key] = known[key]
    config, problems = validate(Config, nested(now))
    if problems:
        reason, hint = format_problem(problems[0]._replace(hint="")), f"give {problems[0].key}="
        raise CheckpointError("checkpoint", found.checkpoint, reason, hint)
    return config


def refuse_or_note_changes(
    found: Found, config: Config, strategy: Strategy, notes: list[str]
) -> None:
    """Raises ConfigError if a setting differs that must be the same as in the checkpoint. Appends a
    note about others that differ."""
    saved, run = found.state.settings, Path(config.runs_dir, config.name)
    with strategy.raise_on_all_ranks():
        refuse_dropped(saved, run)
        refuse(changed_settings(saved, config.model_dump(), run))
    if changes := other_changes(saved, config):
        notes.append(f"resuming with other settings than before: {', '.join(changes)}")


# ------------------------------------------------------------------ data and complete config


def load_data(
    config: Config, strategy: Strategy, tokenizer: Tokenizer, state: State | None
) -> LoadedData:
    """Opens the datasets. Raises DataError if they differ from the checkpoint or from rank 0."""
    path = config.data.path
    with strategy.raise_on_all_ranks():  # other machines may not have the files
        data = load_datasets(config.data, tokenizer)
        if state:
            hint = "for a new run with these data, use another name"
            saved = state.data or []
            is_old = any(isinstance(checksum, list) for _, checksum in saved)
            if is_old and (weights := config.data.weights):
                reason = "version 3, which wrote the checkpoint, had another order of windows"
                raise DataError("data.weights", weights, reason, hint)
            check_checksums(saved, data.checksums, path, "the checkpoint", hint)
    of_rank_0 = strategy.broadcast(data.checksums)
    with strategy.raise_on_all_ranks():
        hint = "give every machine the same data"
        check_checksums(of_rank_0, data.checksums, path, "rank 0", hint)
    return data


def should_compile(config: Config, strategy: Strategy, notes: list[str]) -> bool:
    """Returns whether the trained model is compiled."""
    trainer, length = config.trainer, config.data.max_length
    if trainer.compile != "auto" or trainer.max_steps is None:  # the length is not known
        return trainer.compile is True
    tokens = trainer.batch_size * length * trainer.max_steps
    flops = meta_model(config.model).flops_per_token(length) * tokens / strategy.world_size
    if device.should_compile(strategy.device, flops):
        return True
    if strategy.device.type == "cuda" and not device.can_compile(strategy.device):
        needs = "Triton, a C compiler and the headers of Python (gcc, python3-dev)"
        notes.append(f"trainer.compile=auto: not compiled, which needs {needs}")
    return False


def complete(
    config: Config, strategy: Strategy, tokenizer: Tokenizer, data: LoadedData, is_compiled: bool
) -> Config:
    """Returns the config with values for all settings that are null or auto and that depend on the
    data or the machine: intervals, warm-up, prompts and micro-batch size."""
    trainer, given = config.trainer, flat(config.model_dump())
    values = automatic_values(config, strategy.device.type != "cpu", epoch_of(config, data))
    if missing := [key for key in PROMPTS if given[key] is None]:
        most = min(config.lens.max_tokens, config.data.max_length)
        chosen = strategy.on_rank_0(lambda: choose_prompts(data.val or data.train, tokenizer, most))
        chosen = strategy.broadcast(chosen)
        values |= {key: chosen[key] for key in missing}
    if trainer.micro_batch_size == "auto":
        values["trainer.micro_batch_size"] = find_micro_batch(config, strategy, is_compiled)
    return config.with_values(values)


def epoch_of(config: Config, data: LoadedData) -> int | None:
    """Returns the number of steps in which each window is read once, if trainer.patience may end
    the run: a small text overfits within a few epochs. Otherwise None."""
    epoch = math.ceil(len(data.train) / config.trainer.batch_size)
    return epoch if config.trainer.patience else None
