"""Micro-batches: the largest that fits, and hints if none fits."""

import re
from unittest.mock import Mock

import pytest
import torch
from helpers.refusals import refused
from helpers.settings import settings

from clearhead.errors import ConfigError, OutOfMemoryError
from clearhead.parallel import memory
from clearhead.parallel.strategy import Strategy
from clearhead.run import build
from train import fit


@pytest.fixture
def memory_is(monkeypatch):
    """memory_is(bytes) simulates a machine with this much memory."""
    return lambda total: monkeypatch.setattr(memory, "memory_of", lambda _: total)


def test_out_of_memory_errors_are_recognized():
    of_cpu = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    of_cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for text, expected in ((of_cpu, True), (of_cublas, True), ("shapes differ", False)):
        assert memory.is_out_of_memory(RuntimeError(text)) == expected, text


def suggested(error) -> str:
    """Returns the first setting in a hint."""
    return re.search(r"[a-z]+\.?\w*=\w+", error.hint)[0]


def bytes_of(config, windows) -> float:
    """Returns the estimate for a step with this micro-batch size."""
    job = memory.Job(config, "single", 1, "fp32", "cpu", compiled=False)
    return sum(memory.estimate(job, windows).values())


def test_a_run_out_of_memory_resumes_with_the_suggested_setting(make_run):
    given = ("name=tight", "trainer.batch_size=8", "trainer.sample_tokens=0")
    run = make_run(*given, "trainer.max_steps=2")
    fit(run)
    run = make_run(*given, "trainer.max_steps=3", "trainer.micro_batch_size=6")
    run.trained_model = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with refused(OutOfMemoryError, "trainer.micro_batch_size", 6, exit_code=4) as caught:
        fit(run)
    assert suggested(caught.value) == "trainer.micro_batch_size=2"  # at most half of 6, divides 8
    assert (run.directory / "run.html").is_file()
    run = make_run(*given, "trainer.max_steps=3", suggested(caught.value))
    assert run.state.step == 2  # of the checkpoint
    fit(run)
    assert run.state.step == 3


def test_auto_uses_the_estimate_and_trains_the_same(make_run, memory_is):
    given = ["trainer.max_steps=2", "model.dropout=0", "trainer.sample_tokens=0"]
    plain = make_run("name=plain", *given)
    fit(plain)
    enough = bytes_of(plain.config, 2)
    memory_is(1.0001 * enough / memory.USABLE)
    auto = make_run("name=auto", *given, "trainer.micro_batch_size=auto")
    assert auto.config.trainer.micro_batch_size == auto.evaluator.batch_size == 2
    fit(auto)
    assert auto.state.val_loss == pytest.approx(plain.state.val_loss, rel=1e-5)
    assert "micro_batch_size: 2\n" in (auto.directory / "config.yaml").read_text()
    memory_is(bytes_of(plain.config, 1))  # without the fraction for other programs
    least = make_run("name=least", "trainer.micro_batch_size=auto")
    assert least.config.trainer.micro_batch_size == 1


def test_a_batch_that_cannot_fit_is_refused_before_anything_is_written(
    make_run, memory_is, monkeypatch, tmp_path
):
    monkeypatch.setitem(memory.LIBRARIES, "cpu", 0)
    config = make_run("name=first").config
    memory_is(1.001 * bytes_of(config, 2) / memory.USABLE)
    for given in ("trainer.batch_size=8", "trainer.micro_batch_size=4"):
        with refused(ConfigError, *given.split("=")) as caught:
            make_run("name=large", "trainer.compile=false", given)
        assert suggested(caught.value) == "trainer.micro_batch_size=2"
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["first"]
    make_run("name=auto", "trainer.compile=false", "trainer.micro_batch_size=auto")


GPU = Strategy(torch.device("cuda:0"), torch.bfloat16)
SMALL = ("model=gpt2-small", "data.max_length=1024", "trainer.batch_size=64")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(free, reserved) simulates a GPU of 80 GB: the bytes that no process uses, and those that
    this process has reserved. The machine has 100 GB of main memory."""

    def of(free, reserved=0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80e9))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)

    monkeypatch.setattr(memory, "available_memory", lambda: 100e9)
    return of


def test_auto_uses_the_memory_of_a_gpu_that_other_processes_leave(gpu):
    config = settings(*SMALL)
    found = {}
    for others in (0, 60e9):
        for reserved in (0, 5e9):
            # The estimate contains the CUDA context, which is neither free nor reserved.
            gpu(80e9 - memory.LIBRARIES["cuda"] - others - reserved, reserved)
            found[others, reserved] = memory.find_micro_batch(config, GPU, compiled=False)
    needed = sum(memory.estimate(memory.Job.of(config, GPU, False), 64).values())
    assert needed < memory.USABLE * 80e9
    assert found[0, 0] == found[0, 5e9] == 64
    assert found[60e9, 0] == found[60e9, 5e9] < 64


def test_a_model_that_needs_more_than_the_free_memory_of_a_gpu_is_refused(gpu):
    config = settings(*SMALL, "trainer.micro_batch_size=1")
    gpu(80e9)
    assert memory.check_memory(config, GPU) == []
    gpu(1e9)  # weights, gradients and moments need 2 GB
    ((key, *_),) = memory.check_memory(config, GPU)
    assert key == "model"


def test_a_checkpoint_that_does_not_fit_into_main_memory_is_refused(gpu, monkeypatch):
    """On a GPU; GPT-2 large needs 9.3 GB. Only rank 0 copies the tensors."""
    config = settings("model=gpt2-large", "trainer.batch_size=1")
    other = Strategy(torch.device("cuda:0"), torch.bfloat16, rank=1, world_size=1)
    gpu(80e9)
    for available, keys in ((9e9, ["model"]), (10e9, []), (0, [])):  # 0: unknown
        monkeypatch.setattr(memory, "available_memory", lambda found=available: found)
        assert [key for key, *_ in memory.check_memory(config, GPU)] == keys
        assert memory.check_memory(config, other) == []


def test_the_accuracy_is_measured_with_few_logits_at_once(make_run, monkeypatch):
    run = make_run("data=induction", "data.path=null", "trainer.eval_windows=8")
    metrics, sizes = run.evaluate(), []
    limit = 3 * run.config.data.max_length * run.config.model.vocab_size  # of three windows
    monkeypatch.setattr(build, "LOGITS_AT_ONCE", limit)
    run = make_run("data=induction", "data.path=null", "trainer.eval_windows=8")
    run.model.register_forward_hook(
        lambda _, inputs, output: sizes.extend(x.numel() for x in output[:1] if x is not None)
    )
    assert run.evaluate() == pytest.approx(metrics, rel=1e-5)
    assert max(sizes) == limit


def test_a_model_or_a_window_that_cannot_fit_is_refused(memory_is):
    memory_is(8e9)
    strategy = Strategy(torch.device("cpu"), torch.float32)
    long = "model=gpt2-nano model.context_length=50000 data.max_length=50000 trainer.batch_size=1"
    for given, expected in (
        ("model=gpt2-xl", "model"),
        ("model.vocab_size=1e10", "model"),
        (long, "trainer.batch_size"),
    ):
        ((key, *_),) = memory.check_memory(settings(*given.split()), strategy)
        assert key == expected
