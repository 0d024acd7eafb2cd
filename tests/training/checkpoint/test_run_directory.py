"""Run directories that were damaged, came from elsewhere, or change while they are read."""

import contextlib
import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from helpers import TEXT, TINY
from helpers.runs import rows
from helpers.texts import prepare

import generate
import train
from durable import clear, lock
from errors import CheckpointError, DataError, PreparationError, RunDirectoryError
from scripts import export_hf
from training import checkpoint, directory
from training.command import compose
from training.hf import load_reader


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text and runs/run, which has checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        made = train.Trainer(compose([*TINY, "data.path=text.txt", "name=run"]))
        made.train()
        made.close(0)
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
        made.append(train.Trainer(compose([*TINY, "data.path=text.txt", "name=run", *overrides])))
        return made[-1]

    yield resume
    for one in made:
        one.close(0)


@pytest.fixture
def newest(run):
    """The newest checkpoint, the only one."""
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    return run / "checkpoints" / "step_00000004"


LONGER = "trainer.max_steps=6"


def seal(folder):
    """Writes checksums that fit the files."""
    sums = [f"{checkpoint.checksum(folder / name)}  {name}\n" for name in checkpoint.FILES]
    (folder / "SHA256SUMS").write_text("".join(sums))


def change_state(folder, **values):
    """Changes state.json; a key with dots is a path in it."""
    file = folder / "state.json"
    state = json.loads(file.read_text())
    for key, value in values.items():
        *groups, name = key.split(".")
        place = state
        for group in groups:
            place = place[group]
        place[name] = value
    file.write_text(json.dumps(state))
    seal(folder)


# ------------------------------------------------------------------------------------- leftovers


def test_what_an_export_that_was_killed_left_is_removed(run, resumed):
    part = run / "hf.part-0123456789abcdef"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    (run / "config.yaml.part-0123456789abcdef").write_text("half")
    assert resumed(LONGER).state.step == 4
    assert not list(run.glob("*.part-*"))


def test_nothing_else_is_removed(tmp_path):
    """Neither what a leftover link points to nor a folder of the user with a similar name."""
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    folder = tmp_path / "run"
    (folder / "thesis.part-two").mkdir(parents=True)
    (folder / "hf.part-0123456789abcdef").symlink_to(precious)
    clear(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.part-two"]
    assert (precious / "thesis.txt").read_text() == "years of work"


# ----------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", [".lock", "launch.json", "metrics.jsonl", "samples.jsonl"])
def test_a_file_that_is_a_link_is_not_written_through(run, resumed, name):
    precious = Path("precious.txt")
    precious.write_text("years of work")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious.resolve())
    with pytest.raises(RunDirectoryError, match=name) as caught:
        resumed(LONGER)
    assert caught.value.exit_code == 3
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_no_file_is_made_at_the_end_of_a_link(run, resumed, name):
    (run / name).unlink()
    (run / name).symlink_to(Path("new.txt").resolve())
    with pytest.raises(RunDirectoryError, match=name):
        resumed(LONGER).train()
    assert not Path("new.txt").exists()


def test_pages_and_tables_are_not_written_through_links(run, resumed):
    precious = Path("precious.txt")
    precious.write_text("years of work")
    (run / "attention").mkdir()
    names = ["report.html", "report.html.tmp"]
    names += [f"attention/{n}" for n in ("statistics.jsonl", "statistics.tmp", "heads.csv")]
    names += [f"attention/{n}" for n in ("timelapse.html", "timelapse.tmp", "step_00000006.tmp")]
    names += ["attention/step_00000002.png"]  # keeps heads.csv and the time-lapse
    for name in names:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(precious.resolve())
    resumed(LONGER, "lens=default", "lens.every=2").train()
    assert precious.read_text() == "years of work"
    assert (run / "attention" / "heads.csv").stat().st_size > 100


def test_folders_that_are_links_are_used(run, resumed):
    """Checkpoints may be on another disk."""
    shutil.move(run / "checkpoints", "other_disk")
    (run / "checkpoints").symlink_to(Path("other_disk").resolve())
    resumed(LONGER).train()
    assert Path("other_disk/step_00000006").is_dir()


def test_where_the_file_system_has_no_locks_a_line_says_so(run, monkeypatch, capsys):
    for number in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):

        def lock(path, number=number):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(directory, "lock", lock)
        assert directory.take(run) is None
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_lock_that_cannot_be_written_is_not_a_missing_lock(run, monkeypatch, number):
    def lock(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(directory, "lock", lock)
    with pytest.raises(RunDirectoryError, match=r"\.lock"):
        directory.take(run)


def test_what_is_locked_is_no_link(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="lock"):
        lock(tmp_path / "lock")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, PreparationError), (errno.ENOLCK, DataError)]
)
def test_a_lock_of_token_files_that_cannot_be_written(trained, tmp_path, monkeypatch, number, kind):
    def lock(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("tokens.prepare.lock", lock)
    with pytest.raises(kind, match="out"):
        prepare(trained / "text.txt", tmp_path / "out", tokenizer="byte")


# ------------------------------------------------------- files that are missing or not regular


def as_fifo(path):
    os.mkfifo(path)


def as_device(path):
    path.symlink_to("/dev/zero")


def as_empty(path):
    path.write_bytes(b"")


def as_huge(path):
    path.touch()
    os.truncate(path, 2**26)


def as_nested(path):
    path.write_text("[" * 100_000)


def as_list(path):
    path.write_text("[]")


@pytest.fixture
def no_hang(monkeypatch):
    """A FIFO that is opened the usual way would wait for ever."""
    real = os.open

    def check(path, flags, *rest, **more):
        with contextlib.suppress(OSError, TypeError):
            if Path(path).is_fifo() and not flags & os.O_NONBLOCK:
                raise AssertionError(f"{path} was opened and waits for a writer")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", check)
    opener = open

    def check_open(file, *rest, **more):
        if not isinstance(file, int):
            path = Path(os.fspath(file))
            if path.is_fifo() or os.path.realpath(path) == "/dev/zero":
                raise AssertionError(f"{path} was opened and never ends")
        return opener(file, *rest, **more)

    monkeypatch.setattr("builtins.open", check_open)
    monkeypatch.setattr("io.open", check_open)


@pytest.mark.parametrize("kind", [None, as_empty, as_fifo, as_device, as_huge, as_nested, as_list])
def test_a_run_without_its_settings_resumes_and_writes_them_again(run, resumed, no_hang, kind):
    before = json.loads((run / "run.json").read_text())["settings"]
    for name in ("run.json", "config.yaml"):
        (run / name).unlink()
        if kind:
            kind(run / name)
    again = resumed(LONGER)
    again.train()
    assert again.state.step == 6
    before["trainer"]["max_steps"] = 6
    assert json.loads((run / "run.json").read_text())["settings"] == before
    assert (run / "config.yaml").stat().st_size > 100
    assert not (run / "config.yaml").is_symlink()


@pytest.mark.parametrize("kind", [as_fifo, as_device, as_huge, as_nested, as_list])
def test_a_run_that_never_began_begins(trainer, no_hang, kind):
    """No settings that are readable are no settings of another run."""
    Path("runs/new").mkdir(parents=True)
    kind(Path("runs/new/run.json"))
    trainer("name=new")
    assert "trainer" in json.loads(Path("runs/new/run.json").read_text())["settings"]


def test_a_run_whose_state_is_large_resumes_without_its_settings(run, resumed, monkeypatch):
    """Nothing but checkpoints is needed of a run directory, however the settings are found."""
    (run / "run.json").unlink()
    monkeypatch.setattr(directory, "settings_of", lambda folder: None)
    assert resumed(LONGER).state.step == 4


@pytest.mark.parametrize("kind", [as_fifo, as_device])
@pytest.mark.parametrize("name", ["launch.json", "metrics.jsonl", "samples.jsonl", ".lock"])
def test_a_resumed_run_opens_no_fifo_and_no_device(run, resumed, no_hang, kind, name):
    (run / name).unlink(missing_ok=True)
    kind(run / name)
    with pytest.raises(RunDirectoryError, match=name) as caught:
        resumed(LONGER)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("kind", [as_fifo, as_device, as_huge, as_nested, as_list])
def test_what_started_another_run_is_read_with_a_limit(run, trainer, no_hang, monkeypatch, kind):
    """A start without a name looks at launch.json of all runs."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    other = Path("runs/other")
    other.mkdir(parents=True)
    kind(other / "launch.json")
    assert directory.name_before_restart() is None


@pytest.mark.parametrize("kind", [as_fifo, as_device])
@pytest.mark.parametrize("name", ["SHA256SUMS", *checkpoint.FILES])
def test_a_checkpoint_of_a_fifo_or_a_device_is_refused(run, newest, resumed, no_hang, kind, name):
    (newest / name).unlink()
    kind(newest / name)
    reads = [resumed, lambda: resumed("name=new", f"trainer.resume={newest}")]
    if name != "optimizer.safetensors":
        reads += [lambda: load_reader(run), lambda: load_reader(newest)]
        reads += [lambda: resumed("name=new", "trainer.init_from=runs/run")]
    for read in reads:
        with pytest.raises(CheckpointError, match=name) as caught:
            read()
        assert caught.value.exit_code == 3
    assert newest.is_dir()


@pytest.mark.parametrize("kind", [as_fifo, as_device])
def test_the_log_of_an_exported_run_is_read_with_care(in_process, run, no_hang, kind):
    (run / "metrics.jsonl").unlink()
    kind(run / "metrics.jsonl")
    code, _, err = in_process(export_hf.main, Path.cwd(), "checkpoint=runs/run", "out=hf")
    assert code == 0, err


@pytest.mark.parametrize("kind", [as_fifo, as_device])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "shard.safetensors"])
def test_a_hugging_face_directory_of_fifos_is_refused(in_process, run, no_hang, kind, name):
    in_process(export_hf.main, Path.cwd(), "checkpoint=runs/run", "out=hf")
    folder = Path("hf")
    if name == "shard.safetensors":
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    arguments = ("checkpoint=hf", "max_new_tokens=2", "device=cpu")
    code, _, err = in_process(generate.main, Path.cwd(), *arguments)
    assert code == 3
    assert "hf" in err


# ------------------------------------------------------------------- a run that trains meanwhile


def goes_on(run):
    """What a run does that saves its next checkpoint with trainer.keep=1: prunes the older."""
    folders = checkpoint.whole_ones(run)
    newer = run / "checkpoints" / f"step_{checkpoint.step_of(folders[0]) + 1:08d}"
    shutil.copytree(folders[0], newer)
    change_state(newer, step=checkpoint.step_of(newer))
    last = run / "checkpoints" / "last"
    last.unlink()
    last.symlink_to(newer.name)
    for old in folders:
        shutil.rmtree(old)


READS = ["_read_sums", "checksum", "load_state", "read_tensors", "load_file"]


@pytest.mark.parametrize("path", ["runs/run", "runs/run/checkpoints/last"])
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_that_is_pruned_while_it_is_read(run, monkeypatch, capsys, path, name, before):
    """The new newest one is read instead, without a word of damage."""
    real, left = getattr(checkpoint, name), [1]

    def read(file, *rest):
        if before and left and "step_" in str(file):
            left.pop()
            goes_on(run)
        result = real(file, *rest)
        if left and "step_" in str(file):
            left.pop()
            goes_on(run)
        return result

    monkeypatch.setattr(checkpoint, name, read)
    reader = load_reader(path)
    monkeypatch.undo()
    assert not left
    # What was read to its end before it was pruned is as good as the newest.
    assert reader.state.step in ((5,) if before else (4, 5))
    assert reader.folder.name == f"step_{reader.state.step:08d}"
    assert capsys.readouterr().err == ""


def test_one_that_is_named_and_pruned_is_refused(run, monkeypatch):
    named = run / "checkpoints" / "step_00000004"
    goes_on(run)
    with pytest.raises(CheckpointError, match="step_00000004"):
        load_reader(named)


def test_a_link_to_nothing_is_no_reason_to_wait(run):
    (run / "checkpoints" / "step_00000009").symlink_to("nowhere")
    assert load_reader(run).state.step == 4


# --------------------------------------------------------------------------------- a wrong state

NAN, HUGE = math.nan, 10**400
STATES = {
    "step": ["5", True, -1, 1e30, 10**30, 0, 3, None],
    "tokens": [-5, "x", 10**30],
    "val_loss": ["x", NAN, HUGE, 1e200],
    "best_loss": [[], HUGE],
    "best_step": [-2, "4", 4.0, 10**30],
    "losses": ["x", [1, "a"], [None], [[1.0]], [HUGE], [1e300], [True], 5],
    "data": [5, [["a"]], [[1, []]], [["a", 5]], [["a", [1]]], [["a", [], 1]], ["ab"], {}],
    "skipped": [-1, 1e30, "3", 10**30],
    "skipped_in_a_row": [-1, 1e30, "3", 10**30],
    "spikes": [
        5,
        {"seen": "x"},
        {"other": 1},
        {"seen": -1},
        {"seen": 60, "variance": -1.0},
        {"seen": 60, "mean": 1e200},
    ],
    "scaler": [
        5,
        {"scale": "x"},
        {"scale": 1.0},
        {
            "scale": 1.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2.5,
            "_growth_tracker": 0,
        },
    ],
    "settings": [5, [], {}],
    "settings.lens": [5, "x"],
    "settings.lens.every": ["x", -1, 2.5],
    "settings.trainer.warmup_steps": ["x", -3, True, 1.5],
    "settings.trainer.eval_windows": [0, "x", -8],
    "settings.trainer.eval_every": ["x", -1],
    "settings.trainer.log_every": [0, "x"],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in STATES.items() for value in values],
    ids=lambda value: f"{value!r:.30}" if value != HUGE else "huge",
)
def test_a_state_of_wrong_values_is_refused_by_name(trained, tmp_path, key, value):
    saved, copy = trained / "runs/run/checkpoints/step_00000004", tmp_path / "step_00000004"
    copy.mkdir()
    for name in ("model.safetensors", "optimizer.safetensors"):
        (copy / name).symlink_to(saved / name)
    shutil.copy(saved / "state.json", copy)
    change_state(copy, **{key: value})
    field = key.split(".")[-1]
    for read in (checkpoint.load_state, load_reader):
        with pytest.raises(CheckpointError, match=rf"state\.json.*\b{field}\b") as caught:
            read(copy)
        assert caught.value.exit_code == 3
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["step", "losses", "settings.lens", "settings.trainer.eval_windows"]
)
def test_a_run_whose_state_has_wrong_values_is_left_as_it_is(run, newest, resumed, key):
    change_state(newest, **{key: STATES[key][1]})
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match=r"state\.json") as caught:
        resumed(LONGER)
    assert caught.value.exit_code == 3
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("step", [0, 3])
def test_a_state_of_another_step_sets_no_checkpoint_aside(run, newest, resumed, step):
    change_state(newest, step=step)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        resumed(LONGER)
    assert newest.is_dir()


def test_losses_of_skipped_steps_are_no_damage(run, newest, resumed):
    """A run writes the losses since its last row; one that was not finite is among them."""
    change_state(newest, losses=[4.0, math.nan, math.inf, 4])
    again = resumed(LONGER, "trainer.log_every=6")
    again.train()
    assert math.isfinite(rows(run)[-1]["train/loss"])
