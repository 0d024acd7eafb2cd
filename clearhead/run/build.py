"""Builds the components of a training run from a config.

`build_run(config)` returns a `Run` (run.py), which the loop in train.py trains. Each component owns
its state and receives its inputs as arguments; none has a reference to the run.
"""

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from attention import computes_its_scores
from clearhead.checkpoint import run_directory
from clearhead.checkpoint.checkpointer import Checkpointer
from clearhead.checkpoint.format import MODEL, OPTIMIZER, State
from clearhead.checkpoint.resume import check_same_settings, find_start, long_warmup, longer
from clearhead.checkpoint.saver import Saver
from clearhead.checkpoint.tensors import load_optimizer, model_from_tensors, read_tensors
from clearhead.compute.cross_entropy import LOGITS_AT_ONCE
from clearhead.compute.optimizers import NonFiniteCheck, build_optimizer
from clearhead.config.application import is_single_run
from clearhead.config.automatic import automatic_intervals, automatic_values
from clearhead.config.schema import Config
from clearhead.errors import DataError, exit_code_of, refuse, sanitize, shorten
from clearhead.output.console import Console
from clearhead.output.jsonl import RowFile, drop_rows_after
from clearhead.output.machine import environment
from clearhead.output.metrics import Metrics
from clearhead.output.profiler import Profiler
from clearhead.output.run_log import RunLog
from clearhead.output.tracker import NoTracker, Tracker
from clearhead.parallel import device, launch
from clearhead.parallel.build import build_strategy
from clearhead.parallel.device_memory import free_pinned_memory, use_expandable_segments
from clearhead.parallel.micro_batch import check_equal_sizes, check_memory, find_micro_batch
from clearhead.parallel.strategy import Strategy
from clearhead.run.evaluation import Evaluator, Validation
from clearhead.run.init_from import initial_weights
from clearhead.run.lens_runner import build_lens
from clearhead.run.prompts import with_prompts
from clearhead.run.run import Run
from clearhead.run.signals import StopSignals
from clearhead.run.stop import Stop
from clearhead.run.time_limit import TimeLimit
from clearhead.run.tokenizer import find_tokenizer, short_tokens, with_vocabulary
from clearhead.run.translate_errors import translate_errors
from clearhead.tokens.token_stream import check_checksums
from clearhead.tokens.tokenizer_json import stored
from data import LoadedData, load_datasets, split_batch, training_batches
from model import GPT, ModelConfig


def build_run(config: Config, signals: StopSignals | None = None) -> Run:
    """Builds all components. Until all checks have passed, a run directory is only locked.

    signals: requests to stop the run; None in a notebook or a program of the user, whose process
    is afterwards as it was before. Raises a ClearheadError.
    """
    with contextlib.ExitStack() as closing:  # closes the components after an error
        if signals is None:
            signals = closing.push(StopSignals(owns_process=False))  # run.__enter__ enters it
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        closing.callback(free_pinned_memory)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        closing.enter_context(torch.random.fork_rng(devices))
        run = Builder(config, closing).build(signals)
        run.closing = closing.pop_all()
        return run


def check_machine(config: Config) -> None:
    """Raises ConfigError if the settings do not fit this machine or the number of processes."""
    trainer = config.trainer
    refuse(launch.check(config.parallel, trainer.batch_size))
    if launch.max_restarts() and not config.name:
        reason = "torchrun --max-restarts needs a name, otherwise a restart would start a new run"
        refuse([("name", config.name, reason, "set name=NAME")])
    refuse(device.check(trainer.device, trainer.precision, "trainer."))


def start_strategy(config: Config) -> Strategy:
    """Chooses threads, device, precision and distributed strategy, and joins the process group."""
    trainer = config.trainer
    chosen = trainer.device, trainer.precision, config.seed, trainer.threads
    return build_strategy(config.parallel, *chosen)


class Builder:
    """Builds a run. `build` calls the other methods in their order; they share these attributes.

    config: `build` replaces it when settings become known. notes: lines for the user, printed
    before the first step. start: how the run starts (checkpoint/resume.py).
    """

    def __init__(self, config: Config, closing: contextlib.ExitStack):
        self.config, self.closing, self.started = config, closing, time.monotonic()
        self.notes: list[str] = []
        if config.parallel.strategy == "fsdp":
            use_expandable_segments()
        check_machine(config)  # may initialize CUDA
        self.strategy = start_strategy(config)
        closing.push(lambda _, error, __: self.strategy.close(exit_code_of(error)))

    def build(self, signals: StopSignals) -> Run:
        with translate_errors(self.config, self.strategy):
            self.complete_config()
            with self.strategy.raise_on_all_ranks():  # other machines may have less memory
                refuse(check_memory(self.config, self.strategy))
            self.data = self.load_data()
            self.on_gpu = self.strategy.device.type != "cpu"
            values = automatic_values(self.config, self.on_gpu, self.epoch())
            self.config = self.config.with_values(values)
            self.config = with_prompts(self.config, self.strategy, self.data, self.tokenizer)
            self.model = self.build_model()
            self.is_compiled = self.should_compile()
            if self.is_compiled:
                refuse(check_equal_sizes(self.config, self.strategy))
            trained_model = self.strategy.wrap(self.model, self.is_compiled)
            wide = device.best_wide_dtype(self.strategy.device)
            self.optimizer = build_optimizer(self.model, self.config.optimizer, wide)
            if self.config.trainer.micro_batch_size == "auto":
                size = find_micro_batch(self.config, self.strategy, self.is_compiled)
                self.config = self.config.with_values({"trainer.micro_batch_size": size})
            if self.start.state is None:
                self.strategy.on_rank_0(self.check_time)
            self.state = self.restore()
            self.notes += long_warmup(self.config)
            saver, log = self.open_log()
            self.evaluator = self.build_evaluator()
            config, strategy = self.config, self.strategy
            targets = self.data.train.num_targets(config.trainer.batch_size)
            run = Run(
                config=config,
                strategy=strategy,
                state=self.state,
                batches=self.build_batches(self.state.step),
                model=self.model,
                trained_model=trained_model,
                optimizer=self.optimizer,
                metrics=self.build_metrics(log),
                evaluator=self.evaluator,
                lens=build_lens(
                    config, strategy, self.data, self.tokenizer, log.directory, self.notes
                ),
                checkpointer=Checkpointer(
                    log.directory, saver, strategy, self.model, self.optimizer
                ),
                log=log,
                stop=Stop(
                    strategy,
                    signals,
                    self.limit,
                    self.state,
                    config.trainer,
                    targets,
                ),
                intervals=functools.partial(
                    automatic_intervals, on_gpu=self.on_gpu, epoch=self.epoch()
                ),
                closing=self.closing,
                was_finished=self.start.was_finished,
            )
            self.introduce(log)
            return run

    def complete_config(self) -> None:
        """Adds the settings of the checkpoint to resume, if there is one, decides how the run
        starts, and loads or trains the tokenizer."""
        check_same_settings(self.config, self.strategy)
        self.config, self.start = find_start(self.config, self.strategy, self.closing, self.notes)
        checkpoint = self.start.checkpoint
        self.tokenizer = find_tokenizer(self.config, self.strategy, checkpoint, self.notes)
        self.config = with_vocabulary(self.config, self.tokenizer)
        state = self.start.state
        used = state.used_time(self.config.trainer) if state else 0.0
        self.limit = TimeLimit(self.config, self.strategy.device, self.started, used)

    # --------------------------------------------------------------------- data and model

    def load_data(self) -> LoadedData:
        """Opens the datasets. Raises DataError if they differ from the checkpoint or rank 0."""
        config, strategy, path = self.config, self.strategy, self.config.data.path
        with strategy.raise_on_all_ranks():  # other machines may not have the files
            data = load_datasets(config.data, self.tokenizer)
            if self.start.state:
                hint = "for a new run with these data, use another name"
                saved = self.start.state.data or []
                is_old = any(isinstance(checksum, list) for _, checksum in saved)
                if is_old and (weights := config.data.weights):
                    reason = "version 3, which wrote the checkpoint, had another order of windows"
                    raise DataError("data.weights", weights, reason, hint)
                check_checksums(saved, data.checksums, path, "the checkpoint", hint)
        of_rank_0 = strategy.broadcast(data.checksums)
        with strategy.raise_on_all_ranks():
            hint = "give every machine the same data"
            check_checksums(of_rank_0, data.checksums, path, "rank 0", hint)
        if self.start.state is None:
            self.notes += short_tokens(config, self.tokenizer, data)
        return data

    def build_batches(self, first_step: int) -> Iterator[list[tuple[Sequence[torch.Tensor], int]]]:
        """Yields the micro-batches of each step: ((input_ids, target_ids), number of targets)."""
        batches = training_batches(
            self.data.train,
            self.config.trainer.batch_size,
            self.config.seed,
            first_step,
            self.strategy.rank,
            self.strategy.world_size,
            pin_memory=self.strategy.device.type == "cuda",
        )
        size = self.config.trainer.micro_batch_size
        return (split_batch(batch, size) for batch in batches)

    def build_model(self) -> GPT:
        """Builds the model on its device: from a checkpoint, from trainer.init_from, or new."""
        shape = ModelConfig(**self.config.model.model_dump())
        length, head_dim = self.config.data.max_length, shape.emb_dim // shape.num_heads
        options = {"dtype": self.strategy.dtype, "device": self.strategy.device}
        if not computes_its_scores(shape.attention, length, head_dim, **options):
            reason = "computes other attention scores than it declares"
            hint = (
                "add its scores to SCORES in attention.py; attention pages and generate.py use them"
            )
            refuse([("model.attention", shape.attention, reason, hint)])

        def build() -> GPT:
            if self.start.checkpoint:
                file = self.start.checkpoint / MODEL
                return model_from_tensors(shape, read_tensors(file), file)
            if not self.config.trainer.init_from:
                return GPT(shape)
            return initial_weights(self.config, self.tokenizer, self.notes)

        model = self.strategy.prepare_model(shape, build)
        model.activation_checkpointing = self.config.trainer.activation_checkpointing
        return model

    def should_compile(self) -> bool:
        """Returns whether the trained model is compiled."""
        trainer, length = self.config.trainer, self.config.data.max_length
        if trainer.compile != "auto":
            return trainer.compile
        if trainer.max_steps is None:
            return False
        tokens = trainer.batch_size * length * trainer.max_steps
        flops = self.model.flops_per_token(length) * tokens / self.strategy.world_size
        if not device.should_compile(self.strategy.device, flops):
            if self.strategy.device.type == "cuda" and not device.can_compile(self.strategy.device):
                needs = "Triton, a C compiler and the headers of Python (gcc, python3-dev)"
                self.notes.append(f"trainer.compile=auto: not compiled, which needs {needs}")
            return False
        # If the compiler fails, the model runs uncompiled.
        self.closing.enter_context(torch._dynamo.config.patch(suppress_errors=True))
        return True

    def epoch(self) -> int:
        """Returns the number of steps in which each window is read once."""
        return math.ceil(len(self.data.train) / self.config.trainer.batch_size)

    def check_time(self) -> None:
        """Raises ConfigError if there is no time for a step."""
        if not self.limit.has_time():
            reason, hint = "is too short: start and end of the run take longer", "use more minutes"
            minutes = self.config.trainer.max_minutes
            refuse([("trainer.max_minutes", minutes, reason, hint)])

    def restore(self) -> State:
        """Returns the state of a new run, or that of the checkpoint, and loads the optimizer
        state."""
        new = State(step=0, settings=self.config.model_dump(), data=self.data.checksums)
        if self.start.state is None:
            return new
        state = dataclasses.replace(self.start.state, settings=new.settings, data=new.data)
        state.ended_early &= state.should_stop_early(self.config.trainer)
        file = self.start.checkpoint / OPTIMIZER
        tensors = self.strategy.on_rank_0(lambda: read_tensors(file))
        load_optimizer(file, tensors, self.model, self.optimizer, self.strategy)
        without = [n for n, p in self.model.named_parameters() if p not in self.optimizer.state]
        if without and self.optimizer.state:
            reason = "no optimizer state in the checkpoint; if they were frozen, freeze them again"
            self.notes.append(shorten(f"parameters with {reason}: {', '.join(without)}"))
        if state.scaler:
            self.strategy.scaler.load_state_dict(state.scaler)
        return state

    # ----------------------------------------------------------------- the run directory

    def open_log(self) -> tuple[Saver | None, RunLog]:
        """Opens the run directory. Returns its saver (None on ranks other than 0) and the log."""
        config, strategy = self.config, self.strategy
        opened = strategy.on_rank_0(self.open_directory)
        directory, saver, tracker = opened or (None, None, NoTracker())
        directory = Path(strategy.broadcast(str(directory)))
        self.state.wandb_id = tracker.run_id or self.state.wandb_id
        profiles = config.trainer.profile and strategy.is_rank_0
        profiler = Profiler(profiles, directory / "profile", strategy.device)
        self.closing.callback(profiler.close)
        console = Console(strategy.is_rank_0, self.state.step, config.trainer.max_steps)
        self.closing.callback(console.close)
        log = RunLog(directory, console, tracker, profiler, self.limit.exclude, config.debug)
        return saver, log

    def open_directory(self) -> tuple[Path, Saver, Tracker]:
        """Creates or reuses the run directory, on rank 0. Returns its path, saver and tracker."""
        config, state = self.config, self.state
        with run_directory.writable(Path(config.runs_dir)):
            directory = self.create_directory()
            resumed = state if self.start.state else None
            content = stored(self.tokenizer, config.data.tokenizer)
            saver = Saver(directory, config.trainer.keep, content, resumed)
            self.closing.callback(saver.close)
            if self.start.was_finished:
                return directory, saver, NoTracker()
            parameters = self.model.num_parameters()
            self.notes.extend(saver.disk_space_notes(12 * parameters))
            run_directory.write_settings(directory, state.settings, state.data, self.tokenizer)
            drop_rows_after(directory, state.step if self.start.state else -1)
            started = environment(str(self.strategy.device), self.strategy.world_size)
            starts = RowFile(directory / "starts.jsonl")
            starts.append({"step": state.step, "parameters": parameters} | started)
            starts.close()
            settings = state.settings | {"environment": started}
            settings["tokenizer"] = self.tokenizer.name
            tracker = Tracker(config.wandb, directory, settings, state.wandb_id)
            self.closing.push(lambda _, error, __: tracker.finish(exit_code_of(error)))
            tracker.summary({"parameters": parameters})
            self.notes.extend(config.wandb.ignored())
            return directory, saver, tracker

    def create_directory(self) -> Path:
        """Returns the locked run directory: that of `name`, or a new one."""
        config = self.config
        shape = f"gpt2-{config.model.num_layers}x{config.model.emb_dim}"
        directory = run_directory.create(Path(config.runs_dir), config.name, shape)
        if directory != self.start.locked:  # a new directory
            self.closing.enter_context(run_directory.lock_directory(directory))
            run_directory.check_new(directory)
        return directory

    # -------------------------------------------------------- metrics, evaluation, output

    def build_metrics(self, log: RunLog) -> Metrics:
        trainer, length = self.config.trainer, self.config.data.max_length
        metrics = Metrics(
            self.strategy,
            NonFiniteCheck(trainer.max_skips, self.strategy.device),
            log.console,
            tokens_per_step=trainer.batch_size * length,
            flops_per_token=self.model.flops_per_token(length),
            peak_flops=device.peak_flops(self.strategy.device, self.strategy.dtype),
            learning_rate=self.config.optimizer.lr,
        )
        metrics.restore(self.state)
        return metrics

    def micro_batch(self) -> int:
        """Returns the number of windows that a rank computes at once."""
        per_rank = self.config.trainer.batch_size // self.strategy.world_size
        return min(per_rank, self.config.trainer.micro_batch_size or per_rank)

    def build_evaluator(self) -> Evaluator:
        config, val, validation = self.config, self.data.val, None
        tokenizer, batch_size = self.tokenizer, self.micro_batch()
        if config.trainer.patience and not (val and config.trainer.eval_every != 0):
            self.notes.append("trainer.patience: no effect without validations during the run")
        if val:
            lengths, size = None, batch_size
            if config.data.synthetic:  # the accuracy needs all logits of a pass at once
                per_window = config.data.max_length * config.model.vocab_size
                size = min(size, max(1, LOGITS_AT_ONCE // per_window))
            else:
                lengths = tokenizer.byte_lengths
            validation = Validation(val, lengths, self.strategy, size)
        return Evaluator(config, self.strategy, validation, tokenizer, batch_size)

    def introduce(self, log: RunLog) -> None:
        """Prints facts, notes, run directory and first step before the training starts."""
        step = self.state.step
        lines = [*self.describe(), *(f"note: {note}" for note in self.data.notes + self.notes)]
        lines.append(f"run directory: {log.directory}")
        if where := log.tracker.where():
            lines.append(f"W&B: {where}")
        if is_single_run() and self.config.lens.every != 0 and not self.start.was_finished:
            given = f"runs_dir={self.config.runs_dir}"
            setting = "" if given == "runs_dir=runs" else f" {shlex.quote(given)}"
            lines.append(f"watch it live: python -m scripts.live{setting}")
        if self.start.was_finished:
            more = longer(self.config, self.state)
            lines.append(f"already finished after step {step}; to train further, use {more}")
        elif step > 0:
            lines.append(f"resuming after step {step}")
        for line in lines:
            log.console.print(line)

    def describe(self) -> list[str]:
        """Returns lines about model, data and batch size."""
        trainer, world, data = self.config.trainer, self.strategy.world_size, self.data
        compiled = ", compiled" if self.is_compiled else ""
        extra = ", activation checkpointing" if trainer.activation_checkpointing else ""
        val, used = len(data.val or ()), trainer.eval_windows
        evaluated = f"; each evaluation uses {used:,}" if used < val else ""
        per_rank, size = trainer.batch_size // world, self.micro_batch()
        ranks = f", {per_rank} on each of {world} ranks" if world > 1 else ""
        micro = f", in micro-batches of {size}" if size < per_rank else ""
        parameters, where = self.model.num_parameters(), self.strategy.describe()
        windows = f"{len(data.train):,} windows of {self.config.data.max_length} tokens"
        epochs = (trainer.max_steps or 0) * trainer.batch_size / len(data.train)
        read = f", {epochs:,.2f} epochs" if epochs and not self.config.data.synthetic else ""
        limits = [f"{trainer.max_steps:,} steps"] if trainer.max_steps else []
        limits += [f"{trainer.max_minutes:g} minutes"] if trainer.max_minutes else []
        source = f" from {path_as_given(self.config.data.path)}" if self.config.data.path else ""
        return [
            f"model: {parameters:,} parameters {where}{compiled}{extra}",
            f"training data: {windows}{source}",
            f"validation data: {val:,} windows{evaluated}",
            f"batch size: {trainer.batch_size} windows per step{ranks}{micro}",
            f"training: {', at most '.join(limits)}{read}",
        ]


def path_as_given(path: str | list[str]) -> str:
    """Returns data.path in one line, as it is typed in the working directory."""
    paths = [path] if isinstance(path, str) else path
    typed = ", ".join(each.removeprefix(f"{Path.cwd()}/") for each in paths)
    return sanitize(shorten(typed), keep="")
