"""Lists the runs of a folder with their size; removes the optimizer states of finished runs.

    python -m scripts.runs
    python -m scripts.runs remove=optimizer

Most of the size of a checkpoint is optimizer state, which only a resumed run needs. Links are not
followed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from clearhead.checkpoint.run_directory import lock_directory, optimizer_states
from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Name
from clearhead.errors import RunDirectoryError, refuse
from clearhead.files import size_of
from clearhead.output.comparison import markdown_table

if TYPE_CHECKING:  # imports torch
    from clearhead.output.live import LiveRun


class RunsConfig(ScriptConfig):
    """python -m scripts.runs [remove=optimizer] [runs_dir=FOLDER]

    Lists runs, the newest last; removes the optimizer states of finished runs.
    """

    runs_dir: Name = Field("runs", description="folder that contains the run directories")
    remove: Literal["optimizer"] | None = Field(
        None, description="optimizer: remove the optimizer states of all finished runs"
    )


@settings_command(RunsConfig)
def main(settings: RunsConfig) -> None:
    from clearhead.output.live import LiveRuns

    runs = LiveRuns(Path(settings.runs_dir)).runs()
    hint = "use runs_dir=FOLDER, or the directory in which train.py was started"
    refuse([("runs_dir", settings.runs_dir, "no run directory found", hint)] * (not runs))
    for run in runs if settings.remove else ():
        if run.progress()["state"] == "finished":
            remove_optimizer_states(run.folder)
    print(markdown_table([cells_of(run) for run in runs]))


def cells_of(run: "LiveRun") -> dict[str, str]:
    """Returns the row of a run in the table."""
    states = optimizer_states(run.folder)
    return {
        "run": run.folder.name,
        "state": run.progress()["text"],
        "validation loss": dict(run.losses["losses"]).get("validation", ""),
        "MB": f"{size_of(run.folder) / 1e6:,.1f}",
        "MB of optimizer states": f"{size_of(*states) / 1e6:,.1f}",
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
