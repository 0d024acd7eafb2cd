"""The values of a snapshot as objects of Weights & Biases, by their keys on the dashboard.

define_wandb_metrics(run, "train/global_step")
run.log(snapshot.metrics | wandb_values(snapshot, report=print), step=step)
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .lens import Snapshot


def define_wandb_metrics(run: Any, x_axis: str) -> None:
    """Sets the x-axis of the curves of the lens, and hides those of single layers and heads: a
    panel for each would fill the workspace. Users can add panels for them."""
    for section in ("attention_best", "attention_names"):
        run.define_metric(f"{section}/*", step_metric=x_axis)
    for section in ("attention_heads", "attention_layers"):
        run.define_metric(f"{section}/*", step_metric=x_axis, hidden=True)
    run.define_metric("Custom Chart Tables/*", hidden=True)  # the values of charts


def wandb_values(snapshot: "Snapshot", report: Callable[[str], None]) -> dict[str, Any]:
    """Returns images, pages, histograms, tables, charts and the statistics of single heads.

    Each object is built alone: report(line) is called for one that cannot be built, and the others
    are returned. Images of several prompts are a list under one key: a panel shows all of them, and
    its slider selects the step. Needs wandb.
    """
    import wandb  # pyrefly: ignore[missing-import]

    def images(key: str) -> Any:
        captions = snapshot.captions.get(key) or [None] * len(snapshot.images[key])
        pairs = zip(snapshot.images[key], captions, strict=True)
        found = [wandb.Image(os.fspath(path), caption=caption) for path, caption in pairs]
        return found if len(found) > 1 else found[0]

    def page(key: str) -> Any:
        # inject: by default W&B adds a stylesheet from its server, which the page refuses.
        return wandb.Html(os.fspath(snapshot.pages[key]), inject=False)

    def histogram(key: str) -> Any:
        # In float32, numpy refuses values that differ by a few units in the last place.
        return wandb.Histogram(snapshot.histograms[key].astype(np.float64).tolist())

    def table(key: str) -> Any:
        rows = snapshot.tables[key]
        cells: Any = [
            [wandb.Image(x) if isinstance(x, np.ndarray) else x for x in r.values()] for r in rows
        ]
        return wandb.Table(columns=list(rows[0]), data=cells)

    def chart(key: str) -> Any:
        steps, lines = snapshot.charts[key]
        return wandb.plot.line_series(
            steps,
            [list(line) for line in lines.values()],
            keys=list(lines),
            title=key.rpartition("/")[2].replace("_", " "),
            xname="step",
            split_table=True,
        )

    values: dict[str, Any] = dict(snapshot.heads)
    for build, keys in (
        (images, snapshot.images),
        (page, snapshot.pages),
        (histogram, snapshot.histograms),
        (table, snapshot.tables),
        (chart, snapshot.charts),
    ):
        for key in keys:
            try:
                values[key] = build(key)
            except Exception as error:  # such as a file that was removed
                line = str(error).strip().partition("\n")[0] or type(error).__name__
                report(f"{key} was not logged ({line})")
    return values
