"""The interactive page in a notebook.

from headlens import show

show("runs/first")  # as the last line of a cell
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .history import read_history
from .page import page, run_data
from .render import shown_snapshots


def show(
    run: str | Path,
    frames: int = 24,
    curves: Mapping[str, list] | None = None,
    height: int = 900,
) -> Any:
    """Returns the page of a run as an IPython.display.HTML, made from its snapshot files.

    run: a run directory, or a folder with snapshots (step_*.npz). frames: steps of the page, at
    most. curves: as for `page.run_data`. height: in pixels. Raises ValueError without a snapshot,
    ImportError without IPython.
    """
    try:
        from IPython.display import HTML
    except ImportError as error:
        reason = "lens.show needs IPython: use it in a notebook, or open attention/timelapse.html"
        raise ImportError(reason) from error
    folder = Path(run)
    if (folder / "attention").is_dir():
        folder = folder / "attention"
    snapshots = shown_snapshots(folder, frames)
    if not snapshots:
        raise ValueError(f"{run} has no attention snapshot (step_*.npz)")
    data = run_data(snapshots, read_history(folder / "statistics.jsonl"), curves)
    source = escape(page([data], snapshots[-1].run))
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{source}">'
    return HTML(f"<div>{frame}</iframe></div>")
