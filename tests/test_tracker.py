"""Metrics on disk and on W&B: real offline runs, read back from their files."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from conftest import TINY
from matplotlib.image import imsave

from training.tracker import NoTracker, Tracker, WandbConfig, drop_rows_after


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "attention" / "grid.png"
    path.parent.mkdir()
    imsave(path, np.zeros((4, 4, 3)))
    return path


def history(folder):
    """The rows of the offline run below `folder`, as W&B would show them."""
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    found = [record["history"]["item"] for record in records if record["type"] == "history"]
    return found, records, file.parent / "files"


def test_rows_on_disk(tmp_path, picture):
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.5, "train/grad_norm": math.inf}, step=1)
    tracker.log({"val/loss": math.nan}, step=2, pictures={"attention/heatmap/x": picture})
    tracker.finish()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "train/loss": 1.5, "train/grad_norm": "inf"},
        {"step": 2, "val/loss": "nan", "attention/heatmap/x": "attention/grid.png"},
    ]
    assert tracker.run_id is None
    assert tracker.where() is None


def test_rows_are_on_disk_at_once(tmp_path):
    tracker = Tracker(WandbConfig(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.0}, step=1)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    tracker.finish()


def test_dropping_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    drop_rows_after(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "a\u2028b\x85c"}\n')
    drop_rows_after(tmp_path, 2)
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "text": "a\u2028b\x85c"}\n'
    drop_rows_after(tmp_path, -1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_the_other_ranks_tracker_takes_the_same_calls():
    ours = {name for name in vars(Tracker) if not name.startswith("_")}
    assert ours - {"file", "run"} <= {name for name in vars(NoTracker) if not name.startswith("_")}


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
    tracker.run = Dead()
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


def test_a_whole_run_on_wandb(command, tmp_path, text_file):
    """Every row, every heatmap and the configuration, at the right steps, offline, no account."""
    settings = [s for s in TINY if not s.startswith(("lens", "wandb", "trainer.sample"))]
    settings += [f"data.path={text_file}", "name=watched", "lens.every=2", "wandb.tags=[a,b]"]
    done = command("train.py", *settings)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "watched"
    rows, records, files = history(folder)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    local = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, mine in zip(rows, local, strict=True):
        assert row["_step"] == mine.pop("step")
        for key, value in mine.items():
            if key.startswith("attention/heatmap/"):
                assert row[f"{key}._type"] == "image-file"
                stored = files / row[f"{key}.path"]
                assert stored.read_bytes() == (folder / value).read_bytes()
            else:
                assert row[key] == pytest.approx(value)
    with_pictures = [row["_step"] for row in rows if any("heatmap" in key for key in row)]
    assert with_pictures == [0, 2, 4]
    text = json.dumps(records)
    assert "clearhead" in text
    assert "watched" in text
    assert "emb_dim" in text
