"""Distributed training, checks in one process: settings, environment of the launcher, seeds.

test_ranks.py starts real ranks."""

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import TINY
from helpers.gpus import pretend_gpus
from helpers.ranks import free_port
from helpers.refusals import printed_keys, refused
from helpers.settings import settings, train_main
from torch.distributed import TCPStore

import train
from clearhead.errors import ConfigError, RunDirectoryError
from clearhead.parallel import device, hardware
from clearhead.parallel.ddp import DDP
from clearhead.parallel.strategy import Strategy
from clearhead.run.build import build_run

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS += ("SLURM_STEP_NUM_TASKS",)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Removes the variables of launchers; the working directory is a temporary folder."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """launched(ranks, KEY=value) sets the environment of one of the ranks. 0: no ranks."""

    def launch(ranks, **more):
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        of_rank = {"RANK": 0, "WORLD_SIZE": ranks, **address} if ranks else {}
        for key, value in (of_rank | more).items():
            monkeypatch.setenv(key, str(value))

    return launch


# The number of ranks (0: no launcher), other variables, arguments, the keys of the problems, and a
# value that the message suggests.
REFUSED = [
    (0, {}, ["parallel=ddp"], ["parallel"]),
    (0, {}, ["parallel=fsdp"], ["parallel"]),
    (0, {"SLURM_STEP_NUM_TASKS": 4}, [], ["parallel"]),  # without a process group
    (2, {}, ["parallel=single", "trainer.batch_size=9"], ["parallel", "trainer.batch_size"], "10"),
    (2, {}, ["-m", "seed=0,1"], ["WORLD_SIZE"]),
    (0, {"TORCHELASTIC_MAX_RESTARTS": 3}, [], ["name"]),  # the restarted ranks resume by name
]


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_the_launcher(launched, in_process, tmp_path, case):
    ranks, variables, arguments, keys, *suggested = case
    launched(ranks, **variables)
    code, _, err = in_process(train.main, tmp_path, *arguments, "data.path=any")
    assert (code, printed_keys(err)) == (2, keys)
    assert set(suggested) <= set(err.split())
    assert not list(tmp_path.glob("*/*"))


def test_one_rank_and_a_job_of_several_tasks(launched, in_process, tmp_path, text_file):
    """torchrun with one process, which srun started once per machine."""
    launched(1, SLURM_STEP_NUM_TASKS=4)
    code, _, err = in_process(train_main, tmp_path, *TINY, f"data.path={text_file}")
    assert (code, err) == (0, "")
    assert not dist.is_initialized()


def test_a_launcher_may_not_tell_the_ranks_of_this_machine(launched, monkeypatch):
    """Then one rank per machine is assumed, and GPUs and memory are not divided by all ranks."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = hardware.memory_of(torch.device("cpu"))
    launched(16)
    pretend_gpus(monkeypatch, count=8)
    assert device.check("cuda") == []
    assert hardware.memory_of(torch.device("cpu")) == alone
    launched(16, LOCAL_WORLD_SIZE=16)
    assert [key for key, *_ in device.check("cuda")] == ["device"]
    assert hardware.memory_of(torch.device("cpu")) == alone / 16
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for local_rank, keys in ((7, []), (8, ["device"])):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert [key for key, *_ in device.check("auto")] == keys


def test_the_page_cache_of_a_container_is_available_memory(monkeypatch, tmp_path):
    """Otherwise a run that has just read its checkpoint would not have the memory for the next."""
    for name, text in {
        "memory.max": "1000000",
        "memory.current": "900000",
        "memory.stat": "inactive_anon 1\nactive_file 300000\ninactive_file 200000\nfile 9",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    assert hardware.available_memory() == (600_000 if sys.platform == "linux" else 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("given", [None, *hardware.ALLOC_CONF])
def test_the_gpu_allocator_is_configured_for_fsdp_before_cuda_is_initialized(
    monkeypatch, strategy, given
):
    """Unless the user has configured it."""
    for name in hardware.ALLOC_CONF:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if strategy == "fsdp" else {}
    if given:
        expected = {given: "max_split_size_mb:64"}
        monkeypatch.setenv(given, expected[given])
    found = {}

    def check(*_):
        found.update({n: os.environ[n] for n in hardware.ALLOC_CONF if n in os.environ})
        raise InterruptedError

    monkeypatch.setattr("clearhead.parallel.launch.check", check)
    with pytest.raises(InterruptedError):
        build_run(settings(*TINY, "data.path=x", f"parallel={strategy}"))
    assert found == expected


@pytest.mark.parametrize(("rank", "local_rank", "printed"), [(0, 0, 1), (1, 0, 1), (1, 1, 0)])
def test_a_wrong_command_is_printed_once_per_machine(
    launched, in_process, tmp_path, monkeypatch, rank, local_rank, printed
):
    monkeypatch.setattr("clearhead.config.command_line.WAIT_FOR_RANK_0", 0)
    launched(2, RANK=rank, LOCAL_RANK=local_rank)
    code, _, err = in_process(train.main, tmp_path, "trainer.batch_size=9")
    assert code == 2
    assert len(printed_keys(err)) == err.count("trainer.batch_size=9") == printed


VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]


SOON = ("parallel.timeout=1",)  # seconds, of a wait that a wrong variable must not cause
WRONG = [(name, "x") for name in (*VARIABLES, "TORCHELASTIC_MAX_RESTARTS", "MASTER_ADDR")]


@pytest.mark.parametrize(("name", "value"), [*WRONG, *(("RANK", v) for v in ("", "-1", "2"))])
def test_wrong_variables_of_a_launcher_are_named(launched, monkeypatch, text_file, name, value):
    """A variable that is missing (MASTER_ADDR), is not a number or out of range."""
    launched(2, LOCAL_WORLD_SIZE=2, LOCAL_RANK=0)
    monkeypatch.setenv(name, value)
    if name == "MASTER_ADDR":
        monkeypatch.delenv(name)
    if name == "LOCAL_RANK":
        pretend_gpus(monkeypatch, count=2)
    with refused(ConfigError, name, exit_code=2):
        build_run(settings(*TINY, f"data.path={text_file}", "trainer.device=auto", *SOON))


@pytest.mark.parametrize("waits_for", ["server", "rank 0", "rank 1"])
def test_a_signal_ends_a_rank_that_waits_for_the_others(
    launched, in_process, tmp_path, text_file, monkeypatch, waits_for
):
    """And so does the end of torchrun, from which no signal may come. A rank prints it if it is
    alone on its machine."""
    arguments = (*TINY, f"data.path={text_file}", "parallel=ddp")
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = server.port if waits_for == "rank 0" else free_port()
    rank = 0 if waits_for == "rank 1" else 1
    launched(2, RANK=rank, MASTER_PORT=port)
    monkeypatch.setattr("clearhead.config.command_line.WAIT_FOR_RANK_0", 0)
    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", lambda _: signal.raise_signal(signal.SIGTERM))
        assert in_process(train_main, tmp_path, *arguments)[0] == 143
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    code, _, err = in_process(train_main, tmp_path, *arguments)
    assert (code, err.count("parallel.timeout="), err.count("\n")) == (4, 1, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the default of gloo")
@pytest.mark.parametrize("given", [None, "mine"])
def test_ranks_of_one_machine_use_its_loopback_interface(launched, monkeypatch, given):
    """Unless the user has chosen another one. NCCL makes its own choice."""
    launched(1, MASTER_PORT=free_port())
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, given or "")  # restored at the end
        if not given:
            monkeypatch.delenv(name)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "init_process_group", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            DDP(torch.device("cpu"), torch.float32)
    assert [os.environ.get(name) for name in names] == [given or "lo", given]


def test_errors_that_mean_a_lost_rank():
    assert DDP.is_lost_rank(None, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]"))
    assert DDP.is_lost_rank(None, RuntimeError("Application timeout caused pair closure"))
    assert not DDP.is_lost_rank(None, ValueError("gloo"))
    locked = RunDirectoryError("name", "gloo", "is locked", "Timed out")
    assert not DDP.is_lost_rank(None, locked)
    assert not Strategy(torch.device("cpu"), torch.float32).is_lost_rank(RuntimeError("gloo"))


def test_sums_over_ranks_are_exact():
    """Also of numbers of tokens that fp32 does not represent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert DDP(torch.device("cpu"), torch.float32).all_reduce_sum(2**24 + 1) == [2**24 + 1]
    finally:
        dist.destroy_process_group()


def test_random_numbers_are_a_function_of_seed_step_and_rank():
    def drawn(seed: int, step: int, rank: int) -> tuple[int, ...]:
        Strategy(torch.device("cpu"), torch.float32, rank, world_size=8).reseed(seed, step)
        return tuple(torch.randint(2**62, (4,)).tolist())

    cases = [(s, n, r) for s in (0, 1, 2**63 - 1) for n in (0, 1, 10**9) for r in (0, 1, 7)]
    cases += [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 3, 2)]
    first = [drawn(*case) for case in cases]
    assert [drawn(*case) for case in reversed(cases)] == first[::-1]
    assert len(set(first)) == len(cases)
