"""Attention weights as colours: heatmaps of heads, of one head or of all, as pixels.

The colour map is matplotlib's viridis; its scale is the square root of the weight.

Shapes: L layers, H heads, T tokens of the prompt.
"""

import functools
import io

import numpy as np
from PIL import Image

from .snapshot_data import triangle_to_square

# A colour map that is perceptually uniform, and readable in grey and by colour-blind people. As
# "position:colour", positions from 0 to 255, interpolated: the maximum error is 2/255.
VIRIDIS = (
    "0:440154 13:481467 30:472a7a 42:443983 58:3e4c8a 81:32648e 125:218e8d 141:1e9d89 153:22a884 "
    "162:2ab07f 174:3bbb75 193:60ca60 201:73d056 215:95d840 233:c5e021 240:d8e219 246:e7e419 "
    "251:f4e61e 255:fde725"
)
MASKED = 236  # grey level of cells above the diagonal, which the causal mask excludes
ACCENT = (200, 62, 10)  # outlines of heads
# Images are drawn as indices of colours, see _palette. The indices from INK to WHITE are greys of
# increasing brightness, because Pillow blends the edges of letters, here their indices.
ACCENT_INDEX, INK, PALE_INK, MASKED_INDEX, WHITE = 225, 226, 234, 253, 255


def colour(codes: np.ndarray) -> np.ndarray:
    """Returns codes (..., T, T) as indices of colours. Masked cells are grey."""
    colours = _indices()[codes]
    colours[..., *np.triu_indices(codes.shape[-1], k=1)] = MASKED_INDEX
    return colours


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


def png_of_head(codes: np.ndarray, most: int) -> bytes:
    """Returns a heatmap, (T (T + 1) / 2), as a PNG: a pixel for each cell, at most `most` x `most`.
    Cells above the diagonal are transparent."""
    return png_of(Image.fromarray(colour(pooled(codes, most))), transparency=MASKED_INDEX)


def tile(codes: np.ndarray, size: int, gap: int) -> np.ndarray:
    """Returns heatmaps (L, H, T (T + 1) / 2) of `size` pixels as one grid of indices of colours."""
    num_layers, num_heads, _ = codes.shape
    pitch = size + gap
    grid = np.full((num_layers, pitch, num_heads, pitch), WHITE, np.uint8)
    grid[:, :size, :, :size] = fitted(codes, size).swapaxes(1, 2)
    grid = grid.reshape(num_layers * pitch, num_heads * pitch)
    return grid[: len(grid) - gap, : grid.shape[1] - gap]


def colour_bar(width: int, height: int) -> np.ndarray:
    """Returns the colours of the weights 0 to 1 from left to right, as indices, (height, width)."""
    return _indices()[np.linspace(0, 255, width).round().astype(int)][None].repeat(height, 0)


def png_of(image: Image.Image, **options: int) -> bytes:
    """Returns an image of indices as a PNG. options: of Pillow."""
    file = io.BytesIO()
    in_colour(image).save(file, "PNG", **options)
    return file.getvalue()


def in_colour(image: Image.Image) -> Image.Image:
    """Adds the palette to an image of indices. With 256 colours, a PNG is written in a quarter of
    the time. Colours of the colour map change by at most 3 of 255."""
    image.putpalette(_palette().tobytes())
    return image


def rgb(indices: np.ndarray) -> np.ndarray:
    """Returns indices of colours as colours: (...) -> (..., 3), uint8."""
    return _palette()[indices]


@functools.cache
def _palette() -> np.ndarray:
    """Returns 225 colours of the colour map, ACCENT, 30 greys from 25 to 255: (256, 3) uint8."""
    places, colours = zip(*(point.split(":") for point in VIRIDIS.split()), strict=True)
    channels = np.array([[*bytes.fromhex(colour)] for colour in colours]).T
    wanted, known = np.linspace(0, 255, 225).round(), [int(place) for place in places]
    colours = np.stack([np.interp(wanted, known, channel) for channel in channels], axis=-1)
    greys = np.linspace(25, 255, 30).round()
    greys[MASKED_INDEX - INK] = MASKED
    found = [colours.round(), [ACCENT], greys[:, None].repeat(3, 1)]
    return np.vstack(found).astype(np.uint8)


@functools.cache
def _indices() -> np.ndarray:
    """Returns the index of the colour of each code, (256,) uint8."""
    return (np.arange(256) * 224 / 255).round().astype(np.uint8)
