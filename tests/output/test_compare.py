"""scripts/compare.py: the table of runs, and which runs share a row."""

import json
import math
import os

import pytest
from helpers.refusals import printed_keys, time_limit

from clearhead.output.comparison import markdown_table
from scripts import compare


@pytest.fixture
def run(tmp_path):
    """run(name, values, seed=..., **optimizer): the directory of a finished run with these
    validation losses at steps 10, 20, ..."""

    def make(name, values, seed=0, data=None, metric="val/loss", trainer=None, **optimizer):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        config = {
            "seed": seed,
            "name": name,
            "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1} | optimizer,
            "model": {"vocab_size": 257},
            "trainer": {"max_steps": 100, "warmup_steps": 20} | (trainer or {}),
            "data": {"path": "a.txt", "tokenizer": "byte"} | (data or {}),
            "lens": {"every": seed},
        }
        (folder / "run.json").write_text(json.dumps({"settings": config}))
        steps = [
            {"step": 10 * n, metric: value, "train/tokens": 1000 * n}
            for n, value in enumerate(values, start=1)
        ]
        log(folder, {"step": 0, metric: 9.0, "train/tokens": 0}, *steps)
        (folder / "summary.json").write_text(json.dumps({"steps": 10 * len(values)}))
        return folder

    return make


def log(folder, *rows):
    """Writes metrics.jsonl with a truncated last line."""
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 20, "val/l']))


@pytest.fixture
def compared(tmp_path, in_process):
    """compared(*arguments): (cells of the table, notes below it, runs reported on stderr, rows)."""

    def run_it(*arguments):
        out = tmp_path / "found.json"
        code, shown, err = in_process(compare.main, tmp_path, f"out={out}", *arguments)
        assert code == 0
        lines = [line for line in shown.splitlines() if line]
        cells = [[c.strip() for c in ln.strip("|").split(" | ")] for ln in lines if ln[0] == "|"]
        notes = [line for line in lines if line[0] != "|"]
        named = [line.partition(": ")[0] for line in err.splitlines()]
        return cells, notes, named, json.loads(out.read_text())["rows"]

    return run_it


def test_seeds_share_a_row_and_the_best_is_first(run, compared, tmp_path):
    """The row has the mean and its standard error; a repeated seed counts once. Control characters
    in names are escaped."""
    for seed, last in enumerate((2.0, 2.5, 3.0)):
        run(f"a{seed}", [3.5, last], seed=seed)
    run("again", [3.5, 3.0], seed=2)
    run("c\x1b]0;title\x07", [1.9, 1.5], weight_decay=0.2, lr=0.01)
    (tmp_path / "runs" / "no\x1b run").mkdir()
    (tmp_path / "runs" / "multirun").mkdir()  # the directories of sweeps
    (head, _, *rows), _, skipped, found = compared()
    assert head == ["run", "optimizer.lr", "optimizer.weight_decay", "tokens", "val/loss"]
    assert rows[0] == ["c\\x1b]0;title\\x07", "0.01", "0.2", "2,000", "1.5000"]
    error = 0.5 / math.sqrt(3)
    assert rows[1] == ["a0 + 3 runs", "0.001", "0.1", "2,000", f"2.5000 ± {error:.4f}"]
    assert skipped == ["runs/no\\x1b run"]
    assert (found[1]["seeds"], found[1]["values"]) == ([0, 1, 2, 2], [2.0, 2.5, 3.0])
    assert found[1]["standard_error"] == pytest.approx(error)


def test_the_value_of_a_finished_run_is_that_of_the_validation_at_its_end(run, compared):
    """A file of an earlier end, before the run was resumed, does not count."""
    for name, seed, step, loss in (("a", 0, 20, 2.25), ("b", 1, 20, 2.75), ("c", 2, 10, 9.0)):
        final = {"step": step, "windows": 900, "loss": loss}
        (run(name, [3.0, 2.0], seed=seed) / "validation.json").write_text(json.dumps(final))
    (row,) = compared()[-1]
    assert row["values"] == [2.25, 2.75, 2.0]


def test_unfinished_runs_and_runs_without_the_metric(run, compared):
    for seed in range(2):
        (run(f"a{seed}", [3.0], seed=seed) / "summary.json").unlink()
    run("b", [2.0, float("nan")], lr=0.1)
    run("c", [], lr=0.2)
    (_, _, *rows), _, skipped, found = compared()
    assert [row[0] for row in rows] == ["a0 + 1 run (2 unfinished)", "b"]
    assert [(row["mean"], len(row["unfinished"])) for row in found] == [(3.0, 2), (None, 0)]
    assert skipped == ["runs/c"]


def test_damaged_files_are_skipped(run, compared):
    run("a", [1.0, 2.0])
    (run("bad-json", [1.0]) / "run.json").write_text('{"settings": ' * 3000)
    (run("bad-rows", [1.0]) / "metrics.jsonl").write_text("[" * 100_000)
    for name in ("run.json", "metrics.jsonl"):
        path = run(f"bad-{name}", [1.0]) / name
        path.unlink()
        os.mkfifo(path)
    with time_limit():
        *_, skipped, found = compared()
    assert [row["runs"] for row in found] == [["a"]]
    assert {name.split("-")[0] for name in skipped} == {"runs/bad"}


@pytest.mark.parametrize(
    ("data", "other", "metric", "count"),
    [
        ({}, {}, "val/loss", 0),
        ({}, {"path": "b.txt"}, "val/loss", 1),
        ({}, {"tokenizer": "gpt2"}, "val/loss", 1),
        ({}, {"tokenizer": "gpt2"}, "val/bits_per_byte", 0),
        ({}, {"path": "b.txt", "tokenizer": "gpt2"}, "val/loss", 2),
        ({"val_path": "v.txt"}, {"path": "b.txt", "val_path": "v.txt"}, "val/loss", 0),
        ({"val_path": "v.txt"}, {"path": "b.txt", "val_path": "v.txt"}, "train/loss", 1),
        ({"val_path": "v.txt"}, {"val_path": "w.txt"}, "val/loss", 1),
    ],
)
def test_a_note_says_which_values_are_not_comparable(run, compared, data, other, metric, count):
    run("a", [2.0], data=data, metric=metric, lr=0.1)
    path = run("b", [1.0], data=other, metric=metric, lr=0.2) / "run.json"
    if other:  # the tokens differ too; their checksum has no separate column
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "b tokens"}))
    (head, _, *rows), notes, _, _ = compared(f"metric={metric}")
    assert ([row[0] for row in rows], len(notes)) == (["b", "a"], count)
    assert all(name.split(".")[0] in ("data", "model", "optimizer") for name in head[1:-2])


def test_runs_share_no_row_if_the_text_at_a_path_has_changed(run, compared):
    for name in ("a", "b"):
        path = run(name, [1.0]) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data": f"{name} text"}))
    (_, _, *rows), notes, _, _ = compared()
    assert [row[0] for row in rows] == ["a", "b"]
    assert [row[1] for row in rows] == ["a text", "b text"]
    assert len(notes) == 1


def test_columns_are_the_settings_that_differ(run, compared):
    """Those that do not change what a run learns are not compared."""
    for name, lr, steps, warmup in (("a", 0.1, 99, 19), ("b", 0.2, 200, 24), ("c", 0.2, 200, 30)):
        run(name, [1.0], lr=lr, trainer={"max_steps": steps, "warmup_steps": warmup, "keep": steps})
    head, _, *rows = compared()[0]
    assert head[1:-2] == ["optimizer.lr", "trainer.max_steps", "trainer.warmup_steps"]
    assert [row[1:-2] for row in rows] == [
        ["0.1", "99", "19"],
        ["0.2", "200", "24"],
        ["0.2", "200", "30"],
    ]


def test_the_highest_accuracy_is_first(run, compared):
    for name, value in (("a", 0.2), ("b", 0.4), ("c", float("nan"))):
        run(name, [value], metric="val/accuracy", lr=value)
    assert [row["runs"] for row in compared("metric=val/accuracy")[-1]] == [["b"], ["a"], ["c"]]


def test_any_text_is_one_cell_of_the_table():
    lines = markdown_table([{"a": text} for text in ("a|b\nc\x1b[31m", "b")]).splitlines()
    assert lines[2] == "| a\\|b\\nc\\x1b[31m |"


def test_settings_that_are_refused(run, in_process, tmp_path):
    run("c", [])
    os.mkfifo(tmp_path / "fifo")
    found = {"out=fifo": "out", "out=runs": "out", "runs=nowhere/*": "runs"}
    found |= {"runs=runs/c": "metric", "metric=val/lss": "metric"}
    for argument, key in found.items():
        code, _, err = in_process(compare.main, tmp_path, argument)
        assert (code, printed_keys(err)[-1]) == (2, key)
