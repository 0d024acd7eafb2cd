"""The lines that a run prints before its first step."""

import shlex

import pytest
from helpers import TEXT, TINY

import train
from data import load_datasets
from scripts.live import LiveConfig


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


@pytest.mark.parametrize("folder", ["runs", "my runs"])
def test_a_run_with_the_lens_prints_the_command_that_shows_it(
    in_process, tmp_path, text_file, folder
):
    short = [*TINY, f"data.path={text_file}", f"runs_dir='{folder}'", "lens=often"]
    for more, count in ((["name=a"], 1), (["name=b", "lens=off"], 0), (["seed=1", "-m"], 0)):
        code, out, err = in_process(train.main, tmp_path, *short, *more)
        assert code == 0, err
        commands = [line for line in out.splitlines() if "scripts.live" in line]
        assert len(commands) == count
        if count:
            words = shlex.split(commands[0].partition("python -m scripts.live")[2])
            settings = LiveConfig(**dict(word.split("=", 1) for word in words))
            assert settings.runs_dir == folder
