"""Builds the components of a training run from a config.

`build_run(config)` returns a `Run` (run.py), which the loop in train.py trains. Each component owns
its state and receives its inputs as arguments; none has a reference to the run.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from clearhead.checkpoint import run_directory
from clearhead.checkpoint.checkpointer import Checkpointer
from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import (
    Start,
    check_same_settings,
    complete_settings,
    find_start,
    own_directory,
)
from clearhead.checkpoint.saver import Saver
from clearhead.checkpoint.tensors import load_optimizer, load_parameters
from clearhead.config.schema import Config
from clearhead.distributed import device, launch
from clearhead.distributed.build import build_strategy
from clearhead.distributed.strategy import Strategy
from clearhead.errors import DataError, exit_code_of, refuse
from clearhead.optim.optimizers import NonFiniteCheck, build_optimizer
from clearhead.planning.micro_batch import check_memory, find_micro_batch
from clearhead.reporting.console import Console
from clearhead.reporting.jsonl import RowFile, drop_rows_after
from clearhead.reporting.machine import environment
from clearhead.reporting.metrics import Metrics
from clearhead.reporting.profiler import Profiler
from clearhead.reporting.run_log import RunLog
from clearhead.reporting.tracker import NoTracker, Tracker
from clearhead.reporting.wandb_process import invalid_variables
from clearhead.reporting.watch import watch
from clearhead.run.evaluation import Evaluator, Validation
from clearhead.run.init_from import initial_weights
from clearhead.run.lens_runner import build_lens
from clearhead.run.run import Run
from clearhead.run.signals import StopSignals
from clearhead.run.stop import Stop
from clearhead.run.time_limit import TimeLimit, measure_steps, with_max_steps
from clearhead.run.translate_errors import translate_errors
from clearhead.tokens.stream import check_checksums
from clearhead.tokens.tokenizers import get_tokenizer, token_byte_lengths
from clearhead.tokens.windows import evenly_spaced_windows
from data import LoadedData, load_datasets, split_batch, training_batches
from model import GPT, ModelConfig


def build_run(config: Config, signals: StopSignals | None = None) -> Run:
    """Builds all components. Until all checks have passed, a run directory is only locked.

    signals: requests to stop the run. Raises a ClearheadError.
    """
    notes: list[str] = []  # for the user, printed before the first step
    with contextlib.ExitStack() as closing:  # closes the components after an error
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        check_machine(config)
        strategy = start_strategy(config)
        closing.push(lambda _, error, __: strategy.close(exit_code_of(error)))
        with translate_errors(config, strategy):
            is_new = config.given is None
            config, named = complete_settings(config, strategy, notes)
            check_same_settings(config, strategy)
            if not is_new:  # start again, with the precision and the seed of that run
                with strategy.raise_on_all_ranks():
                    check_machine(config)
                strategy = start_strategy(config)
            limit = TimeLimit(config)
            config, start = find_start(config, named, strategy, closing, notes)
            run = _build(config, strategy, start, limit, signals or StopSignals(), closing, notes)
        run.closing = closing.pop_all()
        return run


def check_machine(config: Config) -> None:
    """Raises ConfigError if the settings do not fit this machine or the number of processes."""
    trainer = config.trainer
    batch_size = trainer.batch_size if config.given is None else None  # None: not known yet
    refuse(launch.check(config.parallel, batch_size))
    if launch.max_restarts() and not config.name and trainer.resume in ("auto", "must", False):
        reason = "torchrun --max-restarts needs a name, otherwise a restart would start a new run"
        refuse([("name", config.name, reason, "set name=NAME")])
    refuse(device.check(trainer.device, trainer.precision, "trainer."))
    refuse(invalid_variables(config.wandb))


def start_strategy(config: Config) -> Strategy:
    """Chooses threads, device, precision and distributed strategy, and joins the process group."""
    trainer = config.trainer
    if trainer.threads:
        torch.set_num_threads(trainer.threads)
    return build_strategy(config.parallel, trainer.device, trainer.precision, config.seed)


def _build(
    config: Config,
    strategy: Strategy,
    start: Start,
    limit: TimeLimit,
    signals: StopSignals,
    closing: contextlib.ExitStack,
    notes: list[str],
) -> Run:
    with strategy.raise_on_all_ranks():  # other machines may have less memory
        refuse(check_memory(config, strategy))
    data = load_data(config, strategy, start, notes)
    model = build_model(config, strategy, start, notes)
    is_compiled = should_compile(config, strategy, model)
    trained_model = strategy.wrap(model, is_compiled)
    optimizer = build_optimizer(model, config.optimizer, device.best_dtype(strategy.device))
    if config.trainer.micro_batch_size == "auto":
        size = find_micro_batch(config, strategy, is_compiled)
        config = config.with_values({"trainer.micro_batch_size": size})
    if config.trainer.max_minutes and start.state is None:
        batches = build_batches(config, strategy, data, first_step=0)
        with translate_errors(config, strategy, micro_batch_size=micro_batch(config, strategy)):
            per_step = measure_steps(config, strategy, trained_model, optimizer, batches)
        config = with_max_steps(config, strategy, limit.end, per_step, notes)
    state = restore(config, strategy, start, data, model, optimizer)
    saver, log = open_log(config, strategy, start, state, model, limit, notes, closing)
    watch_model(config, strategy, log.tracker, model, optimizer, state, notes)
    evaluator = build_evaluator(config, strategy, data)
    run = Run(
        config=config,
        strategy=strategy,
        state=state,
        batches=build_batches(config, strategy, data, state.step),
        model=model,
        trained_model=trained_model,
        optimizer=optimizer,
        metrics=build_metrics(config, strategy, model, state, log),
        evaluator=evaluator,
        lens=build_lens(config, strategy, data, log.directory, notes),
        checkpointer=Checkpointer(log.directory, saver, strategy, model, optimizer),
        log=log,
        stop=Stop(
            strategy,
            signals,
            limit,
            config.trainer.max_steps,
            data.train.num_targets(config.trainer.batch_size),
        ),
        closing=closing,
    )
    facts = describe(config, strategy, data, model, evaluator, is_compiled)
    log.introduce(config, state, start, facts, [*data.notes, *notes])
    return run


# ------------------------------------------------------------------------- data and model


def load_data(config: Config, strategy: Strategy, start: Start, notes: list[str]) -> LoadedData:
    """Opens the datasets. Raises DataError if they differ from the checkpoint or from rank 0."""
    with strategy.raise_on_all_ranks():  # other machines may not have the files
        data = load_datasets(config.data)
        if start.state:
            hint = "restore the data, or use another name= for a new run; "
            hint += "trainer.resume_override=true resumes anyway"
            trained_on, path = start.state.data or [], config.data.path
            try:
                check_checksums(trained_on, data.checksums, path, "the checkpoint", hint)
            except DataError as error:
                if not config.trainer.resume_override:
                    raise
                notes.append(error.without_hint)
    of_rank_0 = strategy.broadcast(data.checksums)
    with strategy.raise_on_all_ranks():
        hint = "give every machine the same data"
        check_checksums(of_rank_0, data.checksums, config.data.path, "rank 0", hint)
    ids = get_tokenizer(config.data.tokenizer).n_vocab
    if config.model.vocab_size >= 2 * ids and not config.data.synthetic:
        reason = f"data.tokenizer={config.data.tokenizer} has {ids:,} ids"
        hint = f"model.vocab_size={ids} is enough"
        notes.append(f"model.vocab_size={config.model.vocab_size}: {reason}; {hint}")
    return data


def build_batches(
    config: Config, strategy: Strategy, data: LoadedData, first_step: int
) -> Iterator[list[tuple[Sequence[torch.Tensor], int]]]:
    """Yields the micro-batches of each step: ((input_ids, target_ids), number of targets) each."""
    batches = training_batches(
        data.train,
        config.trainer.batch_size,
        config.seed,
        first_step,
        strategy.rank,
        strategy.world_size,
        pin_memory=strategy.device.type == "cuda",
    )
    size = config.trainer.micro_batch_size
    return (split_batch(batch, size) for batch in batches)


def build_model(config: Config, strategy: Strategy, start: Start, notes: list[str]) -> GPT:
    """Builds the model on its device: from a checkpoint, from trainer.init_from, or new."""
    shape = ModelConfig(**config.model.model_dump())

    def build() -> GPT:
        if start.checkpoint:
            return load_parameters(start.checkpoint, shape)
        if not config.trainer.init_from:
            return GPT(shape)
        return initial_weights(config, notes)

    model = strategy.prepare_model(shape, build)
    model.activation_checkpointing = config.trainer.activation_checkpointing
    return model


def should_compile(config: Config, strategy: Strategy, model: GPT) -> bool:
    """Returns whether the trained model is compiled."""
    trainer = config.trainer
    if trainer.max_minutes and trainer.compile == "auto":  # the number of steps is not known yet
        return False
    tokens = trainer.batch_size * config.data.max_length * trainer.max_steps
    flops = model.flops_per_token(config.data.max_length) * tokens / strategy.world_size
    return device.should_compile(trainer.compile, strategy.device, flops)


def restore(
    config: Config,
    strategy: Strategy,
    start: Start,
    data: LoadedData,
    model: GPT,
    optimizer: torch.optim.Optimizer,
) -> State:
    """Returns the state of a new run, or that of the checkpoint, and loads the optimizer state."""
    new = State(step=0, settings=config.model_dump(), data=data.checksums)
    if start.state is None:
        return new
    state = dataclasses.replace(
        start.state, settings=new.settings, data=new.data, format=new.format
    )
    if not start.in_place:  # a branch has another W&B run and best checkpoint
        state.wandb_id = state.best_loss = state.best_step = None
    load_optimizer(start.checkpoint, model, optimizer, strategy)
    if state.scaler:
        strategy.scaler.load_state_dict(state.scaler)
    return state


# --------------------------------------------------------------------- the run directory


def open_directory(
    config: Config,
    strategy: Strategy,
    start: Start,
    state: State,
    model: GPT,
    notes: list[str],
    closing: contextlib.ExitStack,
) -> tuple[Path, Saver, Tracker]:
    """Creates or reuses the run directory, on rank 0. Returns its path, the saver, the tracker."""
    with run_directory.writable(Path(config.runs_dir)):
        directory = create_directory(config, start, closing)
        saver = Saver(directory, config.trainer.keep, state if start.in_place else None)
        closing.callback(saver.close)
        if state.step >= config.trainer.max_steps:
            return directory, saver, NoTracker()  # no step left
        notes.extend(saver.disk_space_notes(12 * model.num_parameters()))
        run_directory.write_settings(directory, state.settings)
        drop_rows_after(directory, state.step if start.state else -1)
        started = environment(str(strategy.device), strategy.world_size)
        starts = RowFile(directory / "starts.jsonl")
        starts.append({"step": state.step, "parameters": model.num_parameters()} | started)
        starts.close()
        settings = state.settings | {"environment": started}
        tracker = Tracker(config.wandb, directory, settings, state.wandb_id)
        closing.push(lambda _, error, __: tracker.finish(exit_code_of(error)))
        tracker.summary({"parameters": model.num_parameters()})
        notes.extend(config.wandb.ignored())
        return directory, saver, tracker


def create_directory(config: Config, start: Start, closing: contextlib.ExitStack) -> Path:
    """Returns the locked run directory: that of the checkpoint, that of `name`, or a new one."""
    if start.in_place:
        directory = own_directory(config)
    else:
        shape = f"gpt2-{config.model.num_layers}x{config.model.emb_dim}"
        directory = run_directory.create(Path(config.runs_dir), config.name, shape)
    if directory != start.locked:  # a new directory
        closing.enter_context(run_directory.lock_directory(directory))
        run_directory.check_new(directory)
    return directory


# ------------------------------------------------------- metrics, evaluation, attention


def open_log(
    config: Config,
    strategy: Strategy,
    start: Start,
    state: State,
    model: GPT,
    limit: TimeLimit,
    notes: list[str],
    closing: contextlib.ExitStack,
) -> tuple[Saver | None, RunLog]:
    """Opens the run directory. Returns its saver (None on ranks other than 0) and the log."""
    opened = strategy.on_rank_0(
        lambda: open_directory(config, strategy, start, state, model, notes, closing)
    )
    directory, saver, tracker = opened or (None, None, NoTracker())
    directory = Path(strategy.broadcast(str(directory)))
    state.wandb_id = tracker.run_id or state.wandb_id
    profiles = config.trainer.profile and strategy.is_rank_0
    profiler = Profiler(profiles, directory / "profile", strategy.device)
    closing.callback(profiler.close)
    console = Console(strategy.is_rank_0, state.step, config.trainer.max_steps)
    closing.callback(console.close)
    log = RunLog(directory, console, tracker, profiler, limit.exclude, config.debug)
    return saver, log


def watch_model(
    config: Config,
    strategy: Strategy,
    tracker: Tracker,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    state: State,
    notes: list[str],
) -> None:
    """Logs histograms of gradients or parameters to W&B, if wandb.watch asks for it."""
    if config.wandb.watch and strategy.name == "fsdp":
        notes.append("wandb.watch: no effect with FSDP")
    elif config.wandb.watch and tracker.run_id:
        watch(tracker, model, optimizer, config.trainer, state)


def build_metrics(
    config: Config, strategy: Strategy, model: GPT, state: State, log: RunLog
) -> Metrics:
    trainer = config.trainer
    limit = 1 if trainer.on_nonfinite == "stop" else trainer.max_skips
    metrics = Metrics(
        strategy,
        NonFiniteCheck(limit, strategy.device),
        log.console,
        log.tracker,
        tokens_per_step=trainer.batch_size * config.data.max_length,
        flops_per_token=model.flops_per_token(config.data.max_length),
        peak_flops=device.peak_flops(strategy.device),
        learning_rate=config.optimizer.lr,
    )
    metrics.restore(state, forget_skipped=trainer.resume_override)
    return metrics


def describe(
    config: Config,
    strategy: Strategy,
    data: LoadedData,
    model: GPT,
    evaluator: Evaluator,
    is_compiled: bool,
) -> list[str]:
    """Returns lines about model, data and batch size, which are printed before the first step."""
    trainer, world = config.trainer, strategy.world_size
    compiled = ", compiled" if is_compiled else ""
    extra = ", activation checkpointing" if trainer.activation_checkpointing else ""
    val, validation = len(data.val or ()), evaluator.validation
    used = len(validation.windows) if validation else 0
    evaluated = f"; each evaluation uses {used:,}" if used < val else ""
    per_rank, size = trainer.batch_size // world, evaluator.batch_size
    ranks = f", {per_rank} on each of {world} ranks" if world > 1 else ""
    micro = f", in micro-batches of {size}" if size < per_rank else ""
    return [
        f"model: {model.num_parameters():,} parameters {strategy.describe()}{compiled}{extra}",
        f"training data: {len(data.train):,} windows of {config.data.max_length} tokens",
        f"validation data: {val:,} windows{evaluated}",
        f"batch size: {trainer.batch_size} windows per step{ranks}{micro}",
    ]


def micro_batch(config: Config, strategy: Strategy) -> int:
    """Returns the number of windows that a rank computes at once."""
    per_rank = config.trainer.batch_size // strategy.world_size
    return min(per_rank, config.trainer.micro_batch_size or per_rank)


def build_evaluator(config: Config, strategy: Strategy, data: LoadedData) -> Evaluator:
    tokenizer, validation = get_tokenizer(config.data.tokenizer), None
    if data.val:
        windows = evenly_spaced_windows(data.val, config.trainer.eval_windows)
        lengths = None if config.data.synthetic else token_byte_lengths(tokenizer.name)
        validation = Validation(data.val, windows, lengths)
    return Evaluator(config, strategy, validation, tokenizer, micro_batch(config, strategy))
