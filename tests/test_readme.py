"""What README.md says is true: its commands are valid, its answers come, its files are there."""

import itertools
import re
import shlex

import pytest
import torch
from conftest import REPOSITORY

from model import GPT, ModelConfig
from training.command import check_sweep, compose
from training.hf import to_hf

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
LINES = [line for _, block in BLOCKS for line in block.splitlines()]


def commands(program):
    found = []
    for line in LINES:
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", program]:
            found.append(words[2:])
    return found


def test_every_training_command_is_valid():
    assert len(commands("train.py")) >= 6
    for words in commands("train.py"):
        if words == ["--help"]:
            continue
        if words[0] == "-m":
            check_sweep(words[1:], None)
        else:
            compose(words)


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
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def test_the_notebook_example_runs(tmp_path, monkeypatch):
    (code,) = [block for language, block in BLOCKS if language == "python"]
    torch.manual_seed(0)
    to_hf(GPT(ModelConfig(50257, 32, 16, 2, 3)), tmp_path / "gpt2")
    names = {}
    exec(code.replace("runs/NAME", str(tmp_path / "gpt2")), names)
    assert [layer.shape[:2] for layer in names["layers"]] == [(1, 2)] * 3
