"""The interactive page in Chromium: what a reader needs to see, to read and to reach."""

import io
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import PROMPTS, a_run
from PIL import Image
from playwright.sync_api import expect

from headlens.heads import ALL_NAMES

WATCH_LABELS = """() => {
  window.labels = {};
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    const at = this.getTransform().transformPoint({ x, y });
    const place = `${text} ${at.x} ${at.y}`;
    if (this.canvas.previousElementSibling?.id === "map") labels[place] = text;
    return write.call(this, text, x, y, ...more);
  };
  lens.update();
}"""


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


def test_touch_targets_of_a_large_model_in_a_small_window(shown):
    run = a_run("16 heads", 3, 16, PROMPTS[:1], (0, 120), (0, 120))
    small = {"width": 400, "height": 740}
    lens = shown(run, fragment="#head=0.1&filter=entropy:0.1", viewport=small, has_touch=True)
    lens.locator("#options").click()
    targets = "button, select, label:has(input), input:not(label *), .file"
    read = """all => all.filter((node) => node.checkVisibility({ visibilityProperty: true }))
      .map((node) => [node.id || node.className, node.offsetWidth, node.offsetHeight])"""
    found = lens.locator(f"main :is({targets})").evaluate_all(read)
    assert len(found) > 48 + 15
    assert [entry for entry in found if min(entry[1:]) < 24] == []
    assert lens.evaluate("document.documentElement.scrollWidth") == 400
    last = pages.tile(lens, 0, 15)  # the grid scrolls
    last.tap()
    assert lens.locator("#detail-title").inner_text() == "L0 H15"


def test_prompt_of_one_token(shown):
    run = a_run("one", prompts=(pages.prompt("1-one", ["Hello"]),))
    lens = shown(run, fragment="#head=1.1&colours=stretched&first=hidden")
    assert pages.readout(lens)[2] == [1.0]
    charts = lens.locator(".chart")
    assert charts.evaluate_all("all => all.map((c) => c.dataset.statistic)") == [
        "distance",
        "largest_logit",
    ]
    for number in range(charts.count()):  # a line, not an empty chart
        assert pages.pixels(charts.nth(number).locator("canvas"))[1][..., 3].any()


def test_prompt_of_two_tokens(shown):
    """Heads with a name on it: the finding has no row with enough key tokens."""
    run = a_run("two", prompts=(pages.prompt("1-two", ["Hello", " you"]),), sharp=4)
    names = {ALL_NAMES[index] for index in run.rows[120].names.ravel()}
    assert names & {"first_token", "diagonal"}
    lens = shown(run, fragment="")
    assert pages.state(lens, "layer") is not None
    for place in np.ndindex(2, 3):
        pages.tile(lens, *place).click()
        assert lens.locator("#finding").inner_text()


def test_shorter_prompt_while_the_pointer_is_on_a_later_token(shown):
    lens = shown(fragment="#head=0.1")
    lens.locator("#text [data-token]").nth(11).hover()
    lens.keyboard.press("p")
    expect(lens.locator("#prompt")).to_have_value("1")
    assert lens.locator("#text [data-token]").count() == 4
    assert "(3)" in lens.locator("#next").inner_text()  # the last token


def test_labels_of_a_repeated_sequence_of_odd_length(shown):
    """All letters have labels. Of longer words, the same words of both copies."""
    letters = list("abcdefghijklmnopqrstuvwxyzABCDE")
    odd = [pages.prompt("1", ["<|endoftext|>", *2 * letters], period=31)]
    odd += [pages.prompt("2", ["<|endoftext|>", *2 * [f" {a}word" for a in letters]], period=31)]
    run = a_run("odd", 2, 4, tuple(odd), (0,), (0,))
    lens = shown(run, fragment="#head=1.1", viewport={"width": 1800, "height": 1100})
    expect(lens.locator(".plot figcaption").first).not_to_contain_text("1 token in")
    for number, times in enumerate((4, None)):
        pages.go_to(lens, f"head=1.1&prompt={number}&query=0")
        lens.evaluate(WATCH_LABELS)
        texts = list(lens.evaluate("window.labels").values())
        counts = [texts.count(re.sub("^ ", "␣", token)) for token in odd[number].tokens[1:32]]
        if times:  # two copies, two axes
            assert counts == 31 * [times]
        else:
            assert set(counts) == {0, 4}
            step = int(lens.locator(".plot figcaption").first.text_content().split()[-1])
            assert counts.count(4) == 31 // step


def test_signs_of_labels_are_explained(shown):
    tokens = ["Caf", "<0xC3>", "<0xA9>", "\n", "\t", "Bar"]
    prompts = (pages.prompt("1", tokens), pages.prompt("2", ["a", "b"]), PROMPTS[0])
    lens = shown(a_run("signs", 1, 1, prompts, (0,), (0,)), fragment="#head=0.0")
    for prompt, signs in enumerate(("é¹ ⏎ ⇥", "", "␣ ⏎")):
        pages.go_to(lens, f"head=0.0&prompt={prompt}")
        text = lens.locator("#signs").inner_text()
        assert {s for s in ("é¹", "<0xC3>", "␣", "⏎", "⇥", "∅") if s in text} == set(signs.split())


def test_nearly_uniform_heads_look_alike_in_a_chart(shown):
    """The axis of a weight has a least range, so that noise does not look like a difference."""
    lens = shown(a_run("even", sharp=0.001), viewport={"width": 1280, "height": 1500})
    for key in ("entropy", "diagonal", "previous_token"):
        lines = lens.locator(f".chart[data-statistic='{key}'] canvas").first
        image = pages.pixels(lines)[0][2:-20, 60:-20]
        rows = np.flatnonzero(((image[..., 0] < 60) & (image[..., 3] > 20)).any(1))
        assert len(rows)
        assert np.ptp(rows) < 12, key
