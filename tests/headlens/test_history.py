"""Statistics of all snapshots: the file, and resuming."""

import json
import math

import numpy as np

from headlens import STATISTICS
from headlens.history import History, Row, copying_begins, read_history, second_copy

NAN = math.nan


def row(step, **values):
    """Returns a Row of two layers with two heads. Statistics that are not given are 0."""
    zeros = {key: np.zeros((2, 2), np.float32) for key in STATISTICS}
    return Row(step, zeros | {key: np.float32(value) for key, value in values.items()})


def logged(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_are_appended_and_read_on_resume(tmp_path):
    file = tmp_path / "attention" / "statistics.jsonl"
    history = History(file, step=0)
    history.add(row(0, entropy=[[1, 0.123456], [0, NAN]]))
    (first,) = logged(file)  # written immediately
    integers = {"names", "places", "offsets", "layers"}
    assert first.keys() == {"step", *STATISTICS, "errors", "losses", *integers}
    assert first["entropy"] == [[1, 0.1235], [0, None]]
    for step in (40, 80, 120):
        history.add(row(step, entropy=[[step, 1], [2, NAN]]))
    resumed = History(file, step=80)  # removes this step and later steps
    assert [row.step for row in resumed.rows] == [0, 40]
    np.testing.assert_array_equal(resumed.rows[1].values["entropy"], [[40, 1], [2, NAN]])
    added = row(80)
    added.names = np.array([[1, 0], [2, 8]])
    added.places, added.offsets = np.array([[0, 0], [1, 2]]), np.array([[2, 3], [4, 8]])
    added.errors = {"induction": np.float32([[0.1235, NAN], [0, 1]])}
    added.losses = [np.float32([1.5, NAN]), np.float32([])]
    resumed.add(added)
    assert [line["step"] for line in logged(file)] == [0, 40, 80]
    (*_, found) = read_history(file)
    for key in ("names", "places", "offsets"):
        np.testing.assert_array_equal(getattr(found, key), getattr(added, key))
    np.testing.assert_array_equal(found.errors["induction"], added.errors["induction"])
    for of_prompt, expected in zip(found.losses, added.losses, strict=True):
        np.testing.assert_array_equal(of_prompt, expected)


def test_damaged_lines_are_dropped(tmp_path):
    file = tmp_path / "statistics.jsonl"
    for damaged in (b'{"step": 80, "entropy": [[0.1', b"[" * 100_000):
        file.unlink(missing_ok=True)
        History(file, step=0).add(row(40))
        with open(file, "ab") as out:
            out.write(damaged)
        History(file, step=80).add(row(80))
        assert [line["step"] for line in logged(file)] == [40, 80], damaged[:40]


def test_copying_begins_at_the_first_low_snapshot_after_a_clear_drop():
    K = 62
    high, low = math.log(K), 0.05
    for length in (2, 5, 41):
        for first in range(1, length):
            noise = 0.1 * np.random.default_rng(first).standard_normal(length)
            losses = np.where(np.arange(length) < first, high, low) + noise
            assert copying_begins(losses, K) == first
    assert copying_begins([4.1, 4.2, 4.0, 3.0, 1.0, 0.3, 0.1, 0.1], K) == 4
    for losses in (
        high + 0.3 * np.random.default_rng(0).standard_normal(40),
        np.linspace(11, 6, 20),  # of a language model: falls slowly and stays high
        [4.1, 4.1, 3.5, 3.5],  # a small drop
        [0.1] * 10,  # copies from the beginning
        [4.1],
        [],
        [4.1, math.nan, 0.1],
    ):
        assert copying_begins(losses, K) is None


def test_losses_of_the_second_copy():
    """R has 3 tokens: [BOS] a b c a b c. Positions 4 and 5 predict the second b and c."""
    assert second_copy(np.float32([9, 9, 9, 9, 1, 2]), period=3).tolist() == [1, 2]
