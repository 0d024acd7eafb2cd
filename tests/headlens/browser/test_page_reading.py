"""The interactive page in Chromium: what a reader needs to see, to read and to reach."""

import io

import numpy as np
import pytest
from helpers import pages
from helpers.pages import PROMPTS, a_run
from PIL import Image
from playwright.sync_api import expect


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


MIXED = ["The", " word", " של", "ום", " means", " peace", "."]
ARABIC = [f"<0x{byte:02X}>" for byte in "مرحبا".encode()]  # two tokens a letter


# The largest distance between a token and its text, in pixels.
APART = """() => {
  const node = document.getElementById("prose").firstChild;
  let first = 0;
  return Math.max(...lens.runs[0].prompts[0].texts.map((text, n) => {
    const range = document.createRange();
    range.setStart(node, first);
    range.setEnd(node, first += text.length);
    const [box] = [...range.getClientRects()].sort((a, b) => b.width - a.width);
    const token = document.querySelector(`#text [data-token="${n}"]`).getBoundingClientRect();
    return Math.abs(box.left - token.left) + Math.abs(box.top - token.top);
  }));
}"""


def test_right_to_left_text_is_read_as_a_whole(shown):
    prompts = [pages.prompt(str(n), words) for n, words in enumerate((pages.HEBREW, MIXED, ARABIC))]
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

    pages.go_to(lens, "head=0.0&prompt=2")
    # One node, so that the browser joins the letters; each of their tokens is under the pointer.
    prose = "node => [node.childNodes.length, node.textContent]"
    assert lens.locator("#prose").evaluate(prose) == [1, "مرحبا"]
    rights = [box["right"] for box in tokens.evaluate_all(read)]
    assert rights == sorted(rights, reverse=True)
    for number in range(len(ARABIC)):
        tokens.nth(number).hover()
        assert pages.readout(lens)[0][1] == number


def test_tokens_stay_behind_their_text_when_it_wraps_elsewhere(shown):
    words = [f" word{n}" for n in range(30)]
    run = a_run("wraps", 1, 1, (pages.prompt("wraps", words),), (0,), (0,))
    lens = shown(run, fragment="#head=0.0", viewport={"width": 1400, "height": 900})
    for width in (460, 900):
        lens.set_viewport_size({"width": width, "height": 900})
        lens.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert lens.evaluate(APART) < 1


def test_a_long_text_scrolls_next_to_its_map(shown):
    """To the query token. So the map has its room, and the page is not longer."""
    words = [f" word{n}" for n in range(200)]
    run = a_run("long", 1, 1, (pages.prompt("long", words),), (0,), (0,))
    lens = shown(run, fragment="#head=0.0&query=199", viewport={"width": 1400, "height": 900})
    plot = lens.locator(".plot").first.bounding_box()
    text = lens.locator("#text").bounding_box()
    assert text["x"] > plot["x"] + plot["width"]
    assert text["y"] + text["height"] <= plot["y"] + plot["height"]
    for query in (199, 0):
        pages.go_to(lens, f"head=0.0&query={query}")
        box = lens.locator("#text .query").first.bounding_box()
        assert text["y"] <= box["y"] <= text["y"] + text["height"] - 10


@pytest.mark.parametrize("width", [460, 900])
def test_all_letters_are_at_the_axes_in_one_or_two_columns(shown, width):
    prompt = pages.prompt("letters", list("abcdefghijklmnopqrst" * 3))
    run = a_run("letters", 1, 1, (prompt,), (0,), (0,))
    lens = shown(run, fragment="#head=0.0", viewport={"width": width, "height": 900})
    lens.evaluate(pages.WATCH_TEXT)
    lens.mouse.move(*pages.cell(lens, 40, 3, size=60))
    left = (
        lens.locator("#map").bounding_box()["x"] - lens.locator(".marks").first.bounding_box()["x"]
    )
    letters = [t for t in lens.evaluate("window.written") if t["where"] == "map"]
    rows = {(round(t["x"]), t["y"]) for t in letters if t["x"] < left and t["text"].isalpha()}
    assert len(rows) == 60
    columns = [[y for at, y in rows if at == x] for x in {x for x, _ in rows}]
    assert len(columns) <= 2
    assert min(np.diff(sorted(heights)).min() for heights in columns) > 8


def screen(locator):
    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB"), int)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_of_text_and_controls(shown, theme):
    view = f"#head=0.1&query=9&theme={theme}&sort=-entropy"
    lens = shown(
        a_run(), pages.second_run(), fragment=view, viewport={"width": 1280, "height": 900}
    )
    for change in ("", "show=a", "compare=off&step=0", "compare=off&prompt=2&query=4"):
        pages.go_to(lens, f"{change}&{view[1:]}")
        found = lens.evaluate(pages.CONTRASTS)
        assert {"readout", "prose"} <= {name for _, name, _, _ in found}
        assert [entry for entry in found if entry[3] < entry[2]] == []
    image = screen(lens.locator("#step"))  # the browser draws
    assert pages.contrast(image[:, -40:], image[0, 0]) >= 3
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
    pages.go_to(lens, "prompt=2&head=1.1")
    for place in np.ndindex(2, 3):
        pages.tile(lens, *place).click()
        assert lens.locator("#finding").inner_text()
    alone = shown(a_run("one", prompts=(one,)), fragment="")
    charts = alone.locator(".chart").evaluate_all("all => all.map((c) => c.dataset.statistic)")
    assert charts == ["distance", "largest_logit"]
