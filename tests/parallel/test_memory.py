"""Memory formulas, compared with saved tensors, allocated memory and measured peaks."""

import itertools
import json

import pytest
import torch
from helpers import REPOSITORY
from helpers.settings import settings

from clearhead.parallel import memory
from clearhead.parallel.device import DTYPES
from clearhead.parallel.memory import Job, estimate
from clearhead.parallel.strategy import Strategy
from model import GPT, ModelConfig

MEASURED = REPOSITORY / "benchmarks" / "results" / "2026-11-28-memory-cpu.json"
V = 257


def job_of(*given, strategy="single", ranks=1, device="cuda", compiled=False, **model) -> Job:
    """Returns a Job with these settings and model sizes."""
    config = settings(*given, *(f"model.{key}={value}" for key, value in model.items()))
    precision = config.trainer.precision.replace("auto", "bf16")
    return Job(config, strategy, ranks, precision, device, compiled)


def tiny(*given, batch_size=2, length=48, **changes) -> Job:
    """Returns a Job for a CPU with one micro-batch per step."""
    sizes = {"vocab_size": V, "context_length": length, "emb_dim": 32, "num_heads": 4}
    given += (
        "data.tokenizer=byte",
        f"trainer.batch_size={batch_size}",
        f"data.max_length={length}",
    )
    return job_of(*given, device="cpu", **{**sizes, "num_layers": 2, "dropout": 0.0, **changes})


def trained(job) -> tuple[GPT, Strategy, torch.Tensor]:
    """Returns the module to train, its strategy and a micro-batch."""
    config, strategy = job.config, Strategy(torch.device("cpu"), DTYPES[job.precision])
    model = GPT(ModelConfig(**config.model.model_dump())).train()
    model.activation_checkpointing = config.trainer.activation_checkpointing
    ids = torch.randint(0, config.model.vocab_size, (job.windows_per_rank, config.data.max_length))
    return strategy.wrap(model, compiled=False), strategy, ids


def kept_by_forward(job) -> int:
    """Returns the bytes of all storages that autograd saves, without parameters."""
    model, strategy, ids = trained(job)
    of_parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = tensor  # a reference, so that no address is reused
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, strategy.autocast():
        model(ids, ids.clone())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"dropout": 0.1},
        {"attention": "explicit"},
        {"attention": "explicit", "dropout": 0.1},
    ],
    ids=["sdpa", "sdpa with dropout", "explicit", "explicit with dropout"],
)
def test_activations_equal_the_tensors_that_autograd_saves(model, precision, checkpointing):
    given = f"trainer.precision={precision} trainer.activation_checkpointing={checkpointing}"
    job = tiny(*given.lower().split(), **model)
    width, layers = job.config.model.emb_dim, job.config.model.num_layers
    expected = memory.activations(job, 2)
    expected += job.c * (2 * 48 + V) * width  # gradients of the head
    if precision == "bf16" and not checkpointing:  # copies of the matrices; biases are not saved
        expected += 2 * 12 * layers * width**2
    assert kept_by_forward(job) == pytest.approx(expected, rel=0.04)


def peak_of_step(job) -> int:
    """Returns the bytes at the peak of a second step, with weights and moments of AdamW."""
    model, strategy, ids = trained(job)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with strategy.autocast():
            _, loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return 3 * weights + max(itertools.accumulate(changes))


# The peak is in the head or in a block.
HEAD = {"vocab_size": 16000, "emb_dim": 128, "dropout": 0.1}
BLOCK = {"emb_dim": 128, "num_layers": 3}


@pytest.mark.parametrize(
    ("model", "precision", "checkpointing", "part", "rel"),
    [
        (HEAD, "fp32", "false", "logits", 0.03),
        (HEAD, "bf16", "true", "logits", 0.03),
        (BLOCK, "fp32", "true", "working", 0.12),
    ],
)
def test_the_peak_of_a_step_equals_the_allocated_memory(model, precision, checkpointing, part, rel):
    given = f"trainer.precision={precision} trainer.activation_checkpointing={checkpointing}"
    job = tiny(*given.split(), batch_size=4, length=128, **model)
    parts = estimate(job, 4)
    assert parts[part] > 0
    allocated = sum(parts.values()) - parts["slack"] - parts["libraries"]
    assert allocated == pytest.approx(peak_of_step(job), rel=rel)


def test_estimates_are_within_10_percent_of_measured_peaks():
    for run in json.loads(MEASURED.read_text())["runs"]:
        config = settings("model=gpt2-small", "data.path=any", *run["settings"].split())
        strategy = "ddp" if "ranks" in run else "single"
        job = Job(config, strategy, run.get("ranks", 1), config.trainer.precision, "cpu", False)
        windows = min(job.windows_per_rank, config.trainer.micro_batch_size or job.windows_per_rank)
        total = sum(estimate(job, windows).values())
        assert total == pytest.approx(run["peak_bytes"], rel=0.10), run["settings"]


# Radford et al. 2019, table 2, and the parameters of the released weights.
XL, PARAMETERS = ("model=gpt2-xl", "data.max_length=1024", "model.dropout=0"), 1_557_611_200


def test_weights_gradients_and_moments():
    """Mixed precision with AdamW on fp32 weights: 4 + 4 + 8 bytes per parameter."""
    for strategy, batch_size in (("single", 4), ("ddp", 2), ("ddp", 4)):
        job = job_of(*XL, f"trainer.batch_size={batch_size}", strategy=strategy, ranks=2)
        parts = estimate(job, 1)
        assert (parts["weights"], parts["optimizer"]) == (4 * PARAMETERS, 8 * PARAMETERS)
        # DDP: the buckets and the gradients of earlier micro-batches.
        copies = 2 if (strategy, batch_size) == ("ddp", 4) else 1
        assert parts["gradients"] == copies * 4 * PARAMETERS
    # Before the last micro-batch, nothing is reduced: every rank holds all gradients.
    parts = estimate(job_of(*XL, "trainer.batch_size=128", strategy="fsdp", ranks=64), 1)
    assert (parts["weights"], parts["optimizer"]) == (PARAMETERS / 16, PARAMETERS / 8)
    assert parts["gradients"] == 4 * PARAMETERS
    # Three blocks, and the embeddings and the last norm in fp32: (50,257 + 1,024 + 2) x 1,600 x 4.
    assert parts["gathered"] == 3 * 2 * 12 * 1600**2 + 328_211_200


def test_the_largest_micro_batch_is_a_divisor_that_fits():
    for share, limit, expected in [(8, 8, 8), (8, 7, 4), (12, 5, 4), (7, 6, 1), (8, 0, None)]:
        assert memory.largest_micro_batch(share, limit.__ge__) == expected, (share, limit)
