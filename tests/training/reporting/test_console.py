"""What a person sees while training, in a file and on a terminal."""

import io

import pytest

from training import console as console_file
from training.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said(console):
    console.step(1, 2.0, 1e-3, 10.0)
    console.print("a [red]line\x1b[31m")
    console.close()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_file_has_plain_lines_whatever_the_environment_says(monkeypatch, capsys, variable):
    monkeypatch.setenv(variable, "1")
    said(Console(True, 0, 10))
    step, line = capsys.readouterr().out.splitlines()
    assert step.startswith("step  1/10  loss 2.0000  lr 1.00e-03  10 tok/s  0:00")
    assert line == "a [red]line\\x1b[31m"


def test_a_terminal_has_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    said(Console(True, 0, 10))
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert "10%" in shown
    assert "a [red]line\\x1b[31m" in shown
    assert "\x1b[31m" not in shown
    assert shown.endswith("\x1b[2K")  # the bar's line is cleared


def test_the_other_ranks_say_nothing(capsys):
    Console(False, 0, 10).print("a line")
    assert capsys.readouterr().out == ""


def test_the_time_left_goes_by_the_last_lines(monkeypatch, capsys):
    """A first hour of other work on the machine does not count for ever."""
    now = [0.0]
    monkeypatch.setattr(console_file.time, "monotonic", lambda: now[0])
    shown = Console(is_main=True, first_step=0, max_steps=1000)
    for step, seconds in [(1, 3600), *((n, 1) for n in range(2, 40))]:
        now[0] += seconds
        shown.step(step, 1.0, 1e-3, 100.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"{console_file.duration(999 * 3600)} left")
    assert lines[-1].endswith(f"{console_file.duration(1000 - 39)} left")
