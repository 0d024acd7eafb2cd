"""summary.json: the result of a finished run, and the command that repeats the run."""

import shlex
import time
from pathlib import Path

from clearhead.checkpoint.format import State
from clearhead.config.application import is_single_run
from clearhead.config.schema import Config
from clearhead.distributed import launch
from clearhead.distributed.device_memory import peak_memory
from clearhead.files import as_json, atomic_write, read_rows


def write_summary(
    folder: Path, config: Config, state: State, started: float, seconds_of: dict[str, float]
) -> None:
    """Writes summary.json to a run directory.

    started: the time.monotonic() at the start of the process. seconds_of: the parts of the
    training: validation, samples, attention snapshots, logging, and the rest. Both are those of the
    last start. There is no command that repeats a resumed run, a job of a sweep, a run in a
    notebook or one that torchrun may restart.
    """
    trainer, starts = config.trainer, read_rows(folder / "starts.jsonl")
    last = read_rows(folder / "metrics.jsonl")[-1]
    planned, repeat = state.settings["trainer"]["max_steps"], None
    if is_single_run() and len(starts) == 1 and not launch.max_restarts():
        # A number of steps replaces the time limit.
        schedule = trainer.schedule_steps or planned
        new = {
            "name": "null",
            "trainer.max_minutes": "null",
            "trainer.max_steps": state.step,
            "trainer.schedule_steps": "null" if schedule == state.step else schedule,
            "trainer.compile": str(trainer.compile).lower(),
        }
        words = shlex.split(starts[0]["command"])
        kept = [word for word in words if word.partition("=")[0] not in new]
        repeat = shlex.join([*kept, *(f"{key}={value}" for key, value in new.items())])
    peak = peak_memory()
    summary = {
        "name": folder.name,
        **{key: value for key, value in last.items() if key.startswith("val/")},
        "seconds": round(time.monotonic() - started, 1),
        "seconds_of": {work: round(each, 2) for work, each in seconds_of.items()},
        "steps": state.step,
        "planned_steps": planned,
        "tokens": state.tokens,
        "seed": config.seed,
        "max_minutes": trainer.max_minutes,
        "peak_memory_gb": peak and round(peak / 1e9, 3),  # of this rank
        "repeat": repeat,
        "start": starts[-1],
    }
    atomic_write(folder / "summary.json", as_json(summary))
