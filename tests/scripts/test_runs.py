"""scripts/runs.py: lists runs, and removes optimizer states and nothing else."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.refusals import printed_keys, refused
from helpers.runs import changed_paths, contents

import generate
from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.run_directory import lock_directory
from clearhead.config import compose
from clearhead.errors import CheckpointError, DamagedCheckpointError
from scripts import evaluate, export_hf
from scripts.runs import main

STATES = [f"checkpoints/step_0000000{step}/optimizer.safetensors" for step in (2, 4)]
SUMS = [f"checkpoints/step_0000000{step}/SHA256SUMS" for step in (2, 4)]
STEPS = ["checkpoints/step_00000002", "checkpoints/step_00000004"]


@pytest.fixture
def home(trained, tmp_path, monkeypatch):
    """The current folder, with the runs old (stopped), mid and new, and a folder without a run."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained.parents[1] / "text.txt", "text.txt")
    for name, year in (("new", 2022), ("old", 2020), ("mid", 2021)):
        copy = Path(shutil.copytree(trained, Path("runs", name), symlinks=True))
        start = json.loads((copy / "starts.jsonl").read_text()) | {"time": f"{year}-05-06T00:00"}
        (copy / "starts.jsonl").write_text(json.dumps(start))
    Path("runs/old/summary.json").unlink()
    Path("runs/multirun/sweep").mkdir(parents=True)
    Path("runs/multirun/sweep/results.md").write_text("results")
    return tmp_path


@pytest.fixture
def command(in_process, home):
    """command(*arguments) -> (exit code, out, err)."""
    return lambda *arguments: in_process(main, home, *arguments)


def table(out):
    """Returns the rows of the table that the command has printed."""
    lines = [line.strip("| ") for line in out.splitlines() if line.startswith("|")]
    names, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_runs_are_listed_by_date(command):
    with lock_directory(Path("runs/new")):
        code, out, err = command()
    assert (code, err) == (0, "")
    rows = table(out)
    assert [row["run"] for row in rows] == ["old", "mid", "new"]
    states = ["stopped, step 4 of 4", "finished, step 4", "running, step 4 of 4"]
    assert [row["state"] for row in rows] == states
    loss = json.loads(Path("runs/mid/validation.json").read_text())["loss"]
    bytes_of_all = sum(path.stat().st_size for path in files("runs/mid"))
    states = sum(Path("runs/mid", name).stat().st_size for name in STATES)
    assert rows[1] == {
        "run": "mid",
        "MB": f"{bytes_of_all / 1e6:.1f}",
        "MB of optimizer states": f"{states / 1e6:.1f}",
        "validation loss": f"{loss:.4f}",
        "state": "finished, step 4",
    }


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]


def test_optimizer_states_of_finished_runs_are_removed(command):
    """Not those of a stopped run and of one that is training, and no other files."""
    before = contents(Path("runs"))
    with lock_directory(Path("runs/new")):
        code, out, err = command("remove=optimizer")
    assert (code, err) == (0, "")
    assert [row["MB of optimizer states"] for row in table(out)][1] == "0.0"
    changed = [f"mid/{name}" for name in sorted(STATES + SUMS)]
    assert changed_paths(Path("runs"), before) == changed
    assert not any(Path("runs", name).exists() for name in changed if "optimizer" in name)


def test_a_run_without_optimizer_states_is_complete_except_for_resuming(
    command, home, in_process, make_run
):
    assert command("remove=optimizer")[0] == 0
    newest = Path("runs/mid/checkpoints/step_00000004").resolve()
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=newest, check=False)
    assert done.returncode == 0
    model = "checkpoint=runs/mid"
    for script, *arguments in (
        (generate, "max_new_tokens=2"),
        (evaluate, "data.path=text.txt"),
        (export_hf, "out=exported"),
    ):
        code, _, err = in_process(script.main, home, model, *arguments)
        assert code == 0, err
    assert compose(["from=runs/mid"]).trainer.max_steps == 4
    assert make_run("trainer.init_from=runs/mid", "name=tuned").state.step == 0
    before = contents(Path("runs/mid"))
    for arguments in (
        ["name=mid", "trainer.max_steps=6"],
        ["trainer.resume=runs/mid", "runs_dir=runs", "trainer.max_steps=6"],
    ):
        with refused(CheckpointError, "checkpoint", exit_code=3) as caught:
            make_run("data.path=text.txt", *arguments)
        assert not isinstance(caught.value, DamagedCheckpointError)
    assert contents(Path("runs/mid")) == before


def test_lost_lines_of_checksums_are_damage(home):
    newest = Path("runs/mid/checkpoints/step_00000004")
    lines = (newest / "SHA256SUMS").read_text().splitlines(keepends=True)
    for kept in ([], lines[:2], lines[1:], lines[:1]):
        (newest / "SHA256SUMS").write_text("".join(kept))
        with refused(DamagedCheckpointError, "checkpoint", exit_code=3):
            listing.find_checkpoint(newest, names=checkpoint.FILES)


@pytest.mark.parametrize("failing", ["pathlib.Path.unlink", "clearhead.files.os.replace"])
def test_a_removal_that_was_interrupted_leaves_valid_checkpoints(command, monkeypatch, failing):
    def denied(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(failing, denied)
        code, _, err = command("remove=optimizer")
    assert (code, printed_keys(err)) == (2, ["runs_dir"])
    for step in STEPS:
        try:
            listing.find_checkpoint(Path("runs/mid", step), names=checkpoint.FILES)
        except DamagedCheckpointError:
            pytest.fail("a damaged checkpoint")
        except CheckpointError:
            continue  # the optimizer state counts as removed
    assert command("remove=optimizer")[0] == 0
    assert not any(Path("runs/mid", name).exists() for name in STATES)


def test_links_are_not_followed(command):
    Path("precious").mkdir()
    for name in (*STATES, *SUMS):
        path = Path("precious", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = contents(Path("precious"))
    shutil.move("runs/old", "old")
    Path("runs/link").symlink_to(Path("old").resolve())
    shutil.rmtree("runs/mid/checkpoints")  # a folder of checkpoints, a checkpoint and a file
    Path("runs/mid/checkpoints").symlink_to(Path("precious/checkpoints").resolve())
    for name in (STEPS[0], STATES[1]):
        path = Path("runs/new", name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(Path("precious", name).resolve())
    Path("runs/new/attention").symlink_to(Path("precious").resolve())

    code, out, _ = command()
    assert (code, {row["run"] for row in table(out)}) == (0, {"mid", "new"})
    assert command("remove=optimizer")[0] == 0
    assert contents(Path("precious")) == before
