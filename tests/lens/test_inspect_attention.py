"""scripts/inspect_attention.py: one page for one model, or for two."""

import functools
import re

import numpy as np
import pytest
import torch
from helpers.refusals import printed_keys
from helpers.runs import train_in

from data import get_tokenizer
from lens.page import read, unpacked
from lens.probe import from_codes, triangle_to_square
from model import GPT, ModelConfig
from scripts.inspect_attention import main
from training.hf import load_any, to_hf


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a trained run of ours, runs/one, and a Hugging Face directory, gpt2."""
    folder = tmp_path_factory.mktemp("inspect")
    train_in(folder, "name=one")
    torch.manual_seed(1)
    to_hf(GPT(ModelConfig(50257, 48, 8, 2, 3, dropout=0.0)), folder / "gpt2")
    return folder


@pytest.fixture
def inspect(in_process, home):
    """inspect(*arguments) -> (exit code, out, err), run in `home`, in this process."""
    return functools.partial(in_process, main, home)


def test_weights_of_a_run_are_shown(inspect, home, tmp_path):
    out = tmp_path / "made" / "here.html"
    code, told, err = inspect("checkpoint=runs/one", "text=The fox.", f"out={out}")
    assert (code, err) == (0, "")
    assert re.search(r"\(0\.\d\d\) +L\d H\d 0\.\d\d   L\d H\d", told)  # the strongest heads
    assert f" {out} " in told
    (run,) = read(out)
    assert (run["name"], run["layers"], run["heads"]) == ("one", 2, 2)
    assert [len(p["tokens"]) for p in run["prompts"]] == [8, 31]  # BOS and 15 tokens, twice
    assert run["prompts"][0]["text"] == "".join(run["prompts"][0]["tokens"]) == "The fox."
    (frame,) = run["frames"]
    assert frame["step"] == 4
    model, _ = load_any(home / "runs" / "one")
    ids = torch.tensor([get_tokenizer("byte").encode("The fox.")])
    raw = np.frombuffer(unpacked(frame["weights"]), np.uint8)[: 2 * 2 * 8 * 9 // 2]
    shown = triangle_to_square(from_codes(raw.reshape(2, 2, -1)))
    assert np.abs(shown - torch.cat(model.attn_weights(ids)).numpy()).max() <= 1 / 255


def test_hugging_face_directory_and_two_models(inspect, home):
    code, _, err = inspect("checkpoint=gpt2", "out=hf.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "hf.html")
    assert (run["name"], run["layers"], run["heads"]) == ("gpt2", 3, 2)
    assert len(run["prompts"]) == 4  # three sentences and the repeated tokens
    assert len(run["prompts"][-1]["tokens"]) == 47  # BOS, twice 23; of 48 positions
    assert run["prompts"][-1]["tokens"][0] == "<|endoftext|>"

    code, out, _ = inspect("checkpoint=gpt2", "compare=runs/one", "text=The fox", "out=two.html")
    assert code == 0
    assert out.index("gpt2:") < out.index("runs/one:")
    first, second = read(home / "two.html")
    assert (first["name"], second["name"]) == ("gpt2", "one")
    assert first["prompts"][0]["tokens"] == ["The", " fox"]
    assert second["prompts"][0]["tokens"] == list("The fox")


def test_odd_texts_and_names_are_escaped(inspect, home):
    text = "</script><img src=x onerror=alert(1)> 漢字 🙂 \u202e \u2028 é\x01"
    strange = home / "a\x1b[31m"
    strange.symlink_to(home / "gpt2")
    code, out, err = inspect(f"checkpoint={strange}", f"text={text}", f"out={strange}.html")
    assert code == 0
    assert "\x1b" not in out + err
    assert "<img" not in (home / "a\x1b[31m.html").read_text(encoding="utf-8")
    (run,) = read(home / "a\x1b[31m.html")
    assert run["prompts"][0]["text"] == text


def test_bad_values(inspect, home):
    # A Hugging Face directory of another tokenizer than GPT-2's.
    to_hf(GPT(ModelConfig(61, 32, 8, 2, 1, dropout=0.0)), home / "other")
    before = sorted(home.iterdir())
    for code, keys, arguments in (
        (2, ["text"], ["text=   "]),
        (2, ["max_tokens"], ["max_tokens=1"]),
        (2, ["out"], ["out=page.png"]),
        (2, ["chekpoint"], ["chekpoint=x"]),
        (2, ["max_tokens", "out", "text"], ["max_tokens=1", "out=x", "text= "]),
        (3, ["checkpoint"], ["checkpoint=runs/none"]),
        (3, ["compare"], ["compare=runs/none"]),
        (3, ["checkpoint"], ["checkpoint=other", "text=The fox"]),
    ):
        chosen = [] if arguments[0].startswith("checkpoint") else ["checkpoint=runs/one"]
        found, _, err = inspect(*chosen, *arguments)
        assert (found, sorted(printed_keys(err))) == (code, keys), arguments
        assert sorted(home.iterdir()) == before
