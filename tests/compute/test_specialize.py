"""A model specialized for generation has the outputs of the original. More of specialize.py:
test_cpu.py and test_loss.py."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers.models import PROMPTS, generated_ids, random_ids, tiny_model

from clearhead.compute.specialize import specialize_for_generation


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
