"""Heatmap images: every weight can be read from the pixels next to its labels."""

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw

from headlens import KINDS
from headlens.fonts import font_of
from headlens.heatmap import (
    ACCENT,
    COLOUR_MAP,
    MASKED,
)
from headlens.panel import draw_panel
from headlens.prompts import Prompt

NAMES = [key for key in KINDS if key != "positional"]
EXACT = 4  # of 255; an image has 256 colours
TABLE = (matplotlib.colormaps[COLOUR_MAP](np.linspace(0, 1, 256))[:, :3] * 255).round()


def random_codes(num_layers, num_heads, num_tokens):
    """Returns uint8 (L, H, T (T + 1) / 2). The first cell is 255, as for every head."""
    cells = num_tokens * (num_tokens + 1) // 2
    codes = np.random.default_rng(0).integers(0, 245, (num_layers, num_heads, cells))
    codes[..., 0] = 255
    return codes.astype(np.uint8)


def prompt_of(codes):
    tokens = [chr(97 + n % 26) for n in range(int((2 * codes.shape[-1]) ** 0.5))]
    return Prompt("1-x", "".join(tokens), list(range(len(tokens))), tokens)


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


@pytest.fixture
def places(monkeypatch):
    """The place, (x, y), of each text that is drawn."""
    places, draw_text = {}, ImageDraw.ImageDraw.text

    def text(self, place, text, *rest, **more):
        places[text] = place
        return draw_text(self, place, text, *rest, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return places


def corners(pixels):
    """Returns (y, x) of the top left corner of heatmaps: weight 1, but not above and not left."""
    yellow = (np.abs(pixels - TABLE[255]) <= EXACT).all(-1)
    above = np.pad(yellow, ((1, 0), (0, 0)))[:-1]
    left = np.pad(yellow, ((0, 0), (1, 0)))[:, :-1]
    return np.argwhere(yellow & ~above & ~left)


def shows(pixels, y, x, triangle):
    """Whether this head is at (y, x): each pixel has the weight of its cell or, if there are more
    cells than pixels, the largest one of several cells."""
    square = np.zeros((n := int((2 * len(triangle)) ** 0.5), n), np.uint8)
    square[np.tril_indices(n)] = triangle
    outside = (pixels[y, x:] == 255) | (pixels[y, x:] == ACCENT)
    size, tokens = int(outside.all(-1).argmax()), len(square)
    if tokens > size:
        place, cells = np.arange(tokens) * size // tokens, square
        tokens, square = size, np.zeros((size, size), np.uint8)
        np.maximum.at(square, np.ix_(place, place), cells)
    expected = TABLE[square]
    expected[np.triu_indices(tokens, 1)] = MASKED
    cells = np.arange(size) * tokens // size
    difference = pixels[y : y + size, x : x + size] - expected[np.ix_(cells, cells)]
    return np.abs(difference).max() <= EXACT


def test_image_of_a_step(tmp_path, places):
    """All heads, and an enlarged head beside them; below a flat grid, another one."""
    square = ((1, 1, 1), (4, 4, 64), (12, 12, 255), (24, 16, 21), (48, 25, 5), (30, 8, 9))
    flat = ((2, 4, 63), (4, 8, 30))
    for layers, heads, tokens in square + flat:
        codes = random_codes(layers, heads, tokens)
        uniform = dict.fromkeys(NAMES, 0.1)
        named = [
            {"layer": layers - 1, "head": n, "name": name, name: 0.5}
            for n, name in enumerate(NAMES[: min(4, heads)])
        ]
        found = []
        for shown in ([], named):
            draw_panel(codes, prompt_of(codes), 1234, shown, uniform, tmp_path / "panel.png")
            pixels = pixels_of(tmp_path / "panel.png")
            assert pixels.shape == (600, 920, 3)
            assert (pixels[:, [0, -1]] == 255).all()  # nothing reaches the edge
            assert (pixels[[0, -1]] == 255).all()
            found.append(len(corners(pixels)))
        assert found[1] - found[0] == (2 if (layers, heads, tokens) in flat else 1)
        assert found[0] >= layers * heads
    assert any("1,234" in text for text in places)  # the step
    for shape in ((1, 300, 6), (600, 1, 6)):  # more heads than fit at a legible size
        codes = random_codes(*shape)
        draw_panel(codes, prompt_of(codes), 1234, [], uniform, tmp_path / "panel.png")
        assert len(corners(pixels_of(tmp_path / "panel.png"))) > 200


@pytest.mark.parametrize("tokens", [60, 230])  # both without room for labels
def test_image_shows_each_weight_and_enlarges_the_given_head(tmp_path, tokens):
    codes = random_codes(2, 2, tokens)
    head = {"layer": 1, "head": 0, "name": "induction", "induction": 0.5}
    path, uniform = tmp_path / "panel.png", dict.fromkeys(NAMES, 0.1)
    draw_panel(codes, prompt_of(codes), 0, [head], uniform, path)
    pixels = pixels_of(path)
    *grid, enlarged = sorted(map(tuple, corners(pixels)), key=lambda corner: corner[1] > 440)
    for corner, triangle in zip(grid, codes.reshape(4, -1), strict=True):
        assert shows(pixels, *corner, triangle)
    assert shows(pixels, *enlarged, codes[1, 0])
    y, x = grid[2]  # its place in the grid is outlined
    assert (pixels[y, x - 2] == ACCENT).all()


LABELS = {"a": "a", " the": "the", "Ω": "Ω", "x" * 30: "x" * 11 + "…", "\n": "\\n"}  # by token
LABELS |= {"\u202eabc": "·abc", "<0xE2>": "<0xE2>", "<0xE2><0x82>": "<0xE2 82>"}


def test_image_labels_the_tokens_if_there_is_room(tmp_path, places):
    """Each token is right of its row and above its column. All end left of the edge."""
    for shown, is_labelled in ((LABELS, True), ({"ab": "ab"}, False)):
        tokens = [*shown] if is_labelled else ["ab"] * 64
        codes = random_codes(1, 1, len(tokens))
        prompt = Prompt("1-x", "", [*range(len(tokens))], tokens)
        head = {"layer": 0, "head": 0, "name": "induction", "induction": 0.5}
        places.clear()
        path = tmp_path / "panel.png"
        draw_panel(codes, prompt, 0, [head], dict.fromkeys(NAMES, 0.1), path)
        labels = {*shown.values()} & places.keys()
        assert labels == ({*shown.values()} if is_labelled else set())
        assert (pixels_of(path)[:, -8:] == 255).all()
        if is_labelled:
            _, (top, left) = sorted(corners(pixels_of(path)), key=lambda corner: corner[1])
            found = [places[shown[token]] for token in tokens]
            cells = {*np.diff([x for x, _ in found]), *np.diff([y for _, y in found])}
            assert max(cells) == pytest.approx(min(cells))
            ascent, descent = font_of(16).getmetrics()
            for n, (x, y) in enumerate(found):
                assert 0 < x - left - (n + 1) * min(cells) < 8
                middle = y - (ascent - descent) / 2  # y is the baseline
                assert middle == pytest.approx(top + (n + 0.5) * min(cells), abs=1)
