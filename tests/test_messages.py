"""The text of messages, with an example of each kind. Other tests check keys, types, exit codes.

A line is `key=value: reason; hint`, one per problem, without control characters or secrets.
"""

import copy
import os
import shutil

import pytest
import torch
from helpers import TINY

import generate
import train
from clearhead import errors
from clearhead.config import compose
from clearhead.config.command_line import errors_in_one_line
from clearhead.lens.config import LensConfig
from clearhead.lens.snapshots import Lens
from clearhead.planning import micro_batch
from train import fit

NAME = (
    "must have 1 to 128 characters: A-Z, a-z, 0-9 and _ ; after the first character also . = , + -"
)
# Argument of train.py -> message.
SETTINGS = {
    "modle=gpt2-small": "no such setting; did you mean model?",
    "trainer.epochs=3": "no such setting; use trainer.max_steps (a run has a number of steps, each "
    "of trainer.batch_size windows)",
    "optimizer.lr=abc": "must be a valid number; see --help",
    "optimizer.lr=-1.0": "must be greater than 0; see --help",
    "trainer.micro_batch_size=x": "must be a valid integer or 'auto'; see --help",
    "trainer.precision=fp8": "must be 'auto', 'fp32', 'bf16' or 'fp16'; see --help",
    "trainer.resume=true": "must be false or a valid string; see --help",
    "lens.repeat_length=1": "must be 0 or greater than or equal to 2; see --help",
    "name=a b": f"{NAME}; see --help",
    "wandb.project=a/b": r"must not be empty and must not contain / \ # ? % :; see --help",
    "data.path=[]": "must have at least 1 item after validation, not 0; see --help",
    "foo": "not of the form KEY=VALUE; write KEY=VALUE; if it contains blanks, quote it: "
    "'KEY=some words'",
    "name=[a,": "not a valid Hydra override; if the value is text, write 'name=\"[a,\"'",
    "data.path=l'été.txt": "not a valid Hydra override; if the value is text, write "
    """'data.path="l'"'"'été.txt"'""",
}
# Text file: (content, message).
TEXTS = {
    "no.txt": (None, "file not found; check the path (relative to {here})"),
    "a.jsonl": (
        b'{"text": "x"}\nno\n',
        "the line at byte 14 is not valid JSON (Expecting value: line 1 column 1 (char 0)); "
        "correct the line",
    ),
    "a.txt": (
        b"caf\xe9",
        "not UTF-8 (0xe9 at byte 3); convert it: iconv -f LATIN1 -t UTF-8 FILE > utf8.txt",
    ),
}


def test_settings():
    for given, message in SETTINGS.items():
        with pytest.raises(errors.ConfigError) as caught:
            compose([given])
        assert str(caught.value) == f"{given.lstrip('+')}: {message}"


def test_why_no_head_has_a_name():
    """A mean above the limit, but uniform attention on one prompt."""
    lens = Lens(
        LensConfig(prompts=["a b", "1,2"], repeat_length=0), str.encode, lambda n: bytes([n]), 8
    )

    def capture_attention(token_ids, capture):
        weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3] * 3])
        previous = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        capture(0, torch.stack([previous if token_ids[0] == ord("a") else weights, weights]))

    _, lines = lens.inspect(capture_attention, 0, "x")
    assert "previous token (0.42)    no head on every prompt; largest mean: L0 H0 0.71" in lines
    assert "self (0.42)              no head; largest mean: L0 H1 0.42" in lines


def test_several_problems_with_control_characters_and_a_secret():
    with pytest.raises(errors.ConfigError) as caught:
        compose(["name='a\x1b[31m\nb\u202e'", "+wandb.api_key=s3cret"])
    assert str(caught.value).splitlines() == [
        f"name=a\\x1b[31m\\nb\\u202e: {NAME}; see --help",
        "wandb.api_key=(not shown): no such setting; keys and passwords are not settings; use "
        "environment variables",
    ]


def test_long_keys_and_values_are_shortened():
    with pytest.raises(errors.ConfigError) as caught:
        compose(["+model." + "a" * 200 + "=1", "name=" + "b" * 5000])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("name=" + "b" * 300 + "...: must have 1 to 128 characters")
    assert lines[1].startswith("model." + "a" * 200 + "=1: no such setting")


def test_copies_as_made_between_processes_are_the_same():
    problems = [errors.Problem(key, errors.NO_VALUE, "reason", "hint") for key in "ab"]
    for error in (
        errors.ConfigError(problems),
        errors.OtherRankError(problems, 3),
        errors.DataError("key", errors.NO_VALUE, "reason", "hint"),
        errors.DamagedCheckpointError("file", "reason"),
    ):
        copied = copy.deepcopy(error)
        assert (str(copied), copied.exit_code) == (str(error), error.exit_code)


def test_texts(make_run, tmp_path):
    for name, (raw, message) in TEXTS.items():
        if raw is not None:
            (tmp_path / name).write_bytes(raw)
        with pytest.raises(errors.DataError) as caught:
            make_run(f"data.path={name}")
        assert str(caught.value) == f"data.path={name}: {message.format(here=tmp_path)}"


def test_checkpoints(make_run, in_process, tmp_path):
    run = make_run("name=run")
    fit(run)
    shutil.copytree((run.directory / "checkpoints" / "last").resolve(), "copied")
    with open("copied/model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    for path, message in (
        (
            "nowhere",
            "directory not found; give a run directory or a checkpoint; hub:nowhere downloads it "
            "from Hugging Face",
        ),
        (
            f"{tmp_path}/copied/model.safetensors",
            "checksum mismatch with SHA256SUMS; use another checkpoint",
        ),
    ):
        given = f"checkpoint={path.removesuffix('/model.safetensors')}"
        code, _, err = in_process(generate.main, tmp_path, given)
        assert (code, err) == (3, f"checkpoint={path}: {message}\n")
    other = "runs/run was trained with {0}; use {1}={0}, or start a new run with another name"
    seed = f"seed=7: {other.format(run.config.seed, 'seed')}"
    emb_dim = f"model.emb_dim=64: {other.format(32, 'model.emb_dim')}"
    with pytest.raises(errors.ConfigError) as caught:
        make_run("name=run", "seed=7")
    assert str(caught.value) == f"{seed}, or trainer.resume_override=true to resume anyway"
    with pytest.raises(errors.ConfigError) as caught:  # the weights do not fit: no override
        make_run("name=run", "seed=7", "model.emb_dim=64")
    assert sorted(str(caught.value).splitlines()) == [emb_dim, seed]


def test_while_training(make_run, in_process, tmp_path, monkeypatch):
    fit(make_run("name=run"))
    run = make_run("name=run", "trainer.max_steps=6")
    intact = "the checkpoint of step 4 is intact"
    error = micro_batch.out_of_memory_error(
        run.config, run.strategy, 8, run.checkpointer.describe()
    )
    assert isinstance(error, errors.OutOfMemoryError)
    assert str(error) == (
        "trainer.micro_batch_size=8: 8 windows of 32 tokens do not fit into the memory of cpu; use "
        "trainer.micro_batch_size=4: 2 micro-batches per step on each device keep the batch "
        "size of 8; " + intact
    )
    run.model.final_norm.weight.data.fill_(float("nan"))
    with pytest.raises(errors.DivergedError) as caught, run.translate_errors():
        run.evaluate()
    assert str(caught.value) == (
        "optimizer.lr=0.0003: the validation loss is nan at step 4; use a smaller optimizer.lr, "
        f"more trainer.warmup_steps or trainer.precision=fp32; {intact}"
    )
    given = [*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=6"]
    assert in_process(train.main, tmp_path, *given)[2] == (
        "name=run: runs/run is in use by another process (process "
        f"{os.getpid()} on {os.uname().nodename}); wait until it ends, or use another name\n"
    )
    monkeypatch.setattr("sys.argv", ["train.py", "seed=0"])
    monkeypatch.setattr(type(run.strategy), "is_lost_rank", lambda *_: True)
    with pytest.raises(errors.RankLostError) as caught, run.translate_errors():
        raise RuntimeError("[../pair.cc:1] Connection closed by peer [127.0.0.1]:1234. More")
    assert str(caught.value) == (
        "parallel.timeout=600: another rank died or timed out (Connection closed by peer"
        "); resume with: python train.py seed=0 trainer.resume=runs/run"
    )
    with pytest.raises(errors.NotSavedError) as caught, run.translate_errors():
        raise errors.NotSavedError("checkpoint", "step_00000006", "is not written", "make room")
    assert str(caught.value) == (
        "checkpoint=step_00000006: is not written; make room; "
        "resume with: python train.py seed=0 trainer.resume=runs/run"
    )


def printed(capsys, error, debug=False) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught, errors_in_one_line(debug):
        raise error
    return caught.value.code, capsys.readouterr().err


def test_errors_of_other_ranks_and_unexpected_ones(capsys, monkeypatch):
    problem = errors.Problem("data.path", "x", "file not found", "check the path")
    other = errors.OtherRankError([problem], 3)
    line = "data.path=x: file not found; check the path\n"
    assert printed(capsys, other) == (3, line)
    unexpected = "RuntimeError: two lines; rerun with debug=true to see the traceback\n"
    assert printed(capsys, RuntimeError("two\nlines")) == (4, unexpected)
    assert "Traceback" in printed(capsys, other, debug=True)[1]
    monkeypatch.setattr("clearhead.config.command_line.WAIT_FOR_RANK_0", 0)
    monkeypatch.setenv("RANK", "1")
    assert printed(capsys, other) == (3, "")
    assert printed(capsys, RuntimeError("x"))[1].startswith("rank 1: RuntimeError: x; ")
    memory = errors.OutOfMemoryError("key", 1, "does not fit", "use less")
    assert printed(capsys, memory) == (4, "rank 1: key=1: does not fit; use less\n")
