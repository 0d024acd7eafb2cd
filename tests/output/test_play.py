"""Pages with the model of a run (clearhead/output/play.py): which runs have one, what is in
it, and when it is written."""

import base64
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.refusals import SPECIAL_FILES, printed_keys, time_limit
from helpers.runs import train_in

from attention import SCORES, causal_attn_scores
from clearhead.checkpoint.listing import list_checkpoints, step_of
from clearhead.config import compose
from clearhead.models.pretrained import load_pretrained
from clearhead.output.play import packed_model, why_not
from clearhead.tokens.tokenizer_json import read_tokenizer
from scripts.view import main
from train import fit

LENS = ("lens=default", "lens.every=2")
MANY = ("trainer.max_steps=11", "trainer.save_every=1", "trainer.keep=11")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A finished run with the checkpoints of steps 1 to 11 and a trained tokenizer."""
    settings = (*LENS, *MANY, "data.tokenizer=bpe", "model.vocab_size=280", "data.vocab_size=280")
    return train_in(tmp_path_factory.mktemp("saved"), "name=saved", *settings)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run with attention snapshots."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / "first", symlinks=True))


def unpacked(text):
    return zlib.decompress(base64.b64decode(text))


def steps(model):
    return [checkpoint["step"] for checkpoint in model["checkpoints"]]


def weights_of(model, number):
    """Returns the parameters of a packed checkpoint by name."""
    content, at, found = unpacked(model["checkpoints"][number]["weights"]), 0, {}
    for name, shape in model["tensors"]:
        rows = int(np.prod(shape[:-1]))
        scales = np.frombuffer(content, "<f4", rows, at)[:, None]
        values = np.frombuffer(content, "<i2", int(np.prod(shape)), at + 4 * rows)
        found[name] = (values.reshape(rows, -1) * scales).reshape(shape)
        at += 4 * rows + 2 * values.size
    assert at == len(content)
    return found


def model_in(path):
    (data,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(data).get("model")


def test_parameters_are_packed_nearly_exactly(saved):
    model = packed_model(saved)
    for number, step in ((0, 1), (-1, 11)):
        assert steps(model)[number] == step
        found = load_pretrained(saved / "checkpoints" / f"step_{step:08d}")
        packed, wanted = weights_of(model, number), found.model.state_dict()
        assert list(packed) == list(wanted)
        for name, tensor in wanted.items():
            largest = tensor.abs().amax(-1, keepdim=True)
            error = torch.from_numpy(packed[name]) - tensor
            assert (error.abs() <= largest / 65_000).all(), name
    config = found.model.config
    assert model["config"] == {key: getattr(config, key) for key in model["config"]}


def test_positions_without_training_are_left_out(tmp_path):
    folder = train_in(tmp_path, "name=short", *LENS, "data.max_length=20")
    model = packed_model(folder)
    assert model["config"]["context_length"] == 20
    assert dict(model["tensors"])["pos_emb.weight"] == (20, 32)
    trained = load_pretrained(folder).model.pos_emb.weight.detach().numpy()[:20]
    assert np.abs(weights_of(model, -1)["pos_emb.weight"] - trained).max() < 1e-4


def test_the_tokenizer_of_the_run_is_packed(saved):
    packed, tokenizer = packed_model(saved)["tokenizer"], read_tokenizer(saved)
    assert packed["pattern"] == "qwen35"
    assert packed["special"] == [tokenizer.eot_token]
    content, words = unpacked(packed["words"]), []
    while content:
        end = 2 + int.from_bytes(content[:2], "little")
        words.append(content[2:end])
        content = content[end:]
    assert words == [tokenizer.decode_single_token_bytes(n) for n in range(tokenizer.n_vocab)]


def test_checkpoints_are_evenly_spaced_and_fit(saved, monkeypatch):
    assert len(list_checkpoints(saved)) == 11
    model = packed_model(saved)
    assert steps(model) == [1, 2, 4, 5, 7, 8, 10, 11]
    size = len(model["checkpoints"][-1]["weights"])
    for most, kept in ((4.9, [1, 4, 8, 11]), (2.9, [1, 11]), (1.9, [11]), (0.5, [11])):
        monkeypatch.setattr("clearhead.output.play.MAX_WEIGHTS", int(most * size))
        assert steps(packed_model(saved)) == kept


def test_the_induction_experiment_keeps_the_steps_at_which_its_heads_form():
    trainer = compose(["experiment=induction"]).trainer
    assert trainer.save_every <= 300
    assert trainer.keep * trainer.save_every >= trainer.max_steps
    assert trainer.eval_every % trainer.save_every == 0  # the best ones are not additional


def test_a_run_with_one_checkpoint(run):
    for folder in list_checkpoints(run)[1:]:
        shutil.rmtree(folder)
    (last,) = list_checkpoints(run)
    assert steps(packed_model(run)) == [step_of(last)]


def test_runs_without_a_page_say_why(run, trained, tmp_path, monkeypatch):
    assert why_not(run) is None
    for folder in (tmp_path, tmp_path / "missing"):
        assert why_not(folder)
    assert "snapshot" in why_not(trained)
    with monkeypatch.context() as patched:
        patched.setitem(SCORES, "sdpa", causal_attn_scores)
        assert "sdpa" in why_not(run)
    monkeypatch.setattr("clearhead.output.play.MAX_PARAMETERS", 1000)
    count = load_pretrained(run).model.num_parameters()
    assert f"{count:,}" in why_not(run)
    shutil.rmtree(run / "checkpoints")
    assert why_not(run)


def test_a_run_ends_with_its_page(make_run, capsys):
    run = make_run("name=typed", *LENS)
    fit(run)
    page = run.directory / "play.html"
    assert steps(model_in(page)) == [2, 4]
    assert model_in(run.directory / "run.html") is None
    assert str(page) in capsys.readouterr().out


def test_only_rank_0_writes_the_page(make_run):
    run = make_run("name=ranks", *LENS)
    fit(run)
    (run.directory / "play.html").unlink()
    run.log.console.is_rank_0 = False
    run.log.write_play_page()
    assert not (run.directory / "play.html").exists()


def test_no_page_without_the_lens_and_of_large_models(make_run, monkeypatch, capsys):
    runs = [make_run("name=off")]
    fit(runs[0])
    monkeypatch.setattr("clearhead.output.play.MAX_PARAMETERS", 1000)
    runs.append(make_run("name=large", *LENS))
    fit(runs[1])
    assert not [run for run in runs if (run.directory / "play.html").exists()]
    out, err = capsys.readouterr()
    assert "play.html" not in out + err


def test_an_error_of_the_page_ends_no_run(make_run, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clearhead.output.run_log.write_play_page", full)
    run = make_run("name=full", "debug=false", *LENS)
    fit(run)
    assert (run.directory / "summary.json").is_file()
    assert "play.html" in capsys.readouterr().err
    assert not (run.directory / "play.html").exists()


def test_the_page_of_an_older_run(run, in_process, tmp_path, monkeypatch):
    (run / "play.html").unlink()
    code, out, err = in_process(main, tmp_path, "write=runs/first")
    assert (code, err) == (0, "")
    assert "runs/first/play.html" in out
    assert steps(model_in(run / "play.html")) == steps(packed_model(run))
    last = sorted((run / "attention").glob("step_*.npz"))[-1]
    for make in SPECIAL_FILES.values():
        make(last)
        with time_limit():  # the snapshot before it has the same prompts
            code, _, err = in_process(main, tmp_path, "write=runs/first")
        assert (code, err.count(last.name), err.count("\n")) == (0, 1, 1)
    last.unlink()
    weights = list_checkpoints(run)[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = in_process(main, tmp_path, "write=runs/first")
    assert (code, printed_keys(err)) == (3, ["checkpoint"])
    monkeypatch.setattr("clearhead.output.play.MAX_PARAMETERS", 1000)
    code, out, err = in_process(main, tmp_path, "write=runs/first")
    assert (code, out.count("play.html"), err) == (0, 1, "")
