"""The probe: prompts, exact weights and statistics; the model is not changed."""

import random

import numpy as np
import pytest
import torch
from helpers.models import tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

from clearhead.interop.huggingface import to_hf
from clearhead.lens.probe import (
    from_codes,
    is_separator,
    labels_of,
    make_prompt,
    plain_text,
    probe,
    repeated_prompt,
    to_codes,
    token_texts,
    triangle_to_square,
    uniform_values,
)
from clearhead.lens.statistics import STATISTICS, measure, uniform_attention
from data import get_tokenizer

BYTE = get_tokenizer("byte")


def byte_model(**changes):
    return tiny_model(**{"vocab_size": 257, "context_length": 64, "num_layers": 3} | changes)


def captured(model, logit_lens=False):
    return lambda ids, capture: model.capture_attention(torch.tensor([ids]), capture, logit_lens)


def text_prompt(text="The ferry bell rang twice, and nobody came.", limit=64):
    return make_prompt(1, text, BYTE.encode_ordinary, BYTE.decode_single_token_bytes, limit)


def repeated(period=31, vocabulary=range(256), bos=256):
    return repeated_prompt(2, vocabulary, bos, BYTE.decode_single_token_bytes, period)


def assert_shows(codes, weights):
    shown = triangle_to_square(from_codes(codes))
    assert np.abs(shown - np.asarray(weights)).max() <= 1 / 255


def assert_predicts(found, logits, ids):
    """Checks losses and the most likely tokens. logits: (T, V), of transformers."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    np.testing.assert_allclose(found.losses, losses, atol=1e-4)
    probabilities = logits.softmax(-1)
    most = probabilities.sort(descending=True)
    np.testing.assert_allclose(found.probabilities, most.values[:, :5], atol=1e-5)
    chosen = probabilities.gather(-1, torch.from_numpy(found.token_ids))
    np.testing.assert_allclose(found.probabilities, chosen, atol=1e-5)


def assert_norms(found, oracle, hidden_states):
    """Checks norms of value vectors after the output projection, head by head. found: (L, H, T)."""
    heads, width = oracle.config.n_head, oracle.config.n_embd
    size = width // heads
    for layer, block in enumerate(oracle.transformer.h):
        with torch.no_grad():
            values = block.attn.c_attn(block.ln_1(hidden_states[layer]))[0, :, 2 * width :]
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            moved = values[:, columns] @ block.attn.c_proj.weight[columns]  # (T, C)
            np.testing.assert_allclose(found[layer, head], moved.detach().norm(dim=-1), rtol=1e-3)


def test_separators():
    yes = [".", ",", " --", "\n", " \n\n", " ", "…", "?!", "«"]
    no = ["a", "", "1", "$", "don't", "<|endoftext|>", "␣"]
    assert [is_separator(token) for token in yes + no] == [True] * len(yes) + [False] * len(no)


def test_weights_and_statistics_are_those_of_transformers(tmp_path):
    """The statistics are the mean over the prompts on which they are defined."""
    import transformers

    ours = byte_model()
    to_hf(ours, tmp_path)
    oracle = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, attn_implementation="eager")
    prompts = [text_prompt(), text_prompt("hello there"), repeated()]
    frame = probe(captured(ours, logit_lens=True), prompts, step=7)
    assert frame.row.step == 7
    statistics = []  # of each prompt (S, L, H)
    for prompt, codes in zip(prompts, frame.codes, strict=True):
        ids, scores = torch.tensor([prompt.token_ids]), []
        with torch.no_grad():
            output = oracle(ids, output_attentions=True, output_hidden_states=True)
        weights = output.attentions  # (1, H, T, T) each
        *readings, final = frame.predictions[len(statistics)]
        assert_predicts(final, output.logits[0], ids[0])
        assert len(readings) == 3
        for reading, hidden in zip(readings, output.hidden_states, strict=False):
            with torch.no_grad():  # hidden_states[layer] is the input of the layer
                logits = oracle.lm_head(oracle.transformer.ln_f(hidden))
            assert_predicts(reading, logits[0], ids[0])
        assert_norms(frame.value_norms[len(statistics)], oracle, output.hidden_states)
        assert torch.stack(weights).var() > 0.001  # the attention is not uniform
        assert codes.dtype == np.uint8
        assert_shows(codes, torch.cat(weights))
        ours.capture_attention(ids, lambda _, w, s, *__, out=scores: out.append(s))
        for layer, of_layer in zip(weights, scores, strict=True):
            torch.testing.assert_close(of_layer.softmax(-1), layer, atol=1e-5, rtol=0)
        rows = [
            measure(w[0], s[0], prompt.period, prompt.separators)
            for w, s in zip(weights, scores, strict=True)
        ]
        statistics.append(torch.stack(rows, 1).numpy())

    assert [losses.tolist() for losses in frame.row.losses] == [
        readings[-1].losses.tolist() for readings in frame.predictions
    ]
    for number, (key, statistic) in enumerate(STATISTICS.items()):
        if statistic.needs == "texts":
            continue  # test_statistics.py
        mean = np.nanmean([of_prompt[number] for of_prompt in statistics], axis=0)
        np.testing.assert_allclose(frame.row.values[key], mean, atol=1e-5, err_msg=key)


def test_long_prompt_is_measured_completely_and_its_first_tokens_are_shown():
    model = byte_model(context_length=300)
    prompt = text_prompt("x1y2z3" * 50, limit=300)
    assert len(prompt.token_ids) == 300
    assert prompt.truncated  # the shown part is truncated
    assert prompt.shown == 256
    frame = probe(captured(model), [prompt], step=0)
    layers = model.attn_weights(torch.tensor([prompt.token_ids]))
    assert frame.codes[0].shape == (3, 4, 256 * 257 // 2)
    assert_shows(frame.codes[0], torch.cat(layers)[..., :256, :256])
    whole = np.stack([STATISTICS["distance"].function(layer[0]).numpy() for layer in layers])
    np.testing.assert_allclose(frame.row.values["distance"], whole, rtol=1e-5)


def test_uniform_values_are_those_of_uniform_attention():
    prompts = [text_prompt(), repeated()]
    capture_attention = lambda token_ids, capture: capture(0, uniform_attention(len(token_ids)))  # noqa: E731
    values = probe(capture_attention, prompts, step=0).row.values
    uniform = uniform_values(prompts)
    assert [key for key, value in uniform.items() if value is None] == ["largest_logit"]
    for key in uniform.keys() - {"largest_logit"}:
        # `positional` is computed from the codes, which have one byte for each weight.
        assert values[key].item() == pytest.approx(uniform[key], abs=5e-3 * (key == "positional"))
    assert uniform_values(prompts[:1])["positional"] is None
    assert uniform_values(prompts[:1])["induction"] is None


def test_codes_and_triangles_come_back():
    weights = torch.linspace(0, 1, 1000) ** 3
    error = np.abs(from_codes(to_codes(weights).numpy()) - weights.numpy())
    assert (error <= weights.sqrt().numpy() / 255 + (0.5 / 255) ** 2 + 1e-7).all()
    codes = np.arange(256, dtype=np.uint8)
    assert to_codes(torch.from_numpy(from_codes(codes))).tolist() == codes.tolist()
    assert to_codes(torch.tensor([0.0, 1.0, 1.0 + 1e-7, 0.25])).tolist() == [0, 255, 255, 128]
    square = triangle_to_square(np.array([1, 2, 3, 4, 5, 6], np.uint8))
    assert square.tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]  # query by query


def random_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("training", [True, False])
def test_a_snapshot_changes_nothing(training):
    """Random states, mode, parameters, gradients and outputs of the model stay the same."""
    model = byte_model(dropout=0.5).train(training)
    ids = torch.tensor([text_prompt().token_ids])
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    output = model(ids)[0]
    torch.manual_seed(3)
    before = random_states()
    prompts = [text_prompt(), repeated()]
    frame = probe(captured(model), prompts, step=0)
    assert random_states() == before
    assert all(module.training == training for module in model.modules())
    assert torch.equal(model(ids)[0], output)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, grads[name])
        assert torch.equal(parameter, state[name])
    again = probe(captured(model), prompts, step=0)  # no dropout, so all snapshots are equal
    assert all(np.array_equal(a, b) for a, b in zip(frame.codes, again.codes, strict=True))


def test_weights_of_one_layer_at_a_time_are_in_memory():
    """At 1,024 tokens: when a layer is captured, the weights of earlier layers are freed."""
    model, alive, most = byte_model(context_length=1024), [], []
    prompt = text_prompt("abcdefg " * 200, limit=1024)

    def capture_attention(token_ids, capture):
        def watched(layer, attn_weights, attn_scores, *others):
            most.append(sum(not ref.expired() for ref in alive))
            alive.extend(StorageWeakRef(t.untyped_storage()) for t in (attn_weights, attn_scores))
            capture(layer, attn_weights, attn_scores, *others)

        model.capture_attention(torch.tensor([token_ids]), watched)

    probe(capture_attention, [prompt, prompt], step=0)
    assert most == [0] * 6
    assert all(ref.expired() for ref in alive)


def test_compiled_model_is_not_compiled_again_and_trains_the_same():
    ids = torch.tensor([text_prompt().token_ids])

    def trained(snapshots):
        torch._dynamo.reset()
        model = byte_model(dropout=0.1, num_layers=1)
        graphs = []
        compiled = torch.compile(model, backend=lambda graph, _: graphs.append(1) or graph.forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            _, loss = compiled(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if snapshots:
                probe(captured(model), [text_prompt(), repeated()], step)
        return losses, len(graphs)

    losses, graphs = trained(snapshots=False)
    assert graphs >= 1
    assert losses[2] != losses[0]
    assert trained(snapshots=True) == (losses, graphs)


def test_prompt_is_tokenized_truncated_and_named():
    prompt = text_prompt("She sat on the bank, again.", limit=5)
    assert prompt.token_ids == list(b"She s")
    assert prompt.tokens == list("She s")
    assert (prompt.truncated, prompt.shown, prompt.period) == (True, 5, 0)
    assert not text_prompt("12345", limit=5).truncated
    for text, name in (  # names for files and dashboards
        ("渡船的钟声响了", "prompt"),
        ("../../etc/passwd", "etc-passwd"),
        ("漢字 and words", "and-words"),
    ):
        assert text_prompt(text).name == f"1-{name}"


def test_tokens_are_shown_as_text_bytes_or_numbers():
    gpt2 = get_tokenizer("gpt2")
    texts = token_texts(gpt2.encode_ordinary("a 漢"), gpt2.decode_single_token_bytes)
    assert texts[0] == "a"
    assert all("�" not in text for text in texts)
    assert "".join(texts[1:]).endswith("<0xA2>")  # 漢 is E6 BC A2, in several tokens
    assert token_texts([50300], gpt2.decode_single_token_bytes) == ["<id 50300>"]
    assert text_prompt("a \ud83d b").text == "a � b"  # a lone surrogate


def test_tokens_that_share_a_character_have_it_in_their_labels():
    words = [
        "の".encode() + b"\xe3",
        b"\x81\xaf",
        b" ",
        *(bytes([b]) for b in "日é".encode()),
        *("ท".encode()[:2], "ที่จ".encode()[2:]),
        b"\xff",
    ]
    tokens = token_texts(range(len(words)), words.__getitem__)
    labels = ["のは¹", "は²", " ", "日¹", "日²", "日³", "é¹", "é²", "ท¹", "ที่²จ", "<0xFF>"]
    assert labels_of(tokens) == labels
    assert plain_text(tokens) == "のは 日éที่จ"
    assert plain_text(tokens[:4]) == "のは "  # without a part of a character
    assert labels_of(tokens[4:]) == ["<0x97>", "<0xA5>", *labels[6:]]
    assert labels_of(["<0x41>", "a²"]) == ["<0x41>", "a²"]
    for size in range(len(words)):  # the end may be inside a character
        assert len(labels_of(tokens[:size])) == size


def test_repeated_prompt_is_bos_and_two_equal_copies():
    before = random_states()
    prompt = repeated()
    first, second = prompt.token_ids[1:32], prompt.token_ids[32:]
    assert (prompt.name, prompt.token_ids[0]) == ("2-repeated", 256)
    assert prompt.period == len(first) == len(set(first)) == 31
    assert first == second
    assert repeated().token_ids == prompt.token_ids  # the same at every call
    assert random_states() == before
    assert repeated(127, vocabulary=range(257), bos=7).token_ids.count(7) == 1
    assert set(repeated(vocabulary=[3, 5, 256]).token_ids[1:]) == {
        3,
        5,
    }  # fewer tokens than the period
    assert repeated(period=1) is repeated(vocabulary=[256]) is None
