"""The pictures: every weight can be read back from the pixels at its labels."""

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw

from lens.heatmap import (
    COLOUR_MAP,
    FORBIDDEN,
    draw_grid,
    draw_layer,
    label,
)
from lens.probe import Prompt, triangle_to_square

YELLOW = np.array([253, 231, 37])  # weight 1, where a head's map begins: token 0 sees itself alone
TABLE = (matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3] * 255).round()


@pytest.fixture
def written(monkeypatch):
    """The texts that are drawn, with their places."""
    texts, draw_text = [], ImageDraw.ImageDraw.text

    def text(self, place, text, *rest, **more):
        texts.append((text, place))
        return draw_text(self, place, text, *rest, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return texts


def a_prompt(num_tokens, tokens=None, **changes):
    tokens = tokens or [chr(97 + n % 26) for n in range(num_tokens)]
    return Prompt("1-x", "".join(tokens), list(range(num_tokens)), tokens, **changes)


def random_codes(num_layers, num_heads, num_tokens, seed=0):
    """uint8 (L, H, T (T + 1) / 2) whose first cell is 255, as it is for every head."""
    cells = num_tokens * (num_tokens + 1) // 2
    codes = np.random.default_rng(seed).integers(0, 255, (num_layers, num_heads, cells))
    codes[..., 0] = 255
    return codes.astype(np.uint8)


def drawn_grid(codes, path, step=0, **changes):
    num_tokens = int((2 * codes.shape[-1]) ** 0.5)
    draw_grid(codes, a_prompt(num_tokens, **changes), step, path)
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def corners(pixels):
    """Where maps begin: (ys, xs) of yellow pixels with none above and none to the left."""
    yellow = np.abs(pixels - YELLOW).max(-1) == 0
    above = np.pad(yellow, ((1, 0), (0, 0)))[:-1]
    left = np.pad(yellow, ((0, 0), (1, 0)))[:, :-1]
    return np.argwhere(yellow & ~above & ~left)


def layout(pixels, num_layers, num_heads):
    """(top, left, pitch) of the grid, found in the picture itself."""
    found = corners(pixels)
    top, left = found.min(0)
    rows = sorted({y for y, x in found if x == left})
    columns = sorted({x for y, x in found if y == top})
    return top, left, rows[:num_layers], columns[:num_heads]


def shows(pixels, y, x, scale, square):
    """Whether the map of one head begins at (y, x) and its cells are `scale` pixels wide."""
    expected = TABLE[square]
    expected[np.triu_indices(len(square), 1)] = FORBIDDEN
    expected = expected.repeat(scale, 0).repeat(scale, 1)
    size = len(expected)
    return np.array_equal(pixels[y : y + size, x : x + size], expected)


def test_every_cell_and_label_of_the_grid(tmp_path, written):
    assert FORBIDDEN not in TABLE.min(-1)  # a grey that no weight has
    codes = random_codes(3, 4, 6)
    pixels = drawn_grid(codes, tmp_path / "grid.png")
    top, left, rows, columns = layout(pixels, 3, 4)
    assert (len(rows), len(columns)) == (3, 4)
    pitch = columns[1] - columns[0]
    assert {*np.diff(rows), *np.diff(columns)} == {pitch}
    size = pitch - 6
    squares = triangle_to_square(codes)
    places = dict(written)
    for layer, y in enumerate(rows):
        label_x, label_y = places[f"L{layer}"]
        assert label_x < left
        assert label_y == pytest.approx(y + size / 2, abs=1)
        for head, x in enumerate(columns):
            assert shows(pixels, y, x, size // 6, squares[layer, head])
            label_x, label_y = places[f"H{head}"]
            assert label_y < top
            assert label_x == pytest.approx(x + size / 2, abs=1)


def test_picture_of_a_layer_shows_each_head_enlarged(tmp_path):
    codes = random_codes(1, 5, 9)[0]
    path = tmp_path / "layer.png"
    draw_layer(codes, a_prompt(9), 40, 3, path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    for square in triangle_to_square(codes):
        assert any(shows(pixels, y, x, 16, square) for y, x in corners(pixels))


def test_long_prompt_is_pooled_by_the_largest_of_each_block(tmp_path):
    """255 tokens of 12 heads: each pixel is the largest of two by two cells."""
    codes = random_codes(1, 12, 255)
    pixels = drawn_grid(codes, tmp_path / "long.png")
    padded = np.pad(triangle_to_square(codes)[0], ((0, 0), (0, 1), (0, 1)))
    corners_of_blocks = [padded[:, y::2, x::2] for y in (0, 1) for x in (0, 1)]
    largest = np.max(corners_of_blocks, axis=0)  # (12, 128, 128)
    _, _, (top,), columns = layout(pixels, 1, 12)
    for square, left in zip(largest, columns, strict=True):
        assert shows(pixels, top, left, 1, square)


def test_pictures_of_any_shape_have_a_usable_size(tmp_path):
    for shape in ((1, 1, 1), (1, 1, 256), (48, 25, 16)):
        layers, heads, tokens = shape
        pixels = drawn_grid(random_codes(layers, heads, tokens), tmp_path / "grid.png")
        height, width = pixels.shape[:2]
        assert 300 < height < 8000, shape
        assert 500 <= width < 4000, shape
        if tokens > 1:
            _, _, rows, columns = layout(pixels, layers, heads)
            assert (len(rows), len(columns)) == (layers, heads), shape


def test_labels_of_odd_tokens():
    for token, shown in (
        (" the", "the"),
        ("\n", "\\n"),
        ("\u202eabc", "·abc"),
        ("x" * 30, "x" * 11 + "…"),
        ("<0xE2>", "<0xE2>"),
    ):
        assert label(token) == shown
