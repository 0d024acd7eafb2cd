"""Where the time of a step goes: what is written, that it adds up, that training stays the same."""

import gc
import gzip
import json
import re

import pytest
import torch
from helpers.runs import assert_same, rows, weights

from training import resume
from training.profiling import PARTS, PHASES, NoProfiler, Profiler, Stopwatch

ON = "trainer.profile=true"


def trained(trainer, *overrides):
    """A run that looks at nothing else."""
    unseen = ("trainer.sample_tokens=0", "trainer.eval_every=0", "trainer.eval_windows=1")
    run = trainer("trainer.max_steps=9", *unseen, *overrides)
    run.train()
    return run


def table(run):
    return (run.folder / "profile" / "step.txt").read_text(encoding="utf-8")


def numbers(lines):
    """{name: (ms, %)} of lines such as `  forward   12.3 ms  45.6%`."""
    found = {}
    for line in lines.splitlines():
        if row := re.fullmatch(r"  (\D+?) +([\d.]+) ms +([\d.]+)%", line):
            found[row[1]] = float(row[2]), float(row[3])
    return found


def trace(run):
    with gzip.open(run.folder / "profile" / "trace.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_table_and_a_trace_of_three_early_steps(trainer, capsys):
    run = trained(trainer, ON, "trainer.micro_batch_size=4")
    assert sorted(p.name for p in (run.folder / "profile").iterdir()) == [
        "step.txt",
        "trace.json.gz",
    ]
    head, phases, parts, operators = table(run).split("\n\n")
    assert "windows of 32 tokens a step, 4 at once" in head
    said = re.search(r"profile of steps 5 to 7: ([\d.]+) ms a step; [\d.]+ ms before", head)
    step = float(said[1])

    phases, parts = numbers(phases), numbers(parts)
    assert list(phases) == list(PHASES.values())
    assert sum(ms for ms, _ in phases.values()) == pytest.approx(step, abs=0.1)
    assert sum(share for _, share in phases.values()) == pytest.approx(100, abs=0.3)
    assert min(phases[name][0] for name in ("forward", "backward", "clipping and optimizer")) > 0
    assert list(parts) == list(PARTS)
    assert sum(ms for ms, _ in parts.values()) == pytest.approx(phases["forward"][0], abs=0.1)
    assert all(parts[name][0] > 0 for name in PARTS[:-1])

    lines = operators.splitlines()
    assert len(lines) == 22
    assert any("aten::addmm" in line and "[128,32]" in line for line in lines)
    spent = [float(re.search(r"([\d.]+) +[\d.]+%", line)[1]) for line in lines[2:]]
    assert spent == sorted(spent, reverse=True)
    assert sum(spent) < step
    assert not any(name in operators for name in ("blocks.", "ProfilerStep", "waiting"))

    names = [event["name"] for event in trace(run) if event.get("cat") == "user_annotation"]
    for name in ("forward", "backward", "blocks.1.attn.W_query", "final_norm"):
        assert names.count(name) == 6, name  # two micro-batches of each of three steps
    assert names.count("clipping and optimizer") == 3
    said = capsys.readouterr()
    assert said.err == ""
    assert f"profile of steps 5 to 7: {step} ms a step" in said.out
    assert re.search(r"^  forward +[\d.]+ ms", said.out, re.M)
    assert re.search(
        r"^  most of forward, as shares of the step: \D+[\d.]+%, \D+[\d.]+%, \D+[\d.]+%$",
        said.out,
        re.M,
    )
    assert "profile          runs/" in said.out


def test_training_is_the_same_bit_for_bit(trainer):
    settings = ("model.dropout=0.2", "trainer.micro_batch_size=4")
    plain, watched = trained(trainer, *settings), trained(trainer, *settings, ON)
    assert (watched.folder / "profile").is_dir()
    assert not (plain.folder / "profile").exists()
    assert_same(weights(watched), weights(plain))
    logs = [rows(plain.folder), rows(watched.folder)]
    for row in logs[0] + logs[1]:
        row.pop("train/tokens_per_second", None)
    assert logs[0] == logs[1]


def test_afterwards_nothing_is_left_of_it(trainer):
    run = trainer(ON, "trainer.max_steps=9")
    watched = []
    while run.state.step < 7:
        assert isinstance(run.profiler, Profiler)
        with run.profiler.step():
            watched.append((run.profiler.watching, hooks(run.model)))
            assert gc.isenabled() is (run.state.step < 3)
            run.step()
    assert [on for on, _ in watched] == [False] * 4 + [True] * 3
    assert [count > 0 for _, count in watched] == [False] * 4 + [True] * 3
    assert isinstance(run.profiler, NoProfiler)
    assert hooks(run.model) == 0
    assert gc.isenabled()


def test_a_short_run_has_its_last_steps_profiled(trainer):
    run = trained(trainer, ON, "trainer.max_steps=2", "trainer.warmup_steps=0")
    assert "profile of step 2:" in table(run)
    assert trace(run)
    steps = {2: (2, 2), 3: (2, 3), 4: (2, 4), 6: (4, 6), 7: (5, 7), 8: (5, 7), 1000: (5, 7)}
    for count, (first, last) in steps.items():
        profiler = Profiler(run, count)
        assert (profiler.first - 2, profiler.last - 2) == (first, last)


def test_a_run_of_one_step_is_too_short_and_says_so(trainer, capsys):
    run = trained(trainer, ON, "trainer.max_steps=1", "trainer.warmup_steps=0")
    assert "note: trainer.profile: a first step only warms up" in capsys.readouterr().out
    assert not (run.folder / "profile").exists()


def test_a_run_that_goes_on_may_be_profiled_then(trainer):
    assert "trainer.profile" in resume.FREE_TO_CHANGE
    trained(trainer, "name=a")
    run = trained(trainer, "name=a", "trainer.max_steps=20", ON)
    assert "profile of steps 14 to 16:" in table(run)
    whole = trained(trainer, "name=b", "trainer.max_steps=20")
    again = trained(trainer, "name=b", "trainer.max_steps=20", ON)  # finished: nothing to look at
    assert not (whole.folder / "profile").exists()
    assert isinstance(again.profiler, NoProfiler)


def test_what_fails_in_it_is_a_line_and_the_run_goes_on(trainer, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("training.profiling.write_trace", broken)
    run = trained(trainer, ON)
    assert run.state.step == 9
    assert "profile: failed, and is off (RuntimeError: no such luck)" in capsys.readouterr().err
    assert hooks(run.model) == 0
    monkeypatch.undo()
    monkeypatch.setattr("torch.profiler.profile", broken)
    monkeypatch.chdir(run.folder.resolve().parents[1])
    assert trained(trainer, ON).state.step == 9
    assert capsys.readouterr().err.count("profile: failed") == 1


def test_what_backward_computes_again_is_no_forward(trainer):
    run = trained(trainer, ON, "trainer.activation_checkpointing=true")
    names = [event["name"] for event in trace(run) if event.get("cat") == "user_annotation"]
    assert names.count("blocks.1.mlp") == 3


def test_a_run_that_fails_while_it_is_watched_leaves_no_profiler_behind(trainer):
    run = trainer(ON, "trainer.max_steps=9", "trainer.eval_every=0", "trainer.sample_tokens=0")
    calls = iter(range(100))
    update = run.parallel.update

    def fail(*arguments):
        if next(calls) == 5:
            raise RuntimeError("in the sixth step")
        return update(*arguments)

    run.parallel.update = fail
    with pytest.raises(RuntimeError, match="sixth"):
        run.train()
    run.close(4)
    assert hooks(run.model) == 0
    assert not torch.autograd._profiler_enabled()


def test_time_belongs_to_who_entered_last(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 100.0, 101.0])
    monkeypatch.setattr("training.profiling.time.perf_counter", lambda: next(now))
    watch = Stopwatch(torch.device("cpu"))
    step, forward, norm, head = ("other", ""), ("forward", ""), ("forward", "n"), ("forward", "h")
    watch.enter(step)  # 0 to 1
    watch.enter(forward)  # 1 to 3
    watch.enter(norm)  # 3 to 6
    watch.leave(head)  # 6 to 10: forward's own time is another's from here on
    watch.leave()  # 10 to 15
    watch.leave()  # 15 to 100 is nobody's
    watch.enter(step)
    watch.leave()
    assert watch.seconds() == {step: 1 + 5 + 1, forward: 2, norm: 3, head: 4}
