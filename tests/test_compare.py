"""scripts/compare: which of some runs' settings were better."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts import compare


@pytest.fixture
def run(tmp_path):
    """run(name, values, seed=..., **optimizer): a run's directory, with a validation each 10."""

    def make(folder_name, values, seed=0, max_steps=20, **optimizer):
        folder = tmp_path / "runs" / folder_name
        folder.mkdir(parents=True)
        config = {
            "seed": seed,
            "name": folder_name,
            "optimizer": {"name": "adamw", "lr": 0.001} | optimizer,
            "trainer": {"max_steps": max_steps, "batch_size": 10},
            "data": {"max_length": 10},
            "lens": {"every": seed},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        rows = [{"step": 0, "val/loss": 9.0}]
        rows += [{"step": n, "train/tokens": 100 * n} for n in (5, 10, 15, 20)]
        for index, value in enumerate(values):
            rows.append({"step": 10 * (index + 1), "val/loss": value})
        lines = [json.dumps(row) for row in sorted(rows, key=lambda row: row["step"])]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 20, "val/l']))
        return folder

    return make


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """compared(*arguments): the table's lines as cells, and what is said on stderr."""

    def run_it(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["compare", *arguments])
        compare.main()
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert len({len(line) for line in lines}) == 1  # stands in columns
        return [[c.strip() for c in line.strip("|").split("|")] for line in lines], err

    return run_it


def test_seeds_share_a_row_and_the_best_comes_first(run, compared, tmp_path):
    run("a", [3.0, 2.0])
    run("b", [3.0, 2.5], seed=1)
    run("c", [1.9, 1.5], name="muon", lr=0.01)
    (tmp_path / "runs" / "no run").mkdir()
    table, said = compared("target=2.2", "out=found.json")
    head, _, first, second = table
    assert head == ["optimizer", "lr", "runs", "tokens", "val/loss", "least–most", "tokens to 2.2"]
    assert first == ["muon", "0.01", "1", "2,000", "1.5000", "", "1,000"]
    assert second == [
        "adamw",
        "0.001",
        "2",
        "2,000",
        "2.2500",
        "2.0000–2.5000",
        "2,000 (1 of 2)",
    ]
    assert said.splitlines() == [
        "runs/no run: left out, is no run (config.yaml is missing or damaged)",
        "written to found.json",
    ]
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"][1]["curves"] == [[[1000, 3.0], [2000, 2.0]], [[1000, 3.0], [2000, 2.5]]]
    assert written["rows"][1]["seeds"] == [0, 1]
    assert written["settings"]["trainer.max_steps"] == 20
    assert "commit" in written


def test_runs_that_are_not_done_or_broken_are_said_to_be(run, compared):
    run("a", [3.0], max_steps=40)
    run("b", [2.0, float("nan")], lr=0.1, max_steps=40)
    run("c", [], lr=0.2)
    table, said = compared("runs=[runs/a,runs/b,runs/c]", "out=found.json")
    assert '"mean": null' in Path("found.json").read_text()
    assert table[0] == ["lr", "runs", "tokens", "val/loss", "least–most"]
    assert [row[1] for row in table[2:]] == ["1 (1 unfinished)", "1 (1 unfinished)"]
    assert [row[3] for row in table[2:]] == ["3.0000", "nan"]
    assert said.startswith("runs/c: left out, has no val/loss after its start\n")


def test_a_damaged_run_is_named_and_the_rest_compared(run, compared):
    run("a", [1.0, 2.0])
    (run("b", [1.0]) / "config.yaml").write_text(": [bad")
    (run("c", [1.0]) / "config.yaml").write_text("optimizer: {}")
    (run("d", [1.0]) / "config.yaml").write_text("{a: " * 3000)
    (run("e", [1.0]) / "metrics.jsonl").write_text("[" * 100_000)
    config = run("f", [1.0]) / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: 20", "max_steps: many"))
    table, said = compared("runs=[runs/*,nowhere]")
    assert len(table) == 3
    assert [line[:6] for line in said.splitlines()] == [*(f"runs/{x}" for x in "bcdef"), "nowher"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("runs=nowhere/*", r"runs=nowhere/\*: no run's directory; use runs='runs/\*' where"),
        ("runs=runs/c", "metric=val/loss: none of the runs has it; use one of train/tokens$"),
        ("runs=runs", "runs=runs: no run's directory; use"),
        ("out=runs", "out=runs: is a folder; give"),
        ("out=nowhere/a.json", "out=nowhere/a.json: nowhere is no folder; give"),
        ("target=low", "target=low: "),
    ],
)
def test_errors_are_one_line(run, compared, capsys, argument, line):
    run("c", [])
    with pytest.raises(SystemExit) as end:
        compared(argument)
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert re.match(line, said[-1])
