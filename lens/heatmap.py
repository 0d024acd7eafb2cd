"""A picture of every head: one heatmap each, layers downwards, heads across.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from . import Prompt

COLOUR_MAP = "viridis"  # even steps of lightness: readable in grey and by colour-blind people
DPI = 100


def draw_grid(attn_weights: Sequence, prompt: "Prompt", step: int, path: Path) -> None:
    """Writes a PNG: the grid of all heads; enlarged, with tokens, their mean and the sharpest one.

    attn_weights: for each layer an array (H, T, T). Weights are shown on a square-root scale, so
    that a weight of 0.04 is a fifth as bright as a weight of 1, not invisible.
    """
    weights = np.stack([np.asarray(layer, dtype=np.float32) for layer in attn_weights])
    num_layers, num_heads, num_tokens, _ = weights.shape
    # Pixels: heatmaps of about 84, more where there are few heads; each cell is a whole number of
    # pixels, so that none is blurred.
    smallest = 2 if num_heads <= 16 else 1
    scale = max(smallest, round(min(250, max(84, 1000 / num_heads)) / num_tokens))
    size, gap = scale * num_tokens, 8
    grid = _tile(_colour(weights), scale, gap)  # (height, width, 3)

    # Everything is placed in pixels; the figure is as large as its parts.
    left, top, between, under = 46, 92, 130, 110
    panel = 16 * min(max(num_tokens, 16), 40)  # an enlarged map, with room for every token's label
    width = left + max(grid.shape[1], 300) + between + panel + 40
    bar_top = top + 2 * (panel + under)
    height = max(top + grid.shape[0], bar_top + 12) + 60
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)

    def axes(x: float, y: float, w: float, h: float):
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    def write(x: float, y: float, text: str, **style) -> None:
        figure.text(x / width, 1 - y / height, text, va="top", parse_math=False, **style)

    write(left, 12, f"step {step}", fontsize=17, weight="bold")
    what = f"attention of {num_layers} layers × {num_heads} heads"
    if np.abs(weights - evenly(num_tokens)).max() < 0.1:
        what += "; so far every token looks back evenly"
    write(left + 40 + 11 * len(f"step {step}"), 17, what, fontsize=12.5, color="#444444")
    crop = f"  (first {num_tokens} tokens)" if prompt.cropped else ""
    text = "".join(prompt.tokens) if prompt.cropped else prompt.text
    shown = textwrap.shorten(" ".join(text.split()), width // 9 - len(crop), placeholder=" ...")
    write(left, 43, f"“{shown}”{crop}", fontsize=11, color="#222222")

    ax = axes(left, top, grid.shape[1], grid.shape[0])
    ax.imshow(grid, interpolation="nearest", aspect="auto")
    centres = np.arange(max(num_layers, num_heads)) * (size + gap) + size / 2
    ax.set_xticks(centres[:num_heads], [f"H{head}" for head in range(num_heads)])
    ax.set_yticks(centres[:num_layers], [f"L{layer}" for layer in range(num_layers)])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=11, pad=3)
    ax.set_frame_on(False)
    reading = ("row: the token that looks", "column: the token looked at", "brighter: more weight")
    for line, text in enumerate(reading):
        write(left + line * 235, height - 36, text, fontsize=10, color="#444444")

    labels = [_label(token) for token in prompt.tokens]
    layer, head = sharpest_head(weights)
    panels = {
        "mean over all heads": weights.mean((0, 1)),
        f"sharpest head: L{layer} H{head}": weights[layer, head],
    }
    panel_left = width - panel - 40
    for number, (title, panel_weights) in enumerate(panels.items()):
        place = (panel_left, top + number * (panel + under), panel, panel)
        _draw_map(axes(*place), panel_weights, labels, title)
    _draw_scale(axes(panel_left, bar_top, panel, 12))
    with warnings.catch_warnings():
        # A token in a script that the font lacks is drawn as a box; no need to say so each time.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(path, dpi=DPI)


def _draw_map(ax: Axes, weights: np.ndarray, labels: list[str], title: str) -> None:
    """One head's (T, T) weights, enlarged, with the tokens on both axes as far as there is room."""
    every = math.ceil(len(labels) / 40)
    places = range(0, len(labels), every)
    ax.imshow(_colour(weights), interpolation="nearest")
    ax.set_xticks(places, labels[::every], rotation=90, parse_math=False)
    ax.set_yticks(places, labels[::every], parse_math=False)
    ax.tick_params(length=0, labelsize=9, pad=3)
    ax.set_title(title, fontsize=11, loc="left", pad=6)
    ax.set_frame_on(False)


def _draw_scale(ax: Axes) -> None:
    """The colour bar: which colour is which weight."""
    ax.imshow(_colour(np.linspace(0, 1, 256)[None] ** 2), aspect="auto", extent=(0, 1, 0, 1))
    ticks = [0, 0.01, 0.1, 0.25, 0.5, 1]
    ax.set_xticks([math.sqrt(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    ax.set_yticks([])
    ax.tick_params(length=2, labelsize=9)
    ax.set_xlabel("attention weight (square-root scale)", fontsize=9)


def evenly(num_tokens: int) -> np.ndarray:
    """The weights of a head that has learned nothing: query q gives 1 / (q + 1) to each key."""
    ones = np.tril(np.ones((num_tokens, num_tokens), np.float32))
    return ones / ones.sum(-1, keepdims=True)


def sharpest_head(weights: np.ndarray) -> tuple[int, int]:
    """(layer, head) whose rows are most concentrated on few tokens *other than the first*.

    By the mean over queries of the largest weight on any key but the first: many heads rest on
    the first token when they have nothing to do, and that is sharp but says little.
    """
    if weights.shape[-1] == 1:
        return 0, 0
    largest = weights[:, :, 1:, 1:].max(-1).mean(-1)  # (L, H)
    layer, head = np.unravel_index(largest.argmax(), largest.shape)
    return int(layer), int(head)


def _colour(weights: np.ndarray) -> np.ndarray:
    """Weights (..., T, T) -> colours (..., T, T, 3) uint8; what the mask forbids is pale grey."""
    table = (matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)
    colours = table[np.clip(np.sqrt(weights) * 255, 0, 255).astype(np.uint8)]
    rows, columns = weights.shape[-2:]
    if rows == columns:
        colours[..., np.triu(np.ones((rows, columns), bool), k=1), :] = 238
    return colours


def _tile(colours: np.ndarray, scale: int, gap: int) -> np.ndarray:
    """Heatmaps (L, H, T, T, 3) side by side on white: (L * (T * scale + gap) - gap, ..., 3)."""
    colours = colours.repeat(scale, axis=2).repeat(scale, axis=3)
    num_layers, num_heads, size = colours.shape[:3]
    step = size + gap
    canvas = np.full((num_layers * step - gap, num_heads * step - gap, 3), 255, np.uint8)
    for layer in range(num_layers):
        for head in range(num_heads):
            canvas[layer * step :, head * step :][:size, :size] = colours[layer, head]
    return canvas


def _label(token: str, longest: int = 12) -> str:
    """A token as an axis label: white space and odd characters visible, not too long."""
    shown = token.strip() or repr(token)[1:-1].replace(" ", "␣")
    shown = "".join(c if c.isprintable() else "·" for c in shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
