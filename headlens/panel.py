"""The image of a step: all heads on one prompt, and some heads enlarged with tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from .fonts import DrawnText, drawn, font_of
from .heatmap import (
    INK,
    PALE_INK,
    WHITE,
    fit_title,
    fitted,
    label,
    paste_grid,
    save,
    title_of,
)
from .prompts import Prompt
from .rounding import formatted
from .statistics import STATISTICS

PANEL = (920, 600)  # pixels; twice the size of a panel of W&B
LEGIBLE = 8  # pixels of a row that has a label


def caption(prompt: Prompt, step: int) -> str:
    """Returns the caption of an image on a dashboard: "step 400 · prompt: “She sat on the …”"."""
    return f"step {step:,} · prompt: {title_of(prompt, 80)}"


def draw_panel(
    codes: np.ndarray,
    prompt: Prompt,
    step: int,
    heads: Sequence[Mapping],
    uniform: Mapping,
    path: Path,
) -> None:
    """Writes a PNG for a panel of a dashboard, which shows it at half of its size: all heads on
    the left, the first of `heads` enlarged on the right and, if there is room, the second one below
    the grid. The enlarged heads have labels of the tokens, if these are legible.

    codes: uint8 (L, H, T (T + 1) / 2). heads: rows of heads.head_table. uniform: the statistics for
    uniform attention on this prompt.
    """
    num_layers, num_heads, _ = codes.shape
    image = Image.new("L", PANEL, WHITE)
    draw, font, bold = ImageDraw.Draw(image), font_of(20), font_of(26, "Bold")
    draw.text((16, 10), f"step {step:,}", INK, bold)
    after = 32 + bold.getlength(f"step {step:,}")
    fit_title(prompt, PANEL[0] - after - 8, 20).draw(draw, after, 15, PALE_INK, "la")

    left, top = round(font.getlength(f"L{num_layers - 1}")) + 24, 80
    pitch = max(2, min((420 - left) // num_heads, (PANEL[1] - 12 - top) // num_layers))
    right, bottom = left + num_heads * pitch + 24, top + num_layers * pitch + 12
    rooms = [(right, 48, PANEL[0] - 16, PANEL[1] - 10), (left, bottom, right - 24, PANEL[1] - 10)]
    if not heads:
        draw.text((right, 150), "no head has a name\non this prompt", PALE_INK, font_of(24))
    # The caption of an enlarged head needs 52 of these pixels.
    fitting = [room for room in rooms if room[3] - room[1] >= 200]
    enlarged = list(zip(heads, fitting, strict=False))
    paste_grid(image, (left, top), codes, pitch, font, [row for row, _ in enlarged])
    for row, room in enlarged:
        _draw_head(image, draw, codes[row["layer"], row["head"]], prompt, row, uniform, room)
    save(image, path)


def _draw_head(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    codes: np.ndarray,
    prompt: Prompt,
    row: Mapping,
    uniform: Mapping,
    room: tuple[int, int, int, int],
) -> None:
    """Draws a head as large as it fits into `room`, (left, top, right, bottom) in pixels."""
    x, y, width, height = room[0], room[1], room[2] - room[0], room[3] - room[1] - 52
    size = min(width, height)
    # In the masked half, beside the diagonal: right of the row and above the column of each token.
    labelled = size - max(0, _label_end(prompt, size) - width)
    has_labels = labelled >= LEGIBLE * prompt.shown
    size = labelled if has_labels else size
    name = row["name"]
    title = f"L{row['layer']} H{row['head']} {STATISTICS[name].title}"
    draw.text((x, y), title, INK, font_of(20, "Bold"))
    value = f"{formatted(row[name])} (chance {formatted(uniform[name])})"
    draw.text((x, y + 24), value, INK, font_of(20))
    image.paste(Image.fromarray(fitted(codes, size)), (x, y + 52))
    if has_labels:
        _label_tokens(draw, (x, y + 52), prompt, size)


def _label_tokens(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], prompt: Prompt, size: int
) -> None:
    """Writes each token right of the diagonal of a heatmap."""
    for text, x, y in _labels(prompt, size):
        text.draw(draw, corner[0] + x, corner[1] + y, INK, "lm")


def _label_end(prompt: Prompt, size: int) -> int:
    """Returns where the labels of a heatmap of `size` pixels end, in pixels from its left."""
    return math.ceil(max(x + text.length for text, x, _ in _labels(prompt, size)))


def _labels(prompt: Prompt, size: int) -> list[tuple[DrawnText, float, float]]:
    """Returns (text, x, y) of each label."""
    cell, height = size / prompt.shown, max(1, min(16, size // prompt.shown))
    texts = (drawn(label(token), height) for token in prompt.labels[: prompt.shown])
    return [(text, (n + 1) * cell + 3, (n + 0.5) * cell) for n, text in enumerate(texts)]
