"""trainer.max_minutes: learning rate, intervals, the last step, and what a resumed run continues.

tests/ranks/test_ranks.py has a run of two ranks that is out of time."""

import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import TEXT, TINY
from helpers.refusals import printed_keys, refused
from helpers.runs import change_state, repeatable_rows, rows
from helpers.settings import settings

import train
from clearhead.checkpoint.format import FORMAT, load_state
from clearhead.checkpoint.listing import find_checkpoint
from clearhead.config.stored import settings_of
from clearhead.errors import ConfigError
from clearhead.output.comparison import read
from clearhead.run import stop
from scripts import plan
from train import fit

OPEN = ("trainer.max_steps=null", "trainer.warmup_steps=null", "trainer.eval_every=null")
LIMITED = ("trainer.max_minutes=100", *OPEN, "lens=default", "lens.prompts=[abc]")
QUIET = ("trainer.sample_tokens=0", "trainer.save_every=0", "trainer.log_every=1")
TWO_MINUTES, CPU = settings(*TINY, "data.path=x", "trainer.max_minutes=2"), torch.device("cpu")


@pytest.fixture
def simulated(make_run, monkeypatch):
    """simulated(duration, *settings) -> a run that is trained on a clock that only its steps move.
    duration: (number of the step) -> its seconds."""

    def trained(duration, *arguments, stop_at=None):
        run = make_run(*QUIET, *arguments)
        limit = run.stop.limit
        now, update = [limit.started], run.strategy.update
        limit.end_of_run, limit.end = 0.0, now[0] + limit.seconds * (1 - limit.used)

        def slow_update(*given):
            now[0] += duration(run.state.step)
            if run.state.step + 1 == stop_at:
                run.stop.signals.received = 15
            return update(*given)

        run.strategy.update = slow_update
        with monkeypatch.context() as patched:
            patched.setattr(stop, "time", SimpleNamespace(monotonic=lambda: now[0]))
            if stop_at:
                with pytest.raises(SystemExit):
                    fit(run)
            else:
                fit(run)
        return run, now[0] - run.stop.limit.started

    return trained


def rates(run) -> list[float]:
    return [row["train/learning_rate"] for row in rows(run.directory)[1:] if "train/loss" in row]


SPEEDS = {
    "constant": lambda step: 40.0,
    "slower": lambda step: 40.0 if step < 75 else 120.0,
    "faster": lambda step: 80.0 if step < 35 else 30.0,
    "slow at first": lambda step: 900.0 if step == 0 else 40.0,
    "slower during the decay": lambda step: 40.0 if step < 125 else 120.0,
}


@pytest.mark.parametrize(
    ("speed", "schedule"), [*((speed, "wsd") for speed in SPEEDS), ("slower", "cosine")]
)
def test_the_decay_always_ends_in_time(simulated, speed, schedule):
    """The learning rate rises for a tenth of the time, never rises later, and ends at its end."""
    run, seconds = simulated(SPEEDS[speed], *LIMITED, f"optimizer.schedule={schedule}", "lens=off")
    limit, longest = 6000, max(SPEEDS[speed](step) for step in range(run.state.step))
    assert limit - 3 * longest < seconds <= limit + longest / 2
    found, schedule = rates(run), run.config.optimizer
    assert len(found) == run.state.step > 80
    assert found[-1] == pytest.approx(schedule.min_lr_ratio * schedule.lr)
    assert max(found) <= schedule.lr * (1 + 1e-9)
    highest = found.index(max(found))
    assert found[:highest] == sorted(found[:highest])
    assert found[highest:] == sorted(found[highest:], reverse=True)


LINE = r"steps that fit into 100 min: about ([\d,]+)(.*)"


@pytest.mark.parametrize(("seconds", "is_few"), [(171, True), (20, False)])
def test_a_run_says_early_how_many_steps_it_will_have(simulated, capsys, seconds, is_few):
    """Once, in a run that starts with new weights. With fewer steps than trainer.max_steps only."""
    run, _ = simulated(lambda step: seconds, *LIMITED, "lens=off", "name=a")
    ((steps, rest),) = re.findall(LINE, capsys.readouterr().out)
    assert int(steps) == pytest.approx(run.state.step, rel=0.15)
    assert bool(rest) == is_few
    if is_few:  # of new weights
        simulated(lambda step: seconds, *LIMITED, "lens=off", "trainer.init_from=runs/a")
        assert [bool(rest) for _, rest in re.findall(LINE, capsys.readouterr().out)] == [False]
    simulated(lambda step: seconds, *LIMITED, "lens=off", "trainer.max_steps=3")
    assert not re.findall(LINE, capsys.readouterr().out)
    for stop_at in (8, None):  # it is resumed
        simulated(lambda step: seconds, *LIMITED, "lens=off", "name=b", stop_at=stop_at)
        assert len(re.findall(LINE, capsys.readouterr().out)) == (stop_at == 8)


def test_a_run_whose_steps_become_fast_at_the_end_uses_its_time(simulated):
    """After step 127, there is time for 0.8 steps at the mean speed, and for 10 at the last one."""
    run, _ = simulated(lambda step: 142 if step < 40 else 3.3, *LIMITED, "lens=off")
    assert 130 < run.state.step < 140
    schedule = run.config.optimizer
    assert rates(run)[-1] == pytest.approx(schedule.min_lr_ratio * schedule.lr)


def test_a_run_that_was_limited_by_steps_trains_on_with_a_time_limit(simulated, monkeypatch):
    """Also if it has more steps than are expected before the first one of a run with a limit."""
    monkeypatch.setattr(stop, "EXPECTED_STEPS", 8)
    simulated(lambda step: 1.0, "trainer.max_steps=20", "name=a")
    run, _ = simulated(lambda step: 40.0, *LIMITED, "name=a", "lens=off")
    assert 140 < run.state.step - 20 < 151


def test_a_resumed_run_continues_with_the_time_that_is_left(simulated):
    """It is stopped in the middle and has half of the steps left; a finished one has none."""
    whole, _ = simulated(lambda step: 40.0, *LIMITED, "name=whole", "lens=off")
    simulated(lambda step: 40.0, *LIMITED, "name=half", "lens=off", stop_at=75)
    rest, seconds = simulated(lambda step: 40.0, *LIMITED, "name=half", "lens=off")
    assert 2900 < seconds < 3001
    assert abs(rest.state.step - whole.state.step) <= 4
    both = [*zip(rates(rest), rates(whole), strict=False)]
    assert max(abs(a - b) for a, b in both) < 0.15 * max(rates(rest))
    steps = [row["step"] for row in rows(rest.directory)]
    assert steps == sorted({*steps})
    again, _ = simulated(lambda step: 40.0, *LIMITED, "name=half", "lens=off")
    assert (again.was_finished, again.state.step) == (True, rest.state.step)
    longer, _ = simulated(
        lambda step: 40.0, *LIMITED, "name=half", "lens=off", "trainer.max_minutes=200"
    )
    assert longer.state.step > rest.state.step


def test_the_limit_of_a_checkpoint_without_its_used_time_is_refused(simulated):
    """Format 3, of version 3."""
    run, _ = simulated(lambda step: 40.0, *LIMITED, "name=old", "lens=off", stop_at=5)
    newest = find_checkpoint(run.directory)
    data = [[name, [checksum]] for name, checksum in run.state.data]
    change_state(newest, format=3, minutes=0.0, data=data)
    with refused(ConfigError, "trainer.max_minutes", 100.0, exit_code=2):
        simulated(lambda step: 40.0, *LIMITED, "name=old", "lens=off")
    rest, _ = simulated(lambda step: 40.0, "trainer.max_steps=9", "name=old")
    assert load_state(find_checkpoint(rest.directory)).format == FORMAT > 3


def test_steps_and_time_limit_a_run_together(simulated):
    """The one that comes first. With time for all steps, it equals a run without a limit."""
    both = ("trainer.max_steps=100", "trainer.max_minutes=100", "trainer.eval_every=null")
    run, _ = simulated(lambda step: 1.0, *both, "name=steps")
    plain, _ = simulated(lambda step: 1.0, both[0], both[2], "name=plain")
    assert run.state.step == 100
    assert repeatable_rows(run.directory) == repeatable_rows(plain.directory)
    slow, seconds = simulated(lambda step: 120.0, *both, "name=slow")
    assert (45 < slow.state.step < 50, seconds <= 6000) == (True, True)
    schedule = slow.config.optimizer
    assert rates(slow)[-1] == pytest.approx(schedule.min_lr_ratio * schedule.lr)


def test_with_more_steps_than_the_time_allows_the_time_rules(simulated):
    """Rows, validations, snapshots and learning rate are those of a run without max_steps."""
    own = (*LIMITED, "trainer.log_every=null")
    time, _ = simulated(lambda step: 20.0, *own, "name=time")
    both, _ = simulated(lambda step: 20.0, *own, "trainer.max_steps=1000000", "name=both")
    steps, n = [[row["step"] for row in rows(run.directory)] for run in (time, both)]
    assert steps == n == [*range(time.state.step + 1)]  # also step 1 has a row
    kinds = [[sorted(row) for row in rows(run.directory)] for run in (time, both)]
    assert kinds[0] == kinds[1]
    assert rates(both)[:30] == sorted(rates(both)[:30])
    assert rates(both) == pytest.approx(rates(time), abs=0.02 * max(rates(time)))
    for what in ("val/loss", "attention/heads"):  # about as often as with steps
        steps = [row["step"] for row in rows(time.directory) if what in " ".join(row)]
        assert 5 <= len(steps) <= 16
        assert (steps[0], steps[-1]) == (0, time.state.step)


def test_a_limit_below_what_was_trained_is_refused_unless_the_run_has_finished(simulated, capsys):
    def run(*more, **how):
        limited = ("trainer.max_steps=null", "lens=off", "name=a", "trainer.max_minutes=100")
        return simulated(lambda step: 600.0, *limited, *more, **how)[0]

    step = run(stop_at=5).state.step
    for key, value in (("trainer.max_minutes", 30.0), ("trainer.max_steps", 3)):
        with refused(ConfigError, key, value, exit_code=2):
            run(f"{key}={value}")
    rest = run()
    assert rest.state.step > step
    again = run("trainer.max_minutes=30")
    assert (again.was_finished, again.state.step) == (True, rest.state.step)
    assert re.findall(r"trainer\.max_minutes above (\d+)", capsys.readouterr().out) == ["100"]


def test_a_given_interval_and_warm_up_are_in_steps(simulated):
    given = ("trainer.warmup_steps=50", "trainer.eval_every=70", "lens=off")
    run, _ = simulated(lambda step: 40.0, *LIMITED, *given)
    validations = [row["step"] for row in rows(run.directory) if "val/loss" in row]
    assert validations == [0, 70, 140, run.state.step]
    assert rates(run)[:50] == pytest.approx([(n + 1) / 50 * rates(run)[49] for n in range(50)])


def test_with_patience_validations_are_at_most_one_epoch_apart(simulated):
    run, _ = simulated(lambda step: 40.0, *LIMITED, "trainer.patience=99", "lens=off")
    validations = [row["step"] for row in rows(run.directory) if "val/loss" in row]
    assert validations == [*range(0, run.state.step, 20), run.state.step]


def test_a_run_without_time_for_a_step_is_refused(make_run, tmp_path):
    with refused(ConfigError, "trainer.max_minutes", 0.01, exit_code=2):
        make_run("trainer.max_minutes=0.01")
    assert not (tmp_path / "runs").exists()


def test_the_limit_begins_with_the_process(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "STARTED", time.monotonic() - 10**6)
    arguments = [*TINY, "data.path=text.txt", "trainer.max_minutes=100"]
    (tmp_path / "text.txt").write_text("a text, " * 200)
    code, _, err = in_process(train.main, tmp_path, *arguments)
    assert (code, printed_keys(err)) == (2, ["trainer.max_minutes"])


def test_a_real_run_ends_within_its_limit(in_process, tmp_path, monkeypatch):
    """Everything from its start to its end, with its summary."""
    monkeypatch.setattr(stop, "STARTED", started := time.monotonic())
    monkeypatch.setattr(stop, "EXIT_SECONDS", 1.0)
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = [*TINY, *OPEN, "name=a", "data.path=text.txt", "trainer.max_minutes=0.1"]
    code, _, err = in_process(train.main, tmp_path, *arguments)
    assert (code, err) == (0, "")
    assert 3 < time.monotonic() - started < 6
    run = tmp_path / "runs" / "a"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["planned_steps"] is None
    assert summary["steps"] == rows(run)[-1]["step"] > 20
    assert "val/loss" in rows(run)[-1]
    assert settings_of(run)["trainer"]["max_steps"] is None
    assert read(run, "val/loss").is_finished


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves: clock.now, in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_the_last_step_leaves_time_for_another_step_and_two_validations(clock):
    """Steps of 2 s and a validation of 10 s, of which there is one before the first step."""
    limit = stop.TimeLimit(TWO_MINUTES, CPU, 0.0)
    clock.now = 10.0
    limit.exclude(10)
    while limit.start_step() < 1:
        clock.now += 2
    # A step, its validation, the last step and its validation take 24 s.
    assert clock.now - 2 + 24 <= limit.end < clock.now + 26
    assert limit.end == 120 - limit.end_of_run


class Gpu:
    """A GPU that computes steps later than they are launched."""

    def __init__(self):
        self.now = self.busy_until = 0.0  # in seconds

    def step(self, seconds):
        """Launches a step, which takes no time on the host."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self):
        self.now = max(self.now, self.busy_until)


@pytest.mark.parametrize("every", [1, 10, 10**9])
def test_a_run_on_a_gpu_ends_in_time(monkeypatch, every):
    """Steps of 0.4 s. The program waits every N steps, and if it is five steps ahead."""
    gpu = Gpu()
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: gpu.now))
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    limit, steps = stop.TimeLimit(TWO_MINUTES, torch.device("cuda"), 0.0), 0
    while limit.start_step() < 1:
        gpu.step(0.4)
        steps += 1
        if steps % every == 0:
            gpu.synchronize()
        gpu.now = max(gpu.now, gpu.busy_until - 5 * 0.4)  # the queue of launches is full
    gpu.step(0.4)
    assert limit.end - 4 * 0.4 < gpu.busy_until <= limit.end


def test_compiling_the_model_does_not_end_a_run(clock):
    """The first step takes half of the time, and the others 0.1 s."""
    limit = stop.TimeLimit(TWO_MINUTES, CPU, 0.0, is_compiled=True)
    limit.start_step()
    clock.now = 60.0
    while limit.start_step() < 1:
        clock.now += 0.1
    assert limit.end - 1 < clock.now <= limit.end


def test_a_plan_with_a_time_limit_needs_the_number_of_tokens():
    config = settings(*TINY, "data.path=x", *OPEN, "trainer.max_minutes=2")
    with refused(ConfigError, "tokens"):
        plan.make_plan(config, plan.PlanConfig())
    assert plan.make_plan(config, plan.PlanConfig(tokens=1e6))["tokens"] == 1e6
