"""models/decoding.py, compared with generation without a cache, with transformers,
and with the definitions of temperature, top-k and top-p."""

import dataclasses
import functools
import itertools
import math
import os

import pytest
import torch
from helpers.kernels import add_window
from helpers.models import GREEDY, PROMPTS, generated_ids
from helpers.models import tiny_model as tiny

from clearhead.compute.specialize import specialize_for_generation
from clearhead.models.decoding import (
    DROPPED_PART,
    KVCache,
    Sampling,
    context_start,
    generate,
    sample,
)
from clearhead.models.huggingface import to_hf

CAMPAIGN_COMPILER = os.environ.get("CAMPAIGN_COMPILER")


@torch.no_grad()
def without_cache(model, prompt, num_tokens, window):
    """Returns greedy tokens, each computed by a forward pass over the window."""
    text = list(prompt)
    for _ in range(num_tokens):
        logits, _ = model(torch.tensor([text[context_start(len(text), window) :]]))
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_a_full_window_drops_a_quarter():
    for window in (1, 2, 3, 12, 1024):
        starts = [context_start(length, window) for length in range(1, 5 * window + 2)]
        assert starts[:window] == [0] * window  # the whole text, while it fits
        least = math.ceil(window * (1 - 1 / DROPPED_PART))
        for length, start in enumerate(starts, 1):
            assert min(length, least) <= length - start <= window
        moves = [b - a for a, b in itertools.pairwise(starts) if b != a]
        assert set(moves) == {max(window // 4, 1)}


@pytest.mark.parametrize("kernel", ["sdpa", "explicit", "window"])
def test_text_with_a_cache_equals_text_without(kernel, monkeypatch):
    """60 tokens with a context of 12, for the prompts in one batch and separately."""
    add_window(monkeypatch)
    model, cache = tiny(seed=7, attention=kernel), KVCache(12)
    for window in (None, 5):
        expected = [without_cache(model, prompt, 60, window or 12) for prompt in PROMPTS]
        for few in (slice(None), slice(3, 4)):  # the cache is used again for fewer prompts
            texts = generated_ids(model, PROMPTS[few], 60, window=window, cache=cache)
            assert texts == expected[few]
        assert all(len(set(row)) > 2 for row in expected)  # not constant


@pytest.mark.parametrize("packed", [True, False])
def test_a_compiled_step_is_traced_once_with_fixed_addresses_and_changes_no_token(packed):
    """For prompts of any lengths. torch.compile silently records no CUDA graph if a step mutates an
    input whose address is not fixed. The campaign also uses the default backend."""
    from functorch.compile import make_boxed_func  # imports for seconds
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def look(graph, inputs):
        known = torch._guards.TracingContext.get().fw_metadata
        static = set(known.static_input_indices)
        seen.append((set(known.mutated_inp_runtime_indices), static, len(inputs) - len(static)))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model = tiny().requires_grad_(False)
    if packed:
        specialize_for_generation(model, torch.float32, to_compile=True)
    calls = [(PROMPTS, 40), ([prompt[:2] for prompt in PROMPTS], 7)]
    for backend in (aot_autograd(fw_compiler=look), *filter(None, [CAMPAIGN_COMPILER])):
        compiler = functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
        cache = KVCache(12, compiler)
        for prompts, number in calls:
            expected = generated_ids(model, prompts, number)
            assert generated_ids(model, prompts, number, cache=cache) == expected
    ((written_to, staying, num_others),) = seen  # one graph
    assert len(written_to) == 1 + 2 * len(model.blocks)  # lengths, and keys and values
    assert written_to <= staying
    assert num_others == 2  # token ids and row numbers; weights have fixed addresses


def test_greedy_text_equals_that_of_transformers(tmp_path):
    """100 tokens for prompts of different lengths in a batch; transformers pads at the left."""
    import transformers

    model = tiny(context_length=256).eval()
    to_hf(model, tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    theirs.generation_config.eos_token_id = None
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    expected = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=100, do_sample=False, pad_token_id=0
    )[:, longest:]
    assert generated_ids(model, PROMPTS, 100) == expected.tolist()
    assert len(set(expected.flatten().tolist())) > 5


def test_a_text_ends_at_its_end_token():
    model = tiny()
    whole = generated_ids(model, PROMPTS, 30)
    end = whole[0][4]
    ended = generated_ids(model, PROMPTS, 30, end_token=end)
    for row, before in zip(ended, whole, strict=True):
        length = before.index(end) + 1 if end in before else 30
        assert row[:length] == before[:length]
        assert row[length:] == [None] * (len(row) - length)
    # Generation stops when all texts have ended.
    assert len(generated_ids(model, PROMPTS[:1], 30, end_token=end)[0]) == whole[0].index(end) + 1


def test_ids_above_the_vocabulary_are_never_sampled():
    hot = Sampling(temperature=50.0)
    assert max(generated_ids(tiny(), [[1]] * 8, 20, hot)[0]) > 9
    assert max(max(row) for row in generated_ids(tiny(), [[1]] * 8, 20, hot, vocab_size=9)) < 9


def test_the_mode_is_restored():
    model = tiny(dropout=0.5).train()
    steps = generate(model, PROMPTS, 4, GREEDY)
    assert len(next(steps)) == len(PROMPTS)
    steps.close()  # also if generation is stopped early
    assert all(module.training for module in model.modules())
    assert generated_ids(model, PROMPTS, 9) == generated_ids(tiny(), PROMPTS, 9)  # without dropout
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    generated_ids(model.eval(), PROMPTS, 1)
    assert not any(module.training for module in model.modules())


LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.9, 0.0, -3.0, 1.2, float("-inf")])
SAMPLINGS = {
    "default": Sampling(),
    "temperature 2": Sampling(temperature=2.0),
    "top-k": Sampling(temperature=2.0, top_k=4),
    "top-p": Sampling(top_p=0.8),
    "both": Sampling(temperature=1.5, top_k=4, top_p=0.7),
}


def expected_shares(logits, sampling):
    """Returns the probabilities by their definitions, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k]
    powers = {i: math.exp(logits[i] / sampling.temperature) for i in order}
    total, kept, so_far = sum(powers.values()), {}, 0.0
    for i in order:
        if so_far < (sampling.top_p or 1.0):
            kept[i] = powers[i] / total
        so_far += powers[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@pytest.mark.parametrize("what", SAMPLINGS)
def test_samples_follow_their_distribution(what):
    """Pearson's chi-square test with 20,000 samples and a fixed seed: p > 1e-5."""
    sampling, n = SAMPLINGS[what], 20_000
    tokens = sample(LOGITS.expand(n, -1), sampling, sampling.generators(n))
    counts = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)).tolist()
    shares = expected_shares(LOGITS.tolist(), sampling)
    assert sum(c for c, share in zip(counts, shares, strict=True) if share > 0) == n
    assert chance_of(counts, shares) > 1e-5
    if what == "temperature 2":  # a temperature of 1.8 would be detected
        colder = dataclasses.replace(sampling, temperature=1.8)
        assert chance_of(counts, expected_shares(LOGITS.tolist(), colder)) < 1e-5


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-53, 2)])
def test_samples_for_the_smallest_and_the_largest_random_number(monkeypatch, uniform, token):
    """The first and the last id with a probability above 0. Of two equal ones, top_p=0.5 keeps the
    first."""
    monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.tensor([uniform], dtype=dtype))
    logits, half = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]]), Sampling(top_p=0.5)
    assert sample(logits, Sampling(), [None]) == [token]
    assert sample(logits, half, [None]) == [1]


def test_the_ids_of_top_k_are_in_the_order_of_ids(monkeypatch):
    """Not of their logits, which another device may round to another order."""
    monkeypatch.setattr(torch, "rand", lambda *_, dtype, **__: torch.zeros(1, dtype=dtype))
    assert sample(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), Sampling(top_k=3), [None]) == [1]


def test_no_row_of_a_seed_has_the_random_numbers_of_another_seed():
    drawn = [g.initial_seed() for n in range(9) for g in Sampling(seed=n).generators(9)]
    assert len({*drawn}) == 81


def chance_of(counts, shares):
    """Returns the p-value of counts by Pearson's chi-square test."""
    n = sum(counts)
    pairs = [(c, n * share) for c, share in zip(counts, shares, strict=True) if share > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.double)
    return 1.0 if len(pairs) == 1 else float(torch.special.gammaincc(*half))


def test_limits_of_sampling_settings():
    """The smallest temperature and top_k=1 are greedy; a top_k of at least the vocabulary size has
    no effect."""
    model, greedy = tiny(), [Sampling(temperature=0.001), Sampling(top_k=1), Sampling(top_p=1e-9)]
    for alike in ([GREEDY, *greedy], [Sampling(top_k=k) for k in (None, 23, 1000)]):
        texts = [generated_ids(model, PROMPTS, 20, sampling) for sampling in alike]
        assert all(text == texts[0] for text in texts)


def test_the_same_seed_gives_the_same_text():
    """Independent of other texts in the batch and of torch's global generator."""
    model, state = tiny(), torch.get_rng_state()
    warm = Sampling(temperature=3.0, top_p=0.95, seed=5)
    together = generated_ids(model, PROMPTS, 20, warm)
    assert generated_ids(model, PROMPTS, 20, warm) == together
    assert generated_ids(model, PROMPTS[2:], 20, warm, first_row=2) == together[2:]
    assert generated_ids(model, PROMPTS, 20, dataclasses.replace(warm, seed=6)) != together
    twice = generated_ids(model, PROMPTS[:1] * 2, 20, warm)
    assert twice[0] != twice[1]
    assert torch.equal(torch.get_rng_state(), state)
