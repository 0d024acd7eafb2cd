"""Muon: update rule, parameters, clipping, skipped steps. Resuming: test_optim.py.

Trainings by several ranks with it: tests/ranks/test_ranks.py.
"""

import copy
import functools
import math

import pytest
import torch
from helpers.models import tiny_model
from helpers.runs import assert_same
from helpers.settings import settings

from clearhead.compute import muon
from clearhead.compute.muon import newton_schulz
from clearhead.compute.optimizers import (
    NonFiniteCheck,
    OptimizerConfig,
    build_optimizer,
    matrices_of,
)
from clearhead.parallel import memory
from clearhead.parallel.strategy import Strategy
from train import train_step

CPU = torch.device("cpu")
tiny = functools.partial(tiny_model, std=None)


def built(model: torch.nn.Module, dtype: torch.dtype = torch.float32, **values) -> muon.Muon:
    return build_optimizer(model, OptimizerConfig.with_defaults(name="muon", **values), dtype)


def give_gradients(model: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def step(model: torch.nn.Module, optimizer: muon.Muon, seed: int, scale: float = 1.0) -> None:
    """Returns an optimizer with these gradients times a scale, by which it divides them."""
    give_gradients(model, seed, scale)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns copies of parameters and state."""
    found = model.state_dict()
    for name, p in model.named_parameters():
        found |= {f"{key}.{name}": value for key, value in optimizer.state[p].items()}
    return copy.deepcopy(found)


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Computes the published iteration on one matrix in double precision."""
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_steps_equal_the_formula_of_muon(monkeypatch):
    """Jordan's rule with Liu's scale, arXiv:2502.16982 equation 4, and the EMA of torch's; with
    matrices of one shape together and one by one."""
    for together in (1, muon.MAX_ELEMENTS):
        monkeypatch.setattr(muon, "MAX_ELEMENTS", together)
        model = tiny()
        rates = {"lr": 1e-3, "matrix_lr": 0.02, "weight_decay": 0.3}
        optimizer = built(model, momentum=0.9, **rates)
        matrices = matrices_of(model).values()
        expected = [p.detach().double() for p in matrices]
        average = [torch.zeros_like(p) for p in expected]
        for seed in range(3):
            scale = 8.0**seed
            step(model, optimizer, seed, scale)
            for n, p in enumerate(matrices):
                g = p.grad.double() / scale
                average[n] = 0.9 * average[n] + 0.1 * g
                update = 0.9 * average[n] + 0.1 * g
                expected[n] = expected[n] * (1 - 0.02 * 0.3)
                rate = 0.02 * 0.2 * math.sqrt(max(p.shape))
                expected[n] -= rate * orthogonalized(update, 5)
        for p, e in zip(matrices, expected, strict=True):
            torch.testing.assert_close(p.detach().double(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 5, 20), (2, 20, 5)])
def test_all_singular_values_become_about_one(shape):
    torch.manual_seed(1)
    given = torch.randn(shape) * torch.tensor([1e-3, 1.0, 1e3])[: shape[0], None, None]
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    spread = torch.linspace(0.01, 1, min(shape[1:]))
    done = newton_schulz(u * spread @ v)
    assert all(0.6 < float(s) < 1.21 for s in torch.linalg.svdvals(done).flatten())
    torch.testing.assert_close(newton_schulz(given)[1], newton_schulz(given[1:2])[0])
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))


def test_every_parameter_has_one_optimizer():
    model = tiny()
    model.head = torch.nn.Linear(16, 61)
    model.blocks[1].frozen = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    optimizer = built(model, lr=1e-3, matrix_lr=2e-3, out_proj_lr_ratio=0.5, weight_decay=0.3)
    name_of = {p: name for name, p in model.named_parameters() if p.requires_grad}
    others, vectors, matrices, out_proj = (
        {name_of[p] for p in group["params"]} for group in optimizer.param_groups
    )
    assert len(others) + len(vectors) + len(matrices) + len(out_proj) == len(name_of)
    assert others == {"token_emb.weight", "pos_emb.weight", "head.weight"}
    kinds = ["attn.W_query", "attn.W_key", "attn.W_value", "mlp.fc"]
    assert matrices == {f"blocks.{n}.{kind}.weight" for n in range(2) for kind in kinds}
    kinds = ["attn.out_proj", "mlp.out_proj"]
    assert out_proj == {f"blocks.{n}.{kind}.weight" for n in range(2) for kind in kinds}
    found = [(g["weight_decay"], g["lr"], g["peak_lr"]) for g in optimizer.param_groups]
    assert found == [
        (0.3, 1e-3, 1e-3),
        (0, 1e-3, 1e-3),
        (0.3, 2e-3, 2e-3),
        (0.3, 1e-3, 1e-3),
    ]


def test_all_learning_rates_have_the_same_schedule(make_run):
    rates = ("optimizer.lr=0.01", "optimizer.matrix_lr=0.04", "optimizer.out_proj_lr_ratio=0.5")
    run = make_run("optimizer=muon", *rates, "trainer.warmup_steps=2", "trainer.max_steps=4")
    used = []
    for _ in range(4):
        train_step(run)
        used.append([group["lr"] for group in run.optimizer.param_groups])
    assert used == [pytest.approx([r, r, 4 * r, 2 * r]) for r in (0.005, 0.01, 0.01, 0.001)]


@pytest.mark.parametrize("fused", [True, False])
def test_the_update_of_the_loop_clips_and_skips(fused):
    """A skipped step changes no bit. MPS has no fused kernel."""
    strategy, check = Strategy(CPU, torch.float32), NonFiniteCheck(9, CPU)
    model, expected = tiny(), tiny()
    optimizer, by_hand = built(model), built(expected)
    for values in (optimizer.defaults, *optimizer.param_groups):
        values["fused"] = fused
    for seed, scale in enumerate((math.nan, 100.0, math.nan, 1e-4)):
        give_gradients(model, seed, scale)
        before = everything(model, optimizer)
        norm = strategy.update(model, optimizer, 0.5, check)
        if math.isfinite(scale):
            give_gradients(expected, seed, scale * min(1.0, 0.5 / float(norm)))
            by_hand.step()
        else:
            after = everything(model, optimizer)
            assert_same({name: after[name] for name in before}, before)
    mine, theirs = everything(model, optimizer), everything(expected, by_hand)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_memory_of_its_state_equals_the_estimate():
    model = tiny()
    optimizer = built(model)
    step(model, optimizer, seed=0)
    kept = [v for p in model.parameters() for key, v in optimizer.state[p].items() if key != "step"]
    sizes = {f"model.{key}": value for key, value in vars(model.config).items()}
    config = settings("optimizer=muon").with_values(sizes)
    estimated = memory.optimizer_state(memory.Job(config, "single", 1, "fp32", "cpu", False))
    assert estimated == sum(value.numel() * value.element_size() for value in kept)
