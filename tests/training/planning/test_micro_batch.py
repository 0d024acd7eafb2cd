"""Micro-batches and memory: the search for the largest that fits, and what is suggested when none
does."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refused
from helpers.runs import assert_same, weights
from helpers.settings import settings

from errors import ConfigError, OutOfMemoryError
from training import fitting, memory
from training.memory import estimate
from training.parallel import Parallel


def test_the_search_finds_the_largest_from_any_start():
    sizes = [1, 2, 4, 8, 16]
    for start, largest in itertools.product(range(5), sizes):
        tried = []

        def fits(size, tried=tried, largest=largest):
            tried.append(size)
            return size <= largest

        assert fitting.search(sizes, start, fits) == largest, (start, largest)
        assert len(tried) == len(set(tried))
        assert sum(size > largest for size in tried) <= max(1, start)
    # When nothing fits, the step with the smallest fails by itself.
    assert fitting.search([2, 4], 1, lambda size: False) == 2


def test_errors_of_memory_are_recognised():
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ):
        assert fitting.is_out_of_memory(error), error
    for error in (RuntimeError("shapes differ"), OSError("out of memory")):
        assert not fitting.is_out_of_memory(error), error


def test_a_run_out_of_memory_continues_with_what_is_suggested(trainer):
    run = trainer("name=tight", "trainer.max_steps=2", "trainer.sample_tokens=0")
    run.train()
    run = trainer("name=tight", "trainer.max_steps=3", "trainer.micro_batch_size=4")

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.fast_model = full
    with refused(OutOfMemoryError, "trainer.micro_batch_size", 4, exit_code=4) as caught:
        run.train()
    assert suggested(caught.value) == "trainer.micro_batch_size=2"
    assert "step 2 " in caught.value.hint  # of the checkpoint
    run = trainer("name=tight", "trainer.max_steps=3", suggested(caught.value))
    assert run.state.step == 2
    run.train()
    assert run.state.step == 3


def suggested(error) -> str:
    """The setting that a hint names first."""
    return re.search(r"[a-z]+\.?\w*=\w+", error.hint)[0]


def test_what_is_suggested_when_one_window_does_not_fit(trainer):
    """In this order; each may be changed in a run that continues."""
    given = ["name=one", "trainer.micro_batch_size=1", "trainer.max_steps=2"]
    run = trainer(*given)
    run.train()
    error = fitting.what_would_fit(run.settings, run.parallel, 1, run.intact())
    assert suggested(error) == "trainer.activation_checkpointing=true"
    run = trainer(*given, suggested(error), "trainer.max_steps=3")
    run.train()
    assert run.state.step == 3
    error = fitting.what_would_fit(run.settings, run.parallel, 1, run.intact())
    assert suggested(error) == "parallel=fsdp"


def test_auto_takes_what_is_estimated_to_fit_and_trains_the_same(trainer, monkeypatch):
    given = ["trainer.max_steps=2", "model.dropout=0", "trainer.sample_tokens=0"]
    plain = trainer("name=plain", *given)
    plain.train()
    shape = {"precision": "fp32", "device": "cpu", "accumulating": True}
    enough = estimate(plain.settings.model, 2, 32, **shape).total
    monkeypatch.setattr(fitting, "memory_of", lambda _: 1.0001 * enough / fitting.USABLE)
    auto = trainer("name=auto", *given, "trainer.micro_batch_size=auto")
    assert auto.settings.trainer.micro_batch_size == auto.micro_batch_size == 2
    auto.train()
    assert auto.state.val_loss == pytest.approx(plain.state.val_loss, rel=1e-5)
    assert "micro_batch_size: 2\n" in (auto.folder / "config.yaml").read_text()
    least = estimate(plain.settings.model, 1, 32, **shape).total
    monkeypatch.setattr(fitting, "memory_of", lambda _: least)  # without what is left to others
    assert trainer("name=least", "trainer.micro_batch_size=auto").micro_batch_size == 1


@pytest.fixture
def on_a_gpu(trainer, monkeypatch):
    """find(...) -> the micro-batch size that a run finds by trials, as on a GPU. Trials call these
    functions of torch.cuda; the rest of a trial runs on a CPU."""
    limits = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(fitting, "memory_of", lambda _: 1e12)
    run = trainer("model.dropout=0.2", "trainer.batch_size=4")

    class Device(str):
        type = "cuda"

    def find():
        device = Device("cpu")
        like_gpu = SimpleNamespace(
            device=device,
            world_size=1,
            strategy="single",
            precision="fp32",
            largest=run.parallel.largest,
            autocast=run.parallel.autocast,
        )
        return fitting.find_micro_batch(run.settings, like_gpu, run.model, compiled=False)

    return SimpleNamespace(run=run, limits=limits, find=find)


@pytest.mark.parametrize("largest", [4, 2])
def test_trials_leave_the_model_as_it_was(on_a_gpu, monkeypatch, largest):
    run = on_a_gpu.run
    before, forward, calls = weights(run), run.model.forward, []

    def limited(ids, *more):
        calls.append(len(ids))
        if len(ids) > largest and calls.count(len(ids)) == 2:  # beside the first one's gradients
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(ids, *more)

    monkeypatch.setattr(run.model, "forward", limited)
    assert on_a_gpu.find() == largest
    assert calls == [4, 4] + [2, 2] * (largest == 2)
    assert on_a_gpu.limits == [fitting.USABLE, 1.0] * (len(calls) // 2)
    assert_same(before, weights(run))
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert not run.optimizer.state


def test_a_trial_that_fails_otherwise_raises_its_error(on_a_gpu, monkeypatch):
    monkeypatch.setattr(on_a_gpu.run.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        on_a_gpu.find()
    assert on_a_gpu.limits == [fitting.USABLE, 1.0]


# ------------------------------------------------------------------------- before a run begins


@pytest.fixture
def memory_is(monkeypatch):
    """memory_is(bytes, free) -> a machine with so much memory, of which so much is free."""

    def set_memory(total, free=0):
        monkeypatch.setattr(fitting, "memory_of", lambda _: total)
        monkeypatch.setattr(fitting, "swap_space", lambda: 0)
        monkeypatch.setattr(fitting, "spare_memory", lambda: free)

    return set_memory


def test_a_batch_that_cannot_fit_is_refused_before_anything_is_written(
    trainer, memory_is, monkeypatch, tmp_path
):
    monkeypatch.setitem(memory.LIBRARIES, "cpu", 0)
    shape = {"precision": "fp32", "device": "cpu", "accumulating": True}
    model = trainer("name=first").settings.model
    memory_is(1.001 * estimate(model, 2, 32, **shape).total / fitting.USABLE)
    for given, key in (
        ([], "trainer.batch_size"),
        (["trainer.micro_batch_size=4"], "trainer.micro_batch_size"),
    ):
        with refused(ConfigError, key) as caught:
            trainer("name=large", "trainer.compile=false", *given)
        assert "trainer.micro_batch_size=2" in caught.value.hint
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["first"]
    trainer("name=small", "trainer.compile=false", "trainer.micro_batch_size=2")
    trainer("name=auto", "trainer.compile=false", "trainer.micro_batch_size=auto")


def test_a_model_or_a_window_that_cannot_fit_is_refused(memory_is):
    """With the setting that is large."""
    memory_is(8e9)
    for device, given, expected in (
        ("cpu", "model=gpt2-xl", ("model.num_layers", 48)),
        ("cuda", "model=gpt2-xl", ("model.num_layers", 48)),
        ("cpu", "model.vocab_size=1e10", ("model.vocab_size", 10**10)),
    ):
        parallel = Parallel(torch.device(device), torch.float32)
        ((key, value, _, _),), _ = fitting.check_memory(settings(given), parallel)
        assert (key, value) == expected
    parallel = Parallel(torch.device("cpu"), torch.float32)
    long = ["model=gpt2-nano", "model.context_length=50000", "data.max_length=50000"]
    found = settings(*long, "trainer.batch_size=1")
    ((key, value, _, hint),), _ = fitting.check_memory(found, parallel)
    assert (key, value) == ("model.context_length", 50000)
    assert "trainer.activation_checkpointing=true" in hint


def test_what_may_not_fit_is_a_note_only(memory_is):
    """Estimates have an error, and other programs start and end."""
    parallel = Parallel(torch.device("cpu"), torch.float32)
    found = settings("model=gpt2-nano", "trainer.batch_size=64")
    memory_is(64e9, free=64e9)
    assert fitting.check_memory(found, parallel) == ([], [])
    memory_is(64e9, free=1e9)
    problems, (note,) = fitting.check_memory(found, parallel)
    assert problems == []
    assert note.startswith("trainer.batch_size=64: ")
    fits = int(re.search(r"trainer\.micro_batch_size=(\d+)", note)[1])
    assert 1 <= fits < 64
    found.trainer.micro_batch_size = fits
    assert fitting.check_memory(found, parallel) == ([], [])
    memory_is(64e9, free=0)  # not known
    assert fitting.check_memory(settings("trainer.batch_size=64"), parallel) == ([], [])
