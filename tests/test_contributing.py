"""Applies the examples of CONTRIBUTING.md to a copy of the repository and runs their commands."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import REPOSITORY

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### (Add .*?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
# A code block: a new file (its path is in the line before), a patch, or commands.
BLOCK = re.compile(r"(?:^`([^`\n]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "runs", "results", "*.png", "*.webp", "*.ipynb"
)


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title, tmp_path):
    copy = shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=NOT_COPIED)
    commands = 0
    for path, language, text in BLOCK.findall(EXAMPLES[title]):
        if language == "diff":
            patch = ["git", "apply", "--recount", "-C1"]
            subprocess.run(patch, cwd=copy, input=text, text=True, check=True)
        elif path:
            (copy / path).write_text(text, encoding="utf-8")
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "python"
                subprocess.run([sys.executable, *arguments], cwd=copy, check=True)
                commands += 1
    assert commands


def test_there_are_five_examples():
    assert len(EXAMPLES) == 5
