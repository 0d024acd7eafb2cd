"""Metrics on disk and on W&B, tested with the files of a real offline run."""

import csv
import errno
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from helpers import REPOSITORY
from helpers.refusals import refused
from helpers.runs import contents, repeatable_rows, rows, train_in, wandb_records

from clearhead.checkpoint.format import FILES
from clearhead.checkpoint.listing import find_checkpoint
from clearhead.config.schema import WandbConfig
from clearhead.errors import DamagedCheckpointError
from clearhead.models.pretrained import load_pretrained
from clearhead.output.report import sample_page
from clearhead.output.tracker import Tracker
from clearhead.parallel.hardware import git
from headlens import STATISTICS, Snapshot

OFFLINE = WandbConfig.with_defaults(mode="offline")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Replaces a W&B run: records its calls."""
    run = Mock(id="x", offline=True, dir=str(tmp_path / "files"), rows={}, summary={})
    run.settings.finish_timeout = 1
    run.log = lambda row, step, commit: run.rows.setdefault(step, {}).update(row)
    run.init.return_value = run
    monkeypatch.setattr("wandb.init", run.init)
    return run


def test_rows_are_on_disk_at_once(tmp_path):
    tracker = Tracker(WandbConfig.with_defaults(mode="disabled"), tmp_path, {})
    tracker.log({"train/loss": 1.5, "train/grad_norm": math.inf, "val/loss": math.nan}, step=1)
    expected = {"step": 1, "train/loss": 1.5, "train/grad_norm": "inf", "val/loss": "nan"}
    assert rows(tmp_path) == [expected]
    tracker.finish()
    assert (tracker.run_id, tracker.where()) == (None, None)


def test_a_broken_installation_of_wandb_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    tracker = Tracker(OFFLINE, tmp_path, {})
    tracker.log({"train/loss": 1.5}, step=1)
    tracker.finish()
    assert (rows(tmp_path), tracker.run_id) == ([{"step": 1, "train/loss": 1.5}], None)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_modes_and_resumed_runs(tmp_path, recorded, monkeypatch):
    """WANDB_MODE is the default of wandb.mode."""
    for mode, expected in (({}, None), ({"mode": "offline"}, "x")):
        tracker = Tracker(WandbConfig.with_defaults(**mode), tmp_path, {})
        assert tracker.run_id == expected  # the environment of tests has W&B disabled
        tracker.finish()
    monkeypatch.setenv("WANDB_MODE", "offline")
    for run_id in (None, "known"):
        tracker = Tracker(WandbConfig.with_defaults(), tmp_path, {}, run_id)
        options = recorded.init.call_args.kwargs
        assert [options[key] for key in ("mode", "id", "resume")] == ["offline", run_id, "allow"]
        assert options["settings"].console == "off"
        tracker.finish(4)
    recorded.finish.assert_called_with(exit_code=4)
    assert recorded.summary["exit_code"] == 4


def test_media_that_cannot_be_built_are_skipped_alone(tmp_path, recorded, capsys):
    """A line names the key; all others are logged."""
    tracker = Tracker(OFFLINE, tmp_path, {})
    number = {"attention_layers/entropy/L00": 0.5}
    histograms = {"nan": np.array([np.nan, 1.0]), "fine": np.array([0.5, 1.0])}
    charts = {"chart": ([0, 1], {"L00": [0.5, 1.0]})}
    images = {"attention/heads": [tmp_path / "missing.png"]}
    tracker.log({"a": 1.0}, 1, Snapshot(number, {}, histograms, images, charts=charts))
    tracker.finish()
    assert recorded.rows[1].keys() == {"a", *number, "fine", "chart"}
    lines = capsys.readouterr().err.splitlines()
    keys = ("attention/heads", "nan")
    assert [[key for key in keys if key in line] for line in lines] == [[key] for key in keys]
    assert tracker.upload([tmp_path / "missing.safetensors"], ["last"], {}) is None


def test_nearly_equal_values_have_a_histogram(tmp_path, recorded, capsys):
    """Entropies of an untrained model differ by a few units in the last place of fp32."""
    values = np.nextafter(np.float32(0.9996), np.float32(1), dtype=np.float32)
    tracker = Tracker(OFFLINE, tmp_path, {})
    tracker.log({}, 1, Snapshot({}, {}, {"h": np.array([0.9996, values], np.float32)}))
    tracker.finish()
    assert sum(recorded.rows[1]["h"].histogram) == 2
    assert capsys.readouterr().err == ""


def test_after_an_error_of_wandb_the_rows_are_on_disk(tmp_path, recorded, capsys):
    """The run says at its end what is missing."""
    log = recorded.log

    def broken(row, step, commit):
        if step == 3:
            raise OSError(errno.EPIPE, "Broken pipe")
        log(row, step, commit)

    recorded.log = broken
    tracker = Tracker(OFFLINE, tmp_path, {})
    complete = tracker.where()
    for step in range(1, 7):
        tracker.log({"train/loss": 1.0}, step)
    assert list(recorded.rows) == [1, 2]
    assert tracker.where() not in (None, complete)
    assert len(capsys.readouterr().err.splitlines()) == 1
    tracker.finish()
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 7)]


# The settings of the fixture below override the last one. W&B itself reads
# WANDB_JOB_TYPE, WANDB_CONSOLE and WANDB_NOTES.
ENVIRONMENT = {
    "WANDB_PROJECT": "heads",
    "WANDB_NAME": "a first try",
    "WANDB_TAGS": "a,b",
    "WANDB_JOB_TYPE": "test",
    "WANDB_CONSOLE": "wrap",
    "WANDB_NOTES": "What is new, [here]: nothing",
    "WANDB_ENTITY": "team",
    "WANDB_RUN_ID": "my-id",
    "WANDB_RUN_GROUP": "another",
}


SHOWN = {key: "self" if key == "diagonal" else key for key in STATISTICS}
del SHOWN["learned_sink"]  # names in keys; the model has no sink
WATCHED = ("name=watched", "lens=default", "lens.every=2")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A complete offline run without an account: (run directory, and from W&B's files: rows, all
    records, folder of media files)."""
    named = ("wandb.group=first tries", "wandb.mode=offline", "wandb.log_model=best")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        folder = train_in(tmp_path_factory.mktemp("watched"), *WATCHED, *named)
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    records = wandb_records(file)
    logged = [record["history"]["item"] for record in records if record["type"] == "history"]
    return folder, logged, records, file.parent / "files"


def test_a_run_that_the_user_has_open_is_left_alone(tmp_path, monkeypatch):
    """Its rows, its end, and the settings of runs that the user opens later."""
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"mode": "offline", "dir": str(tmp_path)}
    quiet = wandb.Settings(silent=True)
    theirs = wandb.init(project="theirs", settings=quiet, **options)
    theirs.log({"x": 1})
    ours = Tracker(OFFLINE, tmp_path, {})
    our_id = ours.run_id
    ours.log({"train/loss": 0.5}, step=0)
    ours.finish(4)
    theirs.log({"x": 2})
    assert wandb.run is theirs
    theirs.finish()
    later = wandb.init(settings=quiet, **options)
    assert later.settings.finish_timeout_raises is wandb.Settings().finish_timeout_raises
    later.finish()
    wandb.teardown()
    found = {}
    for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        records = wandb_records(file)
        (exit_code,) = [r["exit"].get("exit_code", 0) for r in records if r["type"] == "exit"]
        logged = [record["history"]["item"] for record in records if record["type"] == "history"]
        keys = ("x", "train/loss")
        found[file.stem] = [{k: row[k] for k in keys if k in row} for row in logged], exit_code
    assert found == {
        f"run-{theirs.id}": ([{"x": 1}, {"x": 2}], 0),
        f"run-{our_id}": ([{"train/loss": 0.5}], 4),
        f"run-{later.id}": ([], 0),
    }


def test_without_wandb_the_same_files_are_written(watched, tmp_path):
    folder, *_ = watched
    alone = train_in(tmp_path, *WATCHED)
    assert repeatable_rows(alone) == repeatable_rows(folder)
    theirs, mine = (
        {path: sha for path, sha in contents(run).items() if not path.startswith("wandb")}
        for run in (folder, alone)
    )
    assert theirs.keys() == mine.keys()
    differing = {Path(path).name for path in mine if mine[path] != theirs[path]}
    with_settings = {"config.yaml", "run.json", "state.json", "SHA256SUMS", "run.html", "play.html"}
    assert differing <= {"metrics.jsonl", "starts.jsonl", "summary.json", *with_settings}


def test_docs_list_the_recorded_keys(watched):
    """Each key of the table in docs/wandb.md is recorded; each recorded key is in the table."""
    _, logged, *_ = watched
    text = (REPOSITORY / "docs" / "wandb.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`\w+/[^|]*) \|", text, re.MULTILINE)
    listed = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    patterns = [re.sub(r"<\w+>", r"[\\w-]+", re.sub(r"\d\d", r"\\d\\d", key)) for key in listed]
    recorded = {key.partition(".")[0] for row in logged for key in row if "/" in key}
    chart = re.compile("Custom Chart Tables/(.*)_table")  # W&B stores the values of a chart there
    recorded = {chart.sub(r"\1", key) for key in recorded}
    found = {(key, name) for key in recorded for name in patterns if re.fullmatch(name, key)}
    assert {key for key, _ in found} == recorded
    sometimes = {"train/mfu", "val/accuracy"}
    assert set(patterns) - {name for _, name in found} <= sometimes


def test_other_keys_than_those_of_layers_and_heads_are_few(watched):
    """The lens limits the keys of layers and heads to 1,900, so that a run has fewer than 2,000."""
    _, logged, *_ = watched
    keys = {key.partition(".")[0] for row in logged for key in row}
    assert len([key for key in keys if not re.match("attention_(layers|heads)/", key)]) < 100


def test_docs_list_the_settings_and_variables():
    text = (REPOSITORY / "docs" / "wandb.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `wandb\.(\w+)` \| (?:`(\w+)`)?", text, re.MULTILINE))
    defaults = (REPOSITORY / "configs" / "wandb" / "default.yaml").read_text(encoding="utf-8")
    assert listed == dict(re.findall(r"^(\w+): (?:\$\{env:(\w+))?", defaults, re.MULTILINE))


def test_rows_configuration_and_summary(watched):
    folder, logged, records, _ = watched
    assert [row["_step"] for row in logged] == [0, 1, 2, 3, 4]
    for row, mine in zip(logged, rows(folder), strict=True):
        assert row["_step"] == mine.pop("step")
        for key, value in mine.items():
            assert isinstance(value, list) or row[key] == pytest.approx(value)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["project"], run["display_name"]) == ("heads", "a first try")
    assert (run["run_group"], run["tags"]) == ("first tries", ["a", "b"])
    assert (run["entity"], run["run_id"], run["job_type"]) == ("team", "my-id", "test")
    assert run["notes"] == "What is new, [here]: nothing"
    config = run["config"]["update"]  # with default and automatic values
    del config["_wandb"]
    (start,) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert start.items() >= ({"step": 0} | config.pop("environment")).items()
    assert config.pop("tokenizer") == "byte"
    assert config == yaml.safe_load((folder / "config.yaml").read_text())
    summary = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    pretrained = load_pretrained(folder / "checkpoints" / "best")
    loss = pretrained.state.val_loss
    assert [summary["best_val_loss"], summary["val/loss"]["min"]] == pytest.approx([loss, loss])
    assert summary["parameters"] == pretrained.model.num_parameters()
    assert summary["exit_code"] == 0


def test_the_x_axis_of_curves_is_the_number_of_tokens(watched):
    """Panels of single heads and layers are hidden."""
    _, logged, records, _ = watched
    assert all("train/tokens" in row for row in logged)
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    hidden = [metric["glob_name"] for metric in metrics if metric["options"].get("hidden")]
    assert hidden == ["attention_heads/*", "attention_layers/*", "Custom Chart Tables/*"]
    curves = [metric for metric in metrics if metric.get("step_metric")]
    assert {metric["step_metric"] for metric in curves} == {"train/tokens"}
    named = {metric.get("name") or metric["glob_name"] for metric in curves}
    assert {"train/*", "val/*", "val/loss", "attention_best/*", "attention_names/*"} <= named
    assert not [key for key in named if key.startswith("attention/")]


def test_commit_command_and_environment(watched):
    """In starts.jsonl and, with WANDB_CONSOLE, the output."""
    folder, _, records, files = watched
    assert "validation loss" in (files / "output.log").read_text()
    start = json.loads((folder / "starts.jsonl").read_text())
    assert shlex.split(start["command"])[1:] == sys.argv
    assert start["torch"] == torch.__version__
    assert (start["device"], start["ranks"], start["threads"]) == ("cpu", 1, 1)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    if (REPOSITORY / ".git").exists():
        assert start["commit"]
        assert run["git"]["commit"].startswith(start["commit"])
        assert start["clean"] == (not git(REPOSITORY, "status", "--porcelain", "-uno"))


def test_one_chart_per_statistic(watched):
    """The charts have a line for each layer, with the values of metrics.jsonl."""
    folder, logged, _, files = watched
    for key in SHOWN.values():
        name = f"Custom Chart Tables/attention_statistics/{key}_table.path"
        table = json.loads((files / logged[4][name]).read_text())
        expected = {
            (row["step"], layer): row[f"attention_layers/{key}/{layer}"]
            for row in rows(folder)[::2]
            for layer in ("L00", "L01")
        }
        shown = {(step, layer): value for step, layer, value in table["data"]}
        assert shown == pytest.approx(expected, abs=1e-4)


def test_uploaded_model_can_be_loaded(watched, tmp_path):
    """From the files of the artifact. Without optimizer state, a run cannot resume from them."""
    folder, _, records, _ = watched
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    (artifact,) = (one for one in artifacts if one["type"] == "model")
    best = (folder / "checkpoints" / "best").resolve()
    assert artifact["name"] == f"model-{artifact['run_id']}"
    assert {"best", f"step_{int(best.name[5:])}"} <= set(artifact["aliases"])
    for file in artifact["manifest"]["contents"]:
        shutil.copy(file["local_path"], tmp_path / file["path"])
    names = {"model.safetensors", "state.json", "SHA256SUMS", "config.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == names
    state = load_pretrained(tmp_path).state  # also verifies the checksums
    assert state.step == int(best.name[5:])
    assert json.loads(artifact["metadata"])["val_loss"] == pytest.approx(state.val_loss)
    with refused(DamagedCheckpointError, "checkpoint", tmp_path / "optimizer.safetensors"):
        find_checkpoint(tmp_path, "trainer.resume", FILES)


def test_which_model_is_uploaded(watched, recorded, monkeypatch):
    folder, *_ = watched
    for kind, best, names in (
        ("best", 2, ["step_2", "best"]),
        ("best", None, ["step_4", "last"]),
        ("last", 2, ["step_4", "last"]),
        (False, 2, None),
    ):
        tracker = Tracker(WandbConfig.with_defaults(mode="offline", log_model=kind), folder, {})
        monkeypatch.setattr(tracker, "upload", lambda files, names, facts: names)
        assert tracker.log_model(best) == names
        tracker.finish()


def check_same(stored, on_disk):
    """Checks that a file of W&B is that of the run directory and not a copy."""
    assert stored.read_bytes() == on_disk.read_bytes()
    assert os.path.samefile(stored, on_disk)
    assert not stored.is_symlink()


def test_media_are_the_files_on_disk_byte_for_byte(watched):
    """Images, pages, whose content security policy allows no changes, samples, table of heads."""
    folder, logged, records, files = watched
    for row, mine in zip(logged, rows(folder), strict=True):
        step = row["_step"]
        # metrics.jsonl has lists of the paths of images.
        paths = {key: value for key, value in mine.items() if isinstance(value, list)}
        images = {"attention/heads": 4, "attention/largest": 1}  # one of each prompt
        expected = images if step in (0, 2, 4) else {}
        assert {key: len(value) for key, value in paths.items()} == expected
        for key in paths:
            is_list = len(paths[key]) > 1
            assert row[f"{key}._type"] == ("images/separated" if is_list else "image-file")
            stored = row[f"{key}.filenames"] if is_list else [row[f"{key}.path"]]
            for path, on_disk in zip(stored, paths[key], strict=True):
                check_same(files / path, folder / on_disk)
        if step in (0, 2, 4):
            captions = [*row["attention/heads.captions"], row["attention/largest.caption"]]
            assert len(captions) == 5
            assert all(str(step) in caption for caption in captions)
    # The page at the end, and at least one before: at most one percent of the time is for pages.
    pages = [row for row in logged if "attention/page.path" in row]
    assert (pages[0]["_step"], pages[-1]["_step"]) == (0, 4)
    check_same(files / pages[-1]["attention/page.path"], folder / "run.html")

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
    image = table["columns"].index("heatmap")
    assert table["columns"].pop(image)
    assert [row.pop(image) for row in table["data"]] == ["Image"] * 4  # stored in the artifact:
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    (artifact,) = (one for one in artifacts if "attentiontable" in one["name"])
    paths = [file["local_path"] for file in artifact["manifest"]["contents"]]
    assert len(paths) == 1 + 4
    assert table["columns"] == [SHOWN.get(name, name) for name in names]
    shown = [["" if value is None else str(value) for value in row] for row in table["data"]]
    title = names.index("name")
    assert [row[:title] + row[title + 1 :] for row in shown] == [
        row[:title] + row[title + 1 :] for row in written
    ]


def test_the_statistics_of_single_heads_are_logged(watched):
    folder, logged, *_ = watched
    snapshots = [json.loads(x) for x in (folder / "attention" / "statistics.jsonl").open()]
    assert [snapshot["step"] for snapshot in snapshots] == [0, 2, 4]
    for snapshot, key, layer in itertools.product(snapshots, SHOWN, (0, 1)):
        row = logged[snapshot["step"]]
        heads = [row[f"attention_heads/{SHOWN[key]}/L0{layer}H0{head}"] for head in (0, 1)]
        assert heads == pytest.approx(snapshot[key][layer], abs=1e-4)
        assert sum(row[f"attention_histograms/{SHOWN[key]}.values"]) == 4
