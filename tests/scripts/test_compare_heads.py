"""scripts/compare_heads.py: heads that several runs have in common, read from their pages."""

import base64
import copy
import csv
import json
import os
import re
import zlib

import numpy as np
import pytest
from helpers.pages import HOSTILE, PROMPTS, STEPS, a_run, second_run, unpacked
from helpers.refusals import printed_keys, time_limit

from clearhead.lens.heads import ALL_NAMES
from clearhead.lens.page import page
from scripts.compare_heads import main

ORDERS = ([0, 1, 2], [2, 0, 1], [1, 2, 0])


def permuted(order, **changes):
    """Returns the data of a run whose last frame has the heads of a_run in another order."""
    data = copy.deepcopy(a_run().data) | changes
    frame = data["frames"][-1]
    sizes = [6 * len(p.tokens) * (len(p.tokens) + 1) // 2 for p in PROMPTS]
    codes = np.split(np.frombuffer(unpacked(frame["weights"]), np.uint8), np.cumsum(sizes)[:-1])
    codes = [of_prompt.reshape(2, 3, -1)[:, order].tobytes() for of_prompt in codes]
    frame["weights"] = base64.b64encode(zlib.compress(b"".join(codes))).decode()
    return data


@pytest.fixture
def written(tmp_path):
    """written(data, ...) -> the paths of a run directory for each of them, with its page."""

    def write(*datas):
        names = [f"run{number}" for number in range(len(datas))]
        for name, data in zip(names, datas, strict=True):
            (tmp_path / name / "attention").mkdir(parents=True, exist_ok=True)
            path = tmp_path / name / "attention" / "timelapse.html"
            path.write_text(page([data], name), encoding="utf-8")
        return f"runs=[{','.join(names)}]"

    return write


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_permuted_runs_are_matched_completely(in_process, written, tmp_path):
    runs = written(*(permuted(order, name=f"seed{n}") for n, order in enumerate(ORDERS)))
    code, out, err = in_process(main, tmp_path, runs, "out=a.html")
    assert (code, err) == (0, "")
    assert out.count("1.00") >= 2 * 3 * 4  # each group: three heads and the stability
    rows = rows_of(tmp_path / "a.csv")
    assert len(rows) == 3 * 2 * 3
    for row in rows:
        assert (row["runs"], float(row["stability"]), float(row["similarity"])) == ("3", 1, 1)
    groups = {}
    for row in rows:
        head = ORDERS[int(row["run"].removeprefix("seed"))][int(row["head"])]
        groups.setdefault((row["layer"], row["group"]), []).append(head)
    assert len(groups) == 6
    assert all(len(set(heads)) == 1 for heads in groups.values())
    html = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert html.count("<img") == 18


def test_similar_since_is_the_first_step_from_which_a_head_is_similar(
    in_process, written, tmp_path
):
    data = permuted(ORDERS[0])
    data["frames"][1] = data["frames"][3] | {"step": STEPS[1]}  # then different at STEPS[2]
    other = copy.deepcopy(data)
    other["frames"][2] = data["frames"][3] | {"step": STEPS[2]}
    in_process(main, tmp_path, written(data, other))
    rows = rows_of(tmp_path / "heads.csv")
    assert {row["run"] for row in rows} == {"first (1)", "first (2)"}
    found = {row["run"][-2]: row["similar_since"] for row in rows}
    assert found == {"1": str(STEPS[3]), "2": str(STEPS[1])}


def test_only_common_prompts_are_compared(in_process, written, tmp_path):
    fewer = a_run("fewer", prompts=PROMPTS[1:], seed=7).data
    runs = written(a_run(prompts=PROMPTS[:2]).data, fewer)
    assert in_process(main, tmp_path, runs)[0] == 0
    assert "Once upon a time" in (tmp_path / "heads.html").read_text(encoding="utf-8")
    assert "She sat" not in (tmp_path / "heads.html").read_text(encoding="utf-8")


def test_pages_of_one_step_and_of_both_versions_and_hostile_names(in_process, tmp_path):
    for number, run in enumerate((a_run(), second_run())):
        data = run.data | {"name": HOSTILE + "\x1b[31m", "frames": run.data["frames"][:1]}
        text = page([data], "x").replace('"version": 2', f'"version": {number + 1}')
        (tmp_path / f"page{number}.html").write_text(text, encoding="utf-8")
    code, out, err = in_process(main, tmp_path, "runs=page*.html", "out=b.html")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "<script" not in (tmp_path / "b.html").read_text(encoding="utf-8")
    assert len(rows_of(tmp_path / "b.csv")) == 2 * 6


def test_runs_without_names(in_process, tmp_path):
    """Pages of version 1 have no names: the command says of which runs. A name that one run has
    is that of the group."""
    for number in (0, 1):
        data = a_run().data | {"name": f"seed{number}"}
        history = json.loads(unpacked(data["history"]))
        history["names"][-1] = [ALL_NAMES.index("separator")] * 6
        if number == 0:
            del history["names"], history["name_steps"]
        packed = base64.b64encode(zlib.compress(json.dumps(history).encode())).decode()
        text = page([data | {"history": packed}], "x").replace('"version": 2', '"version": 1')
        (tmp_path / f"{number}.html").write_text(text, encoding="utf-8")
    shown = {}
    for runs in ("[0.html,0.html]", "[0.html,1.html]", "[1.html,1.html]"):
        code, out, err = in_process(main, tmp_path, f"runs={runs}", "out=names.html")
        assert (code, err) == (0, "")
        lines = [line for line in out.splitlines() if "unknown" in line and "|" not in line]
        html = (tmp_path / "names.html").read_text(encoding="utf-8")
        shown[runs] = ([re.findall(r"seed\d", line) for line in lines], html.count("unknown"))
        titles = {row["group_title"] for row in rows_of(tmp_path / "names.csv")}
        assert (titles == {"separator"}) == ("1.html" in runs)
    assert [lines for lines, _ in shown.values()] == [[["seed0"] * 2], [["seed0"]], []]
    assert [count > 0 for _, count in shown.values()] == [True, False, False]


def invalid(**changes):
    return page([copy.deepcopy(a_run().data) | changes], "x")


LAST = a_run().data["frames"][-1]
INVALID = {
    "no page": "<html></html>",
    "no heads": invalid(heads=0),
    "no weights": invalid(frames=[]),
    "not a list": invalid(prompts=3),
    "too few weights": invalid(heads=4),
    "too many weights": invalid(layers=1),
    "truncated": invalid(frames=[LAST | {"weights": LAST["weights"][:40]}]),
    "not compressed": invalid(frames=[LAST | {"weights": "AAAA"}]),
    "statistics": invalid(history="AAAA"),
}


def test_invalid_input_is_refused_in_one_line(in_process, written, tmp_path):
    written(a_run().data, a_run(heads=4).data, a_run(prompts=PROMPTS[:1]).data)
    (tmp_path / "other.html").write_text(page([a_run(prompts=PROMPTS[1:]).data], "x"))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for number, text in enumerate(INVALID.values()):
        (tmp_path / f"invalid{number}.html").write_text(text, encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    given = ["runs=" + str([f"invalid{number}.html"] * 2) for number in range(len(INVALID))]
    given += ["runs=[run0,run1]", "runs=[run2,other.html]", "runs=[run0,missing]"]
    given += ["runs=[run0,empty]", "runs=[run0,fifo]"]
    with time_limit():
        for argument in given:
            code, _, err = in_process(main, tmp_path, argument)
            assert (code, printed_keys(err)) == (3, ["runs"]), (argument, err)
    for arguments in (["runs=run0"], ["runs=[run0,run2]", "out=heads.png"], []):
        code, _, err = in_process(main, tmp_path, *arguments)
        assert (code, len(printed_keys(err))) == (2, 1), err
    assert sorted(tmp_path.iterdir()) == before
