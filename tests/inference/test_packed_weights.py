"""inference/packed_weights.py: a model with packed weights has the outputs of the original."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.greedy import PROMPTS, generated_ids
from helpers.models import random_ids, tiny_model

from clearhead.inference import packed_weights
from clearhead.inference.packed_weights import (
    PackedLinear,
    can_pack,
    fastest_layouts,
    layouts,
    pack_weights,
)

HAS_BF16 = can_pack(torch.bfloat16)


@pytest.mark.parametrize("layout", layouts(torch.float32), ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_outputs_and_text_stay_the_same(monkeypatch, layout, qkv_bias):
    monkeypatch.setattr(packed_weights, "layouts", lambda _: [layout])
    model = tiny_model(emb_dim=32, vocab_size=50, qkv_bias=qkv_bias).eval()
    for rows in (1, 3):
        fast = pack_weights(copy.deepcopy(model), torch.float32, rows)
        assert not any(isinstance(module, torch.nn.Linear) for module in fast.modules())
        for ids in (random_ids(B=1, T=12), random_ids(B=3, T=5)):
            torch.testing.assert_close(fast(ids)[0], model(ids)[0], atol=1e-5, rtol=1e-5)
        assert generated_ids(fast, PROMPTS, 50) == generated_ids(model, PROMPTS, 50)


@torch.no_grad()
def test_bf16_is_as_exact_as_the_plain_model_in_bf16():
    model, ids = tiny_model(std=0.1).eval(), random_ids()
    expected = model(ids)[0]
    fast = pack_weights(copy.deepcopy(model), torch.bfloat16)(ids)[0]
    plain = copy.deepcopy(model).bfloat16()(ids)[0]
    assert fast.dtype == torch.bfloat16
    assert (fast - expected).abs().max() < 2 * (plain - expected).abs().max() + 1e-3


def test_each_shape_gets_its_fastest_layout(monkeypatch):
    """With a clock that only products advance. A small advantage does not replace the first one."""
    now = 0.0
    seconds = {(8, 4): {"first": 1.0, "other": 0.5}, (2, 4): {"first": 1.0, "other": 0.95}}

    def laid_out(name):
        def layout(weight, rows):
            return weight, name

        layout.__name__ = name
        return layout

    def multiply(x, weight):
        nonlocal now
        now += seconds[tuple(weight[0].shape)][weight[1]]

    monkeypatch.setattr(packed_weights, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(packed_weights, "multiply", multiply)
    monkeypatch.setattr(packed_weights, "layouts", lambda _: [*map(laid_out, ("first", "other"))])
    found = fastest_layouts([torch.ones(8, 4), torch.ones(2, 4), torch.ones(8, 4)], rows=1)
    names = {tuple(shape): layout.__name__ for shape, layout in found.items()}
    assert names == {(8, 4): "other", (2, 4): "first"}


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
@torch.no_grad()
def test_a_torch_without_the_private_operators_uses_plain_products(monkeypatch, missing):
    names = {"_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"}
    others = {name: lambda *_: pytest.fail("called") for name in names - {missing}}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**others))
    model, ids = tiny_model().eval(), random_ids()
    for dtype in (torch.float32, torch.bfloat16):
        fast = pack_weights(copy.deepcopy(model), dtype)
        expected = copy.deepcopy(model).to(dtype)(ids)[0]
        torch.testing.assert_close(fast(ids)[0], expected, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch build has no oneDNN")
@pytest.mark.parametrize("has_bf16", [True, False])
def test_weights_are_packed_where_the_processor_can(monkeypatch, has_bf16):
    """bf16 only if oneDNN supports it; never for torch.compile."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    for dtype in (torch.float32, torch.bfloat16):
        assert packed_weights.can_pack(dtype) == (dtype == torch.float32 or has_bf16)
        plain = pack_weights(tiny_model(), dtype, to_compile=True)
        assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    (layout,) = layouts(torch.bfloat16)  # no choice: the text of a seed depends on it
    if has_bf16 == HAS_BF16:  # otherwise oneDNN refuses the layout
        assert layout(torch.ones(4, 4, dtype=torch.bfloat16), 1).is_mkldnn == has_bf16
