"""decoding.py and the cache: the same tokens as without a cache and as transformers gives, for
prompts of unequal lengths and beyond the window; and draws that follow what they should."""

import dataclasses
import itertools
import math
import os

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers.greedy import GREEDY, PROMPTS, written
from helpers.models import TINY_MODEL as TINY
from helpers.models import random_ids
from helpers.models import tiny_model as tiny
from torch._dynamo.backends.common import aot_autograd

from decoding import LEFT_BEHIND, Sampling, draw, first_read, generate
from frozen import freeze
from model import Cache


@torch.no_grad()
def written_plainly(model, prompt, num_tokens, window):
    """The likeliest tokens, each by reading all that the rule has it read."""
    text = list(prompt)
    for _ in range(num_tokens):
        logits, _ = model(torch.tensor([text[first_read(len(text), window) :]]))
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


# --- What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 12, 1024])
def test_a_text_moves_on_by_quarters_of_the_window(window):
    starts = [first_read(length, window) for length in range(1, 5 * window + 2)]
    assert starts[:window] == [0] * window  # all of it, while it fits
    for length, start in enumerate(starts, 1):
        assert min(length, math.ceil(window * (1 - 1 / LEFT_BEHIND))) <= length - start <= window
    moves = [b - a for a, b in itertools.pairwise(starts) if b != a]
    assert set(moves) == {max(window // 4, 1)}


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
@pytest.mark.parametrize("window", [None, 5])
def test_the_cache_changes_no_token(kernel, window):
    """200 tokens, through the context many times over, the prompts together and alone."""
    model = tiny(attention=kernel)
    expected = [written_plainly(model, prompt, 200, window or 12) for prompt in PROMPTS]
    assert written(model, PROMPTS, 200, window=window) == expected
    assert written(model, PROMPTS[3:4], 200, window=window) == expected[3:4]
    assert all(len(set(row)) > 2 for row in expected)  # a constant would prove little


def test_compiled_code_has_one_shape_and_changes_no_token():
    """A step is traced once, whatever becomes of the lengths; a backend that is quick runs it, and
    in the campaign the real one."""
    backend = os.environ.get("CAMPAIGN_COMPILER", "eager")
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model = tiny()

    step = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    compiled = {"step": step, "cache": Cache(room=12, static=True)}
    assert written(model, PROMPTS, 40, **compiled) == written(model, PROMPTS, 40)
    others = [prompt[:2] for prompt in PROMPTS]
    assert written(model, others, 7, **compiled) == written(model, others, 7)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_compiled_step_writes_to_stays_where_it_is(frozen):
    """Else torch's compiler makes no CUDA graph of it, and says so to nobody: "skipping cudagraphs
    due to mutated inputs". Seen here through what it knows before it decides."""
    seen = []

    def look(graph, inputs):
        known = torch._guards.TracingContext.get().fw_metadata
        seen.append((set(known.mutated_inp_runtime_indices), set(known.static_input_indices)))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model = tiny().requires_grad_(False)
    if frozen:
        freeze(model, torch.float32, to_compile=True)
    expected = written(model, PROMPTS, 40)
    backend = aot_autograd(fw_compiler=look)
    step = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    cache = Cache(room=12, static=True)
    assert written(model, PROMPTS, 40, step=step, cache=cache) == expected
    ((written_to, staying),) = seen
    assert len(written_to) == 1 + 2 * TINY["num_layers"]  # lengths, and keys and values
    assert written_to <= staying


def test_the_tokens_are_those_of_transformers():
    """200 greedy tokens for prompts of unequal lengths at once, which they pad at the left."""
    transformers = pytest.importorskip("transformers")
    model = tiny(context_length=256).eval()
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=TINY["vocab_size"],
            n_positions=256,
            n_embd=TINY["emb_dim"],
            n_head=TINY["num_heads"],
            n_layer=TINY["num_layers"],
            bos_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    from training.hf import hf_tensors

    theirs.load_state_dict(hf_tensors(model), strict=False)
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    expected = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=200, min_new_tokens=200, do_sample=False
    )[:, longest:]
    assert written(model, PROMPTS, 200) == expected.tolist()
    for prompt, row in zip(PROMPTS, expected.tolist(), strict=True):
        assert written_plainly(model, prompt, 200, 256) == row
    assert len(set(expected.flatten().tolist())) > 5


def test_what_was_left_behind_does_not_matter():
    model = tiny()
    ids, other = (random_ids(B=1, T=30, seed=seed)[0].tolist() for seed in (1, 2))
    for window in (5, 12):
        first = first_read(30, window)
        same, differs = other[:first] + ids[first:], other[: first + 1] + ids[first + 1 :]
        assert written(model, [ids], 9, window=window) == written(model, [same], 9, window=window)
        logits = [next_logits(model, text[first:]) for text in (ids, differs)]
        assert not torch.equal(*logits)


def next_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, -1]


def test_memory_is_taken_once():
    """What is read again goes where it was: a graph on a GPU knows addresses."""
    model, cache = tiny().eval(), Cache(room=6)
    places = set()
    for lengths in ([3, 2], [6, 1]):
        cache.begin(lengths)
        model(random_ids(B=2, T=max(lengths)), cache=cache)
        assert cache.lengths.tolist() == lengths
        places |= {(layer, keys.data_ptr()) for layer, keys in cache.keys.items()}
        places.add(("lengths", cache.lengths.data_ptr()))
    assert len(places) == TINY["num_layers"] + 1


def test_a_cache_that_is_full_says_so():
    model, cache = tiny().eval(), Cache(room=4)
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of 4"):
        cache.begin([2, 5])
    cache.begin([4])
    model(random_ids(B=1, T=4), cache=cache)
    with pytest.raises(ValueError, match="the cache is full: it has room for 4"):
        model(random_ids(B=1, T=1), cache=cache)
    cache.begin([2])
    model(random_ids(B=1, T=2), cache=cache)
    with pytest.raises(ValueError, match="token by token, not 2"):
        model(random_ids(B=1, T=2), cache=cache)


# --- Where it ends -------------------------------------------------------------------------------


def test_a_text_ends_where_its_end_was_drawn():
    model = tiny()
    whole = written(model, PROMPTS, 30)
    end = whole[0][4]
    ended = written(model, PROMPTS, 30, end=end)
    for row, before in zip(ended, whole, strict=True):
        length = before.index(end) + 1 if end in before else 30
        assert row[:length] == before[:length]
        assert row[length:] == [None] * (len(row) - length)
    # Nobody waits for texts that have ended, all of them.
    assert len(written(model, PROMPTS[:1], 30, end=end)[0]) == whole[0].index(end) + 1


def test_ids_that_stand_for_nothing_are_never_drawn():
    hot = Sampling(temperature=50.0)
    assert max(written(tiny(), [[1]] * 8, 20, hot)[0]) > 9
    assert max(max(row) for row in written(tiny(), [[1]] * 8, 20, hot, known=9)) < 9


def test_a_prompt_of_nothing_is_refused():
    with pytest.raises(ValueError, match="an empty prompt"):
        next(generate(tiny(), [[1], []], 5))


def test_the_mode_is_restored():
    model = tiny(dropout=0.5).train()
    steps = generate(model, PROMPTS, 4, GREEDY)
    assert len(next(steps)) == len(PROMPTS)
    steps.close()  # whoever stops early gets the mode back, too
    assert all(module.training for module in model.modules())
    assert written(model, PROMPTS, 9) == written(tiny(), PROMPTS, 9)  # without dropout
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


# --- What is drawn -------------------------------------------------------------------------------

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.9, 0.0, -3.0, 1.2, float("-inf")])
SAMPLINGS = {
    "as it is": Sampling(),
    "warm": Sampling(temperature=2.0),
    "cold": Sampling(temperature=0.3),
    "of the k likeliest": Sampling(temperature=2.0, top_k=4),
    "of the likeliest that make up p": Sampling(top_p=0.8),
    "of both": Sampling(temperature=1.5, top_k=4, top_p=0.7),
    "of one": Sampling(top_p=1e-9),
}


def expected_shares(logits, sampling):
    """By the definitions, one token after the other in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k]
    powers = {i: math.exp(logits[i] / sampling.temperature) for i in order}
    total, kept, so_far = sum(powers.values()), {}, 0.0
    for i in order:
        if so_far < (sampling.top_p or 1.0):
            kept[i] = powers[i] / total
        so_far += powers[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@pytest.mark.parametrize("what", SAMPLINGS)
def test_draws_follow_their_distribution(what):
    """Pearson's chi-square over 20,000 rows with draws of their own; chance would fail one seed in
    100,000."""
    sampling, n = SAMPLINGS[what], 20_000
    tokens = draw(LOGITS.expand(n, -1), sampling, sampling.generators(n))
    counts = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)).tolist()
    shares = expected_shares(LOGITS.tolist(), sampling)
    assert sum(c for c, share in zip(counts, shares, strict=True) if share > 0) == n
    assert chance_of(counts, shares) > 1e-5
    if what == "warm":  # the test can fail: a tenth colder shows
        colder = dataclasses.replace(sampling, temperature=1.8)
        assert chance_of(counts, expected_shares(LOGITS.tolist(), colder)) < 1e-5


def chance_of(counts, shares):
    """The probability of counts that lie so far off or farther, by Pearson's chi-square."""
    n = sum(counts)
    pairs = [(c, n * share) for c, share in zip(counts, shares, strict=True) if share > 0]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.double)
    return 1.0 if len(pairs) == 1 else float(torch.special.gammaincc(*half))


class OnMps(torch.Tensor):
    """Stands for a tensor of a device that has no doubles, as Apple's."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def double(self):
        raise TypeError("the MPS framework doesn't support float64")


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=4, top_p=0.9)])
def test_a_device_without_doubles_draws_the_same(sampling):
    alike = LOGITS[None], LOGITS[None].as_subclass(OnMps)
    drawn = [draw(x, sampling, sampling.generators(1)) for x in alike]
    assert drawn[0] == drawn[1]


def test_one_row_draws_anew_each_time():
    sampling = Sampling()
    generators = sampling.generators(1)
    drawn = [draw(LOGITS[None], sampling, generators)[0] for _ in range(2000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=len(LOGITS)) / 2000
    expected = torch.tensor(expected_shares(LOGITS.tolist(), sampling))
    torch.testing.assert_close(shares, expected, atol=0.05, rtol=0)  # more than four deviations


def test_the_likeliest():
    """No temperature, the smallest one, and a choice of one are the same."""
    model, alike = tiny(), [Sampling(temperature=0.001), Sampling(top_k=1), Sampling(top_p=1e-9)]
    expected = written(model, PROMPTS, 20)
    for sampling in alike:
        assert written(model, PROMPTS, 20, sampling) == expected


def test_top_k_beyond_the_vocabulary_is_no_limit():
    model = tiny()
    drawn = [written(model, PROMPTS, 20, Sampling(top_k=k)) for k in (None, 23, 1000)]
    assert drawn[0] == drawn[1] == drawn[2]


def test_the_same_seed_gives_the_same_text():
    """Whatever else is written at the same time; and torch's own generator is left alone."""
    model, state = tiny(), torch.get_rng_state()
    warm = Sampling(temperature=3.0, top_p=0.95, seed=5)
    together = written(model, PROMPTS, 20, warm)
    assert written(model, PROMPTS, 20, warm) == together
    assert written(model, PROMPTS[2:], 20, warm, first=2) == together[2:]
    assert written(model, PROMPTS, 20, dataclasses.replace(warm, seed=6)) != together
    twice = written(model, PROMPTS[:1] * 2, 20, warm)
    assert twice[0] != twice[1]
    assert torch.equal(torch.get_rng_state(), state)
