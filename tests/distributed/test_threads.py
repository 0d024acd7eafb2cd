"""The number of threads: trainer.threads, and the note when there are fewer free cores."""

import json
import os
import re

import pytest
import torch

from clearhead.distributed import threads
from clearhead.distributed.threads import (
    ThreadCheck,
    available_cores,
    busy_seconds,
    thread_note,
)
from train import fit

CORES = len(os.sched_getaffinity(0))


def suggestion(text: str) -> int:
    return int(re.search(r"trainer\.threads=(\d+)", text)[1])


@pytest.mark.parametrize(
    ("numbers", "suggested"),
    [
        ((2, 2, 0.0), None),
        ((2, 2, 0.4), None),
        ((2, 2, 0.6), 1),
        ((1, 2, 2.0), None),  # one thread is the least
        ((2, 2, 2.5), 1),
        ((8, 64, 50.0), None),
        ((16, 64, 52.0), 12),
        ((64, 3.5, 0.0), 4),  # a container with a quota
        ((2, 2, 0.0, 2), 1),
        ((4, 16, 0.0, 4), None),
    ],
)
def test_the_note_suggests_as_many_threads_as_free_cores(numbers, suggested):
    note = thread_note(*numbers)
    assert (note is None) == (suggested is None)
    assert suggested is None or suggestion(note) == suggested


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, CORES), ("max 100000\n", CORES), ("50000 100000\n", 0.5), ("?", CORES)],
)
def test_quota_of_the_container(tmp_path, monkeypatch, quota, expected):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(threads, "QUOTA", file)
    assert available_cores() == expected


def stat(user: int, nice: int = 0, idle: int = 0) -> str:
    """Returns a text as in /proc/stat, in ticks, with the same times of each core."""
    times = f"{user} {nice} 0 {idle} {idle} 0 0 0 0 0\n"
    return "".join(f"cpu{name} {times}" for name in ("", *range(CORES + 1))) + "intr 1 2\n"


def test_busy_time_is_that_of_the_own_cores():
    """Time of processes of low priority does not count."""
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(stat(3 * ticks, 5 * ticks, 7 * ticks), {0}) == 3
    assert busy_seconds(stat(3 * ticks), {0, 1}) == 6


def test_use_by_other_processes_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "stat"
    monkeypatch.setattr(threads, "STAT", file)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "available_cores", lambda: 100.0)
    assert ThreadCheck().notes(torch.device("cpu")) == []  # there is no such file
    for after, ranks, own, expected in (
        (10**6, 1, 0, 1),
        (0, 1, 0, 0),
        (10**6, 1, 10**6, 0),  # only this process used the cores
        (10**6, 2, 0, 0),
    ):
        file.write_text(stat(0))
        monkeypatch.setattr(os, "times", lambda: (0.0,) * 5)
        check = ThreadCheck(ranks)
        monkeypatch.setattr(os, "times", lambda own=own: (own, 0.0, 0.0, 0.0, 0.0))
        file.write_text(stat(after))
        assert len(check.notes(torch.device("cpu"))) == expected
        assert check.notes(torch.device("cuda")) == []


def test_threads_of_a_run(make_run, monkeypatch, capsys):
    monkeypatch.setattr(threads, "available_cores", lambda: 1.0)
    before = torch.get_num_threads()
    run = make_run("trainer.threads=2")
    fit(run)
    assert torch.get_num_threads() == before
    (start,) = map(json.loads, (run.directory / "starts.jsonl").read_text().splitlines())
    assert start["threads"] == 2
    assert suggestion(capsys.readouterr().out) == 1
