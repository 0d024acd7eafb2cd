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
# A code block: a patch, a new file (its path is at the end of the paragraph before), or commands.
BLOCK = re.compile(r"(?:`([^`\n]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "runs", "results", "*.png", "*.webp", "*.ipynb"
)
# Each line of stdin is (folder, arguments of python). Runs it in a fork, because the imports of
# other projects take seconds, and prints its exit code.
RUNNER = """
import json, os, runpy, sys
import hydra.main, hypothesis, matplotlib.figure, pyarrow.parquet, pytest, safetensors.torch, torch

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        folder, *words = json.loads(line)
        os.chdir(folder)
        os.dup2(2, 1)
        run = runpy.run_path if words[0] != "-m" else runpy.run_module
        sys.argv = words[words[0] == "-m":]
        sys.path[0] = folder
        run(sys.argv[0], run_name="__main__")
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


def patch(folder, text):
    """Replaces the lines of each hunk that start with a space or a minus, which must occur once, by
    those that start with a space or a plus."""
    for name, hunks in re.findall(r"^--- (\S+)\n@@\n(.*?)(?=^--- |\Z)", text, re.DOTALL | re.M):
        code = (folder / name).read_text(encoding="utf-8")
        for hunk in hunks.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(x[1:] for x in lines if x[0] in signs) for signs in (" -", " +"))
            assert code.count(old) == 1, (name, old)
            code = code.replace(old, new)
        (folder / name).write_text(code, encoding="utf-8")


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title, tmp_path, python):
    copy = shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=NOT_COPIED)
    commands = 0
    for path, language, text in BLOCK.findall(EXAMPLES[title]):
        if language == "diff":
            patch(copy, text)
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
