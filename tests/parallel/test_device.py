"""Choice of the device and of the precision, and GPUs that torch cannot use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, TIMEOUT, TINY
from helpers.gpus import pretend_gpus
from helpers.refusals import printed_keys

import train
from clearhead.parallel import device, hardware
from clearhead.run import build

GPU = torch.device("cuda", 0)


def problems(device_name="auto") -> list[str]:
    return [key for key, *_ in device.check(device_name)]


# --------------------------------------------------------------------------- busy cores

SECOND = 10**9
# (run, waiting) seconds of each thread in 30 seconds; threads of the training; whether it is slow.
BUSY = [
    ({"1": (28, 1), "2": (20, 0)}, 2, False),  # no other program
    ({"1": (1, 0), "2": (0, 0)}, 2, False),  # waits for something else
    ({"1": (20, 9), "2": (18, 10)}, 2, True),
    ({"1": (20, 9), "2": (17, 9), "new": (20, 20)}, 2, False),  # its own third thread
    ({"1": (15, 15)}, 1, True),
    ({}, 2, False),  # not Linux
]


@pytest.mark.parametrize(("used", "threads", "is_slow"), BUSY)
def test_training_says_when_other_programs_use_the_cores(
    make_run, capsys, tmp_path, monkeypatch, used, threads, is_slow
):
    """Files as in /proc/self/task. At most three lines."""
    monkeypatch.setattr(hardware, "available_cores", lambda: 2)
    monkeypatch.setattr(hardware, "TASKS", tmp_path / "task")
    run, counts, now = make_run(), [], [0.0]
    capsys.readouterr()
    for measured in range(100):
        for thread, (ran, waited) in used.items():
            before = 0 if thread == "new" else 1000  # seconds of waiting before the training
            file = tmp_path / "task" / thread / "schedstat"
            file.parent.mkdir(parents=True, exist_ok=True)
            times = SECOND * (1 + ran * measured), SECOND * (before + waited * measured)
            file.write_text("{} {} 5\n".format(*times))
        if measured == 0:
            monkeypatch.setattr(hardware.time, "monotonic", lambda: now[0])
            run.cores = hardware.CoreTime(threads)
        run.report_speed()
        counts.append(len(capsys.readouterr().out.splitlines()))
        now[0] += 30
    assert counts[:2] == [0, int(is_slow)]
    assert sum(counts[:8]) == int(is_slow)
    assert sum(counts) == (3 if is_slow else 0)


LIBGOMP = [("train.py", {}, "10000"), ("generate.py", {}, "10000")]
LIBGOMP += [("generate.py", {"GOMP_SPINCOUNT": "7"}, "7")]
LIBGOMP += [("train.py", {"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")]


@pytest.mark.parametrize(("program", "given", "spins"), LIBGOMP)
def test_threads_that_wait_sleep(tmp_path, program, given, spins):
    """Unless the user has set it. libgomp prints its settings when it is loaded."""
    if "libgomp" not in " ".join(map(str, Path(torch.__file__).parent.rglob("lib/libgomp*"))):
        pytest.skip("torch has another OpenMP library")
    kept = {name: value for name, value in os.environ.items() if "OMP" not in name}
    setting = "data.path=none" if program == "train.py" else "checkpoint=none"
    done = subprocess.run(
        [sys.executable, REPOSITORY / program, setting],
        cwd=tmp_path,
        env=kept | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)) == {spins}


# ------------------------------------------------------------- a GPU that torch cannot use


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """driver(lines): a machine with this output of nvidia-smi, on which torch finds no GPU."""

    def pretend(lines: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{lines}'")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return pretend


def test_a_gpu_that_torch_cannot_use_is_an_error(driver, in_process, tmp_path):
    """Training on the CPU is possible, but has to be asked for."""
    driver("GPU 0: NVIDIA H100 (UUID: x)")
    assert problems("auto") == problems("cuda") == ["device"]
    assert problems("cpu") == []
    code, out, err = in_process(train.main, tmp_path, *TINY, "data.path=any", "trainer.device=auto")
    assert (code, out, printed_keys(err)) == (2, "", ["trainer.device"])
    assert len(err.splitlines()) == 1
    assert "trainer.device=cpu" in err
    driver("Failed to initialize NVML: Driver/library version mismatch")
    assert problems() == ["device"]


def test_gpus_that_are_hidden_or_missing_are_not_used(driver, monkeypatch):
    """No GPU, those of other jobs, or a driver that is not loaded."""
    driver("GPU 0: NVIDIA H100 (UUID: x)")
    for hidden in ("", "-1", "-1,0", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert problems() == []
        assert device.best_device() == "cpu"
    for lines in ("NVIDIA-SMI has failed", "No devices found."):
        driver(lines)
        assert problems() == []
        assert problems("cuda") == ["device"]


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
    assert device.gpu_index() == 3
    launched(LOCAL_RANK=1, SLURM_LOCALID=0)  # torchrun, which srun started
    assert device.gpu_index() == 1
    monkeypatch.delenv("RANK")  # one process of srun
    assert device.gpu_index() == 0


@pytest.mark.parametrize("local_rank", [0, 3])
def test_processes_that_see_one_gpu_each(monkeypatch, launched, local_rank):
    """torchrun --virtual-local-rank sets LOCAL_RANK=0, other launchers do not."""
    pretend_gpus(monkeypatch, count=1)
    launched("2", LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)
    assert problems() == []
    assert device.gpu_index() == 0
    launched(None, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)  # a machine with one GPU
    assert problems() == ["device"]
    pretend_gpus(monkeypatch, count=2)
    launched("0,1", LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=4)
    assert problems() == ["device"]


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
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # before torch 2.12
    assert device.best_dtype(torch.device("cpu")) == fp32


# TFLOP/s in bf16 (T4: fp16) and in fp32 from data sheets, by the names that drivers report.
PEAKS = {
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA GH200 144G HBM3e": (989, 67),
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "Tesla T4": (65, 8.1),
    # Parts of a GPU, and others with a similar name.
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "AMD Instinct MI300X": None,
}


def test_peak_flops_of_the_names_that_drivers_report(monkeypatch):
    for name, peaks in PEAKS.items():
        pretend_gpus(monkeypatch, name)
        dtypes = (torch.bfloat16, torch.float32)
        found = [hardware.peak_flops(GPU, dtype) for dtype in dtypes]
        assert found == [peak * 1e12 for peak in peaks] if peaks else found == [None, None], name
    assert hardware.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_a_run_uses_the_precision_of_its_device(make_run, monkeypatch):
    """Muon never has fp16; the peak is that of the precision of the run."""
    peaks = {torch.float32: 1e9, torch.bfloat16: 2e9}
    monkeypatch.setattr(build, "peak_flops", lambda _, dtype: peaks[dtype])
    monkeypatch.setattr(device, "best_dtype", lambda _: torch.float16)  # as on a T4
    run = make_run("optimizer=muon", "trainer.precision=bf16")
    assert run.metrics.peak_flops == 2e9
    assert run.optimizer.dtype != torch.float16
