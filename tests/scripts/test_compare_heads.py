"""scripts/compare_heads.py: heads that several runs have in common, read from their snapshots."""

import copy
import csv
import dataclasses
import os

import pytest
from helpers.pages import HOSTILE, PROMPTS, STEPS, a_run, second_run
from helpers.refusals import printed_keys, time_limit

from headlens import write_snapshot
from scripts.compare_heads import main

ORDERS = ([0, 1, 2], [2, 0, 1], [1, 2, 0])


def permuted(order, **changes):
    """Returns the snapshots of a_run; the last has the heads in another order."""
    *before, last = [dataclasses.replace(found, **changes) for found in a_run().snapshots]
    return [*before, dataclasses.replace(last, codes=[codes[:, order] for codes in last.codes])]


@pytest.fixture
def written(tmp_path):
    """written(snapshots, ...) -> the setting with a run directory for each of them."""

    def write(*runs):
        names = [f"run{number}" for number in range(len(runs))]
        for name, snapshots in zip(names, runs, strict=True):
            folder = tmp_path / name / "attention"
            folder.mkdir(parents=True)
            for data in snapshots:
                write_snapshot(folder / f"step_{data.step:08d}.npz", data)
        return f"runs=[{','.join(names)}]"

    return write


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_permuted_runs_are_matched_completely(in_process, written, tmp_path):
    runs = written(*(permuted(order, run=f"seed{n}") for n, order in enumerate(ORDERS)))
    code, out, err = in_process(main, tmp_path, runs, "out=a.csv")
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
    assert float(out.split("mean similarity of two runs: ")[1].split()[0]) == 1


def test_snapshots_of_one_run_are_called_by_their_step(in_process, written, tmp_path):
    written(a_run().snapshots)
    assert in_process(main, tmp_path, "runs=run0/attention/step_*.npz")[0] == 0
    names = [f"first step {step}" for step in STEPS]
    assert [*dict.fromkeys(row["run"] for row in rows_of(tmp_path / "heads.csv"))] == names


def test_only_common_prompts_are_compared(in_process, written, tmp_path):
    """The weights of two runs are the same on the second prompt, which is the first of one run."""
    last = copy.deepcopy(a_run().snapshots[-1])
    last.row.losses, last.norms = [], []
    statistics = last.details["statistics"]

    def with_prompts(places, codes):
        prompts = last.prompts[places]
        details = {"statistics": statistics[places]}
        return dataclasses.replace(last, prompts=prompts, codes=codes, details=details)

    second = with_prompts(slice(1, None), last.codes[1:])
    third = with_prompts(slice(2), [-last.codes[0], last.codes[1]])
    assert in_process(main, tmp_path, written([second], [third]))[0] == 0
    assert {float(row["similarity"]) for row in rows_of(tmp_path / "heads.csv")} == {1}


def test_single_snapshots_and_hostile_names(in_process, tmp_path):
    for number, run in enumerate((a_run(), second_run())):
        data = dataclasses.replace(run.snapshots[0], run=HOSTILE + "\x1b[31m")
        write_snapshot(tmp_path / f"model{number}.npz", data)
    code, out, err = in_process(main, tmp_path, "runs=model*.npz", "out=b.csv")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert len(rows_of(tmp_path / "b.csv")) == 2 * 6


def test_invalid_input_is_refused_in_one_line(in_process, written, tmp_path):
    runs = (a_run(), a_run(heads=4), a_run(prompts=PROMPTS[:1]), a_run(prompts=PROMPTS[1:]))
    written(*(run.snapshots for run in runs))
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "other.npz").write_text("of another program")
    before = sorted(tmp_path.iterdir())
    with time_limit():
        for other in ("run1", "missing", "empty", "fifo", "other.npz"):
            code, _, err = in_process(main, tmp_path, f"runs=[run0,{other}]")
            assert (code, printed_keys(err)) == (3, ["runs"]), (other, err)
        assert in_process(main, tmp_path, "runs=[run2,run3]")[0] == 3
    for arguments in (["runs=run0"], ["runs=[run0,run2]", "out=heads.png"], []):
        code, _, err = in_process(main, tmp_path, *arguments)
        assert (code, len(printed_keys(err))) == (2, 1), err
    assert sorted(tmp_path.iterdir()) == before
