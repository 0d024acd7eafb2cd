"""The profiler: its files, the profiled steps, and that the training stays the same."""

import gzip
import json

import pytest
import torch
from helpers.runs import assert_same, repeatable_rows, weights

from clearhead.output.profiler import Profiler
from train import fit


@pytest.fixture
def profiled(tmp_path):
    """profiled(steps) -> the folder of the profile after a number of steps of a matrix product."""

    def run(steps):
        profiler = Profiler(True, tmp_path / "profile", torch.device("cpu"))
        weight = torch.ones(4, 4, requires_grad=True)
        for _ in range(steps):
            with profiler.step():
                with profiler.phase("forward"):
                    loss = (weight @ weight).sum()
                with profiler.phase("backward"):
                    loss.backward()
        profiler.close()
        return tmp_path / "profile"

    return run


def annotations(folder):
    """The names of steps and phases in the trace."""
    with gzip.open(folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_table_and_a_trace_of_three_steps(profiled):
    folder = profiled(9)
    names = annotations(folder)
    assert names.count("forward") == names.count("backward") == 3
    table = (folder / "table.txt").read_text(encoding="utf-8")
    assert table.count("aten::mm") >= 2
    assert "[[4, 4], [4, 4]]" in table
    assert [path.name for path in sorted(folder.iterdir())] == ["table.txt", "trace.json.gz"]


def test_short_runs(profiled, caplog):
    """Fewer steps if the run ends early; without profiled steps a warning and no files."""
    folder = profiled(4)
    assert not folder.exists()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    folder = profiled(6)
    assert annotations(folder).count("forward") == 2


def test_training_is_the_same_bit_for_bit(make_run):
    runs = []
    for profile in ("false", "true"):
        quick = ("trainer.sample_tokens=0", "trainer.eval_every=0", "trainer.eval_windows=1")
        settings = ("trainer.max_steps=9", "model.dropout=0.2", "trainer.micro_batch_size=4")
        runs.append(make_run(*quick, *settings, f"trainer.profile={profile}"))
        fit(runs[-1])
    plain, profiled = runs
    assert_same(weights(profiled), weights(plain))
    assert repeatable_rows(profiled.directory) == repeatable_rows(plain.directory)
    names = annotations(profiled.directory / "profile")
    for name in ("forward", "backward"):
        assert names.count(name) == 6, name  # two micro-batches of each of three steps
    assert names.count("optimizer") == 3
    assert not (plain.directory / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_training(profiled, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", full)
    profiled(9)
    assert len(capsys.readouterr().err.splitlines()) == 1
