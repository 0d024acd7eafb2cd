"""scripts/inspect_attention.py: one page for one model, or for two."""

import re

import numpy as np
import pytest
import torch
from helpers.models import tiny_model
from helpers.pages import unpacked
from helpers.refusals import printed_keys
from helpers.runs import train_in

from data import get_tokenizer
from interop.huggingface import to_hf
from interop.pretrained import load_pretrained
from lens.page import read
from lens.probe import from_codes, triangle_to_square
from scripts.inspect_attention import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Returns a folder with a trained run, runs/one, and a Hugging Face directory, gpt2."""
    folder = tmp_path_factory.mktemp("inspect")
    train_in(folder, "name=one")
    to_hf(tiny_model(vocab_size=50257, context_length=48, num_layers=3), folder / "gpt2")
    return folder


def test_weights_of_a_run_are_shown(in_process, home, tmp_path):
    out = tmp_path / "a\x1b[31m.html"
    code, told, err = in_process(main, home, "checkpoint=runs/one", "text=The fox.", f"out={out}")
    assert (code, err) == (0, "")
    kinds = [line for line in told.splitlines() if re.search(r" L\d H\d \d\.\d\d", line)]
    assert len(kinds) == 6  # previous token, induction, duplicate, first token, self, separator
    assert "\x1b" not in told
    (run,) = read(out)
    assert (run["name"], run["layers"], run["heads"]) == ("one", 2, 2)
    assert [len(p["tokens"]) for p in run["prompts"]] == [8, 31]  # BOS and 15 tokens, twice
    assert run["prompts"][0]["text"] == "".join(run["prompts"][0]["tokens"]) == "The fox."
    (frame,) = run["frames"]
    assert frame["step"] == 4
    model = load_pretrained(home / "runs" / "one").model
    ids = torch.tensor([get_tokenizer("byte").encode("The fox.")])
    raw = np.frombuffer(unpacked(frame["weights"]), np.uint8)[: 2 * 2 * 8 * 9 // 2]
    shown = triangle_to_square(from_codes(raw.reshape(2, 2, -1)))
    assert np.abs(shown - torch.cat(model.attn_weights(ids)).numpy()).max() <= 1 / 255


def test_hugging_face_directory_and_two_models(in_process, home):
    code, _, err = in_process(main, home, "checkpoint=gpt2", "out=hf.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "hf.html")
    assert (run["name"], run["layers"], run["heads"]) == ("gpt2", 3, 4)
    assert len(run["prompts"]) == 4  # three sentences and the repeated tokens
    first, *repeated = run["prompts"][-1]["tokens"]
    assert (first, len(repeated)) == ("<|endoftext|>", 46)  # of 48 positions

    in_process(main, home, "checkpoint=gpt2", "compare=runs/one", "text=The fox", "out=two.html")
    first, second = read(home / "two.html")
    assert (first["name"], second["name"]) == ("gpt2", "one")
    assert first["prompts"][0]["tokens"] == ["The", " fox"]
    assert second["prompts"][0]["tokens"] == list("The fox")


def test_bad_values(in_process, home):
    to_hf(tiny_model(vocab_size=61), home / "other")  # its vocabulary size matches no tokenizer
    before = sorted(home.iterdir())
    for code, keys, arguments in (
        (2, ["max_tokens", "out"], ["max_tokens=1", "out=none/page.html"]),
        (3, ["checkpoint"], ["checkpoint=runs/none"]),
        (3, ["compare"], ["compare=runs/none"]),
        (3, ["checkpoint"], ["checkpoint=other", "text=The fox"]),
    ):
        chosen = [] if arguments[0].startswith("checkpoint") else ["checkpoint=runs/one"]
        found, _, err = in_process(main, home, *chosen, *arguments)
        assert (found, sorted(printed_keys(err))) == (code, keys), arguments
        assert sorted(home.iterdir()) == before
