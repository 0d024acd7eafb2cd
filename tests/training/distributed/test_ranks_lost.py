"""Ranks that are killed or do not answer: the others end, and the run resumes to the same end.

CAMPAIGN_KILLS=N kills N ranks at random moments under torchrun, as a user starts it.
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
    check_same_bytes,
    ended,
    rank_of,
    runs_in,
    started,
    wait_until,
    write_texts,
)
from helpers.refusals import printed_keys
from helpers.runs import rows
from helpers.trainings import ForkServer, printed_command, usable

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "1"))
A_LAUNCH = 5  # kills at most
STEPS = 100  # under torchrun
LONG = (
    *SAME,
    "model.dropout=0.2",
    "trainer.eval_every=20",
    "trainer.save_every=3",
    "trainer.keep=1",
    "parallel.timeout=10",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ForkServer(tmp_path_factory.mktemp("lost")) as server:
        yield server


@pytest.fixture(scope="module")
def whole(server):
    """whole(way, steps) -> a run that is not disturbed, made once."""

    def run(way: str, steps: int) -> Path:
        folder = server.home / "whole"
        if not (folder / "runs" / f"{way}_{steps}").exists():
            settings = (f"parallel={way}", f"trainer.max_steps={steps}", f"name={way}_{steps}")
            server.run_ranks(write_texts(folder), *LONG, *settings)
        return folder / "runs" / f"{way}_{steps}"

    return run


@pytest.mark.parametrize(
    ("what", "way", "lost"), [("SIGKILL", "ddp", 0), ("SIGKILL", "fsdp", 1), ("SIGSTOP", "fsdp", 1)]
)
def test_a_lost_rank_ends_the_other_and_the_run_resumes(server, whole, tmp_path, what, way, lost):
    """A killed one at once, one that does not answer after the timeout."""
    timeout = "parallel.timeout=" + ("1000" if what == "SIGKILL" else "10")
    run, settings = tmp_path / "runs" / "run", [*LONG, f"parallel={way}", timeout, "name=run"]
    each = [{"what": what, "at": "train.Trainer.step", "call": 6}]
    faults = [{"happen": {"each": each}} if rank == lost else None for rank in range(2)]
    trainings = server.start_ranks(write_texts(tmp_path), *settings, faults=faults)
    other = trainings[1 - lost]
    assert other.wait() == 4
    trainings[lost].send(signal.SIGKILL)
    assert trainings[lost].wait() == -signal.SIGKILL
    label, err = f"rank {1 - lost}: ", other.err
    assert err.startswith(label) == (lost == 0)  # a rank other than 0 says which it is
    assert printed_keys(err.removeprefix(label)) == ["parallel.timeout"]
    assert timeout in err
    assert usable(run) in (None, 3) if lost == 0 else usable(run) == 3  # else it is completed
    server.run_ranks(tmp_path, *settings)
    assert [row["step"] for row in rows(run)] == list(range(9))
    check_same_bytes(run, whole(way, 8))


# ------------------------------------------------------------------------------------ torchrun


def shared_out(kills: int) -> list[int]:
    """So many kills over as few launches as may be."""
    launches = max(1, -(-kills // A_LAUNCH))
    return [kills // launches + (number < kills % launches) for number in range(launches)]


def kill(agent, rank: int) -> bool:
    """Kills one rank, as the kernel does when memory runs out; False when it had ended."""
    pid = rank_of(agent, rank)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


@pytest.mark.parametrize(("number", "kills"), enumerate(shared_out(KILLS)))
def test_torchrun_restarts_killed_ranks_and_resume_is_bit_exact(
    server, whole, tmp_path, number, kills
):
    """torchrun starts all ranks anew, and they resume from the last checkpoint. The first run has
    no name, and torchrun is stopped at last: the printed command completes the run."""
    chance, way = random.Random(number), ("fsdp", "ddp")[number % 2]
    settings = [*LONG, f"parallel={way}", f"trainer.max_steps={STEPS}"]
    settings += ["name=mine"] if number % 2 else []
    agent = [*TORCHRUN, "--standalone", f"--max-restarts={kills}", REPOSITORY / "train.py"]

    def lines() -> int:
        """Of the log of the only run there; 0 before it begins."""
        logs = list(tmp_path.glob("runs/*/metrics.jsonl"))
        return logs[0].read_bytes().count(b"\n") if logs else 0

    landed = 0
    with started(write_texts(tmp_path)) as start:
        process = start(*agent, *settings)
        for moment in sorted(chance.sample(range(10, STEPS - 50), kills)):
            wait_until(lambda m=moment: lines() > m, process)
            killed_at = lines()
            landed += kill(process, chance.randrange(2))
        if number == 0:
            wait_until(lambda: lines() > killed_at + 5, process)  # it was restarted
            process.terminate()
        assert (ended(process) == 0) == (number > 0), process.log.read_text()
    (run,) = runs_in(tmp_path)
    if number == 0:
        program, command = printed_command(process.log.read_text())
        assert "torchrun --nproc_per_node=2" in program
        assert len(rows(run)) < STEPS
        server.run_ranks(tmp_path, *command)
    assert [row["step"] for row in rows(run)] == list(range(STEPS + 1))
    check_same_bytes(run, whole(way, STEPS))
    print(f"{way}: {landed} of {kills} kills came in time")
