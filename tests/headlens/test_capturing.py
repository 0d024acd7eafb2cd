"""capture: the weights of transformers' eager attention, from a model that trains with another, and
a model that is not changed."""

import copy
import threading

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
    model = foreign_model("gpt_neo")
    before, captured = state(model), capture(model, IDS)
    assert_same(before, state(model))
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
    for layer, weights in zip(captured.layers, expected.attentions, strict=True):
        torch.testing.assert_close(layer.weights, weights)
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


PLAIN = ("max_seq_len_cached", "count")


def registries():
    from transformers import AttentionInterface, AttentionMaskInterface

    return [[*of._global_mapping] for of in (AttentionInterface, AttentionMaskInterface)]


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
    own = [{**vars(module)} for module in modules]
    buffers = [(name, value) for name, value in model.named_buffers() if value is not None]
    return (
        [{key: value for key, value in each.items() if key in PLAIN} for each in own],
        [sorted(each) for each in own],
        [name for name, _ in buffers],
        [value.clone() for _, value in buffers],
        registries(),
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
        if tensors and isinstance(tensors[0], torch.Tensor):
            torch.testing.assert_close(now, was, rtol=0, atol=0)
        else:
            assert now == was


class Counting(nn.Module):
    """Changes a buffer in place, replaces another, and adds an attribute and a buffer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.count = base, 0
        self.register_buffer("changed", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, x):
        self.count += 1
        self.cache = x
        self.changed += 1
        self.replaced = self.replaced + 1
        self.register_buffer("added", x)
        return self.base(x)


def models():
    """Fused, eager, ours, positions that depend on the texts seen, and any module that does."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    rotary = foreign_model("llama", rope_parameters=dynamic, max_position_embeddings=8)
    counting = foreign_model("qwen2")
    counting.model.layers[0].mlp.up_proj = Counting(counting.model.layers[0].mlp.up_proj)
    sdpa, eager = foreign_model("gpt2"), foreign_model("gemma3_text", "eager")
    return [sdpa, eager, tiny_model(vocab_size=97, dropout=0.1), rotary, counting]


@pytest.mark.parametrize("number", range(5))
def test_model_and_random_state_are_unchanged_also_after_an_error(number):
    model = models()[number].train()
    [*model.modules()][-1].eval()  # one submodule, as when a part is frozen
    before = state(model)
    captured = capture(model, IDS)
    assert_same(before, state(model))
    assert not captured.logits.requires_grad

    for error in (KeyError, KeyboardInterrupt):

        def fails(layer, attention, error=error):
            torch.rand(1)
            if layer == 1:
                raise error("of the caller")

        with pytest.raises(error, match="of the caller"):
            capture(model, IDS, fails)
        assert_same(before, state(model))


def test_hooks_of_a_model_that_records_its_outputs_are_removed():
    """transformers adds them at the first run, and a mark that they are there."""
    model = foreign_model("llama", output_hidden_states=True)
    for _ in range(2):
        before = state(model)
        capture(model, IDS)
        assert_same(before, state(model))
    assert len(model(IDS).hidden_states) == 4


def test_a_longer_text_in_between_does_not_change_a_training():
    """Dynamic rotary positions: their frequencies depend on the longest text so far."""
    outputs = []
    for between in (False, True):
        model = models()[3]
        if between:
            capture(model, random_ids(T=30, vocab_size=97))
        outputs.append(model(IDS).logits)
    assert torch.equal(*outputs)


def test_two_models_in_two_threads_and_within_each_other():
    """Nothing of another run is seen, and nothing stays registered."""
    first, second = foreign_model("llama"), foreign_model("gpt2")
    before, states = registries(), [state(first), state(second)]
    expected = {model: capture(model, IDS).layers[2].weights for model in (first, second)}
    wrong, inner = [], []

    def run(model):
        for _ in range(10):
            if not torch.equal(capture(model, IDS).layers[2].weights, expected[model]):
                wrong.append(model)

    threads = [threading.Thread(target=run, args=(model,)) for model in (first, second) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    nested = capture(first, IDS, lambda n, _: inner.append(capture(second, IDS).layers[2].weights))
    assert nested.layers == []
    assert len(inner) == 3
    assert all(torch.equal(each, expected[second]) for each in inner)
    assert registries() == before
    for was, model in zip(states, (first, second), strict=True):
        assert_same(was, state(model))


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


LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MIXER = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
SHARED = {"n_mamba_heads": 4, "mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 1}
SHARED |= {"num_mem_blocks": 1, "attention_head_dim": 16, "chunk_size": 8, "adapter_rank": 4}
HYBRIDS = {  # family: changes of its config, the number of layers with attention, of all
    "qwen3_5_text": (LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, [1], 2),
    "lfm2": ({"layer_types": ["full_attention", "conv", "full_attention"]}, [0, 2], 3),
    "falcon_h1": (MAMBA | {"mamba_d_head": 8, "mamba_d_ssm": 32}, [0, 1, 2], 3),
    "jamba": (MIXER | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2}, [1], 3),
    "zamba2": (SHARED | {"layers_block_type": ["mamba", "hybrid"] * 2}, [1, 3], 4),
    "nemotron_h": ({"hybrid_override_pattern": "M*-", **MAMBA}, [1], 3),
    "gemma4_text": (
        {"num_kv_shared_layers": 1, "global_head_dim": 8, "layer_types": ["full_attention"] * 3},
        [0, 1, 2],
        3,
    ),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_a_hybrid(family):
    """Only the layers with attention have weights, with their number in the model, also where
    layers share a module or the keys and values."""
    changes, expected, count = HYBRIDS[family]
    grouped = {"num_key_value_heads": 4 if family == "zamba2" else 2, "head_dim": 8}
    model = foreign_model(family, **COMMON | grouped | changes | {"num_hidden_layers": count})
    seen = []
    captured = capture(model, IDS, lambda n, layer: seen.append((n, layer.number)))
    assert seen == [*enumerate(expected)]
    assert captured.proof.is_verified
    assert sorted([*captured.others, *expected]) == [*range(count)]
    assert all(captured.others.values())


class TinyAttention(nn.Module):
    """Attention by torch's functions. kind: how it multiplies weights by values."""

    def __init__(self, kind="matmul", heads=2):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.joined, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, tokens, _ = x.shape
        split = lambda y: y.view(batch, tokens, self.heads, -1).transpose(1, 2)  # noqa: E731
        q, k, v = map(split, self.joined(x).split(16, -1))
        hidden = torch.ones(tokens, tokens).triu(1).bool()
        sdpa = nn.functional.scaled_dot_product_attention
        if self.kind == "sdpa":
            y = sdpa(query=q, key=k, value=v, is_causal=True, scale=0.9)
        elif self.kind == "sdpa with a mask of heads":
            mask = torch.zeros(self.heads, tokens, tokens).masked_fill(hidden, float("-inf"))
            y = sdpa(q, k, v, mask, scale=0.9)
        else:
            scores = q @ k.mT * 0.9
            scores = scores.masked_fill(hidden, float("-inf"))
            weights = scores.softmax(-1)
            if self.kind == "einsum":
                y = torch.einsum("bhqk, bhkd -> bhqd", weights, v)
            elif self.kind == "bmm":
                y = torch.bmm(weights.flatten(0, 1), mat2=v.flatten(0, 1)).view(v.shape)
            elif self.kind == "minus the largest":
                largest = scores.amax(-1, keepdim=True)
                y = torch.matmul(torch.sub(scores, other=largest).softmax(-1), other=v)
            elif self.kind == "one by one":
                y = torch.stack([scores[:, n].softmax(-1) @ v[:, n] for n in range(self.heads)], 1)
            else:
                y = nn.functional.dropout(weights, 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class OneHeadEach(nn.Module):
    """As in tutorials: a module for each head."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(TinyAttention("matmul", heads=1) for _ in range(2))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)[..., ::2]


class TinyGatedDeltaNet(nn.Linear):
    pass


class TinyModel(nn.Module):
    """An own model, without config, and with own names."""

    def __init__(self, *blocks):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)
        self.blocks = nn.ModuleList(nn.Sequential(block()) for block in blocks)

    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        for block in self.blocks:
            x = x + block(x)
        if targets is None:
            return self.head(x[:, [-1]]), None  # as nanoGPT
        return self.head(x), x.sum()


def expected_weights(attention, x):
    """By its formula."""
    q, k, _ = attention.joined(x).split(16, -1)
    weights = []
    for a, b in zip(q.chunk(attention.heads, -1), k.chunk(attention.heads, -1), strict=True):
        scores = (a @ b.mT * 0.9).masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
        weights.append(scores.softmax(-1))
    return torch.stack(weights, 1)


KINDS = ["matmul", "sdpa", "sdpa with a mask of heads", "einsum", "bmm", "minus the largest"]


@pytest.mark.parametrize("kind", [*KINDS, "one by one"])
def test_any_module_whose_attention_torch_shows(kind):
    """Without a function, and with the logits of all tokens."""
    blocks = [lambda: TinyAttention(kind), lambda: TinyGatedDeltaNet(16, 16)] * 2
    model = TinyModel(*blocks).train()
    captured = capture(model, IDS)
    assert [layer.number for layer in captured.layers] == [0, 2]
    assert captured.others == {1: "gated delta net", 3: "gated delta net"}
    assert captured.proof.is_verified
    assert captured.logits.shape == (2, 12, 97)
    assert model.training
    with torch.no_grad():
        expected = expected_weights(model.blocks[0][0], model.embedding(IDS))
    torch.testing.assert_close(captured.layers[0].weights, expected)


class Encoder(nn.Module):
    """Layers of torch, with a causal mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.embedding, self.layers = nn.Embedding(97, 16), nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.layers(self.embedding(ids), mask=mask, is_causal=True)


@pytest.mark.parametrize("is_training", [False, True])
def test_multihead_attention_of_torch(is_training):
    model = Encoder().train(is_training)
    captured, x = capture(model, IDS), model.embedding(IDS)
    assert [layer.number for layer in captured.layers] == [0, 1]
    assert captured.proof.is_verified
    mask = torch.ones(12, 12).triu(1).bool()
    options = {"attn_mask": mask, "average_attn_weights": False}
    expected = model.layers.layers[0].self_attn.eval()(x, x, x, **options)[1]
    torch.testing.assert_close(captured.layers[0].weights, expected)


def test_heads_over_keys_and_products_of_weights():
    """Scores (keys, queries) are not known as scores; a product of weights is the map."""

    class Squared(nn.Module):
        def __init__(self, is_transposed):
            super().__init__()
            self.is_transposed, self.v = is_transposed, nn.Linear(16, 16)

        def forward(self, x):
            scores = x @ x.mT + torch.full((12, 12), float("-inf")).triu(1)
            if self.is_transposed:
                return scores.mT.softmax(-2).mT @ self.v(x)
            weights = scores.softmax(-1)
            return weights @ weights @ self.v(x)

    for is_transposed in (False, True):
        model = TinyModel(lambda is_transposed=is_transposed: Squared(is_transposed))
        (layer,) = capture(model, IDS).layers
        with torch.no_grad():
            x = model.embedding(IDS)
            expected = (x @ x.mT + torch.full((12, 12), float("-inf")).triu(1)).softmax(-1)
        expected = expected if is_transposed else expected @ expected
        torch.testing.assert_close(layer.weights[:, 0], expected)
        assert (layer.scores is None) == is_transposed


def test_one_module_per_head_and_two_maps_for_the_same_heads():
    model = TinyModel(OneHeadEach, OneHeadEach)
    captured = capture(model, IDS)
    assert [layer.number for layer in captured.layers] == [0, 1]
    with torch.no_grad():
        x = model.embedding(IDS)
        for n, head in enumerate(model.blocks[0][0].heads):
            expected = expected_weights(head, x)[:, 0]
            torch.testing.assert_close(captured.layers[0].weights[:, n], expected)
    with pytest.raises(ValueError, match="DiffLlamaAttention"):
        capture(foreign_model("diffllama", **GROUPED), IDS)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral", "roberta"])
def test_padding(family):
    """A padded text has the weights of the text alone, and rows of padding are 0."""
    changes = {"pad_token_id": 1, "word_embed_proj_dim": 32, "is_decoder": True}
    changes = changes if family in ("opt", "roberta") else {}
    model = foreign_model(family, **changes)
    text, long = IDS[0, :7], IDS[1]
    alone = capture(model, text)
    for pad in (slice(0, 5), slice(7, 12)):  # left and right
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[0, pad] = 0
        ids = torch.stack([torch.ones_like(long), long])
        ids[0, mask[0].bool()] = text
        for given in (
            capture(model, ids, attention_mask=mask),
            capture(model, {"input_ids": ids.tolist(), "attention_mask": mask.tolist()}),
        ):
            for layer, expected in zip(given.layers, alone.layers, strict=True):
                own = mask[0].bool()
                found = layer.weights[0][:, own][:, :, own]
                torch.testing.assert_close(found, expected.weights[0], atol=1e-4, rtol=1e-4)
                assert layer.weights[0].sum() == pytest.approx(4 * 7, abs=1e-3)
                assert (layer.weights[0][:, ~own] == 0).all()
                assert layer.scores[0][:, ~own].isneginf().all()
    torch.testing.assert_close(given.layers[0].weights[1:], capture(model, long).layers[0].weights)


def test_offloaded_weights():
    from accelerate import cpu_offload

    model = foreign_model("llama")
    expected = capture(model, IDS)
    offloaded = cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    captured = capture(offloaded, IDS)
    assert next(offloaded.parameters()).device.type == "meta"
    torch.testing.assert_close(captured.logits, expected.logits)
    assert torch.equal(captured.layers[2].weights, expected.layers[2].weights)


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ("The bell", TypeError),
        (["The", "bell"], TypeError),
        ([[1, 2], [3]], TypeError),
        ([0.5, 2.0], TypeError),
        (torch.ones(1, 2, 3, dtype=torch.int64), ValueError),
        ([3, -1], ValueError),
        ([], ValueError),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, ValueError),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_wrong_ids_are_refused_in_one_line(ids, error, ours):
    model = tiny_model() if ours else foreign_model("llama")
    with pytest.raises(error) as raised:
        capture(model, ids)
    assert "\n" not in str(raised.value)


def test_models_without_attention_weights_are_refused_with_one_line():
    from transformers import AutoConfig, AutoModel

    bert = AutoModel.from_config(AutoConfig.for_model("bert", **COMMON))
    t5 = AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    for error, model in (
        (ValueError, Blocks()),
        (ValueError, AutoModel.from_config(t5)),  # an encoder and a decoder
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
    with pytest.raises(ValueError, match="attention"):
        capture(nn.Embedding(97, 8), IDS)
