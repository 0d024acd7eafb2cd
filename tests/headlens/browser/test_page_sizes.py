"""The interactive page in Chromium: heads of large models, long prompts and small windows."""

import functools
import io

import numpy as np
import pytest
import torch
from helpers import pages
from PIL import Image
from playwright.sync_api import expect

from headlens.page import run_data
from headlens.recording import record

LENGTHS = (21, 64, 128, 255)
KINDS = ("previous token", "induction", "first token", "uniform")  # of head 0, 1, 2, 3, 0, ...


def planted(kind, size):
    """Returns the keys to which the queries attend, and the weights of a head of this kind."""
    rows = np.arange(size)
    keys = {
        "previous token": np.maximum(rows - 1, 0),
        "induction": np.where(rows > size // 2, rows - size // 2 + 1, -1),
        "first token": np.zeros(size, int),
        "uniform": np.full(size, -1),
    }[kind]
    weights = np.tril(np.ones((size, size)))
    for query in rows[keys >= 0]:
        weights[query, keys[query]] = 0.97 / 0.03 * max(query, 1)
    return keys, torch.from_numpy(weights / weights.sum(-1, keepdims=True)).float()


@functools.cache
def planted_run(layers, heads):
    prompts = tuple(pages.prompt(f"{size}-tokens", ["a"] * size) for size in LENGTHS)

    def capture_attention(token_ids, capture):
        kinds = torch.stack([planted(kind, len(token_ids))[1] for kind in KINDS])
        for layer in range(layers):
            capture(layer, kinds.repeat(heads // 4, 1, 1))

    data = run_data([record(pages.capturing(capture_attention), prompts, 0, run_name="planted")])
    return pages.PageRun(data, {}, {}, {}, [])


def tiles_as_shown(lens, count, ratio):
    """Returns the pixels on the screen of the first heads, (pixels, pixels, 3) each, with one row
    and one column more on each side: a tile begins at a fraction of a pixel."""
    tiles = lens.locator(".head canvas")
    boxes = [tiles.nth(number).bounding_box() for number in range(count)]
    clip = {"x": 0, "y": 0, "width": boxes[-1]["x"] + 160, "height": boxes[-1]["y"] + 160}
    screen = np.asarray(Image.open(io.BytesIO(lens.screenshot(clip=clip))).convert("RGB"), int)
    edges = [[round(ratio * box[key]) for key in ("x", "y", "width")] for box in boxes]
    return [screen[y - 1 : y + wide + 1, x - 1 : x + wide + 1] for x, y, wide in edges]


def bright_rows(tile, keys):
    """Returns the fraction of rows of pixels that are yellow at the keys of their queries or, if
    there are no such keys, anywhere. One row and one column more on each side count. Rows above the
    first key and the top rows do not count."""
    size = len(tile) - 2
    scale = size / len(keys)
    planted = np.flatnonzero(keys >= 0)
    top = planted[0] if len(planted) else 4
    found = []
    for row in range(int((top + 1) * scale) + 1, size):
        nearby = range(int((row - 1) / scale), min(int((row + 2) / scale), len(keys) - 1) + 1)
        places = [int((keys[query] + 0.5) * scale) for query in nearby if keys[query] >= 0]
        left, right = (min(places), max(places) + 3) if places else (0, len(tile))
        red, green, blue = tile[row + 1, left:right].T
        found.append(((red > 150) & (green > 200) & (blue < 100)).any())
    return np.mean(found)


def test_panel_of_a_deep_model_shows_the_enlarged_head_next_to_the_grid(shown):
    lens = shown(planted_run(24, 16), frame=(600, 420))
    pages.tile(lens, 3, 4).click()
    for shown_part in (pages.tile(lens, 23, 15), lens.locator("#map")):
        expect(shown_part).to_be_in_viewport(ratio=1)
    assert lens.locator("#map").bounding_box()["width"] >= 150


@pytest.mark.parametrize(("layers", "heads", "ratio"), [(12, 12, 1), (24, 16, 2)])
def test_planted_heads_are_visible_in_thumbnails_of_long_prompts(shown, layers, heads, ratio):
    """Also one bright weight per row: the browser must not scale a thumbnail down."""
    lens = shown(planted_run(layers, heads), device_scale_factor=ratio)
    for number, size in enumerate(LENGTHS):
        lens.locator("#prompt").select_option(str(number))
        tiles = tiles_as_shown(lens, 4, ratio)
        for kind, tile in zip(KINDS, tiles, strict=True):
            bright = bright_rows(tile, planted(kind, size)[0])
            assert (bright < 0.1) if kind == "uniform" else (bright > 0.9), (kind, size, bright)
