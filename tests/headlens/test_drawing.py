"""Images of heads: every weight can be read from the pixels, next to its tokens."""

import dataclasses
import io

import matplotlib
import numpy as np
import pytest
import torch
from helpers.pages import GivenModel, a_run
from PIL import Image, ImageDraw, ImageSequence

from data import get_tokenizer
from headlens import KINDS, Lens, LensConfig, draw_figure, drawing
from headlens.drawing import draw_panel, write_animation
from headlens.fonts import font_of
from headlens.heatmap import ACCENT, MASKED
from headlens.prompts import Prompt

NAMES = [key for key in KINDS if key != "positional"]
UNIFORM = dict.fromkeys(NAMES, 0.1)
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


def panel(folder, codes, heads, prompt=None):
    """Returns the pixels of the image of a step."""
    draw_panel(codes, prompt or prompt_of(codes), 1234, heads, UNIFORM, folder / "panel.png")
    return pixels_of(folder / "panel.png")


def figure(codes, head=None):
    """Returns the pixels of a figure without its colour bar."""
    data = a_run().snapshots[-1]
    data = dataclasses.replace(
        data, codes=[codes] * 2, prompts=[Prompt("", "", [], []), prompt_of(codes)]
    )
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


def shows(pixels, y, x, triangle):
    """Whether this head is at (y, x): each pixel has the weight of its cell or, if there are more
    cells than pixels, the largest one of several cells. Tokens may be above the diagonal."""
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
    return not wrong[~masked].any() and with_text.sum() <= 0.3 * len(with_text)


@pytest.fixture
def places(monkeypatch):
    """The place, (x, y), of each text that is drawn."""
    places, draw_text = {}, ImageDraw.ImageDraw.text

    def text(self, place, text, *rest, **more):
        places[text] = place
        return draw_text(self, place, text, *rest, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return places


def test_image_of_a_step(tmp_path, places):
    """All heads, and an enlarged head to the right; below a flat grid, another one."""
    square = ((1, 1, 1), (4, 4, 64), (12, 12, 255), (24, 16, 21), (48, 25, 5), (30, 8, 9))
    flat = ((2, 4, 63), (4, 8, 30))
    for layers, heads, tokens in square + flat:
        codes = random_codes(layers, heads, tokens)
        named = [
            {"layer": layers - 1, "head": n, "name": name, name: 0.5}
            for n, name in enumerate(NAMES[: min(4, heads)])
        ]
        found = []
        for shown in ([], named):
            pixels = panel(tmp_path, codes, shown)
            assert pixels.shape == (600, 920, 3)
            assert (pixels[:, [0, -1]] == 255).all()  # nothing reaches the edge
            assert (pixels[[0, -1]] == 255).all()
            found.append(len(corners(pixels)))
        assert found[1] - found[0] == (2 if (layers, heads, tokens) in flat else 1)
        assert found[0] >= layers * heads
    assert any("1,234" in text for text in places)  # the step
    for shape in ((1, 300, 6), (600, 1, 6)):  # more heads than fit at a legible size
        assert len(corners(panel(tmp_path, random_codes(*shape), []))) > 200


@pytest.mark.parametrize("tokens", [8, 60, 230])
def test_image_shows_each_weight_and_enlarges_the_given_head(tmp_path, tokens):
    codes = random_codes(2, 2, tokens)
    head = {"layer": 1, "head": 0, "name": "induction", "induction": 0.5}
    pixels = panel(tmp_path, codes, [head])
    *grid, enlarged = sorted(map(tuple, corners(pixels)), key=lambda corner: corner[1] > 440)
    for corner, triangle in zip(grid, codes.reshape(4, -1), strict=True):
        assert shows(pixels, *corner, triangle)
    assert shows(pixels, *enlarged, codes[1, 0])
    y, x = grid[2]  # its place in the grid is outlined
    assert (pixels[y, x - 2] == ACCENT).all()


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
def test_tokens_of_an_enlarged_head(tmp_path, places, count):
    """Each is right of its row and above its column, and ends left of the edge. If there are many,
    as many as are legible."""
    tokens = [*LABELS] if count == 8 else [f"n{n}" for n in range(count)]
    shown = [LABELS.get(token, token) for token in tokens]
    prompt = Prompt("1-x", "", [*range(count)], tokens)
    codes, head = random_codes(1, 1, count), {"layer": 0, "head": 0, "name": "offset", "offset": 1}
    pixels = panel(tmp_path, codes, [head], prompt)
    assert (pixels[:, -8:] == 255).all()
    written = [n for n in range(count) if shown[n] in places]
    every = written[0] + 1
    assert written == list(range(every - 1, count, every))
    assert (count == 8) == (every == 1)
    _, (top, left) = sorted(corners(pixels), key=lambda corner: corner[1])
    cell = (pixels[top:, left] == 255).all(-1).argmax() / count
    assert every * cell >= 8
    size = min(16, int(0.85 * every * cell))
    ascent, descent = font_of(size).getmetrics()
    for n in written:
        x, baseline = places[shown[n]]
        assert 0 < x - left - (n + 1) * cell < 8
        middle = baseline - (ascent - descent) / 2
        assert middle == pytest.approx(top + (n + 1 - every / 2) * cell, abs=1)


YELLOW = (253, 231, 37)  # weight 1


def frames_of(path):
    with Image.open(path) as image:
        pixels = [np.asarray(f.convert("RGB")).astype(int) for f in ImageSequence.Iterator(image)]
    return np.stack(pixels)


def head_with(frame, colour, at_least):
    """Returns which of four heads next to each other has the colour."""
    area = frame[130:, 40:]  # below the texts, right of the labels
    near = (np.abs(area - colour).max(-1) < 60).sum(0)
    counts = [part.sum() for part in np.array_split(near, 4)]
    assert max(counts) > at_least
    return int(np.argmax(counts))


@pytest.mark.parametrize("shown", ["repeated", "text"])
def test_each_frame_shows_a_step_on_the_prompt_of_the_names(tmp_path, shown):
    """At step 10 n, head n is an induction head or attends to the first token, and is outlined. An
    induction head has its name on the repeated sequence."""
    lens = Lens(
        get_tokenizer("byte"),
        LensConfig(every=10, prompts=["text"], repeat_length=4),
        context_length=64,
        max_steps=30,
        folder=tmp_path,
        vocabulary=range(200),
    )
    for step in (0, 10, 20, 30):

        def capture_attention(ids, capture, step=step):
            queries = torch.arange(len(ids))
            uniform = torch.ones(len(ids), len(ids)).tril() / (queries[:, None] + 1)
            weights = uniform.repeat(4, 1, 1)
            keys = (queries - 3).clamp(min=0) if shown == "repeated" else 0 * queries
            share = 1.0 if (ids[0] == 256) == (shown == "repeated") else 0.6
            weights[step // 10] *= 1 - share  # less weight on the other prompt
            weights[step // 10, queries, keys] += share
            capture(0, weights)

        snapshot = lens.snapshot(GivenModel(capture_attention), step)
        assert ("attention/animation" in snapshot.images) == (step == 30)
    path = tmp_path / "timelapse.webp"
    assert snapshot.images["attention/animation"] == path
    frames = frames_of(path)  # the last step is the first frame
    for colour, at_least in ((YELLOW, 1000), (ACCENT, 300)):
        assert [head_with(frame, colour, at_least) for frame in frames] == [3, 0, 1, 2]
    with Image.open(path) as image:
        assert image.info["loop"] == 0  # repeats without end


def test_size_of_the_animation(tmp_path, monkeypatch):
    """Steps are omitted if there are many or if the file would be too large; never the last."""
    path, prompt = tmp_path / "a.webp", Prompt("1-x", "x", list(range(21)), ["x"] * 21)
    monkeypatch.setattr(drawing, "MAX_STEPS", 5)
    codes = list(np.random.default_rng(0).integers(0, 255, (8, 1, 6, 231)).astype(np.uint8))
    write_animation(tmp_path / "one.webp", prompt, codes[-1:], [7], [[]])
    (last,) = frames_of(tmp_path / "one.webp")
    for most, expected in ((drawing.MAX_BYTES, 5), (80_000, 3)):
        monkeypatch.setattr(drawing, "MAX_BYTES", most)
        write_animation(path, prompt, codes, range(8), [[]] * 8)
        assert path.stat().st_size <= most
        frames = frames_of(path)
        assert len(frames) == expected
        assert np.abs(frames[0] - last).mean() < 2 < np.abs(frames[1] - last).mean()
    rows = [{"layer": 0, "head": 0, "name": "duplicate_token"}] * 4
    for shape in ((1, 1, 1), (48, 25, 36), (12, 12, 2145)):
        write_animation(path, prompt, [np.zeros(shape, np.uint8)], [5], [rows])
        assert all(a <= b for a, b in zip(Image.open(path).size, drawing.FRAME, strict=True))
        assert (frames_of(path)[0, 40:100, -12:] > 240).all()  # each name fits
