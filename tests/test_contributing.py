"""Applies the examples of CONTRIBUTING.md to a copy of the repository and runs their commands."""

import json
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
# Each line of stdin is (folder, arguments of python). Runs it in a fork, because the imports of
# other projects take seconds, and prints its exit code.
RUNNER = """
import json, os, runpy, sys
import hydra.main, hypothesis, matplotlib.figure, pydantic, pytest, safetensors.torch, torch

def run(folder, name, *arguments):
    os.chdir(folder)
    os.dup2(2, 1)
    module = arguments[0] if name == "-m" else ""
    sys.argv = [name, *arguments[bool(module):]]
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        run(*json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def python():
    """python(folder, *arguments) -> the exit code of this command in the folder."""
    command = [sys.executable, "-c", RUNNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as runner:

        def run(*line: str) -> int:
            runner.stdin.write(json.dumps(line) + "\n")
            runner.stdin.flush()
            return int(runner.stdout.readline())

        yield run
        runner.stdin.close()


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title, tmp_path, python):
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
                assert python(str(copy), *arguments) == 0, line
                commands += 1
    assert commands


def test_there_are_five_examples():
    assert len(EXAMPLES) == 5
