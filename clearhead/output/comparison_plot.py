"""The chart of a comparison of runs: a metric over tokens.

    Path("results.png").write_bytes(plot(rows, "val/loss"))

`rows` are those of reporting/comparison.py.
"""

import functools
import io
import itertools
import math
import statistics
import textwrap
import warnings

from clearhead.errors import sanitize
from clearhead.output.comparison import ComparisonRow, by_text, pairs
from clearhead.output.comparison_table import label, shown

Y_LIMIT = 1.5  # upper limit of a chart, relative to the median of the first values after step 0
COLOURS = 10  # of matplotlib; more rows are grey and have no legend entry
LEGEND_CHARS = 110  # characters in the width of a chart


def plot(rows: list[ComparisonRow], metric: str) -> bytes:
    """Returns a PNG with a chart of the metric over tokens for each text and tokenizer. Rows differ
    in colour; each run is a line."""
    import matplotlib.style
    from matplotlib.figure import Figure

    groups = by_text(rows)
    legends = [legend(group) for group in groups]
    heights = [4.6 + 0.16 * "\n".join(entries).count("\n") for entries in legends]  # inches
    style = ["seaborn-v0_8-whitegrid", {"text.parse_math": False}]
    with matplotlib.style.context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks
        figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
        axes = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
        for axis, group, entries in zip(axes, groups, legends, strict=True):
            plot_group(axis, group, entries, metric)
            axis.set_title(group[0].text[-80:], loc="left", fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


def legend(rows: list[ComparisonRow]) -> list[str]:
    """Returns the legend entries of the first rows, each of at most two lines."""
    wrap = functools.partial(textwrap.fill, width=LEGEND_CHARS, max_lines=2, placeholder=" ...")
    return [
        wrap(sanitize(f"{row.mean:.4f} {label(row)}: {pairs(settings)}".rstrip(": "), keep=""))
        for row, settings in list(zip(rows, shown(rows), strict=True))[:COLOURS]
    ]


def plot_group(axis, rows: list[ComparisonRow], entries: list[str], metric: str) -> None:
    """Plots the rows. For a metric that falls, such as a loss, the y axis ends at Y_LIMIT times the
    median of the first values after step 0, so that a diverged run does not determine the scale."""
    from matplotlib.ticker import EngFormatter

    for index, (row, entry) in enumerate(itertools.zip_longest(rows, entries)):
        for place, points in enumerate(row.curves):
            axis.plot(
                *zip(*points, strict=True),
                color=f"C{index}" if entry else "silver",
                zorder=2 if entry else 1,
                marker="o" if len(points) <= 12 else None,
                ms=3,
                label=None if place else entry,
            )
    axis.set_xlabel("tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_ylabel(metric)
    curves = [curve for row in rows for curve in row.curves]
    starts = [next(value for tokens, value in curve if tokens) for curve in curves]
    first, last = (
        statistics.median_low([value for value in values if math.isfinite(value)] or [math.inf])
        for values in (starts, [curve[-1][1] for curve in curves])
    )
    bottom, top = axis.get_ylim()
    if last < first and bottom < (highest := Y_LIMIT * first) < top:
        axis.set_ylim(top=highest)
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.12)}
    title = f"mean {metric}" + (", grey: other rows" if len(rows) > COLOURS else "")
    axis.legend(**below, title=title, fontsize=8, title_fontsize=8, alignment="left")
