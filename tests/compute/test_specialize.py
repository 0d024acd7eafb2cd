"""A model specialized for a device computes the same as the original. The loss: test_loss.py."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from helpers.models import PROMPTS, generated_ids, random_ids, tiny_model

from attention import explicit, sdpa
from clearhead.compute.specialize import (
    fast_attention,
    fast_dropout,
    specialize,
    specialize_for_generation,
)
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
        gradients(f, half, torch.float32) for f in (fast_attention, sdpa, explicit)
    )
    assert not torch.equal(mine[1], fused[1])
    check_errors(mine, plain, exact, 1.5)
    compiled = torch.compile(fast_attention, backend="aot_eager", fullgraph=True)
    check_errors(gradients(compiled, half, torch.float32), plain, exact, 1.5)


def test_torch_computes_attention_where_it_is_faster():
    """In fp32, for long sequences, and without a gradient."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for length, dtype in [(9, fp32), (600, bf16)]:
        inputs = [normal(1, 1, length, 8).to(dtype) for _ in range(3)]
        mine, fused = (gradients(f, inputs, torch.float32) for f in (fast_attention, sdpa))
        assert all(torch.equal(a, b) for a, b in zip(mine, fused, strict=True)), length
    inputs = [normal(1, 1, 9, 8).bfloat16() for _ in range(3)]
    assert torch.equal(fast_attention(*inputs), sdpa(*inputs))


@pytest.mark.parametrize("queries", [6, 2])
def test_gradient_of_attention_with_dropout(queries):
    inputs = [normal(2, 2, 6, 4, seed=seed).double().requires_grad_() for seed in range(3)]
    inputs[0] = inputs[0][:, :, -queries:].detach().requires_grad_()

    def attention(*inputs):
        torch.manual_seed(0)  # the same mask each time
        return fast_attention(*inputs, 0.4)

    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_has_its_rate_and_keeps_the_mean(p):
    torch.manual_seed(0)
    x = torch.ones(501, 499, requires_grad=True)
    y = fast_dropout(x, p)
    y.sum().backward()
    zeros = (y == 0).float().mean().item()
    assert zeros == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert torch.equal(x.grad, y.detach())  # a gradient of ones is masked like the input
    assert y[y > 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=0.02)
    assert y.detach().mean() == pytest.approx(1, abs=5 * (p / (1 - p) / x.numel()) ** 0.5)


def test_masks_are_independent_of_the_position_and_depend_on_the_seed():
    torch.manual_seed(0)
    x = torch.ones(2000, 500)
    first, second = fast_dropout(x, 0.5), fast_dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(fast_dropout(x, 0.5), first)
    centred = first - 1
    for other in (second - 1, *(centred.roll(n, 1) for n in (1, 2, 3, 4)), centred.roll(1, 0)):
        assert (centred * other).mean().abs() < 5 / x.numel() ** 0.5
    assert torch.equal(fast_dropout(x, 1e-9), x)
    assert fast_dropout(torch.ones(5, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


def test_attention_with_dropout_drops_weights():
    torch.manual_seed(0)
    q, k, v = (normal(1, 2, 4, 8, seed=seed) for seed in range(3))
    mean = fast_attention(*(x.expand(4000, 2, 4, 8) for x in (q, k, v)), 0.3).mean(0)
    torch.testing.assert_close(mean, sdpa(q, k, v)[0], rtol=0, atol=0.05)
    assert fast_attention(q, k, v, 0.9).eq(0).any()  # all weights of a row


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
        assert all(block.attn.kernel is fast_attention for block in model.blocks)
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


def test_the_blocks_of_a_gpu_compute_the_same():
    """Bit for bit, also their dropout masks."""
    plain, model = (tiny_model(dropout=0.3) for _ in range(2))
    specialize(model, torch.device("cuda"))
    found = []
    for each in (plain, model):
        torch.manual_seed(0)
        x = normal(2, 12, each.config.emb_dim).requires_grad_()
        out = x
        for block in each.blocks:
            out = block(out)
        parameters = [x, *each.blocks.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
    assert len(found[0][0].shape) == 3
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_outputs_and_text_stay_the_same(qkv_bias):
    model = tiny_model(emb_dim=32, vocab_size=50, qkv_bias=qkv_bias).eval()
    for rows in (1, 3):
        fast = specialize_for_generation(copy.deepcopy(model), torch.float32, rows)
        assert not any(isinstance(module, torch.nn.Linear) for module in fast.modules())
        for ids in (random_ids(B=1, T=12), random_ids(B=3, T=5)):
            torch.testing.assert_close(fast(ids)[0], model(ids)[0], atol=1e-5, rtol=1e-5)
        assert generated_ids(fast, PROMPTS, 50) == generated_ids(model, PROMPTS, 50)


@torch.no_grad()
def test_bf16_is_as_exact_as_the_plain_model_in_bf16():
    model, ids = tiny_model(std=0.1).eval(), random_ids()
    expected = model(ids)[0]
    fast = specialize_for_generation(copy.deepcopy(model), torch.bfloat16)(ids)[0]
    plain = copy.deepcopy(model).bfloat16()(ids)[0]
    assert fast.dtype == torch.bfloat16
    assert (fast - expected).abs().max() < 2 * (plain - expected).abs().max() + 1e-3


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise", "bf16"])
@torch.no_grad()
def test_a_torch_without_the_private_operators_uses_plain_products(monkeypatch, missing):
    """Or a processor for which oneDNN has no bf16."""
    names = {"_reorder_linear_weight", "_linear_pointwise"} - {missing}
    operators = {name: lambda *_: pytest.fail("called") for name in names}
    operators["_is_mkldnn_bf16_supported"] = lambda: missing != "bf16"
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operators))
    model, ids = tiny_model().eval(), random_ids()
    for dtype in (torch.bfloat16, torch.float32)[: 1 if missing == "bf16" else 2]:
        fast = specialize_for_generation(copy.deepcopy(model), dtype)
        expected = copy.deepcopy(model).to(dtype)(ids)[0]
        torch.testing.assert_close(fast(ids)[0], expected, atol=1e-2, rtol=1e-2)
