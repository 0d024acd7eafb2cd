"""The interactive page in a real browser: what it draws and what it says."""

import base64
import itertools
import json
import re

import numpy as np
import pytest
from helpers.pages import (
    HISTORY,
    PROMPTS,
    READ_PIXELS,
    STEPS,
    WORDS,
    Run,
    a_run,
    as_shown,
    assert_drawn,
    assert_weights,
    cell,
    grid_order,
    pixels,
    prompt,
    ranked,
    readout_query,
    second_run,
    state,
    thumbnails,
    tile,
    tint,
)
from playwright.sync_api import expect

from lens.history import Row
from lens.page import END, START, page, run_data
from lens.probe import SHOWN
from lens.statistics import STATISTICS

# ------------------------------------------------------------------------- colours and weights


def test_every_head_is_drawn_in_the_colours_of_its_weights(shown):
    run = a_run("gpt2", 12, 12)
    lens = shown(run)
    assert lens.locator(".head").count() == 144
    assert max(tint(lens)) > 200  # on a light page
    assert_drawn(thumbnails(lens, run), np.sqrt(run.weights[120][0]), tint(lens))
    label = tile(lens, 3, 5).get_attribute("aria-label")
    value = run.rows[120].values["induction"][3, 5]
    assert label == f"layer 3 head 5, induction {as_shown(value)}"
    labels = lens.locator("#grid .label").all_inner_texts()
    assert labels == [f"H{n}" for n in range(12)] + [f"L{n}" for n in range(12)]


def test_every_weight_on_the_page_is_the_model_s(shown):
    run = a_run("gpt2", 12, 12)
    assert_weights(shown(run), run)


def test_each_prompt_has_its_own_weights(shown):
    lens = shown()
    for number, weights in enumerate(a_run().weights[120]):
        lens.locator("#prompt").select_option(str(number))
        assert_drawn(thumbnails(lens, a_run()), np.sqrt(weights), tint(lens))
    assert "4 random tokens, twice" in lens.locator("#what").inner_text()


def test_a_long_prompt_is_shown_as_far_as_the_page_goes(shown):
    long = prompt("1-long", [f" {n}" for n in range(SHOWN + 44)])
    run = a_run("long", 1, 1, (long,), (0,), (0,))
    lens = shown(run, fragment="#head=0.0")
    (found,) = pixels(lens.locator("#map"))
    assert found.shape == (SHOWN, SHOWN, 3)
    assert_drawn(found, np.sqrt(run.weights[0][0][0, 0, :SHOWN, :SHOWN]), tint(lens))


def test_scale_and_first_column_change_the_colours_as_they_say(shown):
    lens = shown(fragment="#head=1.0")
    weights = a_run().weights[120][0]
    for scale, hide in itertools.product(("sqrt", "linear"), (False, True)):
        lens.locator("#scale").select_option(scale)
        lens.locator("#first-column").set_checked(hide)
        most = weights[..., 1:].max((-1, -2), keepdims=True) if hide else 1
        part = (weights / most).clip(0, 1)
        part = part if scale == "linear" else np.sqrt(part)
        within = 3 if (scale, hide) == ("sqrt", False) else 9
        found = thumbnails(lens, a_run())
        assert_drawn(found, part, tint(lens), within, first=int(hide))
        (enlarged,) = pixels(lens.locator("#map"))
        assert (enlarged == found[1, 0]).all()
    # The numbers stay as they are.
    at = lens.evaluate("window.lens.weight(0, 3, 0, 1, 0, 5, 0)")
    assert at == pytest.approx(weights[1, 0, 5, 0], abs=1 / 255)


def test_dark_and_light(shown):
    lens = shown(color_scheme="dark")
    html_element = lens.locator("html")
    assert html_element.get_attribute("data-theme") == "dark"
    assert max(tint(lens)) < 60
    part = np.sqrt(a_run().weights[120][0])
    assert_drawn(thumbnails(lens, a_run()), part, tint(lens))
    lens.emulate_media(color_scheme="light")
    expect(html_element).to_have_attribute("data-theme", "light")
    assert_drawn(thumbnails(lens, a_run()), part, tint(lens))
    lens.locator("#theme").click()
    assert html_element.get_attribute("data-theme") == "dark"
    assert_drawn(thumbnails(lens, a_run()), part, tint(lens))
    page_colour = lens.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", page_colour))) < 60
    lens.emulate_media(color_scheme="dark")
    lens.locator("#theme").click()
    lens.emulate_media(color_scheme="dark")
    assert html_element.get_attribute("data-theme") == "light"  # what was chosen stays


# ------------------------------------------------------------------------------ one head


WATCH_TEXT = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    const at = this.getTransform().transformPoint({ x, y });
    const chart = this.canvas.closest(".chart")?.dataset.statistic;
    const map = this.canvas.previousElementSibling?.id;
    written.push({ text, x: at.x, y: at.y, where: chart ?? map, colour: this.fillStyle });
    return write.call(this, text, x, y, ...more);
  };
}"""


def written(lens, where, act):
    """What is written on a canvas while `act` is done; places in its pixels."""
    lens.evaluate("() => { window.written = []; }")
    act()
    return [text for text in lens.evaluate("window.written") if text["where"] == where]


def test_a_click_or_enter_enlarges_a_head(shown):
    lens = shown()
    assert not lens.locator("#detail").is_visible()
    tile(lens, 1, 2).click()
    assert lens.locator("#detail-title").inner_text() == "L1 H2"
    assert tile(lens, 1, 2).get_attribute("aria-pressed") == "true"
    tile(lens, 0, 1).focus()
    lens.keyboard.press("Enter")
    assert lens.locator("#detail-title").inner_text() == "L0 H1"
    assert lens.locator(".head[aria-pressed='true']").count() == 1
    (enlarged,) = pixels(lens.locator("#map"))
    assert_drawn(enlarged, np.sqrt(a_run().weights[120][0][0, 1]), tint(lens))
    assert lens.locator("#map").bounding_box()["width"] > 200
    for canvas in (lens.locator("#map"), tile(lens, 0, 1).locator("canvas")):
        assert canvas.evaluate("node => getComputedStyle(node).imageRendering") == "pixelated"
    values = dict(text.split("\n") for text in lens.locator("#values > div").all_inner_texts())
    true = a_run().rows[120].values
    assert values == {s.title: as_shown(true[key][0, 1]) for key, s in STATISTICS.items()}
    lens.locator("#next-head").click()
    assert lens.locator("#detail-title").inner_text() == "L0 H2"
    lens.locator("#previous-head").click()
    lens.locator("#close").click()
    assert not lens.locator("#detail").is_visible()


def test_tokens_stand_on_both_axes(shown):
    lens = shown(fragment="#head=0.0", viewport={"width": 1280, "height": 1000})
    lens.evaluate(WATCH_TEXT)
    found = written(lens, "map", lambda: lens.mouse.move(*cell(lens, 8, 3)))
    box = lens.locator("#map").bounding_box()
    marks = lens.locator("#map + canvas").bounding_box()
    left, top = box["x"] - marks["x"], box["y"] - marks["y"]
    labels = [*WORDS]
    labels[4], labels[10] = "⏎", "␣"
    labels = [re.sub("^ ", "␣", label) for label in labels]
    for number, label in enumerate(labels):
        along = (number + 0.5) * box["width"] / len(WORDS)
        named = [text for text in found if text["text"] == label]
        assert any(t["x"] < left and abs(t["y"] - top - along) < 2 for t in named), label
        below = top + box["height"]
        assert any(t["y"] > below and abs(t["x"] - left - along) < 2 for t in named), label
    strong = [text["text"] for text in found if text["colour"] == "#fdfdfb"]
    assert strong == ["␣river", "␣the"]  # the hovered row and column
    bar = [text["text"] for text in found if re.fullmatch(r"[\d.]+", text["text"])]
    assert (bar[0], bar[-1]) == ("0", "1")
    assert len(bar) >= 4


def test_labels_are_thinned_but_the_hovered_ones_stay(shown):
    many = prompt("1-many", [f" n{n}" for n in range(150)])
    run = a_run("long", 1, 1, (many,), (0,), (0,))
    lens = shown(run, fragment="#head=0.0")
    lens.evaluate(WATCH_TEXT)
    found = written(lens, "map", lambda: lens.mouse.move(*cell(lens, 101, 53, size=150)))
    texts = [text["text"] for text in found]
    assert 10 < len(texts) < 150
    assert {"␣n101", "␣n53"} <= set(texts)


def test_the_readout_says_who_looks_at_whom_and_how_much(shown):
    lens = shown(fragment="#head=1.1")
    weights = a_run().weights[120][0][1, 1]
    readout = lens.locator("#readout")
    for query, key in ((8, 3), (11, 0), (5, 5)):
        lens.mouse.move(*cell(lens, query, key))
        words, said = readout.inner_text().rsplit(": ", 1)
        assert words == f'"{WORDS[query]}" ({query}) looks at "{WORDS[key]}" ({key})'
        assert re.fullmatch(r"\d\.\d{3}", said)
        assert float(said) == pytest.approx(weights[query, key], abs=1 / 255 + 0.0005)
    lens.mouse.move(5, 5)
    assert readout.inner_text().startswith(
        f'" far" (11) looks most at "{WORDS[weights[11].argmax()]}"'
    )


def test_the_prompt_is_shaded_by_what_its_token_looks_at(shown):
    lens = shown(fragment="#head=1.1")
    tokens = lens.locator("#text [data-token]")
    assert tokens.all_text_contents() == [*WORDS[:4], "⏎\n", *WORDS[5:10], "␣", WORDS[11]]
    tokens.nth(6).click()
    assert state(lens, "query") == 6
    lens.mouse.move(5, 5)
    assert tokens.nth(6).get_attribute("class") == "query"
    assert lens.locator("#text .query").count() == 1
    assert lens.locator("#text .after").count() == len(WORDS) - 7

    def shades():
        read = "all => all.map((span) => span.style.backgroundColor)"
        return [
            float(colour.rstrip(")").split(",")[-1]) if colour else 0.0
            for colour in tokens.evaluate_all(read)
        ]

    seen = np.array(shades())
    true = np.sqrt(a_run().weights[120][0][1, 1, 6])
    assert (seen[7:] == 0).all()
    at_most = seen.max() / true.max()
    assert 0.5 < at_most < 1
    assert seen[:7] == pytest.approx(at_most * true[:7], abs=0.02)
    tokens.nth(2).hover()
    assert lens.locator("#text .query").inner_text() == " on"
    assert readout_query(lens) == '" on" (2)'
    assert state(lens, "query") == 6  # only pointed at
    said, weight = tokens.nth(1).get_attribute("title").rsplit(": ", 1)
    assert said == " sat\nposition 1"
    assert float(weight) == pytest.approx(a_run().weights[120][0][1, 1, 2, 1], abs=0.005)


def test_a_character_split_over_tokens_is_put_together_in_the_text(shown):
    parts = ["<0x20><0xF0><0x9F>", "<0x98>", "<0x80>"]
    tokens = ["Hi", *parts, "<0xE2>", "<0xC3>", "<0xA9>", "<0x41>", "<0xE2>"]
    lens = shown(a_run("split", 1, 1, (prompt("1-hi", tokens),), (0,), (0,)), fragment="#head=0.0")
    spans = lens.locator("#text [data-token]")
    wanted = ["Hi", " \U0001f600", "", "", "<0xE2>", "é", "", "<0x41>", "<0xE2>"]
    assert spans.all_text_contents() == wanted
    assert lens.locator("#prompt option").inner_text() == f"1: {''.join(wanted)}"
    for number in (2, 3, 6):
        spans.nth(number).hover()
        assert readout_query(lens) == f'"{tokens[number]}" ({number})'
    lens.evaluate(WATCH_TEXT)
    marks = written(lens, "map", lambda: lens.mouse.move(*cell(lens, 8, 5, size=9)))
    labels = {text["text"] for text in marks}
    assert {"Hi", "<0x20><0xF0…", *tokens[2:]} <= labels  # on the axes as they are


# ------------------------------------------------------------------------------ steps


def test_the_slider_shows_another_step_and_makes_no_element_anew(shown):
    lens = shown(fragment="#head=0.2")
    parts = "[...document.querySelectorAll('#grid *, #text *, #values *, #charts *')]"
    lens.evaluate(f"window.before = {parts}")
    for frame, step in reversed(list(enumerate(STEPS))):
        lens.locator("#step").fill(str(frame))
        expect(lens.locator("#step-number")).to_have_text(f"step {step}")
        assert_drawn(thumbnails(lens, a_run()), np.sqrt(a_run().weights[step][0]), tint(lens))
        value = as_shown(a_run().rows[step].values["induction"][0, 2])
        assert tile(lens, 0, 2).get_attribute("aria-label").endswith(f" {value}")
        assert f"induction\n{value}" in lens.locator("#values > div").all_inner_texts()
    assert lens.evaluate(f"{parts}.every((node, n) => node === window.before[n])")


WATCH_STEPS = """() => {
  window.seen = [];
  const [step, play] = ["step-number", "play"].map((id) => document.getElementById(id));
  const watch = () => seen.push([step.textContent, play.getAttribute("aria-label")]);
  const what = { childList: true, characterData: true, subtree: true };
  new MutationObserver(watch).observe(step, what);
}"""
AT_THE_END = """() => seen.at(-1)?.join() === "step 120,play" """


def test_play_goes_on_to_the_end_and_starts_over(shown):
    lens = shown(fragment="#step=40")
    lens.locator("#speed").select_option("10")
    lens.evaluate(WATCH_STEPS)
    for begin in (40, 0):  # at the last step it begins again
        lens.locator("#play").click()
        lens.wait_for_function(AT_THE_END)
        seen = dict(lens.evaluate("seen.splice(0)"))
        assert list(seen) == [f"step {step}" for step in STEPS if step >= begin]
        assert {label for step, label in seen.items() if step != "step 120"} == {"pause"}


def test_pausing_holds_the_step(shown):
    # Options that no other test has make a window of its own, whose clock may stay stopped.
    lens = shown(fragment="#step=0", timezone_id="Etc/GMT+5")
    lens.clock.install(time=0)
    lens.clock.pause_at(1000)  # from here time passes only in run_for
    lens.locator("#speed").select_option("1")
    lens.locator("#play").click()
    assert lens.locator("#play").get_attribute("aria-label") == "pause"
    lens.clock.run_for(1500)
    assert state(lens, "frame") == 1
    lens.locator("#play").click()
    assert lens.locator("#play").get_attribute("aria-label") == "play"
    lens.clock.run_for(5000)
    assert state(lens, "frame") == 1


def test_a_single_step_has_no_time_controls(shown):
    run = a_run(steps=(40,), history=(40,))
    lens = shown(run, fragment="#head=0.0")
    assert lens.locator("#step-number").inner_text() == "step 40"
    for control in ("#step", "#play", "#speed"):
        assert not lens.locator(control).is_visible()
    lens.keyboard.press("Space")
    lens.keyboard.press(".")
    assert state(lens, "frame") == 0
    assert lens.locator(".chart").count() == len(STATISTICS)
    assert "by layer" in lens.locator("#legend").inner_text()


# ------------------------------------------------------------------------------ sort and filter


def test_heads_are_sorted_by_any_statistic(shown):
    lens = shown(fragment="#step=80")
    for key, values in a_run().rows[80].values.items():
        lens.locator("#sort").select_option(key)
        assert grid_order(lens) == ranked(values, descending=True), key
        first = lens.locator(".head").first.locator(".caption").inner_text()
        layer, head = ranked(values, descending=True)[0]
        assert first.split() == [f"L{layer}", f"H{head}", as_shown(values[layer, head])]
        lens.locator("#direction").click()
        assert grid_order(lens) == ranked(values, descending=False), key
        lens.locator("#direction").click()
    lens.locator("#step").fill("3")  # in the order of the step that is shown
    assert grid_order(lens) == ranked(a_run().rows[120].values[key], descending=True)
    lens.locator("#sort").select_option("")
    assert grid_order(lens) == list(np.ndindex(values.shape))


def test_heads_are_filtered_by_a_smallest_value(shown):
    lens = shown()
    values = a_run().rows[120].values["entropy"]
    everywhen = np.stack([row.values["entropy"] for row in a_run().rows.values()])
    low, high = everywhen.min(), everywhen.max()
    lens.locator("#filter-statistic").select_option("entropy")
    count, bound = lens.locator("#count"), lens.locator("#threshold .number")
    assert count.inner_text() == "6 of 6 heads"
    for part in (0.1, 0.25, 0.4):
        lens.locator("#filter-value").fill(str(round(200 * part)))
        threshold = low + part * (high - low)
        passing = values >= threshold
        assert count.inner_text() == f"{passing.sum()} of 6 heads"
        assert bound.inner_text() == f"≥ {as_shown(threshold)}"
        for place in np.ndindex(values.shape):
            faint = "out" in tile(lens, *place).get_attribute("class").split()
            assert faint == (not passing[place])
    lens.locator("#filter-value").fill("40")
    passing = values >= low + 0.2 * (high - low)
    assert 0 < passing.sum() < 6
    lens.locator("#sort").select_option("entropy")  # sorted, the others are left out
    assert grid_order(lens) == [place for place in ranked(values, True) if passing[place]]
    lens.locator("#filter-statistic").select_option("")
    assert count.inner_text() == ""
    assert len(grid_order(lens)) == 6


def test_statistics_without_values_cannot_be_chosen(shown):
    lens = shown(a_run(prompts=PROMPTS[:2]))
    for select in ("#sort", "#filter-statistic"):
        off = lens.locator(f"{select} option:disabled").evaluate_all("all => all.map(o => o.value)")
        assert off == ["induction", "duplicate_token"]
    assert tile(lens, 0, 0).get_attribute("aria-label") == "layer 0 head 0, induction –"


# ------------------------------------------------------------------------------ charts


class Chart:
    """A chart as a reader would read it: places to steps and values by the labels of its axes."""

    def __init__(self, lens, key):
        self.figure = lens.locator(f".chart[data-statistic='{key}']")
        labels = [text for text in lens.evaluate("window.written") if text["where"] == key]
        ticks = [text for text in labels if re.fullmatch(r"-?[\d.]+", text["text"])]
        lowest = max(text["y"] for text in labels)
        self.ticks = [(float(t["text"]), t["y"]) for t in ticks if t["y"] < lowest - 1]
        self.across = sorted(t["x"] for t in labels if t["y"] == lowest)
        self.steps = sorted(t["text"] for t in labels if t["y"] == lowest)

    def x(self, step):
        left, right = self.across
        return left + (right - left) * step / HISTORY[-1]

    def y(self, value):
        (low, bottom), (high, top) = self.ticks[0], self.ticks[-1]
        return bottom + (value - low) / (high - low) * (top - bottom)

    def drawn(self, what):
        """The pixels of its lines (0) or its marks (1), (height, width, 4)."""
        canvas = self.figure.locator("canvas").nth(what)
        ((wide, high, data),) = canvas.evaluate_all(READ_PIXELS)
        return np.frombuffer(base64.b64decode(data), np.uint8).reshape(high, wide, 4).astype(int)

    def move(self, mouse, step, value):
        box = self.figure.locator("canvas").first.bounding_box()
        mouse.move(box["x"] + self.x(step), box["y"] + float(self.y(value)))


@pytest.fixture
def charts(shown):
    """charts(fragment) -> the page, and its charts with what is written on them."""

    def show(fragment=""):
        lens = shown(fragment=fragment, viewport={"width": 1280, "height": 1500})
        lens.evaluate(WATCH_TEXT)
        lens.locator("#theme").click()
        lens.evaluate("() => { window.written = []; }")
        lens.locator("#theme").click()  # all is drawn anew
        return lens, {key: Chart(lens, key) for key in STATISTICS}

    return show


def test_every_statistic_has_a_chart_with_readable_axes_and_a_dashed_even_line(charts):
    lens, found = charts()
    keys = lens.locator(".chart").evaluate_all("all => all.map((c) => c.dataset.statistic)")
    assert keys == list(STATISTICS)
    for key, statistic in STATISTICS.items():
        chart = found[key]
        assert chart.steps == ["120", "step 0"]
        assert len(chart.ticks) >= 2, key
        title = chart.figure.locator("button")
        assert title.inner_text() == statistic.title
        assert title.get_attribute("title") == statistic.about
    uniform = {s["key"]: s["uniform"] for s in a_run().data["statistics"]}
    assert uniform.pop("largest_logit") is None
    for key, value in uniform.items():
        chart = found[key]
        left, right = (round(x) for x in chart.across)
        near = chart.drawn(0)[int(chart.y(value)) - 1 :][:3, left:right]
        inked = (near[..., 3] * (255 - near[..., 0]) > 50 * 255).any(0)  # more than the grid is
        assert np.abs(np.diff(inked.astype(int))).sum() > 20, key  # on, off, on, off, ...


def test_an_axis_has_two_ticks_at_least(shown):
    run = a_run()
    values = np.linspace(6.2, 9.9, 6).reshape(2, 3)  # between which there is one even number
    rows = [Row(step, row.values | {"largest_logit": values}) for step, row in run.rows.items()]
    data = run_data("narrow", run.prompts, run.data["frames"], rows)
    lens = shown(Run(data, run.prompts, run.weights, run.rows))
    lens.evaluate(WATCH_TEXT)
    lens.locator("#theme").click()
    assert len(Chart(lens, "largest_logit").ticks) >= 2


def test_the_chosen_head_stands_at_its_values(charts):
    _, found = charts("#head=1.1&step=80")
    for key, chart in found.items():
        value = a_run().rows[80].values[key][1, 1]
        assert chart.figure.locator(".value").inner_text() == f"L1 H1 {as_shown(value)}"
        r, g, b, alpha = chart.drawn(1)[int(chart.y(value)), int(chart.x(80))]
        assert alpha > 200
        assert r > g + 50 > b, (key, r, g, b)  # the colour of the chosen head


def test_the_chosen_head_keeps_its_colour_under_the_pointer(charts):
    lens, found = charts("#step=80")
    chart, value = found["diagonal"], a_run().rows[80].values["diagonal"][1, 1]
    assert "mean over all prompts · the chosen head" in lens.locator("#legend").inner_text()

    def colour():
        return chart.drawn(1)[int(chart.y(value)), int(chart.x(80)), :3].tolist()

    tile(lens, 1, 1).focus()  # chosen, but not enlarged
    coloured = colour()
    assert coloured[0] > coloured[1] + 50 > coloured[2]
    tile(lens, 1, 1).click()  # and under the pointer
    assert colour() == coloured
    tile(lens, 0, 0).hover()
    assert colour() == coloured


def test_the_marker_stands_at_the_step(charts):
    lens, found = charts("#step=0")
    chart = found["entropy"]
    middle = int(np.mean([y for _, y in chart.ticks]))
    for frame, step in enumerate(STEPS):
        lens.locator("#step").fill(str(frame))
        row = chart.drawn(1)[middle, :, 3]
        marked = [at for at in STEPS if row[int(chart.x(at)) - 1 :][:3].any()]
        assert marked == [step]


def test_the_pointer_reads_a_chart_and_a_click_chooses_the_head(charts):
    lens, found = charts()
    values = a_run().rows[60].values["diagonal"]
    for place in ((0, 1), (1, 2)):
        found["diagonal"].move(lens.mouse, 60, values[place])
        said = found["diagonal"].figure.locator(".value").inner_text()
        assert said == f"L{place[0]} H{place[1]} · 60 · {as_shown(values[place])}"
        assert "marked" in tile(lens, *place).get_attribute("class").split()
        assert lens.locator(".head.marked").count() == 1
    lens.mouse.down()
    lens.mouse.up()
    assert lens.locator("#detail-title").inner_text() == "L1 H2"


def test_a_thumbnail_under_the_pointer_says_its_values(shown):
    lens = shown(viewport={"width": 1280, "height": 1500})
    tile(lens, 0, 2).hover()
    values = {key: value[0, 2] for key, value in a_run().rows[120].values.items()}
    said = [f"{STATISTICS[key].title} {as_shown(value)}" for key, value in values.items()]
    assert lens.locator("#hovered").inner_text() == " · ".join(["L0 H2", *said])
    value = lens.locator(".chart[data-statistic='distance'] .value").inner_text()
    assert value == f"L0 H2 {as_shown(values['distance'])}"
    lens.mouse.move(5, 5)
    assert lens.locator("#hovered").inner_text() == ""
    tile(lens, 1, 2).hover()
    assert "largest logit –" in lens.locator("#hovered").inner_text()
    lens.keyboard.press(",")  # they are those of the shown step
    entropy = as_shown(a_run().rows[80].values["entropy"][1, 2])
    assert f" · entropy {entropy} · " in lens.locator("#hovered").inner_text()
    tile(lens, 1, 2).click()  # which shows them beside
    assert lens.locator("#hovered").inner_text() == ""
    tile(lens, 0, 1).hover()
    assert lens.locator("#hovered").inner_text().startswith("L0 H1 · ")


def test_the_title_of_a_chart_leads_to_its_explanation(shown):
    lens = shown(viewport={"width": 1280, "height": 1500})
    lens.locator(".chart[data-statistic='induction'] button").click()
    about = lens.locator("#help #about-induction + dd")
    assert about.is_visible()
    assert about.inner_text() == STATISTICS["induction"].about
    lens.keyboard.press("Escape")
    assert not lens.locator("#help").is_visible()


# ------------------------------------------------------------------------------ compare


def assert_difference(found, difference, tint):
    """Orange where B has more weight, blue where it has less; further from pale, more of it."""
    below = np.tril(np.ones(difference.shape[-2:], bool))
    assert (found[..., ~below, :] == tint).all()
    found, difference = found[..., below, :], difference[..., below]
    redder = found[..., 0] - found[..., 2]
    assert (redder[difference > 0.02] > 0).all()
    assert (redder[difference < -0.02] < 0).all()
    assert (found[difference == 0] == 250).all()
    rounded = 0.03  # more than bytes round off
    for sign in (-1, 1):
        clear = sign * difference > rounded
        size, light = sign * difference[clear], found[clear].sum(-1)
        order = np.argsort(size)
        size, light = size[order], np.minimum.accumulate(light[order])
        smaller = np.searchsorted(size, size - rounded) - 1
        assert (light[smaller >= 0] < light[smaller[smaller >= 0]]).all()


def test_two_steps_are_compared(shown):
    lens = shown(fragment="#head=1.0")
    assert not lens.locator("#map-b").is_visible()
    lens.locator("#compare").select_option("step:40")
    a, b = a_run().weights[40][0], a_run().weights[120][0]
    maps = pixels(lens.locator("#map, #map-b, #map-difference"))
    for number, (found, weights) in enumerate(zip(maps[:2], (a, b), strict=True)):
        assert_drawn(found, np.sqrt(weights[1, 0]), tint(lens)), number
    assert_difference(maps[2], (b - a)[1, 0], tint(lens))
    assert_difference(thumbnails(lens, a_run()), b - a, tint(lens))
    lens.locator("#show label", has_text="B").nth(0).click()
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(b), tint(lens))
    lens.locator("#show label").nth(0).click()
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(a), tint(lens))
    note = lens.locator("#compare-note").inner_text()
    assert note == "A: step 40, B: step 120."
    lens.mouse.move(*cell(lens, 8, 3, "#map-b"))
    said = lens.locator("#readout").inner_text()
    numbers = [float(n.replace("−", "-")) for n in re.findall(r"[+−]?\d\.\d{3}", said)]
    true = [a[1, 0, 8, 3], b[1, 0, 8, 3], b[1, 0, 8, 3] - a[1, 0, 8, 3]]
    assert numbers == pytest.approx(true, abs=2 / 255 + 0.001)
    assert re.search(r'" river" \(8\) looks at " the" \(3\): A .*, B .*, B − A [+−]', said)
    lens.locator("#compare").select_option("off")
    assert not lens.locator("#map-b").is_visible()
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(b), tint(lens))


def test_the_earlier_of_two_steps_is_a(shown):
    lens = shown(fragment="#step=80&head=0.1")
    lens.keyboard.press("d")
    for frame, earlier, later in ((2, 0, 80), (3, 0, 120), (0, 0, 0)):
        lens.locator("#step").fill(str(frame))
        assert lens.locator("#step-number").inner_text() == f"step {STEPS[frame]}"
        note = lens.locator("#compare-note").inner_text()
        assert note == f"A: step {earlier}, B: step {later}."
        gained = a_run().weights[later][0] - a_run().weights[earlier][0]
        assert_difference(thumbnails(lens, a_run()), gained, tint(lens))
        values = [a_run().rows[step].values["entropy"][0, 1] for step in (earlier, later)]
        said = f"entropy\n{as_shown(values[0])} → {as_shown(values[1])}"
        assert said in lens.locator("#values > div").all_inner_texts()
    lens.keyboard.press("d")
    lens.keyboard.press("d")  # not with itself
    assert lens.locator("#compare-note").inner_text() == "A: step 0, B: step 120."
    assert lens.locator("#step-number").inner_text() == "step 0"


def test_one_step_of_one_run_says_what_is_missing(shown):
    lens = shown(a_run(steps=(40,), history=(40,)))
    lens.keyboard.press("d")
    message = "Here is one step of one run: open another page to compare with."
    expect(lens.locator("#message")).to_have_text(message)
    assert state(lens, "compare") == "off"


def test_a_second_run_is_compared_from_the_start(shown):
    first, second = a_run(), second_run()
    lens = shown(first, second, fragment="#step=80")
    assert state(lens, "compare") == "run"
    difference = second.weights[80][0] - first.weights[80][0]
    assert_difference(thumbnails(lens, first), difference, tint(lens))
    assert lens.locator("#compare-note").inner_text() == "A: step 80, first, B: step 80, second."
    values = second.rows[80].values["diagonal"] - first.rows[80].values["diagonal"]
    lens.locator("#sort").select_option("diagonal")
    assert grid_order(lens) == ranked(values, descending=True)
    layer, head = ranked(values, descending=True)[0]
    caption = lens.locator(".head").first.locator(".caption").inner_text()
    assert caption.split()[-1] == f"+{as_shown(values[layer, head])}"
    lens.locator("#sort").select_option("")
    lens.locator("#compare").select_option("run:0")
    assert_weights(lens, second, number=1)
    difference = second.weights[0][0] - first.weights[80][0]
    assert_difference(thumbnails(lens, first), difference, tint(lens))


def test_another_page_is_opened_to_compare_with(shown, write):
    other = write(second_run(), name="other.html")
    lens = shown(fragment="#head=0.1")
    lens.locator("#compare-file").set_input_files(other)
    expect(lens.locator("#map-difference")).to_be_visible()
    difference = second_run().weights[120][0] - a_run().weights[120][0]
    assert_difference(thumbnails(lens, a_run()), difference, tint(lens))
    assert "second" in lens.locator("#compare-note").inner_text()


def test_runs_that_differ_are_compared_as_far_as_they_go(shown):
    """Prompts are matched by their tokens; what fits nowhere is said."""
    other = a_run("other", 1, 4, (PROMPTS[1], PROMPTS[0]), seed=3)
    lens = shown(a_run(), other, fragment="#head=0.0")
    note = lens.locator("#compare-note")
    assert "B has 1 layer × 4 heads: compared is what both have." in note.inner_text()
    assert "tokens" not in note.inner_text()
    difference = other.weights[120][1][0, :3] - a_run().weights[120][0][0]
    found = thumbnails(lens, a_run())
    assert_difference(found[0], difference, tint(lens))
    assert (found[1] == tint(lens)).all()  # B has no such layer
    lens.locator("#prompt").select_option("2")  # which the other has not: by position the last
    assert "different prompts, so only the statistics are subtracted" in note.inner_text()
    assert "→" in lens.locator("#values").inner_text()


@pytest.mark.parametrize("tokens", [[*WORDS[:-1], " near"], WORDS[:5]], ids=["as long", "shorter"])
def test_different_prompts_are_not_subtracted(shown, tokens):
    other = a_run("other", prompts=(prompt("1-other", tokens),), seed=5)
    lens = shown(a_run(), other, fragment="#head=0.0")
    a, b = (np.sqrt(run.weights[120][0]) for run in (a_run(), other))
    note = "These are different prompts, so only the statistics are subtracted; the maps are A's."
    assert lens.locator("#compare-note").inner_text().endswith(note)
    assert_drawn(thumbnails(lens, a_run()), a, tint(lens))
    assert lens.locator("#brighter").inner_text() == "brighter: more weight"
    assert not lens.locator("#map-difference").is_visible()
    lens.locator("#show label").nth(1).click()
    assert_drawn(thumbnails(lens, a_run()), b, tint(lens))
    lens.locator("#first-column").check()
    most = b[..., 1:].max((-1, -2), keepdims=True)
    assert_drawn(thumbnails(lens, a_run()), (b / most).clip(0, 1), tint(lens), 9, first=1)
    lens.locator("#show label").nth(2).click()
    values = other.rows[120].values["entropy"] - a_run().rows[120].values["entropy"]
    lens.locator("#sort").select_option("entropy")
    assert grid_order(lens) == ranked(values, descending=True)


def test_charts_show_the_other_run_as_far_as_it_goes(charts, write):
    lens, first = charts("#head=1.1")
    longer = a_run("longer", history=(*HISTORY, 240), steps=(120,), seed=7)
    for run, end in ((longer, 240), (second_run(), 120)):
        path = write(run, name="other.html")
        lens.evaluate("() => { window.written = []; }")
        lens.locator("#compare-file").set_input_files(path)
        expect(lens.locator("#compare-note")).to_contain_text(run.data["name"])
        chart = Chart(lens, "diagonal")
        assert chart.steps == [str(end), "step 0"]
        value = run.rows[120].values["diagonal"]
        left, right = chart.across
        x = int(left + (right - left) * 120 / end)
        for what, place, least in ((1, (1, 1), 200), (0, (0, 0), 30)):  # the chosen one strong
            y = int(chart.y(value[place]))
            near = chart.drawn(what)[y - 3 : y + 4, x - 2 : x + 1]
            blue = near[..., 2] > near[..., 0] + 50
            assert near[blue, 3].max(initial=0) > least, (end, what)
        assert " · B · " in lens.locator("#legend").inner_text()
    lens.evaluate("() => { window.written = []; }")
    lens.locator("#compare").select_option("off")
    assert Chart(lens, "diagonal").ticks == first["diagonal"].ticks
    assert " · B · " not in lens.locator("#legend").inner_text()


NOT_OURS = {
    "text": b"no page at all",
    "page": b"<!doctype html><script>parent.hacked = window.hacked = 1</script><p>hello",
    "cut off": (START + '{"version": 1, "runs": [{"name"').encode(),
    "no weights": (START + '{"version": 1, "runs": [{"layers": 1, "heads": 1}]}' + END).encode(),
    "null": (START + "null" + END).encode(),
    "runs null": (START + '{"version": 1, "runs": [null]}' + END).encode(),
    "bytes": b"\xff\xfe\x00\x01",
}


def test_what_is_no_page_of_the_lens_is_refused_and_not_run(shown):
    lens = shown()
    before = thumbnails(lens, a_run())
    message = lens.locator("#message")
    newer = page([second_run().data], "x").replace('"version": 1', '"version": 2')
    for kind, content in {**NOT_OURS, "newer": newer.encode()}.items():
        lens.evaluate("document.getElementById('message').textContent = ''")
        file = {"name": f"{kind}.html", "mimeType": "text/html", "buffer": content}
        lens.locator("#compare-file").set_input_files(file)
        expect(message).to_have_text(re.compile(r"^This is not a page of the attention lens.*\.$"))
        assert state(lens, "compare") == "off", kind
    assert lens.evaluate("window.hacked") is None
    assert (thumbnails(lens, a_run()) == before).all()


def test_a_damaged_page_is_refused(shown):
    data = json.loads(json.dumps(second_run().data))
    data["frames"][-1]["weights"] = data["frames"][-1]["weights"][:100]
    file = {"name": "x.html", "mimeType": "text/html", "buffer": page([data], "x").encode()}
    lens = shown()
    lens.locator("#compare-file").set_input_files(file)
    expect(lens.locator("#message")).to_have_text("The weights of step 120 of second are damaged.")
    assert state(lens, "compare") == "off"
