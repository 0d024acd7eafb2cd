"""scripts/inspect_attention.py as a user meets it: one page for one model, or for two."""

import functools
import json
import re

import numpy as np
import pytest
import torch
from helpers import TEXT, TINY

from data import get_tokenizer
from errors import ConfigError
from lens.page import read, unpacked
from lens.probe import from_codes, triangle_to_square
from model import GPT, ModelConfig
from scripts.inspect_attention import InspectConfig, main
from training.command import parse
from training.hf import load_any, to_hf

SCRIPT = "scripts.inspect_attention"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a trained run of ours, runs/one, and a Hugging Face directory, gpt2."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        from train import Trainer
        from training.command import compose

        run = Trainer(compose([*TINY, f"data.path={folder}/text.txt", "name=one"]))
        run.train()
        run.console.close()
        run.tracker.finish()
    torch.manual_seed(1)
    to_hf(GPT(ModelConfig(50257, 48, 8, 2, 3, dropout=0.0)), folder / "gpt2")
    return folder


@pytest.fixture
def inspect(in_process, home):
    """inspect(*arguments) -> (exit code, out, err), run in `home`, in this process."""
    return functools.partial(in_process, main, home)


def test_a_run_of_ours_as_a_command(command, home, tmp_path):
    out = tmp_path / "made" / "here.html"
    done = command(SCRIPT, f"checkpoint={home}/runs/one", "text=The fox.", f"out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"previous token \(0\.\d\d\) +L\d H\d 0\.\d\d   L\d H\d", done.stdout)
    assert f"open {out} in a browser" in done.stdout
    (run,) = read(out)
    assert run["name"] == "one"
    assert (run["layers"], run["heads"]) == (2, 2)
    assert [p["text"] for p in run["prompts"]] == ["The fox.", "15 random tokens, written twice"]
    (frame,) = run["frames"]
    assert frame["step"] == 4
    assert json.loads(unpacked(run["history"]))["steps"] == [4]


def test_names_reach_the_terminal_as_text(inspect, home):
    strange = home / "a\x1b[31m"
    strange.symlink_to(home / "runs" / "one")
    code, out, err = inspect(f"checkpoint={strange}", f"out={strange}.html")
    assert code == 0
    assert "\x1b" not in out + err


def test_the_page_shows_the_weights_of_the_model(inspect, home):
    assert inspect("checkpoint=runs/one", "text=The quick fox", "out=a.html", "repeated=0")[0] == 0
    (run,) = read(home / "a.html")
    model, _ = load_any(home / "runs" / "one")
    ids = torch.tensor([get_tokenizer("byte").encode("The quick fox")])
    raw = np.frombuffer(unpacked(run["frames"][0]["weights"]), np.uint8)
    shown = triangle_to_square(from_codes(raw.reshape(2, 2, -1)))
    assert np.abs(shown - torch.cat(model.attn_weights(ids)).numpy()).max() <= 1 / 255
    assert "".join(run["prompts"][0]["tokens"]) == "The quick fox"


def test_a_hugging_face_directory_on_the_three_sentences(inspect, home):
    code, out, err = inspect("checkpoint=gpt2", "out=hf.html")
    assert (code, err) == (0, "")
    (run,) = read(home / "hf.html")
    assert run["name"] == "gpt2"
    assert (run["layers"], run["heads"]) == (3, 2)
    assert [len(p["tokens"]) for p in run["prompts"]][-1] == 47  # BOS, twice 23; of 48
    assert len(run["prompts"]) == 4
    assert run["prompts"][-1]["tokens"][0] == "<|endoftext|>"
    assert "induction" in out


def test_two_models_side_by_side(inspect, home):
    code, out, _ = inspect("checkpoint=gpt2", "compare=runs/one", "text=The fox", "out=two.html")
    assert code == 0
    assert out.index("gpt2:") < out.index("runs/one:")
    first, second = read(home / "two.html")
    assert (first["name"], second["name"]) == ("gpt2", "one")
    assert first["prompts"][0]["tokens"] == ["The", " fox"]
    assert second["prompts"][0]["tokens"] == list("The fox")
    assert "attention of gpt2 and one" in (home / "two.html").read_text(encoding="utf-8")


def test_odd_text_is_shown_as_it_is(inspect, home):
    text = "</script><img src=x onerror=alert(1)> 漢字 🙂 \u202e \u2028 é\x01"
    assert inspect("checkpoint=gpt2", f"text={text}", "out=odd.html")[0] == 0
    page = (home / "odd.html").read_text(encoding="utf-8")
    assert "<img" not in page
    (run,) = read(home / "odd.html")
    assert run["prompts"][0]["text"] == text


def test_bytes_that_are_no_text_are_refused_in_a_line(command, home, tmp_path):
    done = command(SCRIPT, f"checkpoint={home}/gpt2", "text=a \udce2 b", "out=x.html")
    assert done.returncode == 2
    assert done.stderr == "text=a \\udce2 b: must be text in UTF-8; see --help\n"
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "cropped"), [(5, 5, True), (64, 32, True), (1024, 32, True)]
)
def test_a_text_that_is_too_long_is_cropped_and_marked(inspect, home, max_tokens, tokens, cropped):
    """To what is asked for and to what the model was trained on."""
    code, *_ = inspect(
        "checkpoint=runs/one", "text=" + "abcdefgh " * 9, f"max_tokens={max_tokens}", "out=c.html"
    )
    assert code == 0
    (run,) = read(home / "c.html")
    prompt = run["prompts"][0]
    assert len(prompt["tokens"]) == tokens
    assert prompt["cropped"] is cropped


REFUSED = [
    ("text=   ", "text='   ': an empty prompt"),
    ("max_tokens=1", "max_tokens=1: the lens looks at 2 to 1024 tokens"),
    ("max_tokens=9999", "max_tokens=9999: the lens looks at 2 to 1024 tokens"),
    ("max_tokens=x", "max_tokens=x: must be a whole number"),
    ("out=page.png", "out=page.png: is to be a page"),
    ("device=tpu", "device=tpu: no such device"),
    ("repeated=maybe", "repeated=maybe: must be a whole number"),
    ("repeated=1", "repeated=1: is from 2 to 127, or 0"),
    ("chekpoint=x", "chekpoint=x: no such setting; did you mean checkpoint?"),
    ("nonsense", "nonsense: is not of the form key=value"),
]


@pytest.mark.parametrize(("argument", "begins"), REFUSED, ids=[r[0] for r in REFUSED])
def test_bad_values_are_refused_in_one_line(inspect, home, argument, begins):
    before = sorted(home.iterdir())
    code, out, err = inspect("checkpoint=runs/one", argument)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(begins)
    assert sorted(home.iterdir()) == before


def test_every_problem_is_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(InspectConfig, ["checkpoint=x", "max_tokens=1", "out=x", "text= "])
    keys = [line.split("=")[0].split(":")[0] for line in str(caught.value).splitlines()]
    assert sorted(keys) == ["max_tokens", "out", "text"]


@pytest.mark.parametrize("key", ["checkpoint", "compare"])
def test_a_missing_checkpoint_is_named_and_no_page_is_written(inspect, home, key):
    arguments = {"checkpoint": "runs/one"} | {key: "runs/none"}
    code, _, err = inspect(*(f"{k}={v}" for k, v in arguments.items()), "out=none.html")
    assert code == 3
    (line,) = err.splitlines()
    assert line.startswith(f"{key}=runs/none: ")
    assert not (home / "none.html").exists()


def test_a_vocabulary_that_the_tokenizer_does_not_fit_is_named(inspect, home):
    """A Hugging Face directory with another tokenizer than GPT-2's: an answer, not a crash."""
    to_hf(GPT(ModelConfig(61, 32, 8, 2, 1, dropout=0.0)), home / "other")
    code, _, err = inspect("checkpoint=other", "text=The fox", "out=none.html")
    assert code in (2, 3)
    (line,) = err.splitlines()
    assert line.startswith("checkpoint=other: ")


def test_help(command):
    done = command(SCRIPT, "--help")
    assert done.returncode == 0
    for name in ("checkpoint", "text", "compare", "max_tokens", "out", "device"):
        assert name in done.stdout
