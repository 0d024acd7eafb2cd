"""Train GPT-2 from a text and watch its attention heads learn.

    python train.py model=gpt2-small
    python train.py model=gpt2-nano data.path=my.txt trainer.max_steps=500
    python train.py --help

Everything a run leaves behind is in runs/<name>/. The parts stand in training/, the model in
model.py and attention.py, the data in data.py, what is seen of the heads in lens/. They are
imported when a run begins, so that a mistyped setting is answered before torch is loaded.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path

from errors import (
    AGAINST_DIVERGENCE,
    DataError,
    DivergedError,
    NotSavedError,
    RankLostError,
    exit_code_of,
    format_error,
    refuse,
)
from training.config.command_line import begin_quickly, command
from training.config.schema import OF_THE_MACHINE, Settings, complete, different_settings
from training.reporting import summary as announce
from training.reporting.terminal import never_fail
from training.signals import StopSignals, end_quietly, exit_code

if typing.TYPE_CHECKING:
    from lens import Snapshot


SWEEPING = {"-m", "--multirun"}  # on the command line


class Trainer:
    """One training run: its parts, and the loop that they are for.

    signals: what asks it to stop, if anything does.
    """

    def __init__(self, settings: Settings, signals: StopSignals | None = None):
        """Builds all the parts; nothing is written before every one of them fits."""
        from training.distributed import device, launch
        from training.distributed.strategy import build_strategy

        self.settings = settings
        self.signals = signals or StopSignals(is_main=True, relayed=False)
        self.folder = self.saver = self.taken = self.lock = None
        self.opened = contextlib.ExitStack()  # what is closed at the end, the last one first
        self.exit_code = 0
        trainer = settings.trainer
        batch_size = None if settings.overrides else trainer.batch_size
        refuse(launch.check(settings.parallel, trainer.device, batch_size))
        refuse(device.check(trainer.device, trainer.precision, "trainer."))
        self.parallel = build_strategy(
            settings.parallel, trainer.device, trainer.precision, settings.seed
        )
        self.opened.callback(lambda: self.parallel.close(self.exit_code))
        self.notes: list[str] = []  # what else there is to know about the run
        try:
            with self.explaining(step=False):
                self.agree_on_settings()
                self.find_checkpoint()
                self.check_memory()
                self.load_data()
                self.build_model()
                self.build_lens()
                self.build_optimizer()
                self.fit_micro_batch()
                self.build_state()
                self.open_run()
        except BaseException as error:
            self.close(exit_code_of(error))
            raise
        self.seconds_watching = self.seconds_saving = 0.0
        self.train_loss: float | None = None
        self.last_sample = ""
        self.uploaded: str | None = None  # what its model is called on W&B, once it is to be there

    def agree_on_settings(self) -> None:
        """Completes the settings with those of the run that trainer.resume names, which rank 0
        reads. Raises ConfigError on all ranks where they were started with different ones."""
        from training.checkpoint import resume
        from training.distributed import device, launch
        from training.distributed.strategy import build_strategy

        rank_0 = self.parallel.on_rank_0(lambda: resume.stored_settings(self.settings))
        stored = self.parallel.broadcast(rank_0)
        with self.parallel.raise_on_all_ranks():
            if stored and self.settings.overrides:
                self.settings, changed = complete(self.settings, *stored)
                if changed:
                    self.notes.append(
                        f"settings from {stored[0]}, overridden: {', '.join(changed)}"
                    )
                trainer = self.settings.trainer
                refuse(launch.check(self.settings.parallel, trainer.device, trainer.batch_size))
                refuse(device.check(trainer.device, trainer.precision, "trainer."))
        settings = self.settings
        mine = json.loads(json.dumps(dataclasses.asdict(settings)))
        of_rank_0 = self.parallel.broadcast(mine)
        with self.parallel.raise_on_all_ranks():
            refuse(different_settings(mine, of_rank_0, self.parallel.rank))
        if stored:  # the precision and the seed are those of the run
            trainer = settings.trainer
            self.parallel = build_strategy(
                settings.parallel, trainer.device, trainer.precision, settings.seed
            )

    def find_checkpoint(self) -> None:
        """What the run goes on from, if from anything: the main rank looks, and tells. Refuses
        settings that would make it another run."""
        from training.checkpoint import format as checkpoint
        from training.checkpoint import resume
        from training.checkpoint import run_directory as directory

        def look() -> tuple[str, dict, bool, str] | None:
            own = resume.own_directory(self.settings)
            # A run that has checkpoints needs no other files.
            is_run = own and (checkpoint.has_checkpoint(own) or not directory.is_occupied(own))
            if is_run and own.is_dir():
                self.take(own)  # from here on nobody else changes what is in it
            found, problems = resume.find_checkpoint(self.settings)
            refuse(problems)
            if not found:
                return None
            in_place = resume.goes_on(found, self.settings)
            run = own if in_place else checkpoint.run_of(found) or found
            return str(found), dataclasses.asdict(checkpoint.load_state(found)), in_place, str(run)

        # Other ranks may not see the directory: what rank 0 finds holds for all.
        shared = self.parallel.broadcast(self.parallel.on_rank_0(look))
        found, state, self.in_place, run = shared or (None, None, False, None)
        self.resume_from = found and Path(found)
        self.saved = checkpoint.State(**state) if state else None
        trainer = self.settings.trainer
        before = self.saved.settings if self.saved else {}
        trainer.choose(before.get("trainer", {}))
        if self.settings.lens.every is None:
            known = before.get("lens", {}).get("every")  # 0: it was off, and now is asked for
            self.settings.lens.every = known or self.settings.lens.interval(trainer.max_steps)
        if self.saved:
            now = dataclasses.asdict(self.settings)
            problems = resume.changed_settings(self.saved.settings, now, Path(run))
            if trainer.resume_override:
                self.notes += [f"{key}={value}: {cause}" for key, value, cause, _ in problems]
                problems = [problem for problem in problems if problem[0] in resume.FIXED]
            if not self.in_place and self.saved.step >= trainer.max_steps:
                cause = f"{found} is of step {self.saved.step}, nothing is left to train"
                fix = "a new run from it needs more steps"
                problems.append(("trainer.max_steps", trainer.max_steps, cause, fix))
            with self.parallel.raise_on_all_ranks():
                refuse(problems)

    def take(self, folder: Path) -> None:
        """Keeps other processes out of a run's directory."""
        from files import clear
        from training.checkpoint import run_directory as directory

        self.taken = folder
        self.lock = directory.take(folder)
        if self.lock:
            self.opened.enter_context(self.lock)
        clear(folder)

    def check_memory(self) -> None:
        """Refuses what cannot fit, before any of it is allocated."""
        from training.planning.micro_batch import check_memory

        with self.parallel.raise_on_all_ranks():  # another machine may have less
            problems, notes = check_memory(self.settings, self.parallel)
            refuse(problems)
        self.notes += notes

    def load_data(self) -> None:
        """Tokens, the windows to train on and their order, the windows to validate on."""
        from data import (
            check_same,
            check_unchanged,
            evenly,
            load_datasets,
            training_batches,
        )
        from tokens.tokenizers import bytes_per_token, get_tokenizer
        from training.evaluation import Validation

        settings, trainer = self.settings, self.settings.trainer
        self.tokenizer = get_tokenizer(settings.data.tokenizer)
        with self.parallel.raise_on_all_ranks():  # another machine may lack the files
            self.data = load_datasets(settings.data)
            if self.saved:
                try:
                    check_unchanged(self.saved.data, self.data.checksums, settings.data.path)
                except DataError as error:
                    if not trainer.resume_override:
                        raise
                    self.notes.append(error.without_hint)
        main_has = self.parallel.broadcast(self.data.checksums)
        with self.parallel.raise_on_all_ranks():
            check_same(main_has, self.data.checksums, settings.data.path)
        ids = self.tokenizer.n_vocab
        if settings.model.vocab_size >= 2 * ids and not settings.data.synthetic:
            what = f"data.tokenizer={settings.data.tokenizer} has {ids:,} ids"
            enough = f"model.vocab_size={ids} is enough"
            self.notes.append(f"model.vocab_size={settings.model.vocab_size}: {what}; {enough}")
        self.train_set, self.val_set = self.data.train, self.data.val
        self.batches = training_batches(
            self.train_set,
            trainer.batch_size,
            settings.seed,
            self.saved.step if self.saved else 0,
            self.parallel.rank,
            self.parallel.world_size,
            pin_memory=self.parallel.device.type == "cuda",
        )
        self.tokens_per_step = trainer.batch_size * settings.data.max_length
        self.validation = None
        if self.val_set:
            windows = evenly(self.val_set, trainer.eval_windows)
            bytes_of = functools.partial(bytes_per_token, self.tokenizer)
            bytes_of = None if settings.data.synthetic else bytes_of
            self.validation = Validation(self.val_set, windows, bytes_of)

    def build_model(self) -> None:
        """`model` is the module itself: looked into, saved, validated. `fast_model` shares its
        parameters and may be compiled: trained."""
        from model import GPT
        from training.checkpoint import format as checkpoint
        from training.checkpoint import resume
        from training.distributed import device

        settings, trainer = self.settings, self.settings.trainer

        def build() -> GPT:
            if self.saved:
                model = checkpoint.empty_model(settings.model)
                checkpoint.load_parameters(self.resume_from, model)
                return model
            if not trainer.init_from:
                return GPT(settings.model)
            model, problems, notes = resume.initial_weights(settings)
            refuse(problems)
            self.notes += notes
            return model

        self.model = self.parallel.prepare_model(settings.model, build)
        self.model.activation_checkpointing = trainer.activation_checkpointing
        self.flops_per_token = self.model.flops_per_token(settings.data.max_length)
        self.peak_flops = device.peak_flops(self.parallel.device)
        all_flops = self.flops_per_token * self.tokens_per_step * trainer.max_steps
        self.compiled = device.should_compile(
            trainer.compile, self.parallel.device, all_flops / self.parallel.world_size
        )
        self.fast_model = self.parallel.wrap(self.model, self.compiled)

    def build_lens(self) -> None:
        from lens import Lens

        self.lens = None
        if self.settings.lens.every == 0:
            return
        with self.never_in_the_way("lens: failed and is off from here on"):
            self.lens = Lens(
                self.settings.lens,
                encode=self.tokenizer.encode_ordinary,
                token_bytes=self.tokenizer.decode_single_token_bytes,
                context_length=self.settings.data.max_length,
                vocabulary=self.train_set.common_tokens(),
                bos=self.tokenizer.eot_token,
            )
        if self.parallel.all_reduce_max(self.lens is None):  # off on one rank: off on all
            self.lens = None

    def build_optimizer(self) -> None:
        from training.optim.optimizers import build_optimizer, learning_rate

        settings, trainer = self.settings, self.settings.trainer
        self.optimizer = build_optimizer(self.model, settings.optimizer)
        self.learning_rate = functools.partial(
            learning_rate,
            config=settings.optimizer,
            warmup_steps=trainer.warmup_steps,
            max_steps=trainer.max_steps,
        )

    def fit_micro_batch(self) -> None:
        """trainer.micro_batch_size=auto becomes a number, which the run's settings then have."""
        if self.settings.trainer.micro_batch_size == "auto":
            from training.planning.micro_batch import find_micro_batch

            found = find_micro_batch(self.settings, self.parallel, self.model, self.compiled)
            self.settings.trainer.micro_batch_size = found

    def build_state(self) -> None:
        """Where the run stands: at its beginning, or where the checkpoint has it."""
        from training.checkpoint import format as checkpoint
        from training.optim.nonfinite import LossSpikes, NonFiniteCheck
        from training.reporting.metrics import Meter

        trainer = self.settings.trainer
        self.meter = Meter()
        self.best_before: tuple[float | None, int | None] = None, None
        limit = 1 if trainer.on_nonfinite == "stop" else trainer.max_skips
        self.guard, self.spikes = NonFiniteCheck(limit, self.parallel.device), LossSpikes()
        self.state = checkpoint.State(step=0, settings=dataclasses.asdict(self.settings))
        self.state.data = self.data.checksums
        if not self.saved:
            return
        self.lens_before = self.saved.settings.get("lens", {})
        self.saved.settings, self.saved.data = self.state.settings, self.state.data
        self.saved.format = checkpoint.FORMAT  # of what is written from here on
        self.state = self.saved
        checkpoint.load_optimizer(self.resume_from, self.model, self.optimizer, self.parallel)
        again = self.settings.trainer.resume_override  # with something that may mend it
        self.guard.restore(self.state.skipped, 0 if again else self.state.skipped_in_a_row)
        self.spikes = LossSpikes(**self.state.spikes)
        if self.state.scaler:
            self.parallel.scaler.load_state_dict(self.state.scaler)

    def open_run(self) -> None:
        """The run's directory, its log, its place on W&B: the main rank's affair."""
        from training.checkpoint import resume
        from training.checkpoint import run_directory as directory
        from training.checkpoint.saver import Saver
        from training.reporting.console import Console
        from training.reporting.jsonl import RowFile, drop_rows_after
        from training.reporting.profiler import build_profiler
        from training.reporting.tracker import NoTracker, Tracker, last_wandb_id

        settings, state = self.settings, self.state
        in_place = self.in_place  # the run itself continues; else it is new, or a branch
        finished = state.step >= settings.trainer.max_steps
        self.tracker = NoTracker()

        def open_run() -> str:
            if in_place:
                folder = resume.own_directory(settings)
            else:
                name = settings.name or directory.name_before_restart()
                folder = directory.create(name, model_name(settings))
                if directory.was_cut_off(folder):  # before its first checkpoint
                    state.wandb_id = last_wandb_id(folder)
            if self.taken != folder:  # it was not there before
                self.take(folder)
                directory.check_new(folder)
            directory.mark_launch(folder)
            self.saver = Saver(folder, settings.trainer.keep, state if in_place else None)
            self.opened.callback(self.saver.close)
            if not finished:  # else there is nothing to do, and the record stays as it is
                self.notes += self.saver.too_large(12 * self.model.num_parameters())
                directory.write_settings(folder, state.settings)
                drop_rows_after(folder, state.step if self.saved else -1)
                self.tracker = Tracker(settings.wandb, folder, state.settings, state.wandb_id)
                self.opened.callback(lambda: self.tracker.finish(self.exit_code))
                self.tracker.summary({"parameters": self.model.num_parameters()})
                self.notes += settings.wandb.ignored()
                self.samples = RowFile(folder / "samples.jsonl")
                self.opened.callback(self.samples.close)
            return str(folder)

        def in_words() -> str:
            with directory.writable(directory.RUNS / (settings.name or "")):
                return open_run()

        if not in_place:  # a branch has a W&B run and a best checkpoint of its own
            state.wandb_id = state.best_loss = state.best_step = None
        self.folder = Path(self.parallel.broadcast(self.parallel.on_rank_0(in_words)))
        state.wandb_id = self.tracker.run_id or state.wandb_id
        self.console = Console(self.parallel.is_rank_0, state.step, settings.trainer.max_steps)
        self.opened.callback(self.console.close)
        self.profiler = build_profiler(
            settings.trainer.profile, self.folder / "profile", self.parallel, state.step + 1
        )
        self.opened.callback(self.profiler.close)

    @property
    def micro_batch_size(self) -> int:
        """Windows at once on this rank."""
        share = self.settings.trainer.batch_size // self.parallel.world_size
        return min(share, self.settings.trainer.micro_batch_size or share)

    def close(self, code: int) -> None:
        """Closes what is open: what is being written comes to its end. code: the exit code."""
        self.exit_code = code
        self.opened.close()

    # ------------------------------------------------------------------------------- the loop

    def train(self) -> None:
        """Trains to the last step, looking up as often as the settings say."""
        settings = self.settings.trainer
        started = time.perf_counter()
        announce.introduce(self)
        try:
            with self.explaining():
                self.signals.phase = "training"
                if self.state.step == 0:
                    self.look_up({})
                self.meter.start(self.state.losses or [])
                first = self.state.step
                while self.state.step < settings.max_steps:
                    with self.profiler.step():
                        self.meter.add(*self.step())
                    metrics = self.measure() if self.is_due(settings.log_every) else {}
                    with self.meter.paused():
                        self.look_up(metrics)
                        self.save_if_due(metrics)
                    if self.was_told_to_stop():
                        self.stop()
                self.signals.phase = "finishing"
                if self.state.step > first:
                    self.finish_saving()
                    with self.never_in_the_way("W&B: the model was not uploaded"):
                        self.uploaded = self.tracker.log_model(self.state.best_step)
        except Exception as error:
            what = "Diverged" if isinstance(error, DivergedError) else "Failed"
            self.tracker.alert(what, format_error(error), "ERROR")
            raise
        finally:
            self.write_report()  # of a run that failed, too: it is the one to look at
        seconds = time.perf_counter() - started
        self.console.close()
        self.tell_best()
        announce.conclude(self, seconds)

    def step(self):
        """One optimizer step: (mean loss, norm of the gradient), both still on the device."""
        settings = self.settings.trainer
        mean_loss = 0.0
        self.parallel.reseed(self.settings.seed, self.state.step)
        for input_ids, target_ids, weight, more_to_come in self.micro_batches():
            with self.parallel.no_sync(more_to_come):
                with self.profiler.phase("forward"), self.parallel.autocast():
                    _, loss = self.fast_model(input_ids, target_ids)
                loss = loss * weight  # each target counts the same, whatever the micro-batches
                with self.profiler.phase("backward"):
                    self.parallel.backward(loss)
            mean_loss = mean_loss + loss.detach()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.state.step, peak=group["peak_lr"])
        with self.profiler.phase("optimizer"):
            norm = self.parallel.update(self.model, self.optimizer, settings.grad_clip, self.guard)
        self.state.step += 1
        self.state.tokens += self.tokens_per_step
        if self.parallel.device.type == "cpu":  # where looking costs nothing; else when measuring
            self.check_numbers()
        return mean_loss, norm

    def micro_batches(self):
        """(input_ids, target_ids, weight, whether more of this step is to come), each.

        The mean loss of a micro-batch, times its weight, is its part of the step's loss: the
        mean over all ranks of the ranks' sums is the mean over all targets of all ranks.
        """
        from data import split_batch

        size = self.settings.trainer.micro_batch_size
        parts = split_batch(self.train_set, next(self.batches), size)
        (total,) = self.parallel.all_reduce_sum(sum(count for _, count in parts))
        for number, (tensors, count) in enumerate(parts, start=1):
            on_device = self.train_set.expand(*self.parallel.to_device(*tensors))
            yield *on_device, count * self.parallel.world_size / total, number < len(parts)

    def measure(self) -> dict[str, float]:
        """The training metrics since the last line of the log; the only wait for the device."""
        state, losses = self.state, self.meter.losses(self.parallel)
        self.check_numbers()
        finite = [loss for loss in losses if math.isfinite(loss)]  # the others were left out
        self.train_loss = sum(finite) / len(finite) if finite else math.nan
        spikes = self.spikes.count
        scores = [z for loss in losses if (z := self.spikes.add(loss)) is not None]
        if self.spikes.count > spikes:
            line = f"step {state.step}: the loss rose to {max(finite):.2f}, far above those before"
            self.console.print(line)
            self.tracker.alert("Loss spike", line, "WARN")
        speed = self.tokens_per_step * self.meter.steps_per_second()
        rate = self.optimizer.param_groups[0]["lr"]
        self.console.step(state.step, self.train_loss, rate, speed)
        metrics = {
            "train/loss": self.train_loss,
            "train/learning_rate": rate,
            "train/grad_norm": float(self.meter.grad_norm),
            "train/tokens_per_second": speed,
            "train/skipped_steps": state.skipped,
            "train/loss_spikes": self.spikes.count,
        }
        if scores:
            metrics["train/loss_z_score"] = max(scores)
        if self.peak_flops:
            share = self.flops_per_token * speed / self.parallel.world_size / self.peak_flops
            metrics["train/mfu"] = share
        self.meter.start()
        return metrics

    def check_numbers(self) -> None:
        """Counts skipped steps; raises DivergedError when there were too many.

        The same steps are skipped on all ranks.
        """
        state = self.state
        before, (state.skipped, state.skipped_in_a_row, halted) = state.skipped, self.guard.read()
        if halted:
            limit, last = self.guard.limit, state.step - halted + 1
            times = f"{limit} in a row" if limit > 1 else "on_nonfinite"
            raise DivergedError(
                "optimizer.lr",
                self.settings.optimizer.lr,
                f"the loss or gradient of step {last - limit + 1} is no finite number ({times})",
                f"{AGAINST_DIVERGENCE}; {self.intact()}",
            )
        if state.skipped > before:
            more = state.skipped - before
            which = f"step {state.step}" if more == 1 else f"{more} steps up to {state.step}"
            row = f"{state.skipped_in_a_row} in a row, {self.guard.limit} end the run"
            line = f"{which} left out: the loss or gradient was not finite ({row})"
            self.console.print(line)
            self.tracker.alert("Steps left out", line, "WARN")

    def finite(self, loss: float) -> float:
        """The validation loss; raises DivergedError when it is no number. The same on all ranks."""
        if not math.isfinite(loss):
            raise DivergedError(
                "optimizer.lr",
                self.settings.optimizer.lr,
                f"the validation loss is {loss} at step {self.state.step}",
                f"{AGAINST_DIVERGENCE}; {self.intact()}",
            )
        return loss

    @contextlib.contextmanager
    def explaining(self, step: bool = True):
        """Errors inside are raised as what they mean to the user, where that can be told. step:
        whether memory that runs out is that of a step."""
        from training.planning.micro_batch import is_out_of_memory, what_would_fit

        try:
            yield
        except Exception as error:
            if step and is_out_of_memory(error):
                windows = self.micro_batch_size
                raise what_would_fit(
                    self.settings, self.parallel, windows, self.intact()
                ) from error
            if self.parallel.is_lost_rank(error):
                # Of what the library says, the first sentence, without its places and addresses.
                said = re.sub(r"\[[^\]]*\](:\d+)?:?\s*", "", " ".join(str(error).split()))
                self.settle()
                then = "rerun the same command"
                if self.has_checkpoint():
                    then = self.resume_command()
                raise RankLostError(
                    "parallel.timeout",
                    self.settings.parallel.timeout,
                    f"another rank is gone or did not answer ({said.partition('. ')[0].strip()})",
                    then,
                ) from error
            raise

    def has_checkpoint(self) -> bool:
        from training.checkpoint import format as checkpoint

        return self.folder is not None and checkpoint.has_checkpoint(self.folder)

    def settle(self) -> None:
        """Lets a checkpoint that is being written come to its end, whatever that is."""
        if self.saver:
            with contextlib.suppress(Exception):
                self.saver.wait()

    def intact(self) -> str:
        """What there is to go on from."""
        from training.checkpoint import format as checkpoint

        self.settle()
        if not self.has_checkpoint():
            return "there is no checkpoint yet"
        return f"the checkpoint of step {checkpoint.newest_step(self.folder)} is intact"

    # --------------------------------------------------------------------------- looking up

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        step = self.state.step
        return step == self.settings.trainer.max_steps or (every > 0 and step % every == 0)

    def look_up(self, metrics: dict[str, float]) -> None:
        """Validation, a sample and the lens, whichever is due; then this step's row of the log."""
        step, settings, snapshot, sample = self.state.step, self.settings.trainer, None, None
        lens_due = self.lens is not None and self.lens.due(step, settings.max_steps)
        validation_due = step == 0 or self.is_due(settings.eval_every)
        if lens_due or validation_due:
            self.parallel.synchronize()  # else they would wait for training, and count as theirs
        if validation_due:
            metrics |= self.validate()
            if settings.sample_tokens > 0 and step > 0:
                sample = self.sample()
        started = time.perf_counter()
        if lens_due:
            snapshot = self.attention_snapshot()
        if metrics or snapshot or sample:
            metrics["train/tokens"] = self.state.tokens
            self.tracker.log(metrics, step, snapshot, sample)
        if snapshot:
            if "attention/timelapse" in snapshot.pages and step < settings.max_steps:
                self.write_report()  # at the end it is written anyway
            self.seconds_watching += time.perf_counter() - started

    def validate(self) -> dict[str, float]:
        """The loss on the validation windows, and what it means in words."""
        if self.validation is None:
            return {}
        loss, accuracy = self.validation.run(self.model, self.parallel, self.micro_batch_size)
        self.state.val_loss = self.finite(loss)
        metrics = self.validation.metrics(self.state.val_loss, accuracy)
        if accuracy is None:
            words = f"{metrics['val/bits_per_byte']:.3f} bits per byte"
        else:
            words = f"{accuracy:.1%} right"
        step, loss = self.state.step, self.state.val_loss
        self.console.print(f"step {step}  validation loss {loss:.4f}  {words}")
        return metrics

    def sample(self) -> dict:
        """Continues the sample prompt; always with the same random draws, to compare steps.
        Returns the row of samples.jsonl."""
        from inference.decoding import Sampling, generate

        settings, tokenizer = self.settings.trainer, self.tokenizer
        prompt_ids = tokenizer.encode_ordinary(settings.sample_prompt) or [tokenizer.eot_token]
        with self.parallel.inference(self.model):
            steps = generate(
                self.model,
                [prompt_ids],
                settings.sample_tokens,
                Sampling(temperature=0.8, top_k=50, seed=self.settings.seed),
                window=self.settings.data.max_length,
                known=tokenizer.n_vocab,
            )
            new_ids = [token for (token,) in steps]
        text = settings.sample_prompt + tokenizer.decode(new_ids)
        self.last_sample = text
        self.console.print(f"step {self.state.step}  sample: {' '.join(text.split())}")
        row = {"step": self.state.step, "prompt": settings.sample_prompt, "text": text}
        if self.parallel.is_rank_0:
            self.samples.append(row)
        return row

    def attention_snapshot(self) -> "Snapshot | None":
        """Statistics, pictures and pages of every head. All ranks run the model, rank 0 writes."""
        import torch

        def capture_attention(token_ids: list[int], capture: Callable) -> None:
            input_ids = torch.tensor([token_ids], device=self.parallel.device)
            with self.parallel.probing(self.model):
                self.model.capture_attention(input_ids, capture)

        snapshot, failed = None, True
        with self.never_in_the_way("lens: failed and is off from here on"):
            snapshot = self.lens.snapshot(
                capture_attention,
                self.state.step,
                self.settings.trainer.max_steps,
                self.folder / "attention",
                run_name=self.folder.name,
                write=self.parallel.is_rank_0,
            )
            failed = False
        if self.parallel.all_reduce_max(
            failed
        ):  # on one rank: off on all, or the others would wait
            self.lens = None
        return snapshot

    def write_report(self) -> None:
        """report.html: what there is to see of the run so far, in one file."""
        from training.reporting.report import write_report

        if self.parallel.is_rank_0:
            with self.never_in_the_way("report.html: not written"):
                write_report(self.folder)

    @contextlib.contextmanager
    def never_in_the_way(self, what: str):
        """Whatever only shows the run never ends it: what fails is a line on stderr."""
        try:
            yield
        except Exception as error:
            if self.settings.debug:
                raise
            print(f"{self.parallel.label}{what} ({format_error(error)})", file=sys.stderr)

    # ---------------------------------------------------------------------- saving and ending

    def save_if_due(self, metrics: dict[str, float]) -> None:
        """A checkpoint, when this is the best validation so far or the interval says so."""
        state, val_loss = self.state, metrics.get("val/loss")
        due = self.is_due(self.settings.trainer.save_every)
        if not due and val_loss is None:
            return
        self.check_numbers()
        if state.skipped_in_a_row and state.step < self.settings.trainer.max_steps:
            return  # nothing was learned, and the one from before may be needed
        if val_loss is not None:
            # Else the best may be one that has not come to the disk.
            self.tell_not_saved(self.saved_so_far()[1])
        best = math.inf if state.best_loss is None else state.best_loss
        is_best = val_loss is not None and val_loss < best
        if is_best:
            self.best_before = state.best_loss, state.best_step
            state.best_loss, state.best_step = val_loss, state.step
            self.tell_best()
        if is_best or due:
            self.save()

    def save(self) -> None:
        """A checkpoint of this step, on all ranks. It is written while training goes on, where the
        host has the memory for a copy."""
        from training.checkpoint import format as checkpoint
        from training.planning.micro_batch import spare_memory

        started, state = time.perf_counter(), self.state
        newest, failed = self.saved_so_far()
        self.tell_not_saved(failed)
        if newest == state.step:
            return
        state.losses = list(self.meter.losses(self.parallel))
        self.check_numbers()
        state.scaler = self.parallel.scaler.state_dict() or None
        state.spikes = dataclasses.asdict(self.spikes)
        # Where parameters are on the host, a copy of them must leave room for a step. The main rank
        # makes the copy, and knows whether training waits.
        needed = 12 * self.model.num_parameters()
        copy = self.parallel.device.type != "cpu" or spare_memory() > 2 * needed
        last = state.step == self.settings.trainer.max_steps or self.signals.received > 0
        copy, last = self.parallel.broadcast([copy, last])
        tensors = checkpoint.collect(self.model, self.optimizer, self.parallel, copy and not last)
        if self.parallel.is_rank_0:
            self.tracker.sync()  # what was logged up to here is not lost either
            self.samples.sync()
            self.saver.save(tensors, state)
        if not copy and not last:
            self.tell_not_saved(self.saved_so_far()[1])
        self.seconds_saving += time.perf_counter() - started

    def tell_best(self) -> None:
        """The lowest validation loss so far, for the table of runs."""
        if self.state.best_loss is not None:
            best = {"best_val_loss": self.state.best_loss, "best_step": self.state.best_step}
            self.tracker.summary(best)

    def tell_not_saved(self, failed: NotSavedError | None) -> None:
        """Why a checkpoint could not be written; the next may find room."""
        if failed and self.parallel.is_rank_0:
            goes_on = "" if self.signals.received else "; training goes on"
            print(f"{failed}{goes_on}", file=sys.stderr)

    def saved_so_far(self) -> tuple[int | None, NotSavedError | None]:
        """Waits until no checkpoint is being written; on all ranks. (The newest one's step, why
        the last one could not be written.)"""
        state = self.state

        def wait() -> tuple[int | None, tuple | None]:
            failed = self.saver.wait()
            return self.saver.newest, failed and failed.args

        newest, failed = self.parallel.broadcast(self.parallel.on_rank_0(wait))
        failed = failed and NotSavedError(*failed)
        if failed and state.best_step is not None and state.best_step > (newest or -1):
            state.best_loss, state.best_step = self.best_before
        return newest, failed

    def finish_saving(self) -> None:
        """The checkpoint of this step is there, or the run has failed."""
        newest, failed = self.saved_so_far()
        if newest != self.state.step:
            then = "rerun the same command"
            if newest is not None:
                then = self.resume_command()
            hint = f"{failed.hint}; then {then}"
            raise NotSavedError(failed.key, failed.value, failed.reason, hint)

    def was_told_to_stop(self) -> bool:
        """Whether a signal came, to any rank: they stop after the same step."""
        self.signals.check_parent()
        asked = self.parallel.all_reduce_max(self.signals.received)
        if asked:  # never back to 0: a signal may have come while the ranks agreed
            self.signals.received = asked
        return asked > 0

    def stop(self) -> None:
        """Ends the run before its time, after a checkpoint, with the signal's exit code."""
        self.save()
        self.finish_saving()
        self.console.close()
        number = self.signals.received
        name = signal.Signals(number).name
        where = f"stopped by {name} after step {self.state.step}; saved in {self.folder}"
        if self.parallel.is_rank_0:
            # Of a sweep the way is told at its end.
            way = "" if SWEEPING & set(sys.argv[1:]) else f"; {self.resume_command(saved=True)}"
            print(f"{where}{way}", file=sys.stderr)
        sys.exit(exit_code(number))

    def resume_command(self, saved: bool = False) -> str:
        """What to do after a stop. saved: whether the checkpoint has the settings of this command;
        then only those of this machine are repeated."""
        if SWEEPING & set(sys.argv[1:]):
            return "rerun this job's command"
        kept = []
        for text in sys.argv[1:]:
            key = text.lstrip("+-")
            of_the_machine = "=" not in text or key.startswith(("config-dir=", *OF_THE_MACHINE))
            if of_the_machine or not (saved or key.startswith("trainer.resume=")):
                kept.append(text)
        resume = f"trainer.resume={self.folder}"
        return f"resume with: {shlex.join([*self.parallel.command, sys.argv[0], *kept, resume])}"


def model_name(settings: Settings) -> str:
    """What to call the model in a directory's name: gpt2-12x768 and the like."""
    return f"gpt2-{settings.model.num_layers}x{settings.model.emb_dim}"


@command
def main(settings: Settings) -> None:
    """Train as the settings say."""
    from training.distributed.launch import launched

    is_main = os.environ.get("RANK", "0") == "0"
    with StopSignals(is_main, relayed=launched()) as signals:
        trainer = Trainer(settings, signals)
        try:
            trainer.train()
        except BaseException as error:
            trainer.close(exit_code_of(error))
            raise
        trainer.close(0)


if __name__ == "__main__":
    begin_quickly()
    end_quietly()
    never_fail(quiet=not {"-h", "--help", "-c", "--cfg"}.isdisjoint(sys.argv))
    main()
