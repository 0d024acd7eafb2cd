"""Makefile: settings that are not part of ARGS are refused."""

import os
import subprocess

import pytest
from helpers import REPOSITORY


def make(*arguments):
    """Runs make without recipes and the variables of a make that runs the tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", *arguments]
    options = {"cwd": REPOSITORY, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, **options)


@pytest.mark.parametrize(
    "others", [["data.path=book.txt"], ["data.path=book.txt", "model=gpt2-nano"]]
)
def test_settings_outside_of_args_are_refused_with_the_right_command(others):
    done = make("train", "ARGS=experiment=book", *others)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    _, _, command = line.partition("make train ")
    command = command.partition('ARGS="')[2].partition('"')[0]
    assert sorted(command.split()) == sorted(["experiment=book", *others])


def test_variables_of_the_makefile_are_accepted():
    settings = "experiment=book data.path=book.txt"
    done = make("train", f"ARGS={settings}", "VENV=my-venv", "PYTHON=my-python")
    assert (done.returncode, done.stderr) == (0, "")
    *_, last = done.stdout.splitlines()
    assert last == f"my-venv/bin/python train.py {settings}"
    assert "my-python -m venv my-venv" in done.stdout
    assert make("campaign", "TEXTS=texts").returncode == 0
