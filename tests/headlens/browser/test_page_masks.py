"""The page in Chromium for a model with a window in its first layer and learned sinks."""

import functools
import re

import pytest
import torch
from helpers.pages import PROMPTS, ready

from headlens import Captured, LayerAttention, write_page
from headlens.recording import record


def capture(ids, visit, has_sink):
    size = ids.shape[1]
    draw = torch.Generator().manual_seed(size)
    for layer in range(2):
        mask = torch.ones(size, size).tril() - torch.ones(size, size).tril(-2) * (layer == 0)
        scores = torch.randn(2, size, size, generator=draw).masked_fill(mask == 0, -torch.inf)
        weights = scores.softmax(-1) * (0.75 if has_sink else 1)
        visit(
            layer,
            LayerAttention(
                *(each.expand(len(ids), -1, -1, -1) for each in (weights, scores)), number=layer
            ),
        )
    return Captured()


@pytest.mark.parametrize("has_sink", [True, False])
def test_chance_of_each_layer_and_the_share_of_the_sink(opened, tmp_path, has_sink):
    run = functools.partial(capture, has_sink=has_sink)
    data = record(run, PROMPTS[:2], 0)
    write_page(tmp_path / "page.html", [data])
    chances = data.uniform["diagonal"]
    assert chances[0] == pytest.approx(0.5, abs=1e-6)
    for layer, chance in enumerate(chances):
        page = opened(tmp_path / "page.html", f"#view=all&head={layer}.1&sort=diagonal")
        ready(page)
        values = page.locator("#values > div").locator("visible=true").all_inner_texts()
        found = dict(text.split("\n") for text in values)
        shown = float(found["self"].partition("chance ")[2])
        assert shown == pytest.approx(chance, abs=0.006)
        ends = re.findall(r"Chance: (\S+) to (\S+),", page.locator("#what").inner_text())[0]
        assert [*map(float, ends)] == pytest.approx(sorted(chances), abs=0.006)
        charts = page.locator("figure.chart").locator("visible=true")
        shown = charts.evaluate_all("all => all.map((one) => one.dataset.statistic)")
        assert ("learned_sink" in shown) == ("learned sink" in found) == has_sink
        if has_sink:
            assert float(found["learned sink"]) == 0.25
