"""Applies the examples of CONTRIBUTING.md to a copy of the repository and runs their commands."""

import re
import shlex
import shutil
import subprocess
import sys

from helpers import REPOSITORY, TIMEOUT

TEXT = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### (Add .*?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
# A code block: a patch, a new file (its path is at the end of the paragraph before), or a command.
BLOCK = re.compile(r"(?:`([^`\n]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "runs", "results", "*.png", "*.webp", "*.ipynb"
)


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


def test_examples(tmp_path):
    """All in one copy; their tests run in one process, because imports take seconds."""
    copy = shutil.copytree(REPOSITORY, tmp_path / "copy", ignore=NOT_COPIED)
    commands, files, names = [], [], []
    for example in EXAMPLES.values():
        for path, language, text in BLOCK.findall(example):
            if language == "diff":
                patch(copy, text)
            elif path:
                (copy / path).write_text(text, encoding="utf-8")
            elif found := re.fullmatch(r"python -m pytest (.+) -k (\w+)\n", text):
                files.append(found[1].split())
                names.append(found[2])
            else:
                commands.append(shlex.split(text))
    every = [file for of_example in files for file in of_example]
    tests = ["python", "-m", "pytest", "-rp", *every, "-k", " or ".join(names)]
    for program, *arguments in [tests, *commands]:
        assert program == "python"
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        if arguments == tests[1:]:
            passed = re.findall(r"^PASSED (\S+)::(.+)", done.stdout, re.M)
            for of_example, name in zip(files, names, strict=True):
                assert any(file in of_example and name in test for file, test in passed), name
    assert len(EXAMPLES) == len(files) + len(commands) == 6
