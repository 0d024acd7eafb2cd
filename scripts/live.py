"""Shows the runs of a folder in a browser, while they train.

    python -m scripts.live
    python -m scripts.live runs_dir=runs port=8000 open=true

Serves a list of runs with their losses, and the attention page and the report of each run, on this
machine only. The pages take up new snapshots and losses by themselves. Nothing is written.
"""

import sys
import webbrowser
from pathlib import Path

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import Name
from clearhead.errors import refuse, sanitize


class LiveConfig(ScriptConfig):
    """python -m scripts.live [runs_dir=FOLDER] [port=NUMBER] [open=true]

    Shows the runs of a folder in a browser, while they train.
    """

    runs_dir: Name = Field("runs", description="folder that contains the run directories")
    port: int = Field(
        8000, ge=1, le=65535, description="of the server on 127.0.0.1; in use: the next free one"
    )
    open: bool = Field(False, description="true: also open the page in a browser")


@settings_command(LiveConfig)
def main(settings: LiveConfig) -> None:
    from clearhead.output.live_server import PORTS, LiveServer

    folder = Path(settings.runs_dir)
    if folder.exists() and not folder.is_dir():
        refuse([("runs_dir", settings.runs_dir, "not a folder", "give the folder of the runs")])
    try:
        server = LiveServer(folder, settings.port)
    except OSError as error:
        reason = f"neither this port nor the next {PORTS - 1} can be used ({error.strerror})"
        refuse([("port", settings.port, reason, "use another port")])
    with server:
        if not folder.exists():
            print(sanitize(f"note: {folder} does not exist yet"), file=sys.stderr)
        print(f"open {server.address} in a browser; Ctrl-C stops", flush=True)
        if settings.open:
            webbrowser.open(server.address)
        server.serve_forever()


if __name__ == "__main__":
    main()
