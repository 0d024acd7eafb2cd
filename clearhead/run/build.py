"""Builds the components of a training run from a config.

`build_run(config)` returns a `Run` (run.py), which the loop in train.py trains. Each component owns
its state and receives its inputs as arguments; none has a reference to the run.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from attention import computes_its_scores
from clearhead.checkpoint import run_directory
from clearhead.checkpoint.format import MODEL, OPTIMIZER, State
from clearhead.checkpoint.saving import Checkpointer, Saver
from clearhead.checkpoint.tensors import load_optimizer, model_from_tensors, read_tensors
from clearhead.compute.cross_entropy import LOGITS_AT_ONCE
from clearhead.compute.optimizers import MAX_SKIPS, NonFiniteCheck, build_optimizer
from clearhead.config.automatic import automatic_intervals
from clearhead.config.schema import Config
from clearhead.errors import exit_code_of, refuse, shorten
from clearhead.files import RowFile, drop_rows_after
from clearhead.output.console import Console
from clearhead.output.run_log import Metrics, RunLog
from clearhead.output.summary import describe, introduce
from clearhead.output.tracker import NoTracker, Tracker
from clearhead.parallel import device, launch
from clearhead.parallel.device import build_strategy
from clearhead.parallel.hardware import (
    environment,
    free_pinned_memory,
    peak_flops,
    use_expandable_segments,
)
from clearhead.parallel.strategy import Strategy
from clearhead.run.evaluation import Evaluator, Validation
from clearhead.run.init_from import initial_weights
from clearhead.run.lens_runner import build_lens
from clearhead.run.run import Run
from clearhead.run.signals import StopSignals
from clearhead.run.start import Start, epoch_of, start
from clearhead.run.stop import Stop
from clearhead.run.time_limit import TimeLimit
from clearhead.run.translate_errors import translate_errors
from clearhead.tokens.tokenizer_json import stored
from data import split_batch, training_batches
from model import GPT, ModelConfig


def build_run(config: Config, signals: StopSignals | None = None) -> Run:
    """Builds all components. Until all checks have passed, a run directory is only locked.

    signals: requests to stop the run; None in a notebook or a program of the user, whose process
    is afterwards as it was before. Raises a ClearheadError.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as closing:  # closes the components after an error
        if signals is None:
            signals = closing.push(StopSignals(owns_process=False))  # run.__enter__ enters it
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        closing.callback(free_pinned_memory)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        closing.enter_context(torch.random.fork_rng(devices))
        strategy = join_ranks(config, closing)
        with translate_errors(config, strategy):
            begin = start(config, strategy, closing)
            run = build_parts(begin, signals, started)
        run.closing = closing.pop_all()
        return run


def join_ranks(config: Config, closing: contextlib.ExitStack) -> Strategy:
    """Chooses threads, device, precision and distributed strategy, and joins the process group.
    Raises ConfigError if the settings do not fit this machine or the number of processes."""
    trainer = config.trainer
    if config.parallel.strategy == "fsdp":
        use_expandable_segments()
    refuse(launch.check(config.parallel, trainer.batch_size))
    if launch.max_restarts() and not config.name:
        reason = "torchrun --max-restarts needs a name, otherwise a restart would start a new run"
        refuse([("name", config.name, reason, "set name=NAME")])
    refuse(device.check(trainer.device, trainer.precision, "trainer."))  # may initialize CUDA
    chosen = trainer.device, trainer.precision, config.seed, trainer.threads
    strategy = build_strategy(config.parallel, *chosen)
    closing.push(lambda _, error, __: strategy.close(exit_code_of(error)))
    return strategy


def build_parts(begin: Start, signals: StopSignals, started: float) -> Run:
    """Builds the components. started: the time.monotonic() at the start of `build_run`."""
    config, strategy, data = begin.config, begin.strategy, begin.data
    model, trained_model, optimizer = build_model(begin)
    state = restore(begin, model, optimizer)
    limit = build_limit(begin, started)
    log, saver = open_log(begin, state, model, limit)
    run = Run(
        config=config,
        strategy=strategy,
        state=state,
        batches=build_batches(begin, state.step),
        model=model,
        trained_model=trained_model,
        optimizer=optimizer,
        metrics=build_metrics(begin, state, model, log),
        evaluator=build_evaluator(begin),
        lens=build_lens(config, strategy, data, begin.tokenizer, log.directory, begin.notes),
        checkpointer=Checkpointer(log.directory, saver, strategy, model, optimizer),
        log=log,
        stop=build_stop(begin, signals, limit, state),
        closing=begin.closing,
        was_finished=begin.was_finished,
    )
    size, parameters = micro_batch_size(begin), model.num_parameters()
    facts = describe(config, strategy, data, parameters, begin.is_compiled, size)
    notes = [f"note: {note}" for note in begin.notes]
    introduce(config, state, log, facts + notes, begin.was_finished)
    return run


# ----------------------------------------------------------------------------- model and optimizer


def build_model(begin: Start) -> tuple[GPT, torch.nn.Module, torch.optim.Optimizer]:
    """Builds the model on its device: from a checkpoint, from trainer.init_from, or new. Returns
    also the same model as it is trained, possibly wrapped and compiled, and its optimizer."""
    config, strategy, folder = begin.config, begin.strategy, begin.found.checkpoint
    shape = ModelConfig(**config.model.model_dump())
    length, head_dim = config.data.max_length, shape.emb_dim // shape.num_heads
    options = {"dtype": strategy.dtype, "device": strategy.device}
    if not computes_its_scores(shape.attention, length, head_dim, **options):
        reason = "computes other attention scores than it declares"
        hint = "add its scores to SCORES in attention.py; attention pages and generate.py use them"
        refuse([("model.attention", shape.attention, reason, hint)])

    def build() -> GPT:
        if folder:
            return model_from_tensors(shape, read_tensors(folder / MODEL), folder / MODEL)
        if config.trainer.init_from:
            return initial_weights(config, begin.tokenizer, begin.notes)
        return GPT(shape)

    model = strategy.prepare_model(shape, build)
    model.activation_checkpointing = config.trainer.activation_checkpointing
    if begin.is_compiled and config.trainer.compile == "auto":
        # If the compiler fails, the model runs uncompiled.
        begin.closing.enter_context(torch._dynamo.config.patch(suppress_errors=True))
    trained_model = strategy.wrap(model, begin.is_compiled)
    wide = device.best_wide_dtype(strategy.device)
    return model, trained_model, build_optimizer(model, config.optimizer, wide)


def restore(begin: Start, model: GPT, optimizer: torch.optim.Optimizer) -> State:
    """Returns the state of a new run, or that of the checkpoint, and loads the optimizer state."""
    strategy, settings, data = begin.strategy, begin.config.model_dump(), begin.data.checksums
    if begin.found.state is None:
        return State(step=0, settings=settings, data=data)
    state = dataclasses.replace(begin.found.state, settings=settings, data=data)
    state.ended_early &= state.should_stop_early(begin.config.trainer)
    file = begin.found.checkpoint / OPTIMIZER
    load_optimizer(file, strategy.on_rank_0(lambda: read_tensors(file)), model, optimizer, strategy)
    without = [n for n, p in model.named_parameters() if p not in optimizer.state]
    if without and optimizer.state:
        reason = "no optimizer state in the checkpoint; if they were frozen, freeze them again"
        begin.notes.append(shorten(f"parameters with {reason}: {', '.join(without)}"))
    if state.scaler:
        strategy.scaler.load_state_dict(state.scaler)
    return state


# ----------------------------------------------------------- the time limit and the run directory


def build_limit(begin: Start, started: float) -> TimeLimit:
    """Builds the time limit. Raises ConfigError if a new run has no time for a step."""
    trainer, state = begin.config.trainer, begin.found.state
    used = state.used_time(trainer) if state else 0.0
    limit = TimeLimit(begin.config, begin.strategy.device, started, used, begin.is_compiled)

    def check() -> None:
        if state is None and not limit.has_time():
            reason, hint = "is too short: start and end of the run take longer", "use more minutes"
            refuse([("trainer.max_minutes", trainer.max_minutes, reason, hint)])

    begin.strategy.on_rank_0(check)
    return limit


def open_log(
    begin: Start, state: State, model: GPT, limit: TimeLimit
) -> tuple[RunLog, Saver | None]:
    """Opens the run directory. Returns the log and the saver (None on ranks other than 0)."""
    config, strategy, closing = begin.config, begin.strategy, begin.closing

    def open_files() -> tuple[Path, Saver, Tracker]:
        with run_directory.writable(Path(config.runs_dir)):
            directory = create_directory(begin)
            saver = open_saver(begin, directory, state)
            tracker = NoTracker()
            if not begin.was_finished:
                parameters = model.num_parameters()
                begin.notes.extend(saver.disk_space_notes(12 * parameters))
                tracker = open_tracker(begin, directory, state, parameters)
            return directory, saver, tracker

    opened = strategy.on_rank_0(open_files)
    directory, saver, tracker = opened or (None, None, NoTracker())
    directory = Path(strategy.broadcast(str(directory)))
    state.wandb_id = tracker.run_id or state.wandb_id
    console = Console(strategy.is_rank_0, state.step, config.trainer.max_steps)
    closing.callback(console.close)
    return RunLog(directory, console, tracker, limit.exclude, config.debug), saver


def create_directory(begin: Start) -> Path:
    """Returns the locked run directory: that of `name`, or a new one."""
    config, shape = begin.config, begin.config.model
    model_name = f"gpt2-{shape.num_layers}x{shape.emb_dim}"
    directory = run_directory.create(Path(config.runs_dir), config.name, model_name)
    if directory != begin.found.locked:  # a new directory
        begin.closing.enter_context(run_directory.lock_directory(directory))
        run_directory.check_new(directory)
    return directory


def open_saver(begin: Start, directory: Path, state: State) -> Saver:
    content = stored(begin.tokenizer, begin.config.data.tokenizer)
    resumed = state if begin.found.state else None
    saver = Saver(directory, begin.config.trainer.keep, content, resumed)
    begin.closing.callback(saver.close)
    return saver


def open_tracker(begin: Start, directory: Path, state: State, parameters: int) -> Tracker:
    """Writes the settings, removes the rows of steps that are computed again, and starts W&B."""
    run_directory.write_settings(directory, state.settings, state.data, begin.tokenizer)
    drop_rows_after(directory, state.step if begin.found.state else -1)
    started = environment(str(begin.strategy.device), begin.strategy.world_size)
    starts = RowFile(directory / "starts.jsonl")
    starts.append({"step": state.step, "parameters": parameters} | started)
    starts.close()
    settings = state.settings | {"environment": started, "tokenizer": begin.tokenizer.name}
    tracker = Tracker(begin.config.wandb, directory, settings, state.wandb_id)
    begin.closing.push(lambda _, error, __: tracker.finish(exit_code_of(error)))
    tracker.summary({"parameters": parameters})
    return tracker


# --------------------------------------------------------------- batches, metrics, evaluation, stop


def build_batches(
    begin: Start, first_step: int
) -> Iterator[list[tuple[Sequence[torch.Tensor], int]]]:
    """Yields the micro-batches of each step: ((input_ids, target_ids), number of targets)."""
    trainer, strategy = begin.config.trainer, begin.strategy
    batches = training_batches(
        begin.data.train,
        trainer.batch_size,
        begin.config.seed,
        first_step,
        strategy.rank,
        strategy.world_size,
        pin_memory=strategy.device.type == "cuda",
    )
    return (split_batch(batch, trainer.micro_batch_size) for batch in batches)


def build_metrics(begin: Start, state: State, model: GPT, log: RunLog) -> Metrics:
    config, strategy = begin.config, begin.strategy
    trainer, length = config.trainer, config.data.max_length
    metrics = Metrics(
        strategy,
        NonFiniteCheck(MAX_SKIPS, strategy.device),
        log.console,
        tokens_per_step=trainer.batch_size * length,
        flops_per_token=model.flops_per_token(length),
        peak_flops=peak_flops(strategy.device, strategy.dtype),
        learning_rate=config.optimizer.lr,
    )
    metrics.restore(state)
    return metrics


def build_evaluator(begin: Start) -> Evaluator:
    config, strategy, tokenizer = begin.config, begin.strategy, begin.tokenizer
    val, validation = begin.data.val, None
    if config.trainer.patience and not (val and config.trainer.eval_every != 0):
        begin.notes.append("trainer.patience: no effect without validations during the run")
    size = batch_size = micro_batch_size(begin)
    if val:
        lengths = tokenizer.byte_lengths
        if config.data.synthetic:  # the accuracy needs all logits of a pass at once
            per_window = config.data.max_length * config.model.vocab_size
            size, lengths = min(size, max(1, LOGITS_AT_ONCE // per_window)), None
        validation = Validation(val, lengths, strategy, size)
    return Evaluator(config, strategy, validation, tokenizer, batch_size)


def micro_batch_size(begin: Start) -> int:
    """Returns the number of windows that a rank computes at once."""
    trainer = begin.config.trainer
    per_rank = trainer.batch_size // begin.strategy.world_size
    return min(per_rank, trainer.micro_batch_size or per_rank)


def build_stop(begin: Start, signals: StopSignals, limit: TimeLimit, state: State) -> Stop:
    strategy, trainer = begin.strategy, begin.config.trainer
    targets = begin.data.train.num_targets(trainer.batch_size)
    on_gpu, epoch = strategy.device.type != "cpu", epoch_of(begin.config, begin.data)
    intervals = functools.partial(automatic_intervals, on_gpu=on_gpu, epoch=epoch)
    return Stop(strategy, signals, limit, state, trainer, targets, intervals)
