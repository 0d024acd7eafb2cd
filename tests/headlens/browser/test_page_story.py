"""The interactive page in Chromium: names, the first view, losses, statistics of one prompt."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import STEPS, a_run
from helpers.stories import PLANTED, REPEATED, SOME, a_story, planted, story_run
from playwright.sync_api import expect

from headlens.heads import ALL_NAMES, significances
from headlens.statistics import STATISTICS


@pytest.fixture
def story(shown):
    return lambda fragment="#head=none", **options: shown(a_story(), fragment=fragment, **options)


def tags(lens):
    return lens.locator(".head .tag").all_text_contents()


def legend(lens):
    """Returns the number of heads of each name in the legend."""
    shown = lens.locator("#names button:visible")
    counts = [int(re.findall(r"\d+", text)[0]) for text in shown.all_inner_texts()]
    keys = shown.evaluate_all("all => all.map((button) => button.dataset.name)")
    return dict(zip(keys, counts, strict=True))


def test_statistics_are_means_over_prompts(shown):
    lens, values = shown(fragment="#head=0.2"), a_run().rows[120].values
    uniform = a_run().snapshots[-1].uniform
    found = lens.locator("#values > div").locator("visible=true").all_inner_texts()
    found = dict(text.split("\n") for text in found)
    assert "learned sink" not in found  # the model has none
    for key in STATISTICS.keys() - {"learned_sink"}:
        statistic = STATISTICS[key]
        numbers = re.findall(r"−?\d+\.?\d*", found[statistic.title])
        wanted = [values[key][0, 2]] + [uniform[key]] * (uniform[key] is not None)
        assert [float(n.replace("−", "-")) for n in numbers] == pytest.approx(
            wanted, abs=0.051 if max(wanted) >= 10 else 0.0051
        )
    pages.option(lens, "sort").select_option("significance")
    values = significances(values, uniform)
    assert pages.grid_order(lens) == pages.ranked(np.nanmax(values, axis=0), descending=True)


def test_letters_and_counts_of_names_follow_the_step(shown, story):
    for lens, run in ((shown(), a_run()), (story(), a_story())):
        names = {ALL_NAMES[index] for step in STEPS for index in run.rows[step].names.ravel()}
        ever = names - {"", "uniform"}
        for frame, step in enumerate(STEPS):
            lens.locator("#step").fill(str(frame))
            keys = [ALL_NAMES[index] for index in run.rows[step].names.ravel()]
            shown_keys = [key for key in keys if key not in ("", "uniform")]
            assert [bool(tag) for tag in tags(lens)] == [k not in ("", "uniform") for k in keys]
            counts = legend(lens)  # the same names at all steps
            assert counts.keys() == ever
            assert counts == {key: shown_keys.count(key) for key in ever}
            assert not lens.locator("#no-names").inner_text()
            named = len(shown_keys) or "none"
            expect(lens.locator("#subject")).to_contain_text(f"At step {step}, {named} of 6 heads")
    assert tags(lens) == ["S", "", "P", "", "I", ""]


def test_lines_of_charts_have_the_colour_of_the_shown_name_and_a_label(story):
    lens, key = story(), "previous_token"
    canvas = lens.locator(f".chart[data-statistic='{key}'] canvas").first
    colour = pages.colour_of(pages.tile(lens, 0, 2).locator(".tag"), "backgroundColor")

    def coloured():
        (drawn,) = pages.pixels(canvas)
        is_near = np.abs(drawn[..., :3] - colour).max(-1) < 12
        return (is_near & (drawn[..., 3] > 100)).any(0).sum()

    assert coloured() > 50
    lens.locator("#step").fill("0")  # no head has a name yet
    assert coloured() == 0
    lens.evaluate(pages.WATCH_TEXT)
    lens.locator("#step").fill(str(len(STEPS) - 1))  # draws the lines again
    labels = lambda: {t["text"] for t in lens.evaluate("written") if t["where"] == key}  # noqa: E731
    assert {name for name in labels() if name.startswith("L")} == {
        "L0 H0",
        "L0 H2",
    }  # they end apart
    pages.tile(lens, 1, 0).hover()
    assert "L1 H0" in labels()


def test_filter_by_name_and_since(story):
    lens = story()
    lens.locator("#names [data-name='induction']").click()
    faint = lens.locator(".head.out")
    assert faint.count() == 5
    expect(lens).to_have_url(re.compile("name=induction"))
    again = story(lens.evaluate("location.hash"))
    assert again.locator(".head:not(.out)").get_attribute("aria-label").startswith("layer 1 head 1")
    again.locator("#names [data-name='induction']").click()
    assert again.locator(".head.out").count() == 0
    for (layer, head), (_, since) in PLANTED.items():
        pages.tile(again, layer, head).click()
        assert str(since) in re.findall(r"\d+", again.locator("#finding").inner_text())
        assert again.locator("#detail-name").inner_text()
    pages.tile(again, 1, 0).click()
    assert again.locator("#detail-name").inner_text() == ""


def test_a_name_in_the_legend_opens_the_clearest_head(shown):
    """On its clearest row, also after another prompt was chosen, and if the name is not defined on
    the prompt with which the page opens."""
    stages = {(0, 0): ("separator", 40), (0, 2): ("previous_token", 40), (1, 1): ("induction", 80)}
    made = story_run(stages)
    made.data["opening"] |= {"prompt": 0}
    lens = shown(made, fragment="#head=none")
    for place, (name, _) in stages.items():
        lens.locator(f"#names [data-name='{name}']").click()
        state = lens.evaluate("() => ({ ...lens.state })")
        assert (state["layer"], state["head"]) == place
        assert lens.locator("#names [data-name]").first.get_attribute("title")
    for prompt in (0, 1):
        lens.locator(".head[data-layer='0'][data-head='2']").click()
        lens.locator("#prompt").select_option(str(prompt))
        query, key, _ = pages.readout(lens)
        assert key[1] == query[1] - 1
        maps = planted("previous_token", (SOME, REPEATED)[prompt])
        above = {q: maps[q, q - 1] - 1 / (q + 1) for q in range(2, len(maps))}
        assert query[1] == max(above, key=above.get)


def test_slider_has_a_mark_where_heads_get_their_names(story):
    lens = story()
    box = lens.locator("#step").bounding_box()
    found = {}
    for mark in lens.locator("#marks i").all():
        kind = mark.get_attribute("class").removeprefix("kind-").split()[0]
        assert mark.get_attribute("title")
        found[kind] = (mark.bounding_box()["x"] - box["x"] - 8) / (box["width"] - 16)
    wanted = {"diagonal": 1 / 3, "previous_token": 1 / 3, "induction": 2 / 3, "stage": 2 / 3}
    assert found == pytest.approx(wanted, abs=0.02)  # marks of one step are side by side


def test_page_opens_with_the_head_that_tells_most(story):
    lens, opening = story(""), a_story().data["opening"]
    assert {key: pages.state(lens, key) for key in opening} == opening
    expect(lens.locator("#detail-title")).to_have_text(f"L{opening['layer']} H{opening['head']}")
    assert not lens.locator("#finding button").count()  # its example is shown
    lens.locator("#close").click()
    expect(lens).to_have_url(re.compile("head=none"))
    lens.reload()
    pages.ready(lens)
    assert pages.state(lens, "layer") is None


def test_without_names_the_page_opens_with_the_head_nearest_to_a_name(shown):
    run = story_run({})
    lens = shown(run, fragment="")
    assert pages.state(lens, "layer") is not None
    assert lens.locator("#detail-name").inner_text() == ""
    assert lens.locator("#no-names").is_visible()
    assert lens.locator("#marks i:not(.stage)").count() == 0


def test_sentence_follows_step_and_head(story):
    """And a button shows the prompt and the row of its example."""
    lens, data = story("#head=1.1&prompt=0&step=120"), a_story().data
    of_frames = json.loads(pages.unpacked(data["heads_at"]))
    for frame, heads in zip(range(3, -1, -1), of_frames[::-1], strict=True):
        lens.locator("#step").fill(str(frame))
        facts = json.loads(pages.unpacked(data["frames"][frame]["details"]))["heads"]
        for index in (4, 0, 1, 2):
            pages.tile(lens, *divmod(index, 3)).click()
            text = lens.locator("#finding").inner_text()
            assert text.startswith(heads["findings"][index])
            for part in facts["findings"][index]:
                assert (part if isinstance(part, str) else part[1].replace(" ", "␣")) in text
    pages.go_to(lens, "head=1.1&prompt=0&step=120")
    lens.locator("#finding button").click()
    assert (pages.state(lens, "prompt"), pages.state(lens, "query")) == (1, 9)
    assert lens.locator("#finding button").count() == 0


def test_narrow_window_shows_the_grid_first(story):
    lens = story("", viewport={"width": 460, "height": 900})
    assert pages.state(lens, "layer") is not None
    assert lens.evaluate("scrollY") == 0
    assert lens.locator("#grid").bounding_box()["y"] < 400
    assert pages.state(story("", frame=(460, 400)), "layer") is None


def test_losses_under_the_slider(story, shown):
    lens = story("#head=none&step=80")
    values = {
        name: float(lens.locator(f"[data-curve='{name}'] b").inner_text())
        for name in ("training loss", "validation accuracy")
    }
    wanted = {"training loss": 3 - 80 / 60, "validation accuracy": 0.25}
    assert values == pytest.approx(wanted, abs=0.0051)
    box = lens.locator("#losses").bounding_box()
    lens.mouse.move(box["x"] + 0.33 * box["width"], box["y"] + 10)
    lens.mouse.down()
    assert pages.state(lens, "frame") == 1
    lens.mouse.move(box["x"] + box["width"] - 2, box["y"] + 10)
    assert pages.state(lens, "frame") == 3
    lens.mouse.up()
    (drawn,) = pages.pixels(lens.locator("#losses"))
    assert len(np.unique(drawn[drawn[..., 3] == 255][:, :3], axis=0)) >= 3  # curves and the step
    data = a_run().data
    data = data | {"curves": {}}
    without = shown(dataclasses.replace(a_run(), data=data))
    assert without.locator("#step").is_visible()
    heights = [part.locator("#bar").bounding_box()["height"] for part in (lens, without)]
    assert heights[0] > heights[1] + 40  # no empty strip
    one = shown(story_run(PLANTED, steps=(120,)), fragment="#head=1.1")
    assert "120" not in one.locator("#finding").inner_text()  # one snapshot: since when is unknown
    assert not one.locator("#losses").is_visible()
