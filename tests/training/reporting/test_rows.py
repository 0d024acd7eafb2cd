"""Logs stay whole on a disk that is full or fails: real short writes, by a limit on file sizes."""

import errno
import json
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY
from helpers.tally import tally

from training.rows import RowFile, drop_rows_after

FAULT = "disk full or failing below a log"
TRIALS = 2000 if os.environ.get("CAMPAIGN") else 100

# A process of its own, since the limit holds for all files of a process. At the limit the system
# writes what still fits, half a row maybe, and fails the next write.
ON_A_FULL_DISK = """
import random, resource, sys
from pathlib import Path
from training.rows import RowFile

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

seed, trials = int(sys.argv[1]), int(sys.argv[2])
for trial in range(trials):
    chance, path = random.Random(seed + trial), Path(f"{trial}.jsonl")
    rows = RowFile(path)
    failures = 0
    for step in range(30):
        size = path.stat().st_size if path.exists() else 0
        if chance.random() < 0.5:
            room(size + chance.randrange(60))
        else:
            room(resource.RLIM_INFINITY)
        rows.append({"step": step, "text": "é" * chance.randrange(20)})
        content = path.read_bytes() if path.exists() else b""
        steps = [int(line.split(b",")[0][9:]) for line in content.splitlines()]
        assert not content or content.endswith(b"}\\n"), content
        assert steps == list(range(len(steps))), steps
        assert len(steps) + len(rows.waiting) == step + 1
        failures += bool(rows.waiting)
    room(resource.RLIM_INFINITY)
    rows.close()
    assert len(path.read_bytes().splitlines()) == 30
    print(failures)
"""


def run(folder, script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def written(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_row_once_in_order_and_whole_whenever_the_disk_is_full(tmp_path):
    done = run(tmp_path, ON_A_FULL_DISK, 1, TRIALS)
    assert done.returncode == 0, done.stderr
    failures = [int(number) for number in done.stdout.split()]
    assert sum(failures) > TRIALS
    tally(FAULT, sum(failures))
    lines = done.stderr.splitlines()
    assert len(lines) == sum(map(bool, failures))  # said once for each file
    assert lines[0].partition(".jsonl")[2] == (
        ": not written (File too large); training goes on, its rows wait in memory for another try"
    )


def test_what_never_gets_written_is_counted(tmp_path):
    tally(FAULT)
    script = """
import resource
from pathlib import Path
from training.rows import RowFile

rows = RowFile(Path("log.jsonl"))
rows.append({"step": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (17, resource.RLIM_INFINITY))
for step in range(1, 4):
    rows.append({"step": step})
rows.sync()
rows.close()
rows.close()
"""
    done = run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()
    assert first.startswith("log.jsonl: not written (File too large)")
    assert last == "log.jsonl: 3 rows could not be written and are lost"
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 0}\n'


def test_a_file_that_cannot_be_opened_yet(tmp_path, capsys):
    tally(FAULT)
    rows = RowFile(tmp_path / "later" / "log.jsonl")
    rows.append({"step": 1})
    (tmp_path / "later").mkdir()
    rows.append({"step": 2})
    rows.close()
    assert written(tmp_path / "later" / "log.jsonl") == [{"step": 1}, {"step": 2}]
    (line,) = capsys.readouterr().err.splitlines()
    assert "log.jsonl: not written (No such file or directory); training goes on" in line


def test_half_a_row_of_a_run_that_was_cut_off_is_cut_away(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    rows = RowFile(path)
    rows.append({"step": 2})
    rows.close()
    assert written(path) == [{"step": 1}, {"step": 2}]


def test_a_disk_that_fails_to_keep_is_told_once(tmp_path, capsys, monkeypatch):
    tally(FAULT)

    def failing(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    rows = RowFile(tmp_path / "log.jsonl")
    rows.append({"step": 1})
    monkeypatch.setattr(os, "fsync", failing)
    rows.sync()
    rows.append({"step": 2})
    rows.sync()
    rows.close()
    assert written(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "not written (Input/output error); its last rows may be lost when the machine fails"
    )


def test_sync_hands_the_file_and_once_its_folder_to_the_disk(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(number):
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "log.jsonl"
    rows = RowFile(path)
    rows.sync()
    assert synced == []
    assert not path.exists()  # made by the first row
    rows.append({"step": 1})
    rows.sync()
    rows.sync()
    assert synced == [str(path), str(tmp_path), str(path)]
    rows.close()


@pytest.mark.parametrize("text", ["é\u2028\x85", "a\nb", "\udcff"])
def test_any_text_is_one_row(tmp_path, text):
    rows = RowFile(tmp_path / "log.jsonl")
    rows.append({"text": text})
    rows.close()
    (line,) = (tmp_path / "log.jsonl").read_bytes().splitlines()
    assert json.loads(line) == {"text": text}


def test_dropping_rows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    drop_rows_after(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "a\u2028b\x85c"}\n')
    drop_rows_after(tmp_path, 2)
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "text": "a\u2028b\x85c"}\n'
    drop_rows_after(tmp_path, -1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rows_that_the_machine_took_down_with_it_are_dropped_whatever_they_look_like(tmp_path):
    """After a loss of power a file may end in zeros, or in what another file held."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnull\n[1]\n{"step": "a"}\n\xff\xfe\n{"step": 2}\n\x00\x00')
    drop_rows_after(tmp_path, 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_dropping_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before := b'{"step": 1}\n{"step": 2}\n')

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        drop_rows_after(tmp_path, 1)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    drop_rows_after(tmp_path, 2)  # nothing to drop, nothing to write
