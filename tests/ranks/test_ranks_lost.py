"""Ranks that die or time out: the others end, and the resumed run has the same result.

CAMPAIGN_KILLS=N makes N runs under torchrun, whose ranks are killed at random moments.
"""

import contextlib
import functools
import os
import random
import signal
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.ranks import (
    COMPARABLE,
    TORCHRUN,
    check_same_bytes,
    free_port,
    processes_of,
    rank_of,
    runs_in,
    started,
    wait_for_exit,
    wait_until,
    write_texts,
)
from helpers.refusals import printed_keys
from helpers.runs import rows
from helpers.tally import CAMPAIGN, in_campaign
from helpers.trainings import STEP, interrupt, newest_valid_step, printed_command

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "1"))
LONG = (*COMPARABLE, "model.dropout=0.2", "trainer.eval_every=20", "trainer.save_every=3")
LONG += ("trainer.keep=1", "parallel.timeout=1000", "optimizer.schedule=constant")
LONG += ("trainer.log_every=1",)


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """whole(way, steps) -> a run that is not disturbed, made once."""

    @functools.cache
    def run(way: str, steps: int) -> Path:
        folder = write_texts(tmp_path_factory.mktemp("whole"))
        settings = (f"parallel={way}", f"trainer.max_steps={steps}", "name=whole")
        server.run_ranks(folder, *LONG, *settings)
        return folder / "runs" / "whole"

    return run


@pytest.mark.parametrize(
    ("what", "way", "lost"),
    [("SIGKILL", "fsdp", 0)] + [("SIGKILL", "ddp", 1), ("SIGSTOP", "fsdp", 1)] * CAMPAIGN,
)
def test_a_lost_rank_ends_the_other_and_the_run_resumes(server, whole, tmp_path, what, way, lost):
    """A dead rank is noticed immediately, a rank that times out after the timeout."""
    timeout = f"parallel.timeout={1000 if what == 'SIGKILL' else 30}"
    run, settings = tmp_path / "runs" / "run", [*LONG, f"parallel={way}", timeout, "name=run"]
    faults = [interrupt((what, STEP, 6)) if rank == lost else None for rank in range(2)]
    trainings = server.start_ranks(write_texts(tmp_path), *settings, faults=faults)
    other = trainings[1 - lost]
    assert other.wait() == 4
    trainings[lost].send(signal.SIGKILL)
    assert trainings[lost].wait() == -signal.SIGKILL
    assert timeout in other.err
    assert len(printed_keys(other.err)) == 1
    # Rank 0 writes checkpoints: if it dies, the first one may be incomplete.
    assert newest_valid_step(run) == 3 or (lost == 0 and newest_valid_step(run) is None)
    server.run_ranks(tmp_path, *settings, "parallel.timeout=1000")
    assert [row["step"] for row in rows(run)] == list(range(9))
    check_same_bytes(run, whole(way, 8))


@pytest.mark.parametrize("number", range(KILLS))
def test_torchrun_restarts_killed_ranks_and_resume_is_bit_exact(server, whole, tmp_path, number):
    """torchrun restarts all ranks, and they resume from the last checkpoint. Then torchrun is
    stopped, and the printed command completes the run. `make test` kills no rank."""
    chance, way = random.Random(number), ("ddp", "fsdp")[number % 2]
    kills, killed_at = 1 + number % 4 if CAMPAIGN else 0, 0
    settings = [*LONG, f"parallel={way}", "trainer.max_steps=1000000", "name=mine"]
    agent = [*TORCHRUN, "--standalone", f"--max-restarts={kills}", REPOSITORY / "train.py"]

    def lines() -> int:
        """Of the log of the only run there; 0 before it begins."""
        logs = list(tmp_path.glob("runs/*/metrics.jsonl"))
        return logs[0].read_bytes().count(b"\n") if logs else 0

    with started(write_texts(tmp_path)) as start:
        process = start(*agent, *settings)
        for moment in sorted(chance.sample(range(4, 10), kills)):
            wait_until(lambda m=moment: lines() > m, process)
            killed_at = lines()
            if pid := rank_of(process, chance.randrange(2)):  # else it is being restarted
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lines() > killed_at + 5, process)  # after kills: it was restarted
        process.terminate()
        assert wait_for_exit(process) != 0
    (run,) = runs_in(tmp_path)
    program, command = printed_command(process.log.read_text())
    assert "torchrun --nproc_per_node=2" in program
    steps = newest_valid_step(run) + 4
    server.run_ranks(tmp_path, *command, f"trainer.max_steps={steps}")
    assert [row["step"] for row in rows(run)] == list(range(steps + 1))
    check_same_bytes(run, whole(way, steps))


# Waits, as a slow import does, until torchrun has ended and the process has another parent.
LATE = """
import os, sys, time
parent = os.getppid()
open("ready" + os.environ["RANK"], "w").close()
while os.getppid() == parent:
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ranks_end_if_torchrun_died_before_they_began(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    with started(write_texts(tmp_path)) as start:
        agent = [*TORCHRUN, "--standalone", "late.py", REPOSITORY / "train.py"]
        process = start(*agent, *LONG, "parallel=ddp")
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, process)
        process.kill()
        wait_until(lambda: not processes_of(process))
        assert process.log.read_text().count("parallel.timeout=1000") == 2  # of rank 0 and rank 1


def test_a_rank_that_is_alone_on_its_machine_prints_that_no_other_came(server, tmp_path):
    own = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    settings = (*LONG, "parallel=ddp", "parallel.timeout=1")
    training = server.start(write_texts(tmp_path), *settings, **own)
    assert training.wait() == 4
    assert training.err.count("parallel.timeout=1") == training.err.count("\n") == 1


@in_campaign
@pytest.mark.parametrize(
    "part",
    [
        "clearhead.checkpoint.format.write",
        "clearhead.output.run_log.RunLog.log",
        "headlens.lens.write_snapshot",
    ],
)
def test_ranks_wait_for_rank_0_as_long_as_it_writes(server, whole, tmp_path, part):
    """Longer than the timeout, within which rank 0 waits for the others."""
    slow = {"slow": {"seconds": 8, "part": part}}
    settings = (*LONG, "parallel=ddp", "parallel.timeout=5", "trainer.max_steps=8", "name=run")
    settings += ("lens=default", "lens.every=4", "lens.prompts=[the quick fox]")
    server.run_ranks(write_texts(tmp_path), *settings, faults=[slow, None])
    check_same_bytes(tmp_path / "runs" / "run", whole("ddp", 8))
