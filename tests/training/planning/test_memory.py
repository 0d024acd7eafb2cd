"""The formulas for memory, against what autograd keeps, what is allocated, and measured peaks."""

import itertools
import json

import pytest
import torch
from helpers import REPOSITORY
from helpers.models import TINY_MODEL

from model import GPT, ModelConfig
from training.ops.cross_entropy import head_loss
from training.planning import memory

MEASURED = REPOSITORY / "benchmarks" / "results" / "2026-11-22-memory-cpu.json"
B, T, V = 2, 48, 101


def tiny(**changes) -> ModelConfig:
    shape = TINY_MODEL | {"vocab_size": V, "context_length": 64, "emb_dim": 32}
    return ModelConfig(**shape | changes)


def autocast(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def model_of(config, checkpointing=False) -> GPT:
    model = GPT(config).train()
    model.head_loss = head_loss
    model.activation_checkpointing = checkpointing
    return model


def kept_by_forward(config, precision, checkpointing=False) -> int:
    """Bytes of all storages that autograd saves, parameters apart."""
    model = model_of(config, checkpointing)
    of_parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    ids = torch.randint(0, V, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(precision):
        model(ids, ids.clone())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_activations_are_what_autograd_keeps():
    choices = (["sdpa", "explicit"], [False, True], [0.0, 0.1], ["fp32", "bf16"])
    for attention, checkpointing, dropout, precision in itertools.product(*choices):
        config = tiny(dropout=dropout, attention=attention)
        kept = kept_by_forward(config, precision, checkpointing)
        options = {"precision": precision, "activation_checkpointing": checkpointing}
        step = memory.Step(config, B, T, device="cpu", **options)
        expected = memory.activations(step)
        expected += step.c * (B * T + V) * config.emb_dim  # gradients of the head
        if precision == "bf16" and not checkpointing:  # copies of the matrices; biases are not kept
            expected += 2 * 12 * config.num_layers * config.emb_dim**2
        assert kept == pytest.approx(expected, rel=0.005), (config, checkpointing, precision)


def peak_of_step(config, precision, checkpointing, accumulating) -> int:
    """Bytes allocated at the peak of a second step, weights and moments of AdamW included."""
    model = model_of(config, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, config.vocab_size, (4, config.context_length))

    def step():
        for _ in range(2 if accumulating else 1):
            with autocast(precision):
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


HEAD = {"vocab_size": 8000, "emb_dim": 64, "dropout": 0.1}  # the peak is in the head, or in a block
BLOCK = {"vocab_size": 100, "emb_dim": 128, "num_layers": 3, "dropout": 0.0}


@pytest.mark.parametrize(
    ("shape", "precision", "checkpointing", "accumulating", "moment", "rel"),
    [
        (HEAD, "fp32", False, False, "loss", 0.01),
        (HEAD, "bf16", True, True, "loss", 0.01),
        (BLOCK, "fp32", True, False, "last block", 0.12),
    ],
)
def test_peak_of_a_step_is_what_is_allocated(
    shape, precision, checkpointing, accumulating, moment, rel
):
    config = tiny(context_length=128, **shape)
    options = {"accumulating": accumulating, "activation_checkpointing": checkpointing}
    estimated = memory.estimate(config, 4, 128, precision=precision, device="cpu", **options)
    assert estimated.moment == moment
    allocated = estimated.total - estimated.slack - estimated.libraries
    peak = peak_of_step(config, precision, checkpointing, accumulating)
    assert allocated == pytest.approx(peak, rel=rel)


def test_estimates_are_within_15_percent_of_measured_peaks():
    for run in json.loads(MEASURED.read_text())["runs"]:
        given = dict(text.split("=") for text in run["settings"].split())
        ranks = run.get("ranks", 1)
        share = int(given["trainer.batch_size"]) // ranks
        windows = int(given.get("trainer.micro_batch_size", share))
        estimated = memory.estimate(
            ModelConfig(dropout=float(given["model.dropout"])),
            windows,
            int(given["data.max_length"]),
            precision=given["trainer.precision"],
            strategy=given.get("parallel", "single"),
            world_size=ranks,
            accumulating=windows < share,
            activation_checkpointing=given.get("trainer.activation_checkpointing") == "true",
            device="cpu",
        )
        assert estimated.total == pytest.approx(run["peak_bytes"], rel=0.15), run["settings"]


# Radford et al. 2019, table 2, and the parameters of the released weights.
XL, PARAMETERS = ModelConfig(emb_dim=1600, num_heads=25, num_layers=48), 1_557_611_200


def test_weights_gradients_and_moments():
    """Mixed precision with AdamW on fp32 weights: 4 + 4 + 8 bytes a parameter."""
    for strategy, accumulating in (("single", True), ("ddp", False), ("ddp", True)):
        options = {"strategy": strategy, "world_size": 2, "accumulating": accumulating}
        needed = memory.estimate(XL, 1, 1024, **options)
        assert (needed.weights, needed.optimizer) == (4 * PARAMETERS, 8 * PARAMETERS)
        # With DDP the buckets stand beside what the micro-batches before the last have left.
        beside = 2 if (strategy, accumulating) == ("ddp", True) else 1
        assert needed.gradients == beside * 4 * PARAMETERS
        assert needed.total == sum(needed.parts().values())
    # Until the last micro-batch nothing is reduced: every rank holds all gradients.
    sharded = memory.estimate(XL, 1, 1024, strategy="fsdp", world_size=64, accumulating=True)
    assert (sharded.weights, sharded.optimizer) == (PARAMETERS / 16, PARAMETERS / 8)
    assert sharded.gradients == 4 * PARAMETERS
    # The embeddings and the last norm, in fp32: (50,257 + 1,024 + 2) x 1,600 x 4 bytes.
    assert sharded.gathered >= 328_211_200


def test_logits_and_gathered_blocks():
    logits, read = 4 * 1024 * 50257, 4 * 1024 * 1600
    assert memory.estimate(XL, 4, 1024).logits == (2 + 4) * logits + 8 * read
    assert memory.estimate(XL, 4, 1024, compiled=True).logits == (2 + 2) * logits + 8 * read
    # However many tokens, their logits come 2^28 at a time; their gradients add up in fp32.
    at_once, head = 2**28 // 50257 * 50257, 50257 * 1600
    many = memory.estimate(XL, 64, 1024).logits
    assert many == (2 + 4) * at_once + 4 * head + 8 * 16 * read
    kept = {"strategy": "fsdp", "world_size": 8, "reshard_after_forward": False}
    block = 12 * 1600**2 + 13 * 1600
    assert memory.estimate(XL, 4, 1024, **kept).gathered >= 2 * 48 * block + 328_211_200


def test_the_largest_micro_batch_is_a_divisor_that_fits():
    for share, limit, expected in [(8, 8, 8), (8, 7, 4), (12, 5, 4), (7, 6, 1), (8, 0, None)]:
        assert memory.largest_micro_batch(share, limit.__ge__) == expected, (share, limit)
