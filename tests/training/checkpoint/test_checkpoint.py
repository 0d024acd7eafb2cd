"""Checkpoints: whole or refused, in words."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.runs import assert_same, weights
from safetensors.torch import load_file, save_file

from errors import CheckpointError, DivergedError, NotSavedError
from training import checkpoint, saving


@pytest.fixture
def saved(trainer):
    """A checkpoint of a run that has trained."""
    run = trainer("name=saved")
    run.train()
    return checkpoint.find(run.folder)


def test_names_are_the_models_and_the_tied_weight_is_there_once(saved):
    names = load_file(saved / "model.safetensors").keys()
    assert "blocks.1.attn.W_query.weight" in names
    assert "token_emb.weight" in names
    assert not [name for name in names if "head" in name or "_orig_mod" in name]
    assert {t.dtype for t in load_file(saved / "model.safetensors").values()} == {torch.float32}


def test_find_takes_a_run_or_a_checkpoint(saved):
    run = saved.parent.parent
    assert checkpoint.find(run) == saved
    assert checkpoint.find(saved) == saved
    assert checkpoint.find(run / "checkpoints" / "last") == saved
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.find(run.parent)
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint.find(run / "nothing")


def test_loading_gives_the_same_model(saved, trainer):
    model, state = checkpoint.load_model(saved)
    assert state.step == 4
    assert not model.training
    trained = trainer("name=saved", "trainer.max_steps=5").model.eval()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids)[0], trained(ids)[0])


def change_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


DAMAGE = {
    "missing tensor": (
        lambda c: change_tensors(c / "model.safetensors", lambda t: t.pop("pos_emb.weight")),
        "pos_emb.weight is missing",
    ),
    "extra tensor": (
        lambda c: change_tensors(c / "model.safetensors", lambda t: t.update(other=torch.zeros(1))),
        "unknown tensor other",
    ),
    "extra tensor with an endless name": (
        lambda c: change_tensors(
            c / "model.safetensors", lambda t: t.update({"x" * 5000: torch.zeros(1)})
        ),
        "unknown tensor x{80};",
    ),
    "whole numbers": (
        lambda c: change_tensors(
            c / "model.safetensors", lambda t: t.update({"final_norm.bias": torch.zeros(32).int()})
        ),
        "final_norm.bias is of torch.int32",
    ),
    "floats of eight bits": (
        lambda c: change_tensors(
            c / "model.safetensors",
            lambda t: t.update({"final_norm.bias": torch.zeros(32, dtype=torch.float8_e4m3fn)}),
        ),
        "final_norm.bias is of torch.float8_e4m3fn",
    ),
    "other shape": (
        lambda c: change_tensors(
            c / "model.safetensors", lambda t: t.update({"pos_emb.weight": torch.zeros(3, 3)})
        ),
        r"pos_emb.weight has shape \(3, 3\)",
    ),
    "truncated": (
        lambda c: os.truncate(c / "model.safetensors", 1000),
        "unreadable",
    ),
    "not json": (lambda c: (c / "state.json").write_text("{"), "unreadable"),
    "newer format": (
        lambda c: (c / "state.json").write_text(
            json.dumps(json.loads((c / "state.json").read_text()) | {"format": 99})
        ),
        "newer format 99",
    ),
    "unknown field": (
        lambda c: (c / "state.json").write_text(
            json.dumps(json.loads((c / "state.json").read_text()) | {"other": 1})
        ),
        "unreadable",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(saved, damage):
    harm, says = DAMAGE[damage]
    harm(saved)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoint.load_model(saved)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("checkpoint=")
    assert caught.value.exit_code == 3


def test_a_damaged_model_is_not_half_loaded(saved, trainer):
    run = trainer("name=other")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    change_tensors(saved / "model.safetensors", lambda t: t.pop("final_norm.bias"))
    with pytest.raises(CheckpointError):
        checkpoint.load_parameters(saved, run.model)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_an_unfinished_checkpoint_is_never_seen(trainer, monkeypatch):
    run = trainer("name=cut", "trainer.save_every=1", "trainer.eval_every=0")
    run.step()
    run.save()
    run.finish_saving()
    first = checkpoint.find(run.folder)
    run.step()
    write = checkpoint.save_file
    monkeypatch.setattr(saving, "RETRY_AFTER", 0)

    def write_the_first_only(tensors, path, *metadata):
        if path.name == "optimizer.safetensors":
            raise OSError("no space left")
        write(tensors, path, *metadata)

    monkeypatch.setattr(checkpoint, "save_file", write_the_first_only)
    run.save()
    with pytest.raises(
        NotSavedError, match=r"step_00000002: could not be written .no space left"
    ) as e:
        run.finish_saving()
    assert e.value.exit_code == 4
    assert "make room there: the one of step 1 is intact; then resume with: " in str(e.value)
    assert checkpoint.find(run.folder) == first
    monkeypatch.setattr(checkpoint, "save_file", write)
    run.save()
    run.finish_saving()
    assert checkpoint.find(run.folder).name == "step_00000002"
    assert not list((run.folder / "checkpoints").glob("*.part"))


def seal(folder):
    """Checksums that fit whatever is in there, as somebody who means it would make them."""
    sums = [f"{checkpoint.checksum(folder / name)}  {name}\n" for name in checkpoint.FILES]
    (folder / "SHA256SUMS").write_text("".join(sums))


def test_optimizer_of_another_shape_is_refused(saved, trainer):
    change_tensors(
        saved / "optimizer.safetensors",
        lambda t: t.update({"exp_avg.final_norm.bias": torch.zeros(5)}),
    )
    seal(saved)
    with pytest.raises(CheckpointError, match=r"exp_avg\.final_norm\.bias has shape"):
        trainer("name=saved", "trainer.max_steps=5")


@pytest.mark.parametrize("name", ["step.pos_emb.weight", "exp_avg_sq.blocks.1.mlp.fc.weight"])
def test_negative_steps_and_second_moments_are_damage(saved, trainer, name):
    """Else their square root is NaN, and optimizer.lr would be blamed for the loss."""

    def negate(tensors):
        tensors[name].view(-1)[-1] = -1

    change_tensors(saved / "optimizer.safetensors", negate)
    seal(saved)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=re.escape(name)) as caught:
        trainer("name=saved", "trainer.max_steps=5")
    assert caught.value.exit_code == 3


# ------------------------------------------------------------------------------------ checksums


def test_the_checksums_are_those_of_sha256sum(saved):
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=saved, check=False)
    assert done.returncode == 0
    assert sorted(p.name for p in saved.iterdir()) == sorted([*checkpoint.FILES, "SHA256SUMS"])


@pytest.mark.parametrize("name", [*checkpoint.FILES, "SHA256SUMS"])
@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "remove"])
def test_a_damaged_checkpoint_is_passed_over_or_refused(saved, trainer, capsys, name, harm):
    """A run goes on from the one before, with a warning; one that is named is refused."""
    damage(saved / name, harm)
    named = r"\S*" if harm == "flip" else rf"\S*{name}"  # a checksum is not what its file has
    with pytest.raises(CheckpointError, match=rf"^checkpoint={named}: .*; use another one$") as e:
        trainer(f"trainer.resume={saved}", "name=other")
    assert e.value.exit_code == 3
    capsys.readouterr()
    run = trainer("name=saved", "trainer.max_steps=5")
    assert run.state.step == 2
    warned, moved = capsys.readouterr().err.splitlines()
    assert warned.endswith("; going on from step_00000002, the one before")
    assert moved.endswith("not used, as the run goes on from step 2; now step_00000004.damaged")
    run.train()
    assert run.state.step == 5
    folders = {p.name for p in (run.folder / "checkpoints").iterdir()}
    assert folders == {"best", "last", "step_00000004", "step_00000004.damaged", "step_00000005"}
    assert checkpoint.find(run.folder).name == "step_00000005"


def damage(file, harm):
    raw = bytearray(file.read_bytes())
    if harm == "flip":
        raw[len(raw) // 2] ^= 4
    elif harm == "cut":
        del raw[-1:]
    elif harm == "grow":
        raw += b"\n"
    file.write_bytes(raw)
    if harm == "remove":
        file.unlink()


def test_when_all_are_damaged_the_newest_is_named_and_nothing_touched(saved, trainer):
    run = saved.parent.parent
    for folder in checkpoint.whole_ones(run):
        damage(folder / "model.safetensors", "flip")
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match=r"step_00000004/model\.safetensors: is not"):
        trainer("name=saved")
    assert sorted(run.rglob("*")) == before


def test_a_checkpoint_without_checksums_is_of_an_older_format_or_refused(saved, trainer):
    state = json.loads((saved / "state.json").read_text())
    for key in ("losses", "skipped", "skipped_in_a_row", "spikes"):
        del state[key]
    (saved / "SHA256SUMS").unlink()
    (saved / "state.json").write_text(json.dumps(state | {"format": 2}))
    run = trainer("name=saved", "trainer.max_steps=5")
    assert run.state.step == 4
    run.train()
    assert checkpoint.load_state(checkpoint.find(run.folder)).format == checkpoint.FORMAT


def test_what_is_no_number_is_neither_written_nor_loaded(saved, trainer, tmp_path):
    run = trainer("name=saved", "trainer.max_steps=6")
    run.step()
    run.save()
    run.finish_saving()
    run.step()
    with torch.no_grad():
        run.model.pos_emb.weight[0, 0] = math.inf
    run.save()
    with pytest.raises(DivergedError, match=r"^pos_emb.weight: is no finite number after step 6"):
        run.finish_saving()
    assert checkpoint.find(run.folder).name == "step_00000005"
    shutil.copytree(saved, tmp_path / "copy")
    change_tensors(
        tmp_path / "copy" / "model.safetensors",
        lambda tensors: tensors["pos_emb.weight"][0].fill_(math.nan),
    )
    seal(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"pos_emb\.weight holds what is no finite"):
        checkpoint.load_model(checkpoint.find(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": 10**9}, "has 2 layers, the model needs 1000000000"),
        ({"vocab_size": 10**15}, r"token_emb.weight has shape \(257, 32\), the model needs"),
        ({"context_length": 10**15}, r"pos_emb.weight has shape \(32, 32\), the model needs"),
        ({"num_heads": 10**40}, "num_heads"),
        ({"emb_dim": "32"}, "emb_dim is '32'"),
        ({"dropout": None}, "dropout is None"),
        ({"_target_": "os.system"}, "_target_ is unknown"),
        ({"attention": "none"}, "no such attention kernel"),
    ],
)
def test_settings_that_do_not_fit_allocate_nothing(saved, changes, says):
    state = json.loads((saved / "state.json").read_text())
    state["settings"]["model"] |= changes
    (saved / "state.json").write_text(json.dumps(state))
    seal(saved)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoint.load_model(checkpoint.find(saved))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "state.json"),
        ("[" * 100_000, "unreadable"),
        ('{"step": 1}', "settings is missing"),
        ('{"step": -1, "settings": {"model": {}, "data": {}, "trainer": {}}}', "step is -1"),
        ('{"step": true, "settings": {}}', "step is True"),
        ('{"step": 1e400, "settings": {}}', "step is inf"),
        ('{"step": 1, "settings": {"model": []}}', "settings"),
        ('{"step": 1, "settings": {}, "val_loss": NaN}', "val_loss is nan"),
        ('{"step": 1' + "0" * 5000 + "}", "unreadable"),
        ('{"%s": 1}' % ("x" * 5000), r"unreadable \(x{1000}\.\.\."),
    ],
)
def test_a_state_of_other_types_is_refused(saved, text, says):
    (saved / "state.json").write_text(text)
    seal(saved)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoint.load_state(saved)
    assert str(caught.value).count("\n") == 0
    assert len(str(caught.value)) < 2000


# ---------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("at", [0, 1234, 99_999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_among_many_is_found(value, at):
    tensor = torch.randn(100_000)
    assert checkpoint.sound(tensor)
    tensor[at] = value
    assert not checkpoint.sound(tensor)
    assert checkpoint.sound(torch.empty(0))


def test_threads_beside_training_leave_it_all_cores(trainer):
    """What stays computes in itself, what writes is gone then: else they would slow every step."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        run = trainer("name=a")
        assert run.feed._thread.submit(torch.get_num_threads).result() == 1
        run.step()
        run.save()
        run.saver.wait()
        run.saver.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("saver")]
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 4
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_holds_the_step_at_which_it_was_begun(trainer, monkeypatch):
    """However long it takes to write: training goes on with the parameters meanwhile."""
    run = trainer("name=a", "trainer.eval_every=0")
    go_on, write = threading.Event(), checkpoint.write

    def late(*arguments):
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", late)
    run.step()
    wanted = weights(run)
    run.save()
    run.step()
    assert not torch.equal(wanted["token_emb.weight"], run.model.token_emb.weight)
    assert run.saver.newest is None
    go_on.set()
    run.saved_so_far()
    model, state = checkpoint.load_model(checkpoint.find(run.folder))
    assert state.step == run.saver.newest == 1
    assert_same(dict(model.named_parameters()), wanted)


def test_without_memory_for_a_copy_training_waits(trainer, monkeypatch):
    monkeypatch.setattr("training.fitting.spare_memory", lambda: 0)
    run = trainer("name=a", "trainer.eval_every=0")
    run.step()
    run.save()
    assert run.saver.newest == 1
    assert run.saver._writing is None


def test_a_full_disk_in_the_middle_is_told_and_training_goes_on(trainer, monkeypatch, capsys):
    """The checkpoint before stays, the best is still what is on the disk, the next is tried."""
    run = trainer("name=a", "trainer.eval_every=0", "trainer.save_every=1", "trainer.max_steps=9")
    monkeypatch.setattr(saving, "RETRY_AFTER", 0)
    run.step()
    run.save_if_due({"val/loss": 5.0})
    write, tries = checkpoint.save_file, []

    def full(tensors, path, *metadata):
        tries.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    run.step()
    run.saved_so_far()
    monkeypatch.setattr(checkpoint, "save_file", full)
    run.save_if_due({"val/loss": 4.0})
    run.step()
    monkeypatch.setattr(checkpoint, "save_file", write)
    run.save_if_due({"val/loss": 4.5})
    run.finish_saving()
    assert len(tries) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint=runs/a/checkpoints/step_00000002: could not be written (No")
    assert "B free on its disk); make room there: the one of step 1 is intact" in line
    assert line.endswith("; training goes on")
    assert os.readlink(run.folder / "checkpoints" / "best") == "step_00000003"
    assert run.state.best_loss == 4.5


def test_the_links_follow_the_state_whatever_happened_to_them(trainer, monkeypatch):
    """A run that is cut off between a checkpoint and its links has them set by the next start."""
    settings = ["name=a", "trainer.eval_every=0", "trainer.keep=1", "trainer.max_steps=6"]
    run = trainer(*settings)
    for loss in (5.0, 4.0):
        run.step()
        run.save_if_due({"val/loss": loss})
        run.saved_so_far()
    links = run.folder / "checkpoints"
    assert [os.readlink(links / name) for name in ("best", "last")] == ["step_00000002"] * 2
    for name in ("best", "last"):
        (links / name).unlink()
        (links / name).symlink_to("step_00000001")
    run = trainer(*settings)
    assert [os.readlink(links / name) for name in ("best", "last")] == ["step_00000002"] * 2
    for _ in range(2):  # neither is the best, which stays
        run.step()
        run.save()
        run.saved_so_far()
    assert sorted(p.name for p in links.iterdir()) == [
        "best",
        "last",
        "step_00000002",
        "step_00000004",
    ]
    assert os.readlink(links / "best") == "step_00000002"


def test_a_best_that_is_damaged_is_linked_to_no_more(saved, trainer):
    """Else what comes to the same step again would be called the best."""
    assert os.readlink(saved.parent / "best") == saved.name
    damage(saved / "model.safetensors", "cut")
    run = trainer("name=saved", "trainer.max_steps=5", "trainer.eval_every=0")
    assert os.readlink(saved.parent / "best") == "step_00000002"
    assert run.state.best_step == 2


def test_where_there_are_no_links_older_checkpoints_go_all_the_same(trainer, monkeypatch, capsys):
    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(saving, "_point", refused)
    run = trainer("name=a", "trainer.keep=1", "trainer.save_every=1", "trainer.eval_every=0")
    run.train()
    folders = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert folders == {f"step_{step:08d}" for step in (run.state.best_step, 4)}
    assert capsys.readouterr().err.count("no links to best and last") == 1
    assert trainer("name=a", "trainer.max_steps=5").state.step == 4


def test_what_was_left_half_done_is_cleared_away(saved, trainer):
    folder = saved.parent
    (folder / "step_00000009.part").mkdir()
    (folder / "step_00000009.part" / "model.safetensors").write_bytes(b"half")
    (folder / "last.part").symlink_to("step_00000009")
    trainer("name=saved", "trainer.max_steps=5")
    assert not list(folder.glob("*.part"))


def test_others_may_read_a_checkpoint_as_they_may_read_the_rest(saved):
    modes = {path.stat().st_mode & 0o777 for path in saved.iterdir()}
    assert len(modes) == 1


def test_a_copied_run_goes_on_elsewhere(saved, trainer, tmp_path):
    shutil.copytree(saved.parent.parent, tmp_path / "runs" / "moved", symlinks=True)
    assert trainer("name=moved", "trainer.max_steps=5").state.step == 4
