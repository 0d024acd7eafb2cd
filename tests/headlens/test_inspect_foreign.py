"""scripts/inspect_attention.py with models of transformers and series of checkpoints."""

import json
import sys

import numpy as np
import pytest
import torch
from helpers.foreign import byte_level_tokenizer, foreign_model
from helpers.pages import read, unpacked
from helpers.refusals import printed_keys
from helpers.runs import train_in

from headlens import read_snapshot
from scripts.inspect_attention import main

TOKENIZER = byte_level_tokenizer()
QUICK = ("text=The bell rang twice.", "repeat_length=4")


def trained_model(family, step):
    """Returns a model whose weights depend on the step."""
    model = foreign_model(family, vocab_size=320)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step / 1000)
    return model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Returns a folder with the checkpoints of a Llama in out/, as of Trainer, and a run."""
    folder = tmp_path_factory.mktemp("foreign")
    for step in (1000, 20, 300):
        path = folder / "out" / f"checkpoint-{step}"
        trained_model("llama", step).save_pretrained(path)
        TOKENIZER.save_pretrained(path)
        losses = [{"step": at, "loss": 9.0 / at, "epoch": 1.0} for at in (10, step)]
        state = {"global_step": step, "log_history": [*losses, {"step": step, "eval_loss": 0.5}]}
        (path / "trainer_state.json").write_text(json.dumps(state))
    train_in(folder, "name=one", "trainer.save_every=2", "trainer.keep=9")
    return folder


def assert_shows(frame, text, model):
    """Checks the weights of the first prompt, which is this text, in a frame."""
    ids = TOKENIZER(text).input_ids
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    raw = np.frombuffer(unpacked(frame["weights"]), np.uint8)
    codes = raw[: 3 * 4 * len(ids) * (len(ids) + 1) // 2].reshape(3, 4, -1)
    rows, columns = np.tril_indices(len(ids))
    expected = np.sqrt(torch.cat(weights).numpy()[..., rows, columns])
    assert np.abs(codes / 255 - expected).max() <= 0.6 / 255


def test_a_model_of_transformers(in_process, home):
    folder = home / "out" / "checkpoint-20"
    settings = (f"checkpoint={folder}", *QUICK, "data.path=text.txt")
    code, told, err = in_process(main, home, *settings, "out=one.html")
    assert (code, err) == (0, "")
    assert "checkpoint-20: clearest heads" in told  # its step is not known
    (run,) = read(home / "one.html")
    text, repeated = run["prompts"]
    assert "".join(text["tokens"]) == text["text"] == "The bell rang twice."
    assert len(repeated["tokens"]) == 9
    (frame,) = run["frames"]
    assert_shows(frame, text["text"], trained_model("llama", 20))
    of_prompts = json.loads(unpacked(frame["details"]))["predictions"]["of_prompts"]
    assert [len(prompt["tokens"]) for prompt in of_prompts] == [len(text["tokens"]), 9]


@pytest.mark.parametrize("ablation", ["exact", "estimate"])
def test_loss_without_each_head(in_process, home, ablation):
    given = ("checkpoint=out/checkpoint-20", *QUICK, "data.path=text.txt", f"ablation={ablation}")
    code, told, _ = in_process(main, home, *given, "out=removed.html")
    assert code == 0
    (run,) = read(home / "removed.html")
    assert len(run["removed"]["findings"]) == 12
    assert ("estimate" in told) == (ablation == "estimate")
    assert ("stimated" in str(run["removed"])) == (ablation == "estimate")
    in_process(main, home, *given, "out=removed.npz")
    found = read_snapshot(home / "removed.npz").ablation
    assert found["method"] == ablation
    assert max(abs(row["loss_change"]) for row in found["heads"]) > 0.001


def test_a_file_with_the_data(in_process, home):
    given = ("checkpoint=out/checkpoint-20", *QUICK, "out=head.npz")
    code, _, err = in_process(main, home, *given)
    assert (code, err) == (0, "")
    assert read_snapshot(home / "head.npz").row.names.shape == (3, 4)


@pytest.mark.parametrize("model", ["out/checkpoint-20", "runs/one"])
def test_a_text_in_another_encoding(in_process, home, model):
    (home / "de.txt").write_bytes(("Größe und Straße, überall. " * 99).encode("cp1252"))
    given = (f"checkpoint={model}", *QUICK, "data.path=de.txt", "out=de.html")
    code, _, err = in_process(main, home, *given)
    assert (code, printed_keys(err)) == (3, ["data.path"])
    assert in_process(main, home, *given, "data.encoding=cp1252")[0] == 0


def test_time_lapse_of_the_checkpoints_of_trainer(in_process, home):
    pattern = "checkpoints=out/checkpoint-*"
    code, told, err = in_process(main, home, pattern, *QUICK, "out=lapse.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "lapse.html")
    assert run["name"] == "out"
    assert [frame["step"] for frame in run["frames"]] == [20, 300, 1000]
    assert json.loads(unpacked(run["history"]))["steps"] == [20, 300, 1000]
    assert run["curves"]["training loss"] == [[10, 0.9], [1000, 0.009]]
    assert run["curves"]["validation loss"] == [[1000, 0.5]]
    for frame in run["frames"]:
        assert_shows(frame, "The bell rang twice.", trained_model("llama", frame["step"]))
    assert "1000" in told.splitlines()[0]


def test_time_lapse_of_a_run_without_transformers(in_process, home, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    pattern = "checkpoints=runs/one/checkpoints/step_*"
    code, _, err = in_process(main, home, pattern, "out=ours.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "ours.html")
    assert run["name"] == "one"
    assert [frame["step"] for frame in run["frames"]] == [2, 4]
    assert run["curves"]


def test_bad_values(in_process, home):
    trained_model("qwen2", 0).save_pretrained(home / "mixed" / "checkpoint-2")
    TOKENIZER.save_pretrained(home / "mixed" / "checkpoint-2")
    (home / "mixed" / "checkpoint-1").symlink_to(home / "out" / "checkpoint-20")
    changed = foreign_model("llama", vocab_size=320, num_hidden_layers=2)
    changed.save_pretrained(home / "other" / "checkpoint-21")
    TOKENIZER.save_pretrained(home / "other" / "checkpoint-21")
    (home / "other" / "checkpoint-20").symlink_to(home / "out" / "checkpoint-20")
    short = home / "short.txt"
    short.write_text("A")
    one, many = "checkpoint=out/checkpoint-20", "checkpoints=out/checkpoint-*"
    before = sorted(home.iterdir())
    for code, keys, arguments in (
        (2, ["checkpoint"], []),
        (2, ["checkpoint"], [one, many]),
        (2, ["ablation", "out"], [many, "ablation=exact", "out=a.npz"]),
        (2, ["data.path"], [one, "ablation=exact"]),
        (2, ["data.path"], [one, f"data.path={short}"]),
        (3, ["data.path"], [one, "data.path=none.txt"]),
        (3, ["checkpoints"], ["checkpoints=none/checkpoint-*"]),
        (3, ["checkpoints"], ["checkpoints=other/checkpoint-*", *QUICK]),
        (3, ["tokenizer"], [one, "tokenizer=none"]),
    ):
        found, _, err = in_process(main, home, *arguments)
        assert (found, sorted(printed_keys(err))) == (code, keys), arguments
        assert sorted(home.iterdir()) == before


def test_a_model_that_the_lens_cannot_read(in_process, home):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=32, vocab_size=320)
    AutoModelForCausalLM.from_config(config).save_pretrained(home / "mamba")
    TOKENIZER.save_pretrained(home / "mamba")
    code, _, err = in_process(main, home, "checkpoint=mamba", *QUICK, "out=mamba.html")
    assert (code, printed_keys(err)) == (3, ["checkpoint"])
    assert not (home / "mamba.html").exists()
