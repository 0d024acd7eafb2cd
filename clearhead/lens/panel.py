"""A heatmap image for the panel of a dashboard: all heads, and some heads enlarged with tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .heatmap import (
    INK,
    PALE_INK,
    WHITE,
    fitted,
    font_of,
    label,
    label_grid,
    outline,
    save,
    tile,
    title_of,
)
from .probe import Prompt
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
    the left, the first of `heads` enlarged on the right: two or, in a deep model, four. The
    enlarged heads have labels of the tokens, if these are legible.

    codes: uint8 (L, H, T (T + 1) / 2). heads: rows of heads.head_table. uniform: the statistics for
    uniform attention on this prompt.
    """
    num_layers, num_heads, _ = codes.shape
    image = Image.new("L", PANEL, WHITE)
    draw, font, bold = ImageDraw.Draw(image), font_of(20), font_of(26, "Bold")
    draw.text((16, 10), f"step {step:,}", INK, bold)
    after = 32 + bold.getlength(f"step {step:,}")
    fits = round((PANEL[0] - after) / font.getlength("m") * 1.7)
    draw.text((after, 15), title_of(prompt, fits), PALE_INK, font)

    left, top = round(font.getlength(f"L{num_layers - 1}")) + 24, 84
    pitch = max(2, min((580 - left) // num_heads, (PANEL[1] - 12 - top) // num_layers))
    gap = min(6, max(1, pitch // 10))
    image.paste(Image.fromarray(tile(codes, pitch - gap, gap)), (left, top))
    label_grid(draw, (left, top), codes.shape, pitch - gap, gap, font)

    x, y = left + num_heads * pitch + 24, 56
    width, height = PANEL[0] - x - 16, PANEL[1] - y - 12
    if not heads:
        draw.text((x, 150), "no head has a name\non this prompt", PALE_INK, font_of(24))
    is_wide = width >= 530  # the caption of a head needs 260 pixels
    heads = heads[: 4 if is_wide else 2]
    across = 2 if is_wide and len(heads) > 1 else 1
    size = min(width // across - 12, height // max(1, math.ceil(len(heads) / across)) - 64)
    # In the masked half, beside the diagonal: above the column and right of the row of each token.
    most = size - max(0, _label_end(prompt, size) - width // across)
    has_labels = most >= LEGIBLE * prompt.shown
    size = most if has_labels else size
    for number, row in enumerate(heads):
        layer, head, name = row["layer"], row["head"], row["name"]
        place = (x + number % across * (width // across), y + number // across * (size + 70))
        draw.text(place, f"L{layer} H{head} {STATISTICS[name].title}", INK, font_of(20, "Bold"))
        value = f"{formatted(row[name])} (chance {formatted(uniform[name])})"
        draw.text((place[0], place[1] + 26), value, INK, font)
        heatmap = Image.fromarray(fitted(codes[layer, head], size))
        image.paste(heatmap, (place[0], place[1] + 56))
        if has_labels:
            _label_tokens(draw, (place[0], place[1] + 56), prompt, size)
        outline(draw, (left + head * pitch, top + layer * pitch), pitch - gap)
    save(image, path)


def _label_tokens(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], prompt: Prompt, size: int
) -> None:
    """Writes each token right of the diagonal of a heatmap."""
    for text, x, y in _labels(prompt, size):
        draw.text((corner[0] + x, corner[1] + y), text, INK, _font(prompt, size), anchor="lm")


def _label_end(prompt: Prompt, size: int) -> int:
    """Returns where the labels of a heatmap of `size` pixels end, in pixels from its left."""
    font = _font(prompt, size)
    return math.ceil(max(x + font.getlength(text) for text, x, _ in _labels(prompt, size)))


def _labels(prompt: Prompt, size: int) -> list[tuple[str, float, float]]:
    """Returns (text, x, y) of each label."""
    cell = size / prompt.shown
    tokens = enumerate(prompt.tokens[: prompt.shown])
    return [(label(token), (n + 1) * cell + 3, (n + 0.5) * cell) for n, token in tokens]


def _font(prompt: Prompt, size: int) -> ImageFont.FreeTypeFont:
    return font_of(max(1, min(16, size // prompt.shown)))
