"""The interactive page in Chromium: predictions, several heads, value-weighted attention."""

import dataclasses
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import STEPS, VOCABULARY, WORDS, a_run

from headlens.page import frame_data
from headlens.rounding import formatted_loss

TOKENS = """all => all.map((token) => token.style.backgroundColor)"""
INK = (
    """node => [getComputedStyle(node).color, getComputedStyle(node, "::highlight(after)").color]"""
)


def alphas(lens):
    """Returns the strength of the colour of each token in the text."""
    backgrounds = lens.locator("#text [data-token]").evaluate_all(TOKENS)
    found = [re.findall(r"[\d.]+", background) for background in backgrounds]
    return np.array([(float(f[3]) if len(f) == 4 else 1.0) if f else 0.0 for f in found])


def assert_readable(lens):
    page = pages.colour_of(lens.locator("body"), "backgroundColor")
    ink, after = lens.locator("#prose").evaluate(INK)
    for background in lens.locator("#text [data-token]").evaluate_all(TOKENS):
        colour = [float(n) for n in re.findall(r"[\d.]+", background)] or [0, 0, 0, 0]
        alpha = colour[3] if len(colour) == 4 else 1
        below = alpha * np.array(colour[:3]) + (1 - alpha) * page
        text = [float(n) for n in re.findall(r"\d+", ink if alpha else after)]
        assert pages.contrast(text, below) >= 4.5


def without_predictions(data):
    return dataclasses.replace(data, details={"statistics": data.details["statistics"]}, norms=[])


def test_text_is_coloured_by_the_weights_of_the_query_token(shown):
    """In both themes, readable."""
    lens, weights = shown(fragment="#head=1.1&query=9"), a_run().weights[120][0][1, 1]
    for theme, strongest in (("dark", 0.48), ("light", 0.85)):
        pages.go_to(lens, f"head=1.1&query=9&theme={theme}")
        part = alphas(lens)
        assert part[:10] == pytest.approx(strongest * np.sqrt(weights[9, :10]), abs=0.012)
        assert not part[10:].any()
        assert_readable(lens)
    lens.locator("#text [data-token]").nth(7).hover()
    assert alphas(lens)[:8] == pytest.approx(0.85 * np.sqrt(weights[7, :8]), abs=0.012)
    pages.go_to(lens, "head=1.1&query=9&compare=step:40&theme=light")
    change = weights - a_run().weights[40][0][1, 1]
    found = alphas(lens)[:10]
    assert found == pytest.approx(0.85 * np.sqrt(np.abs(change[9, :10])), abs=0.05)


def predicted(lens, side=0):
    """Returns [(token, probability, is the true token)] of the list of next tokens."""
    rows = lens.locator("#next > div").nth(side).locator("li")
    read = """all => all.map((row) => [row.querySelector("bdi").textContent.slice(1, -1),
      row.querySelector(".number").textContent, row.classList.contains("true")])"""
    return [tuple(row) for row in rows.evaluate_all(read)]


def assert_predicts(lens, predictions, query, words, side=0):
    rows = predicted(lens, side)
    tokens = [f"<{token}>" for token in predictions.token_ids[query]]
    assert [row[0] for row in rows[:5]] == tokens
    chances = list(predictions.probabilities[query])
    if query < len(words) - 1:
        loss = predictions.losses[query]
        assert formatted_loss(loss) in lens.locator("#next p").nth(side).inner_text()
        if words[query + 1] not in tokens:
            assert rows[5][0] == pages.as_label(words[query + 1])
            chances.append(np.exp(-loss))
        assert [row[0] for row in rows if row[2]] == [pages.as_label(words[query + 1])]
    assert len(rows) == len(chances)
    for (_, text, _), chance in zip(rows, chances, strict=True):
        if text.startswith("<"):
            assert chance < 0.00105
        else:
            assert float(text) == pytest.approx(chance, rel=0.05, abs=1e-4)


def test_most_likely_next_tokens_of_the_query_token(shown):
    lens, run = shown(fragment=f"#head=1.1&query={len(WORDS) - 1}"), a_run()
    found = run.predictions[120][0]
    assert_predicts(lens, found, len(WORDS) - 1, WORDS)
    lens.locator("#text [data-token]").nth(4).hover()
    assert_predicts(lens, found, 4, WORDS)
    lens.locator("#text [data-token]").nth(6).click()
    pages.tile(lens, 0, 1).click()
    assert_predicts(lens, found, 6, WORDS)
    lens.locator("#text").focus()
    lens.keyboard.press("ArrowLeft")
    assert_predicts(lens, found, 5, WORDS)
    compare = pages.option(lens, "compare")
    lens.mouse.move(*pages.cell(lens, 8, 3))
    assert_predicts(lens, found, 8, WORDS)
    compare.select_option("step:40")
    assert_predicts(lens, run.predictions[40][0], 8, WORDS)
    assert_predicts(lens, found, 8, WORDS, side=1)

    words = [f"<{n}>" for n in range(200)]  # the true token may be among the most likely ones
    run = a_run("ids", 1, 1, (pages.prompt("ids", words),), (0,), (0,))
    found = run.predictions[0][0]
    among = [n for n in range(199) if n + 1 in found.token_ids[n]]
    lens = shown(run, fragment="#head=0.0")
    for query in (among[0], next(n for n in range(199) if n not in among)):
        pages.go_to(lens, f"head=0.0&query={query}")
        assert_predicts(lens, found, query, words)


def products_at(step, prompt=0):
    run = a_run()
    return run.weights[step][prompt] * run.value_norms[step][prompt][:, :, None]


def test_value_weighted_maps(shown):
    """Weight times norm, on a scale up to the largest of each head."""
    lens = shown(fragment="#head=1.1")
    for step, prompt in ((120, 0), (40, 2)):
        pages.go_to(lens, f"head=1.1&map=valued&step={step}&prompt={prompt}")
        part = np.sqrt(products_at(step, prompt))
        part /= part.max((-1, -2), keepdims=True)
        pages.assert_drawn(lens, part, within=9)
        pages.assert_drawn(lens, part[1, 1], "#map", within=9)
    pages.go_to(lens, "head=1.1&map=valued")
    true, weights = products_at(120)[1, 1], a_run().weights[120][0][1, 1]
    norms = a_run().value_norms[120][0][1, 1]
    for query, key in ((8, 3), (11, 2), (5, 5)):
        lens.mouse.move(*pages.cell(lens, query, key))
        numbers = [float(n) for n in re.findall(r"\d\.\d+", lens.locator("#readout").inner_text())]
        expected = [true[query, key], weights[query, key], norms[key]]
        assert numbers == pytest.approx(expected, abs=0.02)
    pages.option(lens, "kind").select_option("weights")
    pages.assert_drawn(lens, np.sqrt(a_run().weights[120][0]))


def test_value_weighted_maps_are_compared_on_one_scale(shown):
    lens = shown(fragment="#head=1.1&map=valued&compare=step:40")
    a, b = products_at(40), products_at(120)
    most = np.maximum(a.max((-1, -2)), b.max((-1, -2)))[..., None, None]
    pages.assert_difference(lens, (b - a) / most)
    for canvas, side in (("#map-2", a), ("#map-3", b)):
        pages.assert_drawn(lens, np.sqrt((side / most)[1, 1]), canvas, within=9)


def test_data_with_neither_predictions_nor_norms(shown):
    run = a_run()
    bare = [frame_data(without_predictions(run.frames[step])) for step in STEPS]
    lens = shown(dataclasses.replace(run, data=run.data | {"frames": bare}), fragment="#head=none")
    assert lens.locator("#kind").is_hidden()
    pages.go_to(lens, "head=1.1&map=valued")
    pages.assert_drawn(lens, np.sqrt(run.weights[120][0]))
    assert lens.locator("#text").is_visible()
    assert lens.locator("#next").is_hidden()
    assert alphas(lens).any()


assert VOCABULARY > 200  # so that the most likely tokens are seldom the words of the prompts
