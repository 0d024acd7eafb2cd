"""scripts/compare: which of some runs' settings were better."""

import json
import os
import re
from pathlib import Path

import pytest

from scripts import compare


@pytest.fixture
def run(tmp_path):
    """run(name, values, seed=..., **optimizer): a run's directory, with a validation each 10."""

    def make(folder_name, values, seed=0, max_steps=20, data=None, metric="val/loss", **optimizer):
        folder = tmp_path / "runs" / folder_name
        folder.mkdir(parents=True)
        config = {
            "seed": seed,
            "name": folder_name,
            "optimizer": {"name": "adamw", "lr": 0.001} | optimizer,
            "trainer": {"max_steps": max_steps, "batch_size": 10},
            "data": {"max_length": 10, "path": "a.txt", "tokenizer": "byte"} | (data or {}),
            "lens": {"every": seed},
        }
        (folder / "run.json").write_text(json.dumps({"settings": config}))
        rows = [{"step": 0, "val/loss": 9.0}]
        rows += [{"step": n, "train/tokens": 100 * n} for n in (5, 10, 15, 20)]
        for index, value in enumerate(values):
            rows.append({"step": 10 * (index + 1), metric: value})
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
    *columns, target, runs = head
    assert columns == ["optimizer", "lr", "runs", "tokens", "val/loss", "least–most"]
    assert (target, runs) == ("tokens to 2.2", "run")
    assert first == ["muon", "0.01", "1", "2,000", "1.5000", "", "1,000", "c"]
    assert second == [
        "adamw",
        "0.001",
        "2",
        "2,000",
        "2.2500",
        "2.0000–2.5000",
        "2,000 (1 of 2)",
        "a, b",
    ]
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "runs/no run",
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
    assert table[0] == ["lr", "runs", "tokens", "val/loss", "least–most", "run"]
    assert [row[1] for row in table[2:]] == ["1 (1 unfinished)", "1 (1 unfinished)"]
    assert [row[3] for row in table[2:]] == ["3.0000", "nan"]
    assert said.startswith("runs/c: ")


def test_a_damaged_run_is_named_and_the_rest_compared(run, compared):
    run("a", [1.0, 2.0])
    (run("b", [1.0]) / "run.json").write_text(": [bad")
    (run("c", [1.0]) / "run.json").write_text('{"settings": {"optimizer": {}}}')
    (run("d", [1.0]) / "run.json").write_text('{"settings": ' * 3000)
    (run("e", [1.0]) / "metrics.jsonl").write_text("[" * 100_000)
    record = run("f", [1.0]) / "run.json"
    record.write_text(record.read_text().replace('"max_steps": 20', '"max_steps": "many"'))
    table, said = compared("runs=[runs/*,nowhere]")
    assert len(table) == 3
    assert [line[:6] for line in said.splitlines()] == [*(f"runs/{x}" for x in "bcdef"), "nowher"]


def log(folder, *logged):
    """Replaces the log of a run."""
    lines = [json.dumps(row) for row in logged]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_tokens_are_those_that_were_logged(run, compared):
    """The batch size was changed after step 10: the settings are those of the second part. Rows
    of older runs have no tokens."""
    resumed = run("a", [])
    log(
        resumed,
        {"step": 10, "val/loss": 3.0, "train/tokens": 500},
        {"step": 20, "val/loss": 2.0, "train/tokens": 1500},
    )
    strange = run("b", [], lr=0.1)
    log(strange, *({"step": 20, "val/loss": 4.0, "train/tokens": n} for n in ("nan", -1, 10**30)))
    compared("out=found.json", "target=2.5")
    first, second = json.loads(Path("found.json").read_text())["rows"]
    assert first["curves"] == [[[500, 3.0], [1500, 2.0]]]
    assert (first["tokens"], first["tokens_to_target"]) == (1500, [1500])
    assert second["curves"] == [3 * [[2000, 4.0]]]


# Nine lines of 9 aliases each: 387 million values.
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 10)
)


def test_only_records_of_a_bounded_size_are_read(run, compared, tmp_path):
    """config.yaml is for people. A FIFO has no writer, a device has no end."""
    run("a", [1.0, 2.0])
    bomb = run("bad-bomb", [1.0])
    (bomb / "run.json").unlink()
    (bomb / "config.yaml").write_text(BOMB)
    os.mkfifo(run("fifo", [1.0]) / "config.yaml")
    for name in ("run.json", "metrics.jsonl"):
        os.truncate(run(f"bad-huge-{name}", [1.0]) / name, 2**33)  # takes no place on the disk
        fifo, device = (run(f"bad-{kind}-{name}", [1.0]) / name for kind in ("fifo", "zero"))
        fifo.unlink()
        os.mkfifo(fifo)
        device.unlink()
        device.symlink_to("/dev/zero")
    table, said = compared()
    assert len(table) == 3
    assert [line.startswith("runs/bad-") for line in said.splitlines()] == 7 * [True]


def test_a_line_that_is_too_long_is_no_row(run, compared):
    folder = run("a", [])
    log(folder, {"step": 10, "val/loss": 2.0}, {"step": 20, "val/loss": 1.0, "more": "x" * 2**20})
    compared("out=found.json")
    (row,) = json.loads(Path("found.json").read_text())["rows"]
    assert row["values"] == [2.0]


def test_a_row_names_its_runs_what_they_share_once(run, compared):
    for seed in range(6):
        run(f"lr-0.1_seed-{seed}", [2.0], seed=seed)
    run("other", [3.0], lr=0.1)
    table, _ = compared()
    assert table[0][-1] == "run"
    assert table[2][-1] == "lr-0.1_seed-0, …1, …2, …3 + 2"
    assert table[3][-1] == "other"


def tables(out):
    """The names of the runs of each row, for each table."""
    lines = [[[c.strip() for c in line.split("|")] for line in table] for table in out]
    return [[line[-2] for line in table[2:]] for table in lines]


@pytest.mark.parametrize(
    ("metric", "all_have", "data", "found"),
    [
        ("val/loss", {}, {"tokenizer": "gpt2"}, [["b", "a"], ["c"]]),
        ("val/loss", {}, {"path": "b.txt"}, [["b", "a"], ["c"]]),
        ("val/loss", {}, {"val_path": "a.txt"}, [["b", "a"], ["c"]]),
        ("val/loss", {"val_path": "v.txt"}, {"path": "b.txt"}, [["b", "c", "a"]]),
        ("train/loss", {"val_path": "v.txt"}, {"path": "b.txt"}, [["b", "a"], ["c"]]),
        ("val/bits_per_byte", {}, {"tokenizer": "gpt2"}, [["b", "c", "a"]]),
        ("val/bits_per_byte", {}, {"path": "b.txt"}, [["b", "a"], ["c"]]),
    ],
)
def test_what_cannot_be_compared_is_not_ranked_together(
    run, in_process, tmp_path, metric, all_have, data, found
):
    run("a", [3.0], metric=metric, data=all_have)
    run("b", [1.0], metric=metric, data=all_have, lr=0.1)
    run("c", [2.0], metric=metric, data=all_have | data)
    arguments = [f"metric={metric}", "out=found.json"]
    code, out, _ = in_process(compare.main, tmp_path, *arguments)
    assert code == 0
    assert tables(table.splitlines() for table in out.split("\n\n")) == found
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    numbered = [row["table"] for row in rows]
    assert numbered == [number for number, names in enumerate(found) for _ in names]


def test_names_of_runs_reach_the_terminal_as_text(run, in_process, tmp_path):
    strange = "a\x1b]0;title\x07\n"
    run(strange, [1.0])
    run(f"{strange}none", [])
    (run(f"{strange}damaged", [1.0]) / "run.json").unlink()
    runs = f"runs=['runs/*','{strange}*']"
    name = f"out={strange}.json", f"plot={strange}.png"
    code, out, err = in_process(compare.main, tmp_path, runs, *name)
    assert code == 0
    assert set("\x1b\x07") & set(out + err) == set()
    assert len(out.splitlines()) == 3
    assert len(err.splitlines()) == 5
    assert (tmp_path / f"{strange}.json").exists()


def test_a_folder_is_found_by_its_name_whatever_is_in_it(run, compared):
    """Sweeps of version 1 have = and , in their names."""
    run("s_lr=0.1,seed=1", [1.0])
    run("s[1]", [2.0], lr=0.1)
    for runs in ("runs=runs/s[1]", "runs=runs/s_lr=0.1,seed=1"):
        assert len(compared(runs)[0]) == 3
    assert len(compared("runs=['runs/s_lr=0.1,seed=1','runs/s[1]']")[0]) == 4


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
