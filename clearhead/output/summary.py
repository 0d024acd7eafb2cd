"""The lines that a run prints before its first step, at its end and after a signal; and
summary.json: the result of a finished run."""

import json
import shlex
import signal
import time
from pathlib import Path

from clearhead.checkpoint.format import State
from clearhead.checkpoint.resume import longer, resume_command
from clearhead.checkpoint.run_directory import SUMMARY_JSON, final_validation
from clearhead.config.application import is_single_run
from clearhead.config.schema import Config
from clearhead.errors import sanitize, shorten
from clearhead.files import as_json, atomic_write, last_values, read_rows, script_path
from clearhead.output.charts import is_falling, points_of
from clearhead.output.play import PLAY_HTML
from clearhead.output.report import ROWS, RUN_HTML, result, validation_loss
from clearhead.output.run_log import RunLog
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
    trainer = config.trainer
    compiled = ", compiled" if is_compiled else ""
    is_split = micro_batch_size < trainer.batch_size // strategy.world_size
    micro = f", in micro-batches of {micro_batch_size}" if is_split else ""
    windows = f"{len(data.train):,} windows of {config.data.max_length} tokens"
    source = f" from {path_as_given(config.data.path)}" if config.data.path else ""
    limits = [f"{trainer.max_steps:,} steps"] if trainer.max_steps else []
    limits += [f"{trainer.max_minutes:g} minutes"] if trainer.max_minutes else []
    epochs = (trainer.max_steps or 0) * trainer.batch_size / len(data.train)
    read = f", {epochs:,.2f} epochs" if epochs and not config.data.synthetic else ""
    return [
        f"model: {parameters:,} parameters {strategy.describe()}{compiled}",
        f"training data: {windows}{source}",
        f"validation data: {len(data.val or ()):,} windows",
        f"batch size: {trainer.batch_size} windows per step{micro}",
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


def results(folder: Path) -> tuple[list[str], bool]:
    """Returns (the loss as on the page, and whether it was still falling; whether it has risen)."""
    rows = read_rows(folder / "metrics.jsonl", *ROWS)
    found = validation_loss(folder, rows)
    lines = [text] if (text := result(rows, found)) else []
    if is_falling(points_of(rows, "val/loss")):
        lines.append("The validation loss was still falling: more steps would help.")
    return lines, found.get("risen", False)


def times(seconds_of: dict[str, float], seconds: float) -> str:
    """Returns a line. seconds_of: the parts of `seconds`, the duration of the training."""
    parts = [f"{work} {s:.1f} s ({s / seconds:.1%})" for work, s in seconds_of.items()]
    return f"time             {seconds:.0f} s: {', '.join(parts)}"


def where_to_look(config: Config, log: RunLog, uploaded: str | None, has_risen: bool) -> list[str]:
    """Returns lines with the files of a run, and the command that generates text. uploaded: the
    name of the model on W&B. has_risen: whether the last weights are not the best."""
    folder, lines = log.directory, []
    if (folder / RUN_HTML).is_file():
        lines.append(f"page of the run  {folder / RUN_HTML}")
    if (folder / PLAY_HTML).is_file():
        lines.append(f"type into it     {folder / PLAY_HTML}")
    given = folder / "checkpoints" / "best" if has_risen else folder
    prompt = f"prompt={config.trainer.sample_prompt or ''}"
    command = ["python", script_path("generate.py"), f"checkpoint={given}", prompt]
    lines.append(f"generate text    {shlex.join(command)}")
    if uploaded:
        lines.append(f"W&B model        {uploaded}")
    if where := log.tracker.where():
        lines.append(f"W&B              {where}")
    return lines


def stopped(directory: Path, number: int, step: int) -> str:
    """Returns the line about a run that a signal has stopped, with the command that resumes it."""
    name, folder = signal.Signals(number).name, directory / "checkpoints"
    if step == 0:
        return f"stopped by {name} before the first step; rerun the same command"
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
    last start.
    """
    trainer, starts = config.trainer, read_rows(folder / "starts.jsonl")
    last = last_values(folder / "metrics.jsonl")
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
        "start": starts[-1],
    }
    content = as_json(summary)
    atomic_write(folder / SUMMARY_JSON, content)
    return json.loads(content)
