"""The interactive page in Chromium: names, the first view, losses, statistics of one prompt."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import PROMPTS, STEPS, a_run
from helpers.stories import PERIOD, PLANTED, REPEATED, SOME, a_story, planted, story_run
from playwright.sync_api import expect

from headlens.heads import ALL_NAMES, significances
from headlens.recording import uniform_of
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


def test_statistics_of_the_shown_prompt_and_the_mean(shown):
    lens, run = shown(fragment="#head=0.2"), a_run()
    for over in ("prompt", "mean"):
        pages.option(lens, "over").select_option(over)
        for number, prompt in enumerate(PROMPTS):
            lens.locator("#prompt").select_option(str(number))
            values = run.rows[120].values if over == "mean" else run.frames[120].of_prompts[number]
            uniform = uniform_of(PROMPTS if over == "mean" else [prompt])
            found = lens.locator("#values > div").locator("visible=true").all_inner_texts()
            found = dict(text.split("\n") for text in found)
            for key, statistic in STATISTICS.items():
                if key == "positional":  # compares prompts
                    continue
                if np.isnan(values[key][0, 2]):
                    assert statistic.title not in found, (over, prompt.name, key)
                    continue
                numbers = re.findall(r"−?\d+\.?\d*", found[statistic.title])
                wanted = [values[key][0, 2]] + [uniform[key]] * (uniform[key] is not None)
                assert [float(n.replace("−", "-")) for n in numbers] == pytest.approx(
                    wanted, abs=0.051 if max(wanted) >= 10 else 0.0051
                )


def test_order_by_values_of_the_shown_prompt(shown):
    lens, run = shown(), a_run()
    pages.option(lens, "sort").select_option("distance")
    for number in (1, 2):
        lens.locator("#prompt").select_option(str(number))
        wanted = run.frames[120].of_prompts[number]["distance"]
        assert pages.grid_order(lens) == pages.ranked(wanted, descending=True)
    for control in ("sort", "filter-statistic"):  # also shows the prompt that defines it
        lens.locator("#prompt").select_option("0")
        pages.option(lens, control).select_option("induction")
        expect(lens.locator("#prompt")).to_have_value("2")
        assert lens.locator("#message").is_visible()
        pages.option(lens, control).select_option("")
    pages.option(lens, "over").select_option("mean")
    pages.option(lens, "sort").select_option("significance")
    values = significances(run.rows[120].values, uniform_of(PROMPTS))
    assert pages.grid_order(lens) == pages.ranked(np.nanmax(values, axis=0), descending=True)
    expect(lens).to_have_url(re.compile("statistics=mean"))


def test_letters_and_counts_of_names_follow_the_step(shown, story):
    for lens, run in ((shown(), a_run()), (story(), a_story())):
        names = {ALL_NAMES[index] for row in run.rows.values() for index in row.names.ravel()}
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
    assert tags(lens) == ["S", "", "P", "", "I", ""]


def test_sentence_of_a_head_with_a_pattern_on_one_prompt(shown):
    """It has no name; the sentence says what it does on this prompt, and nothing on the other."""
    run = story_run({(0, 1): ("previous_token in words", 40)})
    lens = shown(run, fragment="#head=0.1")
    assert lens.locator("#detail-name").inner_text() == ""
    value = run.frames[120].of_prompts[0]["previous_token"][0, 1]
    wanted = [f"{number:.2f}" for number in (value, uniform_of([SOME])["previous_token"])]
    found = lens.locator("#finding")
    assert re.findall(r"\d\.\d+", found.inner_text()) == wanted
    lens.locator("#prompt").select_option("1")
    assert not re.findall(r"\d\.\d+", found.inner_text())


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
    made.data["opening_prompt"] = 0
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


def test_sentence_says_since_when_also_with_an_interruption(shown):
    """The text has the step from which the head keeps its name, and the first step with it; without
    the name, the steps before and after."""
    made = story_run({(0, 2): ("previous_token", 40)})
    history = json.loads(pages.unpacked(made.data["history"]))
    history["names"][STEPS.index(80)][2] = 0
    history["since"][STEPS.index(120)][2] = STEPS.index(120)
    made.data["history"] = pages.packed(history)
    for step, wanted in ((120, {"120", "40"}), (80, {"80", "40", "120"})):
        lens = shown(made, fragment=f"#head=0.2&step={step}")
        steps = re.findall(r"step (\d+)", lens.locator("#finding").inner_text())
        assert {*steps} == wanted


def test_sentence_of_a_positional_head_says_how_far_back(shown):
    """The sentence says how far back the head attends most, and the mean weight there."""
    run = story_run({(0, 1): ("two to four back", 40)})
    lens = shown(run, fragment="#head=0.1&prompt=0")
    assert lens.locator("#detail-name").get_attribute("class") == "kind-positional"
    text = lens.locator("#finding").inner_text()
    (query,), (key,) = re.findall(r"\((\d+)\) it", text), re.findall(r"to .*? \((\d+)\), the", text)
    maps = planted("two to four back", SOME)
    means = {
        back: np.mean([maps[q, q - back] for q in range(max(2, back), len(maps))])
        for back in range(len(maps) - 2)
    }
    distance, mean = max(means.items(), key=lambda item: item[1])
    assert int(query) - int(key) == distance
    (average,) = re.findall(r"average (\d\.\d+)", text)
    assert float(average) == pytest.approx(mean, abs=0.0051 + 1 / 255)


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


def test_page_opens_with_a_given_prompt(shown):
    """Also if another prompt has a more significant head, and without names."""
    for planted_heads in (PLANTED, {}):
        made = story_run(planted_heads, STEPS[-2:])
        made.data["opening_prompt"] = 0
        lens = shown(made, fragment="")
        assert pages.state(lens, "prompt") == 0
        assert lens.locator("#detail").is_visible()


def test_page_opens_with_the_most_significant_head(story):
    """Heads that attend to themselves come last, if they are not the only ones."""
    lens = story("")
    frame = a_story().frames[120]
    found = [
        significances(values, uniform_of([prompt]))
        for values, prompt in zip(frame.of_prompts, (SOME, REPEATED), strict=True)
    ]
    best = {
        (place, prompt): values[ALL_NAMES.index(name) - 1][place]
        for place, (name, _) in PLANTED.items()
        for prompt, values in enumerate(found)
        if name != "diagonal"
    }
    (place, prompt) = max(best, key=lambda at: np.nan_to_num(best[at], nan=-1))
    expect(lens.locator("#detail-title")).to_have_text(f"L{place[0]} H{place[1]}")
    assert pages.state(lens, "prompt") == prompt
    query = pages.state(lens, "query")
    maps = planted(PLANTED[place][0], (SOME, REPEATED)[prompt])
    back = PERIOD - 1 if PLANTED[place][0] == "induction" else 1
    targets = {q: maps[q, q - back] - 1 / (q + 1) for q in range(2, len(maps)) if q >= back}
    assert query == max(targets, key=targets.get)
    numbers = re.findall(r"\d\.\d+", lens.locator("#finding").inner_text())
    wanted = [float(maps[query, query - back]), 1 / (query + 1)]
    name, planted_prompt = PLANTED[place][0], (SOME, REPEATED)[prompt]
    wanted.append(frame.of_prompts[prompt][name][place])
    wanted.append(uniform_of([planted_prompt])[name])
    assert [float(number) for number in numbers] == pytest.approx(wanted, abs=0.0051)
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


def test_names_of_separators_have_their_example_on_a_text(shown):
    """On random tokens there is no example, also if some are separators."""
    repeated = pages.prompt("2-repeated", ["<bos>", *2 * list("a,b ef")], period=PERIOD)
    names = ("separator", "segment_start")
    run = story_run({(0, head): (name, 40) for head, name in enumerate(names)}, repeated=repeated)
    for head, name in enumerate(names):
        lens = shown(run, fragment=f"#head=0.{head}&prompt=1")
        assert lens.locator("#detail-name").get_attribute("class") == f"kind-{name}"
        assert re.findall(r"\d\.\d|\u2013", lens.locator("#finding").inner_text()) == []
        lens.locator("#finding button").click()
        assert pages.state(lens, "prompt") == 0
        weight, _, mean, _ = re.findall(r"\d\.\d+", lens.locator("#finding").inner_text())
        maps = planted(name, SOME)
        assert float(weight) == pytest.approx(float(maps[:, 2 + head].max()), abs=0.0051)
        value = run.frames[120].of_prompts[0][name][0, head]
        assert float(mean) == pytest.approx(value, abs=0.0051)


def test_sentence_follows_step_prompt_and_head(story):
    lens = story("#head=1.1&prompt=1&step=120")
    sentences = {lens.locator("#finding").inner_text()}
    lens.locator("#step").fill("1")
    expect(lens.locator("#finding")).to_contain_text("80")  # it has no name yet
    sentences.add(lens.locator("#finding").inner_text())
    lens.locator("#step").fill("3")
    lens.locator("#prompt").select_option("0")
    sentences.add(lens.locator("#finding").inner_text())
    lens.locator("#finding button").click()  # shows the prompt and the row
    assert pages.state(lens, "prompt") == 1
    assert pages.state(lens, "query") == 9
    assert lens.locator("#finding button").count() == 0
    for place in ((0, 0), (0, 1), (0, 2)):
        pages.tile(lens, *place).click()
        sentences.add(lens.locator("#finding").inner_text())
    assert len(sentences) == 6


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
        for name in ("training loss", "validation accuracy", "loss on the second copy")
    }
    copy = a_story().frames[80].row.losses[1][PERIOD + 1 : 2 * PERIOD].mean()
    wanted = {"training loss": 3 - 80 / 60, "validation accuracy": 0.25}
    assert values == pytest.approx(wanted | {"loss on the second copy": copy}, abs=0.0051)
    box = lens.locator("#losses").bounding_box()
    lens.mouse.move(box["x"] + 0.33 * box["width"], box["y"] + 10)
    lens.mouse.down()
    assert pages.state(lens, "frame") == 1
    lens.mouse.move(box["x"] + box["width"] - 2, box["y"] + 10)
    assert pages.state(lens, "frame") == 3
    lens.mouse.up()
    (drawn,) = pages.pixels(lens.locator("#losses"))
    assert len(np.unique(drawn[drawn[..., 3] == 255][:, :3], axis=0)) >= 4  # curves and the step
    unlearnt = shown(story_run(PLANTED, steps=(0, 40)), fragment="#head=none")  # it never falls
    assert not unlearnt.locator("[data-curve='loss on the second copy']").count()
    data = a_run().data
    history = pages.packed(json.loads(pages.unpacked(data["history"])) | {"losses": []})
    data = data | {"curves": {}, "history": history}
    without = shown(dataclasses.replace(a_run(), data=data))
    assert without.locator("#step").is_visible()
    heights = [part.locator("#bar").bounding_box()["height"] for part in (lens, without)]
    assert heights[0] > heights[1] + 40  # no empty strip
    one = shown(story_run(PLANTED, steps=(120,)), fragment="#head=1.1")
    assert "120" not in one.locator("#finding").inner_text()  # one snapshot: since when is unknown
    assert not one.locator("#losses").is_visible()
