"""Images of heads: every weight can be read from the pixels, next to its tokens."""

import dataclasses
import io

import matplotlib
import numpy as np
import pytest
from helpers.pages import snapshot_of
from helpers.stories import a_story
from PIL import Image, ImageDraw

from headlens import KINDS, STATISTICS, draw_figure, drawing
from headlens.drawing import heads_image, largest_image
from headlens.finding import findings
from headlens.fonts import font_of
from headlens.heads import ALL_NAMES
from headlens.heatmap import ACCENT, MASKED, png_of
from headlens.history import Row
from headlens.prompts import Prompt

NAMES = [key for key in KINDS if key != "positional"]
EXACT = 4  # of 255; an image has 256 colours
TABLE = (matplotlib.colormaps["viridis"](np.linspace(0, 1, 256))[:, :3] * 255).round()


def random_codes(num_layers, num_heads, num_tokens):
    """Returns uint8 (L, H, T (T + 1) / 2). The first cell is 255, as for every head."""
    cells = num_tokens * (num_tokens + 1) // 2
    codes = np.random.default_rng(0).integers(0, 245, (num_layers, num_heads, cells))
    codes[..., 0] = 255
    return codes.astype(np.uint8)


def prompt_of(codes):
    tokens = [chr(97 + n % 26) for n in range(int((2 * codes.shape[-1]) ** 0.5))]
    return Prompt("1-x", "".join(tokens), list(range(len(tokens))), tokens)


def pixels_of(file):
    return np.asarray(Image.open(file).convert("RGB")).astype(int)


def data_of(codes, prompt=None):
    row = Row(1234, {key: np.zeros(codes.shape[:2], np.float32) for key in STATISTICS})
    return snapshot_of("first", prompt or prompt_of(codes), row, codes)


def heads(codes, named=(), prompt=None):
    """Returns the pixels of the image of all heads."""
    image = heads_image(data_of(codes, prompt), 0, named)
    return pixels_of(io.BytesIO(png_of(image)))


def largest(codes, name="", head=(0, 0), prompt=None, **changes):
    """Returns the pixels and the caption of the image of the clearest head. name: that of a head;
    "": none has one."""
    data = data_of(codes, prompt)
    if name:
        data.row.names[head], data.row.values[name][head] = ALL_NAMES.index(name), 0.5
        data.details["statistics"][0][name] = data.row.values[name].ravel().tolist()
    image, caption = largest_image(dataclasses.replace(data, **changes))
    return pixels_of(io.BytesIO(png_of(image))), caption


def figure(codes, head=None, prompt=None):
    """Returns the pixels of a figure without its colour bar."""
    data, first = data_of(codes, prompt), Prompt("", "", [], [])
    data = dataclasses.replace(data, codes=[codes] * 2, prompts=[first, *data.prompts])
    pixels = pixels_of(io.BytesIO(draw_figure(data, head, 1)))
    assert (pixels[:, [0, -1]] == 255).all()  # nothing reaches the edge
    assert (pixels[[0, -1]] == 255).all()
    return pixels[:-120]


def corners(pixels):
    """Returns (y, x) of the top left corner of heatmaps: weight 1, but not above and not left."""
    yellow = (np.abs(pixels - TABLE[255]) <= EXACT).all(-1)
    above = np.pad(yellow, ((1, 0), (0, 0)))[:-1]
    left = np.pad(yellow, ((0, 0), (1, 0)))[:, :-1]
    return np.argwhere(yellow & ~above & ~left)


def shows(pixels, y, x, triangle, above=0.3):
    """Whether this head is at (y, x): each pixel has the weight of its cell or, if there are more
    cells than pixels, the largest one of several cells. above: the largest part of the area above
    the diagonal with tokens and small heads."""
    square = np.zeros((n := int((2 * len(triangle)) ** 0.5), n), np.uint8)
    square[np.tril_indices(n)] = triangle
    outside = (pixels[y:, x] == 255) | (pixels[y:, x] == ACCENT)
    size, tokens = int(outside.all(-1).argmax()), len(square)
    if tokens > size:
        place, cells = np.arange(tokens) * size // tokens, square
        tokens, square = size, np.zeros((size, size), np.uint8)
        np.maximum.at(square, np.ix_(place, place), cells)
    cells = np.arange(size) * tokens // size
    part = pixels[y : y + size, x : x + size]
    masked = cells[:, None] < cells
    wrong = np.abs(part - TABLE[square[np.ix_(cells, cells)]]).max(-1) > EXACT
    with_text = (part[masked] != MASKED).any(-1)
    return not wrong[~masked].any() and with_text.sum() <= above * len(with_text)


@pytest.fixture
def places(monkeypatch):
    """The place, (x, y), of each text that is drawn."""
    places, draw_text = {}, ImageDraw.ImageDraw.text

    def text(self, place, text, *rest, **more):
        places[text] = place
        return draw_text(self, place, text, *rest, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return places


SHAPES = ((1, 1, 1), (4, 4, 64), (12, 12, 255), (24, 16, 21), (48, 25, 5), (2, 4, 63))


@pytest.mark.parametrize("shape", SHAPES)
def test_image_of_all_heads(places, shape):
    """Its size depends on the number of heads only, so that images of several prompts can be in
    one panel."""
    layers, num_heads, _ = shape
    named = [
        {"place": (layers - 1, n), "layer": 0, "head": n, "name": name, "tokens_back": None}
        for n, name in enumerate(NAMES[: min(4, num_heads)])
    ]
    found = [heads(random_codes(*shape), rows) for rows in ([], named)]
    found.append(heads(random_codes(layers, num_heads, 8), named))
    for pixels in found:
        assert pixels.shape == found[0].shape
        assert max(pixels.shape) <= 900
        assert (pixels[:, [0, -1]] == 255).all()  # nothing reaches the edge
        assert (pixels[[0, -1]] == 255).all()
        assert len(corners(pixels)) >= layers * num_heads
    assert any("1,234" in text for text in places)  # the step
    # The heads use the room.
    assert max(found[0].shape) >= 700


def test_image_of_more_heads_than_fit_at_a_legible_size():
    for shape in ((1, 300, 6), (600, 1, 6)):
        assert len(corners(heads(random_codes(*shape)))) > 200


@pytest.mark.parametrize("tokens", [8, 60, 230])
def test_image_of_all_heads_shows_each_weight_and_outlines_the_given_heads(tokens):
    codes = random_codes(2, 2, tokens)
    head = {"place": (1, 0), "layer": 1, "head": 0, "name": "induction", "tokens_back": None}
    pixels = heads(codes, [head])
    grid = sorted(map(tuple, corners(pixels)))
    for corner, triangle in zip(grid, codes.reshape(4, -1), strict=True):
        assert shows(pixels, *corner, triangle)
    y, x = grid[2]  # its place in the grid
    assert (pixels[y, x - 2] == ACCENT).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_image_of_the_clearest_head(places, shape):
    """Also without a named head one is large. Its tokens are legible at half of the size, as W&B
    shows it."""
    codes = random_codes(*shape)
    pixels, caption = largest(codes)
    assert pixels.shape == (*drawing.LARGEST[::-1], 3)
    assert (pixels[:, [0, -1]] == 255).all()  # nothing reaches the edge
    assert (pixels[[0, -1]] == 255).all()
    assert "1,234" in caption
    count = min(shape[2], 24)
    written = [text for text in {*prompt_of(codes).tokens} if text in places]
    assert len(written) >= count / 2
    if shape[2] <= 24:
        (large,) = corners(pixels)
        assert shows(pixels, *large, codes[0, 0], above=0.9)
        size = (pixels[large[0] :, large[1]] == 255).all(-1).argmax()
        assert size >= 400


def test_the_image_of_a_named_head_says_which_token_attends_to_which(places):
    """The strongest weight on the targets of the name is outlined, and said in words."""
    codes = np.zeros((2, 3, 12 * 13 // 2), np.uint8)
    codes[1, 2, 9 * 10 // 2 + 8] = 250  # from token 9, "j", to token 8, "i"
    codes[1, 2, 11 * 12 // 2 + 2] = 255  # not the previous token
    pixels, caption = largest(codes, "previous_token", (1, 2))
    assert "L1 H2 previous token" in caption
    assert "L1 H2 previous token" in places
    assert any("0.96" in text for text in places)
    (x, y), (other_x, other_y) = places["j"], places["i"]  # labels next to the diagonal
    assert x - other_x == pytest.approx(y - other_y, abs=2)
    cell = y - other_y
    row, column = round(y), round(other_x - cell / 2)  # the cell of "j" and "i"
    outline = (pixels[row - 30 : row + 30, column - 30 : column + 30] == ACCENT).all(-1)
    where = np.argwhere(outline)
    assert len(where) > 4 * cell
    for ends, at in ((where[:, 0], row), (where[:, 1], column)):
        assert ends.max() - ends.min() == pytest.approx(cell + 4, abs=3)
        assert (ends.max() + ends.min()) / 2 + at - 30 == pytest.approx(at, abs=8)


def test_the_image_of_the_repeated_sequence_has_tokens_of_both_copies(places):
    """Heads that copy attend from the second to the first."""
    texts = [chr(0x100 + n) for n in range(24)]  # each once
    prompt = Prompt("1-r", "", [0, *range(1, 25), *range(1, 25)], ["^", *texts, *texts], period=24)
    codes = np.zeros((1, 1, 49 * 50 // 2), np.uint8)
    for n in range(24):
        codes[0, 0, (25 + n) * (26 + n) // 2 + n + 2 if n < 23 else 0] = 255
    largest(codes, "induction", prompt=prompt)
    assert 12 <= len([text for text in texts if text in places]) < 24


def test_the_image_of_a_head_has_the_part_of_a_long_text_that_shows_what_the_head_does(places):
    texts = [chr(0x100 + n) for n in range(60)]
    tokens = [*texts[:45], ",", *texts[46:]]
    codes = np.full((1, 1, 60 * 61 // 2), 40, np.uint8)
    for n in range(46, 60):
        codes[0, 0, n * (n + 1) // 2 + 45] = 255  # attends to the comma
    largest(codes, "separator", prompt=Prompt("1-x", "", [*range(60)], tokens))
    written = [n for n, text in enumerate(tokens) if text in places]
    assert 45 in written
    assert 12 <= len(written) <= 24


@pytest.mark.parametrize("shape", [(2, 3, 12), (1, 1, 1), (12, 12, 64), (2, 2, 256), (48, 2, 256)])
def test_figure_shows_each_weight(shape):
    """Of all heads in their places, and of one head."""
    codes = random_codes(*shape)
    pixels = figure(codes)
    found = sorted(map(tuple, corners(pixels)))
    for corner, triangle in zip(found, codes.reshape(shape[0] * shape[1], -1), strict=True):
        assert shows(pixels, *corner, triangle)
    pixels = figure(codes, (shape[0] - 1, 0))
    (corner,) = corners(pixels)
    assert shows(pixels, *corner, codes[-1, 0])


LABELS = {"a": "a", " the": "␣the", "Ω": "Ω", "x" * 30: "x" * 11 + "…", "\n": "⏎"}  # by token
LABELS |= {"\u202eabc": "·abc", "<0xE2>": "<0xE2>", "<0xE2><0x82>": "<0xE2 82>"}


@pytest.mark.parametrize("count", [8, 64, 256])
def test_tokens_of_an_enlarged_head(places, count):
    """Each is right of its row and above its column, and ends left of the edge. If there are many,
    as many as are legible."""
    tokens = [*LABELS] if count == 8 else [f"n{n}" for n in range(count)]
    shown = [LABELS.get(token, token) for token in tokens]
    prompt = Prompt("1-x", "", [*range(count)], tokens)
    pixels = figure(random_codes(1, 1, count), (0, 0), prompt)
    written = [n for n in range(count) if shown[n] in places]
    every = written[0] + 1
    assert written == list(range(every - 1, count, every))
    assert (count < 100) == (every == 1)
    ((top, left),) = corners(pixels)
    cell = (pixels[top:, left] == 255).all(-1).argmax() / count
    assert every * cell >= 20
    size = min(40, int(0.85 * every * cell))
    ascent, descent = font_of(size).getmetrics()
    for n in written:
        x, baseline = places[shown[n]]
        assert 0 < x - left - (n + 1) * cell < 8
        middle = baseline - (ascent - descent) / 2
        # The title above the head has 140 pixels.
        assert middle == pytest.approx(top - 140 + (n + 1 - every / 2) * cell, abs=1)


def test_a_figure_shows_the_prompt_of_the_example():
    """The same as on the page; without an example the first text."""
    data = a_story().snapshots[-1]
    examples = findings(data)["prompts"]
    for index, example in enumerate(examples):
        head = divmod(index, 3)
        assert draw_figure(data, head) == draw_figure(data, head, max(0, example))
    assert {*examples} == {-1, 0, 1}
