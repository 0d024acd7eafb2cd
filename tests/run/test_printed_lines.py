"""What a run prints: its data, commands that the user can run, and the names of heads."""

import json
import re
import shlex

import pytest
import torch
from helpers import TINY
from helpers.pages import Attention

import train
from clearhead.output.summary import results
from scripts.view import ViewConfig


@pytest.mark.parametrize("folder", ["runs", "my runs"])
def test_a_run_prints_the_command_that_shows_it(in_process, tmp_path, text_file, folder):
    short = [*TINY, f"data.path={text_file}", f"runs_dir='{folder}'", "lens=often"]
    for more, count in ((["name=a"], 1), (["name=b", "lens=off"], 1), (["seed=1", "-m"], 0)):
        code, out, err = in_process(train.main, tmp_path, *short, *more)
        assert code == 0, err
        commands = [line for line in out.splitlines() if "scripts.view" in line]
        assert len(commands) == count
        for command in commands:
            words = shlex.split(command.partition("python -m scripts.view")[2])
            settings = ViewConfig(**dict(word.split("=", 1) for word in words))
            assert settings.runs_dir == folder


VALIDATIONS = {  # step -> loss; whether more steps would help
    "falls": ({0: 5, 10: 4, 20: 3, 30: 2.9}, True),
    "falls, with a validation just before the last": ({0: 5, 10: 4, 20: 3, 29: 2.9, 30: 2.9}, True),
    "noise": ({0: 5, 10: 4, 20: 3, 30: 2.98}, False),
    "at the floor": ({0: 5, 10: 0.1, 20: 0.005, 30: 0.001}, False),
    "rises": ({0: 5, 10: 3, 20: 2, 30: 2.9}, False),
    "too few": ({0: 5, 10: 4, 30: 3}, False),
    "none": ({}, False),
}


@pytest.mark.parametrize("name", VALIDATIONS)
def test_the_summary_says_whether_the_loss_was_still_falling(tmp_path, name):
    losses, is_falling = VALIDATIONS[name]
    rows = [json.dumps({"step": step, "val/loss": loss}) + "\n" for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    lines, _ = results(tmp_path)
    assert len(lines) == (len(losses) > 0) + is_falling


HEADS = ("name=a", "model.num_heads=4", "lens=default", "lens.every=1", "trainer.sample_tokens=0")
BACK = {(0, 0): 1, (0, 1): 1, (0, 2): 1, (0, 3): 1, (1, 0): 1}  # steps 1 to 5: previous token
LATER = [{}, {}, {(1, 1): 99}, {(1, 2): 2, (1, 3): 2}, {}, {}, {(0, 3): 0}]  # from each step on


def uniform_attention(size):
    return torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]


@pytest.fixture(autouse=True)
def without_proof(monkeypatch):
    """Planted weights are not those that the model computes with."""
    monkeypatch.setattr("headlens.capturing.prove", lambda *_: None)


def trained(run, max_steps):
    """Trains a run whose heads attend to the token that is a number of tokens before the query, or
    to the first token. The lines with heads during the run: (step, heads, other numbers)."""
    capture = run.model.capture_attention

    def capture_attention(input_ids, callback, logits_at=None):
        size, back = input_ids.shape[1], BACK if run.state.step else {}
        for later in LATER[: run.state.step + 1]:
            back = back | later

        def planted(layer, weights, *others):
            weights = uniform_attention(size).expand_as(weights).clone()  # the model keeps its own
            for head in range(4):
                if (layer, head) in back:
                    share = 0.5 if (layer, head) == (1, 2) else 1
                    keys = (torch.arange(size) - back[layer, head]).clamp(min=0)
                    weights[:, head] *= 1 - share
                    weights[:, head, torch.arange(size), keys] += share
            callback(layer, weights, *others)
            Attention()(weights)

        return capture(input_ids, planted, logits_at)

    run.model.capture_attention = capture_attention
    train.fit(run)
    assert run.state.step == max_steps


def heads_of(line):
    return re.findall(r"L\d H\d", line)


def during(out):
    lines = [line for line in out.splitlines() if re.match(r"step +\d+ ", line) and heads_of(line)]
    return [(heads_of(line), re.findall(r"\d+", re.sub(r"L\d H\d", "", line))) for line in lines]


def test_names_are_printed_once_when_they_first_occur_and_counted_at_the_end(make_run, capsys):
    trained(make_run(*HEADS), 4)
    out = capsys.readouterr().out
    assert during(out) == [
        (["L0 H0", "L0 H1", "L0 H2", "L0 H3"], ["1", "1"]),  # at step 1, and 1 more
        (["L1 H1"], ["2"]),
        (["L1 H2", "L1 H3"], ["3"]),
    ]
    first, *lines = [line for line in out.splitlines() if line.startswith("attention heads")]
    assert re.findall(r"\d+", first) == ["8", "8", "5", "2", "1"]
    assert [heads_of(line) for line in lines] == [["L0 H0"], ["L1 H3"], ["L1 H1"]]
    assert [re.findall(r"\d+", line)[-1] for line in lines] == ["1", "3", "2"]  # since step
    assert max(map(len, (first, *lines))) <= 110

    trained(make_run("trainer.resume=runs/a", "trainer.max_steps=6", tiny=False), 6)
    out = capsys.readouterr().out
    assert during(out) == [(["L0 H3"], ["6"])]  # only the new name
    *_, line = [line for line in out.splitlines() if line.startswith("attention heads")]
    assert heads_of(line) == ["L1 H1"]
