"""The output projection of each layer, and what it adds to the residual stream."""

import copy

import numpy as np
import pytest
import torch
from helpers.foreign import FAMILIES, HYBRID, foreign_model
from helpers.models import random_ids, tiny_model
from torch import nn

from headlens import capture, mean_contexts
from headlens.capturing import output_projections

IDS = random_ids(B=2, T=9, vocab_size=97)
LATENT = {  # values narrower than keys, DeepSeek's
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
}
SHARED = {"num_key_value_heads": 2}
OTHERS = {
    "qwen3_next": HYBRID,
    "deepseek_v3": LATENT,
    "bitnet": SHARED,
    "granite": {"residual_multiplier": 0.22},
    "glm4": SHARED | {"head_dim": 8},
    "olmo2": {},
    "cohere": {},
    "opt": {},
    "bloom": {"n_layer": 3, "n_head": 4},  # adds the residual inside of its attention
}
# A norm behind the attention, or a norm or a gate between it and its projection.
NOT_A_SUM = ("gemma2", "gemma3_text", "glm4", "olmo2", "bitnet", "qwen3_next")
NAMES = {"gpt2": "attn.c_proj", "gpt_neox": "attention.dense", "opt": "self_attn.out_proj"}
NAMES |= {"bloom": "self_attention.dense"}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, "gpt_neo"])
def test_projections_are_found_without_their_names(family):
    model = foreign_model(family, **OTHERS.get(family, {}))
    end = NAMES | {"gpt_neo": "attention.out_proj"}
    end = end.get(family, "self_attn.o_proj")
    expected = [module for name, module in model.named_modules() if name.endswith(end)]
    found = output_projections(model)
    assert [each.module for each in found] == expected
    assert {each.num_heads for each in found} == {4}


def written(model, family, module, vector, head):
    """Returns what a projection adds to the residual stream for one value vector, by its matrix."""
    weight = module.weight.T if family == "gpt2" else module.weight  # (C, H D)
    size = len(vector)
    factor = getattr(model.config, "residual_multiplier", 1)
    return factor * weight[:, head * size : (head + 1) * size] @ vector


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_value_norms_are_given_only_where_a_value_is_added_times_a_constant(family):
    model = foreign_model(family, **OTHERS.get(family, {}))
    for layer, projection in zip(
        capture(model, IDS).layers, output_projections(model), strict=True
    ):
        if family in NOT_A_SUM:
            assert layer.value_norms is None
            continue
        for head in range(4):
            for text, key in ((0, 0), (1, 7)):
                vector = layer.values[text, head * layer.values.shape[1] // 4, key]
                expected = written(model, family, projection.module, vector, head).norm()
                assert float(layer.value_norms[text, head, key]) == pytest.approx(
                    float(expected), rel=1e-4
                )


class Wrapped(nn.Module):
    """A projection without `.weight`, as a quantised one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def wrap(model):
    for block in model.model.layers:
        block.self_attn.o_proj = Wrapped(block.self_attn.o_proj)


def offload(model):
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cpu"))


def drop(model):
    """In train mode. A capture, and the search for projections, are without dropout."""
    for block in model.model.layers:
        block.self_attn.o_proj = nn.Sequential(block.self_attn.o_proj, nn.Dropout(0.5))
    model.train()


@pytest.mark.parametrize("change", [wrap, offload, drop])
def test_projections_without_a_weight(change):
    model = foreign_model("llama", attention_bias=True)
    expected = capture(model, IDS).layers
    changed = copy.deepcopy(model)
    change(changed)
    state = torch.get_rng_state()
    found = output_projections(changed)
    assert torch.equal(torch.get_rng_state(), state)
    for layer, other in zip(capture(changed, IDS).layers, expected, strict=True):
        np.testing.assert_allclose(layer.value_norms, other.value_norms, rtol=1e-4)
    changed.eval()
    for each, block in zip(found, model.model.layers, strict=True):
        matrix, bias = each.matrix(torch.float32)
        np.testing.assert_allclose(matrix, block.self_attn.o_proj.weight.T.detach(), atol=1e-5)
        np.testing.assert_allclose(bias, block.self_attn.o_proj.bias.detach(), atol=1e-5)
    means = (mean_contexts(each, IDS.tolist()) for each in (changed, model))
    for mean, other in zip(*means, strict=True):
        np.testing.assert_allclose(mean, other, atol=1e-5)


def test_a_module_that_is_replaced_is_found_again():
    model = foreign_model("llama")
    before = output_projections(model)
    assert output_projections(model) is before
    model.model.layers[1].self_attn.o_proj = other = nn.Linear(32, 32, bias=False)
    assert output_projections(model)[1].module is other
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_factor_that_is_learned_is_that_of_the_present_weights():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.scale = foreign_model("llama"), nn.Parameter(torch.zeros(()))
            for block in self.base.model.layers:
                block.self_attn.register_forward_hook(lambda _, given, y: (y[0] * self.scale, y[1]))

        def forward(self, ids):
            return self.base(ids).logits

    model = Scaled()
    capture(model, IDS)
    with torch.no_grad():
        model.scale.fill_(2)
    expected = [2 * layer.value_norms for layer in capture(foreign_model("llama"), IDS).layers]
    torch.testing.assert_close(capture(model, IDS).layers[0].value_norms, expected[0])


def test_a_token_whose_vectors_are_zero():
    """As of a padding token in a model without biases, whose embedding is 0."""
    model = foreign_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    assert [each.factor for each in output_projections(model)] == [1, 1, 1]


def test_projections_that_are_not_found_are_searched_again():
    model = foreign_model("llama")
    hook = model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: torch.ones(3))
    assert output_projections(model) == []
    hook.remove()
    assert len(output_projections(model)) == 3


def test_ours_and_what_is_not_supported():
    model = tiny_model()
    found = [each.module for each in output_projections(model)]
    assert found == [block.attn.out_proj for block in model.blocks]
    assert output_projections(nn.Linear(3, 3)) == []


def test_heads_that_are_not_next_to_each_other_have_no_projection():
    """Their columns of the projection are not known."""

    class Interleaved(nn.Module):
        """Contexts as (D, H)."""

        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(97, 16), nn.Linear(16, 16)

        def forward(self, ids):
            x = self.embedding(ids).unflatten(-1, (2, 8)).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            return self.out(y.permute(0, 2, 3, 1).flatten(2))

    assert output_projections(nn.Sequential(Interleaved())) == []
