"""Linear layers, attention and dropout of training/cpu.py against torch's own."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from attention import explicit, sdpa
from model import GPT, Block, ModelConfig
from training import cpu
from training.parallel import Parallel

CONFIG = ModelConfig(
    vocab_size=19, context_length=12, emb_dim=16, num_heads=2, num_layers=2, dropout=0.0
)
IDS = torch.arange(24).view(2, 12) % 19


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


@pytest.mark.parametrize("rows", [7, 513, 700, 1024, 1025])  # whole, halves even and odd, whole
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_and_its_gradients(rows, has_bias, monkeypatch):
    monkeypatch.setattr(cpu, "HALVED_SIZE", 1)
    inputs = [normal(rows, 24), normal(32, 24, seed=1)] + [normal(32, seed=2)] * has_bias
    arguments = inputs if has_bias else [*inputs, None]

    def ours(*given):
        return cpu.linear(*given, *arguments[len(given) :])

    right = gradients(F.linear, inputs, torch.float32)
    theirs = gradients(F.linear, inputs, torch.bfloat16)
    mine = gradients(ours, inputs, torch.bfloat16)
    for error_of_mine, error_of_theirs in zip(
        error(mine, right), error(theirs, right), strict=True
    ):
        assert error_of_mine < 1.1 * error_of_theirs
    for got, expected in zip(gradients(ours, inputs, torch.float32), right, strict=True):
        assert torch.equal(got, expected)  # without autocast it is F.linear itself


def test_halves_are_of_what_one_core_would_get():
    sizes = []
    original = cpu._product

    def product(a, b, bias):
        sizes.append(len(a))
        return original(a, b, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_product", product)
        patch.setattr(cpu, "HALVED_SIZE", 16)
        for rows, columns in ((512, 8), (513, 8), (1024, 1280), (1024, 1281), (1025, 8), (600, 7)):
            cpu.product(normal(rows, 2), normal(2, columns))
    assert sizes == [512, 257, 256, 512, 512, 1024, 1025, 600]


tiled = functools.partial(cpu.attention, longest=512)


@pytest.mark.parametrize("sharpness", [1, 10])
def test_attention_and_its_gradients_are_as_near_as_explicit_in_bf16(sharpness):
    q, k, v = (normal(2, 3, 64, 32, seed=seed) for seed in range(3))
    half = [(sharpness * q).bfloat16(), k.bfloat16(), v.bfloat16()]
    exact = gradients(explicit, [x.float() for x in half], torch.float32)
    mine, fused, plain = (gradients(f, half, torch.float32) for f in (tiled, sdpa, explicit))
    assert torch.equal(mine[0], fused[0])
    assert not torch.equal(mine[1], fused[1])
    for own, others in zip(error(mine, exact), error(plain, exact), strict=True):
        assert own < 1.5 * others


@pytest.mark.parametrize(
    ("shape_of_queries", "dtype"),
    [
        ((1, 1, 4, 8), torch.bfloat16),  # fewer queries than keys
        ((1, 1, 9, 8), torch.float32),
        ((1, 1, 600, 8), torch.bfloat16),
    ],
)
def test_attention_is_torchs_where_that_is_faster(shape_of_queries, dtype):
    keys = normal(1, 1, max(9, shape_of_queries[2]), 8)
    inputs = [x.to(dtype) for x in (normal(*shape_of_queries), keys, keys)]
    mine, fused = (gradients(f, inputs, torch.float32) for f in (tiled, sdpa))
    assert all(torch.equal(a, b) for a, b in zip(mine, fused, strict=True))


# ----------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    torch.manual_seed(0)
    x = torch.ones(1001, 999, requires_grad=True)
    y = cpu.dropout(x, p)
    y.sum().backward()
    zeros = (y == 0).float().mean().item()
    assert zeros == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert torch.equal(x.grad, y.detach())  # the gradient of ones goes where they went
    assert y[y > 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=0.02)
    assert y.detach().mean() == pytest.approx(1, abs=5 * (p / (1 - p) / x.numel()) ** 0.5)


def test_masks_are_independent_of_place_and_follow_the_seed():
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
    mean = torch.stack([cpu.attention(q, k, v, 0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, sdpa(q, k, v), rtol=0, atol=0.05)
    assert cpu.attention(q, k, v, 0.9).eq(0).any()  # all of a row's weights


# ------------------------------------------------------------------------------ in a model


@pytest.fixture
def with_tiles(monkeypatch):
    monkeypatch.setattr(cpu, "has_tiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "HALVED_ROWS", (9, 24))
    monkeypatch.setattr(cpu, "HALVED_SIZE", 1)
    # Without C++, which takes half a minute; fullgraph: what cannot be compiled is an error.
    compiled = functools.partial(torch.nn.Module.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(Block, "compile", lambda block: compiled(block))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_as_without(with_tiles, compiled):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        way = Parallel(torch.device("cpu"), dtype)
        torch.manual_seed(0)
        model = way.place(CONFIG, lambda: GPT(CONFIG))
        trained = way.trained(model, compiled and dtype == torch.bfloat16)
        with way.autocast():
            _, loss = trained(IDS, IDS)
        loss.backward()
        found[dtype] = [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])]
        changed = ["forward" in vars(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert all(changed) if dtype == torch.bfloat16 else not any(changed)
        longest = cpu.LONGEST[compiled] if dtype == torch.bfloat16 else 0
        assert all(b.attn.kernel.keywords == {"longest": longest} for b in model.blocks)
        assert set(model.state_dict()) == set(GPT(CONFIG).state_dict())
    assert max(error(found[torch.bfloat16], found[torch.float32])) < 0.03


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_dropout_is_repeated_by_its_seed(with_tiles, compiled):
    """With another batch between, as the last micro-batch of a step may be one."""
    config = dataclasses.replace(CONFIG, dropout=0.3)
    way, losses = Parallel(torch.device("cpu"), torch.bfloat16), []
    model = way.place(config, lambda: GPT(config))
    trained = way.trained(model, compiled)
    for step in (1, 2, 1):
        way.reseed(0, step)
        ids = IDS[:1] if step == 2 else IDS
        with way.autocast():
            losses.append(trained(ids, ids)[1])
        losses[-1].backward()
    assert losses[0] == losses[2] != losses[1]
    with way.inference(model):
        assert model(IDS, IDS)[1] == model(IDS, IDS)[1]


def test_other_processors_threads_and_kernels_keep_torchs_own(monkeypatch):
    monkeypatch.setattr(cpu, "has_tiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model = GPT(dataclasses.replace(CONFIG, attention="explicit"))
    cpu.speed_up(model, torch.bfloat16, compiled=False)
    assert all(block.attn.kernel is explicit for block in model.blocks)
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "has_tiles", lambda: False)
    cpu.speed_up(model, torch.bfloat16, compiled=False)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert not any("forward" in vars(module) for module in linear)


def test_what_the_processor_has(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert cpu.has_tiles()
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # older than torch 2.12
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert not cpu.has_tiles()
