"""The interactive page in a real browser: what it draws, and the numbers it shows.

Each test opens one page and checks all that this page can show.
"""

import base64
import itertools
import json
import re

import numpy as np
import pytest
from helpers.pages import (
    HISTORY,
    PERIOD,
    PROMPTS,
    READ_PIXELS,
    STEPS,
    WORDS,
    Run,
    a_run,
    as_file,
    as_shown,
    assert_drawn,
    assert_weights,
    cell,
    go_to,
    grid_order,
    pixels,
    prompt,
    ranked,
    readout,
    second_run,
    state,
    statistics_of,
    thumbnails,
    tile,
    tint,
)
from playwright.sync_api import expect

from lens.history import Row
from lens.page import END, START, page, run_data
from lens.probe import SHOWN
from lens.statistics import STATISTICS

TALL = {"width": 1280, "height": 1500}  # a window that shows the grid and all charts


# ------------------------------------------------------------------------- colours and weights


def test_maps_and_weights_of_every_prompt_and_step(shown):
    lens, run = shown(fragment="#head=0.2"), a_run()
    assert max(tint(lens)) > 200  # the light theme
    labels = lens.locator("#grid .label").all_inner_texts()
    assert labels == ["H0", "H1", "H2", "L0", "L1"]
    assert_weights(lens, run)
    for number, weights in enumerate(run.weights[120]):
        lens.locator("#prompt").select_option(str(number))
        assert_drawn(thumbnails(lens, run), np.sqrt(weights), tint(lens))
    assert f" {PERIOD} " in lens.locator("#what").inner_text()
    go_to(lens, "head=0.2")
    # Another step changes the elements in place.
    parts = "[...document.querySelectorAll('#grid *, #text *, #values *, #charts *')]"
    lens.evaluate(f"window.before = {parts}")
    for frame, step in reversed(list(enumerate(STEPS))):
        lens.locator("#step").fill(str(frame))
        assert re.findall(r"\d+", lens.locator("#step-number").inner_text()) == [str(step)]
        assert_drawn(thumbnails(lens, run), np.sqrt(run.weights[step][0]), tint(lens))
        value = as_shown(run.rows[step].values["induction"][0, 2])
        assert tile(lens, 0, 2).get_attribute("aria-label").endswith(f" {value}")
        assert statistics_of(lens)[STATISTICS["induction"].title] == value
    assert lens.evaluate(f"{parts}.every((node, n) => node === window.before[n])")


def test_color_scale_and_first_column(shown):
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
    at = lens.evaluate("window.lens.weight(0, 3, 0, 1, 0, 5, 0)")  # the numbers stay
    assert at == pytest.approx(weights[1, 0, 5, 0], abs=1 / 255)


def test_dark_and_light_theme(shown):
    lens = shown(color_scheme="dark")

    def check(theme):
        expect(lens.locator("html")).to_have_attribute("data-theme", theme)
        assert_drawn(thumbnails(lens, a_run()), np.sqrt(a_run().weights[120][0]), tint(lens))
        background = lens.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", background))) < 60) == (theme == "dark")

    check("dark")
    assert max(tint(lens)) < 60
    lens.emulate_media(color_scheme="light")
    check("light")
    lens.locator("#theme").click()
    check("dark")
    lens.locator("#theme").click()
    lens.emulate_media(color_scheme="dark")
    check("light")  # the chosen theme wins over the system's


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


def labels_at(lens, query, key, size):
    """What is written beside the enlarged map while the pointer is on a cell, in its pixels."""
    lens.evaluate("() => { window.written = []; }")
    lens.mouse.move(*cell(lens, query, key, size=size))
    return [text for text in lens.evaluate("window.written") if text["where"] == "map"]


def test_enlarging_a_head(shown):
    lens = shown()
    title = lens.locator("#detail-title")
    assert not lens.locator("#detail").is_visible()
    tile(lens, 1, 2).click()
    assert title.inner_text() == "L1 H2"
    tile(lens, 0, 1).focus()
    lens.keyboard.press("Enter")
    assert title.inner_text() == "L0 H1"
    assert lens.locator(".head[aria-pressed='true']").count() == 1
    (enlarged,) = pixels(lens.locator("#map"))
    assert_drawn(enlarged, np.sqrt(a_run().weights[120][0][0, 1]), tint(lens))
    assert lens.locator("#map").bounding_box()["width"] > 200
    true = a_run().rows[120].values
    expected = {s.title: as_shown(true[key][0, 1]) for key, s in STATISTICS.items()}
    assert statistics_of(lens) == expected
    lens.locator("#next-head").click()
    assert title.inner_text() == "L0 H2"
    lens.locator("#previous-head").click()
    assert title.inner_text() == "L0 H1"
    lens.locator("#close").click()
    assert not lens.locator("#detail").is_visible()


def test_reading_an_enlarged_head(shown):
    """The tokens on both axes, the weight under the pointer, and the shaded text."""
    lens = shown(fragment="#head=1.1", viewport={"width": 1280, "height": 1000})
    lens.evaluate(WATCH_TEXT)
    weights = a_run().weights[120][0][1, 1]
    found = labels_at(lens, 8, 3, len(WORDS))
    box = lens.locator("#map").bounding_box()
    marks = lens.locator("#map + canvas").bounding_box()
    left, top = box["x"] - marks["x"], box["y"] - marks["y"]
    below = top + box["height"]
    labels = [re.sub("^ ", "␣", {"\n": "⏎", " ": "␣"}.get(word, word)) for word in WORDS]
    for number, label in enumerate(labels):
        along = (number + 0.5) * box["width"] / len(WORDS)
        named = [text for text in found if text["text"] == label]
        assert any(t["x"] < left and abs(t["y"] - top - along) < 2 for t in named), label
        assert any(t["y"] > below and abs(t["x"] - left - along) < 2 for t in named), label
    bar = [text["text"] for text in found if re.fullmatch(r"[\d.]+", text["text"])]
    assert (bar[0], bar[-1]) == ("0", "1")
    assert len(bar) >= 4

    for query, key in ((8, 3), (11, 0), (5, 5)):
        lens.mouse.move(*cell(lens, query, key))
        looking, looked_at, (weight,) = readout(lens)
        assert looking == (WORDS[query], query)
        assert looked_at == (WORDS[key], key)
        assert weight == pytest.approx(weights[query, key], abs=1 / 255 + 0.0005)
    lens.mouse.move(5, 5)
    most = weights[11].argmax()
    assert readout(lens)[:2] == ((" far", 11), (WORDS[most], most))

    tokens = lens.locator("#text [data-token]")
    assert tokens.all_text_contents() == [*WORDS[:4], "⏎\n", *WORDS[5:10], "␣", WORDS[11]]
    tokens.nth(6).click()
    assert state(lens, "query") == 6
    lens.mouse.move(5, 5)
    assert tokens.nth(6).get_attribute("class") == "query"
    assert lens.locator("#text .query").count() == 1
    assert lens.locator("#text .after").count() == len(WORDS) - 7
    colours = tokens.evaluate_all("all => all.map((span) => span.style.backgroundColor)")
    shades = np.array([float(c.rstrip(")").split(",")[-1]) if c else 0.0 for c in colours])
    true = np.sqrt(weights[6])
    assert (shades[7:] == 0).all()
    at_most = shades.max() / true.max()
    assert 0.5 < at_most < 1
    assert shades[:7] == pytest.approx(at_most * true[:7], abs=0.02)
    tokens.nth(2).hover()
    assert lens.locator("#text .query").inner_text() == " on"
    assert readout(lens)[0] == (" on", 2)
    assert state(lens, "query") == 6  # the pointer alone chooses nothing
    weight = float(tokens.nth(1).get_attribute("title").split()[-1])
    assert weight == pytest.approx(weights[2, 1], abs=0.005)


def test_long_prompt_is_cropped_and_its_labels_are_thinned(shown):
    long = prompt("1-long", [f" n{n}" for n in range(SHOWN + 44)])
    run = a_run("long", 1, 1, (long,), (0,), (0,))
    lens = shown(run, fragment="#head=0.0")
    (found,) = pixels(lens.locator("#map"))
    assert found.shape == (SHOWN, SHOWN, 3)
    assert_drawn(found, np.sqrt(run.weights[0][0][0, 0, :SHOWN, :SHOWN]), tint(lens))
    lens.evaluate(WATCH_TEXT)
    texts = [text["text"] for text in labels_at(lens, 101, 53, SHOWN)]
    assert 10 < len(texts) < SHOWN
    assert {"␣n101", "␣n53"} <= set(texts)  # those under the pointer are always written


def test_character_split_over_tokens_is_joined_in_the_text(shown):
    parts = ["<0x20><0xF0><0x9F>", "<0x98>", "<0x80>"]
    tokens = ["Hi", *parts, "<0xE2>", "<0xC3>", "<0xA9>", "<0x41>", "<0xE2>"]
    lens = shown(a_run("split", 1, 1, (prompt("1-hi", tokens),), (0,), (0,)), fragment="#head=0.0")
    spans = lens.locator("#text [data-token]")
    wanted = ["Hi", " \U0001f600", "", "", "<0xE2>", "é", "", "<0x41>", "<0xE2>"]
    assert spans.all_text_contents() == wanted
    assert lens.locator("#prompt option").inner_text().endswith(f" {''.join(wanted)}")
    for number in (2, 3, 6):
        spans.nth(number).hover()
        assert readout(lens)[0] == (tokens[number], number)
    lens.evaluate(WATCH_TEXT)
    labels = {text["text"] for text in labels_at(lens, 8, 5, 9)}
    assert {"Hi", "<0x20><0xF0…", *tokens[2:]} <= labels  # each token as it is


# ------------------------------------------------------------------------------ steps


def test_play_and_pause(shown):
    # Options that no other test has make a window of its own, whose clock may stay stopped.
    lens = shown(fragment="#step=40", timezone_id="Etc/GMT+5")
    lens.clock.install(time=0)
    lens.clock.pause_at(1000)  # from here time passes only in run_for
    lens.locator("#speed").select_option("1")
    play = lens.locator("#play")
    label = play.get_attribute("aria-label")
    play.click()
    assert play.get_attribute("aria-label") != label
    lens.clock.run_for(1500)
    assert state(lens, "frame") == 2
    play.click()
    assert play.get_attribute("aria-label") == label
    lens.clock.run_for(5000)
    assert state(lens, "frame") == 2
    lens.locator("#step").fill("3")
    play.click()  # from the last step it starts over
    for frame in (0, 1, 2, 3):
        assert state(lens, "frame") == frame
        assert (play.get_attribute("aria-label") == label) == (frame == 3)
        lens.clock.run_for(1000)


def test_one_step_without_a_repeated_prompt(shown):
    """No controls of time, nothing to compare with, statistics that no prompt has."""
    run = a_run(prompts=PROMPTS[:2], steps=(40,), history=(40,))
    values = np.linspace(6.2, 9.9, 6).reshape(2, 3)  # between which there is one even number
    row = Row(40, run.rows[40].values | {"largest_logit": values})
    data = run_data("narrow", run.prompts, run.data["frames"], [row])
    lens = shown(Run(data, run.prompts, run.weights, run.rows), fragment="#head=0.0")
    assert re.findall(r"\d+", lens.locator("#step-number").inner_text()) == ["40"]
    for control in ("#step", "#play", "#speed"):
        assert not lens.locator(control).is_visible()
    lens.keyboard.press("Space")
    lens.keyboard.press(".")
    assert state(lens, "frame") == 0
    lens.keyboard.press("d")
    expect(lens.locator("#message")).not_to_have_text("")
    assert state(lens, "compare") == "off"
    for select in ("#sort", "#filter-statistic"):
        off = lens.locator(f"{select} option:disabled").evaluate_all("all => all.map(o => o.value)")
        assert off == ["induction", "duplicate_token"]
    assert tile(lens, 0, 0).get_attribute("aria-label").endswith(" –")
    assert lens.locator(".chart").count() == len(STATISTICS)
    lens.evaluate(WATCH_TEXT)
    lens.locator("#theme").click()
    assert len(Chart(lens, "largest_logit").ticks) >= 2
    assert Chart(lens, "entropy").steps == ["L0", "L1"]  # one step is drawn by layer


# ------------------------------------------------------------------------------ sort and filter


def test_sorting_and_filtering(shown):
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
    lens.locator("#step").fill("3")  # sorted by the values of the step that is shown
    assert grid_order(lens) == ranked(a_run().rows[120].values[key], descending=True)
    lens.locator("#sort").select_option("")
    assert grid_order(lens) == list(np.ndindex(values.shape))

    # A head with just the smallest value passes; that of this statistic is at this step.
    smallest = {row.values["diagonal"].min(): step for step, row in a_run().rows.items()}
    assert smallest[min(smallest)] == 120
    lens.locator("#filter-statistic").select_option("diagonal")
    assert re.findall(r"\d+", lens.locator("#count").inner_text()) == ["6", "6"]

    values = a_run().rows[120].values["entropy"]
    of_all_steps = np.stack([row.values["entropy"] for row in a_run().rows.values()])
    low, high = of_all_steps.min(), of_all_steps.max()
    lens.locator("#filter-statistic").select_option("entropy")
    for part in (0, 0.1, 0.25, 0.4, 0.2):
        lens.locator("#filter-value").fill(str(round(200 * part)))
        threshold = low + part * (high - low)
        passing = values >= threshold
        count = re.findall(r"\d+", lens.locator("#count").inner_text())
        assert count == [str(passing.sum()), "6"]
        assert lens.locator("#threshold .number").inner_text().endswith(as_shown(threshold))
        for place in np.ndindex(values.shape):
            is_out = "out" in tile(lens, *place).get_attribute("class").split()
            assert is_out == (not passing[place])
    assert 0 < passing.sum() < 6
    lens.locator("#sort").select_option("entropy")  # sorted, the others are left out
    assert grid_order(lens) == [place for place in ranked(values, True) if passing[place]]
    lens.locator("#filter-statistic").select_option("")
    assert lens.locator("#count").inner_text() == ""
    assert len(grid_order(lens)) == 6


# ------------------------------------------------------------------------------ charts


class Chart:
    """A chart as a reader reads it: steps and values by the labels of its axes."""

    def __init__(self, lens, key):
        self.figure = lens.locator(f".chart[data-statistic='{key}']")
        labels = [text for text in lens.evaluate("window.written") if text["where"] == key]
        ticks = [text for text in labels if re.fullmatch(r"-?[\d.]+", text["text"])]
        lowest = max(text["y"] for text in labels)
        self.ticks = [(float(t["text"]), t["y"]) for t in ticks if t["y"] < lowest - 1]
        self.across = sorted(t["x"] for t in labels if t["y"] == lowest)
        self.steps = sorted(t["text"].split()[-1] for t in labels if t["y"] == lowest)

    def x(self, step, last=HISTORY[-1]):
        left, right = self.across
        return left + (right - left) * step / last

    def y(self, value):
        (low, bottom), (high, top) = self.ticks[0], self.ticks[-1]
        return bottom + (value - low) / (high - low) * (top - bottom)

    def drawn(self, what):
        """The pixels of its lines (0) or its marks (1), (height, width, 4)."""
        canvas = self.figure.locator("canvas").nth(what)
        ((wide, high, data),) = canvas.evaluate_all(READ_PIXELS)
        return np.frombuffer(base64.b64decode(data), np.uint8).reshape(high, wide, 4).astype(int)

    def mark(self, step, value):
        """The colour of the mark at a value."""
        return self.drawn(1)[int(self.y(value)), int(self.x(step))]

    def move(self, mouse, step, value):
        box = self.figure.locator("canvas").first.bounding_box()
        mouse.move(box["x"] + self.x(step), box["y"] + float(self.y(value)))


def with_charts(lens):
    """The page's charts, by statistic, after everything is drawn again."""
    lens.evaluate(WATCH_TEXT)
    lens.locator("#theme").click()
    lens.evaluate("() => { window.written = []; }")
    lens.locator("#theme").click()
    return {key: Chart(lens, key) for key in STATISTICS}


def test_charts(shown):
    lens = shown(viewport=TALL)
    found = with_charts(lens)
    keys = lens.locator(".chart").evaluate_all("all => all.map((c) => c.dataset.statistic)")
    assert keys == list(STATISTICS)
    uniform = {s["key"]: s["uniform"] for s in a_run().data["statistics"]}
    assert [key for key, value in uniform.items() if value is None] == ["largest_logit"]
    for key, statistic in STATISTICS.items():
        chart = found[key]
        assert chart.steps == ["0", "120"]
        assert len(chart.ticks) >= 2, key
        title = chart.figure.locator("button")
        assert title.inner_text() == statistic.title
        assert title.get_attribute("title") == statistic.about
        if uniform[key] is not None:  # its dashed line
            left, right = (round(x) for x in chart.across)
            near = chart.drawn(0)[int(chart.y(uniform[key])) - 1 :][:3, left:right]
            inked = (near[..., 3] * (255 - near[..., 0]) > 50 * 255).any(0)  # more than the grid
            assert np.abs(np.diff(inked.astype(int))).sum() > 20, key  # on, off, on, off, ...

    chart = found["entropy"]  # the marker of the step that is shown
    middle = int(np.mean([y for _, y in chart.ticks]))
    for frame, step in enumerate(STEPS):
        lens.locator("#step").fill(str(frame))
        row = chart.drawn(1)[middle, :, 3]
        assert [at for at in STEPS if row[int(chart.x(at)) - 1 :][:3].any()] == [step]

    values = a_run().rows[60].values["diagonal"]  # the pointer reads a chart
    for place in ((0, 1), (1, 2)):
        found["diagonal"].move(lens.mouse, 60, values[place])
        said = found["diagonal"].figure.locator(".value").inner_text().replace(" · ", " ")
        assert said.split() == [f"L{place[0]}", f"H{place[1]}", "60", as_shown(values[place])]
        assert "marked" in tile(lens, *place).get_attribute("class").split()
        assert lens.locator(".head.marked").count() == 1
    lens.mouse.down()
    lens.mouse.up()  # and a click chooses the head
    assert lens.locator("#detail-title").inner_text() == "L1 H2"

    found["induction"].figure.locator("button").click()
    about = lens.locator("#help #about-induction + dd")
    assert about.is_visible()
    assert about.inner_text() == STATISTICS["induction"].about


def test_chosen_head_and_head_under_the_pointer(shown):
    lens = shown(fragment="#step=80", viewport=TALL)
    found = with_charts(lens)
    values = {key: of_heads[1, 1] for key, of_heads in a_run().rows[80].values.items()}
    chart = found["diagonal"]
    tile(lens, 1, 1).focus()  # chosen, but not enlarged
    in_focus = chart.mark(80, values["diagonal"]).tolist()
    tile(lens, 1, 1).click()  # and under the pointer
    for key, value in values.items():
        assert found[key].figure.locator(".value").inner_text() == f"L1 H1 {as_shown(value)}"
        r, g, b, alpha = found[key].mark(80, value)
        assert alpha > 200
        assert r > g + 50 > b, (key, r, g, b)  # the colour of the chosen head
    assert chart.mark(80, values["diagonal"]).tolist() == in_focus
    tile(lens, 0, 0).hover()
    assert chart.mark(80, values["diagonal"]).tolist() == in_focus

    go_to(lens, "")
    hovered = lens.locator("#hovered")
    values = a_run().rows[120].values
    tile(lens, 0, 2).hover()
    said = [f"{STATISTICS[key].title} {as_shown(value[0, 2])}" for key, value in values.items()]
    assert hovered.inner_text().split(" · ") == ["L0 H2", *said]
    value = found["distance"].figure.locator(".value").inner_text()
    assert value == f"L0 H2 {as_shown(values['distance'][0, 2])}"
    lens.mouse.move(5, 5)
    assert hovered.inner_text() == ""
    tile(lens, 1, 2).hover()
    assert f"{STATISTICS['largest_logit'].title} –" in hovered.inner_text()
    lens.keyboard.press(",")  # the values are those of the step that is shown
    entropy = as_shown(a_run().rows[80].values["entropy"][1, 2])
    assert f"{STATISTICS['entropy'].title} {entropy}" in hovered.inner_text().split(" · ")
    tile(lens, 1, 2).click()  # whose values then stand beside it
    assert hovered.inner_text() == ""
    tile(lens, 0, 1).hover()
    assert hovered.inner_text().startswith("L0 H1")


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


def compared_steps(lens):
    """The steps of A and B."""
    note = lens.locator("#compare-note").inner_text()
    return [int(step) for step in re.findall(r"[AB]: step (\d+)", note)]


def test_two_steps_are_compared(shown):
    lens = shown(fragment="#head=1.0")
    assert not lens.locator("#map-b").is_visible()
    lens.locator("#compare").select_option("step:40")
    a, b = a_run().weights[40][0], a_run().weights[120][0]
    maps = pixels(lens.locator("#map, #map-b, #map-difference"))
    assert_drawn(maps[0], np.sqrt(a[1, 0]), tint(lens))
    assert_drawn(maps[1], np.sqrt(b[1, 0]), tint(lens))
    assert_difference(maps[2], (b - a)[1, 0], tint(lens))
    assert_difference(thumbnails(lens, a_run()), b - a, tint(lens))
    for number, weights in ((1, b), (0, a)):
        lens.locator("#show label").nth(number).click()
        assert_drawn(thumbnails(lens, a_run()), np.sqrt(weights), tint(lens))
    assert compared_steps(lens) == [40, 120]
    lens.mouse.move(*cell(lens, 8, 3, "#map-b"))
    looking, looked_at, weights = readout(lens)
    assert (looking, looked_at) == ((" river", 8), (" the", 3))
    true = [a[1, 0, 8, 3], b[1, 0, 8, 3], b[1, 0, 8, 3] - a[1, 0, 8, 3]]
    assert weights == pytest.approx(true, abs=2 / 255 + 0.001)
    lens.locator("#compare").select_option("off")
    assert not lens.locator("#map-b").is_visible()
    assert_drawn(thumbnails(lens, a_run()), np.sqrt(b), tint(lens))

    go_to(lens, "step=80&head=0.1&compare=step:0")  # A is the earlier step
    for frame, earlier, later in ((2, 0, 80), (3, 0, 120), (0, 0, 0)):
        lens.locator("#step").fill(str(frame))
        assert compared_steps(lens) == [earlier, later]
        gained = a_run().weights[later][0] - a_run().weights[earlier][0]
        assert_difference(thumbnails(lens, a_run()), gained, tint(lens))
        values = [a_run().rows[step].values["entropy"][0, 1] for step in (earlier, later)]
        assert statistics_of(lens)[STATISTICS["entropy"].title] == " → ".join(map(as_shown, values))
    lens.keyboard.press("d")
    lens.keyboard.press("d")  # a step is not compared with itself
    assert compared_steps(lens) == [0, 120]
    assert state(lens, "frame") == 0


def test_two_runs_are_compared_from_the_start(shown):
    first, second = a_run(), second_run()
    lens = shown(first, second, fragment="#step=80")
    assert state(lens, "compare") == "run"
    difference = second.weights[80][0] - first.weights[80][0]
    assert_difference(thumbnails(lens, first), difference, tint(lens))
    assert compared_steps(lens) == [80, 80]
    assert {"first", "second"} <= set(
        re.findall(r"\w+", lens.locator("#compare-note").inner_text())
    )
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
    # A link restores that the runs are not compared.
    lens.locator("#compare").select_option("off")
    lens.locator("#scale").select_option("linear")
    expect(lens).to_have_url(re.compile("scale=linear"))
    fragment = lens.evaluate("location.hash")
    assert go_to(lens, "step=40")["compare"] == "run"
    assert go_to(lens, fragment.removeprefix("#"))["compare"] == "off"


NOT_OURS = {
    "page": b"<!doctype html><script>parent.hacked = window.hacked = 1</script><p>hello",
    "cut off": (START + '{"version": 1, "runs": [{"name"').encode(),
    "no weights": (START + '{"version": 1, "runs": [{"layers": 1, "heads": 1}]}' + END).encode(),
    "runs null": (START + '{"version": 1, "runs": [null]}' + END).encode(),
    "bytes": b"\xff\xfe\x00\x01",
    "newer": page([second_run().data], "x").replace('"version": 1', '"version": 2').encode(),
}


def open_other(lens, run):
    """Opens another run's page to compare with."""
    lens.locator("#compare-file").set_input_files(as_file(page([run.data], "x").encode()))
    expect(lens.locator("#compare-note")).to_contain_text(run.data["name"])


def test_other_pages_are_opened_to_compare_with(shown):
    lens = shown(fragment="#head=1.1", viewport=TALL)
    first = with_charts(lens)
    before = thumbnails(lens, a_run())
    data = json.loads(json.dumps(second_run().data))
    data["frames"][-1]["weights"] = data["frames"][-1]["weights"][:100]
    messages = []
    for kind, content in {**NOT_OURS, "damaged": page([data], "x").encode()}.items():
        lens.evaluate("document.getElementById('message').textContent = ''")
        lens.locator("#compare-file").set_input_files(as_file(content))
        expect(lens.locator("#message")).not_to_have_text("")
        assert state(lens, "compare") == "off", kind
        messages.append(lens.locator("#message").inner_text())
    assert {"120", "second"} <= set(re.findall(r"\w+", messages.pop()))  # what is damaged
    assert len({tuple(text.split()[:5]) for text in messages}) == 1  # the page's, no exception's
    assert lens.evaluate("window.hacked") is None  # nothing in a page is run
    assert (thumbnails(lens, a_run()) == before).all()

    longer = a_run("longer", history=(*HISTORY, 240), steps=(120,), seed=7)
    for run, end in ((longer, 240), (second_run(), 120)):
        lens.evaluate("() => { window.written = []; }")
        open_other(lens, run)
        difference = run.weights[120][0] - a_run().weights[120][0]
        assert_difference(thumbnails(lens, a_run()), difference, tint(lens))
        chart = Chart(lens, "diagonal")  # as far as the longer of the two goes
        assert chart.steps == sorted([str(end), "0"])
        value = run.rows[120].values["diagonal"]
        x = int(chart.x(120, end))
        for what, place, least in ((1, (1, 1), 200), (0, (0, 0), 30)):  # the chosen one strong
            y = int(chart.y(value[place]))
            near = chart.drawn(what)[y - 3 : y + 4, x - 2 : x + 1]
            blue = near[..., 2] > near[..., 0] + 50
            assert near[blue, 3].max(initial=0) > least, (end, what)
        assert lens.locator("#legend b").inner_text() != ""
    lens.evaluate("() => { window.written = []; }")
    lens.locator("#compare").select_option("off")
    assert Chart(lens, "diagonal").ticks == first["diagonal"].ticks
    assert lens.locator("#legend b").inner_text() == ""


def test_runs_that_differ_are_compared_as_far_as_possible(shown):
    """Prompts are matched by their tokens; maps of different prompts are not subtracted."""
    lens = shown(fragment="#head=0.0")
    smaller = a_run("smaller", 1, 4, (PROMPTS[1], PROMPTS[0]), seed=3)
    open_other(lens, smaller)
    difference = smaller.weights[120][1][0, :3] - a_run().weights[120][0][0]
    found = thumbnails(lens, a_run())
    assert_difference(found[0], difference, tint(lens))
    assert (found[1] == tint(lens)).all()  # B has no such layer
    lens.locator("#prompt").select_option("2")  # which the other run has not
    assert not lens.locator("#map-difference").is_visible()
    assert "→" in statistics_of(lens)[STATISTICS["entropy"].title]

    for name, tokens in (("equally-long", [*WORDS[:-1], " near"]), ("shorter", WORDS[:5])):
        other = a_run(name, prompts=(prompt("1-other", tokens),), seed=5)
        go_to(lens, f"head=0.0&compare=off&for={name}")
        open_other(lens, other)
        a, b = (np.sqrt(run.weights[120][0]) for run in (a_run(), other))
        assert_drawn(thumbnails(lens, a_run()), a, tint(lens))
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
