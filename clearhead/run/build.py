"""Builds the components of a training run from a config.

`build_run(config)` returns a `Run` (run.py), which the loop in train.py trains. Each component owns
its state and receives its inputs as arguments; none has a reference to the run.
"""

import contextlib
import dataclasses
import functools
import time
from pathlib import Path

import torch

from attention import computes_its_scores
from clearhead.checkpoint import run_directory
from clearhead.checkpoint.format import FORMAT, MODEL, OPTIMIZER, State
from clearhead.checkpoint.listing import is_run
from clearhead.checkpoint.saving import Checkpointer, Saver
from clearhead.checkpoint.tensors import load_optimizer, model_from_tensors, read_tensors
from clearhead.compute.cross_entropy import LOGITS_AT_ONCE
from clearhead.compute.optimizers import MAX_SKIPS, NonFiniteCheck, build_optimizer
from clearhead.config.automatic import automatic_intervals
from clearhead.config.schema import Config
from clearhead.errors import RunDirectoryError, exit_code_of, refuse, shorten
from clearhead.files import RowFile, drop_rows_after
from clearhead.output.console import Console
from clearhead.output.report import OVERLAP
from clearhead.output.run_log import Metrics, RunLog
from clearhead.output.summary import describe, introduce
from clearhead.output.tracker import NoTracker, Tracker
from clearhead.parallel import device, launch
from clearhead.parallel.device import build_strategy
from clearhead.parallel.hardware import (
    CoreTime,
    environment,
    free_pinned_memory,
    peak_flops,
    use_expandable_segments,
)
from clearhead.parallel.strategy import Strategy
from clearhead.run.evaluation import Evaluator, Validation
from clearhead.run.lens_runner import build_lens
from clearhead.run.run import Run, translate_errors
from clearhead.run.signals import StopSignals
from clearhead.run.start import RunInputs, epoch_of, initial_weights, start
from clearhead.run.stop import Stop, TimeLimit
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
            inputs = start(config, strategy, closing)
            run = build_components(inputs, signals, started, closing)
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


def build_components(
    inputs: RunInputs, signals: StopSignals, started: float, closing: contextlib.ExitStack
) -> Run:
    """Builds the components. started: the time.monotonic() at the start of `build_run`."""
    config, strategy, data = inputs.config, inputs.strategy, inputs.data
    trainer = config.trainer
    model, trained_model = build_model(inputs, closing)
    wide = device.best_wide_dtype(strategy.device)
    optimizer = build_optimizer(model, config.optimizer, wide, strategy.world_size)
    state = build_state(inputs, model, optimizer)
    stop = build_stop(inputs, signals, started, state)
    log, saver = open_log(inputs, state, model, stop.limit, closing)
    per_rank = trainer.batch_size // strategy.world_size
    size = min(per_rank, trainer.micro_batch_size or per_rank)
    batches = training_batches(
        data.train,
        trainer.batch_size,
        config.seed,
        state.step,
        strategy.rank,
        strategy.world_size,
        pin_memory=strategy.device.type == "cuda",
    )
    run = Run(
        config=config,
        strategy=strategy,
        state=state,
        batches=(split_batch(batch, trainer.micro_batch_size) for batch in batches),
        model=model,
        trained_model=trained_model,
        optimizer=optimizer,
        metrics=build_metrics(inputs, state, model, log.console),
        evaluator=build_evaluator(inputs, size),
        lens=build_lens(
            config, strategy, data, inputs.tokenizer, log.directory, inputs.notes, stop
        ),
        checkpointer=Checkpointer(
            log.directory, saver, strategy, model, optimizer, inputs.named_steps
        ),
        log=log,
        stop=stop,
        cores=CoreTime(torch.get_num_threads()) if strategy.device.type == "cpu" else None,
        closing=closing,
        was_finished=bool(inputs.resumed and inputs.resumed.was_finished),
    )
    facts = describe(config, strategy, data, model.num_parameters(), inputs.is_compiled, size)
    notes = [f"note: {note}" for note in inputs.notes]
    introduce(config, state, log, facts + notes, run.was_finished)
    return run


def build_model(inputs: RunInputs, closing: contextlib.ExitStack) -> tuple[GPT, torch.nn.Module]:
    """Builds the model on its device: from a checkpoint, from trainer.init_from, or new. Returns
    also the same model as it is trained, possibly wrapped and compiled."""
    config, strategy = inputs.config, inputs.strategy
    shape = ModelConfig(**inputs.config.model.model_dump())
    length, head_dim = config.data.max_length, shape.emb_dim // shape.num_heads
    options = {"dtype": strategy.dtype, "device": strategy.device}
    if not computes_its_scores(shape.attention, length, head_dim, **options):
        reason = "computes other attention scores than it declares"
        hint = "add its scores to SCORES in attention.py; attention pages and generate.py use them"
        refuse([("model.attention", shape.attention, reason, hint)])

    def build() -> GPT:
        if inputs.resumed:
            file = inputs.resumed.folder / MODEL
            return model_from_tensors(shape, read_tensors(file), file)
        if config.trainer.init_from:
            return initial_weights(config, inputs.tokenizer, inputs.notes)
        return GPT(shape)

    if strategy.device.type == "cuda" and not (inputs.resumed or config.trainer.init_from):
        model = strategy.new_model(shape)
    else:
        model = strategy.prepare_model(shape, build)
    model.activation_checkpointing = config.trainer.activation_checkpointing
    if inputs.is_compiled and config.trainer.compile == "auto":
        # If the compiler fails, the model runs uncompiled.
        closing.enter_context(torch._dynamo.config.patch(suppress_errors=True))
    trained = strategy.wrap(model, inputs.is_compiled)
    # After the run, the lens can follow the parts of a score in the blocks as model.py has them.
    closing.callback(lambda: [vars(block).pop("forward", None) for block in model.blocks])
    return model, trained


def build_state(inputs: RunInputs, model: GPT, optimizer: torch.optim.Optimizer) -> State:
    """Returns the state of a new run, or that of the checkpoint, and loads the optimizer state."""
    config, strategy, resumed = inputs.config, inputs.strategy, inputs.resumed
    now = {"settings": config.model_dump(), "data": inputs.data.checksums, "format": FORMAT}
    if resumed is None:
        return State(step=0, row={}, **now)
    state = dataclasses.replace(resumed.state, **now)
    state.ended_early &= state.should_stop_early(config.trainer)
    file = resumed.folder / OPTIMIZER
    load_optimizer(file, strategy.on_rank_0(lambda: read_tensors(file)), model, optimizer, strategy)
    without = [n for n, p in model.named_parameters() if p not in optimizer.state]
    if without and optimizer.state:
        reason = "no optimizer state in the checkpoint; if they were frozen, freeze them again"
        inputs.notes.append(shorten(f"parameters with {reason}: {', '.join(without)}"))
    if state.scaler:
        strategy.scaler.load_state_dict(state.scaler)
    return state


def build_stop(inputs: RunInputs, signals: StopSignals, started: float, state: State) -> Stop:
    """Builds the limits of the run. Raises ConfigError if a new run has no time for a step."""
    config, strategy, resumed = inputs.config, inputs.strategy, inputs.resumed
    trainer = config.trainer
    used = resumed.state.used_time(trainer) if resumed else 0.0
    limit = TimeLimit(config, strategy.device, started, used, inputs.is_compiled)

    def check() -> None:
        if not resumed and not limit.has_time():
            reason, hint = "is too short: start and end of the run take longer", "use more minutes"
            refuse([("trainer.max_minutes", trainer.max_minutes, reason, hint)])

    strategy.on_rank_0(check)
    targets = inputs.data.train.num_targets(trainer.batch_size)
    on_gpu, epoch = strategy.device.type != "cpu", epoch_of(config, inputs.data)
    intervals = functools.partial(automatic_intervals, on_gpu=on_gpu, epoch=epoch)
    return Stop(strategy, signals, limit, state, trainer, targets, intervals)


def open_log(
    inputs: RunInputs,
    state: State,
    model: GPT,
    limit: TimeLimit,
    closing: contextlib.ExitStack,
) -> tuple[RunLog, Saver | None]:
    """Opens the run directory. Returns the log and the saver (None on ranks other than 0)."""
    config, strategy = inputs.config, inputs.strategy

    def open_files() -> tuple[Path, Saver, Tracker]:
        with run_directory.writable(Path(config.runs_dir)):
            directory = create_directory(inputs, closing)
            content = stored(inputs.tokenizer, config.data.tokenizer)
            resumed = state if inputs.resumed else None
            saver = Saver(directory, config.trainer.keep, inputs.named_steps, content, resumed)
            closing.callback(saver.close)
            tracker = NoTracker()
            if not (inputs.resumed and inputs.resumed.was_finished):
                tracker = open_tracker(inputs, directory, state, model.num_parameters(), closing)
            return directory, saver, tracker

    opened = strategy.on_rank_0(open_files)
    directory, saver, tracker = opened or (None, None, NoTracker())
    directory = Path(strategy.broadcast(str(directory)))
    state.wandb_id = tracker.run_id or state.wandb_id
    console = Console(strategy.is_rank_0, state.step, config.trainer.max_steps)
    closing.callback(console.close)
    return RunLog(directory, console, tracker, limit.exclude, config.debug), saver


def create_directory(inputs: RunInputs, closing: contextlib.ExitStack) -> Path:
    """Returns the locked run directory: that of `name`, or a new one."""
    config, shape = inputs.config, inputs.config.model
    model_name = f"gpt2-{shape.num_layers}x{shape.emb_dim}"
    directory = run_directory.create(Path(config.runs_dir), config.name, model_name)
    if directory != inputs.locked:  # a new directory
        closing.enter_context(run_directory.lock_directory(directory))
        if is_run(directory):
            reason = f"another process has just started a run in {directory}"
            raise RunDirectoryError("name", directory.name, reason, "use another name")
    return directory


def open_tracker(
    inputs: RunInputs,
    directory: Path,
    state: State,
    parameters: int,
    closing: contextlib.ExitStack,
) -> Tracker:
    """Writes the settings, removes the rows of steps that are computed again, and starts W&B."""
    strategy = inputs.strategy
    run_directory.write_settings(directory, state.settings, state.data, inputs.tokenizer)
    # The row of a step whose evaluation is repeated is written again.
    drop_rows_after(directory, state.step - (state.row is not None))
    started = environment(str(strategy.device), strategy.world_size)
    starts = RowFile(directory / "starts.jsonl")
    about = {"step": state.step, "parameters": parameters, OVERLAP: inputs.data.overlap}
    starts.append(about | started)
    starts.close()
    settings = state.settings | {"environment": started, "tokenizer": inputs.tokenizer.name}
    tracker = Tracker(inputs.config.wandb, directory, settings, state.wandb_id)
    closing.push(lambda _, error, __: tracker.finish(exit_code_of(error)))
    tracker.summary({"parameters": parameters})
    return tracker


def build_metrics(inputs: RunInputs, state: State, model: GPT, console: Console) -> Metrics:
    config, strategy = inputs.config, inputs.strategy
    length = config.data.max_length
    metrics = Metrics(
        strategy,
        NonFiniteCheck(MAX_SKIPS, strategy.device),
        console,
        tokens_per_step=config.trainer.batch_size * length,
        flops_per_token=model.flops_per_token(length),
        peak_flops=peak_flops(strategy.device, strategy.dtype),
        learning_rate=config.optimizer.lr,
    )
    metrics.restore(state)
    return metrics


def build_evaluator(inputs: RunInputs, size: int) -> Evaluator:
    """size: the number of windows that a rank computes at once."""
    config, val, validation = inputs.config, inputs.data.val, None
    if config.trainer.patience and not (val and config.trainer.eval_every != 0):
        inputs.notes.append("trainer.patience: no effect without validations during the run")
    if val:
        lengths, windows = inputs.tokenizer.byte_lengths, size
        if config.data.synthetic:  # the accuracy needs all logits of a pass at once
            per_window = config.data.max_length * config.model.vocab_size
            windows, lengths = min(size, max(1, LOGITS_AT_ONCE // per_window)), None
        validation = Validation(val, lengths, inputs.strategy, windows)
    return Evaluator(config, inputs.strategy, validation, inputs.tokenizer, size)
