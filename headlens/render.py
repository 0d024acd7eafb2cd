"""Makes the images and the page of a run from its snapshot files.

draw_run(Path("runs/first/attention"))  # all images again
show("runs/first")  # the page in a notebook, as the last line of a cell
show(weights, tokens)  # of arrays, see arrays.py
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from .arrays import from_arrays
from .drawing import heads_image, largest_image, title_of
from .heads import clearest, head_table
from .heatmap import png_of
from .history import Row, atomic_write, evenly_spaced, read_history
from .page import page_html, run_data
from .snapshot_data import SnapshotData, last_snapshot, snapshot_files, snapshot_of, step_of

FRAMES, SMALL_FRAMES = 24, 48  # steps of a page, at most
SMALL = 2**18  # weights of a step: a page with SMALL_FRAMES of them has about 8 MB
Images = dict[str, list[Path]]  # by the key on a dashboard


def draw_run(folder: Path) -> None:
    """Writes all images of a run again. folder: runs/NAME/attention."""
    for data in filter(None, map(snapshot_of, snapshot_files(folder))):
        draw_snapshot(data, folder)


def draw_snapshot(data: SnapshotData, folder: Path) -> tuple[Images, dict[str, list[str]]]:
    """Writes an image of all heads for each prompt, and one of the clearest head. Returns images
    and their captions. The keys do not depend on the prompts: a dashboard shows the images of all
    prompts in one panel."""
    images, captions = {}, {}

    def write(key: str, name: str, image: Image, caption: str) -> None:
        path = folder / f"step_{data.step:08d}{name}.png"
        atomic_write(path, png_of(image, compress_level=1))
        images.setdefault(key, []).append(path)
        captions.setdefault(key, []).append(caption)

    table = clearest(head_table([data.row], data.uniform))
    for number, (prompt, values) in enumerate(zip(data.prompts, data.of_prompts, strict=True)):
        # Without names of statistics that this prompt does not have, such as induction.
        named = [row for row in table if np.isfinite(values[row["name"]]).all()]
        image = heads_image(data, number, named)
        caption = f"step {data.step:,} · prompt: {title_of(prompt, 80)}"
        write("attention/heads", f"_{prompt.name}", image, caption)
    write("attention/largest", "", *largest_image(data))
    return images, captions


def shown_snapshots(folder: Path) -> list[SnapshotData]:
    """Returns the snapshots of a run that a page shows, of those with the prompts of the last one
    that can be read."""
    if not (last := last_snapshot(folder)):
        return []
    files = [path for path in snapshot_files(folder) if step_of(path) <= last.step]
    chosen = map(snapshot_of, evenly_spaced(files, most_frames(last)))
    return [snapshot for snapshot in chosen if snapshot and snapshot.subject == last.subject]


def most_frames(snapshot: SnapshotData) -> int:
    """Returns the number of steps of a page with snapshots like this one, at most."""
    return SMALL_FRAMES if sum(codes.size for codes in snapshot.codes) <= SMALL else FRAMES


def folder_page(
    folder: Path,
    title: str,
    curves: Mapping[str, list] | None = None,
    training: dict | None = None,
    model: dict | None = None,
) -> str:
    """Returns the page of a run from its snapshot files; without a snapshot, the page of `training`
    alone. folder: runs/NAME/attention. curves: see page.run_data. training and model: see
    page_html."""
    snapshots = shown_snapshots(folder)
    if not snapshots:
        return page_html([], title, training)
    history = read_history(folder / "statistics.jsonl")
    data = run_data(snapshots, history, curves)
    return page_html([data], title, training, model)


def write_page(
    path: str | Path,
    snapshots: Sequence[SnapshotData],
    history: Sequence[Row] = (),
    curves: Mapping[str, list] | None = None,
) -> None:
    """Writes the page of a run, see page.run_data."""
    data = run_data(snapshots, history, curves)
    atomic_write(Path(path), page_html([data], snapshots[-1].run).encode())


def show(
    run: Any,
    tokens: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    *,
    height: int = 900,
) -> Any:
    """Returns a page of attention heads as an IPython.display.HTML.

    run: a run directory, or a folder with snapshots (step_*.npz); or attention weights of a text,
    with its tokens, as for `from_arrays`; or {name: weights} of two models to compare. steps: of a
    list of weights. height: in pixels. Raises ValueError without a snapshot and as `from_arrays`,
    ImportError without IPython.
    """
    from IPython.display import HTML

    if tokens is None:
        if not isinstance(run, str | Path):
            raise TypeError("tokens: expected the text of each token of these weights")
        folder = Path(run)
        path = folder / "attention" if (folder / "attention").is_dir() else folder
        if not (last := last_snapshot(path)):
            raise ValueError(f"{folder} has no attention snapshot (step_*.npz)")
        page = folder_page(path, last.run)
    else:
        models = run if isinstance(run, dict) else {"attention": run}
        if not 1 <= len(models) <= 2:
            raise ValueError(f"weights of {len(models)} models: the page compares two")
        found = {name: from_arrays(of, tokens, steps, name) for name, of in models.items()}
        data = [run_data(snapshots) for snapshots in found.values()]
        page = page_html(data, " and ".join(found))
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}">'
    return HTML(f"<div>{frame}</iframe></div>")
