"""The lines that a run prints before its first step."""

import pytest
from helpers import TEXT

from data import load_datasets


@pytest.mark.parametrize("path", ["*.txt", "[text.txt,folder]", "folder", "folder/b\nc\x1b.txt"])
def test_the_line_of_the_training_data_has_the_path_and_the_windows(
    make_run, tmp_path, capsys, path
):
    """data.path as given, in one line."""
    (tmp_path / "folder").mkdir()
    for name in ("folder/a.txt", "folder/b\nc\x1b.txt"):
        (tmp_path / name).write_text(TEXT)
    value = f"'{path}'" if "\n" in path else path
    run = make_run(f"data.path={value}", "name=a")
    out = capsys.readouterr().out
    windows = len(load_datasets(run.config.data, run.evaluator.tokenizer).train)
    shown = path.strip("[]").replace("\n", "\\n").replace("\x1b", "\\x1b")
    parts = [f"{windows:,} windows", *shown.split(",")]
    assert len([line for line in out.splitlines() if all(part in line for part in parts)]) == 1
    assert "\x1b" not in out


def test_a_path_in_the_working_directory_is_relative(make_run, tmp_path, capsys):
    make_run("name=a")  # data.path is absolute
    assert " text.txt" in capsys.readouterr().out


def test_generated_data_have_no_path(make_run, capsys):
    run = make_run("data=induction", "data.path=null", "name=a")
    out = capsys.readouterr().out
    windows = len(load_datasets(run.config.data, run.evaluator.tokenizer).train)
    (line,) = [line for line in out.splitlines() if f" {windows:,} windows" in line]
    assert "None" not in line
    assert "null" not in line
