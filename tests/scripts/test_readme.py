"""What README.md and docs/ say is true: answers, examples, files and links. Their commands:
test_commands.py."""

import itertools
import re
import shlex

import pytest
import torch
from helpers import REPOSITORY

from lens.page import read
from model import GPT, ModelConfig
from training.hf import to_hf

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LENS = (REPOSITORY / "docs" / "lens.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
LINES = [line for _, block in BLOCKS for line in block.splitlines()]
LENS_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", LENS, re.DOTALL)
DATA = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
DATA_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", DATA, re.DOTALL)
MODELS = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
MODELS_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", MODELS, re.DOTALL)


def test_answers_to_mistakes_are_those_shown(command):
    shown = [(a, b) for a, b in itertools.pairwise(LINES) if a.startswith("$ ")]
    assert len(shown) >= 2
    for line, answer in shown:
        words = shlex.split(line.removeprefix("$ python "))
        assert command(*words).stderr == answer + "\n"


@pytest.mark.parametrize("name", re.findall(r"^([\w/]+(?:\.\w+|/))\s{2,}", "\n".join(LINES), re.M))
def test_every_file_of_the_tour_is_there(name):
    assert (REPOSITORY / name).exists()


def test_links_lead_somewhere():
    docs = REPOSITORY / "docs"
    for text, folder in ((README, REPOSITORY), (LENS, docs), (DATA, docs), (MODELS, docs)):
        for target in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (folder / target).exists(), target


def test_the_notebook_example_runs(tmp_path, monkeypatch):
    (code,) = [block for language, block in BLOCKS if language == "python"]
    torch.manual_seed(0)
    to_hf(GPT(ModelConfig(50257, 32, 16, 2, 3)), tmp_path / "gpt2")
    names = {}
    exec(code.replace("runs/NAME", str(tmp_path / "gpt2")), names)
    assert [layer.shape[:2] for layer in names["layers"]] == [(1, 2)] * 3


def test_the_lens_beside_another_model(tmp_path, monkeypatch):
    """The example of docs/lens.md, with a tiny transformers model and a tokenizer of bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Tokenizer:
        vocab_size, bos_token_id = 256, 256
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: "".join(map(chr, ids)))

    shape = GPT2Config(vocab_size=257, n_positions=48, n_embd=16, n_layer=2, n_head=2)
    shape._attn_implementation = "eager"
    (code,) = [block for language, block in LENS_BLOCKS if language == "python"]
    monkeypatch.chdir(tmp_path)
    exec(code, {"model": GPT2LMHeadModel(shape).eval(), "tokenizer": Tokenizer})
    (run,) = read(tmp_path / "attention" / "timelapse.html")
    assert [frame["step"] for frame in run["frames"]] == [0, 50, 100]
    assert [prompt["period"] for prompt in run["prompts"]] == [0, 23]
