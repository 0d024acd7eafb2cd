"""Decoders of transformers, one of each kind: exact maps, or a refusal. All builds:
tests/docs/test_families.py."""

import pytest
import torch
from helpers.families import IDS, SOME, check, judged, model_of

T, H = IDS.shape[1], 4
FUTURE = torch.ones(T, T).triu(1).bool()
DISTANCE = torch.arange(T)[:, None] - torch.arange(T)


@pytest.mark.parametrize("build", SOME)
def test_maps_are_those_of_the_model_or_it_is_refused(build):
    check(build)


def rotated(queries, keys, in_halves=True):
    """q . k with rotary positions, (H, T, T), of (T, H, D): pairs of numbers are complex, and turn
    by position * 10000 ** (-2 i / D)."""
    half = queries.shape[-1] // 2
    q, k = (
        torch.complex(x[..., :half], x[..., half:])
        if in_halves
        else torch.complex(x[..., ::2], x[..., 1::2])
        for x in (queries.double(), keys.double())
    )
    turn = torch.exp(1j * torch.arange(T)[:, None] * 10000 ** (-torch.arange(half) / half))
    return torch.einsum("qhd,khd->hqk", q * turn[:, None], (k * turn[:, None]).conj()).real


def with_alibi(of, _):
    """Bloom: q . k / sqrt(8) - slope * distance, with slopes 1/4, 1/16, 1/64, 1/256."""
    queries, keys, _ = of["query_key_value"].view(T, H, 3, 8).double().unbind(2)
    slopes = 0.25 ** torch.arange(1, H + 1)
    return torch.einsum("qhd,khd->hqk", queries, keys) / 8**0.5 - slopes[:, None, None] * DISTANCE


def with_a_sink(of, attention):
    """GPT-OSS: one more score, which has no value. Layer 1 has no window."""
    keys = of["k_proj"].view(T, 2, 8).repeat_interleave(2, 1)
    scores = rotated(of["q_proj"].view(T, H, 8), keys) / 8**0.5
    return torch.cat([scores, attention.sinks.view(H, 1, 1).expand(H, T, 1)], -1)


def of_latents(of, _):
    """DeepSeek V3: 8 numbers without positions, and 4 with positions whose keys all heads share."""
    queries, (keys, _) = of["q_b_proj"].view(T, H, 12), of["kv_b_proj"].view(T, H, 16).split(8, -1)
    turning = of["kv_a_proj_with_mqa"][:, None, -4:].expand(T, H, 4)
    plain = torch.einsum("qhd,khd->hqk", queries[..., :8].double(), keys.double())
    return (plain + rotated(queries[..., 8:], turning, in_halves=False)) / 12**0.5


def with_a_window(of, _):
    """Mistral: only the last five keys."""
    keys = of["k_proj"].view(T, 2, 8).repeat_interleave(2, 1)
    scores = rotated(of["q_proj"].view(T, H, 8), keys) / 8**0.5
    return scores.masked_fill(DISTANCE >= 5, float("-inf"))


def in_chunks(of, _):
    """Llama 4 with rotary positions: only keys of the same five tokens."""
    keys = of["k_proj"].view(T, 2, 8).repeat_interleave(2, 1)
    q, k = (
        x * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        for x in (of["q_proj"].view(T, H, 8), keys)
    )
    chunk = torch.arange(T) // 5
    scores = rotated(q, k, in_halves=False) / 8**0.5
    return scores.masked_fill(chunk[:, None] != chunk, float("-inf"))


BY_HAND = {  # build: its scores from its projections, and the layer
    "bloom": (with_alibi, 0),
    "gpt_oss": (with_a_sink, 1),
    "deepseek_v3": (of_latents, 2),
    "mistral": (with_a_window, 1),
    "llama4_text": (in_chunks, 0),
}


@pytest.mark.parametrize("build", BY_HAND)
def test_weights_by_their_formula(build):
    """softmax of the scores, in float64, from what the projections of a layer return."""
    scores_of, layer = BY_HAND[build]
    model, seen = model_of(build), {}
    (attention,) = (
        module
        for name, module in model.named_modules()
        if name.split(".")[-1] in ("self_attn", "self_attention") and f".{layer}." in name
    )
    for name, module in attention.named_children():
        keep = lambda _, inputs, output, name=name: seen.update({name: output})  # noqa: E731
        module.register_forward_hook(keep)
    with torch.no_grad():
        model(IDS[:1])
        scores = scores_of(
            {name: value[0] for name, value in seen.items() if isinstance(value, torch.Tensor)},
            attention,
        )
    scores[..., :T] = scores[..., :T].masked_fill(FUTURE, float("-inf"))
    expected = scores.softmax(-1)[..., :T].float()
    found = judged(build).captured.layers[layer].weights[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
