"""The interactive page in Chromium: what a reader needs to see, to read and to reach."""

import io
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import PROMPTS, a_run
from PIL import Image
from playwright.sync_api import expect


def test_weights_have_only_the_digits_of_their_codes(shown):
    lens = shown(fragment="#head=1.1&step=120")
    weights = a_run().weights[120][0][1, 1]
    digits = set()
    for query in (3, 7, 11):
        lens.locator("#text [data-token]").nth(query).click()
        for key in range(query + 1):
            title = lens.locator("#text [data-token]").nth(key).get_attribute("title")
            less, text = re.search(r"(<?)(\d\.\d+)$", title).groups()
            true, unit = weights[query, key], 10.0 ** -len(text.split(".")[1])
            assert abs(float(text) - true) <= unit, (query, key, text)
            code = round(255 * true**0.5)
            interval = ((code + 0.5) ** 2 - max(code - 0.5, 0) ** 2) / 255**2
            assert interval / 1.0001 <= unit, (text, interval)
            assert less == "" or float(text) == unit
            digits.add(len(text.split(".")[1]))
    assert min(digits) == 2
    assert len(digits) >= 3  # small weights have more digits


@pytest.mark.parametrize(
    ("width", "options"),
    [
        (1400, {"viewport": {"width": 1400, "height": 900}}),
        (600, {"viewport": {"width": 600, "height": 800}}),
        (460, {"frame": (460, 300)}),
    ],
)
def test_a_comparison_does_not_move_the_cell_under_the_pointer(shown, width, options):
    lens = shown(fragment="#head=1.1", **options)
    page = lens.page if "frame" in options else lens
    lens.evaluate("() => window.focus()")
    lens.locator("#map").scroll_into_view_if_needed()
    page.mouse.move(*pages.cell(lens, 8, 3))
    before, read = lens.locator("#map").bounding_box(), pages.readout(lens)[:2]
    for comparing in (True, False):
        page.keyboard.press("d")
        assert lens.locator("#map-2").is_visible() == comparing
        assert lens.locator("#map").bounding_box() == before
        assert pages.readout(lens)[:2] == read
        assert lens.evaluate("document.documentElement.scrollWidth") <= width


HEBREW = ["של", "ום", " עול", "ם", ",", " אני", " קורא", "."]
MIXED = ["The", " word", " של", "ום", " means", " peace", "."]
ARABIC = ["مر", "حب", "ا", " بال", "عالم"]
PLAIN_WIDTH = """node => {
  const copy = node.cloneNode();
  copy.textContent = node.textContent;
  copy.style.cssText = "position: absolute; width: max-content";
  node.after(copy);
  const { width } = copy.getBoundingClientRect();
  copy.remove();
  return width - 22; // padding and border
}"""


def test_right_to_left_text_is_read_as_a_whole(shown):
    prompts = [pages.prompt(str(n), words) for n, words in enumerate((HEBREW, MIXED, ARABIC))]
    lens = shown(a_run("rtl", 1, 1, tuple(prompts), (0,), (0,)), fragment="#head=0.0")
    tokens = lens.locator("#text [data-token]")
    read = "all => all.map((node) => node.getBoundingClientRect().toJSON())"

    boxes = tokens.evaluate_all(read)
    rights = [box["right"] for box in boxes]
    assert rights == sorted(rights, reverse=True)
    assert rights[0] > lens.locator("#text").bounding_box()["x"] + 300  # aligned to the right

    pages.go_to(lens, "head=0.0&prompt=1")
    rights = [box["right"] for box in tokens.evaluate_all(read)]
    assert np.argsort(rights).tolist() == [0, 1, 3, 2, 4, 5, 6]

    pages.go_to(lens, "head=0.0&prompt=2")  # letters of two tokens are joined
    boxes = tokens.evaluate_all(read)
    width = max(box["right"] for box in boxes) - min(box["left"] for box in boxes)
    assert width == pytest.approx(lens.locator("#text").evaluate(PLAIN_WIDTH), abs=1)


def screen(locator):
    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB"), int)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_of_text_and_controls(shown, theme):
    view = f"#head=0.1&query=9&theme={theme}&filter=entropy:0.1&sort=-entropy"
    lens = shown(
        a_run(), pages.second_run(), fragment=view, viewport={"width": 1280, "height": 900}
    )
    for change in ("", "show=a", "compare=off&step=0", "compare=off&prompt=2&query=4"):
        pages.go_to(lens, f"{change}&{view[1:]}")
        found = lens.evaluate(pages.CONTRASTS)
        assert {"readout", "after", "query"} <= {name for _, name, _, _ in found}
        assert [entry for entry in found if entry[3] < entry[2]] == []
    for control, part in (("step", np.s_[:, -40:]), ("stretch", np.s_[:])):  # the browser draws
        image = screen(pages.option(lens, control))
        assert pages.contrast(image[part], image[0, 0]) >= 3, control
    tile = pages.tile(lens, 1, 1)
    tile.focus()
    lens.keyboard.press("ArrowRight")
    focus = pages.colour_of(lens.locator(".head:focus"), "outlineColor")
    assert pages.contrast(focus, pages.colour_of(lens.locator("body"), "backgroundColor")) >= 3


def test_prompts_of_one_or_two_tokens_are_shown(shown):
    """Of one or two tokens, and shorter than the place of the pointer."""
    one, two = pages.prompt("2-one", ["Hello"]), pages.prompt("3-two", ["Hello", " you"])
    lens = shown(a_run("short", prompts=(PROMPTS[0], one, two), sharp=4), fragment="#head=1.1")
    lens.locator("#text [data-token]").nth(11).hover()
    lens.keyboard.press("p")
    expect(lens.locator("#prompt")).to_have_value("1")
    assert pages.readout(lens)[2] == [1.0]
    pages.go_to(lens, "prompt=2&head=1.1&colours=stretched&first=hidden")
    for place in np.ndindex(2, 3):
        pages.tile(lens, *place).click()
        assert lens.locator("#finding").inner_text()
    alone = shown(a_run("one", prompts=(one,)), fragment="")
    charts = alone.locator(".chart").evaluate_all("all => all.map((c) => c.dataset.statistic)")
    assert charts == ["distance", "largest_logit"]


def test_signs_of_labels_are_explained(shown):
    tokens = ["Caf", "<0xC3>", "<0xA9>", "\n", "\t", "Bar"]
    prompts = (pages.prompt("1", tokens), pages.prompt("2", ["a", "b"]), PROMPTS[0])
    lens = shown(a_run("signs", 1, 1, prompts, (0,), (0,)), fragment="#head=0.0")
    for prompt, signs in enumerate(("é¹ ⏎ ⇥", "", "␣ ⏎")):
        pages.go_to(lens, f"head=0.0&prompt={prompt}")
        text = lens.locator("#signs").inner_text()
        assert {s for s in ("é¹", "<0xC3>", "␣", "⏎", "⇥", "∅") if s in text} == set(signs.split())
