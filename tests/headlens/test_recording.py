"""Recording: prompts, exact weights and statistics; the model is not changed."""

import random

import numpy as np
import pytest
import torch
from helpers.loops import by_loops, uniform_attention
from helpers.models import tiny_model
from torch.multiprocessing.reductions import StorageWeakRef

from data import get_tokenizer
from headlens import STATISTICS, Captured, LayerAttention, capture, lens_tokenizer, recording
from headlens.prompts import (
    is_separator,
    labels_of,
    make_prompt,
    plain_text,
    repeated_prompt,
    signs_of,
    texts_of,
    token_texts,
)
from headlens.recording import record
from headlens.snapshot_data import from_codes, to_codes, triangle_to_square

BYTE = get_tokenizer("byte")


def byte_model(**changes):
    return tiny_model(**{"vocab_size": 257, "context_length": 64, "num_layers": 3} | changes)


def capturing(model):
    return lambda ids, visit: capture(model, ids, visit)


def text_prompt(text="The ferry bell rang twice,\nand nobody came.", limit=64):
    return make_prompt(1, text, lens_tokenizer(BYTE), limit)


def repeated(period=31, vocabulary=range(256), bos=256):
    return repeated_prompt(2, vocabulary, bos, BYTE.decode_single_token_bytes, period)


def assert_shows(codes, weights):
    shown = triangle_to_square(from_codes(codes))
    assert np.abs(shown - np.asarray(weights)).max() <= 1 / 255


def assert_predicts(found, texts, logits, ids):
    """Checks losses and the most likely tokens. logits: (T, V)."""
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    np.testing.assert_allclose(found["losses"], losses, atol=1e-4)
    probabilities = logits.softmax(-1)
    most = probabilities.sort(descending=True).values[:, : len(found["probabilities"][0])]
    np.testing.assert_allclose(found["probabilities"], most, atol=1e-4)
    # Bytes of incomplete characters are not texts, so they have no unique id here.
    for position, row in enumerate(found["tokens"]):
        for number, index in enumerate(row):
            if len(encoded := BYTE.encode_ordinary(texts[index])) == 1:
                wanted = probabilities[position, encoded[0]].item()
                assert found["probabilities"][position][number] == pytest.approx(wanted, abs=1e-4)


def test_everything_in_a_snapshot_is_that_of_the_captured_attention():
    """The statistics by plain loops, and their mean over the prompts on which they are defined."""
    model, prompts = byte_model(), [text_prompt(), text_prompt("hello there"), repeated()]
    token_bytes = BYTE.decode_single_token_bytes
    data = record(capturing(model), prompts, step=7, token_bytes=token_bytes)
    assert data.row.step == 7
    predictions = data.details["predictions"]
    for number, prompt in enumerate(prompts):
        ids = torch.tensor(prompt.token_ids)
        captured = capture(model, ids)
        final = predictions["of_prompts"][number]
        assert_predicts(final, predictions["tokens"], captured.logits[0], ids)
        np.testing.assert_allclose(data.row.losses[number], final["losses"], atol=1e-4)
        weights = torch.cat([layer.weights for layer in captured.layers])  # (L, H, T, T)
        assert weights.var() > 0.001  # the attention is not uniform
        assert data.codes[number].dtype == np.uint8
        assert_shows(data.codes[number], weights)
        norms = torch.cat([layer.value_norms for layer in captured.layers]).numpy()
        largest = np.reshape(data.details["largest_norms"][number], (3, 4))[..., None]
        shown = (data.norms[number] / 255) ** 2 * largest
        assert (np.abs(shown - norms) <= 2 / 255 * largest).all()
        for layer, head in np.ndindex(3, 4):
            of_head = weights[layer, head].tolist()
            wanted = by_loops(of_head, prompt.token_ids, prompt.tokens, prompt.period)
            wanted["largest_logit"] = captured.layers[layer].scores[0, head].max().item()
            del wanted["offset"]  # the best one of all prompts: test_whole_text.py
            for key, value in wanted.items():
                found = data.of_prompts[number][key][layer, head]
                assert found == pytest.approx(value, abs=1e-3 * max(1, abs(value))), key
    for key in STATISTICS.keys() - {"positional"}:  # test_statistics.py
        mean = np.nanmean([of_prompt[key] for of_prompt in data.of_prompts], axis=0)
        np.testing.assert_allclose(data.row.values[key], mean, atol=1e-3, err_msg=key)


def test_long_prompt_is_measured_completely_and_its_first_tokens_are_shown():
    model = byte_model(context_length=300)
    prompt = text_prompt("x1y2z3" * 50, limit=300)
    assert len(prompt.token_ids) == 300
    assert prompt.truncated  # the shown part is truncated
    assert prompt.shown == 256
    frame = record(capturing(model), [prompt], step=0)
    layers = model.attn_weights(torch.tensor([prompt.token_ids]))
    assert frame.codes[0].shape == (3, 4, 256 * 257 // 2)
    assert_shows(frame.codes[0], torch.cat(layers)[..., :256, :256])
    positions = torch.arange(300.0)
    whole = [(positions - layer[0] @ positions).mean(-1) for layer in layers]
    np.testing.assert_allclose(frame.row.values["distance"], torch.stack(whole), rtol=1e-5)


def test_uniform_values_are_those_of_uniform_attention():
    prompts = [text_prompt(), repeated()]

    def run(ids, visit):
        visit(0, LayerAttention(uniform_attention(ids.shape[1]).expand(len(ids), 1, -1, -1)))
        return Captured()

    data = record(run, prompts, step=0)
    values, uniform = data.row.values, data.uniform
    undefined = {key for key, value in uniform.items() if value is None}
    assert undefined == {"largest_logit", "learned_sink"}
    for key in uniform.keys() - undefined:
        # `positional` is computed from the codes, which have one byte for each weight.
        assert values[key].item() == pytest.approx(
            uniform[key], abs=5e-3 if key == "positional" else 1e-6
        )
    uniform = record(run, prompts[:1], step=0).uniform
    assert uniform["positional"] is uniform["induction"] is None


@pytest.mark.parametrize("at_once", [256, 130, 10])  # three, two or one at a time
def test_prompts_that_run_together_are_recorded_as_alone(monkeypatch, at_once):
    """Shorter ones are padded."""
    monkeypatch.setattr(recording, "TOKENS_AT_ONCE", at_once)
    model = byte_model()
    prompts = [text_prompt(), repeated(), text_prompt("Hm")]
    together = record(capturing(model), prompts, step=0)
    for number, prompt in enumerate(prompts):
        alone = record(capturing(model), [prompt], step=0)
        np.testing.assert_allclose(together.row.losses[number], alone.row.losses[0], 1e-4)
        assert np.abs(together.codes[number].astype(int) - alone.codes[0]).max() <= 1
        assert np.abs(together.norms[number].astype(int) - alone.norms[0]).max() <= 1
        for key in STATISTICS.keys() - {"offset"}:  # the offset of a head depends on all prompts
            expected = alone.of_prompts[0][key]
            np.testing.assert_allclose(together.of_prompts[number][key], expected, atol=1e-3)


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


def test_weights_of_one_layer_at_a_time_are_in_memory():
    """At 1,024 tokens: when a layer is captured, the weights of earlier layers are freed."""
    model, alive, most = byte_model(context_length=1024), [], []
    prompt = text_prompt("abcdefg " * 200, limit=1024)

    def run(ids, visit):
        def watched(layer, attention):
            most.append(sum(not ref.expired() for ref in alive))
            tensors = attention.weights, attention.scores
            alive.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
            visit(layer, attention)

        return capture(model, ids, watched)

    record(run, [prompt, prompt], step=0)
    assert most == [0] * 6
    assert all(ref.expired() for ref in alive)


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
    labels = ["のは¹", "は²", "␣", "日¹", "日²", "日³", "é¹", "é²", "ท¹", "ที่²จ", "<0xFF>"]
    assert labels_of(tokens) == labels
    assert texts_of(tokens) == ["のは", "", " ", "日", "", "", "é", "", "ท", "ี่จ", "<0xFF>"]
    assert plain_text(tokens) == "のは 日éที่จ"
    assert plain_text(tokens[:4]) == "のは "  # without a part of a character
    assert labels_of(tokens[4:]) == ["<0x97>", "<0xA5>", *labels[6:]]
    assert labels_of(["<0x41>", "a²"]) == ["<0x41>", "a²"]
    for size in range(len(words)):  # the end may be inside a character
        assert len(labels_of(tokens[:size])) == len(texts_of(tokens[:size])) == size


def test_labels_show_what_cannot_be_seen():
    labels = {" a ": "␣a␣", "\n": "⏎", "\r\t": "␍⇥", "": "∅", "  ": "␣␣", "\u3000": "␣"}
    labels |= {"\u202ertl": "·rtl", "\x00\x1b": "··", "\u2028a": "␣a", "\u200d": "·"}
    labels |= {"👩\u200d👧": "👩\u200d👧", "می\u200cخ": "می\u200cخ", "<0xE3><0x81>": "<0xE3 81>"}
    labels |= {"x" * 30: "x" * 23 + "…"}
    for token, label in labels.items():
        assert labels_of([token]) == [label]
    texts = texts_of([" a ", "\n", "\u202e", "\u200d", "x" * 30, ""])
    assert texts == [" a ", "⏎", "·", "\u200d", "x" * 30, ""]


@pytest.mark.parametrize(
    ("tokens", "signs"),
    [
        (["Caf", "<0xC3>", "<0xA9>", "\n", "\t", "Bar"], "é¹ ⏎ ⇥"),
        (["a", "b"], ""),
        (["She", " sat", "\n", ""], "␣ ⏎ ∅"),
        (["a", "<0xE3>", "\r"], "<0xE3> ␍"),
    ],
)
def test_signs_of_labels_are_explained(tokens, signs):
    known = ("é¹", "<0xC3>", "<0xE3>", "␣", "⏎", "␍", "⇥", "∅")
    assert {sign for sign in known if sign in signs_of(tokens)} == set(signs.split())


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


def test_prompt_is_tokenized_truncated_and_named():
    prompt = text_prompt("She sat on the bank, again.", limit=5)
    assert (prompt.token_ids, prompt.tokens) == (list(b"She s"), list("She s"))
    assert (prompt.truncated, prompt.shown, prompt.period) == (True, 5, 0)
    assert not text_prompt("12345", limit=5).truncated
    for text, name in (  # names for files and dashboards
        ("渡船的钟声响了", "prompt"),
        ("../../etc/passwd", "etc-passwd"),
        ("漢字 and words", "and-words"),
    ):
        assert text_prompt(text).name == f"1-{name}"
    assert text_prompt("a \ud83d b").text == "a � b"  # a lone surrogate


def test_tokens_are_shown_as_text_bytes_or_numbers_and_separators_are_known():
    gpt2 = get_tokenizer("gpt2")
    texts = token_texts(gpt2.encode_ordinary("a 漢"), gpt2.decode_single_token_bytes)
    assert texts[0] == "a"
    assert all("�" not in text for text in texts)
    assert "".join(texts[1:]).endswith("<0xA2>")  # 漢 is E6 BC A2, in several tokens
    assert token_texts([50300], gpt2.decode_single_token_bytes) == ["<id 50300>"]
    yes = [".", ",", " --", "\n", " \n\n", " ", "…", "?!", "«"]
    no = ["a", "", "1", "$", "don't", "<|endoftext|>", "␣"]
    assert [is_separator(token) for token in yes + no] == [True] * len(yes) + [False] * len(no)
