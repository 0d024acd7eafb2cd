"""scripts/inspect_attention.py: one page for one model, or for two."""

import csv
import json

import numpy as np
import pytest
import torch
from helpers.models import tiny_model
from helpers.pages import read, unpacked
from helpers.refusals import printed_keys
from helpers.runs import train_in

from clearhead.models.huggingface import to_hf
from clearhead.models.pretrained import load_pretrained
from data import get_tokenizer
from scripts.inspect_attention import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Returns a folder with a trained run, runs/one, and a Hugging Face directory, gpt2."""
    folder = tmp_path_factory.mktemp("inspect")
    train_in(folder, "name=one")
    prompts = "lens.prompts=[the fox jumps,Line 7]"
    train_in(folder, "name=seen", "lens=default", prompts, "lens.repeat_length=5")
    to_hf(tiny_model(vocab_size=50257, context_length=48, num_layers=3), folder / "gpt2")
    return folder


def test_weights_of_a_run_are_shown(in_process, home, tmp_path):
    out = tmp_path / "a.html"
    settings = ["checkpoint=runs/one", "text=The fox.", f"out={out}"]
    code, told, err = in_process(main, home, *settings)
    assert (code, err) == (0, "")
    (run,) = read(out)
    assert (run["name"], run["layers"], run["heads"]) == ("one", 2, 2)
    assert [len(p["tokens"]) for p in run["prompts"]] == [8, 31]  # BOS and 15 tokens, twice
    assert run["prompts"][0]["text"] == "".join(run["prompts"][0]["tokens"]) == "The fox."
    assert run["opening"]["prompt"] == 0
    assert "of 4 heads" in told
    (frame,) = run["frames"]
    assert frame["step"] == 4
    model = load_pretrained(home / "runs" / "one").model
    ids = torch.tensor([get_tokenizer("byte").encode("The fox.")])
    codes = np.frombuffer(unpacked(frame["weights"]), np.uint8)[: 2 * 2 * 8 * 9 // 2]
    weights = torch.cat(model.attn_weights(ids)).numpy()[..., *np.tril_indices(8)]
    assert np.abs(codes.reshape(2, 2, -1) / 255 - np.sqrt(weights)).max() <= 0.6 / 255
    predictions = json.loads(unpacked(frame["details"]))["predictions"]["of_prompts"]
    assert [len(prompt["losses"]) for prompt in predictions] == [7, 30]


def test_hugging_face_directory(in_process, home):
    code, _, err = in_process(main, home, "checkpoint=gpt2", "out=hf.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "hf.html")
    assert (run["name"], run["layers"], run["heads"]) == ("gpt2", 3, 4)
    assert len(run["prompts"]) == 4  # three sentences and the repeated tokens
    assert "opening_prompt" not in run
    first, *repeated = run["prompts"][-1]["tokens"]
    assert (first, len(repeated)) == ("<|endoftext|>", 46)  # of 48 positions


def rows_by_head(file):
    with open(file, newline="") as rows:
        return {(int(row["layer"]), int(row["head"])): row for row in csv.DictReader(rows)}


def test_prompts_and_names_are_those_of_the_run(in_process, home):
    """Also of one of its checkpoints; without the text of the run, of other random tokens."""
    attention = home / "runs" / "seen" / "attention"
    (of_run,) = read(attention.parent / "run.html")
    texts = [prompt["tokens"] for prompt in of_run["prompts"]]
    assert [len(tokens) for tokens in texts] == [13, 6, 11]
    expected = rows_by_head(attention / "heads.csv")
    for checkpoint in ("runs/seen", "runs/seen/checkpoints/last"):
        in_process(main, home, f"checkpoint={checkpoint}", "out=seen.html")
        (run,) = read(home / "seen.html")
        assert [prompt["tokens"] for prompt in run["prompts"]] == texts
        history = json.loads(unpacked(run["history"]))
        names = json.loads(unpacked(run["heads_at"]))[-1]["names"]
        names = [run["names"][index]["key"] for index in names]
        assert names == [expected[head]["name"] for head in np.ndindex(2, 2)]
        found = history["values"]["previous_token"][-1]
        values = [float(expected[head]["previous_token"]) for head in np.ndindex(2, 2)]
        assert found == pytest.approx(values, abs=1e-3)
    (home / "text.txt").rename(home / "moved.txt")
    try:
        code, _, err = in_process(main, home, "checkpoint=runs/seen", "out=seen.html")
    finally:
        (home / "moved.txt").rename(home / "text.txt")
    assert (code, err) == (0, "")
    shown = [prompt["tokens"] for prompt in read(home / "seen.html")[0]["prompts"]]
    assert (shown[:2], len(shown[2])) == (texts[:2], 11)
    changes = ("max_tokens=9", "repeat_length=3")
    in_process(main, home, "checkpoint=runs/seen", "out=seen.html", *changes)
    shown = [prompt["tokens"] for prompt in read(home / "seen.html")[0]["prompts"]]
    assert [len(tokens) for tokens in shown] == [9, 6, 7]


def test_bad_values(in_process, home):
    to_hf(tiny_model(vocab_size=61), home / "other")  # its vocabulary size matches no tokenizer
    train_in(home, "name=none-left", "lens=often", "lens.prompts=[]")
    before = sorted(home.iterdir())
    for code, keys, arguments in (
        (2, ["max_tokens", "out"], ["max_tokens=1", "out=none/page.html"]),
        (2, ["out"], ["out=text.txt"]),
        (2, ["text"], ["checkpoint=runs/none-left", "repeat_length=0"]),
        (3, ["data.path"], ["checkpoint=gpt2", "data.path=none.txt"]),
        (3, ["checkpoint"], ["checkpoint=runs/none"]),
        (3, ["tokenizer"], ["checkpoint=other", "text=The fox"]),
    ):
        chosen = [] if arguments[0].startswith("checkpoint") else ["checkpoint=runs/one"]
        found, _, err = in_process(main, home, *chosen, *arguments)
        assert (found, sorted(printed_keys(err))) == (code, keys), arguments
        assert sorted(home.iterdir()) == before


def test_loss_without_each_head(in_process, home):
    exact = ("checkpoint=runs/one", "ablation=exact", "out=a.html")
    code, told, _ = in_process(main, home, *exact)  # a slow machine prints progress
    assert code == 0
    (run,) = read(home / "a.html")
    assert len(run["removed"]["findings"]) == run["layers"] * run["heads"]
    assert "\n  Without " in told
    without_run = ("checkpoint=gpt2", "ablation=exact", "out=b.html")
    code, _, err = in_process(main, home, *without_run)  # of no run, so the text is not known
    assert (code, printed_keys(err)) == (2, ["data.path"])
    assert in_process(main, home, *without_run, "data.path=text.txt")[0] == 0
    (run,) = read(home / "b.html")
    assert len(run["removed"]["findings"]) == 12
    text = " ".join((home / "text.txt").read_text().split())
    prompts = [
        " ".join(prompt["text"].split()) for prompt in run["prompts"] if not prompt["period"]
    ]
    assert prompts
    assert all(prompt in text for prompt in prompts)  # passages of the text
