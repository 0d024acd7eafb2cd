"""Choice of the device and of the precision, and GPUs that torch cannot use."""

import contextlib
from typing import ClassVar

import pytest
import torch
from helpers import TINY
from helpers.gpus import NVML, WHEEL, pretend_driver, pretend_gpus
from helpers.refusals import printed_keys, refused

import train
from clearhead.config.schema import ParallelConfig
from clearhead.errors import ConfigError
from clearhead.parallel import ddp, device, fsdp, nvidia
from clearhead.parallel.build import build_strategy
from clearhead.parallel.strategy import Strategy

GPU = torch.device("cuda", 0)


def problems(device_name="auto") -> list[str]:
    return [key for key, *_ in device.check(device_name)]


# ------------------------------------------------------------- a GPU that torch cannot use


def test_a_gpu_with_an_old_driver_is_an_error(monkeypatch, in_process, tmp_path):
    """Training on the CPU is possible, but has to be asked for."""
    pretend_driver(monkeypatch, NVML("535.183.01", 12020), build="13.0")
    assert problems("auto") == problems("cuda") == ["device"]
    assert problems("cpu") == []
    ((_, _, reason, hint),) = device.check("auto", group="trainer.")
    assert all(fact in reason for fact in ("535.183.01", "CUDA 12", "13.0", torch.__version__))
    assert "trainer.device=cpu" in hint
    code, out, err = in_process(train.main, tmp_path, *TINY, "data.path=any", "trainer.device=auto")
    assert (code, out, printed_keys(err)) == (2, "", ["trainer.device"])
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("build", [None, "12.6", "13.0"])
def test_a_gpu_that_torch_does_not_find_is_an_error(monkeypatch, build):
    """With a CPU build, with an old driver, and for another reason."""
    pretend_driver(monkeypatch, NVML(cuda=13000), build)
    assert problems() == ["device"]


def test_an_updated_driver_before_the_restart_is_an_error(monkeypatch):
    pretend_driver(monkeypatch, NVML(init=18))
    assert problems() == ["device"]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "NoDevFiles"])
def test_hidden_gpus_are_not_used(monkeypatch, hidden):
    pretend_driver(monkeypatch, NVML())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert problems() == ["device"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert problems() == []
    assert device.best_device() == "cpu"


@pytest.mark.parametrize("nvml", [None, NVML(init=9), NVML(gpus=()), NVML(gpus=(False, False))])
def test_a_machine_or_job_without_gpus(monkeypatch, nvml):
    """No driver, a driver that is not loaded, no GPU, GPUs of other jobs."""
    pretend_driver(monkeypatch, nvml)
    assert problems() == []
    assert problems("cuda") == ["device"]
    pretend_driver(monkeypatch, NVML(gpus=(False, True)))
    assert problems() == ["device"]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), WHEEL, False),  # V100
        ((7, 5), WHEEL, True),
        ((8, 9), WHEEL, True),  # sm_86
        ((8, 6), "sm_75 sm_89 sm_90", False),
        ((9, 0), "sm_80 sm_90a", True),
        ((12, 1), WHEEL, True),  # sm_120
        ((11, 0), WHEEL, False),
        ((11, 0), "sm_90 compute_90", True),  # PTX
        ((10, 3), "sm_100f", True),
        ((10, 3), "sm_100a", False),
        ((10, 0), "sm_90a compute_90a", False),
        ((7, 0), "compute_75", False),
        ((7, 0), "", True),  # not known
    ],
)
def test_a_gpu_for_which_torch_has_no_code_is_an_error(monkeypatch, capability, built, runs):
    pretend_gpus(monkeypatch, capability=capability, built=built)
    assert problems("auto") == problems("cuda") == ["device"] * (not runs)
    assert problems("cpu") == []


# ------------------------------------------------------------------- which GPU a process uses


@pytest.fixture
def launched(monkeypatch):
    """launched(visible, KEY=value) sets the environment of one of several ranks."""

    def launch(visible=None, **variables):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        if visible is not None:
            variables["CUDA_VISIBLE_DEVICES"] = visible
        for name, value in {"RANK": 3, "WORLD_SIZE": 4, **variables}.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_the_launcher_chooses_the_gpu(monkeypatch, launched, name):
    pretend_gpus(monkeypatch, count=4)
    launched(**{name: 3})
    assert problems() == []
    assert nvidia.gpu_index() == 3
    launched(LOCAL_RANK=1, SLURM_LOCALID=0)  # torchrun, which srun started
    assert nvidia.gpu_index() == 1
    monkeypatch.delenv("RANK")  # one process of srun
    assert nvidia.gpu_index() == 0


@pytest.mark.parametrize("local_rank", [0, 3])
def test_processes_that_see_one_gpu_each(monkeypatch, launched, local_rank):
    """torchrun --virtual-local-rank sets LOCAL_RANK=0, other launchers do not."""
    pretend_gpus(monkeypatch, count=1)
    launched("2", LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)
    assert problems() == []
    assert nvidia.gpu_index() == 0
    launched(None, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)  # a machine with one GPU
    assert problems() == ["device"]
    pretend_gpus(monkeypatch, count=2)
    launched("0,1", LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)
    assert problems() == ["device"]


class Ranks(Strategy):
    """One of several ranks. sent: for each rank, the numbers that it adds."""

    sent: ClassVar[list[list[int]]] = []

    def all_reduce_sum(self, *values):
        others = [row for rank, row in enumerate(self.sent) if rank != self.rank]
        return [sum(column) for column in zip(values, *others, strict=True)]


@pytest.mark.parametrize(("gpus", "is_shared"), [([5, 6, 7], False), ([5, 6, 5], True)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_on_one_gpu_are_refused(monkeypatch, launched, gpus, is_shared, rank):
    """On all ranks, so that none waits for the others."""
    launched(WORLD_SIZE=3, RANK=rank)
    sent = [[gpu * (place == n) for place in range(3)] for n, gpu in enumerate(gpus)]
    monkeypatch.setattr(Ranks, "sent", sent)
    monkeypatch.setattr(device, "prepare", lambda *_: GPU)
    monkeypatch.setattr(nvidia, "gpu_id", lambda _: gpus[rank])
    cpu = torch.device("cpu")
    monkeypatch.setattr(ddp, "DDP", lambda _, dtype, timeout: Ranks(cpu, dtype, rank, 3))
    monkeypatch.setattr(fsdp, "FSDP", None)
    refusal = refused(ConfigError, "LOCAL_RANK") if is_shared else contextlib.nullcontext()
    with refusal:
        build_strategy(ParallelConfig.with_defaults(), "cuda", "fp32", seed=0)


# --------------------------------------------------------------------------------- precision


def test_the_precision_of_a_gpu(monkeypatch):
    """(6, 1) has no fast products in fp16. Muon needs the range of fp32."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for capability, dtype, wide in (
        ((6, 1), fp32, fp32),
        ((7, 0), fp16, fp32),
        ((7, 5), fp16, fp32),
        ((8, 0), bf16, bf16),
        ((12, 0), bf16, bf16),
    ):
        pretend_gpus(monkeypatch, capability=capability)
        assert (device.best_dtype(GPU), device.best_wide_dtype(GPU)) == (dtype, wide), capability
    for kind in ("cpu", "mps"):
        assert device.best_dtype(torch.device(kind)) in (fp32, bf16)


def test_peak_flops_are_those_of_the_precision(monkeypatch):
    def found(kind=GPU):
        return [device.peak_flops(kind, dtype) for dtype in device.DTYPES.values()]

    pretend_gpus(monkeypatch)
    assert found() == [67e12, 989e12, 989e12]  # fp32, bf16, fp16
    pretend_gpus(monkeypatch, "Tesla T4")
    assert found() == [8.1e12, 65e12, 65e12]
    pretend_gpus(monkeypatch, "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert found() == found(torch.device("cpu")) == found(torch.device("mps")) == [None] * 3


def test_a_run_uses_the_precision_of_its_device(make_run, monkeypatch):
    """Muon never has fp16; the peak is that of the precision of the run."""
    peaks = {torch.float32: 1e9, torch.bfloat16: 2e9}
    monkeypatch.setattr(device, "peak_flops", lambda _, dtype: peaks[dtype])
    monkeypatch.setattr(device, "best_dtype", lambda _: torch.float16)  # as on a T4
    run = make_run("optimizer=muon", "trainer.precision=bf16")
    assert run.metrics.peak_flops == 2e9
    assert run.optimizer.dtype != torch.float16
