"""Ranks that are lost, stopped or cut off: the others end, and the run goes on to the same end.

Under torchrun as a user starts it, and, where a rank has to be lost at a certain step, as plain
processes (rank_worker.py). CAMPAIGN_KILLS: so many ranks are killed at random moments.
"""

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.ranks import (
    SAME,
    TORCHRUN,
    ended,
    last,
    launch,
    rank_of,
    runs_in,
    scenario,
    started,
    wait_until,
    write_texts,
)
from helpers.runs import rows

from training import checkpoint

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "2"))
A_LAUNCH = 5  # kills at most
STEPS = 100
LONG = (
    *SAME,
    "model.dropout=0.2",
    "lens=off",
    "trainer.sample_tokens=0",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=20",
    "trainer.save_every=7",
    "trainer.keep=1",
    "parallel.timeout=10",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def whole(folder):
    """Nobody interrupts; then one run in which rank 1 stands still."""
    scenarios = [
        scenario(way, folder, *LONG, f"parallel={way}", f"name={way}") for way in ("ddp", "fsdp")
    ]
    frozen = {"what": "SIGSTOP", "rank": 1, "after": 17}
    scenarios += [
        scenario("frozen", folder, *LONG, "parallel=fsdp", "name=frozen", happens=frozen, last=True)
    ]
    return launch(folder / "whole", scenarios)


def test_a_rank_that_stands_still_ends_the_run_after_the_timeout(whole, folder):
    assert whole.codes("frozen") == [4, None]
    main, _ = whole.errors("frozen")
    assert main.startswith("parallel.timeout=10: another rank is gone or did not answer (")
    assert main.count("\n") == 1
    _, state = checkpoint.load_model(last(folder / "runs" / "frozen"))
    assert state.step == 14


def test_a_rank_that_is_killed_ends_the_other_at_once(folder):
    killed = {"what": "SIGKILL", "rank": 1, "after": 17}
    settings = [*LONG, "parallel=ddp", "name=killed", "parallel.timeout=1000"]
    run = scenario("killed", folder, *settings, happens=killed, last=True)
    lost = launch(folder / "killed", [run])
    assert lost.codes("killed") == [4, None]
    main, _ = lost.errors("killed")
    assert main.startswith("parallel.timeout=1000: another rank is gone or did not answer (")
    assert main.count("\n") == 1
    _, state = checkpoint.load_model(last(folder / "runs" / "killed"))
    assert state.step == 14


# ------------------------------------------------------------------------------------ torchrun


def shared_out(kills: int) -> list[int]:
    """So many kills over an even number of launches."""
    launches = 2 * max(1, -(-kills // (2 * A_LAUNCH)))
    return [kills // launches + (number < kills % launches) for number in range(launches)]


def lines(folder: Path) -> int:
    """Of the log of the only run there; 0 before it begins."""
    logs = list(folder.glob("runs/*/metrics.jsonl"))
    return logs[0].read_bytes().count(b"\n") if logs else 0


def kill(agent, rank: int) -> bool:
    """One rank, by the kernel, as when memory runs out; False when it came to its end before."""
    pid = rank_of(agent, rank)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


@pytest.mark.parametrize(("number", "kills"), enumerate(shared_out(KILLS)))
def test_a_run_whose_ranks_are_killed_comes_to_the_same_end(whole, folder, tmp_path, number, kills):
    """torchrun starts all ranks anew, and they go on from the last checkpoint: the final weights
    are those of the run that nobody interrupted, bit for bit. Every other run has no name; the
    first is told to stop besides, early, and the command given again."""
    chance = random.Random(number)
    way = ("ddp", "fsdp")[number % 2]
    settings = [*LONG, f"parallel={way}", *(["name=mine"] if way == "ddp" else [])]
    agent = [*TORCHRUN, "--standalone", f"--max-restarts={kills}", REPOSITORY / "train.py"]
    moments = sorted(chance.sample(range(10, STEPS - 40), kills))
    landed = 0
    write_texts(tmp_path)
    with started(tmp_path) as start:
        process = start(*agent, *settings)
        if number == 0:
            wait_until(lambda: lines(tmp_path) > 5, process)
            process.terminate()
            assert ended(process) != 0
            assert "saved in runs/mine; resume with: torchrun" in process.log.read_text()
            process = start(*agent, *settings)
        for moment in moments:
            wait_until(lambda m=moment: lines(tmp_path) > m, process)
            landed += kill(process, chance.randrange(2))
        assert ended(process) == 0, process.log.read_text()
    (run,) = runs_in(tmp_path)
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    for file in ("model.safetensors", "optimizer.safetensors"):
        expected = last(folder / "runs" / way) / file
        assert (last(run) / file).read_bytes() == expected.read_bytes()
    print(f"{way}: {landed} of {kills} kills came in time")
