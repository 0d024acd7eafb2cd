"""Names of heads, and the table of all heads."""

import csv
import math

import numpy as np
import pytest
from helpers.tally import trials
from hypothesis import given
from hypothesis import strategies as st

from headlens import KINDS, STATISTICS, as_csv
from headlens.heads import (
    ALL_NAMES,
    COLUMNS,
    NAMES,
    clearest,
    head_table,
    names_of,
    targets_on,
)
from headlens.history import Row
from headlens.prompts import MAX_SHOWN, Prompt

NAN = math.nan
UNIFORM = dict.fromkeys(NAMES, 0.2)


def row(step, **values):
    """Returns a Row of two layers with two heads. Statistics that are not given are 0."""
    zeros = {key: np.zeros((2, 2), np.float32) for key in STATISTICS}
    return named(Row(step, zeros | {key: np.float32(value) for key, value in values.items()}))


def one_head(uniform=UNIFORM, **values):
    return [named(Row(0, {key: np.float32([[values.get(key, 0)]]) for key in STATISTICS}), uniform)]


def named(row, uniform=UNIFORM):
    """Gives the heads their names, as on a single prompt."""
    row.names, row.places = names_of(row, uniform, [row.values], [uniform])
    return row


def test_a_row_for_each_head_the_most_significant_first():
    """Also of NaN, of a statistic without values and of equally significant heads."""
    nothing = np.full((2, 2), NAN)
    last = row(
        40,
        entropy=[[0.1, 0.2], [0.3, NAN]],
        induction=[[0.2, 0.6], [NAN, 0.2]],
        first_token=[[0.2, 0.3], [0.9, 0.2]],
        duplicate_token=nothing,
    )
    table = head_table([last], UNIFORM | {"duplicate_token": None})
    assert as_csv(table).splitlines()[0] == ",".join(COLUMNS)
    keys = ("rank", "layer", "head", "name", "since_step", "significance")
    found = [tuple(found[key] for key in keys) for found in table]
    assert found == [
        (1, 1, 0, "first_token", 40, 0.875),
        (2, 0, 1, "induction", 40, 0.5),
        (3, 0, 0, "", None, 0),
        (4, 1, 1, "", None, 0),
    ]
    assert [of["entropy"] for of in table] == [0.3, 0.2, 0.1, None]
    assert {of["duplicate_token"] for of in table} == {None}
    written = list(csv.DictReader(as_csv(table).splitlines()))
    expected = [{k: "" if of[k] is None else str(of[k]) for k in COLUMNS} for of in table]
    assert written == expected


@trials(100, 1000)
@given(
    values=st.lists(st.floats(0, 1, width=32), min_size=len(NAMES), max_size=len(NAMES)),
    uniform=st.lists(st.floats(0.0, 0.5), min_size=len(NAMES), max_size=len(NAMES)),
)
def test_name_is_the_statistic_furthest_above_uniform_attention(values, uniform):
    of = dict(zip(NAMES, values, strict=True))
    c = dict(zip(NAMES, uniform, strict=True))
    (head,) = head_table(one_head(c, **of), c)
    shares = {key: (of[key] - c[key]) / (1 - c[key]) for key in NAMES}
    assert head["significance"] == pytest.approx(max(shares.values()), abs=1e-4)
    possible = {key: share for key, share in shares.items() if share >= KINDS[key].named_from}
    if all(abs(share - KINDS[key].named_from) > 1e-3 for key, share in shares.items()):
        assert bool(head["name"]) == bool(possible)
        if possible:
            assert possible[head["name"]] == pytest.approx(max(possible.values()), abs=1e-5)


def test_heads_without_significance_are_positional_or_uniform_or_have_no_name():
    last = row(0, entropy=[[0.96, 0.94], [0.96, 1]], positional=[[0.2, 0.2], [0.3, 0]])
    last.values["first_token"][1, 1] = 0.9  # a significant head can have a high entropy
    named(last)
    found = {(of["layer"], of["head"]): of["name"] for of in head_table([last], UNIFORM)}
    assert [found[place] for place in ((0, 0), (0, 1), (1, 0))] == ["uniform", "", "positional"]
    assert found[1, 1] == "first_token"
    found = [of["name"] for of in clearest(head_table([last], UNIFORM))]
    assert found == ["first_token", "positional"]


def test_a_name_needs_each_prompt_on_which_it_is_defined():
    """Not a mean over prompts: a head that attends to one word may find it first in one prompt."""
    prompts = [
        one_head(**values)[0].values
        for values in (
            {"first_token": 0.9, "previous_token": 0.5, "induction": NAN},
            {"first_token": 0.3, "previous_token": 0.6, "induction": 0.8},
        )
    ]
    (mean,) = one_head(first_token=0.6, previous_token=0.55, induction=0.8)
    uniform = [UNIFORM | {"induction": None}, UNIFORM]
    (index,) = names_of(mean, UNIFORM, prompts, uniform)[0].ravel()
    assert ALL_NAMES[index] == "induction"
    prompts[1]["induction"][:] = 0.2
    (index,) = names_of(mean, UNIFORM, prompts, uniform)[0].ravel()
    assert ALL_NAMES[index] == "previous_token"


def on_text(error=0.01, prompts=None, **values):
    """Returns the row of one head with statistics on a text, and on one prompt (as on the text)."""
    (row,) = one_head(**values)
    row.errors = {key: np.full((1, 1), error, np.float32) for key in NAMES}
    (of_prompt,) = one_head(**(values if prompts is None else prompts))
    row.names, row.places = names_of(row, UNIFORM, [of_prompt.values], [UNIFORM])
    return row


@pytest.mark.parametrize(
    ("row", "name", "place"),
    [
        (on_text(induction=0.9), "induction", "text and prompts"),
        (on_text(induction=0.9, prompts={"induction": 0.3}), "induction", "text"),
        (on_text(induction=0.3, prompts={"induction": 0.9}), "induction", "prompts"),
        # The text decides, also if another name is clearer on the prompts.
        (on_text(separator=0.7, prompts={"induction": 1}), "separator", "text"),
        (on_text(offset=0.5, induction=0.6, prompts={"offset": 1}), "induction", "text"),
        (on_text(induction=0.2 + 0.8 * 0.26), "induction", "text and prompts"),  # from 0.25 on
        (on_text(induction=0.2 + 0.8 * 0.24), "", None),
        # 0.5 is a significance of 0.375, less than three errors of 0.11 / (1 - 0.2)
        (on_text(offset=0.5, error=0.11, prompts={}), "", None),
        (on_text(offset=0.5, error=0.08, prompts={}), "offset", "text"),
        (on_text(offset=0.5, error=NAN), "", None),  # of a single window
        (on_text(prompts={"previous_token": 1}), "", None),  # a prompt is a short text
        (on_text(), "", None),
    ],
)
def test_a_name_says_where_it_holds(row, name, place):
    (head,) = head_table([row], UNIFORM)
    assert (head["name"], head["holds_on"]) == (name, place)


def name_after(before, values, error=0.01):
    """Returns the name of a head with these statistics that had the name `before`, on a text."""
    (row,) = one_head(**values)
    row.errors = {key: np.full((1, 1), error, np.float32) for key in NAMES}
    known = np.array([[ALL_NAMES.index(before)]])
    (index,) = names_of(row, UNIFORM, [row.values], [UNIFORM], known)[0].ravel()
    return ALL_NAMES[index]


def at_significance(share):
    return 0.2 + share * 0.8


@pytest.mark.parametrize("name", [*NAMES, "positional"])
def test_a_head_keeps_its_name_down_to_three_quarters_of_the_limit(name):
    limit = KINDS[name].named_from
    for part, before, wanted in (
        (1.01, "", name),
        (0.99, "", ""),  # a new name needs the whole limit
        (0.99, name, name),
        (0.76, name, name),
        (0.74, name, ""),
        (0.99, "uniform", ""),
    ):
        value = part * limit if name == "positional" else at_significance(part * limit)
        assert name_after(before, {name: value}) == wanted, (part, before)


def test_a_head_keeps_its_name_also_on_prompts_alone_and_with_a_larger_error():
    known = np.array([[ALL_NAMES.index("induction")]])
    (row,) = one_head(induction=at_significance(0.2))
    for before, name in ((None, ""), (known, "induction")):
        (index,) = names_of(row, UNIFORM, [row.values], [UNIFORM], before)[0].ravel()
        assert ALL_NAMES[index] == name
    clear = {"offset": at_significance(0.5)}  # 0.4 above chance: 2.5 errors
    assert [name_after(before, clear, 0.16) for before in ("", "offset")] == ["", "offset"]
    assert name_after("offset", clear, 0.2) == ""


def test_another_name_has_to_be_clearly_larger():
    for before, wanted in (("", "diagonal"), ("first_token", "first_token")):
        values = {"first_token": at_significance(0.5), "diagonal": at_significance(0.52)}
        assert name_after(before, values) == wanted
    assert name_after("first_token", values | {"diagonal": at_significance(0.9)}) == "diagonal"


def test_errors_and_offsets_of_named_heads_are_in_the_table():
    row = on_text(offset=0.5, error=0.02)
    row.offsets[:] = 3
    (head,) = head_table([row], UNIFORM)
    assert (head["error"], head["tokens_back"]) == (0.02, 3)
    (head,) = head_table([on_text(induction=0.5, error=0.03)], UNIFORM)
    assert (head["error"], head["tokens_back"]) == (0.03, None)


def test_since_step_is_the_first_of_the_last_snapshots_with_the_name():
    for values, since in (
        ((0.2, 0.3, 0.5, 0.9), 20),
        ((0.9, 0.2, 0.9, 0.8), 20),  # it had lost its name
        ((0.9, 0.9, 0.9), 0),
        ((0.1, 0.2, 0.9), 20),
        ((0.9, 0.9, 0.3), None),
        ((NAN, 0.9, 0.9), 10),
    ):
        rows = [row(10 * n, induction=np.full((2, 2), v)) for n, v in enumerate(values)]
        assert {head["since_step"] for head in head_table(rows, UNIFORM)} == {since}, values
    changed = [one_head(induction=0.9)[0], *one_head(previous_token=0.9)]
    changed[1].step = 10
    (head,) = head_table(changed, UNIFORM)
    assert (head["name"], head["since_step"]) == ("previous_token", 10)


def test_the_clearest_head_of_each_name():
    """The most significant one; names that say least come later, and then the positional head with
    the largest value, whose significance is of other statistics."""
    last = row(
        0,
        diagonal=[[0.9, 0], [0, 0]],
        first_token=[[0, 0.8], [0, 0]],
        induction=[[0, 0], [0.7, 0.6]],
        previous_token=[[0, 0], [0, 0.65]],
    )
    table = head_table([last], UNIFORM)
    assert [head["name"] for head in clearest(table)] == [
        *("induction", "previous_token", "diagonal", "first_token")
    ]
    last = row(0, positional=[[0.3, 0.6], [0.4, 0]], induction=[[0.3, 0], [0.1, 0.9]])
    found = clearest(head_table([last], UNIFORM))
    assert [(head["name"], head["layer"], head["head"]) for head in found] == [
        ("induction", 1, 1),
        ("positional", 0, 1),
    ]


def test_targets_on_a_long_prompt_are_those_of_the_tokens_that_are_shown():
    size = 300_000  # no machine has the memory for its square
    found = targets_on(Prompt("1-long", "", [1] * size, ["a"] * size))
    assert {of.shape for of in found.values()} == {(MAX_SHOWN, MAX_SHOWN)}
    assert found["duplicate_token"].sum() == MAX_SHOWN * (MAX_SHOWN - 1) / 2
