"""The page of matched heads in Chromium."""

import dataclasses
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import a_run, prompt

from headlens.matching import all_pairs, match_heads
from headlens.matching_page import page
from headlens.matching_runs import read_runs
from headlens.snapshot_data import write_snapshot

LONG = prompt("1-long", [str(n) for n in range(150)])


def largest(weights, size):
    """Returns weights (T, T) as (size, size): the largest of the weights of each pixel."""
    length = len(weights)
    shown = np.zeros((size, size))
    for query, key in np.ndindex(length, length):
        place = query * size // length, key * size // length
        shown[place] = max(shown[place], weights[query, key])
    return shown


@pytest.mark.parametrize("prompts", [pages.PROMPTS, (LONG,)], ids=["short", "long"])
def test_heatmaps_of_matched_heads(opened, tmp_path, prompts):
    run, other = a_run(prompts=prompts), a_run("x" * 60 + pages.HOSTILE, prompts=prompts, seed=1)
    last = run.snapshots[-1]
    datas = [last, dataclasses.replace(last, run="copy"), other.snapshots[-1]]
    for number, data in enumerate(datas):
        write_snapshot(tmp_path / f"{number}.npz", data)
    runs = read_runs(sorted(tmp_path.iterdir()))
    pairs = all_pairs([found.directions for found in runs])
    path = tmp_path / "heads.html"
    path.write_text(page(runs, match_heads(pairs), pairs), encoding="utf-8")
    for width in (460, 1400):
        shown = opened(path, viewport={"width": width, "height": 900})
        assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.locator("tr[id]").count() == shown.locator(".overview a").count() == 2 * 3
    assert shown.locator(".heads img").count() == 3 * 2 * 3
    for row in shown.locator("tr[id]").all():
        first, second = row.locator("img").all()  # of the run and of its copy
        layer, head = map(int, re.findall(r"\d+", first.get_attribute("alt")))
        assert second.get_attribute("src") == first.get_attribute("src")
        name = runs[0].names[layer][head]  # these are shown on the repeated sequence
        number = len(prompts) - 1 if name in ("induction", "duplicate_token") else 0
        size = min(len(prompts[number].tokens), 64)
        below = np.tril(np.ones((size, size), bool))
        (pixels,) = pages.pixels(first)
        weights = largest(run.weights[120][number][layer, head], size)
        wanted = pages.VIRIDIS[np.rint(255 * np.sqrt(weights)).astype(int)]
        assert np.abs(pixels[below, :3] - wanted[below]).max() <= 4
        assert (pixels[..., 3] == 255 * below).all()
    shown.locator(".overview a").last.click()
    assert shown.locator("tr:target").count() == 1
