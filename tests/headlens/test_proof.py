"""The proof that captured weights are what the model computes with: wrong weights are refused, also
those of a part of the tokens, and right ones never, in any precision."""

import pytest
import torch
import torch.nn.functional as F
from helpers.foreign import COMMON, FAMILIES, GROUPED, OTHERS, foreign_model
from helpers.models import random_ids, tiny_model

from headlens import capture
from headlens.ablation import edited_contexts, mean_contexts, output_projections, removal

IDS = random_ids(T=12, vocab_size=97)  # (2, 12)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager_with(change):
    """Llama's eager attention in which change(module, weights, mask, output) is the result."""
    from transformers.models.llama import modeling_llama as llama

    original = llama.eager_attention_forward

    def eager(module, query, key, value, mask, scaling, **options):
        again = lambda **new: original(  # noqa: E731
            module, query, key, value, new.get("mask", mask), new.get("scaling", scaling)
        )
        return change(module, again)

    return eager


def another_layer(module, again):
    output, weights = again()
    return output, weights.roll(1, 1)  # of other heads


def dropped_out(module, again):
    output, weights = again()
    return output, F.dropout(weights, 0.1, training=True)


FAULTS = {
    "scale": lambda _, again: again(scaling=0.3),
    "missing mask": lambda _, again: again(mask=None),
    "weights of others": another_layer,
    "dropout": dropped_out,
    "mask of a window": lambda _, again: again(mask=window_mask(9)),
}


def window_mask(size):
    seen = torch.ones(12, 12).tril().triu(1 - size).bool()
    return torch.zeros(12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def assert_refused(model, ids=IDS):
    """Also when it is captured again, and nothing is shown."""
    shown = []
    for _ in range(2):
        with pytest.raises(ValueError, match=type(model).__name__) as raised:
            capture(model, ids, lambda *given: shown.append(given))
        assert "\n" not in str(raised.value)
    assert shown == []


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_the_model_does_not_compute_with_are_refused(monkeypatch, fault):
    place = "transformers.models.llama.modeling_llama.eager_attention_forward"
    monkeypatch.setattr(place, eager_with(FAULTS[fault]))
    torch.manual_seed(0)
    assert_refused(foreign_model("llama"))


def test_a_bias_that_only_the_fused_kernel_has(monkeypatch):
    from transformers import AttentionInterface

    functions = AttentionInterface._global_mapping
    original = functions["sdpa"]

    def biased(module, query, key, value, mask, **options):
        mask = window_mask(12) if mask is None else mask
        mask = mask + 0.1 * torch.arange(12)
        return original(module, query, key, value, mask, **options)

    monkeypatch.setitem(functions, "sdpa", biased)
    assert_refused(foreign_model("llama"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "mixtral"])
def test_weights_of_each_family_are_verified(family, dtype):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    changes = GROUPED | experts if family not in FAMILIES else {}
    has_sink = family == "gpt_oss"  # and no fused kernel
    model = foreign_model(family, "eager" if has_sink else None, **changes).to(dtype)
    captured = capture(model, IDS)
    assert captured.proof.is_verified
    with torch.autocast("cpu", torch.bfloat16):
        model = foreign_model(family, "eager" if has_sink else None, **changes)
        assert capture(model, IDS).proof.is_verified
    sums = torch.stack([layer.weights.sum(-1) for layer in captured.layers])
    assert (sums.min() < 0.9) == has_sink
    for layer in captured.layers:  # the scores are those of the keys
        assert layer.scores.isfinite().sum() == 2 * 4 * 78 or model.config.sliding_window
        shares = layer.scores.softmax(-1) * layer.weights.sum(-1, keepdim=True)
        torch.testing.assert_close(layer.weights, shares, atol=0.02, rtol=0.02)


def test_models_whose_eager_attention_differs_and_modules_with_two_maps_are_refused():
    from transformers import AutoConfig, PaliGemmaForConditionalGeneration

    alibi = foreign_model("falcon", alibi=True, new_decoder_architecture=False)
    assert_refused(alibi)
    capture(foreign_model("falcon", alibi=False), IDS)
    image = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    image |= {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "paligemma",
        text_config={"model_type": "gemma", **COMMON, **GROUPED},
        vision_config={"model_type": "siglip_vision_model", **image},
        projection_dim=32,
    )
    assert_refused(PaliGemmaForConditionalGeneration(config).eval())
    assert_refused(foreign_model("diffllama", **GROUPED))


def passes(model):
    """The lengths of the texts that the model reads from now on."""
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, given: lengths.append((*args, given.get("input_ids"))[0].shape[1]),
        with_kwargs=True,
    )
    return lengths


@pytest.mark.parametrize("ours", [True, False])
def test_a_model_is_proved_once_and_again_for_a_text_more_than_twice_as_long(ours):
    model = tiny_model(vocab_size=97, context_length=64) if ours else foreign_model("llama")
    seen, ids = passes(model), random_ids(T=25, vocab_size=97)
    for length, expected in ((1, 1), (4, 3), (8, 1), (9, 3), (4, 1), (18, 1), (19, 3)):
        seen.clear()
        captured = capture(model, ids[:, :length])
        assert len(seen) == expected
        assert (captured.proof is None) == (length == 1)
        with torch.no_grad():  # as a training does
            next(model.parameters()).add_(0.01)


def test_the_proof_is_that_of_the_model_without_edits():
    """Heads that are off, and means of contexts, are the same at the first capture as later."""
    reads = []
    for known in (False, True):
        model = foreign_model("llama")
        if known:
            capture(model, IDS)
        projections = output_projections(model)
        prompts = IDS.tolist()
        means = mean_contexts(
            lambda ids, visit, m=model: capture(m, ids, visit), projections, prompts
        )
        with edited_contexts(projections, removal([(0, 1)], means), 4):
            reads.append((torch.stack(means), capture(model, IDS)))
    for (mean, captured), (other, again) in [reads]:
        torch.testing.assert_close(mean, other)
        assert captured.proof == again.proof
        assert captured.proof.is_verified
        torch.testing.assert_close(captured.logits, again.logits)
        assert (captured.logits - capture(foreign_model("llama"), IDS).logits).abs().max() > 1e-3


def test_our_model_and_models_that_return_weights():
    """What cannot be checked is said."""
    assert capture(tiny_model(), random_ids()).proof.is_verified
    for family in OTHERS:
        for dtype in DTYPES:
            proof = capture(foreign_model(family).to(dtype), IDS).proof
            assert not proof.is_verified
            assert "not checked" in proof.sentence


def test_a_model_that_is_not_finite_is_captured():
    """A training that diverged is what people look at."""
    model = foreign_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    proof = capture(model, IDS).proof
    assert not proof.is_verified
    assert "finite" in proof.sentence


class Mean(torch.nn.Module):
    """Each token is the mean of those until it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(97, 8)

    def forward(self, ids):
        weights = torch.ones(ids.shape[1], ids.shape[1]).tril()
        return weights / weights.sum(-1, keepdim=True) @ self.embedding(ids)


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        (lambda weights, logits: (weights, logits), True),
        (lambda weights, logits: (weights, None), True),
        (lambda weights, logits: (weights, logits + 1), False),
        (lambda weights, logits: (weights.log(), logits), False),  # scores
        (lambda weights, logits: (2 * weights, logits), False),
    ],
)
def test_weights_of_a_function(change, is_right):
    model = Mean()

    def attention(model, ids):
        weights = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1]).tril()
        weights, logits = change(weights / weights.sum(-1, keepdim=True), model(ids))
        yield weights, None
        return logits

    if is_right:
        assert "rows sum to 1" in capture(model, IDS, attention=attention).proof.sentence
    else:
        with pytest.raises(ValueError, match="Mean"):
            capture(model, IDS, attention=attention)
