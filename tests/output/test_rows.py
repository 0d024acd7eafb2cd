"""Logs, also on a full or failing disk. A limit on the file size causes a real short write."""

import errno
import json
import os
import subprocess
import sys
from unittest.mock import Mock

from helpers import REPOSITORY, TIMEOUT
from helpers.tally import tally

from clearhead.files import RowFile, drop_rows_after, last_values, read_rows

FAULT = "disk full or failing below a log"

# A separate process, because the limit applies to all files of a process. 17 bytes: a short write.
ON_A_FULL_DISK = """
import resource, signal
from pathlib import Path
from clearhead.errors import RunError
from clearhead.files import RowFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = RowFile(Path("run/log.jsonl"))
rows.append({"step": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (17, resource.RLIM_INFINITY))
try:
    rows.append({"step": 1})
except RunError as error:
    print(error.exit_code)
rows.close()
"""


def written(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_on_a_full_disk_a_row_ends_the_run_and_the_rows_before_it_stay(tmp_path):
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
    log = tmp_path / "run" / "log.jsonl"
    assert log.stat().st_size == 17
    assert read_rows(log) == [{"step": 0}]
    tally(FAULT)


def test_sync_calls_fsync_on_the_file_and_its_folder(tmp_path, monkeypatch, capsys):
    """An error of fsync is printed."""
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
    assert len(capsys.readouterr().err.splitlines()) == 3  # close calls it, too
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


def test_the_named_values_and_the_last_ones_are_read(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    start = {"step": 0, "loss": 9.0, "first": 1}
    log = [start, *({"step": n, "loss": 1 / n, "m1": n} for n in (2, 1, 3)), {"step": 4, "m1": []}]
    path.write_text("".join(json.dumps(row) + "\n" for row in log))
    assert read_rows(path) == sorted(log, key=lambda row: row["step"])
    losses = [{"step": n, "loss": loss} for n, loss in ((0, 9.0), (1, 1.0), (2, 0.5), (3, 1 / 3))]
    assert read_rows(path, "loss", "m") == losses
    assert last_values(path) == {"step": 4, "loss": 1 / 3, "m1": []}
    os.truncate(path, 2**35)  # without blocks on the disk
    assert (read_rows(path), last_values(path)) == ([], {})
    assert str(path) in capsys.readouterr().err


def test_damaged_lines_are_skipped_with_one_line(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\nnull\n{"step": -1}\n{"step": 2}\n{"step"')  # is being written
    for _ in range(2):
        assert read_rows(path) == [{"step": 1}, {"step": 2}]
    assert capsys.readouterr().err.count("\n") == 1
