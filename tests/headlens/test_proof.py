"""The proof that captured weights are what the model computes with: wrong weights are refused, also
those of a part of the tokens, and right ones never, in any precision."""

import pytest
import torch
import torch.nn.functional as F
from helpers.foreign import FAMILIES, GROUPED, OTHERS, foreign_model
from helpers.models import random_ids, tiny_model
from torch import nn

from headlens import capture
from headlens.ablation import edited_contexts, mean_contexts, removal
from headlens.capturing import output_projections
from headlens.observing import fused_scores

IDS = random_ids(T=12, vocab_size=97)  # (2, 12)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneLayer(nn.Module):
    """Attention whose dropout is left on. kind: of sdpa, or between softmax and product."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.kind = nn.Embedding(97, 16), kind

    def forward(self, ids):
        x = self.embedding(ids)[:, None]
        if self.kind == "sdpa":
            return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.2)[:, 0]
        mask = torch.full((12, 12), float("-inf")).triu(1)
        return (F.dropout((x @ x.mT + mask).softmax(-1), 0.2) @ x)[:, 0]


def without(**changes):
    """Scores that ignore an argument of the model's attention."""

    def scores(query, key, mask, is_causal, scale):
        given = {"mask": mask, "is_causal": is_causal, "scale": scale} | changes
        return fused_scores(query, key, **given)

    return scores


def seen_from_another_layer(query, key, mask, is_causal, scale, before=[]):  # noqa: B006
    before.append(query)
    return fused_scores(before[-2] if len(before) % 3 == 2 else query, key, mask, is_causal, scale)


def assert_refused(model, ids=IDS):
    """Also when it is captured again, and nothing is shown."""
    shown = []
    for _ in range(2):
        with pytest.raises(ValueError, match=type(model).__name__) as raised:
            capture(model, ids, lambda *given: shown.append(given))
        assert "\n" not in str(raised.value)
    assert shown == []


FAULTS = {  # of the lens: the family that shows it, and what computes the scores
    "scale": ("llama", without(scale=0.2)),
    "missing mask": ("mistral", without(mask=None, is_causal=True)),  # its window
    "another layer": ("llama", seen_from_another_layer),
    "bias": ("falcon", without(mask=None, is_causal=True)),  # ALiBi
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_the_model_does_not_compute_with_are_refused(monkeypatch, fault):
    family, scores = FAULTS[fault]
    changes = {"alibi": True} if family == "falcon" else {}
    capture(foreign_model(family, **changes), IDS)
    monkeypatch.setattr("headlens.observing.fused_scores", scores)
    assert_refused(foreign_model(family, **changes))


@pytest.mark.parametrize("kind", ["sdpa", "product"])
def test_dropout_that_is_left_on(kind):
    torch.manual_seed(0)
    assert_refused(OneLayer(kind).eval())


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_that_torch_does_not_show(monkeypatch, is_wrong):
    """The model runs with sdpa, and has to return the same as with its kernel."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    original = functions["sdpa"]

    def kernel(module, query, key, value, mask, scaling=None, **options):
        scaling = 2 * scaling if is_wrong else scaling
        with torch._C.DisableTorchFunction():  # as a kernel of another library
            return original(module, query, key, value, mask, scaling=scaling, **options)

    monkeypatch.setitem(functions, "own", kernel)
    monkeypatch.setitem(masks, "own", masks["sdpa"])
    model = foreign_model("llama")
    expected = capture(model, IDS)
    model.config._attn_implementation = "own"
    if is_wrong:
        assert_refused(model)
    else:
        captured = capture(model, IDS)
        assert captured.proof.is_verified
        assert torch.equal(captured.layers[2].weights, expected.layers[2].weights)
    assert model.config._attn_implementation == "own"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, "gpt_oss", "mixtral"])
def test_weights_of_each_family_are_verified(family, dtype):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    changes = GROUPED | experts if family not in FAMILIES | OTHERS else {}
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
        seen = layer.scores.isfinite()
        assert seen.sum() == 2 * 4 * 78 or not seen[0, 0, 11, 0]  # or a window
        shares = layer.scores.softmax(-1) * layer.weights.sum(-1, keepdim=True)
        torch.testing.assert_close(layer.weights, shares, atol=0.02, rtol=0.02)


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
    ids, again = random_ids(T=25, vocab_size=97), 3 if ours else 2  # ours runs with another kernel
    capture(model, ids[:, :5])
    seen = passes(model)
    for length, expected in ((1, 1), (4, 1), (10, 1), (11, again), (4, 1), (22, 1), (23, again)):
        seen.clear()
        assert capture(model, ids[:, :length]).proof.is_verified
        assert len(seen) == expected
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
        means = mean_contexts(model, IDS.tolist())
        with edited_contexts(projections, removal([(0, 1)], means)):
            reads.append((torch.stack(means), capture(model, IDS)))
    for (mean, captured), (other, again) in [reads]:
        torch.testing.assert_close(mean, other)
        assert captured.proof == again.proof
        assert captured.proof.is_verified
        torch.testing.assert_close(captured.logits, again.logits)
        assert (captured.logits - capture(foreign_model("llama"), IDS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", ["explicit", "sdpa", "einsum", "per_head"])
def test_our_model(kernel):
    assert capture(tiny_model(attention=kernel), random_ids()).proof.is_verified


def test_a_model_that_is_not_finite_is_captured():
    """A training that diverged is what people look at."""
    model = foreign_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    proof = capture(model, IDS).proof
    assert not proof.is_verified
    assert "finite" in proof.sentence
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = 0
    assert capture(model, IDS).proof.is_verified
