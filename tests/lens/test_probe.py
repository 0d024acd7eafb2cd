"""The probe: prompts as the model reads them, weights as they are, and a model left as it was."""

import contextlib
import random

import numpy as np
import pytest
import torch
from helpers import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from data import get_tokenizer
from lens.probe import (
    SHOWN,
    _slug,
    from_codes,
    make_prompt,
    probe,
    repeated_prompt,
    to_codes,
    token_texts,
    triangle_to_square,
    uniform_values,
)
from lens.statistics import STATISTICS, evenly, measure
from model import GPT, ModelConfig

BYTE = get_tokenizer("byte")
SENTENCE = "The ferry bell rang twice, and nobody came."


def tiny(seed=0, **changes):
    settings = {"vocab_size": 257, "context_length": 64, "emb_dim": 16, "num_heads": 2}
    settings |= {"num_layers": 3, "dropout": 0.0}
    torch.manual_seed(seed)
    model = GPT(ModelConfig(**settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "W_" in name:
                parameter.mul_(40)  # so that heads look somewhere
    return model


def looker(model):
    return lambda ids, capture: model.look_into(torch.tensor([ids]), capture)


def text_prompt(text=SENTENCE, limit=64, number=1):
    return make_prompt(number, text, BYTE.encode_ordinary, BYTE.decode_single_token_bytes, limit)


def repeated(limit=64, vocabulary=range(256), bos=256, number=2):
    period = (limit - 1) // 2
    return repeated_prompt(number, vocabulary, bos, BYTE.decode_single_token_bytes, period)


def by_definition(layers, scores, period):
    """The statistics of (1, H, T, T) weights: {key: (L, H)}."""
    rows = [measure(w[0], s[0], period) for w, s in zip(layers, scores, strict=True)]
    return dict(zip(STATISTICS, torch.stack(rows, 1).numpy(), strict=True))


# ------------------------------------------------------------------------------ what is seen


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tiny random GPT-2 of the transformers library, and the folder it is saved in."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=257,
        n_positions=64,
        n_embd=24,
        n_head=3,
        n_layer=2,
        attn_implementation="eager",
        bos_token_id=256,
        eos_token_id=256,
    )
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return model, folder


def test_every_cell_and_statistic_is_that_of_transformers(theirs):
    """From their files through ours and back out of the bytes that pages and pictures show."""
    from training.hf import from_hf

    oracle, folder = theirs
    prompts = [text_prompt(), repeated()]
    frame = probe(looker(from_hf(folder)), prompts, step=7)
    assert frame.row.step == 7
    expected = []
    for prompt, codes in zip(prompts, frame.codes, strict=True):
        with torch.no_grad():
            seen = oracle(torch.tensor([prompt.token_ids]), output_attentions=True).attentions
        assert torch.stack(seen).var() > 0.001  # there is something to see
        num_tokens = len(prompt.token_ids)
        assert codes.shape == (2, 3, num_tokens * (num_tokens + 1) // 2)
        assert codes.dtype == np.uint8
        shown = triangle_to_square(from_codes(codes))
        assert np.abs(shown - torch.cat(seen).numpy()).max() <= 1 / 255
        none = torch.full_like(seen[0], float("nan"))
        expected.append(by_definition(seen, [none, none], prompt.period))
    for key, values in frame.row.values.items():
        assert values.shape == (2, 3)
        both = np.stack([rows[key] for rows in expected])
        if STATISTICS[key].needs == "repeated":
            np.testing.assert_allclose(values, both[1], atol=1e-5)
        elif STATISTICS[key].needs == "weights":
            np.testing.assert_allclose(values, both.mean(0), atol=1e-5)
        else:
            assert np.isfinite(values).all()


def test_captured_weights_are_those_of_transformers(theirs):
    from training.hf import from_hf

    oracle, folder = theirs
    ids = text_prompt().token_ids
    ours = []
    from_hf(folder).look_into(torch.tensor([ids]), lambda _, weights, __: ours.append(weights))
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), output_attentions=True).attentions
    for mine, layer in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, layer, atol=1e-5, rtol=0)


def test_the_lens_serves_transformers_models_as_its_docstring_says(theirs):
    """Weights alone, without scores: all statistics but the one that needs scores."""
    oracle, _ = theirs

    def look_into(token_ids, capture):
        with torch.no_grad():
            output = oracle(torch.tensor([token_ids]), output_attentions=True)
        for layer, attn_weights in enumerate(output.attentions):
            capture(layer, attn_weights)

    values = probe(look_into, [text_prompt(), repeated()], step=0).row.values
    assert {key for key in values if np.isnan(values[key]).any()} == {"largest_logit"}


@pytest.mark.parametrize("as_given", [torch.Tensor.numpy, torch.Tensor.double, torch.Tensor.half])
def test_weights_may_be_arrays_of_three_dimensions_and_of_any_precision(as_given):
    weights = [evenly(5).repeat(2, 1, 1), torch.eye(5).repeat(2, 1, 1)]

    def look_into(token_ids, capture):
        for layer, layer_weights in enumerate(weights):
            capture(layer, as_given(layer_weights))

    frame = probe(look_into, [text_prompt("hello")], step=0)
    assert frame.row.values["diagonal"][1].tolist() == [1, 1]
    shown = triangle_to_square(from_codes(frame.codes[0]))
    assert np.abs(shown - np.stack(weights)).max() <= 1 / 255


def test_statistics_are_the_mean_over_prompts_and_take_in_the_scores():
    model, prompts = tiny(), [text_prompt("abcdefgh"), text_prompt("hello there"), repeated(20)]
    frame = probe(looker(model), prompts, step=0)
    each = []
    for prompt in prompts:
        layers, scores = [], []
        model.look_into(
            torch.tensor([prompt.token_ids]),
            lambda _, w, s, layers=layers, scores=scores: (layers.append(w), scores.append(s)),
        )
        each.append(by_definition(layers, scores, prompt.period))
    for key in ("entropy", "distance", "largest_logit"):
        expected = np.mean([of_prompt[key] for of_prompt in each], axis=0)
        np.testing.assert_allclose(frame.row.values[key], expected, rtol=1e-5)
    np.testing.assert_allclose(frame.row.values["induction"], each[2]["induction"], rtol=1e-5)


def test_of_a_long_prompt_all_is_measured_and_the_first_tokens_are_shown():
    model = tiny(context_length=300)
    prompt = text_prompt("x1y2z3" * 50, limit=300)
    assert len(prompt.token_ids) == 300
    assert prompt.cropped  # what is shown is
    assert prompt.shown == SHOWN == 256
    frame = probe(looker(model), [prompt], step=0)
    layers = model.attn_weights(torch.tensor([prompt.token_ids]))
    assert frame.codes[0].shape == (3, 2, 256 * 257 // 2)
    shown = triangle_to_square(from_codes(frame.codes[0]))
    assert np.abs(shown - torch.cat(layers).numpy()[..., :256, :256]).max() <= 1 / 255
    whole = np.stack([STATISTICS["distance"].of(layer[0]).numpy() for layer in layers])
    np.testing.assert_allclose(frame.row.values["distance"], whole, rtol=1e-5)
    part = STATISTICS["distance"].of(layers[0][0, :, :256, :256]).numpy()
    assert np.abs(part - whole[0]).max() > 1


def test_the_uniform_values_are_those_of_a_model_that_looks_evenly():
    prompts = [text_prompt(), repeated()]

    def look_into(token_ids, capture):
        capture(0, evenly(len(token_ids)))

    values = probe(look_into, prompts, step=0).row.values
    for key, value in uniform_values(prompts).items():
        if value is None:
            assert key == "largest_logit"
        else:
            assert values[key].item() == pytest.approx(value)
    assert uniform_values(prompts[:1])["induction"] is None


# --------------------------------------------------------------------------------- in bytes


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50))
def test_a_byte_is_within_a_255th_of_its_weight_and_keeps_the_order(weights):
    weights = torch.tensor(sorted(weights))
    codes = to_codes(weights)
    error = np.abs(from_codes(codes.numpy()) - weights.numpy())
    assert (error <= 1 / 255 + 1e-7).all()
    assert (error <= weights.sqrt().numpy() / 255 + (0.5 / 255) ** 2 + 1e-7).all()
    assert (codes.int().diff() >= 0).all()


def test_every_byte_survives_and_the_ends_are_exact():
    codes = np.arange(256, dtype=np.uint8)
    assert to_codes(torch.from_numpy(from_codes(codes))).tolist() == codes.tolist()
    assert to_codes(torch.tensor([0.0, 1.0, 1.0 + 1e-7, 0.25])).tolist() == [0, 255, 255, 128]
    assert from_codes(np.uint8([0, 255])).tolist() == [0, 1]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 255, 256])
def test_triangles_become_squares_row_by_row(num_tokens):
    below = np.tril_indices(num_tokens)
    squares = np.zeros((2, num_tokens, num_tokens), np.uint8)
    squares[..., *below] = np.random.default_rng(0).integers(0, 256, (2, len(below[0])))
    assert np.array_equal(triangle_to_square(squares[..., *below]), squares)


def test_the_order_of_cells_is_query_by_query():
    square = triangle_to_square(np.array([1, 2, 3, 4, 5, 6], np.uint8))
    assert square.tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]


# -------------------------------------------------------------------- a model left as it was


@pytest.mark.parametrize("training", [True, False])
def test_looking_leaves_no_trace(training):
    """Random states, mode, parameters, gradients and what the model computes: all as before."""
    model = tiny(dropout=0.5).train(training)
    ids = torch.tensor([text_prompt().token_ids])
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    output = model(ids)[0]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    prompts = [text_prompt(), repeated()]
    frame = probe(looker(model), prompts, step=0)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert all(module.training == training for module in model.modules())
    assert torch.equal(model(ids)[0], output)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, grads[name])
        assert torch.equal(parameter, state[name])
    again = probe(looker(model), prompts, step=0)  # no dropout: the same whenever one looks
    assert all(np.array_equal(a, b) for a, b in zip(frame.codes, again.codes, strict=True))


def test_a_look_that_fails_restores_the_mode():
    model = tiny().train()
    with pytest.raises(ZeroDivisionError):
        model.look_into(torch.tensor([[1, 2]]), lambda *_: 1 / 0)
    assert all(module.training for module in model.modules())


def test_no_two_layers_weights_are_alive_at_once():
    """At 1,024 tokens: when a layer is handed over, those of the layers before it are gone."""
    model, alive = tiny(context_length=1024), []
    prompt = text_prompt("abcdefg " * 200, limit=1024)
    assert len(prompt.token_ids) == 1024
    most = []

    def look_into(token_ids, capture):
        def watched(layer, attn_weights, attn_scores):
            most.append(sum(not ref.expired() for ref in alive))
            alive.extend(StorageWeakRef(t.untyped_storage()) for t in (attn_weights, attn_scores))
            capture(layer, attn_weights, attn_scores)

        model.look_into(torch.tensor([token_ids]), watched)

    frame = probe(look_into, [prompt, prompt], step=0)
    assert most == [0] * 6
    assert all(ref.expired() for ref in alive)
    assert sum(codes.nbytes for codes in frame.codes) == 2 * 3 * 2 * 256 * 257 // 2


def test_looking_makes_a_compiled_model_neither_compile_again_nor_train_otherwise():
    ids = torch.tensor([text_prompt().token_ids])

    def trained(looks):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tiny(dropout=0.1)
        graphs = []
        compiled = torch.compile(model, backend=lambda graph, _: graphs.append(1) or graph.forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, frames = [], []
        for step in range(3):
            _, loss = compiled(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if looks:
                frames.append(probe(looker(model), [text_prompt(), repeated()], step))
        return losses, len(graphs), frames

    losses, graphs, _ = trained(looks=False)
    seen_losses, seen_graphs, frames = trained(looks=True)
    assert graphs >= 1
    assert seen_graphs == graphs
    assert seen_losses == losses
    assert losses[2] != losses[0]
    first, _, last = (frame.row.values["entropy"] for frame in frames)
    assert not np.array_equal(first, last)  # it sees what the compiled handle trained


# -------------------------------------------------------------------------- on several ranks

STEPS = 2


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (2, 33), generator=generator)


def train_and_look(wrap, rows):
    """Two training steps on some rows of each batch, after each a look and a forward pass."""
    model = tiny(seed=1)
    trained = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    prompts, seen = [text_prompt(), repeated()], {}
    for step in range(STEPS):
        ids = batch(step)[rows]
        trained(ids[:, :-1], ids[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        frame = probe(looker(model), prompts, step)
        with torch.no_grad():  # and what is computed after the look
            everything = batch(step)
            _, loss = trained(everything[:, :-1], everything[:, 1:])
        seen[f"{step} loss"] = loss.numpy()
        seen |= {f"{step} {key}": value for key, value in frame.row.values.items()}
        seen |= {f"{step} codes {n}": codes for n, codes in enumerate(frame.codes)}
    return seen


def on_rank(rank, folder):
    """What one of two processes does; the main part of this file's imports happens again in it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for name, wrap in (("ddp", DistributedDataParallel), ("sharded", sharded)):
            seen = train_and_look(wrap, slice(rank, rank + 1))
            np.savez(f"{folder}/{name}{rank}.npz", **seen)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen_on_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(on_rank, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("name", ["ddp0", "ddp1", "sharded0", "sharded1"])
def test_every_rank_sees_what_one_process_sees_after_each_step(seen_on_ranks, name):
    """Copies or shards, real processes: the raw model is looked into and is never stale."""
    expected = train_and_look(lambda model: model, slice(None))
    found = np.load(seen_on_ranks / f"{name}.npz", allow_pickle=False)
    assert set(found.files) == set(expected)
    for key, value in expected.items():
        if "codes" in key:
            assert np.abs(found[key].astype(int) - value).max() <= 1, key
        else:
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-4, err_msg=key)
    moved = np.abs(expected["0 entropy"] - expected["1 entropy"]).max()
    assert moved > 1e-3  # else a stale look would pass


# ---------------------------------------------------------------------------------- prompts


def test_a_prompt_is_named_tokenised_and_cropped():
    prompt = text_prompt("She sat on the bank, again.", limit=5)
    assert prompt.name == "1-she-sat-on-the"
    assert prompt.token_ids == list(b"She s")
    assert prompt.tokens == list("She s")
    assert prompt.cropped
    assert prompt.shown == 5
    assert prompt.period == 0
    assert not text_prompt("12345", limit=5).cropped


def test_a_text_without_tokens_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        make_prompt(1, "something", lambda text: [], BYTE.decode_single_token_bytes, 64)


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("She sat on the bank of", "she-sat-on-the"),
        ("Où est-ce, là?", "ou-est-ce-la"),
        ("Straße № 9", "strae-o-9"),
        ("渡船的钟声响了", "prompt"),
        ("🙂🎉", "prompt"),
        ("::", "prompt"),
        ("../../etc/passwd", "etc-passwd"),
        ("漢字 and words", "and-words"),
        ("a" * 99, "a" * 40),
    ],
)
def test_names_are_fit_for_files_and_dashboards(text, slug):
    assert _slug(text) == slug


def test_tokens_are_shown_as_the_text_or_the_bytes_they_stand_for():
    gpt2 = get_tokenizer("gpt2")
    ids = gpt2.encode_ordinary("a 漢")
    texts = token_texts(ids, gpt2.decode_single_token_bytes)
    assert texts[0] == "a"
    assert all("�" not in text for text in texts)
    assert "".join(texts[1:]).endswith("<0xA2>")  # 漢 is E6 BC A2, in parts
    assert token_texts(list("€".encode()), BYTE.decode_single_token_bytes) == [
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
    ]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_ids_that_stand_for_nothing_are_shown_as_numbers(name):
    token_bytes = get_tokenizer(name).decode_single_token_bytes
    assert token_texts([50300, 10**12, -1], token_bytes) == [
        "<id 50300>",
        f"<id {10**12}>",
        "<id -1>",
    ]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
@pytest.mark.parametrize("text", ["a \ud83d b", "\udce2", "\ude00\ud83d"])
def test_half_a_character_in_a_prompt_is_shown_as_unreadable(name, text):
    tokenizer = get_tokenizer(name)
    prompt = make_prompt(
        1, text, tokenizer.encode_ordinary, tokenizer.decode_single_token_bytes, 64
    )
    assert prompt.text == "".join(c if c in "a b" else "�" for c in text)
    prompt.text.encode("utf-8")
    whole = "\ud83d\ude00"  # two halves that belong together, as JSON may have them
    assert text_prompt(whole).text == "😀"


def test_the_repeated_prompt_is_bos_and_two_equal_copies():
    prompt = repeated(limit=64)
    bos, first, second = prompt.token_ids[0], prompt.token_ids[1:32], prompt.token_ids[32:]
    assert prompt.name == "2-repeated"
    assert prompt.period == len(first) == 31
    assert bos == 256
    assert first == second
    assert len(set(first)) == 31
    assert bos not in first
    assert not prompt.cropped
    assert len(prompt.tokens) == len(prompt.token_ids) == 63


def test_the_repeated_prompt_is_the_same_at_every_call_and_leaves_random_states_alone():
    state = np.random.get_state()[1].tolist()
    assert repeated().token_ids == repeated().token_ids
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("bos", [0, 7, 256])
def test_bos_is_never_among_the_random_tokens(bos):
    prompt = repeated(limit=256, vocabulary=range(257), bos=bos)
    assert prompt.token_ids[0] == bos
    assert prompt.token_ids.count(bos) == 1


def test_a_small_vocabulary_repeats_itself():
    prompt = repeated(limit=64, vocabulary=[3, 5, 256], bos=256)
    assert prompt.period == 31
    assert set(prompt.token_ids[1:]) == {3, 5}
    assert prompt.token_ids[1:32] == prompt.token_ids[32:]


@pytest.mark.parametrize(("limit", "period"), [(2, 0), (4, 0), (5, 2), (6, 2), (256, 127)])
def test_the_repeated_prompt_is_shown_whole_or_is_none(limit, period):
    prompt = repeated(limit=limit)
    assert (prompt.period if prompt else 0) == period
    if prompt:
        assert len(prompt.token_ids) == prompt.shown <= min(limit, SHOWN)


def test_a_vocabulary_of_bos_alone_gives_no_repeated_prompt():
    assert repeated(vocabulary=[256], bos=256) is None


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1).filter(str.strip))
def test_any_text_becomes_a_prompt(text):
    prompt = text_prompt(text, limit=16)
    assert 1 <= len(prompt.token_ids) == len(prompt.tokens) <= 16
    assert prompt.cropped == (len(text.encode("utf-8", "replace")) > 16)
    assert prompt.name.replace("-", "").isalnum()
    assert prompt.name.isascii()


def test_this_file_tests_this_repository():
    import lens

    assert str(REPOSITORY) in lens.__file__
