"""AdamW and learning-rate schedules."""

import itertools
import math

import pytest
import torch
from helpers.refusals import refused
from helpers.runs import assert_same, train_past_checkpoint, weights
from safetensors.torch import load_file

from clearhead.compute.optimizers import OptimizerConfig, build_optimizer, learning_rate
from clearhead.errors import ConfigError
from train import fit


def rates_of(schedule, warmup=10, steps=100, after=0, **settings):
    """Of all steps of the schedule, and of as many after it."""
    config = OptimizerConfig.with_defaults(schedule=schedule, **settings)
    return [learning_rate(step, config, warmup, steps, 1.0) for step in range(steps + after)]


def test_cosine_falls_to_its_minimum():
    rates = rates_of("cosine", warmup=0, steps=101, after=50, min_lr_ratio=0.1)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.55)
    assert rates[25] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[100:] == pytest.approx([0.1] * 51)  # and stays there
    assert all(a >= b for a, b in itertools.pairwise(rates))


def test_wsd_rises_linearly_is_constant_then_falls_linearly():
    rates = rates_of("wsd", after=5, decay_fraction=0.2, min_lr_ratio=0.0)
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10:80] == [1.0] * 70
    assert rates[99:] == pytest.approx([0.0] * 6)
    falls = [a - b for a, b in itertools.pairwise(rates[79:100])]
    assert falls == pytest.approx([falls[0]] * len(falls))


def test_constant_and_degenerate_lengths():
    assert rates_of("constant")[10:] == [1.0] * 90
    for schedule in ("cosine", "wsd", "constant"):
        assert rates_of(schedule, warmup=0, steps=1) == [1.0], schedule
        assert all(math.isfinite(rate) for rate in rates_of(schedule, warmup=5, steps=5))
        rates = rates_of(schedule, warmup=4, steps=2)  # a run that ends before it
        assert rates == [0.25, 0.5], schedule


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_do_not_change(make_run, capsys, name):
    """They are frozen after the optimizer was built, have no state in checkpoints, and can be
    frozen again in a resumed run, which names them."""

    def frozen_run(*overrides):
        run = make_run(
            f"optimizer={name}", "trainer.max_steps=4", "trainer.eval_every=0", *overrides
        )
        for module in (run.model.token_emb, run.model.blocks[0].attn.W_query):
            module.requires_grad_(False)
        return run

    whole, half = frozen_run("name=whole"), frozen_run("name=half")
    before = weights(whole)
    fit(whole)
    after = weights(whole)
    is_frozen = lambda key: "token_emb" in key or "0.attn.W_query" in key  # noqa: E731
    assert {key for key in before if torch.equal(before[key], after[key])} == set(
        filter(is_frozen, before)
    )
    stored = load_file(whole.directory / "checkpoints" / "last" / "optimizer.safetensors")
    assert stored
    assert not list(filter(is_frozen, stored))
    train_past_checkpoint(half, 2)
    assert "W_query" not in capsys.readouterr().out
    rest = frozen_run("name=half")
    assert rest.state.step == 2
    assert "0.attn.W_query" in capsys.readouterr().out
    fit(rest)
    assert_same(weights(rest), after)


def test_a_model_whose_parameters_are_all_frozen_is_refused(make_run):
    """The run stays open, so it can be trained after that."""
    run = make_run("trainer.eval_every=0")
    run.model.requires_grad_(False)
    with refused(ConfigError, "model", exit_code=2):
        fit(run)
    run.model.final_norm.requires_grad_(True)
    fit(run)
    assert run.state.step == 4


def test_updates_equal_the_formula_of_adamw():
    """Compares two steps with algorithm 2 of Loshchilov and Hutter."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2)
    config = OptimizerConfig.with_defaults(lr=0.1, weight_decay=0.5, betas=[0.9, 0.95], eps=1e-8)
    optimizer = build_optimizer(layer, config)
    expected = {name: p.detach().clone() for name, p in layer.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in (1, 2):
        layer(torch.randn(4, 3)).square().sum().backward()
        for name, parameter in layer.named_parameters():
            g, (m, v) = parameter.grad, moments[name]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.95).add_(0.05 * g**2)
            decay = 0.5 if parameter.dim() >= 2 else 0.0
            m_hat, v_hat = m / (1 - 0.9**step), v / (1 - 0.95**step)
            expected[name] *= 1 - 0.1 * decay
            expected[name] -= 0.1 * m_hat / (v_hat.sqrt() + 1e-8)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)
