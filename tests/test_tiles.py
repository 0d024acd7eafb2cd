"""Linear layers and attention of training/tiles.py against torch's own, in bf16."""

import pytest
import torch
import torch.nn.functional as F

from attention import explicit, sdpa
from model import GPT, ModelConfig
from training import parallel, tiles
from training.parallel import Parallel

CONFIG = ModelConfig(
    vocab_size=19, context_length=12, emb_dim=16, num_heads=2, num_layers=2, dropout=0.0
)


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
def test_linear_and_its_gradients(rows, has_bias):
    inputs = [normal(rows, 24), normal(32, 24, seed=1)] + [normal(32, seed=2)] * has_bias
    arguments = inputs if has_bias else [*inputs, None]

    def ours(*given):
        return tiles.linear(*given, *arguments[len(given) :])

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
    original = tiles._product

    def product(a, b, bias):
        sizes.append(len(a))
        return original(a, b, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_product", product)
        for rows, columns in ((512, 8), (513, 8), (1024, 1280), (1024, 1281), (1025, 8)):
            tiles.product(normal(rows, 2), normal(2, columns))
    assert sizes == [512, 257, 256, 512, 512, 1024, 1025]


def test_attention_and_its_gradients_are_as_near_as_the_fused_kernel():
    q, k, v = (normal(2, 3, 9, 8, seed=seed) for seed in range(3))
    exact = gradients(explicit, (q, k, v), torch.float32)
    half = [x.bfloat16() for x in (q, k, v)]
    mine, fused = (gradients(f, half, torch.float32) for f in (tiles.attention, sdpa))
    assert torch.equal(mine[0], fused[0])
    for error_of_mine, error_of_fused in zip(error(mine, exact), error(fused, exact), strict=True):
        assert error_of_mine < 1.5 * error_of_fused < 0.02


@pytest.mark.parametrize(
    ("shape_of_queries", "dtype", "dropout_p"),
    [
        ((1, 1, 4, 8), torch.bfloat16, 0.0),  # fewer queries than keys
        ((1, 1, 9, 8), torch.float32, 0.0),
        ((1, 1, 9, 8), torch.bfloat16, 0.5),
        ((1, 1, 600, 8), torch.bfloat16, 0.0),
    ],
)
def test_attention_is_torchs_where_it_is_not_faster(shape_of_queries, dtype, dropout_p):
    keys = normal(1, 1, max(9, shape_of_queries[2]), 8).to(dtype)
    arguments = normal(*shape_of_queries).to(dtype), keys, keys, dropout_p
    torch.manual_seed(0)
    right = sdpa(*arguments)
    torch.manual_seed(0)
    assert torch.equal(tiles.attention(*arguments), right)


@pytest.fixture
def with_tiles(monkeypatch):
    monkeypatch.setattr(parallel, "has_tiles", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(tiles, "HALVED_ROWS", range(9, 25))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_as_without(with_tiles, monkeypatch, compiled):
    ids = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        way = Parallel(torch.device("cpu"), dtype)
        torch.manual_seed(0)
        model = way.place(CONFIG, lambda: GPT(CONFIG))
        trained = way.trained(model, compiled and dtype == torch.bfloat16)
        with way.autocast():
            _, loss = trained(ids, ids)
        loss.backward()
        found[dtype] = [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])]
        changed = ["forward" in vars(m) for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert all(changed) if dtype == torch.bfloat16 else not any(changed)
        kernel = tiles.attention if compiled and dtype == torch.bfloat16 else sdpa
        assert all(block.attn.kernel is kernel for block in model.blocks)
        assert set(model.state_dict()) == set(GPT(CONFIG).state_dict())
    assert max(error(found[torch.bfloat16], found[torch.float32])) < 0.03


def test_other_processors_precisions_and_threads_keep_torchs_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    model = GPT(CONFIG)
    tiles.use_tiles(model, compiled=False)
    monkeypatch.setattr(parallel, "has_tiles", lambda: False)
    Parallel(torch.device("cpu"), torch.bfloat16).trained(model, False)
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert tiles.has_tiles()
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # older than torch 2.12
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert not tiles.has_tiles()
