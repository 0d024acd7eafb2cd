"""Run directories that are damaged, that contain special files, or that change during a read."""

import errno
import fcntl
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from helpers.refusals import SPECIAL_FILES, refused, time_limit
from helpers.runs import change_state, copy_run, rows, write_checksums

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing, tensors
from clearhead.checkpoint import run_directory as directory
from clearhead.config import compose
from clearhead.errors import CheckpointError, ConfigError, DamagedCheckpointError, RunFileError
from clearhead.models.pretrained import load_pretrained
from train import fit

LONGER = "trainer.max_steps=6"
FIFO = SPECIAL_FILES["FIFO"]
UNREADABLE = {
    "FIFO": FIFO,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture
def run(trained, make_run):
    """runs/run, a copy of `trained` in the current directory."""
    return copy_run(trained)


@pytest.fixture
def resumed(run, make_run):
    """resumed(*overrides) -> the Run that resumes runs/run."""
    return lambda *overrides: make_run("data.path=text.txt", "name=run", *overrides)


@pytest.fixture
def newest(run):
    """The newest checkpoint; the older one is removed."""
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    return run / "checkpoints" / "step_00000004"


@pytest.fixture
def no_waiting_for_fifos():
    """Fails if the other end of a FIFO is waited for."""
    with time_limit(300):
        yield


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(run, resumed):
    """The target of a link and a folder with a similar name are kept."""
    part = run / "hf.part-0123456789abcdef"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    for name in ("config.yaml", "attention/step_00000002.html"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / f"{name}.part-0123456789abcdef").write_text("half")
    Path("elsewhere").mkdir()
    Path("elsewhere/thesis.txt").write_text("mine")
    (run / "hf.part-aaaaaaaaaaaaaaaa").symlink_to(Path("elsewhere").resolve())
    (run / "thesis.part-two").mkdir()
    assert resumed(LONGER).state.step == 4
    assert [path.name for path in run.rglob("*.part-*")] == ["thesis.part-two"]
    assert Path("elsewhere/thesis.txt").read_text() == "mine"


def test_links_and_special_files_are_not_written_through(run, resumed, no_waiting_for_fifos):
    Path("precious.txt").write_text("mine")
    for name in (".lock", "metrics.jsonl", "samples.jsonl"):
        for make in (FIFO, lambda path: path.symlink_to(Path("precious.txt").resolve())):
            (run / name).unlink(missing_ok=True)
            make(run / name)
            with refused(RunFileError, "name", "run", exit_code=3) as caught:
                resumed(LONGER)
            assert name in caught.value.reason
        (run / name).unlink()
    assert Path("precious.txt").read_text() == "mine"


def test_pages_and_tables_are_not_written_through_links(run, resumed):
    Path("precious.txt").write_text("mine")
    (run / "attention").mkdir()
    names = ["run.html", "run.html.tmp"]
    names += [f"attention/{n}" for n in ("statistics.jsonl", "heads.csv", "page.html")]
    names += ["attention/step_00000002.png"]  # keeps heads.csv
    for name in names:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(Path("precious.txt").resolve())
    fit(resumed(LONGER, "lens=default", "lens.every=2"))
    assert Path("precious.txt").read_text() == "mine"
    assert (run / "attention" / "heads.csv").stat().st_size > 100


def test_a_file_system_without_locks_is_accepted(run, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with directory.lock_directory(run):
        pass


def test_settings_that_cannot_be_read_are_written_again(run, resumed, no_waiting_for_fifos):
    """A run with checkpoints resumes without these files; one without checkpoints starts again."""
    before = json.loads((run / "run.json").read_text())["settings"]
    before["trainer"]["max_steps"] = 6
    for kind, make in {"missing": lambda path: None, **UNREADABLE}.items():
        for name in ("run.json", "config.yaml"):
            (run / name).unlink()
            make(run / name)
        new = Path("runs", f"new_{kind}")
        new.mkdir()
        make(new / "run.json")
        again = resumed(LONGER)
        assert again.state.step == 4, kind
        assert json.loads((run / "run.json").read_text())["settings"] == before, kind
        assert (run / "config.yaml").stat().st_size > 100, kind
        resumed(f"name={new.name}")
        assert "trainer" in json.loads((new / "run.json").read_text())["settings"], kind


def test_checkpoints_with_special_files_are_refused(run, newest, resumed, no_waiting_for_fifos):
    for name in ("SHA256SUMS", *checkpoint.FILES):
        before = (newest / name).read_bytes()
        FIFO(newest / name)
        of_model = name != "optimizer.safetensors"
        for read in (resumed, lambda: load_pretrained(run)) if of_model else (resumed,):
            with refused(DamagedCheckpointError, "checkpoint", newest / name, 3):
                read()
        (newest / name).unlink()
        (newest / name).write_bytes(before)


def save_newer_and_prune(run):
    """Does what a run does when it saves its next checkpoint with trainer.keep=1."""
    folders = listing.list_checkpoints(run)
    newer = run / "checkpoints" / f"step_{listing.step_of(folders[0]) + 1:08d}"
    shutil.copytree(folders[0], newer)
    change_state(newer, step=listing.step_of(newer))
    last = run / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(newer.name)
    for old in folders:
        shutil.rmtree(old)


@pytest.mark.parametrize(("name", "path"), [("checksum", "."), ("load_file", "checkpoints/last")])
def test_a_checkpoint_may_be_pruned_while_it_is_read(run, monkeypatch, capsys, name, path):
    """The new checkpoint is read instead, without a warning. A path of a checkpoint is refused."""
    module = tensors if name == "load_file" else checkpoint
    real, unpruned = getattr(module, name), [run]

    def read(file, *rest):
        if unpruned and "step_" in str(file):
            save_newer_and_prune(unpruned.pop())
        return real(file, *rest)

    monkeypatch.setattr(module, name, read)
    reader = load_pretrained(run / path)
    assert (reader.state.step, reader.folder.name) == (5, "step_00000005")
    assert (unpruned, capsys.readouterr().err) == ([], "")
    named = run / "checkpoints" / "step_00000004"
    with refused(CheckpointError, "checkpoint", named.resolve() / "SHA256SUMS"):
        load_pretrained(named)


NAN, HUGE = math.nan, 10**400
STATES = {
    "step": ["5", True, -1, 1e30, 10**30, 0, None],
    "val_loss": ["x", NAN, HUGE],
    "best_step": [4.0],
    "losses": ["x", [1, "a"], [HUGE]],
    "data": [5, [["a"]], [["a", [1]]], {}],
    "skipped": [-1],
    "wandb_id": ["../x"],
    "scaler": [5, {"scale": "x"}],
    "settings": [5, {}],
    "settings.lens": [5],
    "format": [2, 99],
}
TEXTS = ["", "[]", "[" * 100_000, '{"step": 1}', '{"%s": 1}' % ("x" * 5000)]


def test_invalid_states_are_refused_by_name(trained, tmp_path):
    saved, copy = trained / "checkpoints" / "step_00000004", tmp_path / "step_00000004"
    copy.mkdir()
    for name in ("model.safetensors", "optimizer.safetensors"):
        (copy / name).symlink_to(saved / name)
    for key, value in [(key, value) for key, values in STATES.items() for value in values]:
        shutil.copy(saved / "state.json", copy)
        change_state(copy, **{key: value})
        with refused(CheckpointError, "checkpoint", copy / "state.json", 3) as caught:
            checkpoint.load_state(copy)
        assert key.split(".")[-1] in caught.value.reason, (key, value)
    for text in TEXTS:
        (copy / "state.json").write_text(text)
        write_checksums(copy)
        for read in (checkpoint.load_state, load_pretrained):
            with refused(CheckpointError, "checkpoint", exit_code=3) as caught:
                read(copy)
            assert len(str(caught.value)) < 2000, text[:20]


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("optimizer.ns_steps", 5, False),
        ("optimizer.ns_steps", 3, True),
        ("optimizer.nesterov", False, True),
        ("trainer.schedule_steps", 900, True),
        ("wandb.notes", "a", False),
    ],
)
def test_settings_of_an_earlier_version(run, newest, resumed, key, value, is_refused):
    """They are refused if this version would train in another way, and ignored otherwise."""
    change_state(newest, **{f"settings.{key}": value})
    stored = json.loads((run / "run.json").read_text())
    group, name = key.split(".")
    stored["settings"][group][name] = value
    (run / "run.json").write_text(json.dumps(stored))
    given = "data.path=text.txt", "trainer.max_steps=6"
    for start in (
        lambda: resumed(LONGER),
        lambda: compose([f"trainer.resume={run}", *given]),
        lambda: compose([f"from={run}", *given]),
    ):
        if is_refused:
            with refused(ConfigError, key, value, exit_code=2):
                start()
        else:
            start()


def test_nonfinite_losses_of_skipped_steps_are_valid(run, newest, resumed):
    """A state contains the losses since the last row of the log, also of skipped steps."""
    change_state(newest, losses=[4.0, math.nan, math.inf, 4])
    fit(resumed(LONGER, "trainer.log_every=6"))
    assert math.isfinite(rows(run)[-1]["train/loss"])
