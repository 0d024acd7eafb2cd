"""Heatmap images: every weight can be read from the pixels next to its labels."""

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw

from headlens.fonts import font_of
from headlens.heads import NAMES
from headlens.heatmap import (
    ACCENT,
    COLOUR_MAP,
    MASKED,
    fitted,
    label,
    rgb,
)
from headlens.panel import draw_panel
from headlens.prompts import Prompt
from headlens.snapshot_data import triangle_to_square

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


def test_image_enlarges_and_outlines_the_given_head(tmp_path):
    codes = random_codes(2, 2, 16)
    head = {"layer": 1, "head": 0, "name": "induction", "induction": 0.5}

    def drawn(codes):
        path, uniform = tmp_path / "panel.png", dict.fromkeys(NAMES, 0.1)
        draw_panel(codes, prompt_of(codes), 0, [head], uniform, path)
        return pixels_of(path)

    usual = drawn(codes)
    assert (usual[:, :440] == ACCENT).all(-1).any()
    for place, same in (((0, 1), True), ((1, 0), False)):
        changed = codes.copy()
        changed[*place, 1:] //= 2
        assert np.array_equal(drawn(changed)[:, 440:], usual[:, 440:]) == same


def test_image_labels_the_tokens_if_there_is_room(tmp_path, places):
    """Each token is right of its row and above its column. All end left of the edge."""
    for tokens, is_labelled in ((["a", "bb", "Ω", "long" * 9], True), (["ab"] * 64, False)):
        codes = random_codes(1, 1, len(tokens))
        prompt = Prompt("1-x", "", [*range(len(tokens))], tokens)
        head = {"layer": 0, "head": 0, "name": "induction", "induction": 0.5}
        places.clear()
        path = tmp_path / "panel.png"
        draw_panel(codes, prompt, 0, [head], dict.fromkeys(NAMES, 0.1), path)
        labels = {label(token) for token in tokens} & places.keys()
        assert labels == ({label(token) for token in tokens} if is_labelled else set())
        assert (pixels_of(path)[:, -8:] == 255).all()
        if is_labelled:
            _, (top, left) = sorted(corners(pixels_of(path)), key=lambda corner: corner[1])
            found = [places[label(token)] for token in tokens]
            cells = {*np.diff([x for x, _ in found]), *np.diff([y for _, y in found])}
            assert max(cells) == pytest.approx(min(cells))
            ascent, descent = font_of(16).getmetrics()
            for n, (x, y) in enumerate(found):
                assert 0 < x - left - (n + 1) * min(cells) < 8
                middle = y - (ascent - descent) / 2  # y is the baseline
                assert middle == pytest.approx(top + (n + 0.5) * min(cells), abs=1)


def test_every_weight_of_small_heatmaps_is_shown():
    """Enlarged, or the largest weight of the cells of a pixel."""
    few, many = random_codes(1, 1, 21)[0, 0], np.zeros(255 * 256 // 2, np.uint8)
    cells = np.arange(128) * 21 // 128
    expected = TABLE[triangle_to_square(few)]
    expected[np.triu_indices(21, 1)] = MASKED
    np.testing.assert_allclose(rgb(fitted(few, 128)), expected[np.ix_(cells, cells)], atol=EXACT)
    square = np.zeros((255, 255), bool)
    square[np.arange(24, 255), np.arange(231)] = True  # a line 24 columns left of the diagonal
    many[square[np.tril_indices(255)]] = 255
    bright = (rgb(fitted(many, 128)) == TABLE[255]).all(-1)
    assert bright[13:].any(1).all()
    assert bright.sum() < 4 * 128


def test_labels_of_odd_tokens():
    tokens = [" the", "\n", "\u202eabc", "x" * 30, "<0xE2>", "<0xE2><0x82>"]
    assert [*map(label, tokens)] == ["the", "\\n", "·abc", "x" * 11 + "…", "<0xE2>", "<0xE2 82>"]
