"""trainer.init_from and experiment=finetune: what a run takes over, by which rules."""

import json
import re

import pytest
import torch
from helpers import TEXT, TINY

import train
from errors import ConfigError
from model import GPT, ModelConfig
from scripts import export_hf
from training.hf import from_hf, to_hf
from training.resume import positions

FINETUNE = ["experiment=finetune", *(s for s in TINY if not s.startswith(("model=", "lens=")))]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A run that has learned 24 of its 32 positions, without biases, as runs/old; the same as a
    Hugging Face directory, hf, and exported, out."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from training.command import compose

        settings = ["data.path=text.txt", "name=old", "data.max_length=24", "model.qkv_bias=false"]
        run = train.Trainer(compose([*TINY, *settings, "optimizer.lr=0.01"]))
        run.train()
        run.close(0)
        to_hf(run.model, folder / "hf")
        patch.setattr("signal.signal", lambda *_: None)
        patch.setattr("sys.argv", ["x", "checkpoint=runs/old", "out=out"])
        export_hf.main()
    return folder


def weights(run):
    return {name: p.detach() for name, p in run.model.named_parameters()}


def assert_same(a, b, without=()):
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in set(a) - set(without))


@pytest.mark.parametrize("source", ["runs/old", "runs/old/checkpoints/best", "hf", "out"])
def test_it_takes_weights_and_nothing_else(trainer, sources, source):
    fresh = trainer(
        f"trainer.init_from={sources / source}", "model.dropout=0.3", "data.max_length=24"
    )
    assert fresh.state.step == 0
    assert fresh.model.blocks[0].dropout.p == 0.3
    assert fresh.model.training
    assert all(p.requires_grad for p in fresh.model.parameters())
    expected = {n: p.detach() for n, p in from_hf(sources / "hf").named_parameters()}
    assert_same(weights(fresh), expected, without=["pos_emb.weight"])  # the biases zeros
    got, want = weights(fresh)["pos_emb.weight"], expected["pos_emb.weight"]
    if source == "hf":  # which does not say that the last eight have learned nothing
        assert torch.equal(got, want)
    else:
        assert torch.equal(got[:24], want[:24])
        assert torch.equal(got[24:], want[:8])
    assert fresh.notes == []


# -------------------------------------------------------------------------------------- positions


def test_positions_by_the_rules():
    """Rows 0 to 9, of which the first six have learned something."""
    table = torch.arange(10.0)[:, None].expand(10, 2)

    def rows(context_length, used=4):
        found, notes = positions(table, 6, context_length, used)
        assert found.shape == (context_length, 2)
        return found[:, 0].tolist(), notes

    assert rows(6) == ([0, 1, 2, 3, 4, 5], [])
    assert rows(10) == ([0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [])  # nothing that the run would read
    assert rows(4) == (
        [0, 1, 2, 3],
        ["model.context_length=4: the weights know 6 positions; the first are taken"],
    )
    note = "the weights know 6 positions; position 6 begins as position 0, and so on"
    note += "; data.max_length=6 stays within them"
    again = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]
    assert rows(13) == (again, [f"model.context_length=13: {note}"])
    assert rows(10, used=7)[1] == [f"model.context_length=10: {note}"]


@pytest.mark.parametrize(
    ("length", "says"), [(16, "the first are taken"), (40, "position 24 begins as position 0")]
)
def test_another_context_length_is_told_by_the_run(trainer, sources, capsys, length, says):
    made = trainer(
        f"trainer.init_from={sources / 'runs/old'}",
        f"model.context_length={length}",
        "data.max_length=16",
        "trainer.max_steps=2",
        "trainer.sample_tokens=0",
    )
    made.train()
    note = f"note: model.context_length={length}: the weights know 24 positions; {says}"
    assert note in capsys.readouterr().out
    assert weights(made)["pos_emb.weight"].shape == (length, 32)


# ---------------------------------------------------------------------------------- what does not


def refusal(trainer, *settings):
    with pytest.raises(ConfigError) as caught:
        trainer(*settings)
    return str(caught.value).splitlines()


def test_each_shape_that_does_not_fit_is_named(trainer, sources):
    source = f"trainer.init_from={sources / 'hf'}"
    lines = refusal(
        trainer, source, "model.num_layers=1", "model.emb_dim=8", "model.qkv_bias=false"
    )
    theirs = f"the weights of {source} have"
    assert lines == [
        f"model.emb_dim=8: {theirs} 32; use model.emb_dim=32",
        f"model.num_layers=1: {theirs} 2; use model.num_layers=2",
        f"model.qkv_bias=false: {theirs} true; use model.qkv_bias=true",
    ]
    (line,) = refusal(trainer, source, "model.vocab_size=300")
    assert line == f"model.vocab_size=300: {theirs} 257; use model.vocab_size=257"


def test_a_preset_that_fits_is_named(trainer, tmp_path):
    config = ModelConfig(50257, 64, 128, 4, 4)  # gpt2-nano's, but for its context
    to_hf(GPT(config), tmp_path / "nano")
    source = f"trainer.init_from={tmp_path / 'nano'}"
    lines = refusal(trainer, source, "data.tokenizer=gpt2", "model.vocab_size=50257")
    assert [line.partition("=")[0] for line in lines] == [
        "model.emb_dim",
        "model.num_heads",
        "model.num_layers",
    ]
    assert all(line.endswith("; use model=gpt2-nano") for line in lines)


def test_another_tokenizer_is_refused(trainer, tmp_path):
    ours = {"tokenizer": "byte", "window": 16}
    to_hf(GPT(ModelConfig(50257, 32, 32, 2, 2)), tmp_path / "padded", ours)
    source = f"trainer.init_from={tmp_path / 'padded'}"
    (line,) = refusal(trainer, source, "data.tokenizer=gpt2", "model.vocab_size=50257")
    cause = f"the weights of {source} were trained with byte; use data.tokenizer=byte"
    assert line == f"data.tokenizer=gpt2: {cause}"


def test_a_name_of_the_hub_is_no_folder(trainer):
    with pytest.raises(ValueError, match=r"of the Hugging Face hub, hub:some/gpt2 fetches it$"):
        trainer("trainer.init_from=some/gpt2")


# --------------------------------------------------------------------------------------- finetune


def test_finetune_wants_weights_to_start_from(in_process, tmp_path):
    code, _, err = in_process(train.main, tmp_path, *FINETUNE, "data.path=text.txt")
    assert code == 2
    assert re.fullmatch(r"trainer\.init_from=: is empty; name a run, [^\n]*\n", err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["runs/old", "out"])
def test_finetune_begins_where_the_weights_are_and_goes_down(in_process, sources, source):
    name = source.replace("/", "-")
    settings = [f"trainer.init_from={source}", "data.path=text.txt", f"name={name}"]
    settings += ["data.max_length=24", "trainer.max_steps=8", "optimizer.lr=1e-3"]
    code, out, err = in_process(train.main, sources, *FINETUNE, "model.qkv_bias=false", *settings)
    if source == "out":  # which has biases, as all of GPT-2's kind
        assert (code, len(err.splitlines())) == (2, 1)
        assert "; use model.qkv_bias=true" in err
        code, out, err = in_process(train.main, sources, *FINETUNE, *settings)
    assert code == 0, err
    assert "note" not in out
    rows = read(sources / "runs" / name)
    before = [row for row in read(sources / "runs" / "old") if "val/loss" in row][-1]
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert losses[0] == pytest.approx(before["val/loss"], abs=1e-5)
    assert losses[8] < losses[0] - 0.05
    assert (sources / "runs" / name / "attention" / "timelapse.html").is_file()


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
