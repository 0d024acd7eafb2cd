"""The guided tour of the page in Chromium: its stops, its numbers and its links."""

import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import STEPS
from helpers.stories import PERIOD, PLANTED, REPEATED, SOME, planted, story_run
from playwright.sync_api import expect

from headlens.recording import uniform_of
from headlens.statistics import STATISTICS

INDUCTION, PREVIOUS = (1, 1), (0, 2)
BOTH = {PREVIOUS: ("previous_token", 40), INDUCTION: ("induction", 80)}


def numbers(lens):
    text = lens.locator("#tour-text").inner_text()
    return [float(n.replace("−", "-")) for n in re.findall(r"−?\d+\.?\d*", text)]


def has(found, *wanted):
    return all(min(abs(n - value) for n in found) < 0.0051 for value in wanted)


def view(lens):
    state = lens.evaluate("() => ({ ...lens.state })")
    return (state["layer"], state["head"]), state["frame"], state["prompt"], state["query"]


def test_tour_shows_one_row_one_head_and_both_ends(shown):
    """One row, one head, and both ends of the training."""
    run = story_run({PREVIOUS: ("previous_token", 40)})
    lens = shown(run, fragment="")
    lens.locator("#show-tour").click()
    place, frame, prompt, query = view(lens)
    assert (place, frame) == (PREVIOUS, 3)
    weights = planted("previous_token", (SOME, REPEATED)[prompt])
    assert has(numbers(lens), query, float(weights[query, query - 1]), query - 1)
    lens.locator("#tour-next").click()
    assert view(lens) == (place, frame, prompt, query)
    at = [run.frames[step].of_prompts[prompt]["previous_token"][PREVIOUS] for step in (0, 120)]
    uniform = uniform_of([(SOME, REPEATED)[prompt]])["previous_token"]
    assert has(numbers(lens), at[1], uniform)
    lens.locator("#tour-next").click()
    assert view(lens) == (place, frame, prompt, query)
    assert lens.locator("#map-2").is_visible()
    assert pages.state(lens, "compare") == "step:0"
    assert has(numbers(lens), *at, 1)  # one head has got a name
    lens.locator("#tour-next").click()
    assert not lens.locator("#tour").is_visible()


def test_tour_shows_a_head_of_each_name(shown):
    """And ends with the view before it."""
    heads = {(0, 0): "separator", (0, 2): "previous_token", (1, 0): "segment_start"}
    run = story_run({place: (name, 40) for place, name in heads.items()})
    lens = shown(run, fragment="#head=1.2&prompt=0&step=40")
    before = view(lens)
    lens.locator("#show-tour").click()
    found = []
    for _ in heads:
        lens.locator("#tour-next").click()
        place, frame, prompt, query = view(lens)
        found.append(place)
        assert frame == 3
        assert (
            STATISTICS[heads[place]].title.replace(" ", "-") in lens.locator("#tour").inner_text()
        )
        assert run.frames[120].of_prompts[prompt][heads[place]][place] > 0.5
        assert query is not None
    assert sorted(found) == sorted(heads)
    lens.locator("#tour-next").click()
    assert pages.state(lens, "compare") == "step:0"
    lens.locator("#tour-next").click()
    assert view(lens) == before
    assert pages.state(lens, "compare") == "off"


def test_tour_of_a_run_without_named_heads(shown):
    lens = shown(story_run({}, STEPS[-2:]), fragment="#tour=3")
    expect(lens.locator("#tour")).to_be_visible()
    assert pages.state(lens, "compare") == f"step:{STEPS[-2]}"


def test_link_to_a_stop_that_the_tour_does_not_have(shown):
    """A message says so, and the page opens as without a link."""
    one_head, one_step = story_run({PREVIOUS: ("previous_token", 40)}), story_run(PLANTED, (120,))
    short = pages.a_run("short", prompts=(pages.prompt("1-a", ["a", "b"]),))
    for runs, number in (([one_head], 4), ([one_step], 1), ([one_head, one_step], 1), ([short], 1)):
        lens = shown(*runs, fragment=f"#tour={number}")
        assert not lens.locator("#tour").is_visible()
        assert lens.locator("#message").is_visible()
        assert (pages.state(lens, "layer") is None) == (len(runs) == 2)
        has_tour = lens.locator("#show-tour").locator("visible=true").count()
        assert has_tour == (runs == [one_head])
    lens = shown(one_head, fragment="#tour=2")
    expect(lens.locator("#tour-title")).to_contain_text("2")
    assert pages.go_to(lens, "tour=4")["tour"] == 0
    assert lens.locator("#message").is_visible()
    for fragment in ("#tour=0", "#tour=x", "#head=0.1"):
        assert shown(one_head, fragment=fragment).locator("#message").is_hidden()


def test_link_and_keys_of_the_tour(shown):
    lens = shown(story_run(BOTH), fragment="#tour=2")
    expect(lens.locator("#tour")).to_be_visible()
    place, *_ = view(lens)
    lens.locator("#tour-next").focus()
    lens.keyboard.press("ArrowRight")
    expect(lens).to_have_url(re.compile("tour=3"))
    lens.keyboard.press("ArrowLeft")
    assert (pages.state(lens, "tour"), view(lens)[0]) == (2, place)
    lens.keyboard.press("Escape")
    assert not lens.locator("#tour").is_visible()
    assert view(lens)[0] == place  # the view stays
    expect(lens).to_have_url(re.compile(f"head={place[0]}.{place[1]}"))


def test_tour_outlines_the_stripe_of_a_head(shown):
    """The outline of a stop is on the stripe of the head; outside the tour there is none."""
    lens = shown(story_run({INDUCTION: ("induction", 80)}), fragment="#tour=2")
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
    read = "all => all.map((n) => n.dataset.token)"
    copies = lens.locator("#text [data-copy]").evaluate_all(read)
    assert [int(n) for n in copies] == [1, PERIOD + 1]


@pytest.mark.parametrize("width", [460, 1280])
def test_panel_does_not_cover_what_it_points_to(shown, width):
    lens = shown(story_run(BOTH), viewport={"width": width, "height": 900})
    for number in range(1, 5):
        pages.go_to(lens, f"tour={number}")
        expect(lens.locator("#tour-title")).to_contain_text(f"{number}")
        panel = lens.locator("#tour").bounding_box()
        pointed = lens.locator(".pointed").first.bounding_box()
        assert panel["y"] + panel["height"] <= 901
        assert pointed["y"] < panel["y"]
        assert panel["width"] <= width
