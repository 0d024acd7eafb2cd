"""Metrics on disk and on W&B: a real offline run, read back from its files."""

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
from helpers import REPOSITORY, TEXT, TINY
from helpers.refusals import refused
from helpers.runs import rows
from helpers.settings import settings
from matplotlib.image import imsave

from errors import DamagedCheckpointError
from lens import Look
from lens.page import read
from lens.statistics import STATISTICS
from train import Trainer
from training.checkpoint import FILES, find
from training.hf import load_any
from training.report import sample_page
from training.tracker import NoTracker, Tracker
from training.wandb_run import FILES_AT_MOST, MOST_SAMPLES, WandbConfig

OFFLINE, OFF = WandbConfig(mode="offline"), WandbConfig(mode="disabled")


@pytest.fixture
def look(tmp_path):
    """A look with one of each kind: a number, a picture, a page, a table."""
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
        tables={"attention/table": (("statistic", "head"), [("entropy", 0)])},
    )


class Recorded:
    """In place of a W&B run: keeps what it is given. error: what log() raises."""

    id, offline, error = "x", True, None

    def __init__(self, folder):
        self.dir = str(folder / "wandb" / "run-1" / "files")
        (folder / "wandb" / "run-1" / "logs").mkdir(parents=True)
        (folder / "wandb" / "run-1" / "logs" / "debug-internal.log").touch()
        self.rows, self.metrics, self.summary, self.alerts = {}, [], {}, []

    def log(self, row, step):
        if self.error:
            raise self.error
        self.rows[step] = row

    def define_metric(self, *arguments, **options):
        self.metrics.append((arguments, options))

    def alert(self, title, text, level, wait_duration):
        self.alerts.append((title, text, level))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    run = Recorded(tmp_path / "my runs")
    monkeypatch.setattr("wandb.init", lambda **_: run)
    return run


def test_rows_are_on_disk_at_once_and_after_sync_lasting(tmp_path, look, monkeypatch):
    """Means over layers and files of a look; the numbers of heads are in statistics.jsonl."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: (synced.append(os.fstat(n).st_ino), real(n)))
    tracker = Tracker(OFF, tmp_path, {})
    tracker.log({"train/loss": 1.5, "train/grad_norm": math.inf}, step=1)
    assert rows(tmp_path) == [{"step": 1, "train/loss": 1.5, "train/grad_norm": "inf"}]
    tracker.log({"val/loss": math.nan}, step=2, look=look)
    assert rows(tmp_path)[1] == {
        "step": 2,
        "val/loss": "nan",
        "attention_layers/entropy/L00": 0.5,
        "attention/heatmap/x": "attention/grid.png",
        "attention/viewer": "attention/page.html",
    }
    assert synced == []
    tracker.sync()
    assert synced == [os.stat(tmp_path / "metrics.jsonl").st_ino, os.stat(tmp_path).st_ino]
    tracker.finish()
    assert tracker.run_id is None
    assert tracker.where() is None


def test_a_look_is_one_row_with_media_of_each_kind(tmp_path, look, recorded):
    import wandb

    tracker = Tracker(OFFLINE, tmp_path, {})
    tracker.log({"train/loss": 1.5}, step=3, look=look)
    tracker.finish()
    assert list(recorded.rows) == [3]
    numbers = {key: value for key, value in recorded.rows[3].items() if isinstance(value, float)}
    assert numbers == {"train/loss": 1.5, **look.metrics, **look.heads}
    kinds = {key: type(value) for key, value in recorded.rows[3].items() if key not in numbers}
    assert kinds == {
        "attention_histograms/entropy": wandb.Histogram,
        "attention/heatmap/x": wandb.Image,
        "attention/viewer": wandb.Html,
        "attention/table": wandb.Table,
    }
    assert recorded.metrics == [(("attention_heads/*",), {"hidden": True})]


def test_files_are_limited_also_after_a_resume(tmp_path, look, recorded, monkeypatch):
    """On W&B; on disk all are named, and numbers are always logged."""
    tracker = Tracker(OFFLINE, tmp_path / "first", {})
    assert tracker.wandb.files_left == FILES_AT_MOST
    tracker.finish()
    monkeypatch.setattr("training.wandb_run.FILES_AT_MOST", 5)
    for steps in ((0,), (1, 2, 3)):
        tracker = Tracker(OFFLINE, tmp_path, {})
        for step in steps:
            tracker.log({"train/loss": 1.0}, step, look)
        tracker.finish()
    with_files = [step for step, row in recorded.rows.items() if "attention/viewer" in row]
    assert with_files == [0, 1]  # two files each
    numbers = {*look.metrics, *look.heads, *look.histograms}
    assert all(numbers <= row.keys() for row in recorded.rows.values())
    assert all("attention/viewer" in row for row in rows(tmp_path))


def test_a_long_run_shows_some_of_its_samples(tmp_path, recorded):
    trainer = {"max_steps": 10_500, "eval_every": 10}
    tracker = Tracker(OFFLINE, tmp_path, {"trainer": trainer})
    for step in range(10, 10_501, 10):
        tracker.log({}, step, sample={"step": step, "prompt": "a", "text": "a b"})
    tracker.finish()
    shown = [step for step, row in recorded.rows.items() if "samples/text" in row]
    assert 30 < len(shown) <= MOST_SAMPLES + 1
    assert shown[-1] == 10_500
    assert len({b - a for a, b in itertools.pairwise(shown[:-1])}) == 1
    assert not (tmp_path / "metrics.jsonl").exists()  # no row without values


def test_tracker_of_other_ranks_has_all_methods():
    ours = {name for name in vars(Tracker) if not name.startswith("_")}
    assert ours <= {name for name in vars(NoTracker) if not name.startswith("_")}


def test_alerts_are_sent_if_enabled(tmp_path, recorded):
    for enabled in (False, True):
        tracker = Tracker(WandbConfig(mode="offline", alerts=enabled), tmp_path, {})
        tracker.alert("DivergedError", "the loss is nan", "ERROR")
        tracker.finish(4)
        assert recorded.alerts == [("DivergedError", "the loss is nan", "ERROR")] * enabled
    assert recorded.exit_code == recorded.summary["exit_code"] == 4


# -------------------------------------- parts that fail; W&B as a whole: faults/test_wandb_faults


def test_settings_without_effect_are_named():
    config = WandbConfig(mode="disabled", log_model="last", alerts=True)
    keys = [note.partition("=")[0] for note in config.ignored()]
    assert keys == ["wandb.log_model", "wandb.alerts"]
    assert WandbConfig(mode="offline", log_model="last").ignored() == OFF.ignored() == []


def test_media_that_cannot_be_read_are_left_out(tmp_path, recorded, capsys):
    tracker = Tracker(WandbConfig(mode="offline", log_model="last"), tmp_path, {})
    missing = {"attention/heatmap/x": tmp_path / "missing.png"}
    number = {"attention_layers/entropy/L00": 0.5}
    tracker.log({"train/loss": 1.0}, 1, Look(number, {}, {}, missing))
    tracker.log({"train/loss": 1.0}, 2, Look({}, {}, {"h": [math.nan, 1.0]}))
    assert tracker.wandb.log_model([tmp_path / "missing.safetensors"], ["last"], {}) is None
    tracker.log({"train/loss": 1.0}, 3)
    tracker.finish()
    assert recorded.rows == {
        1: {"train/loss": 1.0, **number},
        2: {"train/loss": 1.0},
        3: {"train/loss": 1.0},
    }
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_printed_commands_quote_a_folder_with_a_blank(tmp_path, recorded, capsys):
    tracker = Tracker(OFFLINE, tmp_path, {})
    command = tracker.where().partition("wandb sync ")[2]
    assert shlex.split(command) == [f"{tmp_path}/my runs/wandb/offline-run-*"]
    recorded.offline, recorded.entity, recorded.project = False, "me", "clearhead"
    tracker.wandb.log_model([tmp_path / "my run" / "gone.safetensors"], ["last"], {})
    command = capsys.readouterr().err.partition("wandb artifact put ")[2]
    assert shlex.split(command)[-1] == str(tmp_path / "my run")
    recorded.error = TimeoutError()
    tracker.log({"train/loss": 1.0}, 1)
    command = capsys.readouterr().err.partition("wandb sync ")[2]
    assert shlex.split(command)[:2] == ["--include-online", f"{tmp_path}/my runs/wandb/run-1"]


# ----------------------------------------------------------------------------- a real offline run


def history(folder):
    """(rows, all records, folder of files) of the offline run below `folder`, as W&B reads it."""
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    found = [record["history"]["item"] for record in records if record["type"] == "history"]
    return found, records, file.parent / "files"


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A whole run, offline and without an account: (overrides, its folder, what W&B has)."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    overrides = [s for s in TINY if not s.startswith(("lens", "wandb", "trainer.sample"))]
    overrides += [f"data.path={folder}/text.txt", "lens.every=2", "lens.layers=[1]"]
    named = ["name=watched", "wandb.tags=[a,b]", "wandb.notes=What is new, [here]: nothing"]
    named += ["wandb.group=first tries", "wandb.log_model=best", "wandb.mode=offline"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.5")
        run = Trainer(settings(*overrides, *named))
        run.train()
        run.close(0)
    return overrides, folder / "runs" / "watched", history(folder / "runs" / "watched")


def test_rows_configuration_and_summary(watched):
    _, folder, (logged, records, _) = watched
    assert [row["_step"] for row in logged] == [0, 1, 2, 3, 4]
    for row, mine in zip(logged, rows(folder), strict=True):
        assert row["_step"] == mine.pop("step")
        for key, value in mine.items():
            assert isinstance(value, str) or row[key] == pytest.approx(value)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["project"], run["display_name"], run["job_type"]) == (
        "clearhead",
        "watched",
        "train",
    )
    assert (run["run_group"], run["tags"]) == ("first tries", ["a", "b"])
    assert run["notes"] == "What is new, [here]: nothing"
    config = run["config"]["update"]  # with defaults and what was decided at the start
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


def test_uploaded_model_can_be_loaded(watched, tmp_path):
    """The artifact's files, each under its name there; without moments they cannot be resumed."""
    _, folder, (_, records, _) = watched
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    (artifact,) = (one for one in artifacts if one["type"] == "model")
    best = (folder / "checkpoints" / "best").resolve()
    assert artifact["name"] == f"model-{artifact['run_id']}"
    assert {"best", f"step_{int(best.name[5:])}"} <= set(artifact["aliases"])
    for file in artifact["manifest"]["contents"]:
        shutil.copy(file["local_path"], tmp_path / file["path"])
    names = {"model.safetensors", "state.json", "SHA256SUMS", "config.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == names
    model, state = load_any(tmp_path)
    assert json.loads(artifact["metadata"])["val_loss"] == pytest.approx(state.val_loss)
    again, _ = load_any(best)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    with refused(DamagedCheckpointError, "checkpoint", tmp_path / "optimizer.safetensors"):
        find(tmp_path, "trainer.resume", FILES)


def test_media_are_the_files_on_disk_byte_for_byte(watched):
    """Pictures, pages (whose policy would forbid any addition), samples and the table of heads."""
    _, folder, (logged, _, files) = watched
    kinds = {}
    for row, mine in zip(logged, rows(folder), strict=True):
        for key, value in mine.items():
            if isinstance(value, str):
                kinds.setdefault(row[f"{key}._type"], []).append((row["_step"], key))
                if key != "attention/timelapse" or row["_step"] == 4:  # overwritten since
                    stored = files / row[f"{key}.path"]
                    assert stored.read_bytes() == (folder / value).read_bytes()
    assert {step for step, _ in kinds["image-file"]} == {0, 2, 4}
    assert len(kinds["image-file"]) == 3 * 4 * 2  # looks, prompts, grid and layer
    pages = {"attention/viewer": (0, 2, 4), "attention/timelapse": (2, 4)}
    expected = [(step, key) for key, steps in pages.items() for step in steps]
    assert sorted(kinds["html-file"]) == sorted(expected)
    (half,) = read(files / logged[2]["attention/timelapse.path"])
    assert [frame["step"] for frame in half["frames"]] == [0, 2]

    samples = [json.loads(line) for line in (folder / "samples.jsonl").open(encoding="utf-8")]
    key = "samples/text.path"
    shown = {row["_step"]: files / row[key] for row in logged if key in row}
    assert [row["step"] for row in samples] == list(shown) == [2, 4]
    for row in samples:
        assert shown[row["step"]].read_text(encoding="utf-8") == sample_page(row)

    with_table = [row["_step"] for row in logged if "attention/table._type" in row]
    assert with_table == [4]
    table = json.loads((files / logged[4]["attention/table.path"]).read_text())
    with open(folder / "attention" / "heads.csv", newline="", encoding="utf-8") as file:
        names, *written = csv.reader(file)
    assert table["columns"] == names
    assert [[str(value) for value in row] for row in table["data"]] == written
    assert len(written) == len(STATISTICS) * 4


def test_statistics_of_layers_and_heads(watched):
    """Those of heads are hidden on the dashboard."""
    _, folder, (logged, records, _) = watched
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    hidden = [metric["glob_name"] for metric in metrics if metric["options"].get("hidden")]
    assert hidden == ["attention_heads/*"]
    looks = [json.loads(x) for x in (folder / "attention" / "statistics.jsonl").open()]
    assert [look["step"] for look in looks] == [0, 2, 4]
    for look, key, layer in itertools.product(looks, STATISTICS, (0, 1)):
        row = logged[look["step"]]
        mean = row[f"attention_layers/{key}/L0{layer}"]
        assert mean == pytest.approx(sum(look[key][layer]) / 2, abs=1e-4)
        heads = [row[f"attention_heads/{key}/L0{layer}H0{head}"] for head in (0, 1)]
        assert heads == pytest.approx(look[key][layer], abs=1e-4)
        assert row[f"attention_histograms/{key}._type"] == "histogram"
        assert sum(row[f"attention_histograms/{key}.values"]) == 4
    assert not [key for step in (1, 3) for key in logged[step] if key.startswith("attention")]


def test_docs_wandb_lists_the_recorded_keys(watched):
    """Each key of the table, patterns included, is one of a real run, and each key has its row.
    The settings, links and pictures of the page exist."""
    _, _, (logged, _, _) = watched
    docs = REPOSITORY / "docs"
    text = (docs / "wandb.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`\w+/[^|]*) \|", text, re.M)
    named = [key for cell in first_cells for key in re.findall(r"`([^`]+)`", cell)]
    patterns = [re.sub(r"<\w+>", r"[\\w-]+", re.sub(r"\d\d", r"\\d\\d", key)) for key in named]
    keys = {key.partition(".")[0] for row in logged for key in row if "/" in key}
    sometimes = {"train/mfu", "train/loss_z_score", "val/accuracy"}
    for name, pattern in zip(named, patterns, strict=True):
        assert name in sometimes or any(re.fullmatch(pattern, key) for key in keys), name
    for key in keys:
        assert any(re.fullmatch(pattern, key) for pattern in patterns), key
    fields = set(WandbConfig.__dataclass_fields__)
    assert set(re.findall(r"`wandb\.(\w+)[`=]", text)) <= fields
    assert fields - {"mode"} <= set(re.findall(r"wandb\.(\w+)", text))
    links = set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert all((docs / link).is_file() for link in links)
    pictures = {path.name: path.stat().st_size for path in docs.glob("wandb-*.png")}
    assert pictures.keys() <= links
    assert max(pictures.values()) < 200_000


def test_without_wandb_the_same_is_on_disk(watched, trainer):
    overrides, folder, _ = watched
    run = trainer("lens=default", *overrides, "wandb=off", "name=alone")
    run.train()
    seen, alone = folder / "attention", run.folder / "attention"
    assert sorted(p.name for p in alone.iterdir()) == sorted(p.name for p in seen.iterdir())
    for path in alone.iterdir():
        if path.suffix != ".html":  # which has the name of the run
            assert path.read_bytes() == (seen / path.name).read_bytes()
    (one,), (other,) = read(alone / "timelapse.html"), read(seen / "timelapse.html")
    assert one["frames"] == other["frames"]
    assert not (run.folder / "wandb").exists()
    assert [row.keys() for row in rows(run.folder)] == [row.keys() for row in rows(folder)]
