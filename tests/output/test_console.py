"""The output of a run, in a file and on a terminal."""

import io
import itertools
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY, TIMEOUT

from clearhead.output import console as console_file
from clearhead.output.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def print_some(console):
    console.step(1, 2.0, 1e-3, 10.0)
    console.print("a [red]line\x1b[31m")
    console.close()


def test_a_file_has_plain_lines_whatever_the_environment_variables(monkeypatch, capsys):
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(variable, "1")
        print_some(Console(True, 0, 10))
        step, line = capsys.readouterr().out.splitlines()
        assert step.split()[1::2][:3] == ["1/10", "2.0000", "1.00e-03"]
        assert line == "a [red]line\\x1b[31m"
        monkeypatch.delenv(variable)
    Console(False, 0, 10).print("a line")  # on another rank
    assert capsys.readouterr().out == ""


def test_a_command_in_a_notebook_has_plain_lines(monkeypatch):
    """The stdout of `!python train.py` is a terminal, but a notebook keeps each redraw of a bar."""
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    for variable, value in (("JPY_PARENT_PID", "1"), ("FORCE_COLOR", "1"), ("TERM", "xterm-color")):
        monkeypatch.setenv(variable, value)  # as Jupyter sets them
    print_some(Console(True, 0, 10))
    assert len(terminal.getvalue().splitlines()) == 2
    assert "\x1b" not in terminal.getvalue()


WITHOUT_BAR = [("TERM", "dumb", True), ("TERM", "unknown", True), ("COLUMNS", "0", False)]


@pytest.mark.parametrize(("variable", "value", "is_terminal"), WITHOUT_BAR)
def test_lines_are_printed_whatever_the_terminal_can_do(monkeypatch, variable, value, is_terminal):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv(variable, value)
    print_some(Console(True, 0, 10))
    assert len(stream.getvalue().splitlines()) == 2
    assert "2.0000" in stream.getvalue()


def test_a_terminal_has_lines_and_a_bar_that_is_cleared(monkeypatch):
    """Also lines of validations and samples."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    console = Console(True, 0, 10)
    console.validation(0, {"val/loss": 1.25})
    console.sample({"step": 0, "text": "a\ntext"})
    print_some(console)
    shown = terminal.getvalue()
    assert "1.2500" in shown
    assert "a text" in shown
    assert "10%" in shown
    assert "a [red]line\\x1b[31m" in shown
    assert "\x1b[31m" not in shown
    assert shown.endswith("\x1b[2K")  # clears the line


def test_the_time_left_is_estimated_from_the_last_lines(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console_file.time, "monotonic", lambda: now[0])
    shown = Console(is_rank_0=True, first_step=0, max_steps=100)
    for step, seconds in [(1, 3600), (2, 60), *((n, 1) for n in range(3, 43))]:
        now[0] += seconds
        shown.step(step, 1.0, 1e-3, 100.0)
    lines = capsys.readouterr().out.splitlines()
    assert "left" not in lines[0]  # the first step takes longer than the others
    last = int(lines[-1].split("/")[0].split()[-1])
    assert console_file.duration(100 - last) in lines[-1]


@pytest.mark.parametrize("max_steps", [1, 199, 5001, 10**6])
@pytest.mark.parametrize("log_every", [1, 7])
def test_a_long_run_has_few_lines_in_a_file(capsys, max_steps, log_every):
    """The first one is that of the first logged step; the others are at about equal distances."""
    steps = [*range(log_every, max_steps, max(log_every, max_steps // 5000)), max_steps]
    shown = Console(True, 0, max_steps)
    for step in steps:
        shown.step(step, 1.0, 1e-3, 100.0)
    shown.close()
    lines = capsys.readouterr().out.splitlines()
    printed = [int(line.split("/")[0].split()[-1]) for line in lines]
    assert min(len(steps), 9) <= len(printed) <= 12
    assert printed[0] == steps[0]
    distances = [b - a for a, b in itertools.pairwise([0, *printed, max_steps])]
    assert max(distances) <= 0.11 * max_steps + 14


@pytest.mark.parametrize("every", [100, 200, 400])
def test_in_a_file_each_validation_has_one_line_with_the_training_metrics(
    monkeypatch, capsys, every
):
    """Also a validation before the first step. Samples are not printed."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    shown = Console(True, 0, 2000)
    shown.validation(0, {"val/loss": 5.5})
    for step in range(20, 2001, 20):
        shown.step(step, 2.125, 1e-3, 1234.0)
        if step % every == 0:
            shown.validation(step, {"val/loss": 1.25, "val/accuracy": 0.5})
            shown.sample({"step": step, "text": "a text"})
    shown.close()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {int(step.split("/")[0]): rest for _, step, *rest in lines}
    assert len(found) == len(lines)
    validations = [*range(every, 2001, every)]
    assert [step for step, rest in found.items() if "validation" in rest] == [0, *validations]
    assert all({"2.1250", "1.2500", "0.50", "1,234"} <= {*found[step]} for step in validations)
    assert len(found) <= 2 + len(validations) + (5 if every == 400 else 0)
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # in a notebook
    shown.sample({"step": 20, "text": "a\ntext"})
    assert "a text" in capsys.readouterr().out


def test_progress_of_scripts_is_a_bar_or_lines_now_and_then(monkeypatch, capsys):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    now = [0.0]
    monkeypatch.setattr(console_file.time, "monotonic", lambda: now[0])

    def work():
        with console_file.progress("windows") as report:
            for done in range(1, 101):
                now[0] += 1
                report(done, 100)

    work()
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 9)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    work()
    assert "100/100" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")
    assert capsys.readouterr().out == ""


TWO_STEPS = """
import sys
from clearhead.output import console
from clearhead.errors import never_fail
never_fail()
shown = console.Console(True, 0, 2)
for step in (1, 2):
    shown.step(step, 2.0, 1e-3, 10.0)
    print("a warning", file=sys.stderr)
shown.close()
"""
# A redirection in bash -> the number of lines on stdout and on stderr. 9: a pipe without a reader.
NOT_WRITTEN = {">/dev/full": (0, 2), ">&9": (0, 2), ">&-": (0, 2)}
NOT_WRITTEN |= {"2>/dev/full": (2, 0), "2>&-": (2, 0)}


def test_a_stream_that_cannot_be_written_does_not_end_training():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb"):  # closes the writer
        for redirect, lines in NOT_WRITTEN.items():
            done = subprocess.run(
                ["bash", "-c", f'"$0" -c "$1" 9>&{writer} {redirect}', sys.executable, TWO_STEPS],
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
                pass_fds=[writer],
                capture_output=True,
                timeout=TIMEOUT,
            )
            found = tuple(len(out.splitlines()) for out in (done.stdout, done.stderr))
            assert (done.returncode, found) == (0, lines), redirect
