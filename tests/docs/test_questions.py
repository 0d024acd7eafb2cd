"""The programs of docs/questions.md print what it shows; the names in its glossary exist."""

import re

import pytest
from helpers import REPOSITORY

PAGE = REPOSITORY / "docs" / "questions.md"
QUESTIONS, GLOSSARY = PAGE.read_text(encoding="utf-8").split("\n## Glossary\n")
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", QUESTIONS, re.MULTILINE))


@pytest.mark.parametrize("question", SECTIONS)
def test_programs_print_the_output_shown(question, capsys, monkeypatch):
    """The output is in the comment lines at the end of a program."""
    monkeypatch.chdir(REPOSITORY)
    (program,) = re.findall(r"```python\n(.*?)```", SECTIONS[question], re.DOTALL)
    shown = re.search(r"(?:^# .*\n)+\Z", program, re.MULTILINE)
    assert shown, "no output is shown"
    exec(program, {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line.removeprefix("# ") for line in shown[0].splitlines()]


def test_names_in_the_glossary_are_in_the_files_next_to_them():
    """A row is | term | `name`, `name` in [file](path) | meaning |; no name, no file: —."""
    rows = re.findall(r"^\| (\*\*.+?) \| (.*?) \| (.+) \|$", GLOSSARY, re.MULTILINE)
    assert len(rows) >= 40
    for term, where, _ in rows:
        names, files = re.findall(r"`(.+?)`", where), re.findall(r"\]\((.+?)\)", where)
        code = "".join((PAGE.parent / file).read_text(encoding="utf-8") for file in files)
        for name in names:
            assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code), (term, name)
