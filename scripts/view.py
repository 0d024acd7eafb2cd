"""Shows the runs of a folder in a browser, also while they train; or writes the page of one run.

    python -m scripts.view
    python -m scripts.view runs_dir=runs port=8000
    python -m scripts.view model=hub:gpt2
    python -m scripts.view write=runs/NAME

The first two serve a list of runs, and the page of each, on this machine only. The pages take up
new snapshots, losses and samples by themselves, and nothing is written. `model` is a run, a
checkpoint, a Hugging Face directory or hub:NAME: its page takes any text. The last command draws
the images and pages of a run again from its data, for example after a change of the page.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Checkpoint, Name
from clearhead.errors import DataError, refuse, sanitize
from clearhead.tokens import HUB

if TYPE_CHECKING:
    from clearhead.output.live import LiveModel


class ViewConfig(ScriptConfig):
    """python -m scripts.view [runs_dir=FOLDER] [port=NUMBER] [model=PATH] [write=runs/NAME]

    Shows the runs of a folder in a browser, also while they train; or writes the page of one run.
    """

    runs_dir: Name = Field("runs", description="folder that contains the run directories")
    port: int = Field(
        8000, ge=1, le=65535, description="of the server on 127.0.0.1; in use: a free one"
    )
    model: Checkpoint | None = Field(
        None, description="also show this model: checkpoint, Hugging Face directory or hub:NAME"
    )
    write: str | None = Field(
        None,
        description="a run directory: draw its images and pages again, and serve nothing",
    )


@settings_command(ViewConfig)
def main(settings: ViewConfig) -> None:
    if settings.write is not None:
        write(Path(settings.write))
    else:
        serve(settings)


def serve(settings: ViewConfig) -> None:
    from clearhead.output.live_server import LiveServer

    folder = Path(settings.runs_dir)
    if folder.exists() and not folder.is_dir():
        refuse([("runs_dir", settings.runs_dir, "not a folder", "give the folder of the runs")])
    model = measured(settings.model) if settings.model else None
    with LiveServer(folder, settings.port, model) as server:
        if not folder.exists() and not model:
            print(sanitize(f"note: {folder} does not exist yet"), file=sys.stderr)
        address = server.address + ("model/" if model else "")
        print(f"open {address} in a browser; Ctrl-C stops", flush=True)
        server.serve_forever()


def measured(path: str) -> "LiveModel":
    """Returns a model with what is measured of its heads on the default prompts or its run."""
    from clearhead.output.live import LiveModel
    from clearhead.parallel.device import prepare
    from scripts.inspect_attention import InspectConfig, inspect

    name = path if path.startswith(HUB) else Path(path).resolve().name
    settings, device = InspectConfig(checkpoint=path), prepare("cpu", seed=0, threads=None)
    data, run, window = inspect("model", name, [(None, path)], settings, device)
    return LiveModel(name, path, window, data, run)


def write(folder: Path) -> None:
    """Draws the images and the page of a run."""
    from clearhead.output.live import LiveRun
    from clearhead.output.play import PLAY_HTML, why_not, write_play_page
    from clearhead.output.report import write_run_page
    from headlens import draw_run

    run = LiveRun(folder)
    if not run.is_run:
        raise DataError("write", folder, "not a run directory", "give runs/NAME")
    state = run.progress()["state"]
    try:
        draw_run(folder / "attention")
        print(sanitize(f"page of the run  {write_run_page(folder, state)}"))
    except ValueError as error:
        hint = "remove the file, or use the version of clearhead that wrote it"
        raise DataError("write", folder, str(error), hint) from error
    if reason := why_not(folder):
        print(sanitize(f"no {PLAY_HTML}: {reason}"))
    else:
        print(sanitize(f"type into it     {write_play_page(folder, state)}"))


if __name__ == "__main__":
    main()
