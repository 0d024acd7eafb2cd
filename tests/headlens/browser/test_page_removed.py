"""The interactive page in Chromium: removed heads and predictions of each layer."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers import pages
from helpers.pages import STEPS, a_run

from headlens.rounding import formatted_loss

CHANGES = (0.0004, 1.25, -0.3, 0.002, 2.5, 0.05)  # of the six heads
LOSS, ACCURACY = 0.5, 0.75


def result(change, accuracy, **more):
    return more | {
        "loss_change": change,
        "loss_change_error": abs(change) / 10,
        "accuracy_without": accuracy,
    }


def an_ablation(step=120, method="exact", groups=()):
    accuracies = [(n + 1) / 10 if method == "exact" else None for n in range(6)]
    heads = zip(np.ndindex(2, 3), CHANGES, accuracies, strict=True)
    return {
        "step": step,
        "method": method,
        "windows": 8,
        "targets": 512,
        "loss": LOSS,
        "accuracy": ACCURACY if method == "exact" else None,
        "heads": [result(c, a, layer=at[0], head=at[1]) for at, c, a in heads],
        "groups": list(groups),
    }


def with_ablation(ablation, name_of_all=None, run=None):
    """A run with these values; with `name_of_all`, all heads have this name at all steps."""
    run = run or a_run()
    data = run.data | {"ablation": ablation}
    if name_of_all:
        number = [name["key"] for name in data["names"]].index(name_of_all)
        history = json.loads(pages.unpacked(data["history"]))
        history["names"] = [[number] * 6 for _ in history["names"]]
        data["history"] = pages.packed(history)
    return dataclasses.replace(run, data=data)


def numbers(text):
    return [float(n.replace("−", "-")) for n in re.findall(r"[+−]?\d+\.\d+", text)]


def test_loss_without_the_enlarged_head(shown):
    lens = shown(with_ablation(an_ablation()), fragment="#head=0.1")
    for index, change in enumerate(CHANGES):
        pages.tile(lens, *divmod(index, 3)).click()
        found = numbers(lens.locator("#removed").inner_text())[:6]
        expected = [LOSS, LOSS + change, change, abs(change) / 10, ACCURACY, (index + 1) / 10]
        assert found == pytest.approx(expected, abs=0.006 if abs(change) > 0.1 else 6e-5)
    lens.keyboard.press("Escape")
    assert lens.locator("#removed").is_hidden()
    none = an_ablation()  # a change below the resolution is not "-0.0000"
    none["heads"][1] |= {"loss_change": -0.00001, "loss_change_error": 0.00002}
    lens = shown(with_ablation(none), fragment="#head=0.1")
    assert numbers(lens.locator("#removed").inner_text()) == [LOSS, LOSS, ACCURACY, 0.2]


def test_changes_within_the_noise_are_grey(shown):
    groups = [
        result(change, 0.5, name=name, heads=2) | {"loss_change_error": error}
        for name, change, error in (
            ("induction", 0.5, 0.1),
            ("diagonal", 0.1, 0.1),
            ("separator", -0.5, 0.1),
            ("previous_token", 0.1, None),  # one window
        )
    ]
    lens = shown(with_ablation(an_ablation(groups=groups)))
    read = """all => all.map((row) => [row.querySelector("[class*='kind-']").className,
      getComputedStyle(row.querySelector("td")).color])"""
    found = lens.locator("#groups tr:has([class*='kind-'])").evaluate_all(read)
    colours = {name.split("kind-")[1]: colour for name, colour in found}
    grey = colours.pop("diagonal")
    assert set(colours) == {"induction", "separator", "previous_token"}
    assert len(set(colours.values())) == 1
    assert grey not in colours.values()


def test_values_are_shown_only_at_the_step_of_the_measurement(shown):
    group = result(4.5, 0.01, name="induction", heads=6)
    lens = shown(with_ablation(an_ablation(groups=[group]), "induction"), fragment="#head=0.1")
    assert numbers(lens.locator("#removed").inner_text())[6:] == [0.5, 5.0, 4.5, 0.45, 0.75, 0.01]
    assert lens.locator("#groups tbody th").count() == 2
    for part in ("#removed", "#groups"):
        lens.locator("#step").fill("1")
        texts = [lens.locator(f"#{name}").inner_text() for name in ("removed", "groups")]
        assert all("120" in text and not numbers(text) for text in texts)
        lens.locator(f"{part} button").first.click()
        assert pages.state(lens, "frame") == STEPS.index(120)
        assert numbers(lens.locator(part).inner_text())


def test_other_groups_that_the_model_needs(shown):
    """Only exact and clear changes, of at least a tenth of the largest."""
    groups = [
        result(4.5, 0.01, name="induction", heads=6),
        result(4.0, 0.03, name="previous_token", heads=2),
        result(0.4, 0.7, name="diagonal", heads=2),
        result(2.0, 0.2, name="separator", heads=1) | {"loss_change_error": 1.5},
    ]
    for method, wanted in (("exact", [0.03]), ("estimate", [])):
        data = an_ablation(method=method, groups=groups) | {"accuracy": ACCURACY}
        lens = shown(with_ablation(data, "induction"), fragment="#head=0.1")
        assert numbers(lens.locator("#removed").inner_text())[12:] == wanted


def test_heads_are_sorted_by_the_loss_without_them(shown):
    group = result(4.5, None, name="induction", heads=2)
    lens = shown(with_ablation(an_ablation(method="estimate", groups=[group])))
    ranked = pages.ranked(np.reshape(CHANGES, (2, 3)), True)
    lens.locator("#step").fill("0")
    pages.option(lens, "sort").select_option("loss_change")  # also shows the step with values
    assert pages.grid_order(lens) == ranked
    captions = lens.locator(".head:visible .caption .number").all_inner_texts()
    assert [n for text in captions for n in numbers(text)] == sorted(CHANGES, reverse=True)
    pages.option(lens, "sort").select_option("")
    lens.locator("#groups button").click()
    assert pages.grid_order(lens) == ranked
    pages.go_to(lens, "sort=%2Bloss_change&filter=loss_change:1")
    assert (pages.grid_order(lens), pages.state(lens, "filter")) == (ranked[::-1], "")


def test_nothing_is_said_of_removed_heads_that_were_not_measured(shown):
    lens = shown(fragment="#head=0.1&sort=-loss_change")
    for part in ("#removed", "#groups", "#layers"):
        assert lens.locator(part).is_hidden()
    assert pages.state(lens, "sort") == ""
    assert not lens.locator("#sort option[value='loss_change']").count()


def assert_layers(lens, predictions, query, side=0):
    read = """all => all.map((row) => [row.querySelector("bdi").textContent.slice(1, -1),
      ...[...row.querySelectorAll(".number")].map((cell) => cell.textContent),
      row.classList.contains("true")])"""
    rows = lens.locator("#layers table").nth(side).locator("tbody tr").evaluate_all(read)
    for (token, chance, loss, true), of in zip(rows, predictions, strict=True):
        assert token == f"<{of.token_ids[query, 0]}>"
        assert float(chance) == pytest.approx(of.probabilities[query, 0], rel=0.05)
        if query == len(of.losses):
            assert not numbers(loss)
        else:
            assert loss == formatted_loss(of.losses[query])
            assert true == (of.token_ids[query, 0] == query + 1)


def test_logit_lens_shows_the_prediction_of_each_layer(shown):
    """The logit lens, in which the true token is marked."""
    words = [f"<{n}>" for n in range(200)]
    prompts = (pages.prompt("ids", words),)
    run = a_run("ids", 3, 1, prompts, (0, 40), (0, 40), logit_lens=True)
    found = run.predictions[40][0]
    true = [n for n in range(199) if any(of.token_ids[n, 0] == n + 1 for of in found)]
    lens = shown(run, fragment="#head=0.0")
    for query in (*true[:2], 150):
        pages.go_to(lens, f"head=0.0&query={query}")
        assert_layers(lens, found, query)
        assert lens.locator("#layers .true").count() == (query in true[:2])
    lens.locator("#text [data-token]").nth(7).hover()
    assert_layers(lens, found, 7)
    pages.go_to(lens, "head=0.0&compare=step:0&query=199")
    for side, step in enumerate((0, 40)):
        assert_layers(lens, run.predictions[step][0], 199, side)
    assert true
