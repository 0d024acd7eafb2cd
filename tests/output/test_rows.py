"""Logs on a full or failing disk. A limit on the file size causes real short writes."""

import errno
import json
import os
import subprocess
import sys
from unittest.mock import Mock

from helpers import REPOSITORY, TIMEOUT
from helpers.tally import CAMPAIGN, tally

from clearhead.files import last_values, read_rows
from clearhead.output.jsonl import RowFile, drop_rows_after

FAULT = "disk full or failing below a log"
TRIALS = 2000 if CAMPAIGN else 50

# A separate process, because the limit applies to all files of a process.
ON_A_FULL_DISK = """
import json, random, resource, sys
from pathlib import Path
from clearhead.output.jsonl import RowFile

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

seed, trials = int(sys.argv[1]), int(sys.argv[2])
for trial in range(trials):
    chance, path = random.Random(seed + trial), Path(f"{trial}.jsonl")
    rows = RowFile(path)
    failures = 0
    for step in range(30):
        size = path.stat().st_size if path.exists() else 0
        room(chance.choice([size + chance.randrange(60), resource.RLIM_INFINITY]))
        rows.append({"step": step, "text": "é" * chance.randrange(20)})
        content = path.read_bytes() if path.exists() else b""
        complete = content.split(b"\\n")[:-1]  # readers skip a truncated last row
        steps = [json.loads(line)["step"] for line in complete]
        assert steps == list(range(len(steps))), steps
        failures += len(steps) <= step
    room(resource.RLIM_INFINITY)
    rows.close()
    assert [json.loads(line)["step"] for line in open(path)] == list(range(30))
    print(failures)

rows = RowFile(Path("log.jsonl"))
rows.append({"step": 0})
room(17)
for step in range(1, 4):
    rows.append({"step": step})
rows.close()
"""


def written(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_on_a_full_disk_every_row_is_written_once_completely_and_in_order(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, "1", str(TRIALS)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    failures = [int(number) for number in done.stdout.split()]
    assert sum(failures) > TRIALS
    *lines, _, lost = done.stderr.splitlines()
    assert len(lines) == sum(map(bool, failures))
    assert "3" in lost.split()  # the number of lost rows
    assert read_rows(tmp_path / "log.jsonl") == [{"step": 0}]
    tally(FAULT, sum(failures) + 1)


def test_rows_wait_for_a_file_that_cannot_be_opened_yet(tmp_path, capsys):
    path = tmp_path / "later" / "log.jsonl"
    rows = RowFile(path)
    rows.append({"step": 1})
    path.parent.mkdir()
    path.write_bytes(b'{"step": 0}\n')
    rows.append({"step": 2})
    rows.close()
    assert written(path) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert len(capsys.readouterr().err.splitlines()) == 1
    tally(FAULT)


def test_sync_calls_fsync_on_the_file_and_its_folder(tmp_path, monkeypatch, capsys):
    """An error of fsync is printed once."""
    synced, real = [], os.fsync

    def fsync(number):
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "log.jsonl"
    rows = RowFile(path)
    rows.append({"step": 1})
    rows.sync()
    assert synced == [str(path), str(tmp_path)]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "failing")))
    more = [{"step": step, "text": "é\u2028\x85a\nb\udcff"} for step in (2, 3)]
    for row in more:
        rows.append(row)
        rows.sync()
    rows.close()
    assert written(path) == [{"step": 1}, *more]
    assert len(capsys.readouterr().err.splitlines()) == 1
    tally(FAULT)


def test_rows_after_a_step_are_dropped(tmp_path):
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    damage = b'null\n[1]\n{"step": "a"}\n\xff\xfe\n' + b"[" * 200_000 + b"\n"
    metrics.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 2}\n{"step": 3}\n{"st\x00\x00')
    samples.write_text(text := '{"step": 1, "text": "a\u2028b\x85c"}\n')
    drop_rows_after(tmp_path, 2)
    assert metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert samples.read_text() == text
    assert sorted(tmp_path.iterdir()) == [metrics, samples]
    drop_rows_after(tmp_path, -1)
    assert metrics.read_bytes() == samples.read_bytes() == b""


def test_of_a_log_with_many_values_the_named_ones_are_read(tmp_path, monkeypatch, capsys):
    path, more = tmp_path / "log.jsonl", {f"m{n}": n for n in range(9)}
    start = {"step": 0, "loss": 9.0, "first": 1}
    log = [start, *({"step": n, "loss": 1 / n} | more for n in (2, 1, 3)), {"step": 4, "m1": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in log))
    assert read_rows(path) == sorted(log, key=lambda row: row["step"])
    monkeypatch.setattr("clearhead.files.MAX_ITEMS", 30)
    assert read_rows(path) == []
    assert str(path) in capsys.readouterr().err
    losses = [{"step": n, "loss": loss} for n, loss in ((0, 9.0), (1, 1.0), (2, 0.5), (3, 1 / 3))]
    assert read_rows(path, "loss", "m") == losses
    assert last_values(path) == {"step": 4, "loss": 1 / 3} | more | {"m1": []}
