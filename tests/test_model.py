"""GPT-2's sizes, initialisation, logits and loss; reading the attention weights."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import REPOSITORY
from helpers.kernels import WIDTH, add_window
from helpers.models import TINY_MODEL, random_ids, tiny_model

from attention import KERNELS
from clearhead.config import compose
from model import GPT, ModelConfig, gelu, model_without_values

PRESETS = REPOSITORY / "configs" / "model"
# Radford et al. 2019: parameters, counted from the released weights; layers, heads and width of
# https://huggingface.co/openai-community.
PUBLISHED = {
    "gpt2-small": (124_439_808, 12, 12, 768),
    "gpt2-medium": (354_823_168, 24, 16, 1024),
    "gpt2-large": (774_030_080, 36, 20, 1280),
    "gpt2-xl": (1_557_611_200, 48, 25, 1600),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def preset(name):
    return ModelConfig(**compose([f"model={name}"]).model.model_dump())


def test_presets_have_the_published_sizes_and_the_stated_number_of_parameters():
    files = {file.stem: file for file in PRESETS.glob("*.yaml")}
    assert PUBLISHED.keys() | {"gpt2-nano"} <= files.keys()
    for name, file in files.items():
        first_line = file.read_text(encoding="utf-8").splitlines()[0]
        stated = re.search(r"([\d,]{6,}) parameters", first_line)
        number = int(stated[1].replace(",", ""))
        published, *sizes = PUBLISHED.get(name, (number,))
        found, config = model_without_values(preset(name)).num_parameters(), preset(name)
        assert found == published == number, name
        if sizes:
            assert [config.num_layers, config.num_heads, config.emb_dim] == sizes
            assert (config.vocab_size, config.context_length) == (50257, 1024)
    assert ModelConfig() == preset("gpt2-small")


def test_flops_of_gpt2_small():
    small = model_without_values(preset("gpt2-small"))
    assert f"{small.flops_per_token(1024) / 1e9:.3f}" == "0.798"
    # Terms: four attention matrices, two MLP matrices, output layer; then q.k and weights.v.
    C, V, L, T = 768, 50257, 12, 1024
    matrices = L * (4 * C * C + 2 * C * 4 * C) + C * V
    causal_products = L * 2 * C * (T + 1) / 2
    assert small.flops_per_token(T) == 3 * 2 * (matrices + causal_products)
    # nanoGPT counts both halves of attention, and the vectors of norms and biases.
    parameters = small.num_parameters() - small.pos_emb.weight.numel()
    of_nanogpt = 6 * parameters + 12 * L * C * T
    assert f"{small.flops_per_token(T) / of_nanogpt:.2f}" == "0.93"  # docs/questions.md


def test_impossible_shapes_are_refused():
    sizes = ("vocab_size", "context_length", "emb_dim", "num_heads", "num_layers")
    bad = [*((key, 0) for key in sizes), ("num_heads", 5), ("attention", "none")]
    bad += [("dropout", value) for value in (1.0, -0.1, math.nan)]
    for key, value in bad:
        with pytest.raises(ValueError):  # noqa: PT011
            ModelConfig(**TINY_MODEL | {key: value})
    with pytest.raises(ValueError):  # noqa: PT011
        ModelConfig(**TINY_MODEL | {"attention": "flex", "dropout": 0.1})
    assert ModelConfig(**TINY_MODEL | {"attention": "flex"}).attention == "flex"


def test_initialisation_statistics_and_first_loss():
    torch.manual_seed(0)
    initialised = GPT(ModelConfig(1000, 128, 128, 4, 4, 0.0))  # enough parameters for statistics
    for name, parameter in initialised.named_parameters():
        if name.endswith("bias"):
            assert parameter.count_nonzero() == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = 0.02 / math.sqrt(2 * 4) if "out_proj" in name else 0.02
            # The standard error of the deviation of n draws is 1 / sqrt(2 n); four times that.
            n = parameter.numel()
            assert abs(parameter.std() / expected - 1) < 4 / math.sqrt(2 * n), name
            assert abs(parameter.mean()) < 4 * expected / math.sqrt(n), name

    ids = torch.randint(1000, (4, 65), generator=torch.Generator().manual_seed(0))
    _, loss = initialised(ids[:, :-1], ids[:, 1:])
    assert abs(loss.item() - math.log(1000)) < 0.1  # the loss of random guessing


def test_the_same_seed_gives_the_same_weights_with_every_kernel():
    same, again, other = (dict(tiny_model(seed, std=None).named_parameters()) for seed in (7, 7, 8))
    explicit = dict(tiny_model(7, std=None, attention="explicit").named_parameters())
    torch.testing.assert_close(again, same, rtol=0, atol=0)
    torch.testing.assert_close(explicit, same, rtol=0, atol=0)
    assert not torch.equal(same["token_emb.weight"], other["token_emb.weight"])


def test_order_of_the_parameters():
    model = tiny_model(num_layers=1)
    attn = [f"attn.{name}" for name in ("W_query", "W_key", "W_value", "out_proj")]
    block = ["attn_norm", *attn, "mlp_norm", "mlp.fc", "mlp.out_proj"]
    modules = ["token_emb", "pos_emb", *(f"blocks.0.{name}" for name in block), "final_norm"]
    expected = [f"{name}.{kind}" for name in modules for kind in ("weight", "bias")]
    expected = [name for name in expected if not name.endswith("emb.bias")]
    assert [name for name, _ in model.named_parameters()] == expected
    assert list(model.state_dict()) == expected
    assert list(model.buffers()) == []


def logits_by_hand(model, ids):
    """GPT-2 as a function of its parameters, with the token embedding as output layer. Does not
    call model.py."""
    p, c = dict(model.named_parameters()), model.config
    D, T = c.emb_dim // c.num_heads, ids.shape[1]

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["token_emb.weight"][ids] + p["pos_emb.weight"][:T]
    for layer in range(c.num_layers):
        block = f"blocks.{layer}"
        h = norm(x, f"{block}.attn_norm")
        queries, keys, values = (
            linear(h, f"{block}.attn.{which}").split(D, dim=-1)
            for which in ("W_query", "W_key", "W_value")
        )
        heads = []
        for q, k, v in zip(queries, keys, values, strict=True):
            attn_scores = q @ k.mT / math.sqrt(D) + torch.full((T, T), -math.inf).triu(1)
            heads.append(attn_scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), f"{block}.attn.out_proj")
        h = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.fc")
        # The tanh approximation (Hendrycks and Gimpel 2016), which GPT-2 uses.
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{block}.mlp.out_proj")
    return norm(x, "final_norm") @ p["token_emb.weight"].T


@each_kernel
def test_logits_are_gpt2s_with_its_epsilon(name):
    ids = random_ids()
    for std, more in [(0.3, {}), (0.3, {"qkv_bias": False}), (0.003, {})]:
        model = tiny_model(std=std, attention=name, **more)  # with the smallest std, eps matters
        atol = 1e-4 * std
        torch.testing.assert_close(model(ids)[0], logits_by_hand(model, ids), atol=atol, rtol=1e-4)


def test_gelu_is_the_same_when_compiled(monkeypatch):
    x = torch.linspace(-6, 6, 101)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"))


def test_loss_is_the_cross_entropy_of_the_logits():
    model, ids = tiny_model(), random_ids(T=10)
    logits, no_loss = model(ids[:, :-1])
    no_logits, loss = model(ids[:, :-1], ids[:, 1:])
    assert no_loss is None
    assert no_logits is None
    # The definition: the mean of the negative log-probabilities of the targets.
    expected = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss, F.cross_entropy(logits.mT, ids[:, 1:]))
    some_logits, _ = model(ids[:, :-1], logits_at=torch.tensor([8, 3]))
    assert some_logits.shape == (2, 1, TINY_MODEL["vocab_size"])
    torch.testing.assert_close(some_logits[:, 0], logits[[0, 1], [8, 3]])
    # A head_loss that replaces it gets what these logits are computed from.
    model.head_loss = lambda x, weight, target_ids: (x @ weight.T, target_ids)
    flat = logits.flatten(0, 1), ids[:, 1:].flatten()
    torch.testing.assert_close(model(ids[:, :-1], ids[:, 1:])[1], flat)


def test_loss_is_fp32_in_bf16():
    model, ids = tiny_model(std=0.1), random_ids(T=10)
    expected = model(ids[:, :-1], ids[:, 1:])[1].item()
    model.bfloat16()
    assert model(ids[:, :-1])[0].dtype == torch.bfloat16
    _, loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.02)


def test_too_long_an_input_is_refused_and_the_mode_is_restored():
    model = tiny_model().train()
    assert model(random_ids(T=12))[0].shape[1] == 12
    for call in (model, model.attn_weights):
        with pytest.raises(ValueError):  # noqa: PT011
            call(random_ids(T=13))
    assert all(module.training for module in model.modules())


def test_dropout_only_in_training():
    model, ids, inputs = tiny_model(dropout=0.5), random_ids(), []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    assert not torch.equal(model(ids)[0], model(ids)[0])
    assert 0.4 < (inputs[0] == 0).float().mean() < 0.6  # of the embeddings too
    model.eval()
    torch.testing.assert_close(model(ids)[0], tiny_model(dropout=0.0)(ids)[0])


@pytest.mark.parametrize("other", ["attn", "mlp"])
def test_dropout_of_the_output_of_each_branch(other):
    block = tiny_model(dropout=0.5).blocks[0].train()
    for parameter in getattr(block, other).out_proj.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.ones(64, 12, TINY_MODEL["emb_dim"])
    assert 0.4 < (block(x) == x).float().mean() < 0.6


def test_activation_checkpointing_computes_each_block_again():
    model, calls = tiny_model().train(), []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    for model.activation_checkpointing, times in ((False, 1), (True, 2)):
        calls.clear()
        model(random_ids(), random_ids())[1].backward()
        assert sorted(calls) == sorted([*range(len(model.blocks))] * times)


@each_kernel
def test_attention_is_captured_in_every_layer(name):
    """Before dropout, and in fp32 also with autocast. The output is the same as without capture."""
    model, ids = tiny_model(attention=name), random_ids()
    found = []
    logits = model.capture_attention(ids, lambda *captured: found.append(captured))
    torch.testing.assert_close(logits, model(ids)[0])
    assert [layer for layer, *_ in found] == [0, 1]
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = model.attn_weights(ids)
    for (_, weights, scores, *_), rounded in zip(found, in_bf16, strict=True):
        assert weights.shape == scores.shape == (2, 4, 9, 9)
        assert weights.dtype == scores.dtype == rounded.dtype == torch.float32
        torch.testing.assert_close(scores.softmax(-1), weights)
        assert (scores.isneginf() == torch.ones(9, 9).triu(1).bool()).all()
        torch.testing.assert_close(rounded, weights, atol=0.1, rtol=0)
        torch.testing.assert_close(rounded.sum(-1), torch.ones(2, 4, 9))
    expected, given = tiny_model(attention="explicit").attn_weights(ids), model.attn_weights(ids)
    for weights, again, (_, captured, *_) in zip(given, expected, found, strict=True):
        assert torch.equal(weights, captured)
        torch.testing.assert_close(weights, again)


@torch.no_grad()
def test_value_norms_of_each_layer():
    """By the slices of the output projection, from the input of the block."""
    model, ids, inputs, found = tiny_model(), random_ids(), [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.capture_attention(ids, lambda *captured: found.append(captured))
    D = model.blocks[0].attn.head_dim
    for block, x, (*_, norms) in zip(model.blocks, inputs, found, strict=True):
        values = block.attn.W_value(block.attn_norm(x)).split(D, dim=-1)
        projections = block.attn.out_proj.weight.split(D, dim=1)
        for head, (v, projection) in enumerate(zip(values, projections, strict=True)):
            torch.testing.assert_close(norms[:, head], (v @ projection.T).norm(dim=-1))


def test_capture_uses_the_scores_that_a_kernel_declares(monkeypatch):
    add_window(monkeypatch)
    model, ids = tiny_model(attention="window"), random_ids()
    found = []
    logits = model.capture_attention(ids, lambda _, weights, *__: found.append(weights))
    torch.testing.assert_close(logits, model(ids)[0])
    assert (logits - tiny_model()(ids)[0]).abs().max() > 1e-3
    inside = torch.ones(9, 9).tril().triu(1 - WIDTH).bool()
    assert all(torch.equal(weights > 0, inside.expand(2, 4, 9, 9)) for weights in found)


def test_attn_weights_leave_no_trace():
    model, ids = tiny_model(dropout=0.5), random_ids()
    for training in (True, False):
        model.train(training)
        before = torch.get_rng_state()
        layers = model.attn_weights(ids)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training is training for module in model.modules())
        assert not any(weights.requires_grad for weights in layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    # Without dropout, two calls return the same.
    for once, twice in zip(layers, model.attn_weights(ids), strict=True):
        assert torch.equal(once, twice)
