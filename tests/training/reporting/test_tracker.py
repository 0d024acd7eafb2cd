"""Metrics on disk and on W&B: real offline runs, read back from their files."""

import csv
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from helpers import NO_NETWORK, REPOSITORY, TEXT, TINY
from matplotlib.image import imsave

from errors import CheckpointError
from lens import Look
from lens.page import read
from lens.statistics import STATISTICS
from training.checkpoint import FILES, find
from training.command import compose
from training.hf import load_any
from training.report import sample_page
from training.tracker import NoTracker, Tracker
from training.wandb_run import FILES_AT_MOST, MOST_SAMPLES, WandbConfig


@pytest.fixture
def look(tmp_path):
    """A look with a number of each kind, a picture and a page."""
    folder = tmp_path / "attention"
    folder.mkdir()
    imsave(folder / "grid.png", np.zeros((4, 4, 3)))
    (folder / "page.html").write_text("<!doctype html><p>all heads</p>")
    return Look(
        metrics={"attention_layers/entropy/L00": 0.5},
        heads={"attention_heads/entropy/L00H00": 0.25},
        histograms={"attention_histograms/entropy": np.array([0.25, 0.75])},
        pictures={"attention/heatmap/x": folder / "grid.png"},
        pages={"attention/viewer": folder / "page.html"},
    )


class Recorded:
    """Stands for a W&B run: keeps what it is told."""

    id, offline, dir = "x", True, "nowhere/files"

    def __init__(self):
        self.rows, self.metrics, self.summary, self.alerts = {}, [], {}, []

    def log(self, row, step):
        self.rows[step] = row

    def define_metric(self, *arguments, **options):
        self.metrics.append((arguments, options))

    def alert(self, title, text, level, wait_duration):
        self.alerts.append((title, text, level))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def recorded(monkeypatch):
    run = Recorded()
    monkeypatch.setattr("training.wandb_run._start", lambda *_: run)
    return run


def history(folder):
    """The rows of the offline run below `folder`, as W&B would show them."""
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    found = [record["history"]["item"] for record in records if record["type"] == "history"]
    return found, records, file.parent / "files"


def test_rows_on_disk(tmp_path, look):
    """The means over layers and the files of a look; every head stands in statistics.jsonl."""
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.5, "train/grad_norm": math.inf}, step=1)
    tracker.log({"val/loss": math.nan}, step=2, look=look)
    tracker.finish()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "train/loss": 1.5, "train/grad_norm": "inf"},
        {
            "step": 2,
            "val/loss": "nan",
            "attention_layers/entropy/L00": 0.5,
            "attention/heatmap/x": "attention/grid.png",
            "attention/viewer": "attention/page.html",
        },
    ]
    assert tracker.run_id is None
    assert tracker.where() is None


def test_a_look_becomes_one_row_of_each_kind_of_media(tmp_path, look, recorded):
    import wandb

    look.tables = {"attention/table": (("statistic", "head"), [("entropy", 0)])}
    tracker = Tracker(WandbConfig(), tmp_path, {})
    tracker.log({"train/loss": 1.5}, step=3, look=look)
    tracker.finish()
    assert list(recorded.rows) == [3]
    row = recorded.rows[3]
    assert row["train/loss"] == 1.5
    assert row["attention_layers/entropy/L00"] == 0.5
    assert row["attention_heads/entropy/L00H00"] == 0.25
    kinds = {key: type(value) for key, value in row.items() if not isinstance(value, float)}
    assert kinds == {
        "attention_histograms/entropy": wandb.Histogram,
        "attention/heatmap/x": wandb.Image,
        "attention/viewer": wandb.Html,
        "attention/table": wandb.Table,
    }
    assert recorded.metrics == [(("attention_heads/*",), {"hidden": True})]


def test_beyond_the_limit_files_are_left_out_and_numbers_stay(
    tmp_path, look, recorded, monkeypatch
):
    monkeypatch.setattr("training.wandb_run.FILES_AT_MOST", 5)
    tracker = Tracker(WandbConfig(), tmp_path, {})
    for step in range(4):
        tracker.log({"train/loss": 1.0}, step, look)
    tracker.finish()
    with_files = [step for step, row in recorded.rows.items() if "attention/viewer" in row]
    assert with_files == [0, 1]  # two files each
    for row in recorded.rows.values():
        assert row["attention_layers/entropy/L00"] == 0.5
        assert row["attention_heads/entropy/L00H00"] == 0.25
        assert "attention_histograms/entropy" in row
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("attention/viewer" in row for row in rows)  # on disk they are


def test_a_run_that_goes_on_counts_the_files_it_has_logged(tmp_path, look, recorded):
    first = Tracker(WandbConfig(), tmp_path, {})
    assert first.wandb.files_left == FILES_AT_MOST
    for step in range(3):
        first.log({"attention_layers/entropy/L00": 1.0}, step, look)
    first.finish()
    assert first.wandb.files_left == FILES_AT_MOST - 6
    resumed = Tracker(WandbConfig(), tmp_path, {})
    assert resumed.wandb.files_left == first.wandb.files_left
    resumed.finish()


def test_rows_are_on_disk_at_once(tmp_path):
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.0}, step=1)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    tracker.finish()


def test_sync_makes_the_rows_last(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: (synced.append(os.fstat(n).st_ino), real(n)))
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.0}, step=1)
    assert synced == []
    tracker.sync()
    assert synced == [os.stat(tmp_path / "metrics.jsonl").st_ino, os.stat(tmp_path).st_ino]
    tracker.finish()


def test_the_other_ranks_tracker_takes_the_same_calls():
    ours = {name for name in vars(Tracker) if not name.startswith("_")}
    assert ours <= {name for name in vars(NoTracker) if not name.startswith("_")}


def test_a_broken_wandb_never_stops_training(tmp_path, monkeypatch, capsys):
    import wandb

    def broken(**_):
        raise wandb.errors.CommError("server\nsays no")

    monkeypatch.setattr(wandb, "init", broken)
    tracker = Tracker(WandbConfig(mode="offline"), tmp_path, {})
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["W&B: left out, metrics are in metrics.jsonl (server says no)"]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_wandb_that_dies_in_the_middle_is_left_out_once(tmp_path, capsys):
    class Dead:
        id = "x"

        def log(self, *_, **__):
            raise ConnectionResetError("gone")

    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.wandb.run = Dead()
    for step in (1, 2):
        tracker.log({"train/loss": 1.0}, step=step)
    tracker.summary({"best_val_loss": 1.0})
    tracker.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["W&B: left out, metrics are in metrics.jsonl (gone)"]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_no_key_means_offline_with_one_notice_and_no_question(tmp_path, monkeypatch, capsys, mode):
    import wandb

    started = {}
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: prompt)  # there is no key
    monkeypatch.setattr(wandb, "init", lambda **options: started.update(options))
    Tracker(WandbConfig(mode=mode), tmp_path, {}).finish()
    assert started["mode"] == "offline"
    assert capsys.readouterr().err.startswith("W&B: no API key found")


def test_an_unreachable_server_means_offline(tmp_path, monkeypatch, capsys):
    import wandb

    modes = []

    def init(mode, **_):
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("timed out")

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    monkeypatch.setattr(wandb, "init", init)
    Tracker(WandbConfig(), tmp_path, {}).finish()
    assert modes == ["online", "offline"]
    assert "not reached (timed out)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A whole run, offline and without an account: (overrides, its folder, what W&B has)."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    overrides = [s for s in TINY if not s.startswith(("lens", "wandb", "trainer.sample"))]
    overrides += [f"data.path={folder}/text.txt", "lens.every=2", "lens.layers=[1]"]
    done = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "train.py"),
            *overrides,
            "name=watched",
            "wandb.tags=[a,b]",
            "wandb.notes=What is new, [here]: nothing",
            "wandb.group=first tries",
            "wandb.log_model=best",
        ],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(NO_NETWORK),
            "OMP_NUM_THREADS": "1",
            "WANDB_X_STATS_SAMPLING_INTERVAL": "0.5",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return overrides, folder / "runs" / "watched", history(folder / "runs" / "watched")


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run_on_wandb(watched):
    """Every row and the configuration, at the right steps."""
    _, folder, (rows, records, _) = watched
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    for row, mine in zip(rows, metrics(folder), strict=True):
        assert row["_step"] == mine.pop("step")
        for key, value in mine.items():
            if not isinstance(value, str):
                assert row[key] == pytest.approx(value)
    text = json.dumps(records)
    for part in ("clearhead", "watched", "emb_dim"):
        assert part in text


def test_the_run_on_wandb_says_what_it_is_and_what_it_came_to(watched):
    _, folder, (_, records, _) = watched
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert run["display_name"] == "watched"
    assert run["job_type"] == "train"
    assert run["run_group"] == "first tries"
    assert run["tags"] == ["a", "b"]
    assert run["notes"] == "What is new, [here]: nothing"
    # The configuration is the one on disk, defaults and what was settled meanwhile included.
    config = run["config"]["update"]
    del config["_wandb"]
    assert config == yaml.safe_load((folder / "config.yaml").read_text())
    summary = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    model, state = load_any(folder / "checkpoints" / "best")
    assert summary["best_val_loss"] == pytest.approx(state.val_loss)
    assert summary["best_step"] == state.step
    assert summary["parameters"] == model.num_parameters()
    assert summary["exit_code"] == 0
    stats = [record["stats"]["item"] for record in records if record["type"] == "stats"]
    assert {"memory_percent", "proc.memory.rssMB", "cpu"} <= stats[-1].keys()


def test_every_validation_has_its_sample(watched):
    _, folder, (rows, _, files) = watched
    written = [json.loads(line) for line in (folder / "samples.jsonl").open(encoding="utf-8")]
    key = "samples/text"
    shown = {row["_step"]: files / row[f"{key}.path"] for row in rows if f"{key}.path" in row}
    assert [row["step"] for row in written] == list(shown) == [2, 4]
    for row in written:
        assert shown[row["step"]].read_text(encoding="utf-8") == sample_page(row)


def test_the_model_that_is_uploaded_can_be_used(watched, tmp_path):
    """What W&B would hand out: the artifact's files, each under its name there."""
    _, folder, (_, records, _) = watched
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    (artifact,) = (one for one in artifacts if one["type"] == "model")
    best = (folder / "checkpoints" / "best").resolve()
    assert artifact["name"] == f"model-{artifact['run_id']}"
    assert {"best", f"step_{int(best.name[5:])}"} <= set(artifact["aliases"])
    for file in artifact["manifest"]["contents"]:
        shutil.copy(file["local_path"], tmp_path / file["path"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.safetensors",
        "state.json",
        "SHA256SUMS",
        "config.yaml",
    }
    model, state = load_any(tmp_path)
    assert json.loads(artifact["metadata"])["val_loss"] == pytest.approx(state.val_loss)
    again, _ = load_any(best)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors: is missing"):
        find(tmp_path, "trainer.resume", FILES)  # it has no moments to go on with


def test_pictures_and_pages_on_wandb_are_those_on_disk_byte_for_byte(watched):
    """Nothing is put into a page on its way: its policy would forbid it."""
    _, folder, (rows, _, files) = watched
    kinds = {}
    for row, mine in zip(rows, metrics(folder), strict=True):
        for key, value in mine.items():
            if isinstance(value, str):
                kinds.setdefault(row[f"{key}._type"], []).append((row["_step"], key))
                if key != "attention/timelapse" or row["_step"] == 4:  # written over since
                    stored = files / row[f"{key}.path"]
                    assert stored.read_bytes() == (folder / value).read_bytes()
    assert {step for step, _ in kinds["image-file"]} == {0, 2, 4}
    assert len(kinds["image-file"]) == 3 * 4 * 2  # looks, prompts, grid and layer
    assert kinds["html-file"] == [
        (0, "attention/viewer"),
        (2, "attention/viewer"),
        (2, "attention/timelapse"),
        (4, "attention/viewer"),
        (4, "attention/timelapse"),
    ]
    (half,) = read(files / rows[2]["attention/timelapse.path"])
    assert [frame["step"] for frame in half["frames"]] == [0, 2]


def test_numbers_of_layers_are_shown_those_of_heads_hidden(watched):
    _, folder, (rows, records, _) = watched
    hidden = [record["metric"] for record in records if record["type"] == "metric"]
    (rule,) = [metric for metric in hidden if metric["options"].get("hidden")]
    assert rule["glob_name"] == "attention_heads/*"
    looks = [json.loads(x) for x in (folder / "attention" / "statistics.jsonl").open()]
    assert [look["step"] for look in looks] == [0, 2, 4]
    for look in looks:
        row = rows[look["step"]]
        for key in STATISTICS:
            for layer in (0, 1):
                mean = row[f"attention_layers/{key}/L0{layer}"]
                assert mean == pytest.approx(sum(look[key][layer]) / 2, abs=1e-4)
                for head in (0, 1):
                    value = row[f"attention_heads/{key}/L0{layer}H0{head}"]
                    assert value == pytest.approx(look[key][layer][head], abs=1e-4)
            assert row[f"attention_histograms/{key}._type"] == "histogram"
            assert sum(row[f"attention_histograms/{key}.values"]) == 4
    for step in (1, 3):
        assert not [key for key in rows[step] if key.startswith("attention")]


def test_the_table_comes_at_the_end(watched):
    _, folder, (rows, _, files) = watched
    with_table = [row["_step"] for row in rows if "attention/table._type" in row]
    assert with_table == [4]
    table = json.loads((files / rows[4]["attention/table.path"]).read_text())
    with open(folder / "attention" / "heads.csv", newline="", encoding="utf-8") as file:
        names, *written = csv.reader(file)
    assert table["columns"] == names
    assert [[str(value) for value in row] for row in table["data"]] == written
    assert len(written) == len(STATISTICS) * 4


def test_docs_wandb_names_what_is_recorded(watched):
    """Each key of the table, patterns included, is one of a real run; and each key has its row."""
    _, _, (rows, _, _) = watched
    text = (REPOSITORY / "docs" / "wandb.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`\w+/[^|]*) \|", text, re.M)
    named = [key for cell in first_cells for key in re.findall(r"`([^`]+)`", cell)]
    patterns = [re.sub(r"<\w+>", r"[\\w-]+", re.sub(r"\d\d", r"\\d\\d", key)) for key in named]
    keys = {key.partition(".")[0] for row in rows for key in row if "/" in key}
    sometimes = {"train/mfu", "train/loss_z_score", "val/accuracy"}
    for name, pattern in zip(named, patterns, strict=True):
        assert name in sometimes or any(re.fullmatch(pattern, key) for key in keys), name
    for key in keys:
        assert any(re.fullmatch(pattern, key) for pattern in patterns), key


def test_the_commands_links_and_pictures_of_docs_wandb():
    docs = REPOSITORY / "docs"
    text = (docs / "wandb.md").read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    trainings = [command[2:] for command in words if command[:2] == ["python", "train.py"]]
    assert len(trainings) == 3
    for overrides in trainings:
        compose(overrides)
    for setting in re.findall(r"`wandb\.(\w+)[`=]", text):
        assert setting in WandbConfig.__dataclass_fields__, setting
    assert set(WandbConfig.__dataclass_fields__) - {"mode"} <= set(
        re.findall(r"wandb\.(\w+)", text)
    )
    links = set(re.findall(r"\]\(([\w./-]+)\)", text))
    pictures = sorted(docs.glob("wandb-*.png"))
    assert {path.name for path in pictures} <= links
    for link in links:
        assert (docs / link).is_file(), link
    for path in pictures:
        assert path.stat().st_size < 200_000


def test_without_wandb_the_same_is_on_disk(watched, trainer):
    overrides, folder, _ = watched
    run = trainer("lens=default", *overrides, "wandb=off", "name=alone")
    run.train()
    seen, alone = folder / "attention", run.folder / "attention"
    assert sorted(p.name for p in alone.iterdir()) == sorted(p.name for p in seen.iterdir())
    for name in ("statistics.jsonl", "heads.csv"):
        assert (alone / name).read_bytes() == (seen / name).read_bytes()
    for path in alone.glob("*.png"):
        assert path.read_bytes() == (seen / path.name).read_bytes()
    (one,), (other,) = read(alone / "timelapse.html"), read(seen / "timelapse.html")
    assert one["frames"] == other["frames"]
    assert not (run.folder / "wandb").exists()
    keys = [sorted(row) for row in metrics(folder)]
    assert [sorted(row) for row in metrics(run.folder)] == keys


def test_a_long_run_shows_some_of_its_samples(tmp_path, recorded):
    trainer = {"max_steps": 100_500, "eval_every": 100}
    tracker = Tracker(WandbConfig(), tmp_path, {"trainer": trainer})
    for step in [*range(100, 100_500, 100), 100_500]:
        tracker.log({}, step, sample={"step": step, "prompt": "a", "text": "a b"})
    tracker.finish()
    shown = [step for step, row in recorded.rows.items() if "samples/text" in row]
    assert 30 < len(shown) <= MOST_SAMPLES + 1
    assert shown[-1] == 100_500
    assert len({b - a for a, b in itertools.pairwise(shown[:-1])}) == 1
    assert not (tmp_path / "metrics.jsonl").exists()  # a row of nothing is none


@pytest.mark.parametrize("wished", [True, False])
def test_alerts_are_sent_where_they_are_wished(tmp_path, recorded, wished):
    tracker = Tracker(WandbConfig(alerts=wished), tmp_path, {})
    tracker.alert("DivergedError", "the loss is nan", "ERROR")
    tracker.finish(4)
    assert recorded.alerts == [("DivergedError", "the loss is nan", "ERROR")] * wished
    assert recorded.exit_code == recorded.summary["exit_code"] == 4


def test_what_has_no_effect_without_wandb_is_told(trainer, capsys):
    trainer("wandb.log_model=last", "wandb.alerts=true", "trainer.max_steps=2").train()
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: wan")]
    assert notes == [
        "note: wandb.log_model=last: without effect, as W&B is off",
        "note: wandb.alerts=true: without effect, as W&B is off",
    ]


def test_a_model_that_cannot_be_uploaded_is_told(tmp_path, recorded, capsys):
    tracker = Tracker(WandbConfig(log_model="last"), tmp_path, {})
    assert tracker.wandb.log_model([tmp_path / "gone.safetensors"], ["last"], {}) is None
    tracker.log({"train/loss": 1.0}, 1)
    tracker.finish()
    assert recorded.rows == {1: {"train/loss": 1.0}}
    line, *_ = capsys.readouterr().err.splitlines()
    assert line.startswith("W&B: the model was not uploaded (Path is not a file")


def test_commands_name_a_folder_with_a_blank_as_one_word(tmp_path, recorded, capsys):
    recorded.dir = "my runs/a/wandb/run-1/files"
    tracker = Tracker(WandbConfig(), tmp_path, {})
    command = tracker.where().partition("wandb sync ")[2]
    assert shlex.split(command) == ["my runs/a/wandb/offline-run-*"]
    recorded.offline, recorded.entity, recorded.project = False, "me", "clearhead"
    tracker.wandb.log_model([tmp_path / "my run" / "gone.safetensors"], ["last"], {})
    command = capsys.readouterr().err.partition("wandb artifact put ")[2]
    assert shlex.split(command)[-1] == str(tmp_path / "my run")

    def fails(row, step):
        raise TimeoutError

    recorded.log = fails
    tracker.log({"train/loss": 1.0}, 1)
    command = capsys.readouterr().err.partition("wandb sync ")[2]
    assert shlex.split(command)[:2] == ["--include-online", "my runs/a/wandb/run-1"]


def test_a_bad_picture_costs_the_picture_only(tmp_path, capsys):
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.wandb.run = run = Recorded()
    missing = {"attention/heatmap/x": tmp_path / "missing.png"}
    tracker.log(
        {"train/loss": 1.0}, 1, Look({"attention_layers/entropy/L00": 0.5}, {}, {}, missing)
    )
    tracker.finish()
    assert run.rows == {1: {"train/loss": 1.0, "attention_layers/entropy/L00": 0.5}}
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.wandb.run = run = Recorded()
    tracker.log({"train/loss": 1.0}, 2, Look({}, {}, {"h": [math.nan, 1.0]}))
    tracker.finish()
    assert run.rows == {2: {"train/loss": 1.0}}
    told = capsys.readouterr().err
    assert told.count("W&B: a picture or page was left out (") == 2
