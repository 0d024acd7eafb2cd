"""Heatmaps of attention heads as PNG: a grid of all heads, or the heads of one layer with tokens.

Pillow draws an image in a few milliseconds; training waits until it is written. The colour map and
the font are matplotlib's.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import functools
import math
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from .probe import Prompt, from_codes, triangle_to_square
from .statistics import uniform_attention

COLOUR_MAP = "viridis"  # perceptually uniform; readable in grey and by colour-blind people
WIDTH = 800  # approximate width of a grid in pixels; dashboards show it at half of this size
MASKED = 236  # grey level of cells above the diagonal, which the causal mask excludes
INK, PALE_INK = (25, 25, 25), (95, 95, 95)


def draw_grid(codes: np.ndarray, prompt: Prompt, step: int, path: Path) -> None:
    """Writes a PNG of all heads: a row for each layer, a column for each head.

    codes: uint8 (L, H, T (T + 1) / 2), the lower triangles on a square-root scale (probe.to_codes):
    a weight of 0.04 is a fifth as bright as a weight of 1. The text is large because dashboards
    show the image at half of its size.
    """
    num_layers, num_heads, _ = codes.shape
    squares = triangle_to_square(codes)  # (L, H, T, T)
    uniform = uniform_attention(squares.shape[-1]).numpy()
    is_uniform = np.abs(from_codes(squares) - uniform).max() < 0.1
    room = min(250, max(40, WIDTH // num_heads - 8))
    squares = _pooled(squares, math.ceil(squares.shape[-1] / max(room, 128)))
    scale = max(1, round(room / squares.shape[-1]))
    size, gap = scale * squares.shape[-1], 6
    grid = _tile(colour(squares), scale, gap)
    height, width = grid.shape[:2]

    letters = round(min(30, max(17, (width + 60) / 42)))
    font, bold, small = _font(letters), _font(letters + 4, "Bold"), _font(letters - 3)
    left = round(font.getlength(f"L{num_layers - 1}")) + 12
    total = max(left + width + 12, 560)
    text_top, grid_top = 14 + letters + 14, 2 * letters + 56 + letters
    image = Image.new("RGB", (total, grid_top + height + 2 * letters + 40), "white")
    draw = ImageDraw.Draw(image)

    draw.text((left, 10), f"step {step:,}", INK, bold)
    after = left + bold.getlength(f"step {step:,}") + letters
    what = " × ".join(
        f"{count} {name}{'s' if count > 1 else ''}"
        for count, name in ((num_layers, "layer"), (num_heads, "head"))
    )
    if is_uniform:
        what = "attention is still uniform"
    draw.text((after, 12), what, PALE_INK, font)
    fits = round((total - left) / small.getlength("m") * 1.45)
    draw.text((left, text_top), _title(prompt, fits), INK, small)

    image.paste(Image.fromarray(grid), (left, grid_top))
    widest = font.getlength(f"H{num_heads - 1}") + 6
    for head in range(0, num_heads, math.ceil(widest / (size + gap))):
        x = left + head * (size + gap) + size / 2
        draw.text((x, grid_top - 5), f"H{head}", INK, font, anchor="md")
    for layer in range(0, num_layers, math.ceil((letters + 2) / (size + gap))):
        y = grid_top + layer * (size + gap) + size / 2
        draw.text((left - 8, y), f"L{layer}", INK, font, anchor="rm")
    _draw_scale(image, left, grid_top + height + 16, small)
    image.save(path, compress_level=1)


def draw_layer(codes: np.ndarray, prompt: Prompt, step: int, layer: int, path: Path) -> None:
    """Writes a PNG of one layer's heads, enlarged, with the tokens on both axes.

    codes: uint8 (H, T (T + 1) / 2).
    """
    squares = triangle_to_square(codes)  # (H, T, T)
    num_heads, num_tokens, _ = squares.shape
    scale = max(2, min(16, 480 // num_tokens))
    size, font, bold = scale * num_tokens, _font(12), _font(20, "Bold")
    labels = [label(token) for token in prompt.tokens[:num_tokens]]
    margin = round(max(font.getlength(text) for text in labels)) + 10
    across = min(num_heads, max(1, round(math.sqrt(num_heads * 1.4))))
    down = math.ceil(num_heads / across)
    wide, high = margin + size + 18, margin + size + 34
    image = Image.new("RGB", (max(across * wide + 12, 640), 92 + down * high + 60), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 10), f"step {step:,}, layer {layer}", INK, bold)
    fits = round(image.width / _font(15).getlength("m") * 1.45)
    draw.text((12, 46), _title(prompt, fits), INK, _font(15))
    for head in range(num_heads):
        x, y = 12 + head % across * wide, 80 + head // across * high
        draw.text((x + margin, y), f"L{layer} H{head}", INK, _font(15, "Bold"))
        position = (x + margin, y + 22)
        image.paste(Image.fromarray(_tile(colour(squares[None, head, None]), scale, 0)), position)
        _write_tokens(draw, labels, scale, position, size, font)
    _draw_scale(image, 12 + margin, image.height - 46, _font(15))
    image.save(path, compress_level=1)


def _write_tokens(
    draw: ImageDraw.ImageDraw,
    labels: list[str],
    scale: int,
    position: tuple[int, int],
    size: int,
    font: ImageFont.FreeTypeFont,
) -> None:
    """Writes the tokens left of the rows and below the columns, as many as fit."""
    upright = ImageFont.TransposedFont(font, Image.Transpose.ROTATE_90)
    x, y = position
    for number in range(0, len(labels), math.ceil(13 / scale)):
        middle = (number + 0.5) * scale
        draw.text((x - 5, y + middle), labels[number], INK, font, anchor="rm")
        draw.text((round(x + middle - 7), y + size + 5), labels[number], INK, upright)


def _draw_scale(image: Image.Image, x: int, y: int, font: ImageFont.FreeTypeFont) -> None:
    """Draws the colour bar and a legend for rows and columns."""
    draw = ImageDraw.Draw(image)
    bar = np.linspace(0, 255, 200).astype(np.uint8)[None].repeat(round(font.size * 0.8), 0)
    draw.text((x, y), "0", PALE_INK, font)
    bar_x = round(x + font.getlength("0") + 8)
    image.paste(Image.fromarray(_table()[bar]), (bar_x, round(y + font.size * 0.25)))
    words = "weight 1 (√ scale)   row: query, column: key"
    draw.text((bar_x + 208, y), words, PALE_INK, font)


def colour(codes: np.ndarray) -> np.ndarray:
    """Returns the colours of codes: (..., T, T) -> (..., T, T, 3), uint8. Masked cells are grey."""
    colours = _table()[codes]
    colours[..., *np.triu_indices(codes.shape[-1], k=1), :] = MASKED
    return colours


def label(token: str, longest: int = 12) -> str:
    """Returns an axis label: the token, truncated, with visible white space."""
    shown = token.strip() or repr(token)[1:-1].replace(" ", "␣")
    shown = "".join(c if c.isprintable() else "·" for c in shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _title(prompt: Prompt, fits: int) -> str:
    """Returns the prompt in about `fits` characters, with a note if the prompt is truncated."""
    note = f"  (first {prompt.shown} tokens)" if prompt.truncated else ""
    text = "".join(prompt.tokens[: prompt.shown]) if prompt.truncated else prompt.text
    text = "".join(c if c.isprintable() else " " for c in text)
    shown = textwrap.shorten(text, max(12, fits - len(note)), placeholder=" …")
    return (f"“{shown}”" if not prompt.period else shown) + note


def _pooled(squares: np.ndarray, factor: int) -> np.ndarray:
    """Returns (..., T, T) max-pooled over blocks of factor x factor cells."""
    pooled = F.max_pool2d(torch.from_numpy(squares).float(), factor, ceil_mode=True)
    return pooled.byte().numpy()


def _tile(colours: np.ndarray, scale: int, gap: int) -> np.ndarray:
    """Returns heatmaps (L, H, T, T, 3) as one white grid: (L * (T * scale + gap) - gap, ..., 3)."""
    colours = colours.repeat(scale, axis=2).repeat(scale, axis=3)
    num_layers, num_heads, size = colours.shape[:3]
    step = size + gap
    room = [(0, 0), (0, 0), (0, gap), (0, gap), (0, 0)]
    tiles = np.pad(colours, room, constant_values=255).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(num_layers * step, num_heads * step, 3)[: -gap or None, : -gap or None]


@functools.cache
def _table() -> np.ndarray:
    """Returns the colour map as 256 colours, (256, 3) uint8."""
    import matplotlib

    colours = matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3]
    return (colours * 255).round().astype(np.uint8)


@functools.cache
def _font(size: int, weight: str = "") -> ImageFont.FreeTypeFont:
    """DejaVu Sans (Latin, Greek, Cyrillic) at `size` pixels."""
    import matplotlib

    name = f"DejaVuSans-{weight}.ttf" if weight else "DejaVuSans.ttf"
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}", size)
