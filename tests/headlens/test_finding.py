"""What the page says about heads: names over the steps, sentences, and where a head is clearest."""

import copy
import re

import numpy as np
import pytest
from helpers.loops import targets
from helpers.pages import CHANGES, PROMPTS, a_run, prompt, removal, removals
from helpers.stories import PLANTED, REPEATED, SOME, a_story, planted, story_run

from headlens import STATISTICS
from headlens.finding import (
    events,
    findings,
    opening,
    plain,
    removal_lines,
    removed_heads,
    statuses,
    subject,
)
from headlens.heads import ALL_NAMES, KINDS, NAMES
from headlens.history import Row
from headlens.rounding import formatted
from headlens.snapshot_data import Contexts

STEPS = (0, 40, 80, 1200)


def numbers(sentence):
    return [float(n) for n in re.findall(r"\d+\.\d+", plain(sentence))]


def named(data, *names, tokens_back=2):
    """Returns a snapshot whose heads have these names."""
    data = copy.deepcopy(data)
    found = np.array([ALL_NAMES.index(name) for name in names])
    data.row.names = found.reshape(data.row.names.shape)
    data.row.offsets[:] = tokens_back
    return data


def on_text(values, places=None, error=0.02):
    """Returns the last snapshot of a run without clear heads, measured on a text where the heads
    have these statistics: {name: [value of each of six heads]}. The value of chance is 0.1."""
    data = copy.deepcopy(story_run({}).snapshots[-1])
    shape = data.row.names.shape
    for key in NAMES:
        of_heads = np.float32(values.get(key, [0.1] * 6))
        data.row.values[key] = of_heads.reshape(shape)
        data.row.errors[key] = np.full(shape, error, np.float32)
        data.uniform[key] = 0.1
    cells = np.full((*shape, 2, 5, 3), -1, np.int16)
    data.contexts = Contexts("the book", [["a", "b"]], cells, cells[..., 0].astype("u1"))
    best = {0: {}}
    for head in range(6):
        name = max(values, key=lambda key: values[key][head])
        best[head] = name if values[name][head] >= 0.55 else ""
    data = named(data, *best.values())
    data.row.places = np.reshape(places or [1] * 6, shape)
    return data


# ------------------------------------------------------------------- names over the steps


def history_of(*names_of_head, backs=None, errors=None):
    """Returns the rows at STEPS of one head with these names."""
    rows = []
    for n, (step, name) in enumerate(zip(STEPS, names_of_head, strict=False)):
        row = Row(step, {key: np.zeros((1, 1), np.float32) for key in STATISTICS}, [], errors or {})
        row.names = np.array([[ALL_NAMES.index(name)]])
        row.offsets = np.array([[backs[n] if backs else 2]])
        rows.append(row)
    return rows


def status(rows, step):
    (found,) = statuses(rows, [step])
    return found["findings"][0]


def steps_in(text):
    return [int(n.replace(",", "")) for n in re.findall(r"step ([\d,]+)", text)]


def test_a_head_says_since_when_it_has_its_name_and_which_it_had():
    rows = history_of("induction", "", "induction", "induction")
    assert steps_in(status(rows, 1200)) == [80]
    assert steps_in(status(rows, 1000)) == [80]  # the last row until then
    assert steps_in(status(rows[:1], 0)) == []  # a single snapshot
    (found,) = statuses(rows, [80])
    assert [ALL_NAMES[name] for name in found["names"]] == ["induction"]
    rows = history_of("", "segment_start", "segment_start", "")
    assert steps_in(status(rows, 1200)) == [80]  # until then
    assert "segment-start head" in status(rows, 1200)
    assert steps_in(status(history_of("", "uniform", "", ""), 1200)) == []  # is not a name
    rows = history_of("diagonal", "diagonal", "offset", "offset", backs=[2, 2, 3, 4])
    assert "offset-4 head" in status(rows, 1200)
    assert "self head" in status(rows, 1200)
    assert steps_in(status(rows, 1200)) == [80, 40]
    # An offset head with another offset has the same name.
    assert steps_in(status(history_of("offset", "offset", "offset", backs=[2, 3, 2]), 80)) == [0]


def test_where_a_name_holds():
    for place, where in enumerate(("", "on the text only", "on repeated sequences only")):
        rows = history_of("induction", errors={"induction": np.zeros((1, 1))})
        rows[0].places = np.array([[place]])
        (found,) = statuses(rows, [0])
        assert (found["wheres"], found["hollow"]) == ([where], [place == 2])
        assert where in found["findings"][0]
        rows[0].errors = {}  # without a text, a name holds everywhere
        assert statuses(rows, [0])[0]["wheres"] == [""]


def test_births_of_names():
    run = a_story()
    rows = list(run.rows.values())
    found = events(rows)
    assert found
    for event in found:
        number = ALL_NAMES.index(event["key"])
        before = [row.names.ravel() for row in rows if row.step < event["step"]]
        assert all(number not in [of[head] for of in before] for head in event["heads"])
        assert (run.rows[event["step"]].names.ravel()[event["heads"]] == number).all()
        assert all(f"L{head // 3} H{head % 3}" in event["text"] for head in event["heads"][:4])
    pairs = {(head, name) for row in rows for head, name in enumerate(row.names.ravel().tolist())}
    shown = {pair for pair in pairs if ALL_NAMES[pair[1]] in KINDS}
    assert len(shown) == sum(len(event["heads"]) for event in found)
    again = events(history_of("induction", "", "induction", "diagonal"))
    assert [(event["key"], event["step"]) for event in again] == [
        ("induction", 0),
        ("diagonal", 1200),
    ]


# ------------------------------------------------------------------- where a head is clearest


def clearest_by_loops(weights, keys_of):
    """Returns (query, key) of the target whose weight is most above uniform attention, or None."""
    above = {
        (query, key): weights[query, key] - 1 / (query + 1)
        for query in range(2, len(weights))
        for key in keys_of(query)
    }
    return max(above, key=above.get) if above else None


@pytest.mark.parametrize("name", ["", *NAMES])
def test_rows_where_a_name_is_clearest(name):
    """By plain loops, for all heads and prompts; without a target of the name, the row of the
    largest weight to an earlier token."""
    copies = prompt("3-repeated", ["<|endoftext|>", *2 * [" oak", ",", " grey", "\n"]], period=4)
    prompts = (PROMPTS[0], prompt("2-once", ["Once", " upon", " A", " time"]), copies)
    run, back = a_run(prompts=prompts), 3
    data = named(run.snapshots[-1], *[name] * 6, tokens_back=back)
    found = findings(data)
    for number, one in enumerate(prompts):
        known = targets(one.token_ids, one.tokens)
        of_queries = known["offset", back] if name == "offset" else known.get(name)
        if name == "" or (one.period and STATISTICS[name].on == "texts"):
            of_queries = [[]] * len(one.tokens)
        for head in range(6):
            weights = run.weights[120][number][divmod(head, 3)]
            weights = (np.round(255 * weights**0.5) / 255) ** 2  # as bytes
            best = clearest_by_loops(weights, lambda query, of=of_queries: of[query])
            best = best or clearest_by_loops(weights, lambda query: range(1, query))
            assert found["rows"][number][head] == best[0]
    assert (found["prompts"] == [-1] * 6) == (name == "")
    if name:
        periods = {prompts[number].period for number in found["prompts"]}
        assert periods == {4 if STATISTICS[name].on == "repeated" else 0}  # a text, if possible


def test_example_of_a_head():
    """The sentence has the tokens, the positions and the weight of the clearest row."""
    run = a_run()
    data = named(run.snapshots[-1], *["previous_token"] * 6)
    found = findings(data)
    for head, sentence in enumerate(found["findings"]):
        number = found["prompts"][head]
        query = found["rows"][number][head]
        tokens = [part[1] for part in sentence if isinstance(part, list) and part[0] == "token"]
        assert tokens == [data.prompts[number].labels[n] for n in (query, query - 1)]
        assert re.findall(r"\((\d+)\)", plain(sentence)) == [str(query), str(query - 1)]
        weight = run.weights[120][number][divmod(head, 3)][query, query - 1]
        assert numbers(sentence)[2:4] == pytest.approx([weight, 1 / (query + 1)], abs=0.011)
        size = [of["previous_token"][divmod(head, 3)] for of in data.of_prompts[:2]]
        chance = [of.uniform["previous_token"] for of in data.prompts[:2]]
        significant = [(v - c) / (1 - c) for v, c in zip(size, chance, strict=True)]
        assert number == int(np.argmax(significant))  # of the two texts


def test_a_positional_head_says_how_far_back():
    run = story_run({(0, 1): ("two to four back", 40)})
    data = run.snapshots[-1]
    assert ALL_NAMES[data.row.names[0, 1]] == "positional"
    found = findings(data)
    sentence = plain(found["findings"][1])
    (query, key) = map(int, re.findall(r"\((\d+)\)", sentence))
    maps = planted("two to four back", SOME)
    means = {
        back: np.mean([maps[q, q - back] for q in range(max(2, back), len(maps))])
        for back in range(len(maps) - 2)
    }
    distance, mean = max(means.items(), key=lambda item: item[1])
    assert query - key == distance
    assert numbers([sentence])[-1] == pytest.approx(mean, abs=0.0051 + 1 / 255)
    assert found["rows"][0][1] == query


def test_short_prompts_have_no_rows():
    one, two = prompt("2-one", ["Hello"]), prompt("3-two", ["Hello", " you"])
    data = a_run("short of rows", prompts=(PROMPTS[0], one, two)).snapshots[-1]
    found = findings(named(data, *["previous_token"] * 6))
    assert found["rows"][1:] == [[-1] * 6] * 2
    assert found["prompts"] == [0] * 6


# ------------------------------------------------------------------- sentences


def test_mean_weight_on_a_text():
    """With its error and its chance."""
    data = on_text({"induction": [0.9] * 6})
    sentence = findings(data)["findings"][0]
    assert numbers(sentence) == [0.9, 0.02, 0.1]
    assert ["bold", "0.90 ± 0.02"] in sentence
    assert data.contexts.text_name in plain(sentence)


def test_a_head_without_a_name_says_which_is_nearest_and_what_a_name_needs():
    values = {"separator": [0.3, 0.5, 0.1, 0, 0, 0], "diagonal": [0.2, 0.1, 0.4, 0, 0, 0]}
    data = on_text(values)
    data.row.names[:] = 0
    said = findings(data)["findings"]
    assert numbers(said[0]) == [0.3, 0.02, 0.1, pytest.approx(0.1 + 0.4 * 0.9)]
    assert "separator head" in plain(said[1])
    data = story_run({(0, 1): ("previous_token in words", 40)}).snapshots[-1]
    assert ALL_NAMES[data.row.names[0, 1]] == ""  # a clear pattern on one prompt only
    value, chance = data.row.values["previous_token"][0, 1], data.uniform["previous_token"]
    said = findings(data)["findings"][1]
    assert numbers(said) == pytest.approx([value, chance, chance + 0.25 * (1 - chance)], abs=0.0051)
    for values in data.row.values.values():  # of a model that has diverged
        values[:] = np.nan
    assert all(findings(data)["findings"])


# ------------------------------------------------------------------- the first head, the subject


def test_opening_is_the_head_that_tells_most():
    """A clear name on the text before a name on prompts only; heads that attend to tokens by what
    they are before those that attend by position."""
    values = {
        "previous_token": [0.9, 0, 0, 0, 0, 0],
        "separator": [0, 0.6, 0.7, 0, 0, 0],
        "induction": [0, 0, 0, 0.9, 0, 0],
        "diagonal": [0, 0, 0, 0, 0.95, 0],
    }
    for places, head in (([1] * 6, 3), ([1, 1, 1, 2, 1, 1], 2), ([1, 0, 1, 2, 1, 1], 2)):
        found = opening(on_text(values, places))
        assert found["layer"] * 3 + found["head"] == head
    del values["separator"], values["induction"]
    assert opening(on_text(values))["head"] == 0
    del values["previous_token"]
    assert (opening(on_text(values))["layer"], opening(on_text(values))["head"]) == (1, 1)


def test_opening_has_the_clearest_row():
    data = story_run(PLANTED).snapshots[-1]
    found, rows = opening(data), findings(data)["rows"]
    assert (found["layer"], found["head"]) == (1, 1)  # the induction head
    assert data.prompts[found["prompt"]] is not SOME
    maps = planted("induction", REPEATED)
    query, _ = clearest_by_loops(maps.numpy(), lambda q: [q - 5] if q > 6 else [])
    assert found["query"] == query == rows[found["prompt"]][4]
    assert opening(data, prompt=0)["prompt"] == 0
    text_only = on_text({"induction": [0.9] * 6}, places=[1] * 6)
    assert not text_only.prompts[opening(text_only)["prompt"]].period


def test_opening_without_names_is_the_most_significant_head():
    data = on_text({"diagonal": [0.2] * 6, "separator": [0, 0, 0, 0.25, 0, 0]})
    found = opening(data)
    assert (found["layer"], found["head"]) == (1, 0)
    for values in data.row.values.values():
        values[:] = np.nan
    assert opening(data) is None


def test_subject_counts_the_names_of_the_shown_step():
    data = on_text({"induction": [0.9, 0.9, 0, 0, 0, 0]}, places=[1, 2, 1, 1, 1, 1])
    (status,) = statuses([data.row], [data.step])
    said = plain(subject(data, status, data.step))
    assert f"At step {data.step}, 2 of 6 heads" in said
    assert re.search(r"; 1 of the names .* the book", said)
    data = on_text({"separator": [0.9] * 6})
    earlier = data.step - 1
    assert f"step {data.step}" not in plain(subject(data, status, None))  # without a training
    groups = [
        removal(2, name="separator", heads=6),
        removal(3, error=2, name="induction", heads=1),  # not clear
    ]
    data.ablation = {"loss": 1, "groups": groups}
    assert ["bold", formatted(3)] in subject(data, status, data.step)
    said = plain(subject(data, status | {"names": [0] * 6}, earlier))
    assert f"At step {earlier}, none of 6 heads" in said
    assert f"At step {data.step}, the model needs" in said  # measured at the last step alone
    data.ablation["method"] = "estimate"  # which is no evidence
    assert "needs" not in plain(subject(data, status, data.step))


# ------------------------------------------------------------------- removed heads


def row_of(*names):
    row = Row(120, {key: np.zeros((2, 3), np.float32) for key in STATISTICS})
    row.names = np.reshape([ALL_NAMES.index(name) for name in names or [""] * 6], (2, 3))
    return row


def test_loss_without_a_head_and_without_all_heads_of_its_name():
    group = removal(4.5, 0.1, name="induction", heads=6)
    shown = removed_heads(removals(groups=[group]), row_of(*["induction"] * 6))
    assert shown["changes"] == list(CHANGES)
    for index, (said, change) in enumerate(zip(shown["findings"], CHANGES, strict=True)):
        found = [float(n) for n in re.findall(r"\d+\.\d+", plain(said))]
        expected = [abs(change), abs(change) / 10, 0.5 + change, 0.75, (index + 1) / 10]
        expected += [4.5, 0.45, 5, 0.75, 0.1]
        assert found == pytest.approx(expected, abs=0.006)
        assert f"L{index // 3} H{index % 3}" in plain(said)
    assert ["bold", "+1.25 ± 0.13"] in shown["findings"][1]


def test_a_change_that_is_not_clear_says_so_and_is_not_bold():
    noise = removals()
    noise["heads"][1]["loss_change_error"] = 0.7
    said = removed_heads(noise, row_of())["findings"]
    assert ["not clearly" in plain(of_head) for of_head in said] == [n == 1 for n in range(6)]
    assert all(isinstance(part, str) for part in said[1])


def test_table_of_all_heads_of_each_name():
    groups = [
        removal(0.1, 0.5, name="diagonal", heads=2, error=0.1),
        removal(0.5, 0.5, name="induction", heads=2, error=0.1),
        removal(-0.5, 0.5, name="separator", heads=1, error=0.1),
        removal(0.1, 0.5, name="previous_token", heads=2, error=None),  # one window
    ]
    table = removed_heads(removals(groups=groups), row_of())["groups"]
    assert [of["key"] for of in table][:2] == ["", "induction"]
    assert table[-1]["key"] == "separator"  # by the change of the loss
    assert [of["key"] for of in table if of["is_noise"]] == ["diagonal"]
    assert table[1]["cells"][1:] == ["1.00", "+0.50 ± 0.10", "0.50"]
    assert removed_heads(removals(), row_of())["groups"] == []


def test_lines_about_the_heads_that_the_model_needs():
    """The largest increase of more than two standard errors."""
    row = row_of("", "", "", "", "induction", "")
    (line,) = removal_lines(removals(), row)
    assert all(part in line for part in ("L1 H1 (induction)", "+2.50 ± 0.25", "0.50"))
    noise = removals(changes=[-0.5] * 6, groups=[removal(0.7, 0.1, name="induction", heads=3)])
    first, second = removal_lines(noise, row)
    assert not re.search(r"\d", first)
    assert "3 induction" in second
    assert "+0.70" in second
