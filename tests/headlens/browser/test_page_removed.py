"""The interactive page in Chromium: removed heads."""

import copy
import dataclasses
import re

import numpy as np
from helpers import pages
from helpers.pages import CHANGES, a_run, removal, removals

from headlens.finding import removed_heads
from headlens.heads import ALL_NAMES


def with_removal(*groups, name_of_all=""):
    """A run whose heads were removed at step 120; with `name_of_all`, all heads have this name."""
    run = a_run()
    row = copy.deepcopy(run.rows[120])
    row.names[:] = ALL_NAMES.index(name_of_all)
    removed = removed_heads(removals(groups=groups), row)
    return dataclasses.replace(run, data=run.data | {"removed": removed})


def numbers(text):
    return [float(n.replace("−", "-")) for n in re.findall(r"[+−]?\d+\.\d+", text)]


def test_sentences_about_the_enlarged_head(shown):
    run = with_removal()
    lens = shown(run, fragment="#head=0.1")
    for index, sentence in enumerate(run.data["removed"]["findings"]):
        pages.tile(lens, *divmod(index, 3)).click()
        text = lens.locator("#removed").inner_text()
        assert "".join(p if isinstance(p, str) else p[1] for p in sentence) in text
        assert run.data["removed"]["notes"][0] in text  # without a table
    lens.keyboard.press("Escape")
    assert lens.locator("#removed").is_hidden()


def test_changes_within_the_noise_are_grey(shown):
    groups = [
        removal(change, 0.5, name=name, heads=2, error=0.1)
        for name, change in (("induction", 0.5), ("diagonal", 0.1), ("separator", -0.5))
    ]
    lens = shown(with_removal(*groups))
    # In one call, because the page draws the table again when all steps are decoded.
    read = """() => [...document.querySelectorAll("#groups tr:has([class*='kind-'])")].map((row) =>
      [row.querySelector("[class*='kind-']").className,
        getComputedStyle(row.querySelector("td")).color])"""
    found = lens.evaluate(read)
    colours = {name.split("kind-")[1]: colour for name, colour in found}
    grey = colours.pop("diagonal")
    assert set(colours) == {"induction", "separator"}
    assert len(set(colours.values())) == 1
    assert grey not in colours.values()


def test_values_say_of_which_step_they_are(shown):
    run = with_removal(removal(4.5, 0.01, name="induction", heads=6), name_of_all="induction")
    lens = shown(run, fragment="#head=0.1")
    assert lens.locator("#groups tbody th").count() == 2
    parts = [lens.locator(part) for part in ("#removed", "#groups")]
    measured = [numbers(part.inner_text()) for part in parts]
    assert all(measured)
    lens.locator("#step").fill("1")
    for part, values in zip(parts, measured, strict=True):
        assert "step 120" in part.inner_text()
        assert set(values) <= set(numbers(part.inner_text()))


def test_heads_are_sorted_by_the_loss_without_them(shown):
    lens = shown(with_removal(removal(4.5, 0.1, name="induction", heads=2)))
    ranked = pages.ranked(np.reshape(CHANGES, (2, 3)), True)
    lens.locator("#step").fill("0")
    pages.option(lens, "sort").select_option("loss_change")  # also shows the step with values
    assert pages.grid_order(lens) == ranked
    captions = lens.locator(".head:visible .caption .number").all_inner_texts()
    assert [n for text in captions for n in numbers(text)] == sorted(CHANGES, reverse=True)
    pages.go_to(lens, "sort=%2Bloss_change")
    assert pages.grid_order(lens) == ranked[::-1]


def test_nothing_is_said_of_removed_heads_that_were_not_measured(shown):
    lens = shown(fragment="#head=0.1&sort=-loss_change")
    for part in ("#removed", "#groups"):
        assert lens.locator(part).is_hidden()
    assert pages.state(lens, "sort") == ""
    assert not lens.locator("#sort option[value='loss_change']").count()
