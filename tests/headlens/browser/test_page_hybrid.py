"""The page of a hybrid in Chromium: layers with attention between layers of other kinds."""

import re

import numpy as np
from helpers import pages
from helpers.pages import PROOF, a_hybrid, a_run
from playwright.sync_api import expect

from headlens.finding import between_layers


def test_the_grid_has_all_layers_at_their_place(shown):
    lens, run = shown(a_hybrid()), a_hybrid()
    lines = between_layers(run.snapshots[-1])
    pages.assert_drawn(lens, np.sqrt(run.weights[120][0]))
    order = [lines[0], "L3", lines[1], "L5", lines[2]]
    boxes = [lens.locator("#grid").get_by_text(text, exact=True).bounding_box() for text in order]
    tops = [box["y"] for box in boxes]
    assert tops == sorted(tops)
    grid = lens.locator("#grid").bounding_box()
    for place in (0, 2, 4):  # they are as wide as the heads, at most
        assert boxes[place]["x"] + boxes[place]["width"] <= grid["x"] + grid["width"] + 1
    first, second = (pages.tile(lens, layer, 0).bounding_box() for layer in (0, 1))
    assert boxes[0]["y"] + boxes[0]["height"] <= first["y"] + 1
    assert first["y"] + first["height"] <= boxes[2]["y"] + 1
    assert boxes[2]["y"] + boxes[2]["height"] <= second["y"] + 1
    expect(lens.locator(f'[title="{PROOF}"]')).to_have_text("maps verified")


def test_heads_have_the_number_of_their_layer(shown):
    """In titles, labels and links, and also for the keyboard."""
    lens = shown(a_hybrid(), fragment="#head=5.2")
    assert pages.state(lens, "layer") == 1
    expect(lens.locator("#detail-title")).to_have_text("L5 H2")
    assert pages.tile(lens, 1, 2).get_attribute("aria-label").startswith("layer 5 head 2")
    lens.locator("body").press("ArrowUp")
    expect(lens.locator("#detail-title")).to_have_text("L3 H2")
    expect(lens).to_have_url(re.compile("head=3.2"))
    pages.go_to(lens, "head=1.2")  # a layer without heads
    assert pages.state(lens, "layer") is None


def test_heads_of_the_same_layer_are_compared(shown):
    """Layer 3 of a model with four layers, with the first layer with attention of the hybrid."""
    other = a_run("second", layers=4)
    lens = shown(a_hybrid(), other, fragment="#head=3.1&show=b")
    pages.assert_drawn(lens, np.sqrt(other.weights[120][0][3, 1]), "#map")
