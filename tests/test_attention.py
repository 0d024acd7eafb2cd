"""attention.py compared with published values, a definition in plain Python and per-head slices."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import add_window
from torch import nn

from attention import (
    KERNELS,
    NO_DROPOUT,
    SCORES,
    MultiHeadAttention,
    causal_attn_scores,
    causal_attn_weights,
    computes_its_scores,
    explicit,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
each_kernel = pytest.mark.parametrize("name", KERNELS)
# Kernels of the formula. Others are compared with the scores that they declare.
each_of_the_formula = pytest.mark.parametrize("name", [n for n in KERNELS if n not in SCORES])


def random_heads(num_queries, num_keys, B=2, H=3, D=4, requires_grad=False):
    """queries (B, H, T, D), keys and values (B, H, S, D)."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, H, n, D, generator=generator).requires_grad_(requires_grad)
        for n in (num_queries, num_keys, num_keys)
    ]


def multi_head(name="sdpa", num_heads=3, dropout=0.0):
    """Six numbers in, twelve out, at most nine tokens."""
    torch.manual_seed(0)
    return MultiHeadAttention(6, 12, 9, dropout, num_heads, qkv_bias=True, attention=name)


def weights_by_definition(queries, keys):
    """softmax(q . k / sqrt(D)) over the keys up to the query, in plain Python."""
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


def test_attention_weights_are_the_definition():
    """Query t of T may attend to the first S - T + t + 1 keys."""
    # In the first shape H = T = S = D, so that a wrong transpose raises no error.
    for T, S, H, D in [(4, 4, 4, 4), (7, 7, 3, 5), (3, 9, 3, 4), (1, 4, 3, 4), (1, 1, 1, 1)]:
        queries, keys, _ = random_heads(T, S, H=H, D=D)
        attn_weights = causal_attn_weights(queries, keys)
        expected = weights_by_definition(queries, keys)
        torch.testing.assert_close(attn_weights, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(attn_weights > 0, expected > 0)  # exactly zero after the query
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        # Products of small integers are exact in 16 bits; divided by sqrt(5), they are not.
        queries, keys, _ = (x.round().to(dtype) for x in random_heads(7, 7, D=5))
        attn_weights = causal_attn_weights(queries, keys)
        assert attn_weights.dtype == torch.float32
        torch.testing.assert_close(attn_weights, weights_by_definition(queries, keys))


def by_scores(name, queries, keys, values):
    """The context vectors by the scores of a kernel."""
    attn_scores = SCORES.get(name, causal_attn_scores)(queries, keys)
    return attn_scores.softmax(-1).to(values.dtype) @ values


@each_kernel
def test_kernel_is_the_definition_for_all_and_for_the_last_queries(name):
    kernel = KERNELS[name]
    for T, S in [(9, 9), (3, 9), (1, 9), (1, 1)]:
        inputs = random_heads(T, S, requires_grad=True)
        expected, context_vec = by_scores(name, *inputs), kernel(*inputs)
        torch.testing.assert_close(context_vec, expected, atol=1e-5, rtol=0)
        without_grad = kernel(*(x.detach() for x in inputs))
        torch.testing.assert_close(without_grad, expected, atol=1e-5, rtol=0)
        grad = torch.randn(2, 3, T, 4, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad(context_vec, inputs, grad)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=0)
    inputs = random_heads(9, 9)
    in_bf16 = kernel(*(x.bfloat16() for x in inputs))
    assert in_bf16.dtype == torch.bfloat16
    torch.testing.assert_close(in_bf16.float(), by_scores(name, *inputs), atol=0.05, rtol=0)
    with pytest.raises(ValueError):  # noqa: PT011
        kernel(*random_heads(5, 3))
    assert computes_its_scores(name, 40, 8, dtype=torch.float32)


@pytest.mark.parametrize("name", ["einsum", "per_head"])
def test_scores_in_bf16_are_divided_in_fp32(name):
    """Products of integers are exact in bf16; divided by sqrt(5), they are not."""
    inputs = [(3 * x).round().bfloat16() for x in random_heads(7, 7, D=5)]
    assert torch.equal(KERNELS[name](*inputs), explicit(*inputs))


def test_a_kernel_with_undeclared_or_non_causal_scores_is_noticed(monkeypatch):
    add_window(monkeypatch)
    options = {"num_tokens": 40, "head_dim": 8, "dtype": torch.float32}
    assert computes_its_scores("window", **options)
    del SCORES["window"]
    assert not computes_its_scores("window", **options)
    for name, scores in {
        "two-sided": lambda q, k: q @ k.transpose(-2, -1),
        "not for the last query": lambda q, k: causal_attn_scores(q, k) / k.shape[-2] * q.shape[-2],
    }.items():
        monkeypatch.setitem(SCORES, name, scores)
        monkeypatch.setitem(KERNELS, name, lambda q, k, v, _, s=scores: s(q, k).softmax(-1) @ v)
        assert not computes_its_scores(name, **options), name


@pytest.mark.parametrize("T", [48, 36])
@pytest.mark.parametrize("name", sorted(KERNELS.keys() - NO_DROPOUT))
def test_dropout_rate_and_expectation(name, T):
    """For all and for the last queries."""
    # With the identity matrix as values, the context vectors are the weights after dropout.
    S, rate = 48, 0.3
    queries, keys, _ = random_heads(T, S, B=4, H=8)
    torch.manual_seed(0)
    dropped = KERNELS[name](queries, keys, torch.eye(S).expand(4, 8, S, S), rate)
    attn_weights = SCORES.get(name, causal_attn_scores)(queries, keys).softmax(-1)
    kept = dropped != 0
    # The remaining weights are scaled by 1 / (1 - p), so that the expectation does not change.
    torch.testing.assert_close(dropped[kept], attn_weights[kept] / (1 - rate))
    share_dropped = 1 - kept.sum() / attn_weights.count_nonzero()
    assert abs(share_dropped - rate) < 0.01  # 35,136 draws or more: four standard deviations
    assert abs(dropped.sum(-1).mean() - 1) < 0.02
    assert not torch.equal(kept[:, 0], kept[:, 1])  # each head has its own mask
    assert not torch.equal(kept[0], kept[1])  # and each sequence


def rounded(tensor):
    """Equal to four digits, as printed in the source."""
    return [" ".join(f"{x:.4f}" for x in row) for row in tensor.tolist()]


# S. Raschka, Build a Large Language Model (From Scratch), chapter 3: six tokens of three
# dimensions, and the figures that it prints. docs/tutorial.ipynb computes all of them.
SIX_TOKENS = [0.43, 0.15, 0.89, 0.55, 0.87, 0.66, 0.57, 0.85, 0.64]
SIX_TOKENS += [0.22, 0.58, 0.33, 0.77, 0.25, 0.10, 0.05, 0.80, 0.55]
# Attention without matrices: scores and weights of the second token, context vectors of all.
SIMPLE_SCORES = "0.9544 1.4950 1.4754 0.8434 0.7070 1.0865"
SIMPLE_WEIGHTS = "0.1385 0.2379 0.2333 0.1240 0.1082 0.1581"
SIMPLE_CONTEXT = ["0.4421 0.5931 0.5790", "0.4419 0.6515 0.5683", "0.4431 0.6496 0.5671"]
SIMPLE_CONTEXT += ["0.4304 0.6298 0.5510", "0.4671 0.5910 0.5266", "0.4177 0.6503 0.5645"]
# One head of two dimensions, seed 789: scores before the division, weights without and with mask.
CAUSAL_SCORES = ["0.2899", "0.4656 0.1723", "0.4594 0.1703 0.1731", "0.2642 0.1024 0.1036 0.0186"]
CAUSAL_SCORES += ["0.2183 0.0874 0.0882 0.0177 0.0786", "0.3408 0.1270 0.1290 0.0198 0.1290 0.0078"]
WITHOUT_MASK = [
    "0.1921 0.1646 0.1652 0.1550 0.1721 0.1510",
    "0.2041 0.1659 0.1662 0.1496 0.1665 0.1477",
    "0.2036 0.1659 0.1662 0.1498 0.1664 0.1480",
    "0.1869 0.1667 0.1668 0.1571 0.1661 0.1564",
    "0.1830 0.1669 0.1670 0.1588 0.1658 0.1585",
    "0.1935 0.1663 0.1666 0.1542 0.1666 0.1529",
]
CAUSAL_WEIGHTS = ["1.0000", "0.5517 0.4483", "0.3800 0.3097 0.3103", "0.2758 0.2460 0.2462 0.2319"]
CAUSAL_WEIGHTS += ["0.2175 0.1983 0.1984 0.1888 0.1971", WITHOUT_MASK[5]]
# Two heads of two dimensions, computed sequentially, seed 123.
WRAPPER = ["-0.4519 0.2216 0.4772 0.1063", "-0.5874 0.0058 0.5891 0.3257"]
WRAPPER += ["-0.6300 -0.0632 0.6202 0.3860", "-0.5675 -0.0843 0.5478 0.3589"]
WRAPPER += ["-0.5526 -0.0981 0.5321 0.3428", "-0.5299 -0.1081 0.5077 0.3493"]
# Its MultiHeadAttention, seed 123, two heads of one dimension.
FIGURES = ["0.3190 0.4858", "0.2943 0.3897", "0.2856 0.3593"]
FIGURES += ["0.2693 0.3873", "0.2639 0.3928", "0.2575 0.4028"]
# The second row of MultiHeadAttention(6, 6, 5, 0.0, num_heads=2) on torch.randn(2, 5, 6), seed 123.
# The tutorial "Writing GPT2 from Scratch - Attention" ("Weight split code") prints the first.
DIVIDED_BY_D_OUT = "-0.2962 -0.2681 0.1179 0.1136 0.0953 -0.4015"
DIVIDED_BY_HEAD_DIM = "-0.2804 -0.2545 0.1131 0.1270 0.0898 -0.4088"


def test_causal_figures_of_the_book():
    """One head: scores and weights from the matrices of seed 789, and the scale of a score."""
    torch.manual_seed(789)
    W_query, W_key = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    x = torch.tensor(SIX_TOKENS).view(1, 1, 6, 3)
    scores = causal_attn_scores(W_query(x), W_key(x))[0, 0] * math.sqrt(2)
    weights = causal_attn_weights(W_query(x), W_key(x))[0, 0]
    for t in range(6):
        assert rounded(scores[t, None, : t + 1]) == [CAUSAL_SCORES[t]]
        assert rounded(weights[t, None, : t + 1]) == [CAUSAL_WEIGHTS[t]]


@each_of_the_formula
def test_figures_of_the_book(name):
    """Several heads: sequential ones, joined to one matrix; its own module; the right scale."""
    x = torch.tensor([SIX_TOKENS] * 2).view(2, 6, 3)
    torch.manual_seed(123)
    linears = [nn.Linear(3, 2, bias=False) for _ in range(6)]  # three of each head
    joined = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2, attention=name)
    joined.out_proj = nn.Identity()
    for i, linear in enumerate((joined.W_query, joined.W_key, joined.W_value)):
        linear.weight = nn.Parameter(torch.cat([linears[i].weight, linears[3 + i].weight]))
    torch.manual_seed(123)
    module = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2, attention=name)
    for of_wrapper, of_module in zip(joined(x), module(x), strict=True):
        assert (rounded(of_wrapper), rounded(of_module)) == (WRAPPER, FIGURES)
    torch.manual_seed(123)
    x = torch.randn(2, 5, 6)
    module = MultiHeadAttention(6, 6, 5, 0.0, num_heads=2, attention=name)
    assert rounded(module(x)[0, [1]]) == [DIVIDED_BY_HEAD_DIM]


def by_hand(module, x):
    """The module's output and weights, computed for each head from slices of its matrices."""
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


@each_of_the_formula
def test_module_equals_separate_heads(name):
    """Output and gradients."""
    for qkv_bias in (False, True):
        torch.manual_seed(0)
        module = MultiHeadAttention(5, 12, 9, 0.0, num_heads=3, qkv_bias=qkv_bias, attention=name)
        x = torch.randn(2, 9, 5, requires_grad=True)
        output, expected = module(x), by_hand(module, x)[0]
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
        wanted = [x, *module.parameters()]
        grads = torch.autograd.grad(output.square().sum(), wanted)
        expected_grads = torch.autograd.grad(expected.square().sum(), wanted)
        torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-4)


@each_kernel
def test_a_kernel_given_for_one_call_replaces_the_modules_own(name):
    """It gets the same dropout rate as self.kernel: that of the module, in training only."""
    module, x, seen = multi_head(name, dropout=0.5), torch.randn(2, 9, 6), []

    def kernel(queries, keys, values, dropout_p):
        seen.append((causal_attn_weights(queries, keys), dropout_p))
        return explicit(queries, keys, values)

    expected, expected_weights = by_hand(module, x)
    own = module.eval()(x)
    for training in (True, False):
        output = module.train(training)(x, kernel)
        attn_weights, dropout_p = seen.pop()
        assert dropout_p == (0.5 if training else 0.0)
        torch.testing.assert_close(attn_weights, expected_weights, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(module(x), own, rtol=0, atol=0)
    assert seen == []


def test_interface_and_parameters():
    """Same signature as the book's class; a seed gives the same weights in all versions."""
    parameters = list(inspect.signature(MultiHeadAttention).parameters.values())
    names = "d_in d_out context_length dropout num_heads qkv_bias"
    assert " ".join(p.name for p in parameters[:6]) == names
    assert parameters[5].default is False
    assert all(p.default is not inspect.Parameter.empty for p in parameters[6:])

    torch.manual_seed(123)
    module = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2, qkv_bias=True)
    torch.manual_seed(123)
    for name in ("W_query", "W_key", "W_value", "out_proj"):
        plain = nn.Linear(4 if name == "out_proj" else 3, 4)
        ours = getattr(module, name)
        assert torch.equal(ours.weight, plain.weight), name
        assert torch.equal(ours.bias, plain.bias), name
    assert len(module.state_dict()) == 8  # and no mask
    matrices = {f"{name}.weight" for name in ("W_query", "W_key", "W_value", "out_proj")}
    without = MultiHeadAttention(3, 4, 6, 0.0, num_heads=2)
    assert set(without.state_dict()) == {*matrices, "out_proj.bias"}


def test_refusals():
    for num_heads, kernel in [(3, "sdpa"), (0, "sdpa"), (2, "flash")]:
        with pytest.raises(ValueError):  # noqa: PT011
            MultiHeadAttention(3, 4, 6, 0.0, num_heads=num_heads, attention=kernel)
    with pytest.raises(ValueError):  # noqa: PT011
        MultiHeadAttention(3, 4, 6, 0.0, num_heads=2)(torch.randn(1, 7, 3))
    for name in NO_DROPOUT:
        with pytest.raises(ValueError):  # noqa: PT011
            multi_head(name, dropout=0.5).train()(torch.randn(2, 9, 6))
