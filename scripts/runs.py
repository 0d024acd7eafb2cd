"""Lists the runs of a folder with their size; removes the optimizer states of finished runs.

    python -m scripts.runs
    python -m scripts.runs remove=optimizer

Most of the size of a checkpoint is optimizer state, which only a resumed run needs. Links are not
followed. Reads run.json, metrics.jsonl, validation.json and summary.json.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from clearhead.checkpoint.run_directory import (
    final_validation,
    is_locked,
    lock_directory,
    optimizer_states,
    summarized_step,
)
from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Name
from clearhead.config.stored import SETTINGS_JSON, settings_of
from clearhead.config.yaml_files import flat
from clearhead.errors import RunDirectoryError, refuse
from clearhead.files import last_values, size_of
from clearhead.output.charts import number
from clearhead.output.comparison import markdown_table


class RunsConfig(ScriptConfig):
    """python -m scripts.runs [remove=optimizer] [runs_dir=FOLDER]

    Lists runs, the latest start last; removes the optimizer states of finished runs.
    """

    runs_dir: Name = Field("runs", description="folder that contains the run directories")
    remove: Literal["optimizer"] | None = Field(
        None, description="optimizer: remove the optimizer states of all finished runs"
    )


@settings_command(RunsConfig)
def main(settings: RunsConfig) -> None:
    # Without links, so that no file outside of runs_dir is removed.
    runs = [path for path in Path(settings.runs_dir).resolve().glob("*/") if not path.is_symlink()]
    runs = [path for path in runs if settings_of(path) is not None]
    hint = "use runs_dir=FOLDER, or the directory in which train.py was started"
    refuse([("runs_dir", settings.runs_dir, "no run directory found", hint)] * (not runs))
    runs.sort(key=lambda run: ((run / SETTINGS_JSON).stat().st_mtime, run.name))
    for run in runs if settings.remove else ():
        if cells_of(run)["state"] == "finished":
            remove_optimizer_states(run)
    print(markdown_table([cells_of(run) for run in runs]))


def cells_of(run: Path) -> dict[str, str]:
    """Returns the row of a run in the table."""
    last = last_values(run / "metrics.jsonl")
    step, planned = last.get("step", 0), flat(settings_of(run) or {}).get("trainer.max_steps")
    loss = final_validation(run, step).get("loss", last.get("val/loss"))
    state = "finished" if step == summarized_step(run) else "stopped"
    return {
        "run": run.name,
        "steps": f"{step} of {planned}" if planned else f"{step}",
        "MB": f"{size_of(run) / 1e6:,.1f}",
        "MB of optimizer states": f"{size_of(*optimizer_states(run)) / 1e6:,.1f}",
        "validation loss": f"{number(loss):.4f}",
        "state": "running" if is_locked(run) else state,
    }


def remove_optimizer_states(run: Path) -> None:
    """Removes the optimizer states of all checkpoints of a run, the newest first. Raises
    RunDirectoryError if the run is training or a file cannot be removed."""
    from clearhead.checkpoint.format import remove_optimizer  # imports torch

    try:
        with lock_directory(run):
            for file in reversed(optimizer_states(run)):
                remove_optimizer(file.parent)
    except OSError as error:
        reason = f"{error.filename or run} cannot be removed ({error.strerror})"
        raise RunDirectoryError("runs_dir", run.parent, reason, "change its permissions") from error


if __name__ == "__main__":
    main()
