"""Breaks the code on purpose, one way after the other, and looks whether a test turns red.

    python tests/mutations.py [NAME ...]

Each mutation is a change of text in a copy of the repository, in a temporary folder; the tests
that are to notice are run there, first as all is, when they have to pass. Ends with 1 when a
mutation went unnoticed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FAULTS, INSIDE = "tests/test_faults.py", "inside_saving and three"
# name: (file, what is there, what is put in its place, the tests to run, those of them)
MUTATIONS = {
    "files are not handed to the disk": (
        "durable.py",
        "    number = os.open(path, os.O_RDONLY)\n    try:\n        os.fsync(number)\n",
        "    number = os.open(path, os.O_RDONLY)\n    try:\n        pass\n",
        FAULTS,
        f"{INSIDE} and power",
    ),
    "a checkpoint is written under its final name": (
        "training/saving.py",
        'part = folder.with_name(folder.name + ".part")',
        "part = folder",
        FAULTS,
        f"{INSIDE} and crash",
    ),
    "the older checkpoint goes before the newer is there": (
        "training/saving.py",
        "        try:\n            self._write(folder, tensors, state)\n",
        "        try:\n            self.keep = 0\n            self._prune(None)\n"
        "            self._write(folder, tensors, state)\n",
        FAULTS,
        f"{INSIDE} and crash",
    ),
    "dropout is not seeded anew at each step": (
        "training/parallel.py",
        "torch.manual_seed(int(mixed[0]))",
        "pass",
        FAULTS,
        "killed",
    ),
    "no step is ever left out": (
        "training/guard.py",
        "        return leave_out\n",
        "        return torch.zeros_like(leave_out)\n",
        FAULTS,
        "changes_nothing_and_is_counted",
    ),
    "a resumed run begins with the data of step 0": (
        "training/feed.py",
        "self.order.windows(step, ",
        "self.order.windows(step - self.__dict__.setdefault('first', step), ",
        FAULTS,
        "killed",
    ),
    "moments are not loaded": (
        "train.py",
        "        checkpoint.load_optimizer(",
        "        (lambda *_: None)(",
        FAULTS,
        "killed",
    ),
    "rows of the log are not cut back": (
        "train.py",
        "                drop_rows_after(folder, state.step if self.saved else -1)\n",
        "",
        FAULTS,
        "killed",
    ),
    "checksums are not compared": (
        "training/checkpoint.py",
        "return checksum(folder / name) != sums[name]",
        "return False",
        "tests/test_faults_damage.py",
        "checkpoint",
    ),
    "a manifest's checksums are not compared": (
        "tokens/shards.py",
        "if self.entry and checksum != self.entry.sha256[block]:",
        "if False:",
        "tests/test_faults_damage.py",
        "token_file",
    ),
    "nobody holds the lock": (
        "durable.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        FAULTS,
        "one_run_at_a_time",
    ),
    "a stop saves nothing": (
        "train.py",
        "        self.save()\n        self.finish_saving()\n        self.console.close()\n",
        "        self.console.close()\n",
        FAULTS,
        "told_to_stop_saves",
    ),
    "a checkpoint that is not written ends the run": (
        "training/saving.py",
        "            return self._not_saved(step, error)",
        "            raise self._not_saved(step, error)",
        FAULTS,
        "short_of_disk",
    ),
}


def red_test(tests: str, chosen: str, change: tuple[str, str, str] | None = None) -> str | None:
    """The test that turns red, None when none does. change: (file, what is there, what then)."""
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
        shutil.copytree(REPOSITORY, copy, ignore=left_out)
        if change:
            file, before, after = change
            text = (copy / file).read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{file} has changed; bring this list up to date"
            (copy / file).write_text(text.replace(before, after), encoding="utf-8")
        tried = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", tests, "-k", chosen],
            cwd=copy,
            env=os.environ | {"TMPDIR": home},
            capture_output=True,
            text=True,
        )
    assert tried.returncode in (0, 1), tried.stdout + tried.stderr
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", tried.stdout, re.MULTILINE)
    return found and found[1]


def main() -> None:
    unnoticed, green = [], set()
    for name in sys.argv[1:] or MUTATIONS:
        *change, tests, chosen = MUTATIONS[name]
        if (tests, chosen) not in green:
            assert (red := red_test(tests, chosen)) is None, f"{red} is red as it is"
            green.add((tests, chosen))
        red = red_test(tests, chosen, tuple(change))
        print(f"{name}: {red or 'UNNOTICED'}", flush=True)
        unnoticed += [] if red else [name]
    sys.exit(f"{len(unnoticed)} unnoticed" if unnoticed else 0)


if __name__ == "__main__":
    main()
