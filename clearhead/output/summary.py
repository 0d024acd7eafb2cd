"""The lines that a run prints before its first step, at its end and after a signal; and
summary.json: the result of a finished run, and the command that repeats the run."""

import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import longer, resume_command
from clearhead.checkpoint.run_directory import SUMMARY_JSON, final_validation
from clearhead.config.application import is_single_run, override
from clearhead.config.schema import Config
from clearhead.config.stored import OF_THE_MACHINE, is_of
from clearhead.config.yaml_files import default_values, flat
from clearhead.errors import as_yaml, sanitize, shorten
from clearhead.files import REPOSITORY, as_json, atomic_write, last_values, read_rows, script_path
from clearhead.output.charts import minimum_before_rise
from clearhead.output.report import RUN_HTML, risen_since
from clearhead.output.run_log import RunLog
from clearhead.parallel import launch
from clearhead.parallel.hardware import peak_memory
from clearhead.parallel.strategy import Strategy
from data import LoadedData


def describe(
    config: Config,
    strategy: Strategy,
    data: LoadedData,
    parameters: int,
    is_compiled: bool,
    micro_batch_size: int,
) -> list[str]:
    """Returns lines about model, data, batch size and length of a run."""
    trainer, world = config.trainer, strategy.world_size
    compiled = ", compiled" if is_compiled else ""
    extra = ", activation checkpointing" if trainer.activation_checkpointing else ""
    val, used = len(data.val or ()), trainer.eval_windows
    evaluated = f"; each evaluation uses {used:,}" if used < val else ""
    per_rank = trainer.batch_size // world
    ranks = f", {per_rank} on each of {world} ranks" if world > 1 else ""
    is_split = micro_batch_size < per_rank
    micro = f", in micro-batches of {micro_batch_size}" if is_split else ""
    windows = f"{len(data.train):,} windows of {config.data.max_length} tokens"
    source = f" from {path_as_given(config.data.path)}" if config.data.path else ""
    limits = [f"{trainer.max_steps:,} steps"] if trainer.max_steps else []
    limits += [f"{trainer.max_minutes:g} minutes"] if trainer.max_minutes else []
    epochs = (trainer.max_steps or 0) * trainer.batch_size / len(data.train)
    read = f", {epochs:,.2f} epochs" if epochs and not config.data.synthetic else ""
    return [
        f"model: {parameters:,} parameters {strategy.describe()}{compiled}{extra}",
        f"training data: {windows}{source}",
        f"validation data: {val:,} windows{evaluated}",
        f"batch size: {trainer.batch_size} windows per step{ranks}{micro}",
        f"training: {', at most '.join(limits)}{read}",
    ]


def introduce(
    config: Config, state: State, log: RunLog, facts: list[str], was_finished: bool
) -> None:
    """Prints facts, run directory and first step before the training starts."""
    lines = [*facts, f"run directory: {log.directory}"]
    if where := log.tracker.where():
        lines.append(f"W&B: {where}")
    if is_single_run() and not was_finished:
        lines.append(f"watch it live: {view_command(config)}")
    if was_finished:
        more = longer(config, state)
        lines.append(f"already finished after step {state.step}; to train further, use {more}")
    elif state.step > 0:
        lines.append(f"resuming after step {state.step}")
    for line in lines:
        log.console.print(line)


def view_command(config: Config) -> str:
    """Returns the command that shows the runs."""
    given = f"runs_dir={config.runs_dir}"
    return "python -m scripts.view" + (f" {shlex.quote(given)}" * (given != "runs_dir=runs"))


def results(
    config: Config, state: State, folder: Path, train_loss: float | None
) -> tuple[list[str], bool]:
    """Returns (lines about the losses, whether more steps do not decrease the validation loss)."""
    lines, has_converged = [], state.should_stop_early(config.trainer)
    if train_loss is not None:
        lines.append(f"training loss    {train_loss:.4f}  (step {state.step})")
    if state.val_loss is not None:
        lines.append(f"validation loss  {state.val_loss:.4f}")
        if state.best_loss is not None:
            lines[-1] += f"  (best: {state.best_loss:.4f} at step {state.best_step})"
    if has_risen(state):
        has_converged = True
        lines.append(f"lowest loss      {risen_since(state.best_step)}")
    return [*lines, f"run directory    {folder}"], has_converged


def times(folder: Path, seconds_of: dict[str, float], seconds: float, blocked: float) -> list[str]:
    """Returns lines about checkpoints and time. seconds_of: the parts of `seconds`, the duration of
    the training. blocked: seconds for which it waited for checkpoints."""
    waited = f"saving blocked training for {blocked:.1f} s"
    parts = [f"{work} {s:.1f} s ({s / seconds:.1%})" for work, s in seconds_of.items()]
    return [
        f"checkpoints      {folder / 'checkpoints'}  ({waited})",
        f"time             {seconds:.0f} s: {', '.join(parts)}",
    ]


def where_to_look(config: Config, state: State, log: RunLog, uploaded: str | None) -> list[str]:
    """Returns lines with the files of a run, and the command that generates text. uploaded: the
    name of the model on W&B."""
    folder, lines = log.directory, []
    if (folder / RUN_HTML).is_file():
        lines.append(f"page of the run  {folder / RUN_HTML}")
    if is_single_run():
        lines.append(f"all runs         {view_command(config)}")
    given = folder / "checkpoints" / "best" if has_risen(state) else folder
    prompt = re.sub("^@", "@@", config.trainer.sample_prompt or "")  # @FILE: from a file
    command = ["python", script_path("generate.py"), f"checkpoint={given}", f"prompt={prompt}"]
    lines.append(f"generate text    {shlex.join(command)}")
    if uploaded:
        lines.append(f"W&B model        {uploaded}")
    if where := log.tracker.where():
        lines.append(f"W&B              {where}")
    return lines


def has_risen(state: State) -> bool:
    """Returns whether the last validation loss is far above the lowest."""
    points = [(state.best_step, state.best_loss), (state.step, state.val_loss)]
    return None not in points[0] + points[1] and bool(minimum_before_rise(points))


def stopped(directory: Path, number: int, step: int) -> str:
    """Returns the line about a run that a signal has stopped, with the command that resumes it."""
    name, folder = signal.Signals(number).name, directory / "checkpoints"
    text = f"stopped by {name} after step {step}; checkpoint saved in {folder}"
    return f"{text}; {resume_command(directory)}"


def path_as_given(path: str | list[str]) -> str:
    """Returns data.path in one line, as it is typed in the working directory."""
    paths = [path] if isinstance(path, str) else path
    typed = ", ".join(each.removeprefix(f"{Path.cwd()}/") for each in paths)
    return sanitize(shorten(typed), keep="")


def write_summary(
    folder: Path, config: Config, state: State, started: float, seconds_of: dict[str, float]
) -> dict:
    """Writes summary.json to a run directory and returns its contents.

    started: the time.monotonic() at the start of the process. seconds_of: the parts of the
    training: validation, samples, attention snapshots, logging, and the rest. Both are those of the
    last start. There is no command that repeats a resumed run, one with a time limit,
    one in a notebook, or one that torchrun may restart.
    """
    trainer, starts = config.trainer, read_rows(folder / "starts.jsonl")
    last = last_values(folder / "metrics.jsonl")
    repeat, is_resumed = None, len(starts) > 1 or launch.max_restarts()
    if HydraConfig.initialized() and not is_resumed and not trainer.max_minutes:
        values, defaults = flat(config.model_dump()), flat(default_values())
        new = {key: value for key, value in values.items() if is_of(key, OF_THE_MACHINE)}
        new = {key: value for key, value in new.items() if value != defaults[key]}
        script, source = sys.argv[0], folder
        if not is_single_run():  # a command that works in every folder
            script, source = str(REPOSITORY / "train.py"), folder.resolve()
        overrides = [f"{key}={as_yaml(value)}" for key, value in new.items()]
        command = [*launch.launch_command(), script, override("from", source), *overrides]
        repeat = shlex.join(command)
    peak, final = peak_memory(), final_validation(folder, state.step)
    summary = {
        "name": folder.name,
        **{key: value for key, value in last.items() if key.startswith("val/")},
        "best_val_loss": state.best_loss,
        "best_step": state.best_step,
        "final_validation": {key: value for key, value in final.items() if key != "parts"} or None,
        "seconds": round(time.monotonic() - started, 1),
        "seconds_of": {work: round(each, 2) for work, each in seconds_of.items()},
        "steps": state.step,
        "planned_steps": trainer.max_steps,
        "tokens": state.tokens,
        "seed": config.seed,
        "max_minutes": trainer.max_minutes,
        "peak_memory_gb": peak and round(peak / 1e9, 3),  # of this rank
        "repeat": repeat,
        "start": starts[-1],
    }
    content = as_json(summary)
    atomic_write(folder / SUMMARY_JSON, content)
    return json.loads(content)
