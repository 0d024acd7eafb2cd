"""Attention and dropout of clearhead/compute/cpu.py, compared with torch."""

import functools

import pytest
import torch
from helpers.models import random_ids, tiny_model

from attention import explicit, sdpa
from clearhead.compute import cpu
from clearhead.compute.specialize import specialize
from clearhead.parallel.strategy import Strategy
from model import Block

IDS = random_ids(T=12)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, inputs, dtype):
    """(output, *gradients) in fp32, for a fixed gradient of the output."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = function(*inputs)
    y.backward(normal(*y.shape, seed=9).to(y.dtype))
    assert all(x.grad.dtype == x.dtype for x in inputs)
    return [t.detach().float() for t in (y, *[x.grad for x in inputs])]


def error(got, right):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, right, strict=True)]


def check_errors(got, baseline, right, most):
    """Asserts that errors of output and gradients are at most `most` times the baseline's."""
    for mine, theirs in zip(error(got, right), error(baseline, right), strict=True):
        assert mine < most * theirs


@pytest.mark.parametrize("queries", [64, 5])
@pytest.mark.parametrize("sharpness", [1, 10])
def test_attention_and_gradients_are_as_precise_as_explicit_in_bf16(sharpness, queries):
    q, k, v = (normal(2, 3, 64, 32, seed=seed) for seed in range(3))
    half = [(sharpness * q[:, :, -queries:]).bfloat16(), k.bfloat16(), v.bfloat16()]
    exact = gradients(explicit, [x.float() for x in half], torch.float32)
    mine, fused, plain = (
        gradients(f, half, torch.float32) for f in (cpu.attention, sdpa, explicit)
    )
    assert not torch.equal(mine[1], fused[1])
    check_errors(mine, plain, exact, 1.5)
    compiled = torch.compile(cpu.attention, backend="aot_eager", fullgraph=True)
    check_errors(gradients(compiled, half, torch.float32), plain, exact, 1.5)


def test_torch_computes_attention_where_it_is_faster():
    """In fp32, for long sequences, and without a gradient."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for length, dtype in [(9, fp32), (600, bf16)]:
        inputs = [normal(1, 1, length, 8).to(dtype) for _ in range(3)]
        mine, fused = (gradients(f, inputs, torch.float32) for f in (cpu.attention, sdpa))
        assert all(torch.equal(a, b) for a, b in zip(mine, fused, strict=True)), length
    inputs = [normal(1, 1, 9, 8).bfloat16() for _ in range(3)]
    assert torch.equal(cpu.attention(*inputs), sdpa(*inputs))


def test_what_attention_cannot_compute_is_an_error():
    q, k, v = (normal(1, 2, 6, 4, seed=seed).requires_grad_() for seed in range(3))
    with pytest.raises(ValueError, match="6 queries"):
        cpu.attention(q, k[:, :, :5], v[:, :, :5], 0.5)
    (grad,) = torch.autograd.grad(cpu.attention(q, k, v, 0.5).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()  # a second derivative


@pytest.mark.parametrize("queries", [6, 2])
def test_gradient_of_attention_with_dropout(queries):
    inputs = [normal(2, 2, 6, 4, seed=seed).double().requires_grad_() for seed in range(3)]
    inputs[0] = inputs[0][:, :, -queries:].detach().requires_grad_()

    def attention(*inputs):
        torch.manual_seed(0)  # the same mask each time
        return cpu.attention(*inputs, 0.4)

    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_has_its_rate_and_keeps_the_mean(p):
    torch.manual_seed(0)
    x = torch.ones(501, 499, requires_grad=True)
    y = cpu.dropout(x, p)
    y.sum().backward()
    zeros = (y == 0).float().mean().item()
    assert zeros == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert torch.equal(x.grad, y.detach())  # a gradient of ones is masked like the input
    assert y[y > 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=0.02)
    assert y.detach().mean() == pytest.approx(1, abs=5 * (p / (1 - p) / x.numel()) ** 0.5)


def test_masks_are_independent_of_the_position_and_depend_on_the_seed():
    torch.manual_seed(0)
    x = torch.ones(2000, 500)
    first, second = cpu.dropout(x, 0.5), cpu.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(cpu.dropout(x, 0.5), first)
    centred = first - 1
    for other in (second - 1, *(centred.roll(n, 1) for n in (1, 2, 3, 4)), centred.roll(1, 0)):
        assert (centred * other).mean().abs() < 5 / x.numel() ** 0.5
    assert torch.equal(cpu.dropout(x, 1e-9), x)
    assert cpu.dropout(torch.ones(5, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


def test_attention_with_dropout_drops_weights():
    torch.manual_seed(0)
    q, k, v = (normal(1, 2, 4, 8, seed=seed) for seed in range(3))
    mean = cpu.attention(*(x.expand(4000, 2, 4, 8) for x in (q, k, v)), 0.3).mean(0)
    torch.testing.assert_close(mean, sdpa(q, k, v)[0], rtol=0, atol=0.05)
    assert cpu.attention(q, k, v, 0.9).eq(0).any()  # all weights of a row


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_as_without_and_a_seed_repeats_its_dropout(monkeypatch, compiled):
    # The backend needs no C++ compiler; fullgraph: code that cannot be compiled is an error.
    compiler = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(Block, "compile", compiler)
    shape = {"num_layers": 1 if compiled else 2, "std": None}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        parallel = Strategy(torch.device("cpu"), dtype)
        model = parallel.prepare_model(tiny_model(**shape).config, lambda: tiny_model(**shape))
        trained = parallel.wrap(model, compiled and dtype == torch.bfloat16)
        with parallel.autocast():
            _, loss = trained(IDS, IDS)
        loss.backward()
        found[dtype] = [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])]
        assert all(block.attn.kernel is cpu.attention for block in model.blocks)
        assert set(model.state_dict()) == set(tiny_model(**shape).state_dict())
    assert max(error(found[torch.bfloat16], found[torch.float32])) < 0.03

    model = parallel.prepare_model(model.config, lambda: tiny_model(dropout=0.3, **shape))
    trained, losses = parallel.wrap(model, compiled), []
    for step in (1, 2, 1):  # between them another batch, of another size
        parallel.reseed(0, step)
        ids = IDS[:1] if step == 2 else IDS
        with parallel.autocast():
            losses.append(trained(ids, ids)[1])
        losses[-1].backward()
    assert losses[0] == losses[2] != losses[1]
    with parallel.inference(model):
        assert model(IDS, IDS)[1] == model(IDS, IDS)[1]


def test_other_kernels_and_the_mode_do_not_change(monkeypatch):
    model = tiny_model(attention="explicit").eval()
    specialize(model, torch.device("cpu"))
    assert all(block.attn.kernel is explicit for block in model.blocks)
    assert not any(module.training for module in model.modules())
