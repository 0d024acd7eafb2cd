"""What the page says about removed heads."""

import re

import numpy as np
import pytest

from headlens import STATISTICS
from headlens.heads import ALL_NAMES
from headlens.history import Row
from headlens.finding import removed_heads

CHANGES = (0.0004, 1.25, -0.3, 0.002, 2.5, 0.05)  # of six heads in two layers
LOSS, ACCURACY = 0.5, 0.75


def result(change, accuracy, **more):
    error = more.pop("error", abs(change) / 10)
    return more | {
        "loss_change": change,
        "loss_change_error": error,
        "accuracy_without": accuracy,
    }


def removal(method="exact", groups=(), changes=CHANGES, **more):
    accuracies = [(n + 1) / 10 if method == "exact" else None for n in range(6)]
    heads = zip(np.ndindex(2, 3), changes, accuracies, strict=True)
    return {
        "step": 120,
        "method": method,
        "windows": 8,
        "targets": 512,
        "loss": LOSS,
        "accuracy": ACCURACY if method == "exact" else None,
        "heads": [result(c, a, layer=at[0], head=at[1]) for at, c, a in heads],
        "groups": list(groups),
    } | more


def row_of(*names):
    row = Row(120, {key: np.zeros((2, 3), np.float32) for key in STATISTICS})
    row.names = np.reshape([ALL_NAMES.index(name) for name in names or [""] * 6], (2, 3))
    return row


def said(found, row=None, text_name=""):
    """Returns the sentences about each head, as text."""
    shown = removed_heads(found, row or row_of(), text_name)
    return ["".join(p if isinstance(p, str) else p[1] for p in s) for s in shown["findings"]]


def numbers(text):
    return [float(n.replace("−", "-")) for n in re.findall(r"[+−]?\d+\.\d+", text)]


def bold(found, index, row=None):
    sentence = removed_heads(found, row or row_of())["findings"][index]
    return [part[1] for part in sentence if isinstance(part, list)]


def test_loss_without_a_head():
    for index, (text, change) in enumerate(zip(said(removal()), CHANGES, strict=True)):
        found = numbers(text)[:6]
        expected = [LOSS, LOSS + change, change, abs(change) / 10, ACCURACY, (index + 1) / 10]
        assert found == pytest.approx(expected, abs=0.006 if abs(change) > 0.1 else 6e-5)
        assert f"L{index // 3} H{index % 3}" in text
    assert removed_heads(removal(), row_of())["changes"] == list(CHANGES)


def test_a_change_below_the_resolution_is_none():
    tiny = removal(changes=[-0.00001] * 6)
    assert numbers(said(tiny)[1]) == [LOSS, ACCURACY, 0.2]  # not "-0.0000"


def test_only_the_largest_change_has_a_place():
    texts = said(removal())
    assert ["of the 6 heads" in text for text in texts] == [n == 4 for n in range(6)]
    assert not any("of the 6 heads" in text for text in said(removal("estimate")))
    noise = removal()
    noise["heads"][4]["loss_change_error"] = 2
    assert not any("of the 6 heads" in text for text in said(noise))


def test_an_estimate_says_so_and_nothing_is_bold():
    group = result(4.5, None, name="induction", heads=6)
    found, row = removal("estimate", [group]), row_of(*["induction"] * 6)
    assert all("estimated" in text for text in said(found, row))
    assert all(text.count("estimated") == 2 for text in said(found, row))
    assert bold(found, 1, row) == []
    assert "estimate" in removed_heads(found, row)["notes"][0]
    assert "estimated" in removed_heads(found, row)["columns"][2]
    exact = removal("exact", [result(4.5, 0.1, name="induction", heads=6)])
    assert not any("estimated" in text for text in said(exact, row))
    assert bold(exact, 1, row) == ["1.75", "0.20", "5.00", "0.10"]


def test_a_change_that_is_not_clear_is_not_bold():
    noise = removal()
    noise["heads"][1]["loss_change_error"] = 0.7
    assert bold(noise, 1) == ["0.20"]  # the accuracy
    assert "not clearly different from 0" in said(noise)[1]


def test_heads_that_replace_each_other():
    """All heads of a name change the loss clearly more than each of them."""
    row = row_of("induction", "", "", "induction", "", "induction")  # 0.0524 together
    for change, error, is_more in ((0.5, 0.1, True), (0.3, 0.1, False), (0.5, None, False)):
        group = result(change, 0.1, error=error, name="induction", heads=3)
        texts = said(removal(groups=[group]), row)
        assert [0.0524 in numbers(text) for text in texts] == [
            is_more and n in (0, 3, 5) for n in range(6)
        ]


def test_other_groups_that_the_model_needs():
    """Only exact and clear changes, of at least a tenth of the largest."""
    groups = [
        result(4.5, 0.01, name="induction", heads=6),
        result(4.0, 0.03, name="previous_token", heads=2),
        result(0.4, 0.7, name="diagonal", heads=2),
        result(2.0, 0.2, name="separator", heads=1, error=1.5),
    ]
    row = row_of(*["induction"] * 5, "diagonal")
    for method, wanted in (("exact", {"previous-token"}), ("estimate", set())):
        texts = said(removal(method, groups), row)
        others = ("previous-token", "separator")
        assert {name for name in others if name in texts[0]} == wanted
        assert not any(name in texts[5] for name in others)  # it does not need this group


def test_what_the_removal_of_a_self_head_measures():
    row = row_of("diagonal", "", "", "", "diagonal", "")
    for change, is_said in ((2.0, True), (0.0, False), (-2.0, False)):
        group = result(change, 0.1, name="diagonal", heads=2)
        assert ("passes on the token itself" in said(removal(groups=[group]), row)[0]) == is_said


def test_table_of_all_heads_of_each_name():
    groups = [
        result(0.1, 0.5, name="diagonal", heads=2, error=0.1),
        result(0.5, 0.5, name="induction", heads=2, error=0.1),
        result(-0.5, 0.5, name="separator", heads=1, error=0.1),
        result(0.1, 0.5, name="previous_token", heads=2, error=None),  # one window
    ]
    row = row_of("diagonal", "diagonal", "induction", "induction", "", "")
    row.places[:] = 2
    table = removed_heads(removal(groups=groups), row, "your book")["groups"]
    assert [of["key"] for of in table][:2] == ["", "induction"]
    assert table[-1]["key"] == "separator"  # by the change of the loss
    assert [of["key"] for of in table if of["is_noise"]] == ["diagonal"]
    assert numbers(" ".join(table[1]["cells"])) == [1.0, 0.5, 0.1, 0.5]
    assert "your book" in table[1]["meaning"]
    assert "your book" not in table[-1]["meaning"]
    small = result(0.0012, 0.5, name="induction", heads=2)
    table = removed_heads(removal(groups=[small]), row)["groups"]
    assert [of["cells"][1] for of in table] == ["0.5000", "0.5012"]
    assert removed_heads(removal(), row)["groups"] == []
