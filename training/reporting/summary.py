"""summary.json: the result of a finished run, and the command that repeats the run."""

import shlex
from pathlib import Path

from files import atomic_write, read_rows
from training.checkpoint.format import State
from training.config.schema import Config
from training.distributed.device import peak_memory
from training.reporting.comparison import as_json

NOT_REPEATED = ("trainer.max_minutes", "trainer.max_steps", "trainer.schedule_steps", "name")


def write_summary(
    folder: Path, config: Config, state: State, metrics: dict[str, float], times: dict
) -> None:
    """Writes summary.json to a run directory.

    metrics: of the last validation. times: "seconds" since the start of the process, "seconds_of"
    the parts of the training: validation, samples, attention snapshots, logging, and the rest.
    """
    started = read_rows(folder / "starts.jsonl")[-1]
    trainer = config.trainer
    summary = {
        "name": folder.name,
        **metrics,
        "seconds": round(times["seconds"], 1),
        "seconds_of": {work: round(each, 2) for work, each in times["seconds_of"].items()},
        "steps": state.step,
        "planned_steps": trainer.schedule_steps or trainer.max_steps,
        "tokens": state.tokens,
        "seed": config.seed,
        "max_minutes": trainer.max_minutes,
        "peak_memory_gb": round(peak_memory() / 1e9, 3),  # of this rank
        "repeat": repeat_command(started["command"], config),
        "start": started,
    }
    atomic_write(folder / "summary.json", as_json(summary))


def repeat_command(command: str, config: Config) -> str:
    """Returns the command that trains the same steps on this machine: the same bits on a CPU.

    command: the command of this run. The number of steps replaces the time limit.
    """
    trainer = config.trainer
    kept = [
        text
        for text in shlex.split(command)
        if text.lstrip("+").partition("=")[0] not in NOT_REPEATED
    ]
    kept.append(f"trainer.max_steps={trainer.max_steps}")
    if trainer.schedule_steps:
        kept.append(f"trainer.schedule_steps={trainer.schedule_steps}")
    if trainer.max_minutes:
        compiles = str(trainer.compile).lower()
        kept += ["trainer.max_minutes=null", f"trainer.compile={compiles}"]
    return shlex.join(kept)
