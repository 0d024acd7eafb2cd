"""Typed texts: attention and predictions are those of the model, also with heads switched off."""

import numpy as np
import pytest
import torch
from helpers.foreign import byte_level_tokenizer, foreign_model, sentencepiece_tokenizer
from helpers.models import tiny_model
from torch.nn.functional import cross_entropy

from data import get_tokenizer
from headlens import Reader, capture, lens_tokenizer
from headlens.prompts import make_prompt, signs_of, texts_of
from headlens.recording import record_without
from headlens.snapshot_data import from_codes

TEXT = "The bell rang twice,\nand nobody came."
OFF = [1, 6, 7]  # of four heads in each layer


def model_and_tokenizer(kind):
    if kind == "ours":
        changes = {"vocab_size": 257, "context_length": 64, "num_layers": 3}
        return tiny_model(**changes), get_tokenizer("byte")
    tokenizer = sentencepiece_tokenizer() if kind == "llama" else byte_level_tokenizer()
    return foreign_model(kind, vocab_size=400), tokenizer


def prompts_of(tokenizer):
    tokens = lens_tokenizer(tokenizer)
    return [make_prompt(n, text, tokens, 64) for n, text in enumerate((TEXT, "The fox"))]


def reader_of(model, tokenizer, limit=64, **options):
    prompts = [prompt.token_ids for prompt in prompts_of(tokenizer)]
    return Reader(model, tokenizer, prompts, limit, **options)


@pytest.mark.parametrize("kind", ["ours", "gpt2", "llama", "qwen2", "gpt_neo"])
def test_a_reading_is_what_the_model_does(kind):
    model, tokenizer = model_and_tokenizer(kind)
    prompt = prompts_of(tokenizer)[0]
    model.train()
    reading = reader_of(model, tokenizer).read(TEXT)
    assert model.training
    assert (reading.ids, reading.tokens) == (prompt.token_ids, prompt.tokens)
    assert (reading.texts, reading.labels) == (texts_of(prompt.tokens), prompt.labels)
    assert (reading.signs, reading.truncated) == (signs_of(prompt.tokens), False)
    assert reading.prefix == len(lens_tokenizer(tokenizer).prefix)
    ids = torch.tensor(reading.ids)
    captured = capture(model, ids)
    logits = captured.logits[0].float()
    losses = cross_entropy(logits[:-1], ids[1:], reduction="none")
    np.testing.assert_allclose(reading.losses, losses, atol=1e-4)
    q, k = np.tril_indices(len(ids))
    weights = torch.cat([layer.weights for layer in captured.layers])[..., q, k]  # (L, H, cells)
    assert reading.codes.shape == weights.shape
    assert np.abs(from_codes(reading.codes) - weights.numpy()).max() <= 1 / 255
    norms = torch.cat([layer.value_norms for layer in captured.layers]).numpy()
    largest = np.reshape(reading.largest_norms, (*norms.shape[:2], 1))
    assert (np.abs(from_codes(reading.norms) * largest - norms) <= 2 / 255 * largest).all()
    probabilities = logits.softmax(-1)
    most = probabilities.sort(descending=True)
    np.testing.assert_allclose(reading.likely.probabilities, most.values[:, :5], atol=1e-5)
    np.testing.assert_allclose(reading.next.probabilities, most.values[-1, :40], atol=1e-5)
    for position, found in enumerate([*reading.likely.ids, reading.next.ids]):
        row = probabilities[min(position, len(ids) - 1)]
        np.testing.assert_allclose(row[found], row.sort(descending=True).values[: len(found)])
    again = reader_of(model, tokenizer).read(ids=reading.ids)
    assert again.tokens == reading.tokens
    assert again.losses == reading.losses


@pytest.mark.parametrize("kind", ["ours", "gpt2", "llama", "qwen2", "gpt_neo"])
def test_heads_that_are_off_are_those_of_a_snapshot_without_them(kind):
    model, tokenizer = model_and_tokenizer(kind)
    prompts, group = prompts_of(tokenizer), [divmod(index, 4) for index in OFF]
    token_bytes = lens_tokenizer(tokenizer).token_bytes
    groups, offsets = {"induction": group}, np.full((3, 4), 2)
    found = record_without(model, prompts, groups, offsets, token_bytes)["induction"]
    reader = reader_of(model, tokenizer)
    usual = reader.read(TEXT)
    without = reader.read(TEXT, off=OFF)
    np.testing.assert_allclose(without.losses, found["of_prompts"][0]["losses"], atol=2e-4)
    likely = found["of_prompts"][0]["probabilities"]
    np.testing.assert_allclose(without.likely.probabilities, likely, atol=2e-4)
    assert np.abs(np.subtract(without.losses, usual.losses)).max() > 0.01
    assert (without.codes[0] == usual.codes[0]).all()  # the first layer attends as before
    assert (without.codes[2] != usual.codes[2]).any()
    assert reader.read(TEXT).losses == usual.losses  # and the heads are on again


def test_a_long_text_is_cut():
    model, tokenizer = model_and_tokenizer("ours")
    reader = reader_of(model, tokenizer, limit=8)
    reading = reader.read(TEXT)
    assert ("".join(reading.tokens), reading.truncated) == (TEXT[:8], True)
    assert reader_of(model, tokenizer, limit=10**6).limit == Reader.MOST


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"text": ""},
        {"text": TEXT, "ids": [1]},
        {"ids": []},
        {"ids": [1] * 9},
        {"ids": [257]},
        {"ids": [1], "off": [12]},
        {"ids": [1], "off": [-1]},
    ],
)
def test_what_the_model_does_not_have_is_refused(wrong):
    model, tokenizer = model_and_tokenizer("ours")
    reader = reader_of(model, tokenizer, limit=8)
    with pytest.raises(ValueError, match=r"\w"):
        reader.read(**wrong)


def test_heads_without_a_mean_cannot_be_off():
    model, tokenizer = model_and_tokenizer("ours")
    reader = Reader(model, tokenizer, [], 64)
    with pytest.raises(ValueError, match="prompts"):
        reader.read(TEXT, off=[0])
    assert reader.read(TEXT).losses == reader_of(model, tokenizer).read(TEXT).losses


@pytest.mark.parametrize("kind", ["ours", "llama"])
@pytest.mark.parametrize("off", [(), OFF])
def test_a_call_that_is_stopped_between_layers_changes_nothing(kind, off):
    class Stopped(Exception):
        pass

    model, tokenizer = model_and_tokenizer(kind)
    calls = []

    def check():
        calls.append(1)
        if len(calls) == stop:
            raise Stopped

    reader = reader_of(model, tokenizer, check=check)
    stop = 0
    expected = reader.read(TEXT, off=off).losses
    assert len(calls) >= 4  # at the start, and in each of three layers
    for stop in range(1, 5):
        calls.clear()
        with pytest.raises(Stopped):
            reader.read(TEXT, off=off)
        assert len(calls) == stop
    calls.clear()
    stop = 0
    assert reader.read(TEXT, off=off).losses == expected


def test_parts_are_those_of_the_score_also_with_heads_off():
    model, tokenizer = model_and_tokenizer("ours")
    reader = reader_of(model, tokenizer)
    ids, place = reader.read(TEXT).ids, {"layer": 2, "head": 1, "query": 9, "key": 4}
    score = capture(model, ids).layers[2].scores[0, 1, 9]
    usual, without = (reader.parts(ids, **place, off=off) for off in ((), OFF))
    assert usual.score == pytest.approx(score[4].item(), abs=1e-3)
    assert usual.mean == pytest.approx(score[:10].mean().item(), abs=1e-3)
    assert abs(usual.score - without.score) > 0.01
    weights = reader.read(TEXT, off=OFF).codes[2, 1][45:55]  # the row of query 9
    exponentials = np.exp([reader.parts(ids, 2, 1, 9, key, OFF).score for key in range(10)])
    assert np.abs(exponentials / exponentials.sum() - from_codes(weights)).max() <= 1 / 255
    with pytest.raises(ValueError, match="head 12"):
        reader.parts(ids, **place, off=[12])
