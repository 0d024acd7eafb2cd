"""summary.json: the result of a finished run, and the command that repeats the run."""

import json
import shlex
import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from clearhead.checkpoint.format import State
from clearhead.checkpoint.run_directory import SUMMARY_JSON, final_validation
from clearhead.config.application import is_single_run
from clearhead.config.compose import override
from clearhead.config.schema import Config
from clearhead.config.stored import OF_THE_MACHINE, is_of
from clearhead.config.yaml_files import default_values, flat
from clearhead.errors import as_yaml
from clearhead.files import REPOSITORY, as_json, atomic_write, last_values, read_rows
from clearhead.parallel import launch
from clearhead.parallel.memory import peak_memory


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
