"""Checkpoints: whole or refused, in words."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from training import checkpoint
from training.checkpoint import CheckpointError


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
    first = checkpoint.find(run.folder)
    run.step()
    write = checkpoint.save_file

    def write_the_first_only(tensors, path, *metadata):
        if path.name == "optimizer.safetensors":
            raise OSError("no space left")
        write(tensors, path, *metadata)

    monkeypatch.setattr(checkpoint, "save_file", write_the_first_only)
    with pytest.raises(OSError, match="no space left"):
        run.save()
    assert checkpoint.find(run.folder) == first
    monkeypatch.setattr(checkpoint, "save_file", write)
    run.save()  # the left-over is cleared away
    assert checkpoint.find(run.folder).name == "step_00000002"
    assert not list((run.folder / "checkpoints").glob("*.part"))


def test_optimizer_of_another_shape_is_refused(saved, trainer):
    change_tensors(
        saved / "optimizer.safetensors",
        lambda t: t.update({"exp_avg.final_norm.bias": torch.zeros(5)}),
    )
    with pytest.raises(CheckpointError, match=r"exp_avg\.final_norm\.bias has shape"):
        trainer("name=saved", "trainer.max_steps=5")


def test_a_copied_run_goes_on_elsewhere(saved, trainer, tmp_path):
    shutil.copytree(saved.parent.parent, tmp_path / "runs" / "moved", symlinks=True)
    assert trainer("name=moved", "trainer.max_steps=5").state.step == 4
