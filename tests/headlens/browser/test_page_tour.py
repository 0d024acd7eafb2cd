"""The guided tour of the page in Chromium: its stops, its numbers and its links."""

import functools
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import STEPS
from helpers.stories import PERIOD, PLANTED, REPEATED, SOME, a_story, planted, story_run
from playwright.sync_api import expect

from headlens.recording import uniform_of
from headlens.statistics import STATISTICS

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


def test_stops_of_the_tour_about_copying(shown):
    lens = shown(a_copying_run(), fragment="")
    lens.locator("#show-tour").click()
    assert has(numbers(lens), PERIOD, 40, copy_loss(40, 2))
    assert view(lens) == ((None, None), 1, 1, QUERY)
    found, frames = [numbers(lens)], [1]
    stops = [(INDUCTION, 1, QUERY), (PREVIOUS, 1, KEY), (INDUCTION, 2, QUERY)]
    stops += [(INDUCTION, 3, QUERY), (PREVIOUS, 3, KEY)]
    for place, frame, query in stops:
        lens.locator("#tour-next").click()
        assert view(lens) == (place, frame, 1, query)
        found.append(numbers(lens))
        frames.append(pages.state(lens, "frame"))
        assert lens.locator("#map").get_attribute("aria-label")
    assert frames == sorted(frames)  # the order of the steps
    means = {name: planted(name, REPEATED) for name in ("previous_token", "induction")}
    previous = np.mean([means["previous_token"][q, q - 1] for q in range(1, 2 * PERIOD + 1)])
    assert has(found[1], a_story().frames[40].of_prompts[1]["induction"][INDUCTION])
    assert has(found[2], previous, 40, KEY)
    assert has(found[3], 80, means["induction"][QUERY, KEY], copy_loss(40, 2), copy_loss(80, 2))
    chances = [np.exp(-a_story().frames[step].row.losses[1][QUERY]) for step in (40, 120)]
    assert has(found[4], 40, 120, chances[0], 0.99)  # more than this
    assert chances[1] > 0.99
    assert found[5] == [0.98, 0, 2, 0.03, 3, 0.01, 0, 0, 0.06]  # all, L0 H2, all 3, L0 H0
    lens.locator("#tour-next").click()
    assert not lens.locator("#tour").is_visible()


@pytest.mark.parametrize("previous_from", [0, 40, 80, 120])
def test_steps_of_the_tour_increase(shown, previous_from):
    """Also if the previous-token head gets its name before or after the induction head: it has its
    name at the step that shows it."""
    lens = shown(a_copying_run(previous_from=previous_from), fragment="#tour=1")
    frames = []
    for number in range(1, 7):
        pages.go_to(lens, f"tour={number}")
        expect(lens.locator("#tour-title")).to_contain_text(f"{number}")
        frames.append(pages.state(lens, "frame"))
        if number == 3:
            assert lens.locator("#detail-name").inner_text()
    assert frames == sorted(frames)
    assert frames[2] == max(1, STEPS.index(previous_from))


def test_tour_of_a_run_without_copying(shown):
    """Three stops: one row, one head, and both ends of the training."""
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
    basic = story_run({PREVIOUS: ("previous_token", 40)})
    one_step = story_run(PLANTED, steps=(120,))
    cases = [([basic], 4), ([one_step], 1), ([one_step], 4), ([a_copying_run(), basic], 1)]
    cases.append(([a_copying_run("estimate")], 6))
    cases.append(([pages.a_run("short", prompts=(pages.prompt("1-a", ["a", "b"]),))], 1))
    texts = set()
    for runs, number in cases:
        lens = shown(*runs, fragment=f"#tour={number}")
        assert not lens.locator("#tour").is_visible()
        assert lens.locator("#message").is_visible()
        assert (pages.state(lens, "layer") is None) == (len(runs) == 2)
        texts.add(lens.locator("#message").inner_text())
    assert len(texts) == 5  # one step: the same text for both stops
    lens = shown(basic, fragment="#tour=2")
    expect(lens.locator("#tour-title")).to_contain_text("2")
    assert pages.go_to(lens, "tour=4")["tour"] == 0
    assert lens.locator("#message").is_visible()
    for fragment in ("#tour=0", "#tour=x", "#head=0.1"):
        assert shown(basic, fragment=fragment).locator("#message").is_hidden()


def test_link_and_keys_of_the_tour(shown):
    lens = shown(a_copying_run(), fragment="#tour=2")
    expect(lens.locator("#tour")).to_be_visible()
    assert view(lens) == (INDUCTION, 1, 1, QUERY)
    lens.locator("#tour-next").focus()
    lens.keyboard.press("ArrowRight")
    expect(lens).to_have_url(re.compile("tour=3"))
    lens.keyboard.press("ArrowLeft")
    assert pages.state(lens, "tour") == 2
    lens.keyboard.press("Escape")
    assert not lens.locator("#tour").is_visible()
    assert view(lens)[0] == INDUCTION  # the view stays
    expect(lens).to_have_url(re.compile("head=1.1"))
    assert pages.go_to(lens, "tour=99")["tour"] == 0


def test_outline_and_copies(shown):
    """The outline of a stop is on the diagonal of the stripe; outside the tour there is none."""
    lens = shown(a_copying_run(), fragment="#tour=2")
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
    for run in (story_run(PLANTED, steps=(120,)), pages.a_run(steps=(120,))):
        lens = shown(run)
        assert not lens.locator("#show-tour").locator("visible=true").count()
        assert not lens.locator("#tour").is_visible()
    lens = shown(a_copying_run("estimate"), fragment="#tour=5")
    expect(lens.locator("#tour")).to_be_visible()
    lens.locator("#tour-next").click()
    assert not lens.locator("#tour").is_visible()  # no stop about removed heads
