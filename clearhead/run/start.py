"""Decides how a run starts: resumed from its newest checkpoint, or new, with random weights or the
weights of another model (trainer.init_from).

`start` completes the config: nothing changes it after that. It writes nothing to the run directory,
except for its lock. checkpoint/resume.py has the rules of resuming: which checkpoint, and which
settings may change. config/stored.py has added the settings of the run that `from=` or
trainer.resume=PATH names before.
"""

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from attention import SCORES
from clearhead.checkpoint.format import FORMAT
from clearhead.checkpoint.listing import has_other_files
from clearhead.checkpoint.resume import ResumePoint, find_resume_point, settings_to_resume
from clearhead.checkpoint.run_directory import lock_directory
from clearhead.config.automatic import automatic_values, expected_steps
from clearhead.config.schema import Config
from clearhead.config.stored import PROMPTS
from clearhead.config.yaml_files import flat
from clearhead.errors import DataError, Problem, as_yaml, refuse
from clearhead.models.pretrained import load_pretrained
from clearhead.output.report import IN_TRAINING_TEXT
from clearhead.parallel import device
from clearhead.parallel.memory import check_memory, find_micro_batch, meta_model
from clearhead.parallel.strategy import Strategy
from clearhead.run.lens_runner import choose_prompts
from clearhead.run.tokenizer import find_tokenizer, vocabulary_size
from clearhead.tokens import VOCABULARIES
from clearhead.tokens.overlap import overlap
from clearhead.tokens.token_stream import check_checksums
from clearhead.tokens.tokenizer import Tokenizer
from clearhead.tokens.windows import words_per_window
from data import LoadedData, load_datasets
from model import GPT, ModelConfig, model_without_values

# Settings that may differ between the ranks of a run. Data are compared by checksum.
OF_ONE_RANK = {"debug", "data.path", "data.val_path", "trainer.device"}
# Settings that must equal those of trainer.init_from. For the context length see `positions`.
SHAPE = ("vocab_size", "emb_dim", "num_heads", "num_layers", "qkv_bias")


@dataclass
class RunInputs:
    """What the components of a run are built from."""

    config: Config  # complete: no setting is null that follows from something else
    strategy: Strategy
    resumed: ResumePoint | None  # None: a new run
    locked: Path | None  # on rank 0: the run directory, if it exists already
    tokenizer: Tokenizer
    data: LoadedData
    is_compiled: bool
    named_steps: dict[int, list[str]]  # see steps_at_words
    notes: list[str]  # for the user


def start(config: Config, strategy: Strategy, closing: contextlib.ExitStack) -> RunInputs:
    """Decides how the run starts. Called on all ranks. The run directory stays locked until
    `closing` is closed. Raises a ClearheadError."""
    check_same_settings(config, strategy)
    locked = strategy.on_rank_0(lambda: lock_existing(config, closing))
    resumed, notes = find_resume_point(config, strategy), []
    if resumed:
        config = settings_to_resume(resumed, config, strategy, notes)
    tokenizer = find_tokenizer(config, strategy, resumed.folder if resumed else None, notes)
    config = config.with_values({"model.vocab_size": vocabulary_size(config, tokenizer)})
    with strategy.raise_on_all_ranks():  # other machines may have less memory
        refuse(check_memory(config, strategy))
    data = load_data(config, strategy, tokenizer, resumed)
    named_steps = steps_at_words(config, data, tokenizer, notes)
    if config.trainer.max_steps is None and not config.trainer.max_minutes:
        config = config.with_values({"trainer.max_steps": max(named_steps)})
    is_compiled = should_compile(config, strategy, notes)
    config = complete(config, strategy, tokenizer, data, is_compiled)
    return RunInputs(
        config=config,
        strategy=strategy,
        resumed=resumed,
        locked=locked,
        tokenizer=tokenizer,
        data=data,
        is_compiled=is_compiled,
        named_steps=named_steps,
        notes=data.notes + notes,
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


def lock_existing(config: Config, closing: contextlib.ExitStack) -> Path | None:
    """Locks the directory of a run with a name, if it exists: no other process can change it now.
    Removes temporary files of killed processes from it."""
    run = Path(config.runs_dir, config.name) if config.name else None
    if run is None or not run.is_dir() or has_other_files(run):
        return None
    closing.enter_context(lock_directory(run))
    return run


def load_data(
    config: Config, strategy: Strategy, tokenizer: Tokenizer, resumed: ResumePoint | None
) -> LoadedData:
    """Opens the datasets. Raises DataError if they differ from the checkpoint or from rank 0."""
    path = config.data.path
    with strategy.raise_on_all_ranks():  # other machines may not have the files
        data = load_datasets(config.data, tokenizer)
        if resumed:
            hint = "for a new run with these data, use another name"
            if resumed.state.format < FORMAT and (weights := config.data.weights):
                reason = "version 3, which wrote the checkpoint, had another order of windows"
                raise DataError("data.weights", weights, reason, hint)
            saved = resumed.state.data or []
            check_checksums(saved, data.checksums, path, "the checkpoint", hint)
    if data.val and not config.data.synthetic:
        find = functools.partial(overlap, data.train, data.val, tokenizer.byte_lengths)
        data.overlap = strategy.on_rank_0(find)
    if data.overlap:
        reason = "so the validation loss is too low; data.val_path=FILE validates on another text"
        data.notes.append(f"{data.overlap} {IN_TRAINING_TEXT}, {reason}")
    of_rank_0 = strategy.broadcast(data.checksums)
    with strategy.raise_on_all_ranks():
        hint = "give every machine the same data"
        check_checksums(of_rank_0, data.checksums, path, "rank 0", hint)
    return data


def steps_at_words(
    config: Config, data: LoadedData, tokenizer: Tokenizer, notes: list[str]
) -> dict[int, list[str]]:
    """Returns the steps of trainer.save_at_words, after which these numbers of words are read, each
    with the names of its checkpoint. These are the names of the BabyLM challenge, such as
    chck_20M. Appends a note. Raises ConfigError for a text without words."""
    if not config.trainer.save_at_words:
        return {}
    first, last = config.trainer.save_at_words
    numbers = (first * digit * 10**power for power in range(15) for digit in range(1, 10))
    per_window = words_per_window(data.train, tokenizer.words)
    if not per_window:
        refuse([("trainer.save_at_words", [first, last], "the text has no words", "use null")])
    named: dict[int, list[str]] = {}
    for words in [*(n for n in numbers if n < last), last]:
        step = math.ceil(words / (per_window * config.trainer.batch_size))
        named.setdefault(step, []).append(f"chck_{words / 1e6:.15g}M")
    epoch = f"an epoch has {per_window * len(data.train):,.0f} words"
    notes.append(f"trainer.save_at_words: {epoch}; {last:,} words are {max(named):,} steps")
    return named


def should_compile(config: Config, strategy: Strategy, notes: list[str]) -> bool:
    """Returns whether the trained model is compiled."""
    trainer, length = config.trainer, config.data.max_length
    if trainer.compile != "auto" or trainer.max_steps is None:  # the length is not known
        return trainer.compile is True
    tokens = trainer.batch_size * length * expected_steps(trainer)
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


# ------------------------------------------------------------------- weights of another model


def initial_weights(config: Config, tokenizer: Tokenizer, notes: list[str]) -> GPT:
    """Returns a model with the weights of trainer.init_from. Raises ConfigError if they do not fit.

    Dropout may differ, and the attention kernel if both have the same scores. Missing biases of
    queries, keys and values start as zeros. Appends notes about unused or untrained positions to
    `notes`.
    """
    source = config.trainer.init_from
    assert source is not None
    wanted = ModelConfig(**config.model.model_dump())
    pretrained = load_pretrained(source, "trainer.init_from")
    given, theirs = pretrained.model.config, f"the weights of trainer.init_from={source}"
    problems, same_tokens = [], tokenizer.name == pretrained.tokenizer.name
    for key in SHAPE if same_tokens else SHAPE[1:]:
        have, want = getattr(given, key), getattr(wanted, key)
        if have != want and not (key == "qkv_bias" and want):
            hint = f"use model.{key}={as_yaml(have)}"
            problems.append(Problem(f"model.{key}", want, f"{theirs} have {as_yaml(have)}", hint))
    if SCORES.get(given.attention) is not SCORES.get(wanted.attention):
        reason, hint = f"{theirs} were trained with another formula", f"use {given.attention}"
        problems.append(Problem("model.attention", wanted.attention, reason, hint))
    if not same_tokens:
        needed = pretrained.tokenizer.name
        reason = f"{theirs} were trained with {needed}"
        hint = f"use data.tokenizer={needed if needed in VOCABULARIES else pretrained.folder}"
        problems.append(Problem("data.tokenizer", config.data.tokenizer, reason, hint))
    refuse(problems)
    weights = pretrained.model.state_dict()
    sizes = (pretrained.window, wanted.context_length, config.data.max_length)
    weights["pos_emb.weight"], more = positions(weights["pos_emb.weight"], *sizes)
    notes.extend(more)
    fresh = model_without_values(wanted)
    for name, parameter in fresh.named_parameters():
        if name not in weights:  # a bias
            weights[name] = torch.zeros(parameter.shape)
    fresh.load_state_dict(weights, assign=True)
    return fresh


def positions(
    learned: torch.Tensor, window: int, context_length: int, used: int
) -> tuple[torch.Tensor, list[str]]:
    """Returns position embeddings (context_length, C) and notes about unused or untrained ones.

    learned: the model's embeddings (S, C), of which the first `window` were trained. used: number
    of positions that the run uses. A shorter context gets the first embeddings. A longer context
    repeats the trained ones, as Longformer does (Beltagy et al. 2020), which preserves the
    differences between neighbouring positions.
    """
    rows = learned[torch.arange(context_length) % window]
    note = f"model.context_length={context_length}: the weights have {window} trained positions; "
    if context_length < window:
        return rows, [f"{note}the first {context_length} are used"]
    if used > window or len(learned) != context_length > window:
        repeated = f"they are repeated for positions {window} and above; "
        return rows, [f"{note}{repeated}data.max_length={window} uses trained positions only"]
    return rows, []
