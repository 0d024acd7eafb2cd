"""fit(build_run(...)) in a process that belongs to the user: interrupts, closed runs, and a process
that is afterwards as it was before."""

import ast
import contextlib
import json
import os
import re
import signal
from unittest.mock import Mock

import pytest
import torch
from helpers.refusals import refused
from helpers.runs import rows

from clearhead.checkpoint import listing
from clearhead.errors import RunDirectoryError, RunError
from clearhead.parallel import device
from clearhead.run.signals import STOP_SIGNALS, StopSignals
from train import fit


def during_step(run, step: int, action) -> None:
    """Calls action() while this step is computed."""
    update = run.strategy.update

    def act(*arguments):
        if run.state.step == step - 1:
            action()
        return update(*arguments)

    run.strategy.update = act


def test_an_interrupt_saves_the_step_and_leaves_the_handlers(make_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py"])
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    run = make_run('name="a,1"', "trainer.save_every=0", "trainer.eval_every=0")
    during_step(run, 2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(run)
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert listing.newest_step(run.directory) == rows(run.directory)[-1]["step"] == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    (overrides,) = re.findall(r"fit\(build_run\(compose\((.*)\)\)\)", printed)
    continued = make_run("trainer.device=cpu", *ast.literal_eval(overrides), tiny=False)
    assert continued.state.step == 2
    fit(continued)
    assert rows(run.directory)[-1]["step"] == 4


def test_a_closed_terminal_stops_the_command_unless_the_signal_is_ignored(monkeypatch):
    """nohup ignores it. stderr cannot be written after the terminal was closed."""
    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError))
    try:
        for handler, received in [(signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)]:
            signal.signal(signal.SIGHUP, handler)
            signals = StopSignals()
            with contextlib.suppress(SystemExit), signals:
                signals.start_training()
                signal.raise_signal(signal.SIGHUP)
            assert signals.received == received
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_ends_at_once(make_run):
    run = make_run("name=a", "trainer.save_every=0", "trainer.eval_every=0")

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    during_step(run, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        fit(run)
    assert (run.state.step, listing.newest_step(run.directory)) == (1, 0)


def test_a_run_is_trained_once_and_its_directory_is_free_after_it_is_closed(make_run):
    from clearhead.run.build import build_run

    run = make_run("name=a")
    config = run.config
    with refused(RunDirectoryError, "name", "a", exit_code=2):
        build_run(config)
    run.close()
    with build_run(config) as again:
        fit(again)
    with refused(RunError, "name", "a", exit_code=4):
        fit(again)


def test_a_closed_run_leaves_the_process_as_it_was(make_run, monkeypatch):
    """Random numbers, threads, the environment, and whether errors of the compiler are raised."""
    monkeypatch.setattr(device, "should_compile", lambda *_: True)

    def state():
        suppressed = torch._dynamo.config.suppress_errors
        variables = {
            key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"
        }
        return torch.get_num_threads(), suppressed, variables, torch.get_rng_state().tolist()

    torch.manual_seed(7)
    before = state()
    run = make_run("trainer.compile=auto", "trainer.threads=2")
    assert torch._dynamo.config.suppress_errors
    run.close()
    assert state() == before


def test_fit_returns_the_contents_of_summary_json(make_run, monkeypatch):
    run = make_run("name=a")
    summary = fit(run)
    assert summary == json.loads((run.directory / "summary.json").read_text())
    assert (summary["steps"], summary["val/loss"]) == (4, run.state.val_loss)
    assert fit(make_run("name=a")) == summary  # it was finished before
    monkeypatch.setattr("clearhead.output.summary.atomic_write", Mock(side_effect=OSError))
    with pytest.raises(RunError):
        fit(make_run("name=a", "trainer.max_steps=5"))
