"""What several ranks agree on, as far as one process can tell: training/parallel.py, and how a
run that torchrun starts anew finds itself (training/directory.py).

The ranks themselves: test_ranks.py.
"""

import functools
import json
import os
import re

import pytest
import torch
from helpers.refusals import check_refusal

import train
from data import check_same
from errors import DataError, RunDirectoryError, refuse
from training import directory
from training.parallel import Parallel, ParallelConfig, check, start
from training.ranks import DDP
from training.tracker import last_wandb_id

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS += ("SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Nobody started this process as one of several; it is in a folder of its own."""
    for name in (*LAUNCHERS, *RESTARTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(directory, "_opened", [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """launched(ranks, KEY=value) -> this process is one of so many."""

    def launch(ranks, **more):
        fixed = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for key, value in {"RANK": 0, "WORLD_SIZE": ranks, **fixed, **more}.items():
            monkeypatch.setenv(key, str(value))

    return launch


# -------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("strategy", ["auto", "single", "ddp", "fsdp"])
def test_what_fits_has_no_problem(strategy):
    for timeout in (1, 600, 1799):
        assert ParallelConfig(strategy, timeout).problems() == []


def test_every_problem_of_the_settings_is_listed():
    problems = ParallelConfig("many", 1800).problems()
    assert [(key, value) for key, value, _, _ in problems] == [
        ("strategy", "many"),
        ("timeout", 1800),
    ]
    assert [key for key, *_ in ParallelConfig(timeout=0).problems()] == ["timeout"]


def refused(strategy: str, device: str = "auto", batch_size: int = 8) -> list[str]:
    return [f"{p[0]}={p[1]}" for p in check(ParallelConfig(strategy), device, batch_size)]


def test_one_process_is_single():
    assert refused("auto") == refused("single") == []
    assert refused("auto", batch_size=7) == refused("auto", device="mps") == []
    assert refused("ddp") == ["parallel=ddp"]
    assert refused("fsdp") == ["parallel=fsdp"]
    ((_, _, cause, fix),) = check(ParallelConfig("fsdp"), "auto", 8)
    assert cause == "started as one process, without torchrun"
    assert fix == "start it with torchrun --nproc_per_node=N train.py parallel=fsdp ..."


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_several_processes_need_a_strategy_and_a_batch_that_can_be_shared(launched, ranks):
    launched(ranks)
    for strategy in ("auto", "ddp", "fsdp"):
        assert refused(strategy) == []
    several = ranks > 1
    assert refused("single") == (["parallel=single"] if several else [])
    assert refused("ddp", batch_size=9) == (["trainer.batch_size=9"] if several else [])
    assert refused("ddp", "mps") == (["trainer.device=mps"] if several else [])
    assert len(refused("single", "mps", 9)) == (3 if several else 0)


def test_errors_of_ours_are_no_lost_peer_whatever_they_name():
    lost = functools.partial(DDP.lost_peer, None)
    assert lost(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"))
    assert not lost(RunDirectoryError("name=gloo: runs/gloo is being written; Timed out"))
    assert not lost(ValueError("gloo"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("MASTER_ADDR", None, "MASTER_ADDR=: is missing, and a launcher sets it for each rank; "),
        ("MASTER_PORT", "", "MASTER_PORT=: is missing"),
        ("WORLD_SIZE", "two", "WORLD_SIZE=two: is no number"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1: is no number"),
        ("RANK", "2", "RANK=2: there are 2 ranks, counted from 0; start it with torchrun"),
    ],
)
def test_what_a_launcher_leaves_out_is_named(launched, monkeypatch, key, value, says):
    launched(2)
    if value is None:
        monkeypatch.delenv(key)
    else:
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="^" + re.escape(says)) as caught:
        refuse(check(ParallelConfig(), "cpu", 8))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("batch_size", "nearest"), [(9, 12), (1, 4), (5, 8)])
def test_the_nearest_batch_that_can_be_shared_is_named(launched, batch_size, nearest):
    launched(4)
    ((_, _, cause, fix),) = check(ParallelConfig(), "cpu", batch_size)
    assert cause == "cannot be shared out evenly over 4 ranks"
    assert fix == f"use a multiple of 4, such as {nearest}"


@pytest.mark.parametrize(("rank", "local_rank", "lines"), [(0, 0, 1), (1, 0, 1), (1, 1, 0)])
def test_a_wrong_command_is_told_once_on_each_machine(
    launched, in_process, tmp_path, monkeypatch, rank, local_rank, lines
):
    """That of rank 0's machine may be right."""
    monkeypatch.setattr("training.command.WAIT_FOR_RANK_0", 0)
    launched(2, RANK=rank, LOCAL_RANK=local_rank)
    code, _, err = in_process(train.main, tmp_path, "trainer.batch_size=9")
    assert (code, err.count("\n"), err.count("trainer.batch_size=9: ")) == (2, lines, lines)


def test_several_tasks_of_srun_that_know_nothing_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert refused("auto") == ["parallel=auto"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert refused("auto") == []


def test_under_torchrun_that_srun_started_its_tasks_do_not_count(launched):
    launched(2, SLURM_STEP_NUM_TASKS=4)
    assert refused("ddp") == []


def test_one_process_needs_no_torchrun_and_no_group():
    parallel = start(ParallelConfig("auto"), "cpu", "fp32", seed=3)
    assert type(parallel) is Parallel
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    assert (parallel.label, parallel.command) == ("", ["python"])
    assert parallel.describe() == "on cpu in float32"
    assert not torch.distributed.is_initialized()


# ------------------------------------------------------------------------------- one of one rank


def one(rank: int = 0, world_size: int = 1) -> Parallel:
    return Parallel(torch.device("cpu"), torch.float32, rank, world_size)


def test_alone_everybody_agrees():
    parallel = one()
    assert parallel.sum(1, 2.5) == [1, 2.5]
    assert parallel.means([torch.tensor(3.0), torch.tensor(1.5)]) == [3.0, 1.5]
    assert parallel.largest(15) == 15
    assert parallel.share({"a": [1]}) == {"a": [1]}
    assert parallel.on_main(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError), parallel.together():
        _ = 1 / 0
    assert not parallel.lost_peer(RuntimeError("Connection closed by peer"))


def test_words_of_other_ranks_say_whose_they_are():
    assert (one(0, 2).label, one(1, 2).label) == ("", "rank 1: ")


# ---------------------------------------------------------------------------------------- dropout


def drawn(seed: int, step: int, rank: int) -> list[int]:
    one(rank, 8).reseed(seed, step)
    return torch.randint(2**62, (4,)).tolist()


def test_what_is_drawn_is_a_function_of_seed_step_and_rank():
    cases = [(s, n, r) for s in (0, 1, 2**63 - 1) for n in (0, 1, 10**9) for r in (0, 1, 7)]
    first = [drawn(*case) for case in cases]
    torch.manual_seed(5)
    torch.rand(3)
    assert [drawn(*case) for case in reversed(cases)] == first[::-1]
    assert len({tuple(numbers) for numbers in first}) == len(cases)


def test_seed_step_and_rank_are_not_mixed_up():
    assert len({tuple(drawn(*case)) for case in [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2)]}) == 4


# --------------------------------------------------------------------------- started anew


def make_run(name, **mark):
    folder = directory.RUNS / name
    folder.mkdir(parents=True)
    if mark:
        (folder / directory.MARK).write_text(json.dumps(mark))
    return folder


def test_a_start_without_torchrun_leaves_no_mark_and_finds_none(monkeypatch):
    folder = make_run("a")
    directory.mark_launch(folder)
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert directory.name_before_restart() is None
    assert not directory.was_cut_off(folder)


def test_after_a_restart_a_run_without_name_finds_itself(launched, monkeypatch):
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=0)
    make_run("another", torchrun="none elsewhere 1 0")
    make_run("without")
    assert directory.name_before_restart() is None
    directory.mark_launch(mine := make_run("mine"))
    monkeypatch.setattr(directory, "_opened", [])  # as processes started anew
    assert directory.name_before_restart() == "mine"
    assert directory.was_cut_off(mine)
    launched(2, TORCHELASTIC_RUN_ID="of another job")
    assert directory.name_before_restart() is None
    assert not directory.was_cut_off(mine)


def test_another_torchrun_with_the_same_id_is_another_start(launched, monkeypatch):
    """The default names every job alike."""
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=1)
    directory.mark_launch(make_run("a"))
    monkeypatch.setattr(directory, "_opened", [])
    assert directory.name_before_restart() == "a"
    parent = os.getppid()
    with monkeypatch.context() as other:
        other.setattr(os, "getppid", lambda: os.getpid())  # one that lives, and began later
        assert directory.name_before_restart() is None
    assert os.getppid() == parent
    monkeypatch.setattr(directory.socket, "gethostname", lambda: "another-machine")
    assert directory.name_before_restart() is None


def test_the_runs_of_a_sweep_are_told_apart(launched, monkeypatch):
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=0)
    monkeypatch.setattr(directory, "_opened", [])
    for name in ("first", "second"):
        directory.mark_launch(make_run(name))
    monkeypatch.setattr(directory, "_opened", [])
    found = []
    for _ in range(3):
        found.append(directory.name_before_restart())
        directory._opened.append(None)
    assert found == ["first", "second", None]


def test_a_job_that_slurm_put_back_goes_on_whatever_it_was_told_first(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    directory.mark_launch(run := make_run("a"))
    assert not directory.was_cut_off(run)  # a second command of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert directory.was_cut_off(run)
    assert directory.name_before_restart() is None  # a job may have several runs without names
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert not directory.was_cut_off(run)


# --------------------------------------------------------------------------- the same everywhere


def test_no_wandb_run_has_no_id(tmp_path):
    assert last_wandb_id(tmp_path) is None
    (tmp_path / "wandb" / "latest-run").mkdir(parents=True)
    assert last_wandb_id(tmp_path) is None


def test_the_last_wandb_run_is_the_one_to_go_on_with(tmp_path):
    for name in (
        "run-20260101_000000-early",
        "offline-run-20260301_120000-la-st",
        "run-20260201_000000-between",
    ):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert last_wandb_id(tmp_path) == "la-st"


HERE = [("a.txt", ["one", "two"]), ("b.txt", ["three"])]


def test_the_same_tokens_under_other_names_are_the_same():
    check_same(HERE, HERE, "p")
    check_same(HERE, [(f"moved/{name}", sums) for name, sums in HERE], "p")
    check_same([], [], "p")
    check_same(HERE, [("a.txt", ["", "two"]), HERE[1]], "p")  # one that is not known


@pytest.mark.parametrize(
    ("there", "file", "byte"),
    [
        ([("a.txt", ["one", "2"]), HERE[1]], "a.txt", 1),
        ([HERE[0], ("b.txt", ["3"])], "b.txt", 0),
        ([("a.txt", ["one", "two", "more"]), HERE[1]], "a.txt", 2),
        ([HERE[0]], "none", 0),
        ([*HERE, ("c.txt", ["four"])], "c.txt", 0),
    ],
)
def test_other_tokens_are_refused_from_the_first_difference_on(there, file, byte):
    from tokens.stream import BLOCK_BYTES

    with pytest.raises(DataError) as caught:
        check_same(HERE, there, "p")
    cause = f"{file} is another from byte {byte * BLOCK_BYTES} on than what rank 0 has"
    check_refusal(caught.value, "data.path=p", cause, "give every machine the same data")


def test_refusals_of_a_launch_are_lines_like_all_others(launched):
    launched(4)
    with pytest.raises(ValueError, match=r"^parallel=single: .*\ntrainer.batch_size=9: .*"):
        refuse(check(ParallelConfig("single"), "cpu", 9))
