"""model.py: GPT-2's sizes and initialisation, causality with every kernel, and what GPT promises.

As in test_attention.py, checks that matter are also run on a planted mistake, and must fail.
"""

import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import REPOSITORY
from helpers.models import TINY_MODEL as TINY
from helpers.models import random_ids
from helpers.models import tiny_model as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
import model as model_file
from attention import KERNELS
from model import GPT, ModelConfig

PRESETS = REPOSITORY / "configs" / "model"
PUBLISHED = {  # Radford et al. 2019, counted from the released weights
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

# --- Sizes ---------------------------------------------------------------------------------------


def preset(name):
    return ModelConfig(**yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8")))


def count(config):
    with torch.device("meta"):
        return GPT(config).num_parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    assert count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.stem)
def test_presets_state_their_number_of_parameters(file):
    stated = re.search(r"([\d,]{6,}) parameters", file.read_text(encoding="utf-8").splitlines()[0])
    assert stated is not None
    assert int(stated[1].replace(",", "")) == count(preset(file.stem))


def test_defaults_are_gpt2_small():
    assert ModelConfig() == preset("gpt2-small")
    assert (PRESETS / "gpt2-nano.yaml").is_file()


def test_flops_of_gpt2_small():
    with torch.device("meta"):
        small = GPT(preset("gpt2-small"))
    assert f"{small.flops_per_token(1024) / 1e9:.3f}" == "0.798"
    # By pieces: four attention matrices, two of the MLP, the head; then q.k and weights.v.
    C, V, L, T = 768, 50257, 12, 1024
    matrices = L * (4 * C * C + 2 * C * 4 * C) + C * V
    causal_products = L * 2 * C * (T + 1) / 2
    assert small.flops_per_token(T) == 3 * 2 * (matrices + causal_products)


# --- Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 0),
        ("context_length", 0),
        ("emb_dim", -1),
        ("num_heads", 0),
        ("num_layers", 0),
        ("num_heads", 5),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", float("nan")),
        ("attention", "flash"),
    ],
)
def test_each_problem_names_its_key(key, value):
    with pytest.raises(ValueError, match=rf"^{key}={re.escape(str(value))}: .+; .+") as caught:
        ModelConfig(**TINY | {key: value})
    assert len(str(caught.value).splitlines()) == 1


def test_flex_with_dropout_is_a_problem():
    with pytest.raises(ValueError, match=r"^attention=flex: .*dropout"):
        ModelConfig(**TINY | {"attention": "flex", "dropout": 0.1})
    ModelConfig(**TINY | {"attention": "flex"})


def test_all_problems_are_listed_at_once():
    with pytest.raises(ValueError, match="vocab_size=0") as caught:
        ModelConfig(vocab_size=0, num_layers=0, dropout=2.0, attention="none")
    keys = [line.split("=")[0] for line in str(caught.value).splitlines()]
    assert keys == ["vocab_size", "num_layers", "dropout", "attention"]


def test_the_nearest_number_of_heads_is_offered():
    with pytest.raises(ValueError, match="divisor of 16, such as 4"):
        ModelConfig(**TINY | {"num_heads": 5})


# --- Parameters ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def initialised():
    """At GPT-2's own initialisation, large enough for statistics."""
    torch.manual_seed(0)
    return GPT(ModelConfig(1000, 128, 128, 4, 4, 0.0))


def test_initialisation_statistics(initialised):
    for name, parameter in initialised.named_parameters():
        if name.endswith("bias"):
            assert parameter.count_nonzero() == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = 0.02 / math.sqrt(2 * 4) if "out_proj" in name else 0.02
            # The deviation of n draws is within 1 / sqrt(2 n); four of that.
            n = parameter.numel()
            assert abs(parameter.std() / expected - 1) < 4 / math.sqrt(2 * n), name
            assert abs(parameter.mean()) < 4 * expected / math.sqrt(n), name


def test_the_first_loss_is_that_of_guessing(initialised):
    ids = torch.randint(1000, (4, 65), generator=torch.Generator().manual_seed(0))
    _, loss = initialised(ids[:, :-1], ids[:, 1:])
    assert abs(loss.item() - math.log(1000)) < 0.1


def test_the_same_seed_gives_the_same_weights():
    models = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        models.append(GPT(ModelConfig(**TINY)))
    same, again, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not torch.equal(same["token_emb.weight"], other["token_emb.weight"])
    # The kernel owns no parameters and draws nothing.
    torch.manual_seed(7)
    explicit = GPT(ModelConfig(**TINY, attention="explicit"))
    assert all(torch.equal(same[name], p) for name, p in explicit.named_parameters())


def test_parameters_come_in_the_agreed_order():
    names = [name for name, _ in GPT(ModelConfig(**TINY | {"num_layers": 1})).named_parameters()]
    assert names == [
        "token_emb.weight",
        "pos_emb.weight",
        "blocks.0.attn_norm.weight",
        "blocks.0.attn_norm.bias",
        "blocks.0.attn.W_query.weight",
        "blocks.0.attn.W_query.bias",
        "blocks.0.attn.W_key.weight",
        "blocks.0.attn.W_key.bias",
        "blocks.0.attn.W_value.weight",
        "blocks.0.attn.W_value.bias",
        "blocks.0.attn.out_proj.weight",
        "blocks.0.attn.out_proj.bias",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp_norm.bias",
        "blocks.0.mlp.fc.weight",
        "blocks.0.mlp.fc.bias",
        "blocks.0.mlp.out_proj.weight",
        "blocks.0.mlp.out_proj.bias",
        "final_norm.weight",
        "final_norm.bias",
    ]


def test_the_state_dict_is_the_parameters():
    model = GPT(ModelConfig(**TINY))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert list(model.buffers()) == []


def test_the_head_is_the_token_embedding():
    model, ids = tiny(), random_ids()
    assert not any("head" in name for name, _ in model.named_parameters())
    unseen = next(token for token in range(TINY["vocab_size"]) if token not in ids)
    before, _ = model(ids)
    with torch.no_grad():
        model.token_emb.weight[unseen] += 1.0
    after, _ = model(ids)
    changed = (after - before).abs().amax(dim=(0, 1)) > 1e-3
    assert changed.nonzero().flatten().tolist() == [unseen]


# --- The forward pass ----------------------------------------------------------------------------


def logits_by_hand(model, ids):
    """GPT-2 as functions of its parameters; nothing of model.py is called."""
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
        # Hendrycks and Gimpel 2016, the approximation that GPT-2 uses.
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{block}.mlp.out_proj")
    return norm(x, "final_norm") @ p["token_emb.weight"].T


def check_logits(**changes):
    model, ids = tiny(**changes), random_ids()
    torch.testing.assert_close(model(ids)[0], logits_by_hand(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KERNELS)
def test_logits_are_gpt2s(name):
    check_logits(attention=name)
    check_logits(attention=name, qkv_bias=False)


def erf_gelu(x, approximate="tanh"):
    return gelu(x)


def no_activation(x, approximate="tanh"):
    return x


gelu = F.gelu


@pytest.mark.parametrize("planted", [erf_gelu, no_activation])
def test_a_planted_activation_is_caught(monkeypatch, planted):
    monkeypatch.setattr(model_file.F, "gelu", planted)
    with pytest.raises(AssertionError):
        check_logits()


def post_norm(self, x, capture=None, remember=None):
    x = self.attn_norm(x + self.attn(x, capture))
    return self.mlp_norm(x + self.mlp(x))


def branches_without_residual(self, x, capture=None, remember=None):
    x = self.attn(self.attn_norm(x), capture)
    return self.mlp(self.mlp_norm(x))


def parallel_branches(self, x, capture=None, remember=None):
    return x + self.attn(self.attn_norm(x), capture) + self.mlp(self.mlp_norm(x))


@pytest.mark.parametrize("planted", [post_norm, branches_without_residual, parallel_branches])
def test_a_planted_block_is_caught(monkeypatch, planted):
    monkeypatch.setattr(model_file.Block, "forward", planted)
    with pytest.raises(AssertionError):
        check_logits()


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_agree_with_the_plainly_right_kernel(name):
    ids = random_ids(T=10)
    grads = []
    for kernel in (name, "explicit"):
        model = tiny(std=0.1, attention=kernel)
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for parameter in grads[0]:
        torch.testing.assert_close(grads[0][parameter], grads[1][parameter], atol=1e-5, rtol=1e-4)


def check_causality(model, position, token):
    """Another token at `position` changes that row of logits and none before it."""
    ids = random_ids(B=1)
    token = token if ids[0, position] != token else (token + 1) % TINY["vocab_size"]
    other = ids.clone()
    other[0, position] = token
    with torch.no_grad():
        before, after = model(ids)[0], model(other)[0]
    difference = (after - before).abs().amax(-1)[0]  # (T,)
    assert (difference[:position] < 1e-5).all()
    assert difference[position] > 1e-3


@functools.cache
def shared_model(kernel):
    return tiny(attention=kernel)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(position=st.integers(0, 8), token=st.integers(0, TINY["vocab_size"] - 1))
def test_a_later_token_never_changes_an_earlier_logit(name, position, token):
    check_causality(shared_model(name), position, token)


@pytest.mark.parametrize("planted_diagonal", [1, 20])
def test_planted_mask_breaks_causality(monkeypatch, planted_diagonal):
    def sees_too_much(num_queries, num_keys, device):
        return torch.ones(num_queries, num_keys).tril(planted_diagonal).bool()

    monkeypatch.setattr(attention, "causal_mask", sees_too_much)
    for position in range(1, 9):
        with pytest.raises(AssertionError):
            check_causality(shared_model("explicit"), position, token=3)


def test_loss_is_the_cross_entropy_of_the_logits():
    model, ids = tiny(), random_ids(T=10)
    logits, no_loss = model(ids[:, :-1])
    no_logits, loss = model(ids[:, :-1], ids[:, 1:])
    assert no_loss is None
    assert no_logits is None
    assert logits.shape == (2, 9, TINY["vocab_size"])
    # By hand: the mean of minus the log-probability of each target.
    expected = -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss, F.cross_entropy(logits.mT, ids[:, 1:]))


def test_loss_is_fp32_in_bf16():
    model, ids = tiny(std=0.1).bfloat16(), random_ids(T=10)
    assert model(ids[:, :-1])[0].dtype == torch.bfloat16
    _, loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(tiny(std=0.1)(ids[:, :-1], ids[:, 1:])[1].item(), rel=0.02)


def test_too_long_an_input_is_refused():
    model = tiny()
    assert model(random_ids(T=12))[0].shape[1] == 12
    for call in (model, model.attn_weights):
        with pytest.raises(ValueError, match="13 tokens do not fit into context_length=12"):
            call(random_ids(T=13))


def test_dropout_works_in_training_only():
    model, ids = tiny(dropout=0.5), random_ids()
    assert not torch.equal(model(ids)[0], model(ids)[0])
    model.eval()
    torch.testing.assert_close(model(ids)[0], tiny(dropout=0.0)(ids)[0])


# --- Looking at attention ------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_capture_is_called_for_each_layer(name):
    model, ids = tiny(attention=name), random_ids()
    captured = []
    logits, _ = model(ids, capture=lambda layer, weights, _: captured.append((layer, weights)))
    assert [layer for layer, _ in captured] == [0, 1]
    assert all(weights.shape == (2, 4, 9, 9) for _, weights in captured)
    torch.testing.assert_close(logits, model(ids)[0], atol=1e-4, rtol=1e-4)
    for (_, weights), again in zip(captured, model.attn_weights(ids), strict=True):
        torch.testing.assert_close(weights, again)


def test_of_the_last_position_alone():
    model, ids = tiny(), random_ids()
    logits, loss = model(ids, last_only=True)
    assert loss is None
    assert logits.shape == (2, 1, model.config.vocab_size)
    torch.testing.assert_close(logits, model(ids)[0][:, -1:])


def test_attn_weights_leave_no_trace():
    model, ids = tiny(dropout=0.5), random_ids()
    for training in (True, False):
        model.train(training)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        layers = model.attn_weights(ids)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training is training for module in model.modules())
        assert not any(weights.requires_grad for weights in layers)
        assert all(weights.dtype == torch.float32 for weights in layers)
        for weights in layers:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
            assert weights.triu(diagonal=1).count_nonzero() == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    # Without dropout: twice the same.
    for once, twice in zip(layers, model.attn_weights(ids), strict=True):
        assert torch.equal(once, twice)


def test_attn_weights_restore_the_mode_after_an_error():
    model = tiny().train()
    with pytest.raises(ValueError, match="do not fit"):
        model.attn_weights(random_ids(T=13))
    assert all(module.training for module in model.modules())
