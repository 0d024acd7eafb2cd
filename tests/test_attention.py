"""attention.py against published figures, against the definition in plain Python, and against
the mistakes that published attention code has made.

Each mistake is planted: the check that the real function passes has to fail on the wrong one.
"""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attention
from attention import (
    KERNELS,
    MultiHeadAttention,
    causal_attn_weights,
    causal_mask,
    explicit,
)

WITH_DROPOUT = [name for name in KERNELS if name != "flex"]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def random_heads(num_queries, num_keys, B=2, H=3, D=4, seed=0, requires_grad=False):
    """queries (B, H, T, D), keys and values (B, H, S, D)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, H, n, D, generator=generator).requires_grad_(requires_grad)
        for n in (num_queries, num_keys, num_keys)
    ]


# --- The attention weights: checks, the real function, the planted mistakes --------------------


def weights_by_definition(queries, keys):
    """softmax(q . k / sqrt(D)) over the keys up to the query, in Python's own numbers."""
    (B, H, T, D), S = queries.shape, keys.shape[2]
    attn_weights = torch.zeros(B, H, T, S)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                q = queries[b, h, t].tolist()
                visible = keys[b, h, : S - T + t + 1].tolist()
                dots = [sum(x * y for x, y in zip(q, k, strict=True)) for k in visible]
                exps = [math.exp(dot / math.sqrt(D)) for dot in dots]
                for s, e in enumerate(exps):
                    attn_weights[b, h, t, s] = e / sum(exps)
    return attn_weights


def check_rows_sum_to_one(weights_of):
    queries, keys, _ = random_heads(7, 7)
    row_sums = weights_of(queries, keys).sum(-1)
    torch.testing.assert_close(row_sums, torch.ones_like(row_sums))


def check_later_keys_get_nothing(weights_of):
    queries, keys, _ = random_heads(5, 5, D=5)
    assert weights_of(queries, keys).triu(diagonal=1).count_nonzero() == 0


def check_first_of_more_keys(weights_of):
    """With S > T the last query sees every key, the first all but the last T - 1."""
    queries, keys, _ = random_heads(3, 9)
    seen = (weights_of(queries, keys) > 0).sum(-1)
    assert seen[0, 0].tolist() == [7, 8, 9]


def check_definition(weights_of):
    for T, S in [(1, 1), (7, 7), (3, 9), (1, 4)]:
        queries, keys, _ = random_heads(T, S)
        torch.testing.assert_close(
            weights_of(queries, keys), weights_by_definition(queries, keys), atol=1e-6, rtol=1e-5
        )


def check_definition_in_a_cube(weights_of):
    """H = T = S = D, where every wrong transpose has a shape that fits."""
    queries, keys, _ = random_heads(4, 4, H=4, D=4)
    expected = weights_by_definition(queries, keys)
    torch.testing.assert_close(weights_of(queries, keys), expected, atol=1e-6, rtol=1e-5)


WEIGHT_CHECKS = [
    check_rows_sum_to_one,
    check_later_keys_get_nothing,
    check_first_of_more_keys,
    check_definition,
    check_definition_in_a_cube,
]


@pytest.mark.parametrize("check", WEIGHT_CHECKS)
def test_attention_weights(check):
    check(causal_attn_weights)


def scores_and_mask(queries, keys):
    mask = causal_mask(queries.shape[-2], keys.shape[-2], queries.device)
    return queries @ keys.transpose(-2, -1), math.sqrt(queries.shape[-1]), mask


def scaled_by_d_out(queries, keys):
    attn_scores, _, mask = scores_and_mask(queries, keys)
    d_out = queries.shape[-3] * queries.shape[-1]
    return attn_scores.div(math.sqrt(d_out)).masked_fill(~mask, -math.inf).softmax(-1)


def not_scaled(queries, keys):
    attn_scores, _, mask = scores_and_mask(queries, keys)
    return attn_scores.masked_fill(~mask, -math.inf).softmax(-1)


def softmax_over_queries(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).masked_fill(~mask, -math.inf).softmax(-2)


def softmax_over_batch(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).masked_fill(~mask, -math.inf).softmax(0).nan_to_num()


def mask_not_applied(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    attn_scores.masked_fill(~mask, -math.inf)  # returns a new tensor, which nobody takes
    return attn_scores.div(scale).softmax(-1)


def masked_after_softmax(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).softmax(-1) * mask


def masked_with_zero(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).masked_fill(~mask, 0.0).softmax(-1)


def mask_aligned_at_the_top(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).masked_fill(~torch.ones_like(mask).tril(), -math.inf).softmax(-1)


def mask_one_too_wide(queries, keys):
    attn_scores, scale, mask = scores_and_mask(queries, keys)
    offset = keys.shape[-2] - queries.shape[-2] + 1
    mask = torch.ones_like(mask).tril(offset)
    return attn_scores.div(scale).masked_fill(~mask, -math.inf).softmax(-1)


def keys_and_queries_swapped(queries, keys):
    return causal_attn_weights(keys, queries)


def reversed_by_dot_T(queries, keys):
    """`k.T` on the (H, T, D) of one sequence reverses all three dimensions."""
    attn_scores = torch.stack([q @ k.permute(2, 1, 0) for q, k in zip(queries, keys, strict=True)])
    _, scale, mask = scores_and_mask(queries, keys)
    return attn_scores.div(scale).masked_fill(~mask, -math.inf).softmax(-1)


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        (scaled_by_d_out, check_definition),
        (not_scaled, check_definition),
        (softmax_over_queries, check_rows_sum_to_one),
        (softmax_over_queries, check_definition),
        (softmax_over_batch, check_rows_sum_to_one),
        (mask_not_applied, check_later_keys_get_nothing),
        (mask_not_applied, check_definition),
        (masked_after_softmax, check_rows_sum_to_one),
        (masked_with_zero, check_later_keys_get_nothing),
        (mask_aligned_at_the_top, check_first_of_more_keys),
        (mask_aligned_at_the_top, check_definition),
        (mask_one_too_wide, check_later_keys_get_nothing),
        (mask_one_too_wide, check_first_of_more_keys),
        (keys_and_queries_swapped, check_definition_in_a_cube),
        (reversed_by_dot_T, check_definition_in_a_cube),
    ],
)
def test_planted_weights_are_caught(planted, check):
    with pytest.raises(AssertionError):
        check(planted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_fp32_whatever_comes_in(dtype):
    queries, keys, _ = (x.to(dtype) for x in random_heads(7, 7))
    attn_weights = causal_attn_weights(queries, keys)
    assert attn_weights.dtype == torch.float32
    torch.testing.assert_close(attn_weights.sum(-1), torch.ones(2, 3, 7))


def test_causal_mask_is_aligned_bottom_right():
    assert causal_mask(2, 4, torch.device("cpu")).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert causal_mask(1, 1, torch.device("cpu")).tolist() == [[True]]


# --- Kernels: every one against `explicit`, and `explicit` against the definition --------------


def check_kernel(kernel, T, S):
    """The same context vectors and the same gradients as `explicit`'s."""
    inputs = random_heads(T, S, requires_grad=True)
    grad = torch.randn(2, 3, T, 4, generator=torch.Generator().manual_seed(1))
    expected, context_vec = explicit(*inputs), kernel(*inputs)
    torch.testing.assert_close(context_vec, expected, atol=1e-5, rtol=0)
    grads = torch.autograd.grad(context_vec, inputs, grad)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def top_left_sdpa(queries, keys, values, dropout_p=0.0):
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def keys_without_gradient(queries, keys, values, dropout_p=0.0):
    return explicit(queries, keys.detach() + 0 * keys, values)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (3, 9), (1, 6)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_agrees_with_explicit(name, T, S):
    check_kernel(KERNELS[name], T, S)


@pytest.mark.parametrize("planted", [top_left_sdpa, keys_without_gradient])
def test_planted_kernels_are_caught(planted):
    with pytest.raises(AssertionError):
        check_kernel(planted, 3, 9)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (7, 7), (3, 9)])
def test_explicit_is_the_definition(T, S):
    queries, keys, values = random_heads(T, S)
    expected = weights_by_definition(queries, keys) @ values
    torch.testing.assert_close(explicit(queries, keys, values), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_last_queries_alone_give_the_last_rows(name):
    """Decoding: the last queries over all keys see what they saw in the whole sequence."""
    queries, keys, values = random_heads(9, 9)
    whole = KERNELS[name](queries, keys, values)
    for T in (1, 2, 5):
        last = KERNELS[name](queries[:, :, -T:], keys, values)
        torch.testing.assert_close(last, whole[:, :, -T:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_fewer_keys_than_queries_is_refused(name):
    with pytest.raises(ValueError, match="5 queries need at least as many keys; got 3"):
        KERNELS[name](*random_heads(5, 3))


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_keeps_bf16(name):
    inputs = random_heads(7, 7)
    context_vec = KERNELS[name](*(x.bfloat16() for x in inputs))
    assert context_vec.dtype == torch.bfloat16
    torch.testing.assert_close(context_vec.float(), explicit(*inputs), atol=0.05, rtol=0)


# --- Dropout -------------------------------------------------------------------------------------


def check_dropout(kernel, rate=0.3):
    """With the identity as values, the context vectors *are* the weights after dropout."""
    T = 48
    queries, keys, _ = random_heads(T, T, B=4, H=8)
    torch.manual_seed(0)
    dropped = kernel(queries, keys, torch.eye(T).expand(4, 8, T, T), rate)
    attn_weights = causal_attn_weights(queries, keys)
    kept = dropped != 0
    # What is kept grows by 1 / (1 - p), so that the expectation stays.
    torch.testing.assert_close(dropped[kept], attn_weights[kept] / (1 - rate))
    share_dropped = 1 - kept.sum() / attn_weights.count_nonzero()
    assert abs(share_dropped - rate) < 0.01  # 37,632 draws: four standard deviations
    assert abs(dropped.sum(-1).mean() - 1) < 0.02
    assert not torch.equal(kept[:, 0], kept[:, 1])  # each head draws its own
    assert not torch.equal(kept[0], kept[1])  # and each sequence


def dropout_without_growth(queries, keys, values, rate):
    kept = torch.rand(queries.shape[:-1] + keys.shape[-2:-1]) >= rate
    return causal_attn_weights(queries, keys) * kept @ values


def dropout_kept_and_dropped_swapped(queries, keys, values, rate):
    attn_weights = F.dropout(causal_attn_weights(queries, keys), 1 - rate) * rate / (1 - rate)
    return attn_weights @ values


def no_dropout(queries, keys, values, rate):
    return explicit(queries, keys, values)


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_rate_and_expectation(name):
    check_dropout(KERNELS[name])


@pytest.mark.parametrize(
    "planted", [dropout_without_growth, dropout_kept_and_dropped_swapped, no_dropout]
)
def test_planted_dropout_is_caught(planted):
    with pytest.raises(AssertionError):
        check_dropout(planted)


def test_flex_refuses_dropout():
    with pytest.raises(ValueError, match="flex kernel has no dropout"):
        KERNELS["flex"](*random_heads(3, 3), 0.1)


@pytest.mark.parametrize("name", KERNELS)
def test_dropout_is_off_in_eval_mode(name):
    module = MultiHeadAttention(6, 6, 8, 0.5, num_heads=2, attention=name).eval()
    without = MultiHeadAttention(6, 6, 8, 0.0, num_heads=2, attention=name)
    without.load_state_dict(module.state_dict())
    x = torch.randn(2, 8, 6)
    torch.testing.assert_close(module(x), without(x), atol=1e-6, rtol=0)
    module.train()
    if name == "flex":
        with pytest.raises(ValueError, match="no dropout"):
            module(x)
    else:
        assert (module(x) - without(x)).abs().max() > 1e-3


# --- The module ----------------------------------------------------------------------------------

SIX_TOKENS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


def assert_printed(tensor, printed):
    """Equal to the last of the four digits that a source prints."""
    assert [[f"{x:.4f}" for x in row] for row in tensor.tolist()] == printed


def check_published_figures(attention_kernel):
    """S. Raschka, Build a Large Language Model (From Scratch), the output of its
    MultiHeadAttention on six tokens: seed 123, two heads of one dimension."""
    batch = torch.stack([SIX_TOKENS, SIX_TOKENS])
    torch.manual_seed(123)
    module = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2, attention=attention_kernel)
    for copy in module(batch):
        assert_printed(
            copy,
            [
                ["0.3190", "0.4858"],
                ["0.2943", "0.3897"],
                ["0.2856", "0.3593"],
                ["0.2693", "0.3873"],
                ["0.2639", "0.3928"],
                ["0.2575", "0.4028"],
            ],
        )


def check_scale_figures(attention_kernel):
    """A published tutorial, which divides by sqrt(d_out), prints
    -.2962 -.2681 .1179 .1136 .0953 -.4015 here; the definition gives this."""
    torch.manual_seed(123)
    x = torch.randn(2, 5, 6)
    module = MultiHeadAttention(6, 6, 5, 0.0, num_heads=2, attention=attention_kernel)
    row = ["-0.2804", "-0.2545", "0.1131", "0.1270", "0.0898", "-0.4088"]
    assert_printed(module(x)[0, 1:2], [row])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("check", [check_published_figures, check_scale_figures])
def test_figures(check, name):
    check(name)


@pytest.mark.parametrize("check", [check_published_figures, check_scale_figures])
@pytest.mark.parametrize(
    "planted", [scaled_by_d_out, softmax_over_queries, mask_not_applied, keys_and_queries_swapped]
)
def test_figures_catch_planted_weights(monkeypatch, planted, check):
    monkeypatch.setattr(attention, "causal_attn_weights", planted)
    with pytest.raises(AssertionError):
        check("explicit")


def test_the_tutorial_row_is_what_scaling_by_d_out_gives(monkeypatch):
    monkeypatch.setattr(attention, "causal_attn_weights", scaled_by_d_out)
    torch.manual_seed(123)
    x = torch.randn(2, 5, 6)
    module = MultiHeadAttention(6, 6, 5, 0.0, num_heads=2, attention="explicit")
    row = ["-0.2962", "-0.2681", "0.1179", "0.1136", "0.0953", "-0.4015"]
    assert_printed(module(x)[0, 1:2], [row])


def by_hand(module, x):
    """The module's output and weights, head by head from slices of its matrices."""
    D = module.head_dim
    heads, head_weights = [], []
    for h in range(module.num_heads):
        columns = slice(h * D, (h + 1) * D)

        def project(linear, columns=columns):
            bias = linear.bias[columns] if linear.bias is not None else None
            return F.linear(x, linear.weight[columns], bias)  # (B, T, D)

        attn_scores = project(module.W_query) @ project(module.W_key).transpose(1, 2) / D**0.5
        later = torch.ones(x.shape[1], x.shape[1]).triu(diagonal=1).bool()
        attn_weights = attn_scores.masked_fill(later, -math.inf).softmax(-1)  # (B, T, T)
        heads.append(attn_weights @ project(module.W_value))
        head_weights.append(attn_weights)
    return module.out_proj(torch.cat(heads, dim=-1)), torch.stack(head_weights, dim=1)


def check_by_hand(name="sdpa", qkv_bias=True):
    torch.manual_seed(0)
    module = MultiHeadAttention(5, 12, 7, 0.0, num_heads=3, qkv_bias=qkv_bias, attention=name)
    x = torch.randn(2, 7, 5)
    torch.testing.assert_close(module(x), by_hand(module, x)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_module_equals_separate_heads(name, qkv_bias):
    check_by_hand(name, qkv_bias)


def heads_viewed_without_transpose(self, x):
    return x.reshape(x.shape[0], self.num_heads, x.shape[1], self.head_dim)


def heads_interleaved(self, x):
    return x.unflatten(-1, (self.head_dim, self.num_heads)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("planted", [heads_viewed_without_transpose, heads_interleaved])
@pytest.mark.parametrize("check", [check_by_hand, lambda: check_scale_figures("sdpa")])
def test_planted_head_layouts_are_caught(monkeypatch, planted, check):
    monkeypatch.setattr(MultiHeadAttention, "split_heads", planted)
    with pytest.raises(AssertionError):
        check()


def test_heads_are_a_view():
    x = torch.randn(2, 5, 6)
    heads = MultiHeadAttention(6, 6, 5, 0.0, num_heads=3).split_heads(x)
    assert heads.shape == (2, 3, 5, 2)
    assert heads.data_ptr() == x.data_ptr()
    assert torch.equal(heads[:, 1], x[:, :, 2:4])


@pytest.mark.parametrize("name", KERNELS)
def test_capture_hands_out_the_weights_and_changes_nothing(name):
    torch.manual_seed(0)
    module = MultiHeadAttention(6, 12, 9, 0.0, num_heads=3, qkv_bias=True, attention=name)
    x = torch.randn(2, 7, 6)
    captured = []
    output = module(x, lambda *both: captured.extend(both))
    expected_output, expected_weights = by_hand(module, x)
    attn_weights, attn_scores = captured
    assert attn_weights.dtype == attn_scores.dtype == torch.float32
    torch.testing.assert_close(attn_weights, expected_weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(attn_scores.softmax(-1), attn_weights, atol=1e-6, rtol=1e-5)
    assert (attn_scores.isneginf() == ~causal_mask(7, 7, x.device)).all()
    torch.testing.assert_close(output, expected_output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output, module(x), atol=1e-6, rtol=1e-5)


def test_captured_weights_are_those_before_dropout():
    torch.manual_seed(0)
    module = MultiHeadAttention(6, 6, 9, 0.5, num_heads=2)
    x = torch.randn(2, 7, 6)
    captured = []
    dropped = module(x, lambda *both: captured.extend(both))
    expected_output, expected_weights = by_hand(module, x)
    torch.testing.assert_close(captured[0], expected_weights, atol=1e-6, rtol=1e-5)
    assert (dropped - expected_output).abs().max() > 1e-3


def test_captured_weights_are_fp32_under_autocast():
    module = MultiHeadAttention(6, 6, 9, 0.0, num_heads=2)
    x = torch.randn(2, 7, 6)
    captured = []
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, lambda *both: captured.extend(both)).dtype == torch.bfloat16
    assert captured[0].dtype == torch.float32
    torch.testing.assert_close(captured[0].sum(-1), torch.ones(2, 2, 7))
    torch.testing.assert_close(captured[0], by_hand(module, x)[1], atol=0.02, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_module_gradients_agree(name):
    torch.manual_seed(0)
    module = MultiHeadAttention(6, 12, 7, 0.0, num_heads=3, qkv_bias=True, attention=name)
    x = torch.randn(2, 7, 6, requires_grad=True)
    wanted = [x, *module.parameters()]
    ours = torch.autograd.grad(module(x).square().sum(), wanted)
    expected = torch.autograd.grad(by_hand(module, x)[0].square().sum(), wanted)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_signature_is_the_contract():
    parameters = list(inspect.signature(MultiHeadAttention).parameters.values())
    assert [p.name for p in parameters[:6]] == [
        "d_in",
        "d_out",
        "context_length",
        "dropout",
        "num_heads",
        "qkv_bias",
    ]
    assert parameters[5].default is False
    assert all(p.default is not inspect.Parameter.empty for p in parameters[6:])


def test_parameters_are_created_in_the_agreed_order():
    torch.manual_seed(123)
    module = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2, qkv_bias=True)
    assert [name for name, _ in module.named_children()] == [
        "W_query",
        "W_key",
        "W_value",
        "out_proj",
    ]
    torch.manual_seed(123)
    for width, ours in zip((3, 3, 3, 4), module.children(), strict=True):
        plain = nn.Linear(width, 4)
        assert torch.equal(ours.weight, plain.weight)
        assert torch.equal(ours.bias, plain.bias)


def test_biases_are_optional_and_no_mask_is_stored():
    without = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2)
    assert list(without.state_dict()) == [
        "W_query.weight",
        "W_key.weight",
        "W_value.weight",
        "out_proj.weight",
        "out_proj.bias",
    ]
    with_biases = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2, qkv_bias=True)
    assert len(with_biases.state_dict()) == 8


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_heads=3 must divide d_out=4"):
        MultiHeadAttention(3, 4, 6, 0.0, num_heads=3)
    with pytest.raises(ValueError, match="num_heads=0"):
        MultiHeadAttention(3, 4, 6, 0.0, num_heads=0)
    with pytest.raises(ValueError, match="attention='flash' is none of explicit, sdpa"):
        MultiHeadAttention(3, 4, 6, 0.0, num_heads=2, attention="flash")


def test_too_long_a_sequence_is_refused():
    module = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2)
    assert module(torch.randn(1, 6, 3)).shape == (1, 6, 4)
    with pytest.raises(ValueError, match="7 tokens do not fit into context_length=6"):
        module(torch.randn(1, 7, 3))
