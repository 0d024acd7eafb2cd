"""Statistics of all snapshots: the file, the table of heads, and resuming."""

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

import files
from lens.history import COLUMNS, History, Row
from lens.statistics import STATISTICS

NAN = math.nan


def row(step, **values):
    """Returns a Row of two layers with two heads. Statistics that are not given are 0."""
    zeros = {key: np.zeros((2, 2), np.float32) for key in STATISTICS}
    return Row(step, zeros | {key: np.float32(value) for key, value in values.items()})


def induction_table(folder, rows):
    """Returns the rows of the table for induction."""
    history = History(folder / "statistics.jsonl", step=0)
    history.rows = rows
    return [line for line in history.table() if line[0] == "induction"]


def logged(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_are_appended_and_read_on_resume(tmp_path):
    file = tmp_path / "attention" / "statistics.jsonl"
    history = History(file, step=0)
    history.add(row(0, entropy=[[1, 0.123456], [0, NAN]]))
    (first,) = logged(file)  # written immediately
    assert list(first) == ["step", *STATISTICS]
    assert first["entropy"] == [[1, 0.1235], [0, None]]
    for step in (40, 80, 120):
        history.add(row(step, entropy=[[step, 1], [2, NAN]]))
    resumed = History(file, step=80)  # removes this step and later steps
    assert [row.step for row in resumed.rows] == [0, 40]
    np.testing.assert_array_equal(resumed.rows[1].values["entropy"], [[40, 1], [2, NAN]])
    resumed.add(row(80))
    assert [line["step"] for line in logged(file)] == [0, 40, 80]


def test_rows_without_a_newer_statistic_are_kept(tmp_path):
    file = tmp_path / "statistics.jsonl"
    History(file, step=0).add(row(0, entropy=[[1, 2], [3, 4]]))
    (old,) = logged(file)
    del old["induction"]
    file.write_text(json.dumps(old) + "\n")
    history = History(file, step=40)
    history.add(row(40, induction=[[0.5, 0], [0, 0]]))
    assert [line["step"] for line in logged(file)] == [0, 40]
    assert logged(file)[0]["induction"] == [[None, None], [None, None]]
    found = {line[0]: line for line in reversed(history.table())}
    assert found["induction"][4:] == (0.5, 0.5, 40)  # defined from step 40
    assert found["entropy"][4:] == (0, 1, 40)


def test_damaged_lines_are_dropped(tmp_path):
    file = tmp_path / "statistics.jsonl"
    for damaged in (b'{"step": 80, "entropy": [[0.1', b"[" * 100_000):
        file.unlink(missing_ok=True)
        History(file, step=0).add(row(40))
        with open(file, "ab") as out:
            out.write(damaged)
        History(file, step=80).add(row(80))
        assert [line["step"] for line in logged(file)] == [40, 80], damaged[:40]


def test_an_incomplete_file_is_removed(tmp_path, monkeypatch):
    """Immediately after an error; at the next start after a kill."""
    parts = []

    def broken(part, _):
        parts.append(Path(part))
        raise BlockingIOError

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(BlockingIOError):
        History(tmp_path / "statistics.jsonl", step=0)
    assert list(tmp_path.iterdir()) == []
    parts[0].touch()
    files.remove_temporary_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_heads_are_ranked_highest_first_and_equals_in_their_order(tmp_path):
    start = row(0, induction=[[0.1, 0.1], [0.1, 0.1]])
    last = row(20, induction=[[0.5, 0.25], [0.75, 0.25]])
    assert induction_table(tmp_path, [start, row(10), last]) == [
        ("induction", 1, 1, 0, 0.75, 0.1, 20),
        ("induction", 2, 0, 0, 0.5, 0.1, 20),
        ("induction", 3, 0, 1, 0.25, 0.1, 20),
        ("induction", 4, 1, 1, 0.25, 0.1, 20),
    ]


def test_the_table_has_all_defined_statistics_in_order(tmp_path):
    history = History(tmp_path / "statistics.jsonl", 0)
    for step in (0, 5):
        nothing = np.full((2, 2), NAN)
        history.add(row(step, largest_logit=nothing, entropy=[[1, NAN], [1, 1]]))
    rows = history.write_table(tmp_path / "heads.csv")
    wanted = [key for key in STATISTICS if key != "largest_logit"]
    assert list(dict.fromkeys(line[0] for line in rows)) == wanted
    of_entropy = [line[1:4] for line in rows if line[0] == "entropy"]
    assert of_entropy == [(1, 0, 0), (2, 1, 0), (3, 1, 1)]
    with open(tmp_path / "heads.csv", newline="", encoding="utf-8") as file:
        names, *written = csv.reader(file)
    assert tuple(names) == COLUMNS
    assert written == [[str(value) for value in line] for line in rows]


def test_halfway_is_the_first_snapshot_past_half_of_the_change(tmp_path):
    for values, halfway in (
        ((0.25, 0.5, 0.625, 1), 20),  # half of the change, not half of the value
        ((0, 0.9, 0.1, 0.8), 10),  # the first time counts
        ((1.0, 0.9, 0.6, 0.5, 0.2), 20),  # decreasing
        ((0.3, 0.3, 0.3), 0),  # constant
        ((0, NAN, 0.8), 20),
    ):
        rows = [row(10 * n, induction=np.full((2, 2), value)) for n, value in enumerate(values)]
        assert {line[-1] for line in induction_table(tmp_path, rows)} == {halfway}, values
