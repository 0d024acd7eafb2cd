"""from_arrays and show: attention weights as arrays of numpy, torch and other libraries."""

import html
import re

import numpy as np
import pytest
import torch
from helpers import pages

from headlens import from_arrays, show, write_page
from headlens.heads import ALL_NAMES

TOKENS = ["The", " bell", " rang", ",", " and", " the", " bell", " rang"]
T = len(TOKENS)


def weights(seed=0, layers=2, scale=1.0):
    """Returns attention weights, (L, 3, T, T), fp64."""
    scores = scale * np.random.default_rng(seed).normal(size=(layers, 3, T, T))
    raw = np.exp(scores) * np.tri(T)
    return raw / raw.sum(-1, keepdims=True)


def squares(data):
    """Returns the weights of a snapshot, (L, H, T, T)."""
    found = np.zeros((*data.codes[0].shape[:2], T, T))
    found[..., *np.tril_indices(T)] = (data.codes[0] / 255) ** 2
    return found


GIVEN = weights()
FORMS = {
    "numpy": GIVEN,
    "bf16 with gradients": torch.tensor(GIVEN, requires_grad=True).bfloat16(),
    "batch of one": GIVEN[:, None],
    "layers of transformers": (*torch.tensor(GIVEN)[:, None],),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_one_step(form):
    (data,) = from_arrays(FORMS[form], TOKENS, name="own")
    assert (data.step, data.run, data.prompts[0].tokens) == (0, "own", TOKENS)
    assert np.abs(squares(data) - GIVEN).max() < 0.01
    expected = np.diagonal(GIVEN, -1, 2, 3).mean(-1)
    np.testing.assert_allclose(data.row.values["previous_token"], expected, atol=3e-3)


def test_one_layer_and_steps():
    (one,) = from_arrays(GIVEN[0], TOKENS)
    assert np.abs(squares(one)[0] - GIVEN[0]).max() < 0.01
    assert one.row.layers == [0]
    (layers,) = from_arrays([*torch.tensor(GIVEN)[:, None]], TOKENS)  # as transformers' attentions
    assert np.abs(squares(layers) - GIVEN).max() < 0.01
    assert len(from_arrays([GIVEN[0], GIVEN[1]], TOKENS, steps=[0, 1])) == 2
    many = from_arrays([GIVEN, weights(1), weights(2)], TOKENS, steps=[5, 10, 40])
    assert [data.step for data in many] == [5, 10, 40]
    assert np.abs(squares(many[2]) - weights(2)).max() < 0.01


def test_induction_on_random_tokens_that_repeat():
    random = [f" {letter}" for letter in "abcdefghijkl"]
    tokens, period = ["<s>", *random, *random], 12
    places = np.arange(25)
    induction = np.eye(25)[np.where(places > period, places - period + 1, 0)]
    (data,) = from_arrays(induction[None], tokens)
    assert data.row.values["induction"][0, 0] == pytest.approx(1, abs=0.01)
    assert ALL_NAMES[data.row.names[0, 0]] == "induction"


@pytest.mark.parametrize("num_tokens", [3, 5, 8, 12, 20])
def test_random_weights_on_a_short_text_have_no_names(num_tokens):
    random = np.random.default_rng(num_tokens)
    scores = 2 * random.normal(size=(4, 16, num_tokens, num_tokens))
    raw = np.exp(scores) * np.tri(num_tokens)
    (data,) = from_arrays(raw / raw.sum(-1, keepdims=True), [f" {n}" for n in range(num_tokens)])
    assert {ALL_NAMES[name] for name in data.row.names.flat} <= {"", "uniform"}


def test_pieces_of_tokenizers_are_texts():
    """Also for the statistics: a piece such as "Ġ," would be no separator."""
    for pieces in (
        ["The", "Ġbell", "Ġrang", ",", "Ġand", "Ġthe", "Ġbell", "Ġrang"],
        ["The", "▁bell", "▁rang", ",", "▁and", "▁the", "▁bell", "▁rang"],
    ):
        (data,) = from_arrays(GIVEN, pieces)
        assert data.prompts[0].tokens == TOKENS
    (parts,) = from_arrays(GIVEN, ["Ġ", "Ã", "©", *"abcde"])
    assert parts.prompts[0].tokens[:3] == [" ", "<0xC3>", "<0xA9>"]


def test_words_without_spaces_are_apart_in_running_text():
    """A word-level tokenizer drops the spaces. Labels are the words, and other scripts and pieces
    of one word stay as they are."""
    words = ["<s>", "The", "bell", "rang", ",", "she", "said", "."]
    (data,) = from_arrays(GIVEN, words)
    assert data.prompts[0].labels == words
    assert "".join(data.prompts[0].texts) == "<s> The bell rang, she said."
    assert data.prompts[0].title == "<s> The bell rang, she said."
    for together in ("abcdefgh", TOKENS, ["語", "の"] * 4):
        (data,) = from_arrays(GIVEN, [*together])
        assert "".join(data.prompts[0].texts) == "".join(together)


def test_arrays_are_not_verified():
    (data,) = from_arrays(GIVEN, TOKENS)
    assert "not verified" in data.proof


NAN, SUNK = GIVEN.copy(), GIVEN.copy()
NAN[1, 2, 5] = np.nan
SUNK[:, 1] *= 0.6


@pytest.mark.parametrize(
    ("given", "tokens", "expected"),
    [
        (np.log(GIVEN + 1e-9), TOKENS, "scores"),
        (np.where(np.tri(T), np.log(GIVEN + 1e-9), -np.inf), TOKENS, "scores"),
        (NAN, TOKENS, "layer 1, head 2"),
        (torch.dropout(torch.tensor(GIVEN), 0.2, train=True), TOKENS, "dropout"),
        (SUNK, TOKENS, "sink"),
        (GIVEN.swapaxes(-1, -2), TOKENS, "transpose"),
        (np.full((2, 3, T, T), 1 / T), TOKENS, "future"),
        (GIVEN, TOKENS[1:], re.escape("(2, 3, 8, 8)")),
        (GIVEN[0, 0], TOKENS, re.escape("(8, 8)")),
        (np.stack([GIVEN, GIVEN], 1), TOKENS, re.escape("(2, 2, 3, 8, 8)")),
        ([], TOKENS, "steps"),
        (GIVEN, " ".join(TOKENS), "tokens"),
        (GIVEN, range(T), "tokens"),
        (None, TOKENS, "None"),
        ((GIVEN[0], None), TOKENS, "None"),
        ([None, None], TOKENS, "None"),
        ((GIVEN[0], GIVEN[1, :2]), TOKENS, re.escape("[(3, 8, 8), (2, 8, 8)]")),
        ([GIVEN, GIVEN[:, :2]], TOKENS, re.escape("[(2, 3, 8, 8), (2, 2, 8, 8)]")),
    ],
)
def test_what_is_no_attention_is_refused_with_one_line(given, tokens, expected):
    torch.manual_seed(0)
    with pytest.raises((ValueError, TypeError), match=expected) as raised:
        from_arrays(given, tokens)
    assert "\n" not in str(raised.value)


def test_rows_with_a_learned_sink():
    (data,) = from_arrays(SUNK, TOKENS, has_sink=True)
    assert np.abs(squares(data) - SUNK).max() < 0.01


def shown(value, path):
    """Returns the runs of a page in a notebook."""
    (source,) = re.findall('srcdoc="([^"]*)"', value.data)
    path.write_text(html.unescape(source), encoding="utf-8")
    return pages.read(path)


def test_pages(tmp_path):
    path = tmp_path / "page.html"
    (one,) = shown(show(GIVEN, TOKENS), path)
    assert one["prompts"][0]["tokens"] == TOKENS
    (steps,) = shown(show([GIVEN, weights(1)], TOKENS, [3, 7]), path)
    assert [frame["step"] for frame in steps["frames"]] == [3, 7]
    two = shown(show({"before": GIVEN, "after": weights(1, 3)}, TOKENS), path)
    assert [(run["name"], run["layers"]) for run in two] == [("before", 2), ("after", 3)]
    write_page(path, from_arrays(GIVEN, TOKENS))
    (written,) = pages.read(path)
    assert written["frames"] == one["frames"]
    for given, more in ((dict.fromkeys("abc", GIVEN), (TOKENS,)), (GIVEN, ())):
        with pytest.raises((ValueError, TypeError)):
            show(given, *more)
