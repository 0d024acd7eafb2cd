"""Writes a page of a run on which people type into its model, in one file with the weights.

    python -m scripts.share run=runs/NAME out=play.html

A run whose model is small enough writes this page at its end: runs/NAME/play.html. This command
writes it for a run that is older, or still training. Nobody needs clearhead to open it.
"""

from pathlib import Path

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import Name
from clearhead.errors import DataError, sanitize


class ShareConfig(ScriptConfig):
    """python -m scripts.share run=runs/NAME out=play.html

    Writes a page of a run on which people type into its model.
    """

    run: Name = Field(description="run directory")
    out: OutFile = Field(min_length=1, description="HTML file to write")


@settings_command(ShareConfig)
def main(settings: ShareConfig) -> None:
    from clearhead.output.live import LiveRun
    from clearhead.output.play import play_page, why_not

    folder = Path(settings.run)
    if found := why_not(folder):
        raise DataError("run", folder, *found)
    page = play_page(folder, LiveRun(folder).progress()["state"])
    write_out(settings.out, page)
    print(sanitize(f"page with the model  {settings.out}, {len(page) / 1e6:.1f} MB"))


if __name__ == "__main__":
    main()
