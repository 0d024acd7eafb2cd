"""The pictures: every weight can be read back from the pixels where its labels say it stands."""

import matplotlib
import numpy as np
import pytest
from PIL import Image

from lens.heatmap import (
    COLOUR_MAP,
    FORBIDDEN,
    _pooled,
    _tile,
    _title,
    colour,
    draw_grid,
    draw_layer,
    evenly_triangle,
    label,
)
from lens.probe import Prompt, to_codes, triangle_to_square
from lens.statistics import evenly

YELLOW = np.array([253, 231, 37])  # weight 1, where a head's map begins: token 0 sees itself alone
TABLE = (matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3] * 255).round()


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


def code_of(pixel):
    return int(np.abs(TABLE - pixel).sum(-1).argmin())


def layout(pixels, num_layers, num_heads):
    """(top, left, pitch) of the grid, found in the picture itself."""
    found = corners(pixels)
    top, left = found.min(0)
    rows = sorted({y for y, x in found if x == left})
    columns = sorted({x for y, x in found if y == top})
    return top, left, rows[:num_layers], columns[:num_heads]


def assert_shows(pixels, y, x, scale, square):
    """The map of one head begins at (y, x), its cells are `scale` pixels wide."""
    num_tokens = len(square)
    for query in range(num_tokens):
        for key in range(num_tokens):
            block = pixels[
                y + query * scale : y + (query + 1) * scale,
                x + key * scale : x + (key + 1) * scale,
            ]
            assert (block == block[0, 0]).all()
            if key > query:
                assert block[0, 0].tolist() == [FORBIDDEN] * 3
            else:
                assert abs(code_of(block[0, 0]) - int(square[query, key])) <= 1


def test_every_cell_of_every_head_can_be_read_from_the_grid(tmp_path):
    codes = random_codes(3, 4, 6)
    pixels = drawn_grid(codes, tmp_path / "grid.png")
    _, _, rows, columns = layout(pixels, 3, 4)
    assert len(rows) == 3
    assert len(columns) == 4
    pitch = columns[1] - columns[0]
    assert {*np.diff(rows), *np.diff(columns)} == {pitch}
    scale = round((pitch - 6) / 6)
    squares = triangle_to_square(codes)
    for layer, y in enumerate(rows):
        for head, x in enumerate(columns):
            assert_shows(pixels, y, x, scale, squares[layer, head])


def test_labels_stand_left_of_their_layer_and_above_their_head(tmp_path):
    pixels = drawn_grid(random_codes(3, 4, 6), tmp_path / "grid.png")
    top, left, rows, columns = layout(pixels, 3, 4)
    size = columns[1] - columns[0] - 6
    ink = pixels.sum(-1) < 200

    def inked(part, axis):
        """The middles of what is written, one for each label, along the axis."""
        places = np.flatnonzero(part.any(1 - axis))
        groups = np.split(places, np.flatnonzero(np.diff(places) > size / 2) + 1)
        return [(group[0] + group[-1]) / 2 for group in groups]

    beside = inked(ink[top : rows[-1] + size, : left - 1], axis=0)
    assert beside == pytest.approx([y - top + size / 2 for y in rows], abs=4)
    above = inked(ink[top - 24 : top, left - 1 :], axis=1)
    assert above == pytest.approx([x - left + 1 + size / 2 for x in columns], abs=4)


def test_colours_are_those_of_the_bytes_and_the_future_is_grey():
    codes = np.array([[255, 0], [128, 7]], np.uint8)
    colours = colour(codes)
    assert colours[0, 1].tolist() == [FORBIDDEN] * 3
    for cell in ((0, 0), (1, 0), (1, 1)):
        assert colours[cell].tolist() == TABLE[codes[cell]].tolist()
    assert FORBIDDEN not in TABLE.min(-1)  # a grey that no weight has


def test_tiles_stand_layers_down_and_heads_across():
    colours = np.zeros((2, 3, 1, 1, 3), np.uint8)
    colours[1, 2] = 9
    canvas = _tile(colours, scale=2, gap=1)
    assert canvas.shape == (2 * 3 - 1, 3 * 3 - 1, 3)
    assert (canvas[3:5, 6:8] == 9).all()
    assert (canvas[2] == 255).all()
    assert (canvas == 9).sum() == 4 * 3


@pytest.mark.parametrize(("size", "factor"), [(6, 2), (7, 2), (256, 3), (5, 5), (5, 9), (4, 1)])
def test_pooling_keeps_the_largest_of_each_block(size, factor):
    squares = np.random.default_rng(0).integers(0, 256, (2, 1, size, size)).astype(np.uint8)
    pooled = _pooled(squares, factor)
    blocks = -(-size // factor)
    assert pooled.shape == (2, 1, blocks, blocks)
    for y in range(blocks):
        for x in range(blocks):
            block = squares[..., y * factor : (y + 1) * factor, x * factor : (x + 1) * factor]
            assert (pooled[..., y, x] == block.max((-2, -1))).all()


def test_one_bright_cell_of_a_long_prompt_is_seen_in_a_small_map(tmp_path):
    codes = np.zeros((1, 12, 256 * 257 // 2), np.uint8)
    codes[..., 0] = 255
    query, key = 201, 77
    codes[0, 5, query * (query + 1) // 2 + key] = 255
    pixels = drawn_grid(codes, tmp_path / "long.png")
    _, _, (top, *_), columns = layout(pixels, 1, 12)
    yellow = np.argwhere((pixels == YELLOW).all(-1))
    inside = [(y - top, x - columns[5]) for y, x in yellow if columns[5] < x < columns[6] - 6]
    inside = [(y, x) for y, x in inside if y in range(1, columns[1] - columns[0])]
    size = columns[1] - columns[0] - 6
    assert inside
    for y, x in inside:
        assert y / size == pytest.approx(query / 256, abs=0.02)
        assert x / size == pytest.approx(key / 256, abs=0.02)


def test_a_layers_picture_shows_each_head_enlarged(tmp_path):
    codes = random_codes(1, 5, 9)[0]
    path = tmp_path / "layer.png"
    draw_layer(codes, a_prompt(9), 40, 3, path)
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    squares = triangle_to_square(codes)
    places = sorted((y, x) for y, x in corners(pixels) if is_map(pixels, y, x))
    assert len(places) == 5
    for square, (y, x) in zip(squares, places, strict=True):
        assert_shows(pixels, y, x, 16, square)


def is_map(pixels, y, x):
    """The first row of a map: one yellow cell, then the grey of what the mask forbids."""
    return (pixels[y, x + 20] == FORBIDDEN).all() and (pixels[y, x : x + 16] == YELLOW).all()


@pytest.mark.parametrize(
    ("layers", "heads", "tokens"),
    [(1, 1, 1), (2, 2, 1), (1, 1, 2), (1, 1, 256), (2, 1, 64), (48, 25, 64), (3, 25, 256)],
)
def test_any_shape_becomes_a_picture_of_a_bearable_size(tmp_path, layers, heads, tokens):
    path = tmp_path / "grid.png"
    pixels = drawn_grid(random_codes(layers, heads, tokens), path)
    height, width = pixels.shape[:2]
    assert 300 < height < 8000
    assert 500 <= width < 4000
    if tokens > 1:
        _, _, rows, columns = layout(pixels, layers, heads)
        assert (len(rows), len(columns)) == (layers, heads)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (25, 3), (12, 256)])
def test_any_layer_becomes_a_picture(tmp_path, heads, tokens):
    draw_layer(random_codes(1, heads, tokens)[0], a_prompt(tokens), 0, 11, tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").width < 16000


ODD = ["\n", "漢字", "🙂", "‮", "\x00", "<0xE2>", "$x$", "", "é" * 40, "<id 50300>"]


def test_odd_tokens_and_titles_are_drawn(tmp_path):
    codes = random_codes(2, 2, len(ODD))
    prompt = a_prompt(len(ODD), ODD, cropped=True)
    draw_grid(codes, prompt, 10**9, tmp_path / "grid.png")
    draw_layer(codes[0], prompt, 0, 0, tmp_path / "layer.png")
    assert min(Image.open(tmp_path / "layer.png").size) > 200


def test_a_model_that_has_learned_nothing_is_told_from_one_that_has(tmp_path, monkeypatch):
    """The words beside the step are those of the weights, not of the step's number."""
    written = []
    from PIL import ImageDraw

    real = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, place, text, *rest, **more: (
            written.append(text),
            real(self, place, text, *rest, **more),
        )[1],
    )
    q, k = np.tril_indices(8)
    even = to_codes(evenly(8)[:, q, k]).numpy()[None].repeat(2, 1)  # (1, 2, cells)
    drawn_grid(even, tmp_path / "even.png", step=40)
    assert "step 40" in written
    assert "so far every token looks back evenly" in written
    written.clear()
    drawn_grid(random_codes(1, 2, 8), tmp_path / "learned.png", step=0)
    assert "1 layer × 2 heads" in written
    assert "so far every token looks back evenly" not in written


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 256])
def test_evenly_has_as_many_cells_as_the_codes(num_tokens):
    cells = num_tokens * (num_tokens + 1) // 2
    even = evenly_triangle(cells)
    assert even.shape == (cells,)
    assert even[0] == 1
    assert even[-1] == pytest.approx(1 / num_tokens)


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "the"),
        ("\n", "\\n"),
        ("  ", "␣␣"),
        (" ", "␣"),
        ("\t", "\\t"),
        ("\x00a", "·a"),
        ("\u202eabc", "·abc"),
        ("x" * 30, "x" * 11 + "…"),
        ("<0xE2>", "<0xE2>"),
        ("", ""),
    ],
)
def test_labels_show_odd_tokens(token, shown):
    assert label(token) == shown


def test_a_cropped_prompt_says_so_and_shows_what_was_read():
    prompt = a_prompt(5, ["She", " sat", " on", " the", " bank"], cropped=True)
    prompt.text = "She sat on the bank of the river"
    assert _title(prompt, 80) == "“She sat on the bank”  (first 5 tokens)"
    prompt.cropped = False
    assert _title(prompt, 80) == "“She sat on the bank of the river”"
    assert _title(prompt, 20).endswith("…”")
