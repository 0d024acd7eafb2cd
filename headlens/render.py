"""Makes the images and the page of a run from its snapshot files.

render_run(Path("runs/first/attention"))  # after a change of the page
show("runs/first")  # the page in a notebook, as the last line of a cell
"""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from .drawing import heads_caption, heads_image, largest_image, write_animation
from .heads import head_table, heads_by_name, most_significant, prompt_of
from .heatmap import grid_url, png_of
from .history import Row, atomic_write, evenly_spaced, read_history
from .page import page, run_data
from .snapshot_data import SnapshotData, read_snapshot, snapshot_files

Images = dict[str, list[Path]]  # by the key on a dashboard


def render_run(
    folder: Path,
    frames: int = 24,
    curves: Mapping[str, list] | None = None,
) -> None:
    """Writes all images and the page of a run again. folder: runs/NAME/attention. frames: of the
    page. curves: as for `run_data`. Raises ValueError for an invalid snapshot file."""
    for path in snapshot_files(folder):
        draw_snapshot(read_snapshot(path), folder)
    history = read_history(folder / "statistics.jsonl")
    draw_timelapse(folder, history, frames, curves, animated=True)


def draw_snapshot(data: SnapshotData, folder: Path) -> tuple[Images, dict[str, list[str]]]:
    """Writes an image of all heads for each prompt, and one of the clearest head. Returns images
    and their captions. The keys do not depend on the prompts: a dashboard shows the images of all
    prompts in one panel."""
    step = f"step_{data.step:08d}"
    image, caption = largest_image(data)
    drawn = {"attention/heads": [], "attention/largest": [(f"{step}.png", image, caption)]}
    table = most_significant(head_table([data.row], data.uniform))
    for prompt, codes, values in zip(data.prompts, data.codes, data.of_prompts, strict=True):
        # Without names of statistics that this prompt does not have, such as induction.
        named = [row for row in table if np.isfinite(values[row["name"]]).all()]
        image = heads_image(codes, prompt, data.step, named)
        drawn["attention/heads"].append(
            (f"{step}_{prompt.name}.png", image, heads_caption(prompt, data.step))
        )
    for name, image, _ in itertools.chain(*drawn.values()):
        atomic_write(folder / name, png_of(image, compress_level=1))
    images = {key: [folder / name for name, _, _ in of_key] for key, of_key in drawn.items()}
    return images, {key: [text for *_, text in of_key] for key, of_key in drawn.items()}


def draw_timelapse(
    folder: Path,
    history: Sequence[Row],
    frames: int,
    curves: Mapping[str, list] | None = None,
    animated: bool = False,
) -> tuple[Images, dict[str, Path]]:
    """Writes the page of at most `frames` steps with the prompts of the last one; if `animated`,
    also the animated image. Returns images and pages for a dashboard."""
    snapshots = shown_snapshots(folder, frames)
    if not snapshots:
        return {}, {}
    prompts = snapshots[-1].prompts
    path = folder / "timelapse.html"
    write_page(path, snapshots, history, curves)
    pages = {"attention/page": path}
    if not animated:
        return {}, pages
    path = folder / "timelapse.webp"
    # The repeated sequence if a head of the last step needs it, for example an induction head.
    uniform, periods = snapshots[-1].uniform, [prompt.period for prompt in prompts]
    named = heads_by_name(head_table([snapshots[-1].row], uniform))
    number = max((prompt_of(name, periods) for name in named), default=0)
    write_animation(
        path,
        prompts[number],
        [snapshot.codes[number] for snapshot in snapshots],
        [snapshot.step for snapshot in snapshots],
        [most_significant(head_table([snapshot.row], uniform))[:3] for snapshot in snapshots],
    )
    return {"attention/animation": [path]}, pages


def shown_snapshots(folder: Path, frames: int) -> list[SnapshotData]:
    """Returns at most `frames` snapshots of a run, of those that have the prompts of the last one.
    Raises ValueError for an invalid snapshot file."""
    chosen = [read_snapshot(path) for path in evenly_spaced(snapshot_files(folder), frames)]
    return [snapshot for snapshot in chosen if snapshot.prompts == chosen[-1].prompts]


def page_html(runs: Sequence[dict], title: str, last: SnapshotData | None = None) -> str:
    """Returns the page of one run, or of two runs to compare. runs: of run_data. last: the snapshot
    that a browser without JavaScript shows, as a picture."""
    return page(runs, title, grid_url(last.codes[0]) if last else "")


def write_page(
    path: str | Path,
    snapshots: Sequence[SnapshotData],
    history: Sequence[Row] = (),
    curves: Mapping[str, list] | None = None,
) -> None:
    """Writes the page of a run, see page.run_data."""
    path = Path(path)
    title = f"{snapshots[-1].run}: {path.stem}"
    data = run_data(snapshots, history, curves)
    atomic_write(path, page_html([data], title, snapshots[-1]).encode())


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
        reason = (
            "headlens.show needs IPython: use it in a notebook, or open attention/timelapse.html"
        )
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
