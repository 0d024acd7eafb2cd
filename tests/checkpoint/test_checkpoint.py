"""Checkpoints: contents, damaged files, saving in the background, links, full disks."""

import copy
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import threading

import pytest
import torch
from helpers import TIMEOUT
from helpers.refusals import refused
from helpers.runs import (
    assert_same,
    change_state,
    change_tensors,
    copy_run,
    damage,
    write_checksums,
)
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from clearhead import files
from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing, saving
from clearhead.checkpoint.tensors import all_finite, collect, load_model
from clearhead.errors import (
    CheckpointError,
    DamagedCheckpointError,
    DivergedError,
    NotSavedError,
)
from train import fit, save, save_if_due, stop, train_step

MODEL = "model.safetensors"


@pytest.fixture
def saved(trained, make_run, tmp_path):
    """The newest checkpoint of runs/run, a copy of `trained` in the current directory."""
    return tmp_path / copy_run(trained) / "checkpoints" / "step_00000004"


@pytest.fixture
def longer(make_run):
    """longer() -> the Run that resumes runs/run and has one more step."""
    return lambda *more: make_run("name=run", "trainer.max_steps=5", *more)


def test_content_of_a_checkpoint(saved, longer):
    """sha256sum accepts the files, the tied weight is stored once, and the loaded model has the
    same outputs as the model of a resumed run."""
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=saved, check=False)
    assert done.returncode == 0
    assert {p.name for p in saved.iterdir()} == {*checkpoint.FILES, "SHA256SUMS"}
    tensors = load_file(saved / MODEL)
    assert {"blocks.1.attn.W_query.weight", "token_emb.weight"} <= tensors.keys()
    assert not [name for name in tensors if "head" in name or "_orig_mod" in name]
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    model, state = load_model(saved)
    assert state.step == 4
    assert not model.training
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids)[0], longer().model.eval()(ids)[0])


def test_find_accepts_a_run_or_a_checkpoint(saved):
    run = saved.parent.parent
    for path in (run, saved, run / "checkpoints" / "last"):
        assert listing.find_checkpoint(path) == saved
    for path in (run.parent, run / "nothing"):
        with refused(CheckpointError, "checkpoint", path):
            listing.find_checkpoint(path)


# Text that the error must contain -> a change of model.safetensors.
TENSORS = {
    "pos_emb.weight": lambda t: t.pop("pos_emb.weight"),
    "other": lambda t: t.update(other=torch.zeros(1)),
    "torch.int32": lambda t: t.update({"final_norm.bias": torch.zeros(32).int()}),
    "(3, 3)": lambda t: t.update({"pos_emb.weight": torch.zeros(3, 3)}),
    "final_norm.bias": lambda t: t["final_norm.bias"][0].fill_(math.nan),
}


def test_tensors_that_do_not_fit_are_named(saved):
    right = (saved / MODEL).read_bytes()
    for named, change in TENSORS.items():
        (saved / MODEL).write_bytes(right)
        change_tensors(saved / MODEL, change)
        with refused(CheckpointError, "checkpoint", saved / MODEL, 3) as caught:
            load_model(saved)
        assert named in caught.value.reason


def test_optimizer_tensors_that_do_not_fit_are_named(saved, longer):
    """Negative second moments or steps would result in NaN after the square root."""
    file = saved / "optimizer.safetensors"
    right = file.read_bytes()
    for name, value in {
        "exp_avg.final_norm.bias": torch.zeros(5),
        "step.pos_emb.weight": torch.tensor(-1.0),
        "exp_avg_sq.blocks.1.mlp.fc.weight": -torch.ones(128, 32),
    }.items():
        file.write_bytes(right)
        change_tensors(file, lambda t: t.update({name: value}))  # noqa: B023
        write_checksums(saved)
        with refused(CheckpointError, "checkpoint", exit_code=3) as caught:
            longer()
        assert name in caught.value.reason
        assert isinstance(caught.value, DamagedCheckpointError) == ("exp_avg." not in name)


def test_model_settings_that_do_not_fit_allocate_nothing(saved):
    right = json.loads((saved / "state.json").read_text())["settings"]["model"]
    odd = {"num_layers": 10**9, "emb_dim": "32", "_target_": "os.system", "emb_dim\ud800": 32}
    for key, value in odd.items():
        change_state(saved, **{"settings.model": right | {key: value}})
        with refused(CheckpointError, "checkpoint"):
            load_model(listing.find_checkpoint(saved))


def test_damaged_checkpoint_is_skipped_or_refused(trained, make_run, tmp_path, capsys):
    """A run resumes from the checkpoint before, with a warning. A damaged checkpoint that is given
    by its path is refused."""
    names = (*checkpoint.FILES, "SHA256SUMS")
    for name, how in zip(names, ("flip", "cut", "grow", "remove"), strict=True):
        run = tmp_path / "runs" / how
        shutil.copytree(trained, run, symlinks=True)
        damage(run / "checkpoints" / "step_00000004" / name, how)
        with refused(DamagedCheckpointError, "checkpoint", exit_code=3):
            path = f"trainer.resume={run}/checkpoints/step_00000004"
            make_run(path, f"runs_dir={run.parent}", "data.path=text.txt")
        capsys.readouterr()
        again = make_run(f"name={how}", "trainer.max_steps=5")
        assert again.state.step == 2
        assert "step_00000002" in capsys.readouterr().err
        fit(again)
        kept = {"step_00000004", "step_00000004.damaged", "step_00000005", "best", "last"}
        assert {p.name for p in (run / "checkpoints").iterdir()} == kept
        assert listing.find_checkpoint(run).name == "step_00000005"


def test_one_nonfinite_number_among_many_is_found():
    for value in (math.nan, math.inf, -math.inf):
        tensor = torch.randn(100_000)
        assert all_finite(tensor)
        tensor[99_999] = value
        assert not all_finite(tensor)


def test_nonfinite_parameters_are_not_saved(longer, saved):
    run = longer()
    train_step(run)
    with torch.no_grad():
        run.model.pos_emb.weight[0, 0] = math.inf
    save(run)
    with refused(DivergedError, "pos_emb.weight"):
        run.checkpointer.finish(run.state)
    assert listing.find_checkpoint(run.directory).name == "step_00000004"


@pytest.fixture
def proceed(monkeypatch):
    """An event for which the writing of checkpoints waits."""
    event, write = threading.Event(), checkpoint.write

    def late(*arguments):
        assert event.wait(TIMEOUT)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", late)
    return event


def test_a_checkpoint_has_the_parameters_of_its_step(make_run, proceed):
    """Training changes the parameters while the checkpoint is being written."""
    run = make_run("trainer.eval_every=0")
    train_step(run)
    wanted = copy.deepcopy(run.model.state_dict())
    save(run)
    train_step(run)
    assert not torch.equal(wanted["token_emb.weight"], run.model.token_emb.weight)
    assert listing.newest_step(run.directory) == 0
    proceed.set()
    newest = run.checkpointer.wait(run.state)
    model, state = load_model(listing.find_checkpoint(run.directory))
    assert state.step == newest == 1
    assert_same(dict(model.named_parameters()), wanted)


class PinnedMemory(TorchFunctionMode):
    """Memory for a number of pinned tensors."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA error: out of memory")
            self.left -= 1
        return function(*args, **kwargs)


def test_pinned_copies_are_complete(make_run, monkeypatch):
    """Also if only some of them fit. The GPU copies later than the program asks for it."""
    run, waits = make_run(), []
    train_step(run)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(True))
    parts = run.model, run.optimizer, run.strategy
    expected = collect(*parts, copy=True)
    with PinnedMemory(5) as memory:
        found = collect(*parts, copy=True, pin=True)
    assert memory.left == 0
    assert waits == [True]
    for some, others in zip(found, expected, strict=True):
        assert_same(some, others)
    pointers = {p.data_ptr() for p in run.model.parameters()}
    assert pointers.isdisjoint(tensor.data_ptr() for tensor in found[0].values())


def test_pinned_memory_is_freed_at_the_end_of_a_run(make_run, monkeypatch):
    run, calls = make_run(), []
    free = "empty_host_cache"  # not in torch 2.11
    monkeypatch.setattr(torch.accelerator, free, lambda: calls.append(True), raising=False)
    with run:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert calls == [True]


def test_a_full_disk_does_not_end_training(make_run, monkeypatch):
    """The previous checkpoint is kept, the best one is on disk, and each write is tried twice."""
    run = make_run("trainer.save_every=1", "trainer.max_steps=9")
    monkeypatch.setattr(saving, "RETRY_AFTER", 0)
    write, tries = checkpoint.save_file, []

    def full(tensors, path, *metadata):
        if path.name == "optimizer.safetensors":
            tries.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, *metadata)

    train_step(run)
    save_if_due(run, 5.0)
    train_step(run)
    run.checkpointer.wait(run.state)
    monkeypatch.setattr(checkpoint, "save_file", full)
    save_if_due(run, 4.0)
    train_step(run)
    run.checkpointer.wait(run.state)
    assert len(tries) == 2
    assert listing.find_checkpoint(run.directory).name == "step_00000001"
    monkeypatch.setattr(checkpoint, "save_file", write)
    save_if_due(run, 4.5)
    run.checkpointer.finish(run.state)
    assert os.readlink(run.directory / "checkpoints" / "best") == "step_00000003"
    assert run.state.best_loss == 4.5


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_stop_saves_again_if_the_checkpoint_may_not_be_on_disk(
    make_run, monkeypatch, is_waited_for
):
    """fsync of the folder of checkpoints fails: a loss of power could undo the rename."""
    run, fsync = make_run(), files.fsync

    def broken(path):
        if path.name == "checkpoints":
            raise OSError(errno.EIO, "Input/output error")
        fsync(path)

    monkeypatch.setattr(saving, "RETRY_AFTER", 0)
    train_step(run)
    run.stop.signals.received = signal.SIGTERM
    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync", broken)
        patch.setattr(saving, "fsync", broken)
        save(run)
        if is_waited_for:
            assert run.checkpointer.wait(run.state) == 0
        with refused(NotSavedError, "checkpoint"):
            stop(run)
    with pytest.raises(SystemExit):
        stop(run)
    assert run.checkpointer.wait(run.state) == 1
    assert os.readlink(run.directory / "checkpoints" / "last") == "step_00000001"


def test_after_an_interrupt_closing_waits_for_the_checkpoint(make_run, proceed):
    """As when a notebook cell is interrupted: the run directory stays locked during the write."""
    run = make_run()
    train_step(run)
    save(run)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupt = (threading.main_thread().ident, signal.SIGALRM)
    threading.Timer(0.5, signal.pthread_kill, interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run.checkpointer.wait(run.state)
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.5, proceed.set).start()
    run.closing.close()
    assert listing.newest_step(run.directory) == 1
