"""Run directories that were damaged, came from elsewhere, or change while they are read."""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from helpers import TINY
from helpers.refusals import SPECIAL_FILES, refused
from helpers.runs import change_state, changed, contents, rows, seal, train_in
from helpers.settings import settings
from helpers.texts import prepare

import generate
import train
from durable import lock
from errors import (
    CheckpointError,
    DamagedCheckpointError,
    DataError,
    PreparationError,
    RunDirectoryError,
    RunFileError,
)
from scripts import export_hf
from training import checkpoint, directory
from training.hf import load_reader

LONGER = "trainer.max_steps=6"
ENDLESS = {kind: SPECIAL_FILES[kind] for kind in ("FIFO", "device")}
UNREADABLE = ENDLESS | {
    "empty": lambda path: path.write_bytes(b""),
    "huge": lambda path: (path.touch(), os.truncate(path, 2**26)),
    "nested": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[]"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and runs/run, which has checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    train_in(folder, "name=run")
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """runs/run in a folder of the test's own, which is the current one."""
    shutil.copytree(trained, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return Path("runs/run")


@pytest.fixture
def resumed(run):
    """resumed(*overrides) -> the Trainer that continues runs/run."""
    made = []

    def resume(*overrides):
        for earlier in made:
            earlier.close(0)
        made[:] = [train.Trainer(settings(*TINY, "data.path=text.txt", "name=run", *overrides))]
        return made[-1]

    yield resume
    for one in made:
        one.close(0)


@pytest.fixture
def newest(run):
    """The newest checkpoint, the only one."""
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    return run / "checkpoints" / "step_00000004"


@pytest.fixture
def no_endless_reads(monkeypatch):
    """Fails where a FIFO or a device is opened such that reading could wait or never end."""
    opened, os_opened = open, os.open

    def endless(path):
        return isinstance(path, str | Path) and (
            Path(path).is_fifo() or os.path.realpath(path) == "/dev/zero"
        )

    def open_checked(path, *rest, **more):
        assert not endless(path), path
        return opened(path, *rest, **more)

    def os_open_checked(path, flags, *rest, **more):
        assert flags & os.O_NONBLOCK or not endless(path), path
        return os_opened(path, flags, *rest, **more)

    monkeypatch.setattr("builtins.open", open_checked)
    monkeypatch.setattr("io.open", open_checked)
    monkeypatch.setattr(os, "open", os_open_checked)


# ---------------------------------------------------------------------------- leftovers and links


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(run, resumed):
    """Neither the target of a link nor a folder with a similar name."""
    part = run / "hf.part-0123456789abcdef"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    (run / "config.yaml.part-0123456789abcdef").write_text("half")
    Path("elsewhere").mkdir()
    Path("elsewhere/thesis.txt").write_text("mine")
    (run / "hf.part-aaaaaaaaaaaaaaaa").symlink_to(Path("elsewhere").resolve())
    (run / "thesis.part-two").mkdir()
    assert resumed(LONGER).state.step == 4
    assert [path.name for path in run.glob("*.part-*")] == ["thesis.part-two"]
    assert Path("elsewhere/thesis.txt").read_text() == "mine"


def test_links_and_special_files_are_not_written_through(run, resumed, no_endless_reads):
    Path("precious.txt").write_text("mine")
    kinds = ENDLESS | {
        "link": lambda path: path.symlink_to(Path("precious.txt").resolve()),
        "link to nothing": lambda path: path.symlink_to(Path("new.txt").resolve()),
    }
    for name in (".lock", "launch.json", "metrics.jsonl", "samples.jsonl"):
        before = (run / name).read_bytes() if (run / name).exists() else None
        for kind, make in kinds.items():
            (run / name).unlink(missing_ok=True)
            make(run / name)
            with refused(RunFileError, "name", "run", exit_code=3) as caught:
                resumed(LONGER)
            assert name in caught.value.reason, (name, kind)
        (run / name).unlink()
        if before is not None:
            (run / name).write_bytes(before)
    assert Path("precious.txt").read_text() == "mine"
    assert not Path("new.txt").exists()


def test_pages_and_tables_are_not_written_through_links(run, resumed):
    Path("precious.txt").write_text("mine")
    (run / "attention").mkdir()
    names = ["report.html", "report.html.tmp"]
    names += [f"attention/{n}" for n in ("statistics.jsonl", "statistics.tmp", "heads.csv")]
    names += [f"attention/{n}" for n in ("timelapse.html", "timelapse.tmp", "step_00000006.tmp")]
    names += ["attention/step_00000002.png"]  # keeps heads.csv and the time-lapse
    for name in names:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(Path("precious.txt").resolve())
    resumed(LONGER, "lens=default", "lens.every=2").train()
    assert Path("precious.txt").read_text() == "mine"
    assert (run / "attention" / "heads.csv").stat().st_size > 100


def test_checkpoints_may_be_on_another_disk(run, resumed):
    shutil.move(run / "checkpoints", "other_disk")
    (run / "checkpoints").symlink_to(Path("other_disk").resolve())
    resumed(LONGER).train()
    assert Path("other_disk/step_00000006").is_dir()


def test_locks(run, trained, tmp_path, monkeypatch, capsys):
    """A file system without locks costs a line; a lock file that cannot be written is an error, as
    is one that is a link."""
    (tmp_path / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError) as caught:  # noqa: PT011 the operating system's message
        lock(tmp_path / "lock")
    assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "new").exists()

    def fail_with(number):
        def failing(path):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(directory, "lock", failing)
        monkeypatch.setattr("tokens.prepare.lock", failing)

    for number in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        fail_with(number)
        assert directory.take(run) is None
        assert capsys.readouterr().err.count("\n") == 1
    for number in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO):
        fail_with(number)
        with refused(RunDirectoryError, "name", "run"):
            directory.take(run)
    for number, kind in ((errno.ENOSPC, PreparationError), (errno.ENOLCK, DataError)):
        fail_with(number)
        with refused(kind, "out", tmp_path / "out"):
            prepare(trained / "text.txt", tmp_path / "out", tokenizer="byte")


# ------------------------------------------------------- files that are missing or not regular


def test_settings_that_cannot_be_read_are_written_again(
    run, resumed, no_endless_reads, monkeypatch
):
    """A run needs nothing but its checkpoints to resume; one without them begins."""
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
        assert not (run / "config.yaml").is_symlink(), kind
        resumed(f"name={new.name}")
        assert "trainer" in json.loads((new / "run.json").read_text())["settings"], kind
    (run / "run.json").unlink()
    monkeypatch.setattr(directory, "settings_of", lambda folder: None)
    assert resumed(LONGER).state.step == 4


def test_unreadable_launch_files_of_other_runs_are_ignored(run, no_endless_reads, monkeypatch):
    """A start without a name looks at launch.json of all runs."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for kind, make in UNREADABLE.items():
        Path("runs", kind).mkdir()
        make(Path("runs", kind, "launch.json"))
    assert directory.name_before_restart() is None


@pytest.mark.parametrize("kind", ENDLESS)
def test_checkpoints_with_special_files_are_refused(run, newest, resumed, no_endless_reads, kind):
    for name in ("SHA256SUMS", *checkpoint.FILES):
        before = (newest / name).read_bytes()
        ENDLESS[kind](newest / name)
        reads = [resumed, lambda: resumed("name=new", f"trainer.resume={newest}")]
        if name != "optimizer.safetensors":
            reads += [lambda: load_reader(run), lambda: load_reader(newest)]
            reads += [lambda: resumed("name=new", "trainer.init_from=runs/run")]
        for read in reads:
            with refused(DamagedCheckpointError, "checkpoint", exit_code=3) as caught:
                read()
            assert name in str(caught.value.value)
        (newest / name).unlink()
        (newest / name).write_bytes(before)
    assert newest.is_dir()


def test_export_and_generate_open_no_special_files(in_process, run, no_endless_reads):
    here = Path.cwd()
    for make in ENDLESS.values():
        make(run / "metrics.jsonl")
        shutil.rmtree("hf", ignore_errors=True)
        code, _, err = in_process(export_hf.main, here, "checkpoint=runs/run", "out=hf")
        assert code == 0, err
    for kind, make in ENDLESS.items():
        for name in ("config.json", "model.safetensors", "shard.safetensors"):
            folder = Path(f"{kind} {name}")
            shutil.copytree("hf", folder)
            if name == "shard.safetensors":
                (folder / "model.safetensors").unlink()
                index = {"weight_map": {"transformer.wte.weight": name}}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            make(folder / name)
            arguments = (f"checkpoint={folder}", "max_new_tokens=2", "device=cpu")
            code, _, err = in_process(generate.main, here, *arguments)
            assert code == 3, (kind, name)
            assert str(folder) in err


# ------------------------------------------------------------------- a run that trains meanwhile


def save_newer_and_prune(run):
    """What a run does that saves its next checkpoint with trainer.keep=1."""
    folders = checkpoint.whole_ones(run)
    newer = run / "checkpoints" / f"step_{checkpoint.step_of(folders[0]) + 1:08d}"
    shutil.copytree(folders[0], newer)
    change_state(newer, step=checkpoint.step_of(newer))
    last = run / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(newer.name)
    for old in folders:
        shutil.rmtree(old)


@pytest.mark.parametrize("name", ["read_bounded", "checksum", "read_json", "load_file"])
def test_a_checkpoint_may_be_pruned_while_it_is_read(run, tmp_path, monkeypatch, capsys, name):
    """The new newest one is read instead, without a warning; one that is named is refused."""
    real = getattr(checkpoint, name)
    for number in range(4):
        before, by_link = divmod(number, 2)
        copy, left = tmp_path / f"copy{number}", [1]
        shutil.copytree(run, copy, symlinks=True)

        def read(file, *rest, before=before, copy=copy, left=left):
            if before and left and "step_" in str(file):
                left.pop()
                save_newer_and_prune(copy)
            result = real(file, *rest)
            if left and "step_" in str(file):
                left.pop()
                save_newer_and_prune(copy)
            return result

        monkeypatch.setattr(checkpoint, name, read)
        reader = load_reader(copy / "checkpoints" / "last" if by_link else copy)
        monkeypatch.setattr(checkpoint, name, real)
        assert not left
        # What was read to its end before it was pruned is as good as the newest.
        assert reader.state.step in ((5,) if before else (4, 5))
        assert reader.folder.name == f"step_{reader.state.step:08d}"
        assert capsys.readouterr().err == ""
    named = copy / "checkpoints" / "step_00000004"
    with refused(CheckpointError, "checkpoint", named / "state.json"):
        load_reader(named)


def test_a_link_to_nothing_is_not_waited_for(run):
    (run / "checkpoints" / "step_00000009").symlink_to("nowhere")
    assert load_reader(run).state.step == 4


# ------------------------------------------------------------------------------ an invalid state

NAN, HUGE = math.nan, 10**400
SCALER = {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 0}
STATES = {
    "step": ["5", True, -1, 1e30, 10**30, 0, 3, None],
    "tokens": [-5, 10**30],
    "val_loss": ["x", NAN, HUGE, 1e200],
    "best_step": [-2, 4.0],
    "losses": ["x", [1, "a"], [None], [[1.0]], [HUGE], [1e300], [True]],
    "data": [5, [["a"]], [[1, []]], [["a", 5]], [["a", [1]]], [["a", [], 1]], ["ab"], {}],
    "skipped": [-1, 1e30],
    "wandb_id": ["../x", 5],
    "spikes": [5, {"seen": "x"}, {"other": 1}, {"seen": -1}, {"variance": -1.0}, {"mean": 1e200}],
    "scaler": [5, {"scale": "x"}, {"scale": 1.0}, SCALER | {"growth_interval": 2.5}],
    "settings": [5, {}],
    "settings.lens": [5],
    "settings.lens.every": ["x", -1, 2.5],
    "settings.trainer.warmup_steps": ["x", -3, True],
    "settings.trainer.eval_windows": [0],
    "settings.trainer.eval_every": [-1],
    "settings.trainer.log_every": [0],
    "format": [99, "x"],
    "other": [1],
}
TEXTS = ["", "{", "[]", "[" * 100_000, '{"step": 1}', '{"step": 1' + "0" * 5000 + "}"]
TEXTS += ['{"%s": 1}' % ("x" * 5000)]


def test_invalid_states_are_refused_by_name(trained, tmp_path):
    saved, copy = trained / "runs/run/checkpoints/step_00000004", tmp_path / "step_00000004"
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
        seal(copy)
        for read in (checkpoint.load_state, load_reader):
            with refused(CheckpointError, "checkpoint", exit_code=3) as caught:
                read(copy)
            assert len(str(caught.value)) < 2000, text[:20]


def test_a_run_with_an_invalid_state_is_not_changed(run, newest, resumed):
    before = (newest / "state.json").read_bytes()
    for key, value in {
        "step": 3,
        "losses": [1, "a"],
        "settings.lens": "x",
        "settings.trainer.eval_windows": "x",
    }.items():
        change_state(newest, **{key: value})
        files = contents(run)
        with refused(CheckpointError, "checkpoint", exit_code=3):
            resumed(LONGER)
        assert not changed(run, files), key
        (newest / "state.json").write_bytes(before)


def test_nonfinite_losses_of_skipped_steps_are_valid(run, newest, resumed):
    """A state has the losses since the last row of the log; a skipped step may be among them."""
    change_state(newest, losses=[4.0, math.nan, math.inf, 4])
    resumed(LONGER, "trainer.log_every=6").train()
    assert math.isfinite(rows(run)[-1]["train/loss"])
