"""The components of a training run as one dataclass, and its errors with a message for users.

`build_run` (run/build.py) creates a Run; `fit` (train.py) trains it.
"""

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import resume_command
from clearhead.checkpoint.run_directory import (
    SUMMARY_JSON,
    VALIDATION_JSON,
    final_validation,
)
from clearhead.checkpoint.saving import Checkpointer
from clearhead.compute.optimizers import learning_rate
from clearhead.config.automatic import automatic_warmup
from clearhead.config.schema import Config
from clearhead.errors import (
    DivergedError,
    NotSavedError,
    RankLostError,
    RunError,
    best_effort,
)
from clearhead.files import as_json, atomic_write, last_values, read_object
from clearhead.output.run_log import Metrics, RunLog
from clearhead.output.summary import results, stopped, times, where_to_look, write_summary
from clearhead.parallel.hardware import CoreTime
from clearhead.parallel.memory import is_out_of_memory, out_of_memory_error
from clearhead.parallel.strategy import Strategy
from clearhead.run.evaluation import Evaluator
from clearhead.run.lens_runner import LensRunner
from clearhead.run.stop import Stop
from model import GPT


@dataclass
class Run:
    """The components of one training run."""

    config: Config
    strategy: Strategy  # device, precision and ranks
    state: State  # step, tokens, best loss, ...; a checkpoint stores it as state.json
    # For each step the micro-batches of this rank: ((input_ids, target_ids), number of targets).
    batches: Iterator[list[tuple[Sequence[torch.Tensor], int]]]
    model: GPT  # evaluated, saved and read by the lens
    trained_model: torch.nn.Module  # the same parameters, possibly wrapped and compiled
    optimizer: torch.optim.Optimizer
    metrics: Metrics
    evaluator: Evaluator
    lens: LensRunner
    checkpointer: Checkpointer
    log: RunLog
    stop: Stop
    cores: CoreTime | None  # None on a GPU
    closing: contextlib.ExitStack  # closes the components, the last opened first
    was_finished: bool  # whether an earlier process has finished the run
    is_closed: bool = False
    errors: list[Exception] = field(default_factory=list)  # when validation.json was written

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.log.directory

    def is_due(self, what: str) -> bool:
        """Returns whether something is due after this step: "log", "eval" or "save". After the last
        step everything is, and nothing else if trainer.<what>_every is 0, except the checkpoints of
        trainer.save_at_words. With a time limit, the number of steps is not known after step 1,
        which has a row unless log_every is given."""
        step, every = self.state.step, self.interval(what)
        is_first = step == 1 and what == "log" and self.config.trainer.log_every is None
        is_named = what == "save" and step in self.checkpointer.named_steps
        is_last = step == self.stop.last_step
        return is_last or is_first or is_named or (every > 0 and step % every == 0)

    def interval(self, what: str) -> int:
        """Returns trainer.<what>_every. If it is null, it follows from the expected steps."""
        every = getattr(self.config.trainer, f"{what}_every")
        expected = self.stop.intervals(self.stop.last_step)
        return expected[f"trainer.{what}_every"] if every is None else every

    def learning_rate(self, peak: float) -> float:
        """Returns the learning rate of this step for parameters with this peak. With a time limit,
        the used time counts if it is further than the steps. Then the warm-up, unless it is given,
        is a tenth of the run, but at least 24 steps and at most a fifth of max_steps."""
        trainer, schedule, step = self.config.trainer, self.config.optimizer, self.state.step
        steps, warmup = trainer.max_steps, trainer.warmup_steps
        if not trainer.max_minutes:
            return learning_rate(step, schedule, warmup, steps, peak)
        parts = steps or 1000  # without max_steps, a thousandth of the time counts as a step
        position = max(step if steps else 0, int((parts - 1) * self.stop.used_time()))
        if warmup is None:
            part, least = max(automatic_warmup(parts), parts // 10), min(24, parts // 5)
        else:
            part, least = warmup if steps else 0, warmup
        rate = learning_rate(position, schedule, part, parts, peak)
        return min(rate, peak * (step + 1) / max(1, least))

    def __enter__(self) -> "Run":
        if self.is_closed:
            hint = resume_command(self.directory)
            raise RunError("name", self.directory.name, "this run has ended and is closed", hint)
        self.strategy.start_training(self.model)
        self.stop.signals.start_training()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        """Closes all components; pending writes are completed."""
        if error is not None:
            self.log.write_page(self.state.step, "stopped")  # shows the metrics up to the error
        self.is_closed = True
        self.closing.__exit__(kind, error, trace)

    def close(self) -> None:
        """Closes a run that will not be trained further: another one can use its directory."""
        self.__exit__(None, None, None)

    def translate_errors(self) -> contextlib.AbstractContextManager:
        """Returns a context that replaces errors of torch by errors with a message for users."""
        windows = self.evaluator.batch_size
        return translate_errors(self.config, self.strategy, self.checkpointer, windows)

    def check_limits(self) -> None:
        """Makes this step the last one if there is no time for another one, or if the validation
        loss has not become lower for trainer.patience validations."""
        trainer, state = self.config.trainer, self.state
        if trainer.max_minutes:
            state.minutes = self.stop.used_time() * trainer.max_minutes
        if state.should_stop_early(trainer) and state.step < self.stop.last_step:
            self.stop.last_step, state.ended_early = state.step, True
            lowest = f"the validation loss is lowest at step {state.best_step:,}"
            ends = f"the run ends after step {state.step:,}"
            self.log.console.print(f"trainer.patience={trainer.patience}: {lowest}; {ends}")
        elif self.stop.is_out_of_time(state.step):
            limit = f"trainer.max_minutes={trainer.max_minutes}"
            self.log.console.print(f"{limit}: the run ends after step {state.step:,}")

    def report_speed(self) -> None:
        """Prints what to expect of a time limit, and when other programs slow the run down."""
        for line in (self.stop.expectation(self.state.step), self.cores and self.cores.line()):
            if line:
                self.log.console.print(line)

    def evaluate(self) -> dict[str, float]:
        """Computes, prints and returns the validation metrics; writes those after the last step to
        validation.json."""
        step = self.state.step
        is_last = step == self.stop.last_step
        with self.log.timed("validation"):
            row = self.evaluator.validate(self.model, step, is_last)
        if row:
            self.state.val_loss, self.state.val_step = row["val/loss"], step
            self.log.console.validation(step, row)
        if final := self.evaluator.final:
            if self.strategy.is_rank_0:
                what = f"{VALIDATION_JSON}: could not be written"
                with best_effort(what, self.config.debug) as self.errors:
                    atomic_write(self.directory / VALIDATION_JSON, as_json(final))
            names = ("loss", "loss_error", "windows")
            self.log.tracker.summary({f"final_val_{name}": final[name] for name in names})
        return row

    def sample(self) -> dict:
        """Generates and prints a sample; returns its row of samples.jsonl."""
        with self.log.timed("samples"):
            row = self.evaluator.sample(self.model, self.state.step)
        self.log.console.sample(row)
        return row

    def repeat_end(self) -> None:
        """Repeats the validation and the attention snapshot of the last step, if a run has no step
        left and is not finished: it was killed, or files of its end could not be written."""
        step = self.state.step
        if step < self.stop.last_step or self.was_finished:
            return
        with self.stop.checked_before_each_pass(self.model):
            self.evaluate()
            if self.lens.is_due(step, step):
                with self.log.timed("attention snapshots"):
                    self.lens.snapshot(self.model, step)
        self.strategy.wait_for_rank_0()

    def finish(self, seconds: float) -> dict | None:
        """Waits for the last checkpoint, uploads the model, prints a summary, ends the W&B run, and
        writes, at the very end, summary.json: a run without it is finished by its next start.
        seconds: the duration of the training.

        Returns the contents of summary.json; None on other ranks. Raises RunError, without
        summary.json, if a file could not be written. Pages are no such files: each start of a
        finished run writes them again.
        """
        self.stop.signals.phase = "finishing"
        self.checkpointer.finish(self.state)
        state, log, folder, debug = self.state, self.log, self.directory, self.config.debug
        seconds_of = log.seconds | {"training": seconds - sum(log.seconds.values())}
        uploaded = None
        with best_effort("W&B: the model was not uploaded", debug):
            uploaded = log.tracker.log_model(state.best_step)
        if self.was_finished or log.page_step < state.step:
            log.write_page(state.step, "finished")
        log.write_play_page()
        if state.best_loss is not None:
            log.tracker.summary({"best_val_loss": state.best_loss, "best_step": state.best_step})
        log.console.close()
        lines, has_risen = results(folder)
        if not self.was_finished:
            lines.append(times(seconds_of, seconds))
        lines += self.lens.summary()
        for line in ["", *lines, *where_to_look(self.config, log, uploaded, has_risen)]:
            log.console.print(line)
        log.tracker.finish()
        if not self.strategy.is_rank_0:
            return None
        if self.was_finished:
            return read_object(folder / SUMMARY_JSON)
        if not (self.errors or any(isinstance(error, OSError) for error in self.lens.errors)):
            started = self.stop.limit.started
            with best_effort(f"{SUMMARY_JSON}: could not be written", debug):
                return write_summary(folder, self.config, state, started, seconds_of)
        reason = "the run is not finished: files of its end could not be written"
        raise RunError("name", folder.name, reason, "free disk space and rerun the same command")

    def exit(self) -> None:
        """Ends the process after a stop signal: prints where the checkpoint is and how to resume
        the run, and raises SystemExit with the exit code of the signal, in a notebook
        KeyboardInterrupt."""
        self.log.console.close()
        if self.strategy.is_rank_0:
            received, step = self.stop.signals.received, self.state.step
            print(stopped(self.directory, received, step), file=sys.stderr)
        raise self.stop.signals.ending() from None

    def objective(self) -> float:
        """Returns the value that a sweep minimises: the loss of the validation at the end, with
        trainer.patience the lowest validation loss, without validation the last training loss."""
        if self.config.trainer.patience and self.state.best_loss is not None:
            return self.state.best_loss
        if final := final_validation(self.directory, self.state.step):
            return final["loss"]
        if self.state.val_loss is not None:
            return self.state.val_loss
        return last_values(self.directory / "metrics.jsonl").get("train/loss", math.inf)


@contextlib.contextmanager
def translate_errors(
    config: Config,
    strategy: Strategy,
    checkpointer: Checkpointer | None = None,
    micro_batch_size: int | None = None,
) -> Iterator[None]:
    """Raises OutOfMemoryError if a step does not fit into memory, RankLostError if another rank
    died or timed out, and other errors unchanged. Hints name the newest intact checkpoint.

    micro_batch_size: of the steps inside; None if there are no steps.
    """
    try:
        yield
    except DivergedError as error:
        if checkpointer:
            error.hint += f"; {checkpointer.describe()}"
        raise
    except NotSavedError as error:
        if checkpointer:
            error.hint += f"; {checkpointer.how_to_resume()}"
        raise
    except Exception as error:
        if micro_batch_size and is_out_of_memory(error):
            intact = checkpointer.describe() if checkpointer else "no checkpoint was saved yet"
            raise out_of_memory_error(config, strategy, micro_batch_size, intact) from error
        if not strategy.is_lost_rank(error):
            raise
        # The first sentence of the library's message, without its file names and addresses.
        text = re.sub(r"\[[^\]]*\](:\d+)?:?\s*", "", " ".join(str(error).split()))
        reason = f"another rank died or timed out ({text.partition('. ')[0].strip()})"
        hint = "rerun the same command"
        if checkpointer and not checkpointer.directory.is_dir():
            hint = "the machine of rank 0 has the checkpoints"
        elif checkpointer:
            hint = f"{checkpointer.describe()}; {checkpointer.how_to_resume()}"
        raise RankLostError("parallel.timeout", config.parallel.timeout, reason, hint) from error
