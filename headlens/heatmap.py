"""Heatmaps of attention heads as pixels: their colours, labels and titles, a grid of all heads.

Pillow draws an image in a few milliseconds; training waits until it is written. The colour map and
the font are matplotlib's.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import base64
import functools
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .fonts import DrawnText, drawn
from .history import atomic_write
from .prompts import BYTES_OF_TOKEN, Prompt, plain_text
from .snapshot_data import triangle_to_square

COLOUR_MAP = "viridis"  # perceptually uniform; readable in grey and by colour-blind people
# The same as "position:colour", positions from 0 to 255, interpolated: the maximum error is 2/255.
VIRIDIS = (
    "0:440154 13:481467 30:472a7a 42:443983 58:3e4c8a 81:32648e 125:218e8d 141:1e9d89 153:22a884 "
    "162:2ab07f 174:3bbb75 193:60ca60 201:73d056 215:95d840 233:c5e021 240:d8e219 246:e7e419 "
    "251:f4e61e 255:fde725"
)
TICKS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # of the colour bar, whose scale is the square root
MASKED = 236  # grey level of cells above the diagonal, which the causal mask excludes
ACCENT = (200, 62, 10)  # outlines of heads
# Images are drawn as indices of colours, see _palette. The indices from INK to WHITE are greys of
# increasing brightness, because Pillow blends the edges of letters, here their indices.
ACCENT_INDEX, INK, PALE_INK, MASKED_INDEX, WHITE = 225, 226, 234, 253, 255


def paste_grid(
    image: Image.Image,
    corner: tuple[int, int],
    codes: np.ndarray,
    pitch: int,
    font: ImageFont.FreeTypeFont,
    outlined: Sequence[Mapping],
) -> None:
    """Draws all heads, uint8 (L, H, T (T + 1) / 2), a row for each layer, with the numbers of heads
    above and of layers on the left, as many as fit, and a frame around some heads.

    corner: (x, y) of the first heatmap. pitch: pixels from one head to the next. outlined: rows of
    heads.head_table.
    """
    (left, top), (num_layers, num_heads), draw = corner, codes.shape[:2], ImageDraw.Draw(image)
    gap = min(6, max(1, pitch // 10))
    size = pitch - gap
    image.paste(Image.fromarray(tile(codes, size, gap)), corner)
    widest = font.getlength(f"H{num_heads - 1}") + 6
    for head in range(0, num_heads, math.ceil(widest / pitch)):
        x = left + head * pitch + size / 2
        draw.text((x, top - 5), f"H{head}", INK, font, anchor="md")
    for layer in range(0, num_layers, math.ceil((font.size + 2) / pitch)):
        y = top + layer * pitch + size / 2
        draw.text((left - 8, y), f"L{layer}", INK, font, anchor="rm")
    for row in outlined:
        x, y = left + row["head"] * pitch - 2, top + row["layer"] * pitch - 2
        draw.rectangle((x, y, x + size + 3, y + size + 3), outline=ACCENT_INDEX, width=2)


def colour(codes: np.ndarray) -> np.ndarray:
    """Returns codes (..., T, T) as indices of colours. Masked cells are grey."""
    colours = _indices()[codes]
    colours[..., *np.triu_indices(codes.shape[-1], k=1)] = MASKED_INDEX
    return colours


def label(token: str) -> str:
    """Returns an axis label: the token, truncated, with visible white space."""
    shown = token.strip() or repr(token)[1:-1].replace(" ", "␣")
    shown = shown.replace("><0x", " ") if BYTES_OF_TOKEN.fullmatch(shown) else shown  # <0xE3 81>
    shown = "".join(c if c.isprintable() else "·" for c in shown)
    return shown if len(shown) <= 12 else shown[:11] + "…"


def title_of(prompt: Prompt, fits: int) -> str:
    """Returns the prompt in about `fits` characters, with a note if the prompt is truncated."""
    note = f"  (first {prompt.shown} tokens)" if prompt.truncated else ""
    text = plain_text(prompt.tokens[: prompt.shown]) if prompt.truncated else prompt.text
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    most = max(12, fits - len(note))
    if len(text) > most:  # ends with a word, if there are spaces between words
        end = text.rfind(" ", most // 2, most - 1)
        text = f"{text[: end if end > 0 else most - 2]} …"
    return (f"“{text}”" if not prompt.period else text) + note


def fit_title(prompt: Prompt, width: float, size: int) -> DrawnText:
    """Returns the title of a prompt, at most about `width` pixels wide. It has a note if the
    installed fonts lack some of its characters."""
    fits = round(2 * width / size)
    for _ in range(3):
        text = title_of(prompt, fits)
        title = drawn(text, size)
        if title.has_codes:
            title = drawn(f"{text}  (no font for some characters)", size)
        if title.length <= width:
            break
        fits = int(min(fits, len(text)) * width / title.length)
    return title


def fitted(codes: np.ndarray, size: int) -> np.ndarray:
    """Returns heatmaps (..., T (T + 1) / 2) as indices of colours, (..., size, size): each cell
    enlarged or, if there are more cells than pixels, the largest of several cells in each pixel."""
    squares = pooled(codes, size)  # (..., T, T)
    cells = np.arange(size) * squares.shape[-1] // size
    return colour(squares).take(cells, -1).take(cells, -2)


def pooled(codes: np.ndarray, most: int) -> np.ndarray:
    """Returns heatmaps (..., T (T + 1) / 2) as (..., T, T), zero above the diagonal. If there are
    more than `most` cells, each cell of (..., most, most) is the largest of several cells."""
    squares = triangle_to_square(codes)
    num_tokens = squares.shape[-1]
    if num_tokens <= most:
        return squares
    first = -(-np.arange(most) * num_tokens // most)  # the first of these cells, rounded up
    return np.maximum.reduceat(np.maximum.reduceat(squares, first, -2), first, -1)


def data_url(codes: np.ndarray, most: int) -> str:
    """Returns a heatmap, (T (T + 1) / 2), as the URL of a PNG: a pixel for each cell, at most
    `most` x `most`. Cells above the diagonal are transparent."""
    square = pooled(codes, most).astype(int)
    indices = np.tril(1 + square * 254 // 255)  # in the palette; 0: transparent
    image = Image.fromarray(indices.astype(np.uint8), "P")
    colours = _table()[np.linspace(0, 255, 255).round().astype(int)]
    image.putpalette(bytes(3) + colours.tobytes())
    file = io.BytesIO()
    image.save(file, "PNG", transparency=0)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def grid_url(codes: np.ndarray, width: int = 480) -> str:
    """Returns the heatmaps of all heads, (L, H, T (T + 1) / 2), as the URL of a PNG about `width`
    pixels wide."""
    file = io.BytesIO()
    image = Image.fromarray(tile(codes, max(8, width // codes.shape[1] - 2), 2))
    in_colour(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def tile(codes: np.ndarray, size: int, gap: int) -> np.ndarray:
    """Returns heatmaps (L, H, T (T + 1) / 2) of `size` pixels as one grid of indices of colours."""
    num_layers, num_heads, _ = codes.shape
    pitch = size + gap
    grid = np.full((num_layers, pitch, num_heads, pitch), WHITE, np.uint8)
    grid[:, :size, :, :size] = fitted(codes, size).swapaxes(1, 2)
    grid = grid.reshape(num_layers * pitch, num_heads * pitch)
    return grid[: len(grid) - gap, : grid.shape[1] - gap]


def save(image: Image.Image, path: Path) -> None:
    """Writes an image of indices as a PNG, atomically."""
    file = io.BytesIO()
    in_colour(image).save(file, "PNG", compress_level=1)
    atomic_write(path, file.getvalue())


def in_colour(image: Image.Image) -> Image.Image:
    """Adds the palette to an image of indices. With 256 colours, a PNG is written in a quarter of
    the time. Colours of the colour map change by at most 3 of 255."""
    image.putpalette(_palette().tobytes())
    return image


def rgb(indices: np.ndarray) -> np.ndarray:
    """Returns indices of colours as colours: (...) -> (..., 3), uint8."""
    return _palette()[indices]


@functools.cache
def _table() -> np.ndarray:
    """Returns the colour map as 256 colours, (256, 3) uint8."""
    places, colours = zip(*(point.split(":") for point in VIRIDIS.split()), strict=True)
    places = [int(place) for place in places]
    channels = np.array([[*bytes.fromhex(colour)] for colour in colours]).T
    table = [np.interp(np.arange(256), places, channel) for channel in channels]
    return np.stack(table, axis=-1).round().astype(np.uint8)


@functools.cache
def _palette() -> np.ndarray:
    """Returns 225 colours of the colour map, ACCENT, 30 greys from 25 to 255: (256, 3) uint8."""
    colours = _table()[np.linspace(0, 255, 225).round().astype(np.uint8)]
    greys = np.linspace(25, 255, 30).round()
    greys[MASKED_INDEX - INK] = MASKED
    return np.vstack([colours, [ACCENT], greys[:, None].repeat(3, 1)]).astype(np.uint8)


@functools.cache
def _indices() -> np.ndarray:
    """Returns the index of the colour of each code, (256,) uint8."""
    return (np.arange(256) * 224 / 255).round().astype(np.uint8)
