"""score_parts: each part of a score by its definition, in plain loops; their sum is the score."""

import copy

import numpy as np
import pytest
import torch
from helpers.foreign import GROUPED, HYBRID, foreign_model
from helpers.models import random_ids, tiny_model
from torch import nn

from headlens import capture, score_parts
from headlens.ablation import edited_contexts, removal
from headlens.capturing import output_projections

IDS = random_ids(B=1, T=9, vocab_size=23)[0].tolist()  # also tokens of the foreign models
CELLS = [(8, 6), (8, 8), (5, 1), (0, 0)]  # (query, key)


class Definition:
    """What each source of a model writes, and its queries and keys, by formulas in float64."""

    def __init__(self, model, layer, head, off, means):
        self.w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
        self.config, self.layer, self.head = model.config, layer, head
        self.names, self.written = self.embeddings()
        x = sum(self.written)
        biases = np.zeros_like(x)
        for n in range(layer):
            heads = [{"kind": "head", "layer": n, "head": h} for h in range(4)]
            wrote = [
                self.of_head(x, n, h, means[n][h] if (n, h) in off else None) for h in range(4)
            ]
            bias = self.w[self.output.format(n) + ".bias"]
            x = x + sum(wrote) + bias
            mlp = np.array([self.mlp(self.norm(row, row, self.mlp_norm.format(n)), n) for row in x])
            self.names += [*heads, {"kind": "mlp", "layer": n}]
            self.written += [*wrote, mlp]
            x, biases = x + mlp, biases + bias
        self.names.append({"kind": "biases"})
        self.written.append(biases)
        self.x = x

    def of_head(self, x, layer, head, mean):
        """What a head writes, (T, C). mean: its context if it is switched off."""
        projection = self.w[self.output.format(layer) + ".weight"]
        columns = projection[:, head * self.size : (head + 1) * self.size]
        wrote = np.zeros_like(x)
        for t in range(len(x)):
            normed = [self.norm(row, row, self.attn_norm.format(layer)) for row in x]
            query = self.project("query", normed[t], layer, head, t)
            keys = [self.project("key", normed[s], layer, head, s) for s in range(t + 1)]
            scores = np.array([query @ key / self.size**0.5 for key in keys])
            weights = np.exp(scores) / np.exp(scores).sum()
            values = [self.project("value", normed[s], layer, head, s) for s in range(t + 1)]
            context = sum(weight * value for weight, value in zip(weights, values, strict=True))
            wrote[t] = columns @ (context if mean is None else mean.double().numpy())
        return wrote

    def rows(self, name, head):
        """The rows of a matrix, or the numbers of a bias, of one head."""
        return self.w[name][head * self.size : (head + 1) * self.size]

    def part(self, what, source, position):
        """The query or key that a source wrote at a position."""
        last = source == len(self.written) - 1  # the biases
        part, x = self.written[source][position], self.x[position]
        normed = self.norm(part, x, self.attn_norm.format(self.layer), bias=last)
        return self.project(what, normed, self.layer, self.head, position, bias=last)

    def values(self, query, key):
        """For each pair of sources q . k, relative to its mean over the keys."""
        values = np.zeros((len(self.names), len(self.names)))
        for i in range(len(values)):
            q = self.part("query", i, query)
            for j in range(len(values)):
                keys = [self.part("key", j, t) for t in range(query + 1)]
                scores = [q @ k / self.size**0.5 for k in keys]
                values[i, j] = scores[key] - np.mean(scores)
        return values


class Ours(Definition):
    output, size = "blocks.{}.attn.out_proj", 4
    attn_norm, mlp_norm = "blocks.{}.attn_norm", "blocks.{}.mlp_norm"

    def embeddings(self):
        token, position = self.w["token_emb.weight"][IDS], self.w["pos_emb.weight"][: len(IDS)]
        return [{"kind": "token"}, {"kind": "position"}], [token, position]

    def norm(self, part, x, name, bias=True):
        normed = (part - part.mean()) / np.sqrt(x.var() + 1e-5)
        return normed * self.w[name + ".weight"] + bias * self.w[name + ".bias"]

    def project(self, what, normed, layer, head, position, bias=True):
        name = f"blocks.{layer}.attn.W_{what}."
        return self.rows(name + "weight", head) @ normed + bias * self.rows(name + "bias", head)

    def mlp(self, normed, layer):
        name = f"blocks.{layer}.mlp."
        a = self.w[name + "fc.weight"] @ normed + self.w[name + "fc.bias"]
        a = a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))) / 2  # GELU
        return self.w[name + "out_proj.weight"] @ a + self.w[name + "out_proj.bias"]


class Llama(Definition):
    """RMSNorm, rotary positions, keys and values that two heads share, gated MLP."""

    output, size = "model.layers.{}.self_attn.o_proj", 8
    attn_norm = "model.layers.{}.input_layernorm"
    mlp_norm = "model.layers.{}.post_attention_layernorm"

    def embeddings(self):
        return [{"kind": "token"}], [self.w["model.embed_tokens.weight"][IDS]]

    def norm(self, part, x, name, bias=True):
        return part / np.sqrt((x**2).mean() + self.config.rms_norm_eps) * self.w[name + ".weight"]

    def project(self, what, normed, layer, head, position, bias=True):
        name = f"model.layers.{layer}.self_attn.{what[0]}_proj."
        head = head if what == "query" else head // 2
        vector = self.rows(name + "weight", head) @ normed + bias * self.rows(name + "bias", head)
        if what == "value":
            return vector
        half, rotated = self.size // 2, np.zeros(self.size)
        for i in range(half):
            angle = position * self.config.rope_parameters["rope_theta"] ** (-i / half)
            a, b = vector[i], vector[i + half]
            rotated[i] = a * np.cos(angle) - b * np.sin(angle)
            rotated[i + half] = b * np.cos(angle) + a * np.sin(angle)
        return rotated

    def mlp(self, normed, layer):
        gate, up, down = (
            self.w[f"model.layers.{layer}.mlp.{name}_proj.weight"]
            for name in ("gate", "up", "down")
        )
        a = gate @ normed
        return down @ (a / (1 + np.exp(-a)) * (up @ normed))  # SiLU


def mean_contexts(size):
    """Context vectors for heads that are switched off, (H, D) for each layer."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, size, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("off", [[], [(0, 1), (1, 3)]])
@pytest.mark.parametrize("formulas", [Ours, Llama])
def test_every_part_is_that_of_its_definition(formulas, off):
    ours = tiny_model(num_layers=3)
    model = ours if formulas is Ours else foreign_model("llama", attention_bias=True)
    means = mean_contexts(formulas.size)
    for layer, head, (query, key) in [(0, 1, (8, 6)), (1, 0, (5, 0)), (2, 3, (8, 6))]:
        with edited_contexts(output_projections(model), removal(off, means)):
            parts = score_parts(model, IDS, layer, head, query, key)
        definition = formulas(model, layer, head, off, means)
        expected = definition.values(query, key)
        assert parts.sources == definition.names
        np.testing.assert_allclose(parts.values, expected, atol=1e-4)
        assert np.abs(expected).max(1).min() > 1e-3  # each source has a part


SUMS = {
    "ours": lambda: tiny_model(num_layers=3),
    "gpt2": lambda: foreign_model("gpt2"),
    "gpt_neox": lambda: foreign_model("gpt_neox", use_parallel_residual=False),
    "gpt_neox, parallel as Pythia": lambda: foreign_model("gpt_neox", use_parallel_residual=True),
    "llama": lambda: foreign_model("llama"),
    "llama, eager": lambda: foreign_model("llama", "eager"),
    "granite, factor of the residual": lambda: foreign_model("granite", residual_multiplier=0.5),
    "qwen2": lambda: foreign_model("qwen2"),
    "qwen3, norms of queries and keys": lambda: foreign_model("qwen3"),
    "mistral, sliding window": lambda: foreign_model("mistral"),
    "llama4, one norm for queries and keys": lambda: foreign_model(
        "llama4_text", **GROUPED, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_parts_sum_to_the_score_minus_the_mean_of_its_row(name):
    model = SUMS[name]()
    layers = capture(model, IDS).layers
    for layer in range(3):
        for head, (query, key) in zip(range(4), CELLS, strict=True):
            row = layers[layer].scores[0, head, query]
            parts = score_parts(model, IDS, layer, head, query, key)
            assert parts.score == pytest.approx(float(row[key]), abs=1e-4)
            assert parts.mean == pytest.approx(float(row[row.isfinite()].mean()), abs=1e-4)
            assert parts.values.sum() == pytest.approx(parts.score - parts.mean, abs=1e-4)
            kinds = [source["kind"] for source in parts.sources]
            positions = ["position"] if name in ("ours", "gpt2") else []
            of_layer = ["head"] * 4 + ["mlp"]
            assert kinds == ["token", *positions, *of_layer * layer, "biases"]
    deep = score_parts(model, IDS, 2, 0, 8, 6).values
    assert np.linalg.matrix_rank(deep, tol=1e-5) > 1  # the sum is not in one part


def test_layers_of_a_hybrid_without_attention_are_one_source():
    model = foreign_model("qwen3_next", **HYBRID)
    layers, heads = capture(model, IDS).layers, ["head"] * 4
    for layer, between in ((0, []), (1, [*heads, "layers before L3"])):
        parts = score_parts(model, IDS, layer, 1, 8, 6)
        row = layers[layer].scores[0, 1, 8]
        assert parts.score == pytest.approx(float(row[6]), abs=1e-4)
        assert parts.values.sum() == pytest.approx(float(row[6] - row[:9].mean()), abs=1e-4)
        kinds = [source["kind"] for source in parts.sources]
        assert kinds == ["token", "layers before L1", *between, "biases"]
        written = np.abs(parts.values[:, : len(kinds) - 1]).max(0)
        assert written.min() > 1e-3


def test_in_bf16_the_sum_is_exact_and_the_score_is_that_of_the_model_up_to_rounding():
    for build in (tiny_model, lambda: foreign_model("llama"), lambda: foreign_model("gpt2")):
        model = build().bfloat16()
        parts = score_parts(model, IDS, 1, 2, 8, 6)
        assert parts.values.sum() == pytest.approx(parts.score - parts.mean, abs=1e-4)
        row = capture(model, IDS).layers[1].scores[0, 2, 8]
        assert parts.score == pytest.approx(float(row[6]), abs=0.02 * float(row[:9].abs().max()))
        assert parts.sources == score_parts(build(), IDS, 1, 2, 8, 6).sources


@torch.no_grad()
def test_a_head_that_writes_nothing_has_no_part():
    ours, llama = tiny_model(), foreign_model("llama")
    for model, projection in (
        (ours, ours.blocks[0].attn.out_proj),
        (llama, llama.model.layers[0].self_attn.o_proj),
    ):
        size = projection.weight.shape[1] // 4
        before = score_parts(model, IDS, 1, 0, 8, 6)
        number = before.sources.index({"kind": "head", "layer": 0, "head": 2})
        assert np.abs(before.values[number]).max() > 1e-3
        projection.weight[:, 2 * size : 3 * size] = 0
        values = score_parts(model, IDS, 1, 0, 8, 6).values
        assert np.abs(values[number]).max() == np.abs(values[:, number]).max() == 0


@torch.no_grad()
def test_the_head_that_writes_what_a_key_reads_has_the_largest_part():
    """Only head 2 of layer 0 writes in the direction that the keys of layer 1 read."""
    model = tiny_model(std=0.3)
    direction = torch.zeros(16)
    direction[3], direction[7] = 1, -1  # has mean 0, as what the norm keeps
    direction /= direction.norm()
    without = torch.eye(16) - torch.outer(direction, direction)
    block, reading = model.blocks
    for weight in (model.token_emb.weight, model.pos_emb.weight):
        weight.copy_(weight @ without)
    for layer in (block.mlp.out_proj, block.attn.out_proj):
        layer.weight.copy_(without @ layer.weight)
        layer.bias.copy_(without @ layer.bias)
    block.attn.out_proj.weight[:, 8:12] += torch.outer(direction, torch.ones(4))
    reading.attn_norm.weight.fill_(1)
    reading.attn_norm.bias.zero_()
    reading.attn.W_key.weight.copy_(torch.outer(torch.ones(16), direction))
    reading.attn.W_key.bias.zero_()
    parts = score_parts(model, IDS, 1, 1, 8, 6)
    number = parts.sources.index({"kind": "head", "layer": 0, "head": 2})
    assert {j for _, j, _ in parts.largest(5)} == {number}
    assert np.abs(np.delete(parts.values, number, axis=1)).max() < 1e-5
    assert abs(parts.score - parts.mean) > 1e-2


def test_scores_with_heads_switched_off_are_those_of_the_edited_model():
    ours, gpt2, qwen3 = tiny_model(num_layers=3), foreign_model("gpt2"), foreign_model("qwen3")
    for model, size in ((ours, 4), (gpt2, 8), (qwen3, 12)):
        off, means = [(0, 1), (1, 0)], mean_contexts(size)
        with edited_contexts(output_projections(model), removal(off, means)):
            row = capture(model, IDS).layers[2].scores[0, 3, 8]
            parts = score_parts(model, IDS, 2, 3, 8, 6)
        assert parts.score == pytest.approx(float(row[6]), abs=1e-4)
        assert parts.score != pytest.approx(score_parts(model, IDS, 2, 3, 8, 6).score, abs=1e-2)
        assert parts.values.sum() == pytest.approx(float(row[6] - row[:9].mean()), abs=1e-4)


def test_largest_are_the_pairs_of_the_largest_absolute_values():
    parts = score_parts(tiny_model(), IDS, 1, 0, 8, 6)
    found = parts.largest(10)
    flat = np.sort(np.abs(parts.values).ravel())[::-1]
    assert [abs(value) for *_, value in found] == flat[:10].tolist()
    assert all(parts.values[i, j] == value for i, j, value in found)
    assert min(value for *_, value in found) < 0
    assert len(parts.largest()) == 20
    assert len(parts.largest(1000)) == len(parts.sources) ** 2


def test_the_model_is_unchanged():
    for model in (tiny_model(dropout=0.1).train(), foreign_model("qwen3").train()):
        before = copy.deepcopy(model.state_dict())
        modes = [module.training for module in model.modules()]
        random_state = torch.get_rng_state()
        score_parts(model, IDS, 1, 2, 8, 6)
        with pytest.raises(ValueError, match="head 4"):
            score_parts(model, IDS, 1, 4, 8, 6)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(before[k], value) for k, value in model.state_dict().items())
        hooks = (m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not any(hooks)
        if hasattr(model, "config") and hasattr(model.config, "_attn_implementation"):
            assert model.config._attn_implementation == "sdpa"


REFUSED = {  # (the model, layer): what its scores are not
    "soft cap": (lambda: foreign_model("gemma2"), 0),
    "norm after attention": (lambda: foreign_model("gemma3_text"), 1),
    "no norm before attention": (lambda: foreign_model("olmo2"), 0),
    "clipped queries": (lambda: foreign_model("olmo", clip_qkv=0.3), 1),
    "unknown scores": (lambda: foreign_model("gpt_neo"), 1),
    "biases of positions": (lambda: foreign_model("bloom", "eager", n_layer=3, n_head=4), 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_scores_are_not_such_a_sum_are_refused_in_one_line(name):
    build, layer = REFUSED[name]
    with pytest.raises(ValueError, match=r"^[A-Za-z0-9]+ForCausalLM: [^\n]+$"):
        score_parts(build(), IDS, layer, 1, 8, 6)


def test_what_does_not_exist_is_refused_in_one_line():
    model = tiny_model()
    for arguments in [
        (IDS, 2, 0, 8, 6),  # layer
        (IDS, -1, 0, 8, 6),
        (IDS, 1, 4, 8, 6),  # head
        (IDS, 1, -1, 8, 6),
        (IDS, 1, 0, 9, 6),  # query
        (IDS, 1, 0, -1, -1),
        (IDS, 1, 0, 5, 6),  # a later key
        (IDS, 1, 0, 5, -1),
        ([IDS], 1, 0, 8, 6),
        ([], 1, 0, 0, 0),
        ([99], 0, 0, 0, 0),  # token
    ]:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            score_parts(model, *arguments)
    with pytest.raises(ValueError, match="sliding window"):
        score_parts(foreign_model("mistral"), IDS, 0, 0, 8, 1)
    with pytest.raises(TypeError, match=r"^[^\n]+$"):
        score_parts(nn.Linear(3, 3), IDS, 0, 0, 8, 6)
