"""What one process can check of training on several ranks: settings, the launcher's environment,
seeds, and how a restarted run finds its directory. test_ranks.py starts real ranks."""

import functools
import json
import os

import pytest
import torch
from helpers.refusals import printed_keys, refused

import train
from data import check_same
from errors import ConfigError, DataError, RunDirectoryError, refuse
from training import directory
from training.parallel import Parallel, ParallelConfig, check, start
from training.ranks import DDP
from training.tracker import last_wandb_id

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS += ("SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
LAUNCHERS += ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No launcher started this process; it is in a folder of its own."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(directory, "started_here", [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """launched(ranks, KEY=value) sets the environment of one of several ranks."""

    def launch(ranks, **more):
        fixed = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for key, value in {"RANK": 0, "WORLD_SIZE": ranks, **fixed, **more}.items():
            monkeypatch.setenv(key, str(value))

    return launch


# -------------------------------------------------------------------------------------- settings


def problem_keys(strategy: str, device: str = "auto", batch_size: int = 8) -> list[str]:
    return [key for key, *_ in check(ParallelConfig(strategy), device, batch_size)]


def test_settings_are_validated():
    for strategy in ("auto", "single", "ddp", "fsdp"):
        for timeout in (1, 600, 1799):
            assert ParallelConfig(strategy, timeout).problems() == []
    keys = [key for key, *_ in ParallelConfig("many", 1800).problems()]
    assert keys == ["strategy", "timeout"]
    assert [key for key, *_ in ParallelConfig(timeout=0).problems()] == ["timeout"]


def test_one_process_has_no_strategy():
    for strategy, device, batch_size in [("auto", "mps", 7), ("single", "auto", 8)]:
        assert problem_keys(strategy, device, batch_size) == []
    assert problem_keys("ddp") == problem_keys("fsdp") == ["parallel"]
    parallel = start(ParallelConfig("auto"), "cpu", "fp32", seed=3)
    assert type(parallel) is Parallel
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_several_ranks_need_a_strategy_and_a_divisible_batch(launched, ranks):
    launched(ranks)
    several = ranks > 1
    for strategy in ("auto", "ddp", "fsdp"):
        assert problem_keys(strategy) == []
    assert problem_keys("single") == ["parallel"] * several
    assert problem_keys("ddp", batch_size=9) == ["trainer.batch_size"] * several
    assert problem_keys("ddp", "mps") == ["trainer.device"] * several
    assert len(problem_keys("single", "mps", 9)) == 3 * several


def test_the_hint_has_the_nearest_divisible_batch_size(launched):
    launched(4)
    for batch_size, nearest in [(9, 12), (1, 4), (5, 8)]:
        ((*_, hint),) = check(ParallelConfig(), "cpu", batch_size)
        assert str(nearest) in hint.split(), batch_size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MASTER_ADDR", None),
        ("MASTER_PORT", ""),
        ("WORLD_SIZE", "two"),
        ("LOCAL_RANK", "-1"),
        ("RANK", "2"),
    ],
)
def test_an_incomplete_environment_is_refused(launched, monkeypatch, key, value):
    launched(2)
    monkeypatch.delenv(key, raising=False)
    if value is not None:
        monkeypatch.setenv(key, value)
    with refused(ConfigError, key, value or "", exit_code=2):
        refuse(check(ParallelConfig(), "cpu", 8))


def test_slurm_tasks_without_a_rank_are_refused(launched, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert problem_keys("auto") == ["parallel"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert problem_keys("auto") == []
    launched(2, SLURM_STEP_NUM_TASKS=4)  # torchrun, which srun started once per machine
    assert problem_keys("ddp") == []


@pytest.mark.parametrize(("rank", "local_rank", "printed"), [(0, 0, 1), (1, 0, 1), (1, 1, 0)])
def test_a_wrong_command_is_printed_once_per_machine(
    launched, in_process, tmp_path, monkeypatch, rank, local_rank, printed
):
    monkeypatch.setattr("training.command.WAIT_FOR_RANK_0", 0)
    launched(2, RANK=rank, LOCAL_RANK=local_rank)
    code, _, err = in_process(train.main, tmp_path, "trainer.batch_size=9")
    assert code == 2
    assert len(printed_keys(err)) == err.count("trainer.batch_size=9") == printed


def test_which_errors_mean_that_a_rank_is_lost():
    is_lost = functools.partial(DDP.lost_peer, None)
    assert is_lost(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"))
    assert not is_lost(ValueError("gloo"))
    assert not is_lost(RunDirectoryError("name", "gloo", "is locked", "Timed out"))
    assert not Parallel(torch.device("cpu"), torch.float32).lost_peer(RuntimeError("gloo"))


# --------------------------------------------------------------------------- one process as rank


def one(rank: int = 0, world_size: int = 1) -> Parallel:
    return Parallel(torch.device("cpu"), torch.float32, rank, world_size)


def test_collectives_of_one_process_are_the_identity():
    parallel = one()
    assert parallel.sum(1, 2.5) == [1, 2.5]
    assert parallel.means([torch.tensor(3.0), torch.tensor(1.5)]) == [3.0, 1.5]
    assert parallel.largest(15) == 15
    assert parallel.share({"a": [1]}) == {"a": [1]}
    assert parallel.on_main(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError), parallel.together():
        _ = 1 / 0


def drawn(seed: int, step: int, rank: int) -> tuple[int, ...]:
    one(rank, 8).reseed(seed, step)
    return tuple(torch.randint(2**62, (4,)).tolist())


def test_random_numbers_are_a_function_of_seed_step_and_rank():
    cases = [(s, n, r) for s in (0, 1, 2**63 - 1) for n in (0, 1, 10**9) for r in (0, 1, 7)]
    cases += [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2)]
    first = [drawn(*case) for case in cases]
    torch.manual_seed(5)
    torch.rand(3)
    assert [drawn(*case) for case in reversed(cases)] == first[::-1]
    assert len(set(first)) == len(cases)


# -------------------------------------------------------------------------------------- restarts


def make_run(name, **mark):
    folder = directory.RUNS / name
    folder.mkdir(parents=True)
    if mark:
        (folder / directory.MARK).write_text(json.dumps(mark))
    return folder


def restarted(monkeypatch):
    """As torchrun's new processes, which have started no run yet."""
    monkeypatch.setattr(directory, "started_here", [])


def test_without_torchrun_there_is_no_mark(monkeypatch):
    folder = make_run("a")
    directory.mark_launch(folder)
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert directory.name_before_restart() is None
    assert not directory.was_cut_off(folder)


def test_a_run_without_a_name_finds_itself_after_a_restart(launched, monkeypatch):
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=0)
    make_run("another", torchrun="none elsewhere 1 0")
    make_run("without")
    assert directory.name_before_restart() is None
    directory.mark_launch(mine := make_run("mine"))
    restarted(monkeypatch)
    assert directory.name_before_restart() == "mine"
    assert directory.was_cut_off(mine)
    launched(2, TORCHELASTIC_RUN_ID="of another job")
    assert directory.name_before_restart() is None
    assert not directory.was_cut_off(mine)


def test_another_torchrun_with_the_same_id_is_another_launch(launched, monkeypatch):
    """torchrun's default id is the same for every job."""
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=1)
    directory.mark_launch(make_run("a"))
    restarted(monkeypatch)
    assert directory.name_before_restart() == "a"
    with monkeypatch.context() as other:
        other.setattr(os, "getppid", os.getpid)  # another parent, which started later
        assert directory.name_before_restart() is None
    monkeypatch.setattr(directory.socket, "gethostname", lambda: "another-machine")
    assert directory.name_before_restart() is None


def test_each_run_of_a_sweep_finds_itself(launched, monkeypatch):
    launched(2, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=0)
    for name in ("first", "second"):
        directory.mark_launch(make_run(name))
    restarted(monkeypatch)
    found = []
    for _ in range(3):
        found.append(directory.name_before_restart())
        directory.started_here.append(None)
    assert found == ["first", "second", None]


def test_a_job_that_slurm_requeued_continues(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    directory.mark_launch(run := make_run("a"))
    assert not directory.was_cut_off(run)  # a second command of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert directory.was_cut_off(run)
    assert directory.name_before_restart() is None  # a job may have several runs without names
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert not directory.was_cut_off(run)


def test_the_newest_wandb_run_is_the_one_to_resume(tmp_path):
    assert last_wandb_id(tmp_path) is None
    (tmp_path / "wandb" / "latest-run").mkdir(parents=True)
    assert last_wandb_id(tmp_path) is None
    for name in (
        "run-20260101_000000-early",
        "offline-run-20260301_120000-la-st",
        "run-20260201_000000-between",
    ):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert last_wandb_id(tmp_path) == "la-st"


# ------------------------------------------------------------------------- the same data on ranks

HERE = [("a.txt", ["one", "two"]), ("b.txt", ["three"])]


def test_ranks_compare_checksums_of_their_tokens():
    check_same(HERE, HERE, "p")
    check_same(HERE, [(f"moved/{name}", sums) for name, sums in HERE], "p")
    check_same([], [], "p")
    check_same(HERE, [("a.txt", ["", "two"]), HERE[1]], "p")  # a checksum that is not known
    for there in (
        [("a.txt", ["one", "2"]), HERE[1]],
        [HERE[0], ("b.txt", ["3"])],
        [("a.txt", ["one", "two", "more"]), HERE[1]],
        [HERE[0]],
        [*HERE, ("c.txt", ["four"])],
    ):
        with refused(DataError, "data.path", "p", exit_code=3):
            check_same(HERE, there, "p")
