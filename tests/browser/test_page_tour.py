"""The guided tour of the page in Chromium: its stops, its numbers and its links."""

import functools
import re

import numpy as np
import pytest
from browser.test_page_story import PERIOD, PLANTED, REPEATED, SOME, a_story, planted, story_run
from helpers import pages
from playwright.sync_api import expect

from clearhead.lens.probe import uniform_values

QUERY = 9  # the planted heads are clearest there
KEY = QUERY - PERIOD + 1
INDUCTION, PREVIOUS = (1, 1), (0, 2)


def removed(place, change, accuracy):
    names = ("loss_change", "loss_change_error", "accuracy_without")
    return {**place, **dict(zip(names, (change, 0.01, accuracy), strict=True))}


ABLATION = {
    "step": 120,
    "method": "exact",
    "windows": 32,
    "targets": 1024,
    "loss": 0.01,
    "accuracy": 0.98,
    "heads": [
        removed({"layer": 0, "head": 0}, 4.29, 0.06),
        removed({"layer": 0, "head": 1}, 0.0, 0.98),
        removed({"layer": 0, "head": 2}, 5.04, 0.03),
        removed({"layer": 1, "head": 1}, 0.31, 0.81),
    ],
    "groups": [removed({"name": "induction", "heads": 3}, 5.72, 0.01)],
}


@functools.cache
def a_copying_run(method="exact", previous_from=40):
    story = story_run(PLANTED | {PREVIOUS: ("previous_token", previous_from)})
    data = story.data | {"ablation": ABLATION | {"method": method}}
    return pages.PageRun(data, {}, story.rows, {}, [])


def numbers(lens):
    text = lens.locator("#tour-text").inner_text()
    return [float(n.replace("−", "-")) for n in re.findall(r"−?\d+\.?\d*", text)]


def has(found, *wanted):
    return all(min(abs(n - value) for n in found) < 0.0051 for value in wanted)


def copy_loss(step, copy):
    losses = a_story().frames[step].row.losses[1]
    first = PERIOD + 1 if copy == 2 else 1
    return losses[first : first + PERIOD - 1].mean()


def view(lens):
    state = lens.evaluate("() => ({ ...lens.state })")
    return (state["layer"], state["head"]), state["frame"], state["prompt"], state["query"]


def test_stops_of_the_tour(shown):
    lens = shown(a_copying_run(), fragment="")
    lens.locator("#offer-tour").click()
    assert has(numbers(lens), PERIOD, copy_loss(120, 1), copy_loss(120, 2))
    assert view(lens)[0] == (None, None)
    found = [numbers(lens)]
    stops = [(PREVIOUS, 3, KEY), (INDUCTION, 1, QUERY), (INDUCTION, 3, QUERY)]
    stops += [(INDUCTION, 3, QUERY), (PREVIOUS, 3, KEY)]
    for place, frame, query in stops:
        lens.locator("#tour-next").click()
        assert view(lens) == (place, frame, 1, query)
        found.append(numbers(lens))
        assert lens.locator("#map").get_attribute("aria-label")
    means = {name: planted(name, REPEATED) for name in ("previous_token", "induction")}
    previous = np.mean([means["previous_token"][q, q - 1] for q in range(1, 2 * PERIOD + 1)])
    assert has(found[1], previous, 40, KEY)
    frame = a_story().frames[40].of_prompts[1]["induction"][INDUCTION]
    assert has(found[2], frame, copy_loss(40, 1), copy_loss(40, 2))
    assert has(found[3], 80, means["induction"][QUERY, KEY], copy_loss(40, 2), copy_loss(120, 2))
    chances = [np.exp(-a_story().frames[step].row.losses[1][QUERY]) for step in (40, 120)]
    assert has(found[4], 40, 120, *chances)
    assert has(found[5], 0.98, 0.03, 5.04, 0.06, 4.29, 0.81, 0.31, 0.01, 5.72)
    assert lens.locator("#tour li").count() == 4  # not the head without an effect
    lens.locator("#tour-next").click()
    assert not lens.locator("#tour").is_visible()


def test_previous_token_head_that_gets_its_name_last(shown):
    """The tour gives its weight at the step at which the induction head got its name."""
    run = a_copying_run(previous_from=120)
    lens = shown(run, fragment="#tour=2")
    expect(lens.locator("#tour")).to_be_visible()
    value = run.rows[80].values["previous_token"][PREVIOUS]
    uniform = uniform_values([SOME, REPEATED])["previous_token"]
    wanted = [120, 80, value, uniform]  # after the weight at the last step
    assert numbers(lens)[-4:] == pytest.approx(wanted, abs=0.0051)


def test_link_and_keys_of_the_tour(shown):
    lens = shown(a_copying_run(), fragment="#tour=3")
    expect(lens.locator("#tour")).to_be_visible()
    assert view(lens) == (INDUCTION, 1, 1, QUERY)
    lens.locator("#tour-next").focus()
    lens.keyboard.press("ArrowRight")
    expect(lens).to_have_url(re.compile("tour=4"))
    lens.keyboard.press("ArrowLeft")
    lens.keyboard.press("ArrowLeft")
    assert pages.state(lens, "tour") == 2
    lens.keyboard.press("Escape")
    assert not lens.locator("#tour").is_visible()
    assert view(lens)[0] == PREVIOUS  # the view stays
    expect(lens).to_have_url(re.compile("head=0.2"))
    assert pages.go_to(lens, "tour=99")["tour"] == 0


def test_outline_and_copies(shown):
    """The outline of a stop is on the diagonal of the stripe; outside the tour there is none."""
    lens = shown(a_copying_run(), fragment="#tour=3")
    expect(lens.locator("#tour")).to_be_visible()

    def pink():
        (drawn,) = pages.pixels(lens.locator("#map ~ .marks"))
        return np.argwhere(np.abs(drawn[..., :3] - [255, 95, 162]).max(-1) < 8)

    found = pink().mean(0)
    box, marks = (lens.locator(f"#map{more}").bounding_box() for more in ("", " ~ .marks"))
    cell = box["width"] / (2 * PERIOD + 1)
    wanted = [box["y"] - marks["y"] + 9.5 * cell + 0.5 * cell]
    wanted += [box["x"] - marks["x"] + 4.5 * cell + 0.5 * cell]
    assert found == pytest.approx(wanted, abs=0.3 * cell)
    lens.locator("#tour-end").click()
    assert not len(pink())
    copies = lens.locator("#text [data-copy]")
    assert [int(n) for n in copies.evaluate_all("all => all.map((n) => n.dataset.token)")] == [
        1,
        PERIOD + 1,
    ]


@pytest.mark.parametrize("width", [460, 1280])
def test_panel_does_not_cover_what_it_points_to(shown, width):
    lens = shown(a_copying_run(), viewport={"width": width, "height": 900})
    for number in range(1, 6):
        pages.go_to(lens, f"tour={number}")
        expect(lens.locator("#tour-title")).to_contain_text(f"{number}")
        panel = lens.locator("#tour").bounding_box()
        pointed = lens.locator(".pointed").first.bounding_box()
        assert panel["y"] + panel["height"] <= 901
        assert pointed["y"] < panel["y"]
        assert panel["width"] <= width


def test_no_tour_without_its_data(shown):
    for run in (None, story_run({(0, 2): ("previous_token", 40)})):
        lens = shown(*[run] * bool(run), fragment="#tour=2")
        assert not lens.locator("#show-tour, #offer-tour").locator("visible=true").count()
        assert not lens.locator("#tour").is_visible()
    lens = shown(a_copying_run("estimate"), fragment="#tour=5")
    expect(lens.locator("#tour")).to_be_visible()
    lens.locator("#tour-next").click()
    assert not lens.locator("#tour").is_visible()  # no stop about removed heads
