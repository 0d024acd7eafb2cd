"""trainer.init_from and experiment=finetune: weights, positions and settings of the new run."""

import pytest
import torch
from helpers import TINY
from helpers.refusals import printed_keys, refused
from helpers.runs import rows, run_command, train_in

import train
from clearhead.checkpoint.listing import find_checkpoint
from clearhead.checkpoint.tensors import load_model
from clearhead.errors import CheckpointError, ConfigError
from clearhead.models.huggingface import from_hf, to_hf
from clearhead.run.start import positions
from scripts import export_hf

FINETUNE = ["experiment=finetune", *(s for s in TINY if not s.startswith(("model=", "lens=")))]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with runs/old, a run without biases that has trained 24 of its 32 positions. `hf` is
    the same model as a Hugging Face directory, and `out` is its export."""
    folder = tmp_path_factory.mktemp("sources")
    own = ["data.max_length=24", "model.qkv_bias=false", "optimizer.lr=0.01"]
    run = train_in(folder, "name=old", *own)
    to_hf(load_model(find_checkpoint(run))[0], folder / "hf")
    assert run_command(export_hf.main, folder, "checkpoint=runs/old", "out=out")[0] == 0
    return folder


@pytest.mark.parametrize("source", ["runs/old", "runs/old/checkpoints/best", "hf", "out"])
def test_a_run_takes_the_weights_and_nothing_else(make_run, sources, source, capsys):
    given = ["model.dropout=0.3", "data.max_length=24"]
    fresh = make_run(f"trainer.init_from={sources / source}", *given)
    assert fresh.state.step == 0
    assert fresh.model.blocks[0].dropout.p == 0.3
    assert fresh.model.training
    assert all(p.requires_grad for p in fresh.model.parameters())
    expected = dict(from_hf(sources / "hf").named_parameters())  # the biases are zeros
    found = dict(fresh.model.named_parameters())
    assert found.keys() == expected.keys()
    for name in found.keys() - {"pos_emb.weight"}:
        assert torch.equal(found[name], expected[name]), name
    got, want = found["pos_emb.weight"], expected["pos_emb.weight"]
    assert torch.equal(got[:24], want[:24])
    # A Hugging Face directory contains no information about untrained positions.
    assert torch.equal(got[24:], want[24:] if source == "hf" else want[:8])
    assert "note:" not in capsys.readouterr().out


def test_positions_are_cut_or_repeated():
    """The model has positions 0 to 9, and the first six were trained. There is a note if the run
    uses other positions."""
    table = torch.arange(10.0)[:, None].expand(10, 2)
    repeated = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]
    cases = ((6, 4, False), (10, 4, False), (4, 4, True), (13, 4, True), (10, 7, True))
    for length, used, has_note in cases:
        found, notes = positions(table, 6, length, used)
        assert found.tolist() == [[row, row] for row in repeated[:length]], (length, used)
        assert len(notes) == has_note, (length, used)


def test_settings_that_do_not_fit_the_weights_are_named(make_run, sources):
    """Each error contains the right value."""
    fixes = {"emb_dim": "emb_dim=32", "num_layers": "num_layers=2", "qkv_bias": "qkv_bias=true"}
    wrong = ["model.num_layers=1", "model.emb_dim=8", "model.qkv_bias=false"]
    with pytest.raises(ConfigError) as caught:
        make_run(f"trainer.init_from={sources / 'hf'}", *wrong)
    problems = caught.value.problems
    assert [problem.key for problem in problems] == [f"model.{key}" for key in fixes]
    assert all(fix in p.hint for fix, p in zip(fixes.values(), problems, strict=True))
    with refused(CheckpointError, "trainer.init_from", "some/gpt2"):
        make_run("trainer.init_from=some/gpt2")


def test_finetune_needs_init_from(in_process, tmp_path):
    code, _, err = in_process(train.main, tmp_path, *FINETUNE, "data.path=text.txt")
    assert (code, printed_keys(err)) == (2, ["trainer.init_from"])
    assert list(tmp_path.iterdir()) == []


def test_finetune_starts_at_the_loss_of_the_weights(in_process, sources):
    before = [row for row in rows(sources / "runs/old") if "val/loss" in row][-1]
    for source, bias in (("runs/old", "false"), ("out", "true")):  # exports have biases of zeros
        name = f"from-{source.replace('/', '-')}"
        own = [f"trainer.init_from={source}", "data.path=text.txt", f"name={name}"]
        own += ["data.max_length=24", "trainer.max_steps=8", "optimizer.lr=1e-3"]
        code, _, err = in_process(train.main, sources, *FINETUNE, f"model.qkv_bias={bias}", *own)
        assert code == 0, err
        losses = [r["val/loss"] for r in rows(sources / "runs" / name) if "val/loss" in r]
        assert losses[0] == pytest.approx(before["val/loss"], abs=1e-5)
        assert losses[-1] < losses[0] - 0.05
        assert (sources / "runs" / name / "run.html").is_file()
