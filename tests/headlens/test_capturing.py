"""capture: the weights of transformers' eager attention, from a model that trains with another, and
a model that is not changed."""

import copy

import numpy as np
import pytest
import torch
from helpers.foreign import COMMON, FAMILIES, GROUPED, NO_SDPA, foreign_model
from helpers.models import random_ids, tiny_model
from torch import nn

from headlens import LayerAttention, capture

IDS = random_ids(T=12, vocab_size=97)  # (2, 12)
BOTH = [(family, name) for family in FAMILIES for name in ("sdpa", "eager")]
BOTH = [pair for pair in BOTH if pair not in [(family, "sdpa") for family in NO_SDPA]]


def eager_output(model, ids=IDS):
    """The output of the same model with eager attention and all its weights."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        return reference(ids, output_attentions=True, output_hidden_states=True)


@pytest.mark.parametrize(("family", "attention"), BOTH)
def test_weights_are_those_of_eager_attention(family, attention):
    model = foreign_model(family, attention)
    captured, expected = capture(model, IDS), eager_output(model)
    assert len(captured.layers) == 3
    for layer, weights in zip(captured.layers, expected.attentions, strict=True):
        assert layer.weights.dtype == torch.float32
        assert weights.var() > 1e-3  # the attention is not uniform
        torch.testing.assert_close(layer.weights, weights)
    torch.testing.assert_close(captured.logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_a_decoder_without_the_attention_interface():
    """All its weights are in memory at once, and value norms are unknown."""
    model = foreign_model("gpt_neo")
    before, captured = state(model), capture(model, IDS)
    assert_same(before, state(model))
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
    for layer, weights in zip(captured.layers, expected.attentions, strict=True):
        torch.testing.assert_close(layer.weights, weights)
        assert layer.value_norms is None
    torch.testing.assert_close(captured.logits, expected.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_before_the_softmax(family):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for layer in capture(foreign_model(family).to(dtype), IDS).layers:
            assert layer.scores.dtype == layer.weights.dtype == torch.float32
            expected = layer.scores.softmax(-1)
            torch.testing.assert_close(layer.weights, expected, atol=tolerance, rtol=tolerance)
            hidden = layer.scores.isneginf()
            assert (layer.weights[hidden] == 0).all()
            assert hidden[..., ~torch.ones(12, 12).tril().bool()].all()
            assert layer.scores[~hidden].abs().max() < 1000


def test_scores_of_llama_and_gemma2_by_their_formula():
    """softcap tanh(q k / sqrt(D) / softcap) of the last head, from hooks of its projections."""
    for family, cap in (("qwen2", None), ("gemma2", 2.0)):
        model, seen = foreign_model(family), {}
        attention = model.model.layers[0].self_attn
        for name in ("q_proj", "k_proj"):
            layer = getattr(attention, name)
            keep = lambda _, inputs, out, name=name, seen=seen: seen.update({name: out})  # noqa: E731
            layer.register_forward_hook(keep)
        found = capture(model, IDS).layers[0].scores[0, -1]
        # The first query and key: position 0, which rotary embeddings do not change.
        query, key = (seen[name][0, 0, -8:] for name in ("q_proj", "k_proj"))
        score = float(query @ key) / 8**0.5
        expected = cap * np.tanh(score / cap) if cap else score
        assert float(found[0, 0]) == pytest.approx(expected, abs=1e-4)


def values_of(model, family, hidden, layer):
    """The value vectors, before they are repeated, from the block's own parameters: [(T, D)] of the
    groups of heads, for the first sequence. And the output projection, (C, H D)."""
    heads, width = 4, 32
    if family == "gpt2":
        block = model.transformer.h[layer]
        joined = block.attn.c_attn(block.ln_1(hidden))[..., 2 * width :]
        return joined[0].split(width // heads, -1), block.attn.c_proj.weight.T
    if family == "gpt_neox":
        block = model.gpt_neox.layers[layer]
        joined = block.attention.query_key_value(block.input_layernorm(hidden))[0]
        per_head = joined.split(3 * width // heads, -1)  # query, key, value of each head
        return [each[:, -width // heads :] for each in per_head], block.attention.dense.weight
    block = model.model.layers[layer]
    joined = block.self_attn.v_proj(block.input_layernorm(hidden))[0]
    size = block.self_attn.head_dim
    return joined.split(size, -1), block.self_attn.o_proj.weight


@pytest.mark.parametrize("family", [f for f in FAMILIES if "gemma" not in f])
def test_value_norms_are_those_of_each_heads_part_of_the_output_projection(family):
    model = foreign_model(family)
    hidden, found = eager_output(model).hidden_states, capture(model, IDS).layers
    with torch.no_grad():
        for layer in range(3):
            values, projection = values_of(model, family, hidden[layer], layer)
            size = values[0].shape[-1]
            for head in range(4):
                own = values[head * len(values) // 4]  # the group of this head
                part = projection[:, head * size : (head + 1) * size]  # (C, D)
                expected = [(part @ vector).norm() for vector in own]
                norms = found[layer].value_norms
                assert norms.dtype == torch.float32
                np.testing.assert_allclose(norms[0, head], expected, rtol=1e-4)


def test_value_norms_through_a_projection_with_an_adapter():
    class Adapted(nn.Module):  # as in LoRA
        def __init__(self, base):
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32)
            self.weight = base.weight

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model, merged = foreign_model("llama"), foreign_model("llama")
    for block, other in zip(model.model.layers, merged.model.layers, strict=True):
        adapted = Adapted(block.self_attn.o_proj)
        block.self_attn.o_proj = adapted
        other.self_attn.o_proj.weight.data += adapted.b.weight @ adapted.a.weight
        other.self_attn.o_proj.bias = adapted.b.bias  # is no part of the norms
    expected = capture(merged, IDS).layers
    for layer, other in zip(capture(model, IDS).layers, expected, strict=True):
        torch.testing.assert_close(layer.value_norms, other.value_norms, rtol=1e-4, atol=1e-4)


def test_our_model_and_one_sequence():
    model = tiny_model()
    ids = random_ids()
    expected = model.attn_weights(ids)
    captured = capture(model, ids)
    with torch.no_grad():
        torch.testing.assert_close(captured.logits, model.eval()(ids)[0])
    for layer, weights in zip(captured.layers, expected, strict=True):
        assert torch.equal(layer.weights, weights)
        torch.testing.assert_close(layer.scores.softmax(-1), weights)
        assert layer.value_norms.shape == (2, 4, 9)
    for one in (ids[0], ids[0].tolist()):
        first = capture(model, one).layers[1].weights
        torch.testing.assert_close(first, expected[1][:1])


def test_visit_gets_the_layers_in_order_and_nothing_is_kept():
    for model in (foreign_model("qwen2"), tiny_model(vocab_size=97)):
        seen, every = [], capture(model, IDS)
        captured = capture(model, IDS, lambda *given, seen=seen: seen.append(given))
        assert captured.layers == []
        assert torch.equal(captured.logits, every.logits)
        assert [number for number, _ in seen] == list(range(len(every.layers)))
        for (_, layer), expected in zip(seen, every.layers, strict=True):
            assert isinstance(layer, LayerAttention)
            assert torch.equal(layer.weights, expected.weights)
            assert torch.equal(layer.value_norms, expected.value_norms)


class OneHead(nn.Module):
    """A model with its own attention function."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(97, 8), nn.Linear(8, 8)

    def attention(self, ids):
        x = self.embedding(ids)
        scores = x @ x.transpose(-1, -2)
        mask = torch.ones_like(scores).tril().bool()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1), self.out(x)

    def forward(self, ids):
        weights, values = self.attention(ids)
        return weights @ values


def yielded(model, ids):
    assert not model.training
    weights, values = model.attention(ids)
    yield weights[:, None], values[:, None]
    yield weights[:, None], None
    return model(ids)


def test_any_module_with_a_function():
    model = OneHead().train()
    captured = capture(model, IDS, attention=yielded)
    with torch.no_grad():
        weights, values = model.attention(IDS)
        assert torch.equal(captured.logits, model(IDS))
    first, second = captured.layers
    assert torch.equal(first.weights[:, 0], weights)
    assert not first.weights.requires_grad
    torch.testing.assert_close(first.value_norms[:, 0], values.norm(dim=-1))
    assert second.value_norms is None
    assert model.training
    assert capture(model, IDS, attention=lambda m, i: iter([*yielded(m, i)][:1])).logits is None


def state(model):
    """Everything that a call could change."""
    modules = [*model.modules()]
    hooks = [
        len(getattr(module, name))
        for module in modules
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]
    configs = [getattr(module, "config", None) for module in modules]
    attention = [getattr(config, "_attn_implementation", None) for config in configs]
    return (
        [module.training for module in modules],
        hooks,
        attention,
        [parameter.requires_grad for parameter in model.parameters()],
        [value.clone() for value in model.state_dict().values()],
        torch.get_rng_state(),
        torch.is_grad_enabled(),
    )


def assert_same(before, after):
    for was, now in zip(before, after, strict=True):
        tensors = was if isinstance(was, list) else [was]
        if isinstance(tensors[0], torch.Tensor):
            torch.testing.assert_close(now, was, rtol=0, atol=0)
        else:
            assert now == was


def models():
    sdpa, eager = foreign_model("gpt2"), foreign_model("gemma3_text", "eager")
    return [sdpa, eager, tiny_model(vocab_size=97, dropout=0.1)]


@pytest.mark.parametrize("number", range(3))
def test_model_and_random_state_are_unchanged_also_after_an_error(number):
    model = models()[number].train()
    [*model.modules()][-1].eval()  # one submodule, as when a part is frozen
    before = state(model)
    captured = capture(model, IDS)
    assert_same(before, state(model))
    assert not captured.logits.requires_grad

    def fails(layer, attention):
        torch.rand(1)
        if layer == 1:
            raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        capture(model, IDS, fails)
    assert_same(before, state(model))


def test_a_compiled_or_wrapped_model_is_captured_without_its_wrapper():
    model = foreign_model("qwen3")
    expected = capture(model, IDS)
    calls = []

    def backend(graph, _):
        calls.append(graph)
        return graph.forward

    in_place = copy.deepcopy(model)
    in_place.compile(backend=backend)
    for wrapped in (torch.compile(model, backend=backend), in_place, nn.DataParallel(model)):
        captured = capture(wrapped, IDS)
        for layer, other in zip(captured.layers, expected.layers, strict=True):
            assert torch.equal(layer.weights, other.weights)
    assert calls == []
    in_place.train()(IDS)  # it still compiles after that, and once
    compiled = len(calls)
    capture(in_place, IDS)
    in_place(IDS)
    assert len(calls) == compiled > 0


class Blocks(nn.Module):
    def forward(self, input_ids):
        return input_ids


def test_layers_of_a_hybrid():
    """Only the layers with attention have weights, with their number in the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    experts |= {"shared_expert_intermediate_size": 8}
    linear = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    linear |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    sizes = COMMON | GROUPED | experts | linear
    kinds = ["linear_attention", "full_attention", "full_attention"]
    config = AutoConfig.for_model("qwen3_next", **sizes, layer_types=kinds)
    captured = capture(AutoModelForCausalLM.from_config(config), IDS)
    assert [layer.number for layer in captured.layers] == [1, 2]
    assert [*captured.others] == [0]


def test_models_without_attention_weights_are_refused_with_one_line():
    from transformers import AutoConfig, AutoModel

    bert = AutoModel.from_config(AutoConfig.for_model("bert", **COMMON))
    t5 = AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    for error, model in (
        (TypeError, Blocks()),
        (TypeError, AutoModel.from_config(t5)),  # an encoder and a decoder
        (ValueError, bert),  # attends to future tokens
    ):
        seen = []
        with pytest.raises(error) as raised:
            capture(model.eval(), IDS, lambda layer, _, seen=seen: seen.append(layer))
        assert "\n" not in str(raised.value)
        assert type(model).__name__ in str(raised.value)
        assert len(seen) < 2


def test_inputs_and_weights_that_do_not_fit_are_refused():
    """Tokens and positions that a model does not have; weights of a wrong shape."""
    for model in (foreign_model("gpt2"), tiny_model()):
        size = model.config.vocab_size
        with pytest.raises(ValueError, match=str(size)):
            capture(model, torch.tensor([[0, size]]))
        capture(model, torch.tensor([[0, size - 1]]))
    model = foreign_model("gpt2")
    limit = model.config.max_position_embeddings
    ids = torch.zeros(1, limit + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=str(limit)):
        capture(model, ids)
    rotating = foreign_model("llama", max_position_embeddings=limit)  # has any position
    assert capture(rotating, ids).layers[0].weights.shape[-1] == limit + 1
    with pytest.raises(ValueError, match="input_ids"):
        capture(tiny_model(), [])
    for wrong in (torch.eye(12), torch.eye(12).repeat(2, 1, 1), torch.eye(13).repeat(2, 1, 1, 1)):
        with pytest.raises(ValueError, match="shape"):
            capture(OneHead(), IDS, attention=lambda *_, wrong=wrong: iter([(wrong, None)]))
    with pytest.raises(ValueError, match="no attention"):
        capture(OneHead(), IDS, attention=lambda *_: iter([]))
