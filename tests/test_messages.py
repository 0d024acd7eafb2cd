"""How errors are printed: a line `key=value: reason; hint` for each problem, without control
characters or secrets. Other tests check keys, types and exit codes."""

import copy

import pytest

from clearhead import errors
from clearhead.config import compose
from clearhead.config.command_line import errors_in_one_line


def test_control_characters_are_escaped_and_secrets_are_not_shown():
    with pytest.raises(errors.ConfigError) as caught:
        compose(["name='a\x1b[31m\nb\u202e'", "+wandb.api_key=s3cret"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("name=a\\x1b[31m\\nb\\u202e: ")
    assert lines[1].startswith("wandb.api_key=(not shown): ")


def test_long_values_are_shortened():
    with pytest.raises(errors.ConfigError) as caught:
        compose(["name=" + "b" * 5000])
    assert len(str(caught.value)) < 1000


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
