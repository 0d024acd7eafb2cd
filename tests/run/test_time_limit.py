"""trainer.max_minutes: the number of steps, the last step, and the summary with which to repeat it.

tests/parallel/test_ranks.py has a run of two ranks that is out of time."""

import itertools
import json
import math
import shlex
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import TEXT, TINY
from helpers.ranks import check_same_bytes
from helpers.refusals import printed_keys, refused
from helpers.runs import rows
from helpers.settings import settings

import train
from clearhead.checkpoint.run_directory import settings_of
from clearhead.config.automatic import automatic_values
from clearhead.errors import ConfigError
from clearhead.output.comparison import read
from clearhead.run import build, time_limit
from scripts import plan
from train import fit

AUTOMATIC = ("trainer.max_steps=null", "trainer.warmup_steps=null", "trainer.eval_every=null")
LIMITED = ("trainer.max_minutes=100", *AUTOMATIC)
TWO_MINUTES, CPU = settings(*TINY, "data.path=x", "trainer.max_minutes=2"), torch.device("cpu")


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps that take a second, according to the measurement."""
    monkeypatch.setattr(build, "measure_steps", lambda *_: 1.0)


def test_the_measurement_does_not_change_the_run(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(time_limit, "MEASURED_FRACTION", 0.0)
    more = ("model.dropout=0.2", "optimizer=muon", "trainer.micro_batch_size=2")
    fit(make_run("name=limited", "trainer.max_minutes=100", *more))
    fit(make_run("name=plain", *more))
    limited, plain = (tmp_path / "runs" / name for name in ("limited", "plain"))
    check_same_bytes(limited, plain)
    same = {"trainer": settings_of(plain)["trainer"] | {"max_minutes": 100.0, "compile": False}}
    assert settings_of(limited) == settings_of(plain) | {"name": "limited"} | same


def test_the_number_of_steps_decides_the_automatic_settings(make_run, slow_steps):
    trainer = make_run(*LIMITED).config.trainer
    assert 5000 < trainer.max_steps < 6000
    expected = settings(*TINY, "data.path=x", *AUTOMATIC, f"trainer.max_steps={trainer.max_steps}")
    expected = expected.with_values(automatic_values(expected, False))
    assert trainer.warmup_steps == expected.trainer.warmup_steps > 100
    assert trainer.eval_every == expected.trainer.eval_every > 100


def test_a_run_without_time_for_a_step_is_refused(make_run, slow_steps, tmp_path):
    with refused(ConfigError, "trainer.max_minutes", 0.01, exit_code=2):
        make_run("trainer.max_minutes=0.01")
    assert not (tmp_path / "runs").exists()


def test_the_limit_begins_with_the_process(in_process, tmp_path, monkeypatch, slow_steps):
    monkeypatch.setattr(time_limit, "STARTED", time.monotonic() - 10**6)
    arguments = [*TINY, "data.path=text.txt", "trainer.max_minutes=100"]
    (tmp_path / "text.txt").write_text("a text, " * 200)
    code, _, err = in_process(train.main, tmp_path, *arguments)
    assert (code, printed_keys(err)) == (2, ["trainer.max_minutes"])


def test_a_slow_run_ends_early_and_can_be_repeated_and_resumed(make_run, tmp_path, slow_steps):
    """It ends after step 3 of the same learning-rate schedule."""
    short_warmup = "trainer.warmup_steps=1"
    run = make_run(*LIMITED, short_warmup, "name=early")
    run.stop.limit.is_last_step = lambda: run.state.step == 2
    fit(run)
    early = tmp_path / "runs" / "early"
    stored, log = settings_of(early)["trainer"], rows(early)
    planned = stored["max_steps"]
    assert planned > 5000
    assert stored["schedule_steps"] is None
    assert [row["step"] for row in log] == [0, 3]
    assert {key for key in log[-1] if key.startswith("val/")} <= json_of(early).keys()
    found = {key: json_of(early)[key] for key in ("steps", "planned_steps", "tokens", "seed")}
    assert found == {"steps": 3, "planned_steps": planned, "tokens": 3 * 8 * 32, "seed": 0}
    assert json_of(early)["val/loss"] == log[-1]["val/loss"]

    assert read(early, "val/loss").is_finished

    steps = ("trainer.max_steps=3", f"trainer.schedule_steps={planned}")
    fit(make_run(*AUTOMATIC, short_warmup, *steps, "name=again"))
    check_same_bytes(early, tmp_path / "runs" / "again")

    resumed = make_run(*LIMITED, short_warmup, "name=early")
    assert (resumed.state.step, resumed.config.trainer.max_steps) == (3, planned)


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_a_slow_run_decays_in_time_and_equals_one_of_fewer_steps(
    make_run, tmp_path, slow_steps, monkeypatch, seconds
):
    """There is time for 110 or 55 of 100 steps. Nothing changes if steps are not slower."""
    settings = ("trainer.sample_tokens=0", "trainer.eval_every=0", "trainer.log_every=1")
    run = make_run(*settings, "trainer.max_minutes=100", "trainer.max_steps=100", "name=slow")
    clock, update, run.stop.limit.end = [0.0], run.strategy.update, 110.0

    def slow_update(*arguments):
        clock[0] += seconds
        return update(*arguments)

    run.strategy.update = slow_update
    with monkeypatch.context() as patched:
        patched.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        fit(run)
    slow, steps = tmp_path / "runs" / "slow", run.state.step
    assert steps == 100 if seconds == 1 else 45 < steps <= 55
    assert settings_of(slow)["trainer"]["max_steps"] == run.state.settings["trainer"]["max_steps"]
    log = rows(slow)
    optimizer = run.config.optimizer
    assert log[-1]["train/learning_rate"] == pytest.approx(optimizer.lr * optimizer.min_lr_ratio)

    plain = make_run(*settings, f"trainer.max_steps={steps}", "name=plain")
    fit(plain)
    check_same_bytes(slow, tmp_path / "runs" / "plain")
    again = make_run(*settings, "trainer.max_minutes=100", "trainer.max_steps=100", "name=slow")
    assert again.was_finished


@pytest.mark.parametrize("last", [None, 3])
def test_the_command_of_the_summary_repeats_the_run(in_process, tmp_path, monkeypatch, last):
    """last: the step at which the time is over; None: the run reaches its planned steps."""
    monkeypatch.setattr(time_limit, "MEASURED_FRACTION", 0.0)
    monkeypatch.setattr(time_limit, "STARTED", time.monotonic())
    (tmp_path / "my text.txt").write_text(TEXT)
    arguments = [*TINY, "name=first", "data.path=my text.txt", "trainer.max_minutes=100"]
    # Each step after the first one depends on the length of the schedule.
    arguments += ["optimizer.schedule=cosine", "trainer.warmup_steps=0"]
    with monkeypatch.context() as patched:
        steps = itertools.count(1)
        patched.setattr(time_limit.TimeLimit, "is_last_step", lambda _: next(steps) == last)
        assert in_process(train.main, tmp_path, *arguments)[0] == 0
    first = tmp_path / "runs" / "first"
    assert json_of(first)["steps"] == (last or 4)
    assert in_process(train.main, tmp_path, *shlex.split(json_of(first)["repeat"])[2:])[0] == 0
    (again,) = set((tmp_path / "runs").iterdir()) - {first}
    check_same_bytes(first, again)
    assert settings_of(again)["trainer"]["max_minutes"] is None


def test_runs_that_one_command_does_not_repeat(in_process, tmp_path, monkeypatch):
    """A resumed run, and one that torchrun may restart."""
    monkeypatch.setattr(time_limit, "MEASURED_FRACTION", 0.0)
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = [*TINY, "name=run", "data.path=text.txt"]
    for steps in (2, 4):
        assert in_process(train.main, tmp_path, *arguments, f"trainer.max_steps={steps}")[0] == 0
    assert json_of(tmp_path / "runs" / "run")["repeat"] is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert in_process(train.main, tmp_path, *arguments, "name=restarted")[0] == 0
    assert json_of(tmp_path / "runs" / "restarted")["repeat"] is None


def json_of(run) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_the_last_step_leaves_time_for_another_step_and_two_validations(monkeypatch):
    """Steps of 2 s and a validation of 10 s, of which there is one before the first step."""
    now = 0.0
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: now))
    limit = time_limit.TimeLimit(TWO_MINUTES, CPU, time_limit.time.monotonic())
    limit.start()
    now = 10.0
    limit.exclude(10)
    while not limit.is_last_step():
        now += 2
    # A step, its validation, the last step and its validation take 24 s.
    assert now - 2 + 24 <= limit.end < now + 24
    assert limit.end == 120 - limit.end_of_run


class Gpu:
    """A GPU that computes steps later than they are launched. Replaces torch.cuda.Event."""

    def __init__(self):
        self.now = self.busy_until = 0.0  # in seconds

    def step(self, seconds):
        """Launches a step, which takes no time on the host."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self):
        self.now = max(self.now, self.busy_until)

    def __call__(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.busy_until, self.gpu.now)

    def query(self):
        return self.at <= self.gpu.now

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


@pytest.mark.parametrize("every", [1, 10, 10**9])
def test_a_run_on_a_gpu_ends_in_time(monkeypatch, every):
    """Steps of 0.4 s. The program waits every N steps, and if it is five steps ahead."""
    gpu = Gpu()
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: gpu.now))
    monkeypatch.setattr(torch.cuda, "Event", gpu)
    limit = time_limit.TimeLimit(TWO_MINUTES, torch.device("cuda"), time_limit.time.monotonic())
    limit.start()
    steps, left = 0, math.inf
    while not limit.is_last_step():
        gpu.step(0.4)
        steps += 1
        left = min(left, limit.steps_left() + steps)
        if steps % every == 0:
            gpu.synchronize()
        gpu.now = max(gpu.now, gpu.busy_until - 5 * 0.4)  # the queue of launches is full
    gpu.step(0.4)
    assert limit.end - 3 * 0.4 < gpu.busy_until <= limit.end
    assert 0.95 * steps < left < 1.05 * steps + 10


def test_a_busy_machine_does_not_end_a_run_that_has_time_left(monkeypatch):
    """Steps of 0.01 s, then steps of 1 s. The end of the run does not become 100 times slower."""
    now = 0.0
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: now))
    limit = time_limit.TimeLimit(TWO_MINUTES, CPU, time_limit.time.monotonic())
    for seconds in [0.01] * 30 + [1.0] * 60:
        now += seconds
        assert not limit.is_last_step()
    while not limit.is_last_step():
        now += 1
    assert 60 < now < 120 - 3 * limit.end_of_run  # it reserves more time than on an idle machine


def test_a_plan_with_a_time_limit_needs_the_number_of_tokens():
    config = settings(*TINY, "data.path=x", *LIMITED)
    with refused(ConfigError, "tokens"):
        plan.make_plan(config, plan.PlanConfig())
    assert plan.make_plan(config, plan.PlanConfig(tokens=1e6))["tokens"] == 1e6
