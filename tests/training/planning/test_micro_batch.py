"""Micro-batches and memory: the search for the largest, and what is told when one did not fit."""

import re

import pytest
import torch
from helpers.runs import assert_same, weights

from errors import ConfigError, OutOfMemoryError
from training import fitting, memory
from training.command import compose
from training.memory import estimate
from training.parallel import Parallel


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("largest", [1, 2, 4, 8, 16])
def test_the_search_finds_the_largest_from_wherever_it_begins(start, largest):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    assert fitting.search([1, 2, 4, 8, 16], start, fits) == largest
    assert len(tried) == len(set(tried))
    assert sum(size > largest for size in tried) <= max(1, start)


def test_when_nothing_fits_the_smallest_is_left_to_fail_by_itself():
    assert fitting.search([2, 4], 1, lambda size: False) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_memory_that_has_run_out_is_recognised(error):
    assert fitting.is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError("out of memory")])
def test_other_errors_are_not_taken_for_it(error):
    assert not fitting.is_out_of_memory(error)


def without_memory(run):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.fast_model = no_room


def test_a_step_without_room_says_what_fits_and_that_goes_on(trainer):
    run = trainer("name=tight", "trainer.save_every=1", "trainer.max_steps=2")
    run.train()
    run = trainer("name=tight", "trainer.max_steps=4", "trainer.micro_batch_size=4")
    without_memory(run)
    with pytest.raises(OutOfMemoryError) as caught:
        run.train()
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        "trainer.micro_batch_size=4: 4 windows of 32 tokens do not fit into the memory of cpu; use "
        "trainer.micro_batch_size=2: 4 micro-batches a step on each device keep the batch of 8; "
        "the checkpoint of step 2 is intact"
    )
    run = trainer("name=tight", "trainer.max_steps=4", "trainer.micro_batch_size=2")
    assert run.state.step == 2
    run.train()
    assert run.state.step == 4


def test_what_is_left_when_one_window_is_too_many(trainer):
    """In this order, and each is free to change in a run that goes on."""
    settings = ["name=one", "trainer.micro_batch_size=1", "trainer.max_steps=2"]
    run = trainer(*settings)
    run.train()
    error = fitting.what_would_fit(run.settings, run.parallel, 1, run.intact())
    assert "; use trainer.activation_checkpointing=true, " in str(error)
    settings += ["trainer.activation_checkpointing=true", "trainer.max_steps=3"]
    run = trainer(*settings)
    run.train()
    assert run.state.step == 3
    error = fitting.what_would_fit(run.settings, run.parallel, 1, run.intact())
    assert "; use parallel=fsdp on several devices" in str(error)


def test_auto_takes_what_is_estimated_to_fit_and_trains_the_same(trainer, monkeypatch):
    settings = ["trainer.max_steps=3", "model.dropout=0"]
    plain = trainer("name=plain", *settings)
    plain.train()
    shape = {"precision": "fp32", "device": "cpu", "accumulating": True}
    enough = estimate(plain.settings.model, 2, 32, **shape).total
    monkeypatch.setattr(fitting, "memory_of", lambda _: 1.0001 * enough / fitting.USABLE)
    auto = trainer("name=auto", *settings, "trainer.micro_batch_size=auto")
    assert auto.settings.trainer.micro_batch_size == auto.micro_batch_size == 2
    auto.train()
    assert auto.state.val_loss == pytest.approx(plain.state.val_loss, rel=1e-5)
    assert "micro_batch_size: 2\n" in (auto.folder / "config.yaml").read_text()
    least = estimate(plain.settings.model, 1, 32, **shape).total
    monkeypatch.setattr(fitting, "memory_of", lambda _: least)  # without what is left to others
    assert trainer("name=least", "trainer.micro_batch_size=auto").micro_batch_size == 1


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Trials call these; the rest of a trial runs anywhere."""
    limits = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return limits


@pytest.mark.parametrize("room", [True, False])
def test_a_trial_leaves_no_trace(trainer, as_on_a_gpu, monkeypatch, room):
    run = trainer("model.dropout=0.2")
    before = weights(run)
    if not room:
        forward, calls = run.model.forward, []

        def second_has_none(*args):
            calls.append(args)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(*args)

        monkeypatch.setattr(run.model, "forward", second_has_none)
    assert fitting._fits(4, run.settings, run.parallel, run.model) is room
    assert as_on_a_gpu == [fitting.USABLE, 1.0]
    assert_same(before, weights(run))
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert not run.optimizer.state


def test_a_trial_that_fails_otherwise_says_so(trainer, as_on_a_gpu, monkeypatch):
    run = trainer()
    monkeypatch.setattr(run.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fitting._fits(4, run.settings, run.parallel, run.model)
    assert as_on_a_gpu == [fitting.USABLE, 1.0]


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
    settings = trainer("name=first").settings
    memory_is(1.001 * estimate(settings.model, 2, 32, **shape).total / fitting.USABLE)
    for given, key in (
        ([], "trainer.batch_size"),
        (["trainer.micro_batch_size=4"], "trainer.micro_batch_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            trainer("name=large", "trainer.compile=false", *given)
        ((found, _, _, fix),) = caught.value.problems
        assert found == key
        assert "trainer.micro_batch_size=2" in fix
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["first"]
    trainer("name=small", "trainer.compile=false", "trainer.micro_batch_size=2")
    trainer("name=auto", "trainer.compile=false", "trainer.micro_batch_size=auto")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_cannot_fit_is_refused(memory_is, device):
    memory_is(8e9)
    parallel = Parallel(torch.device(device), torch.float32)
    settings = compose(["model=gpt2-xl"])
    ((key, value, _, _),), _ = fitting.check_memory(settings, parallel)
    assert (key, value) == ("model.num_layers", 48)


def test_a_window_that_cannot_fit_blames_what_is_large(memory_is):
    memory_is(8e9)
    parallel = Parallel(torch.device("cpu"), torch.float32)
    long = ["model=gpt2-nano", "model.context_length=50000", "data.max_length=50000"]
    settings = compose([*long, "trainer.batch_size=1"])
    ((key, value, _, fix),), _ = fitting.check_memory(settings, parallel)
    assert (key, value) == ("model.context_length", 50000)
    assert "trainer.activation_checkpointing=true" in fix


def test_what_may_not_fit_is_told_and_trains(memory_is):
    """Estimates have an error, and other programs come and go."""
    parallel = Parallel(torch.device("cpu"), torch.float32)
    settings = compose(["model=gpt2-nano", "trainer.batch_size=64"])
    memory_is(64e9, free=64e9)
    assert fitting.check_memory(settings, parallel) == ([], [])
    memory_is(64e9, free=1e9)
    problems, (note,) = fitting.check_memory(settings, parallel)
    assert problems == []
    assert note.startswith("trainer.batch_size=64: ")
    fits = int(re.search(r"trainer\.micro_batch_size=(\d+)", note)[1])
    assert 1 <= fits < 64
    settings.trainer.micro_batch_size = fits
    assert fitting.check_memory(settings, parallel) == ([], [])
    memory_is(64e9, free=0)  # not known
    assert fitting.check_memory(compose(["trainer.batch_size=64"]), parallel) == ([], [])


def test_a_model_beyond_every_machine_is_a_mistake_in_its_setting(in_process, tmp_path):
    import train

    arguments = ["model.vocab_size=1e10", "trainer.device=cpu", "wandb=off"]
    code, out, err = in_process(train.main, tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("model.vocab_size=10000000000: ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
