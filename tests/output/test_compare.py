"""scripts/compare.py: the tables of runs, and which runs share a table."""

import json
import os

import pytest
from helpers.kernels import add_window
from helpers.refusals import SPECIAL_FILES, printed_keys, time_limit
from PIL import Image

from scripts import compare


@pytest.fixture
def run(tmp_path):
    """run(name, values, seed=..., **optimizer): a run directory with these validation losses at
    steps 10, 20, ..."""

    def make(
        folder_name,
        values,
        seed=0,
        data=None,
        model=None,
        metric="val/loss",
        trainer=None,
        tags=(),
        **optimizer,
    ):
        folder = tmp_path / "runs" / folder_name
        folder.mkdir(parents=True)
        config = {
            "seed": seed,
            "name": folder_name,
            "optimizer": {"name": "adamw", "lr": 0.001} | optimizer,
            "model": model or {},
            "trainer": {"max_steps": 20, "batch_size": 10} | (trainer or {}),
            "data": {"max_length": 10, "path": "a.txt", "tokenizer": "byte"} | (data or {}),
            "lens": {"every": seed},
            "wandb": {"tags": tags},
        }
        (folder / "run.json").write_text(json.dumps({"settings": config}))
        rows = [{"step": n, "train/tokens": 100 * n} for n in (5, 10, 15, 20)]
        rows += [
            {"step": 10 * n, metric: value, "train/tokens": 1000 * n}
            for n, value in enumerate(values, start=1)
        ]
        start = {"step": 0, metric: 9.0, "train/tokens": 0}
        log(folder, start, *sorted(rows, key=lambda row: row["step"]))
        return folder

    return make


def log(folder, *rows):
    """Writes metrics.jsonl with a truncated last line."""
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 20, "val/l']))


@pytest.fixture
def compared(tmp_path, in_process):
    """compared(*arguments): ({heading: cells of its table}, runs reported on stderr, JSON file)."""

    def run_it(*arguments):
        out = tmp_path / "found.json"
        code, shown, err = in_process(compare.main, tmp_path, f"out={out}", *arguments)
        assert code == 0
        parts = shown.strip().split("\n\n")
        notes = [part for part in parts if part[:2] not in ("##", "| ")]
        assert len(notes) == (len(parts) > 2)  # about tables that are not comparable
        parts = parts[: len(parts) - len(notes)]
        tables = [part.splitlines() for part in parts[1::2]]
        cells = [[[c.strip() for c in x.strip("|").split("|")] for x in t] for t in tables]
        named = [line.partition(": ")[0] for line in err.splitlines()]
        return dict(zip(parts[::2], cells, strict=True)), named, json.loads(out.read_text())

    return run_it


def test_seeds_share_a_row_and_the_best_is_first(run, compared, tmp_path):
    """Control characters in names are escaped."""
    run("a", [3.0, 2.0])
    run("b", [3.0, 2.5], seed=1)
    run("c\x1b]0;title\x07", [1.9, 1.5], name="muon", lr=0.01)
    (tmp_path / "runs" / "no\x1b run").mkdir()
    (tmp_path / "runs" / "multirun").mkdir()  # the directories of sweeps
    tables, skipped, found = compared("target=2.2")
    ((head, _, *rows),) = tables.values()
    assert head[:5] == ["run", "optimizer.name", "optimizer.lr", "tokens", "val/loss"]
    name = "c\\x1b]0;title\\x07"
    assert rows[0] == [name, "muon", "0.01", "2,000", "1.5000", "", "1,000 (1 of 1)"]
    of_two = ["2,000", "2.2500", "2.0000–2.5000", "2,000 (1 of 2)"]
    assert rows[1] == ["a + 1 run", "adamw", "0.001", *of_two]
    assert skipped == ["runs/no\\x1b run"]
    curves = [[[0, 9.0], [1000, 3.0], [2000, last]] for last in (2.0, 2.5)]
    assert found["rows"][1]["curves"] == curves
    assert found["rows"][1]["seeds"] == [0, 1]


def test_the_value_of_a_finished_run_is_that_of_the_validation_at_its_end(run, compared):
    """A file of an earlier end, before the run was resumed, does not count."""
    for name, seed, step, loss in (("a", 0, 20, 2.25), ("b", 1, 20, 2.75), ("c", 2, 10, 9.0)):
        parts = [{"loss": loss + change} for change in (-0.5, 0.0, 0.5)]
        final = {"step": step, "windows": 900, "loss": loss, "parts": parts}
        (run(name, [3.0, 2.0], seed=seed) / "validation.json").write_text(json.dumps(final))
    (row,) = compared("target=2")[2]["rows"]
    assert (row["values"], row["windows"]) == ([2.25, 2.75, 2.0], [900, 900, 0])
    assert row["tokens_to_target"] == [2000] * 3  # of the curve
    tables, _, found = compared("runs=runs/[ab]")
    assert found["rows"][0]["windows_error"] == pytest.approx(0.5 / 3**0.5)
    ((head, _, cells),) = tables.values()
    assert dict(zip(head, cells, strict=True))["windows"] == "900 (± 0.2887)"


def test_a_run_that_repeats_another_one_exactly_is_not_counted(run, compared):
    """A run with the same seed and other values is: its device or time limit made a difference."""
    for name, seed, value in (("a", 0, 2.0), ("again", 0, 2.0), ("b", 1, 2.0), ("other", 0, 2.5)):
        run(name, [value], seed=seed)
    tables, _, found = compared()
    (row,), ((*_, shown),) = found["rows"], tables.values()
    assert (row["runs"], row["repeated"]) == (["a", "b", "other"], ["again"])
    assert "again" in shown[0]


def test_texts_and_formulas_that_differ_are_not_in_one_row(run, compared, monkeypatch):
    add_window(monkeypatch)
    for name, text, kernel in (("a", "1", "sdpa"), ("b", "2", "sdpa"), ("c", "1", "window")):
        path = run(name, [2.0], model={"attention": kernel}) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"data": text}))
    tables, _, found = compared()
    assert [row["runs"] for row in found["rows"]] == [["a"], ["c"], ["b"]]
    assert len(tables) == 2
    found = compared("where=[data.checksum=2]")[2]
    assert [row["text"] for row in found["rows"]] == ["data.path=a.txt, data.tokenizer=byte"]


def test_unfinished_runs_and_runs_without_the_metric(run, compared):
    for seed in range(6):
        run(f"a_seed-{seed}", [3.0], seed=seed, trainer={"max_steps": 40})
    run("b", [2.0, float("nan")], lr=0.1, trainer={"max_steps": 40})
    run("c", [], lr=0.2)
    tables, skipped, found = compared()
    ((_, _, *rows),) = tables.values()
    assert [row["mean"] for row in found["rows"]] == [3.0, None]
    assert [len(row["unfinished"]) for row in found["rows"]] == [6, 1]
    assert [row[0] for row in rows] == ["a_seed-0 + 5 runs (6 unfinished)", "b (1 unfinished)"]
    assert [row[3] for row in rows] == ["3.0000", "nan"]
    assert skipped == ["runs/c"]


def test_damaged_and_unlimited_files_are_skipped(run, compared):
    """config.yaml is not read."""
    os.mkfifo(run("a", [1.0, 2.0]) / "config.yaml")
    record = '{"settings": {"trainer": {"max_steps": "many", "batch_size": 1}, "data": {}}}'
    (run("bad-value", [1.0]) / "run.json").write_text(record)
    (run("bad-json", [1.0]) / "run.json").write_text('{"settings": ' * 3000)
    (run("bad-rows", [1.0]) / "metrics.jsonl").write_text("[" * 100_000)
    wrong = {"step": 20, "loss": 1.0, "windows": [], "parts": 3}
    (run("bad-validation", [1.0]) / "validation.json").write_text(json.dumps(wrong))
    for name in ("run.json", "metrics.jsonl"):
        os.truncate(run(f"bad-huge-{name}", [1.0]) / name, 2**33)  # sparse
        for kind, make in SPECIAL_FILES.items():
            make(run(f"bad-{kind}-{name}", [1.0]) / name)
    bad = 8 + 2 * len(SPECIAL_FILES)  # the log that is too large has two lines
    with time_limit():
        tables, skipped, _ = compared("runs=[runs/*,nowhere]")
    assert [len(table) for table in tables.values()] == [3]
    assert sorted(name.split("-")[0] for name in skipped) == ["nowhere"] + bad * ["runs/bad"]


def test_tokens_are_the_logged_ones(run, compared):
    """Rows without a valid number of tokens are skipped. A target reached exactly counts."""
    rows = [{"step": 10 * n, "val/loss": 3.5 - n / 2, "train/tokens": 500 * n} for n in (1, 2, 3)]
    rows += [{"step": 40, "val/loss": 4.0, "train/tokens": n} for n in ("nan", -1, 10**30)]
    log(run("a", []), *rows)
    (first,) = compared("target=2.5")[2]["rows"]
    assert first["curves"] == [[[500, 3.0], [1000, 2.5], [1500, 2.0]]]
    assert (first["tokens"], first["tokens_to_target"]) == (1500, [1000])


def test_each_text_and_tokenizer_has_its_table(run, compared, tmp_path):
    """Bits per byte are compared between tokenizers. Runs with the same validation text share a
    table."""
    for name, value, data in (
        ("a", 3.0, {}),
        ("b", 1.0, {"path": "b.txt"}),
        ("c", 2.0, {"tokenizer": "gpt2"}),
        ("d", 2.0, {"path": "d.txt", "val_path": "v.txt"}),
        ("e", 1.5, {"path": "e.txt", "val_path": "v.txt"}),
    ):
        run(name, [value], data=data, lr=value)
    tables, _, found = compared(f"plot={tmp_path / 'all.png'}")
    assert [[row[0] for row in rows] for _, _, *rows in tables.values()] == [
        ["a"],
        ["c"],
        ["b"],
        ["e", "d"],
    ]
    names = ["data.path=a.txt", "data.path=a.txt", "data.path=b.txt", "data.val_path=v.txt"]
    assert [heading.strip("# ").split(", ")[0] for heading in tables] == names
    assert [row["runs"] for row in found["rows"]] == [["a"], ["c"], ["b"], ["e"], ["d"]]
    assert len({row["text"] for row in found["rows"]}) == 4
    with Image.open(tmp_path / "all.png") as picture:
        assert picture.height > 2 * picture.width  # a chart for each table
    for name, value, data in (("f", 1.0, {}), ("g", 2.0, {"tokenizer": "gpt2"})):
        run(name, [value], data=data, metric="val/bits_per_byte")
    tables, *_ = compared("metric=val/bits_per_byte")
    ((head, _, *rows),) = tables.values()
    assert (head[1], [row[0] for row in rows]) == ("data.tokenizer", ["f", "g"])


def test_columns_are_the_settings_that_differ_within_a_table(run, compared):
    """A column shows the model. Settings that follow from others have no column."""
    nano = {"context_length": 256, "emb_dim": 128, "num_heads": 4, "num_layers": 4}
    medium = {"context_length": 1024, "emb_dim": 1024, "num_heads": 16, "num_layers": 24}
    for name, lr, tokenizer, model, steps, warmup in (
        ("a", 0.1, "byte", nano | {"vocab_size": 257}, 100, 20),
        ("b", 0.2, "byte", nano | {"vocab_size": 257}, 200, 24),
        ("c", 0.2, "gpt2", nano | {"vocab_size": 50257}, 200, 24),
        ("d", 0.2, "gpt2", medium | {"vocab_size": 50257}, 200, 24),
        ("e", 0.2, "gpt2", medium | {"emb_dim": 512, "vocab_size": 50257}, 200, 40),
    ):
        trainer = {"max_steps": steps, "warmup_steps": warmup}
        folder = run(name, [], data={"tokenizer": tokenizer}, model=model, trainer=trainer, lr=lr)
        both = dict.fromkeys(("val/loss", "val/bits_per_byte"), float(ord(name)))
        log(folder, {"step": 1, "train/tokens": 1} | both)
    tables, *_ = compared()
    byte, gpt2 = tables.values()
    assert byte[0][1:-2] == ["optimizer.lr", "trainer.max_steps"]
    assert [row[1:-2] for row in (gpt2[0], *gpt2[2:4])] == [
        ["model", "model.context_length", "trainer.warmup_steps"],
        ["gpt2-nano", "256", "24"],
        ["gpt2-medium", "1024", "24"],
    ]
    assert {"24", "16", "512"} < set(gpt2[4][1].replace(",", "").split())
    (table,) = compared("metric=val/bits_per_byte", "runs=runs/[a-d]")[0].values()
    columns = {
        "model",
        "model.context_length",
        "data.tokenizer",
        "optimizer.lr",
        "trainer.max_steps",
    }
    assert set(table[0][1:-2]) == columns


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("optimizer.name=muon", "b"),
        ("optimizer=adamw", "ac"),
        ("optimizer.lr=1e-2", "ab"),
        ("wandb.tags=x", "bc"),
        ("wandb.tags=[x,y]", "c"),
        ("model=gpt2-nano", "ac"),  # with any context length
        ("val/loss=2", "b"),
        ("[optimizer.lr=0.01,val/loss=3]", "a"),
        ("[model=gpt2-nano,name=c,data.weights=null]", "c"),
    ],
)
def test_only_runs_that_meet_all_conditions(run, compared, where, names):
    nano = {"context_length": 256, "emb_dim": 128, "num_heads": 4, "num_layers": 4}
    for name, value, lr, optimizer, model in (
        ("a", 3.0, 0.01, "adamw", nano | {"context_length": 64}),
        ("b", 2.0, 0.01, "muon", nano | {"emb_dim": 64}),
        ("c", 1.0, 0.001, "adamw", nano),
    ):
        tags = {"a": [], "b": ["x"], "c": ["x", "y"]}[name]
        data = {"weights": None}
        run(name, [value], data=data, model=model, tags=tags, lr=lr, name=optimizer)
    found = compared(f"where={where}", "runs=[runs/*,runs/a]")[2]  # each run counts once
    assert sorted(name for row in found["rows"] for name in row["runs"]) == [*names]


def test_highest_accuracy_first(run, compared):
    for name, value in (("a", 0.2), ("b", 0.4), ("c", float("nan"))):
        steps = [{"step": n, "train/tokens": n, "val/accuracy": n * value / 2} for n in (1, 2)]
        log(run(name, [], lr=value), *steps)
    rows = compared("metric=val/accuracy", "target=0.2")[2]["rows"]
    assert [row["runs"] for row in rows] == [["b"], ["a"], ["c"]]
    assert [row["tokens_to_target"] for row in rows] == [[1], [2], [None]]


def test_runs_of_a_sweep_directory(run, compared, tmp_path):
    for number, name in enumerate(("a", "b", "b", None)):
        folder = tmp_path / "sweep" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"run": name and f"runs/{name}"}))
    (folder / "result.json").write_text("[")
    for seed, name in enumerate("abc"):
        run(name, [1.0], seed=seed)
    assert [row["runs"] for row in compared("runs=sweep")[2]["rows"]] == [["a", "b"]]


def test_settings_that_are_refused(run, in_process, tmp_path):
    run("c", [])
    os.mkfifo(tmp_path / "fifo")
    found = {
        "out=fifo": "out",
        "runs=nowhere/*": "runs",
        "runs=runs/c": "metric",
        "out=runs": "out",
        "plot=a.svg": "plot",
        "metric=val/lss": "metric",
    }
    found |= {f"where={text}": "where" for text in ("muon", "optimiser.lr=1", "seed=5", "=1")}
    for argument, key in found.items():
        code, _, err = in_process(compare.main, tmp_path, argument)
        assert (code, printed_keys(err)[-1]) == (2, key)
