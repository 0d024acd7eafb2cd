"""Heatmaps as a figure for a paper: PDF or SVG, in which text stays text, or PNG.

matplotlib draws the figure; it takes a second to import, so nothing imports this module before it
is needed.
"""

import io
import math
import warnings

import matplotlib.style
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from .fonts import drawable, families
from .heatmap import COLOUR_MAP, TICKS, fitted, label, rgb, tile, title_of
from .prompts import Prompt
from .snapshot_data import SnapshotData

KINDS = ("pdf", "svg", "png")
# The same data gives the same file: no date, no random ids.
METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lens",
    "pdf.fonttype": 42,  # TrueType
    "text.parse_math": False,
    "font.size": 8,
}


def draw_figure(
    data: SnapshotData, kind: str, prompt: int, head: tuple[int, int] | None = None
) -> bytes:
    """Returns a figure of a snapshot: all heads, or one head with its tokens.

    kind: one of KINDS. prompt: index of the prompt. head: (layer, head); None for all heads.
    """
    codes, shown = data.codes[prompt], data.prompts[prompt]
    file = io.BytesIO()
    settings = SETTINGS | {"font.family": families()}
    with matplotlib.style.context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(frame_on=False)
        if head is None:
            what = "all heads"
            _draw_grid(figure, axes, codes, shown.shown)
        else:
            what = f"L{head[0]} H{head[1]}"
            _draw_head(figure, axes, codes[head], shown)
        title = f"{data.run}, {what}, step {data.step:,}"
        fits = round(13 * figure.get_figwidth())
        axes.set_title(f"{title}\n{drawable(title_of(shown, fits))}", loc="left", fontsize=9)
        _draw_colour_bar(figure, axes)
        around = {"bbox_inches": "tight", "pad_inches": 0.1}
        figure.savefig(file, format=kind, dpi=200, metadata=METADATA[kind], **around)
    return file.getvalue()


def _draw_grid(figure, axes, codes: np.ndarray, num_tokens: int) -> None:
    """Draws all heads, codes uint8 (L, H, T (T + 1) / 2): a row for each layer."""
    num_layers, num_heads, _ = codes.shape
    side = min(1, max(0.4, 7 / num_heads))  # inches
    figure.set_size_inches(max(3.4, num_heads * side + 1.2), num_layers * side + 0.8)
    size = min(_pixels(num_tokens), 4096 // max(num_layers, num_heads))
    gap = size // 12
    extent = (0, num_heads - gap / (size + gap), num_layers - gap / (size + gap), 0)
    axes.imshow(rgb(tile(codes, size, gap)), extent=extent, interpolation="none")
    for axis, letter, count in ((axes.xaxis, "H", num_heads), (axes.yaxis, "L", num_layers)):
        axis.set_ticks(np.arange(count) + 0.46, [f"{letter}{n}" for n in range(count)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set(xlim=(0, num_heads), ylim=(num_layers, 0), aspect="equal")
    axes.set_xlabel("row: query token, column: key token")


def _draw_head(figure, axes, codes: np.ndarray, prompt: Prompt) -> None:
    """Draws one head, codes uint8 (T (T + 1) / 2), with the tokens on both axes."""
    num_tokens = prompt.shown
    side = min(7, max(2.4, 0.13 * num_tokens))  # inches
    figure.set_size_inches(side + 1.6, side + 1.2)
    every = math.ceil(num_tokens / 64)
    places = np.arange(0, num_tokens, every)
    names = [drawable(label(prompt.labels[place])) for place in places]
    font = min(8, max(4, 65 * every * side / num_tokens))
    extent = (-0.5, num_tokens - 0.5, num_tokens - 0.5, -0.5)
    axes.imshow(rgb(fitted(codes, _pixels(num_tokens))), extent=extent, interpolation="none")
    axes.set_xticks(places, names, rotation=90, fontsize=font)
    axes.set_yticks(places, names, fontsize=font)
    axes.tick_params(length=0)
    axes.set(xlabel="key token", ylabel="query token", aspect="equal")


def _pixels(num_tokens: int) -> int:
    """Returns the size of a heatmap in pixels: several for each cell, as some viewers blur them."""
    return num_tokens * math.ceil(256 / num_tokens)


def _draw_colour_bar(figure, axes) -> None:
    scale = ScalarMappable(PowerNorm(0.5, 0, 1), COLOUR_MAP)
    bar = figure.colorbar(scale, ax=axes, shrink=0.6, aspect=30, label="attention weight")
    bar.set_ticks(TICKS, labels=[f"{tick:g}" for tick in TICKS], minor=False)
    bar.outline.set_visible(False)
