"""Statistics over the steps: lines on disk, the table of heads, and what a resumed run keeps."""

import csv
import json
import math
import os

import numpy as np
import pytest

from lens.history import COLUMNS, KINDS, History, Row, evenly_spread, plain, strongest
from lens.statistics import STATISTICS

NAN = math.nan


def row(step, **values):
    """Two layers of two heads; every statistic that is not given is 0."""
    zeros = {key: np.zeros((2, 2), np.float32) for key in STATISTICS}
    return Row(step, zeros | {key: np.float32(value) for key, value in values.items()})


def steps(history):
    return [row.step for row in history.rows]


def table(*rows, key="induction"):
    """The rows of the table for one statistic."""
    history = History.__new__(History)
    history.rows = list(rows)
    return [line for line in history.table() if line[0] == key]


def course(*values, key="induction", every=10):
    """The table's halfway_step of head L0 H0, which went through these values."""
    rows = [row(n * every, **{key: [[value, 0.5], [0.5, 0.5]]}) for n, value in enumerate(values)]
    (found,) = [line for line in table(*rows, key=key) if line[2:4] == (0, 0)]
    return found[-1]


def test_each_look_is_a_line_on_disk_at_once(tmp_path):
    file = tmp_path / "attention" / "statistics.jsonl"
    history = History(file, step=0)
    assert file.read_text() == ""
    history.add(row(0, entropy=[[1, 0.123456], [0, NAN]]))
    history.add(row(40))
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert list(first) == ["step", *STATISTICS]
    assert first["step"] == 0
    assert first["entropy"] == [[1, 0.1235], [0, None]]
    assert second["step"] == 40


def test_a_run_that_goes_on_reads_its_rows_and_drops_those_from_its_step_on(tmp_path):
    file = tmp_path / "statistics.jsonl"
    history = History(file, step=0)
    for step in (0, 40, 80, 120):
        history.add(row(step, entropy=[[step, 1], [2, NAN]]))
    resumed = History(file, step=80)
    assert steps(resumed) == [0, 40]
    assert resumed.rows[1].values["entropy"].tolist()[0] == [40, 1]
    assert math.isnan(resumed.rows[1].values["entropy"][1, 1])
    resumed.add(row(80))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 40, 80]
    assert steps(History(file, step=81)) == [0, 40, 80]
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.jsonl"]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 80, "entropy": [[0.1',
        '{"step": 80}',
        '{"entropy": [[1]]}',
        "",
        "\x00\x00\x00",
        '{"step": 80, "entropy": [[1], [2, 3]]}',
        "[80]",
        "[" * 100_000,
        b'{"step": 80, "\xff',
        "x" * 2**23,
    ],
    ids=lambda damaged: repr(damaged[:20]),
)
def test_a_damaged_line_is_dropped(tmp_path, damaged):
    file = tmp_path / "statistics.jsonl"
    history = History(file, step=0)
    history.add(row(0))
    history.add(row(40))
    with open(file, "ab") as out:
        out.write(damaged if isinstance(damaged, bytes) else damaged.encode())
    resumed = History(file, step=80)
    assert steps(resumed) == [0, 40]
    resumed.add(row(80))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 40, 80]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_a_regular_file_is_read(tmp_path, make):
    """A FIFO has no writer, and a device has no end."""
    file = tmp_path / "statistics.jsonl"
    make(file)
    history = History(file, step=40)
    history.add(row(40))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [40]


def test_heads_are_ranked_highest_first_and_equals_in_their_order():
    start = row(0, induction=[[0.1, 0.1], [0.1, 0.1]])
    last = row(20, induction=[[0.5, 0.25], [0.75, 0.25]])
    assert table(start, row(10), last) == [
        ("induction", 1, 1, 0, 0.75, 0.1, 20),
        ("induction", 2, 0, 0, 0.5, 0.1, 20),
        ("induction", 3, 0, 1, 0.25, 0.1, 20),
        ("induction", 4, 1, 1, 0.25, 0.1, 20),
    ]


def test_the_table_has_every_statistic_in_order_and_leaves_out_the_undefined(tmp_path):
    history = History(tmp_path / "statistics.jsonl", 0)
    nothing = np.full((2, 2), NAN)
    history.add(row(0, largest_logit=nothing, entropy=[[1, NAN], [1, 1]]))
    history.add(row(5, largest_logit=nothing, entropy=[[1, NAN], [1, 1]]))
    rows = history.write_table(tmp_path / "heads.csv")
    assert list(dict.fromkeys(line[0] for line in rows)) == [
        key for key in STATISTICS if key != "largest_logit"
    ]
    assert [line[1:4] for line in rows if line[0] == "entropy"] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 1, 1),
    ]
    with open(tmp_path / "heads.csv", newline="", encoding="utf-8") as file:
        names, *written = csv.reader(file)
    assert tuple(names) == COLUMNS
    assert written == [[str(value) for value in line] for line in rows]


@pytest.mark.parametrize(
    ("values", "halfway"),
    [
        ((0, 0.1, 0.4, 0.8), 20),  # rising: half of 0.8 is reached
        ((0, 0.39, 0.8), 20),
        ((0.2, 0.49, 0.51, 0.8), 20),  # half of the way, not half of the value
        ((0, 0.9, 0.1, 0.8), 10),  # the first time counts
        ((1.0, 0.9, 0.6, 0.5, 0.2), 20),  # falling
        ((1.0, 0.3, 0.9, 0.2), 10),
        ((0.3, 0.3, 0.3), 0),  # constant: there from the start
        ((0.3, 0.9, 0.3), 0),
        ((0.7,), 0),  # one look
        ((0, NAN, 0.8), 20),
    ],
)
def test_halfway_is_the_first_look_past_half_of_the_way(values, halfway):
    assert course(*values) == halfway


def test_a_head_that_was_not_defined_at_first_has_no_halfway_step_of_its_own():
    """It is in the table by its last value, and nothing fails."""
    assert course(NAN, 0.5, 0.8) in (0, 10, 20)
    assert table(row(0, induction=[[NAN, 0], [0, 0]]), row(1))[0][4] == 0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 10, 11, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 11, 500])
def test_evenly_spread_keeps_first_last_order_and_distance(count, most):
    items = list(range(count))
    kept = evenly_spread(items, most)
    assert len(kept) == min(count, most)
    assert sorted(set(kept)) == kept
    if count and most >= 2:
        assert kept[0] == 0
        assert kept[-1] == count - 1
    if len(kept) > 2:
        gaps = np.diff(kept)
        assert gaps.max() - gaps.min() <= 1


def test_thinned_rows_end_with_the_newest(tmp_path):
    history = History(tmp_path / "statistics.jsonl", 0)
    for step in range(100):
        history.add(row(step))
    kept = [row.step for row in history.thinned(60)]
    assert len(kept) == 60
    assert (kept[0], kept[-1]) == (0, 99)


def test_the_strongest_heads_of_each_kind():
    found = strongest(
        row(0, previous_token=[[0.1, 0.9], [0.3, 0.2]], induction=np.full((2, 2), NAN)), most=3
    )
    assert found["previous_token"] == [
        (0, 1, pytest.approx(0.9)),
        (1, 0, pytest.approx(0.3)),
        (1, 1, pytest.approx(0.2)),
    ]
    assert "induction" not in found
    assert list(found) == [key for key in KINDS if key != "induction"]


def test_numbers_for_json():
    assert plain(np.array([[1.0, NAN], [0.123456, 2]])) == [[1.0, None], [0.1235, 2.0]]
    assert json.loads(json.dumps(plain(np.float32([0.1])))) == [0.1]
