"""The interactive page in Chromium: heatmaps, charts, statistics and comparisons."""

import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import PROMPTS, STEPS, WORDS, a_run
from playwright.sync_api import expect

from headlens.prompts import labels_of
from headlens.rounding import formatted
from headlens.statistics import STATISTICS

MEASURED = {key: of for key, of in STATISTICS.items() if key != "learned_sink"}  # it has none

TALL = {"width": 1280, "height": 1500}  # large enough for the grid and all charts


def test_heatmaps_show_the_weights_of_every_prompt_and_step(shown):
    lens, run = shown(fragment="#head=0.2"), a_run()
    pages.assert_weights(lens, run)
    for number, weights in enumerate(run.weights[120]):
        lens.locator("#prompt").select_option(str(number))
        pages.assert_drawn(lens, np.sqrt(weights))
    pages.go_to(lens, "head=0.2")
    for frame, step in reversed(list(enumerate(STEPS))):
        lens.locator("#step").fill(str(frame))
        assert re.findall(r"\d+", lens.locator("#step-number").inner_text()) == [str(step)]
        pages.assert_drawn(lens, np.sqrt(run.weights[step][0]))
        value = formatted(run.rows[step].values["induction"][0, 2])
        assert pages.tile(lens, 0, 2).get_attribute("aria-label").endswith(f" {value}")
        assert pages.statistics_of(lens)[STATISTICS["induction"].title] == value


def test_theme_of_the_system_and_chosen_theme(shown):
    """The theme of the system first, then the selected theme."""
    lens = shown(color_scheme="dark")
    for theme in ("dark", "light"):
        expect(lens.locator("html")).to_have_attribute("data-theme", theme)
        assert (max(pages.tint(lens)) < 60) == (theme == "dark")
        pages.assert_drawn(lens, np.sqrt(a_run().weights[120][0]))
        pages.option(lens, "theme").click()


def test_enlarged_head_shows_its_tokens_weights_and_statistics(shown):
    """Tokens on both axes, the weight under the pointer, and the shaded text."""
    lens = shown(viewport={"width": 1280, "height": 1000})
    pages.tile(lens, 1, 2).click()
    assert lens.locator("#detail-title").inner_text() == "L1 H2"
    pages.tile(lens, 1, 1).focus()
    lens.keyboard.press("Enter")
    assert lens.locator("#detail-title").inner_text() == "L1 H1"
    weights = a_run().weights[120][0][1, 1]
    pages.assert_drawn(lens, np.sqrt(weights), "#map")
    true = a_run().rows[120].values
    expected = {s.title: formatted(true[key][1, 1]) for key, s in MEASURED.items()}
    assert pages.statistics_of(lens) == expected

    lens.evaluate(pages.WATCH_TEXT)
    lens.mouse.move(*pages.cell(lens, 8, 3))
    found = [text for text in lens.evaluate("window.written") if text["where"] == "map"]
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

    for query, key in ((8, 3), (11, 0), (5, 5)):
        lens.mouse.move(*pages.cell(lens, query, key))
        found_query, found_key, (weight,) = pages.readout(lens)
        assert found_query == (WORDS[query], query)
        assert found_key == (WORDS[key], key)
        assert weight == pytest.approx(weights[query, key], abs=0.01)

    tokens = lens.locator("#text [data-token]")
    assert lens.locator("#prose").text_content() == "".join(WORDS).replace("\n", "⏎\n")
    tokens.nth(6).click()
    assert pages.state(lens, "query") == 6


def test_character_split_over_tokens_is_joined_in_the_text(shown):
    parts = ["<0x20><0xF0><0x9F>", "<0x98>", "<0x80>"]
    thai = ["<0xE0><0xB8>", "<0x97><0xE0><0xB8><0xB5>"]  # a letter with a mark
    tokens = ["Hi", *parts, "<0xE2>", "<0xC3>", "<0xA9>", "<0x41>", *thai, "<0xE2>"]
    run = a_run("split", 1, 1, (pages.prompt("1-hi", tokens),), (0,), (0,))
    lens = shown(run, fragment="#head=0.0")
    assert lens.locator("#prose").text_content() == "Hi 😀<0xE2>é<0x41>ที<0xE2>"
    for number, label in enumerate(labels_of(tokens)):  # each has a place under the pointer
        shown_token = lens.locator(f"#text [data-token='{number}']")
        shown_token.hover()
        assert shown_token.get_attribute("title").split("\n")[0] == label
        assert pages.readout(lens)[0] == (label.replace("␣", " "), number)


def test_play_goes_through_the_steps_and_stops_at_the_end(shown):
    # Options that no other test uses, so that this window is not shared: its clock is stopped.
    lens = shown(fragment="#step=40", timezone_id="Etc/GMT+5")
    lens.clock.install(time=0)
    lens.clock.pause_at(1000)  # now time passes only in run_for
    play = lens.locator("#play")
    label = play.get_attribute("aria-label")
    play.click()
    lens.clock.run_for(500)
    assert pages.state(lens, "frame") == 2
    play.click()
    lens.clock.run_for(5000)
    assert pages.state(lens, "frame") == 2
    lens.locator("#step").fill("3")
    play.click()  # at the last step, play restarts at the first step
    for frame in (0, 1, 2, 3):
        assert pages.state(lens, "frame") == frame
        assert (play.get_attribute("aria-label") == label) == (frame == 3)
        lens.clock.run_for(334)


def test_one_step_without_a_repeated_prompt(shown):
    """No time controls, nothing to compare with, statistics that are undefined on all prompts."""
    run = a_run(prompts=PROMPTS[:2], steps=(40,), history=(40,))
    lens = shown(run, fragment="#head=0.0")
    assert re.findall(r"\d+", lens.locator("#step-number").inner_text()) == ["40"]
    for control in ("#step", "#play"):
        assert not lens.locator(control).is_visible()
    lens.keyboard.press("d")
    expect(lens.locator("#message")).not_to_have_text("")
    assert pages.state(lens, "compare") == "off"
    shown_charts = lens.locator(".chart").evaluate_all("all => all.map((c) => c.dataset.statistic)")
    assert set(MEASURED) - set(shown_charts) >= {"induction", "duplicate_token"}
    assert {"entropy", "largest_logit"} <= set(shown_charts)
    canvas = lens.locator(".chart[data-statistic='entropy'] canvas").first
    box = canvas.bounding_box()
    for layer, part in ((0, 0.3), (1, 0.8)):  # with one step, the x axis is the layer
        canvas.hover(position={"x": part * box["width"], "y": box["height"] / 2})
        said = lens.locator(".chart[data-statistic='entropy'] .value").inner_text()
        assert said.startswith(f"L{layer} ")


def test_many_heads_in_a_row_and_steps_of_seven_digits_leave_room_for_an_enlarged_head(shown):
    steps = (0, 1_234_560)
    run = a_run(layers=2, heads=24, prompts=PROMPTS[:1], steps=steps, history=steps)
    for width in (900, 1400):
        lens = shown(run, fragment="#head=1.1", viewport={"width": width, "height": 800})
        expect(lens.locator("#step-number")).to_have_text("step 1,234,560")
        assert lens.locator("#detail").bounding_box()["width"] >= 330
        assert lens.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_sorting(shown):
    lens = shown(fragment="#step=80")
    for key in MEASURED:
        values = a_run().rows[80].values[key]
        pages.option(lens, "sort").select_option(key)
        assert pages.grid_order(lens) == pages.ranked(values, descending=True), key
        pages.option(lens, "direction").click()
        assert pages.grid_order(lens) == pages.ranked(values, descending=False), key
        pages.option(lens, "direction").click()
    lens.locator("#step").fill("3")  # sorted by the values of the shown step
    assert pages.grid_order(lens) == pages.ranked(a_run().rows[120].values[key], descending=True)


def test_charts_say_the_value_of_the_chosen_head_and_of_the_head_under_the_pointer(shown):
    lens, run = shown(fragment="#step=80", viewport=TALL), a_run()
    said = {key: lens.locator(f".chart[data-statistic='{key}'] .value") for key in MEASURED}
    pages.tile(lens, 1, 1).click()
    for key in MEASURED:
        assert said[key].inner_text() == f"L1 H1 {formatted(run.rows[80].values[key][1, 1])}"
    canvas = lens.locator(".chart[data-statistic='diagonal'] canvas").first
    (drawn,) = pages.pixels(lens.locator(".chart[data-statistic='diagonal'] canvas").last)
    red = (drawn[..., 0] > drawn[..., 1] + 50) & (drawn[..., 3] > 200)
    assert red.any(0).sum() > 0.5 * drawn.shape[1]  # the selected head is a line over all steps
    box = canvas.bounding_box()
    left, right = 32, box["width"] - 50  # of the first and the last step
    for step in (0, 60, 120):
        values = run.rows[step].values["diagonal"]
        for y, best in ((7, values.argmax()), (box["height"] - 17, values.argmin())):
            canvas.hover(position={"x": left + (right - left) * step / 120, "y": y})
            place = divmod(int(best), 3)
            numbers = re.findall(r"[\d.]+", said["diagonal"].inner_text())
            assert numbers == [*map(str, place), str(step), formatted(values[place])]
    pages.go_to(lens, "")
    pages.tile(lens, 0, 2).hover()
    values = {key: formatted(run.rows[120].values[key][0, 2]) for key in MEASURED}
    texts = pages.tile(lens, 0, 2).get_attribute("title").split("\n")
    found = [text.partition(", chance")[0] for text in texts]
    assert found[0].startswith("L0 H2 ")  # the sentence about its name
    assert found[1:] == [f"{STATISTICS[key].title} {values[key]}" for key in values]


def compared_steps(lens):
    """Returns the steps of A and B."""
    note = lens.locator("#compare-note").inner_text()
    return [int(step) for step in re.findall(r"[AB]: step (\d+)", note)]


def test_two_steps_are_compared(shown):
    lens = shown(fragment="#head=1.0")
    pages.option(lens, "compare").select_option("step:40")
    a, b = a_run().weights[40][0], a_run().weights[120][0]
    pages.assert_difference(lens, b - a)
    pages.assert_difference(lens, (b - a)[1, 0], "#map")
    pages.assert_drawn(lens, np.sqrt(a[1, 0]), "#map-2")
    pages.assert_drawn(lens, np.sqrt(b[1, 0]), "#map-3")
    for number, weights, other in ((1, b, a), (0, a, b)):
        lens.locator("#show label").nth(number).click()
        pages.assert_drawn(lens, np.sqrt(weights))
        pages.assert_drawn(lens, np.sqrt(weights[1, 0]), "#map")
        pages.assert_drawn(lens, np.sqrt(other[1, 0]), "#map-2")
        pages.assert_difference(lens, (b - a)[1, 0], "#map-3")
    assert compared_steps(lens) == [40, 120]
    lens.locator("#map-3").scroll_into_view_if_needed()
    lens.mouse.move(*pages.cell(lens, 8, 3, "#map-3"))
    query, key, weights = pages.readout(lens)
    assert (query, key) == ((" river", 8), (" the", 3))
    true = [a[1, 0, 8, 3], b[1, 0, 8, 3], b[1, 0, 8, 3] - a[1, 0, 8, 3]]
    assert weights == pytest.approx(true, abs=0.02)

    pages.go_to(lens, "step=80&head=0.1&compare=step:0")  # A is the earlier step
    for frame, earlier, later in ((2, 0, 80), (3, 0, 120), (0, 0, 0)):
        lens.locator("#step").fill(str(frame))
        assert compared_steps(lens) == [earlier, later]
        gained = a_run().weights[later][0] - a_run().weights[earlier][0]
        pages.assert_difference(lens, gained)
        values = [a_run().rows[step].values["entropy"][0, 1] for step in (earlier, later)]
        wanted = " → ".join(map(formatted, values))
        assert pages.statistics_of(lens)[STATISTICS["entropy"].title] == wanted


def test_two_runs_are_compared_from_the_start(shown):
    first, second = a_run(), pages.second_run()
    lens = shown(first, second, fragment="#step=80")
    assert pages.state(lens, "compare") == "run"
    pages.assert_difference(lens, second.weights[80][0] - first.weights[80][0])
    assert compared_steps(lens) == [80, 80]
    values = second.rows[80].values["diagonal"] - first.rows[80].values["diagonal"]
    pages.option(lens, "sort").select_option("diagonal")
    assert pages.grid_order(lens) == pages.ranked(values, descending=True)
    pages.option(lens, "sort").select_option("")
    pages.option(lens, "compare").select_option("run:0")
    pages.assert_weights(lens, second, number=1)
    pages.assert_difference(lens, second.weights[0][0] - first.weights[80][0])


def test_runs_that_differ_are_compared_as_far_as_possible(shown):
    """Prompts are matched by their tokens. Heatmaps of different tokens are not subtracted."""
    smaller = a_run("smaller", 1, 4, (PROMPTS[1], PROMPTS[0]), seed=3)
    lens = shown(a_run(), smaller, fragment="#head=0.0")
    difference = smaller.weights[120][1][0, :3] - a_run().weights[120][0][0]
    pages.assert_difference(lens, difference, "[data-layer='0'] canvas")
    missing = pages.colours(lens, "[data-layer='1'] canvas", difference.shape)
    assert (missing == pages.tint(lens)).all()  # B has no such layer
    lens.locator("#prompt").select_option("2")  # the other run does not have this prompt
    assert not lens.locator("#map-2").is_visible()
    assert "→" in pages.statistics_of(lens)[STATISTICS["entropy"].title]

    for name, tokens in (("equally-long", [*WORDS[:-1], " near"]), ("shorter", WORDS[:5])):
        other = a_run(name, prompts=(pages.prompt("1-other", tokens),), seed=5)
        lens = shown(a_run(), other, fragment="#head=0.0")
        a, b = (np.sqrt(run.weights[120][0]) for run in (a_run(), other))
        pages.assert_drawn(lens, a)
        assert not lens.locator("#map-2").is_visible()
        lens.locator("#show label").nth(1).click()
        pages.assert_drawn(lens, b)
