"""The profile of a step: its files, that its times add up, that training stays the same."""

import gc
import gzip
import json
import re

import pytest
from helpers.runs import assert_same, repeatable_rows, weights

from training.reporting.profiler import PARTS, PHASES, NoProfiler, Profiler

ON = "trainer.profile=true"


def trained(trainer, *overrides):
    quick = ("trainer.sample_tokens=0", "trainer.eval_every=0", "trainer.eval_windows=1")
    run = trainer("trainer.max_steps=9", *quick, *overrides)
    run.train()
    return run


def table(run):
    return (run.folder / "profile" / "step.txt").read_text(encoding="utf-8")


def heading(run):
    """The numbers of the second line: the steps, or the only one, and then milliseconds."""
    return re.findall(r"[\d.]*\d", table(run).splitlines()[1])


def numbers(lines):
    """{name: (ms, %)} of lines such as `  forward   12.3 ms  45.6%`."""
    found = re.findall(r"^  (\D+?) +([\d.]+) ms +([\d.]+)%$", lines, re.MULTILINE)
    return {name: (float(ms), float(share)) for name, ms, share in found}


def annotations(run):
    """The names of phases and parts in the trace."""
    with gzip.open(run.folder / "profile" / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_table_and_a_trace_of_three_early_steps(trainer):
    run = trained(trainer, ON, "trainer.micro_batch_size=4")
    _, phases, parts, operators = table(run).split("\n\n")
    first, last, step, *_ = heading(run)
    assert (first, last) == ("5", "7")

    phases, parts = numbers(phases), numbers(parts)
    assert list(phases) == list(PHASES.values())
    assert sum(ms for ms, _ in phases.values()) == pytest.approx(float(step), abs=0.1)
    assert sum(share for _, share in phases.values()) == pytest.approx(100, abs=0.3)
    assert list(parts) == list(PARTS)
    assert sum(ms for ms, _ in parts.values()) == pytest.approx(phases["forward"][0], abs=0.1)
    assert all(parts[name][0] > 0 for name in PARTS[:-1])

    lines = operators.splitlines()
    assert len(lines) == 22
    assert any(re.search(r"aten::\w+.*\[\d+,\d+", line) for line in lines)
    spent = [float(re.search(r"([\d.]+) +[\d.]+%", line)[1]) for line in lines[2:]]
    assert spent == sorted(spent, reverse=True)
    assert sum(spent) < float(step)

    names = annotations(run)
    for name in ("forward", "backward", "blocks.1.attn.W_query", "final_norm"):
        assert names.count(name) == 6, name  # two micro-batches of each of three steps
    assert names.count(PHASES["update"]) == 3


def test_training_is_the_same_bit_for_bit(trainer):
    settings = ("model.dropout=0.2", "trainer.micro_batch_size=4")
    plain, profiled = trained(trainer, *settings), trained(trainer, *settings, ON)
    assert_same(weights(profiled), weights(plain))
    assert repeatable_rows(profiled.folder) == repeatable_rows(plain.folder)


def test_which_steps_are_profiled(trainer):
    """The last ones of a short run; of a run of one step none. A resumed run may be profiled."""
    short = ("name=a", "trainer.max_steps=2", "trainer.warmup_steps=0")
    run = trained(trainer, ON, *short)
    assert heading(run)[0] == "2"
    assert isinstance(run.profiler, NoProfiler)
    assert gc.isenabled()
    assert annotations(run)
    steps = {2: (2, 2), 3: (2, 3), 4: (2, 4), 6: (4, 6), 7: (5, 7), 1000: (5, 7)}
    for count, (first, last) in steps.items():
        profiler = Profiler(run, count)
        assert (profiler.first - 2, profiler.last - 2) == (first, last)
    run = trained(trainer, *short, "trainer.max_steps=20", ON)
    assert heading(run)[:2] == ["7", "9"]
    run = trained(trainer, ON, *short, "name=b", "trainer.max_steps=1")
    assert not (run.folder / "profile").exists()


def test_a_failing_profiler_is_a_line_and_the_run_goes_on(trainer, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("training.reporting.profiler.write_trace", broken)
    run = trained(trainer, ON)
    assert run.state.step == 9
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such luck" in line
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
