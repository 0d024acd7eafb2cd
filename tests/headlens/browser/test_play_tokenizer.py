"""The tokenizer of the page (tokenizer.js) in Chromium: the same ids, texts, labels and signs as in
Python, for texts in many scripts."""

import functools
import json
import random
import unicodedata

import pytest
from helpers.pages import module_page

from clearhead.output.play import packed_tokenizer
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.tokenizer import PATTERNS, Sample, Tokenizer, get_tokenizer, train_tokenizer
from headlens.prompts import labels_of, make_prompt, signs_of, texts_of, token_texts
from headlens.tokens import lens_tokenizer

# Browsers and Python have different versions of Unicode. So the characters are those of Unicode
# 3.2, and some that no version will change.
KNOWN = unicodedata.ucd_3_2_0


def characters(*ranges):
    codes = (chr(code) for first, last in ranges for code in range(first, last + 1))
    return [c for c in codes if KNOWN.category(c) != "Cn"]


CONTRACTIONS = ["'s", "'S", "'ſ", "'t", "'RE", "'Ve", "'lL", "'d"]
ALPHABETS = [
    characters((0x20, 0x7E)),
    characters((0x61, 0x7A)),
    characters((0xA0, 0x24F)),  # also of German and French
    characters((0x300, 0x36F)),  # combining marks
    characters((0x370, 0x3FF), (0x400, 0x4FF)),  # Greek, Cyrillic
    characters((0x590, 0x5FF), (0x600, 0x6FF)),  # Hebrew, Arabic
    characters((0x900, 0x97F)),  # Hindi
    characters((0xE00, 0xE7F)),  # Thai
    characters((0x3040, 0x30FF), (0x4E00, 0x4E40), (0xAC00, 0xAC40)),  # Japanese, Chinese, Korean
    characters((0x660, 0x669), (0x966, 0x96F), (0x2150, 0x218F), (0x2460, 0x24FF)),  # numbers
    characters((0x1D400, 0x1D7FF)),  # letters and digits of four bytes
    characters((0x2000, 0x206F), (0x1680, 0x1680), (0x3000, 0x3000)),  # spaces, and what is unseen
    [*"\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u200b\u2028\u2029\u202f\u205f\ufeff"],
    characters((0, 0x1F), (0x7F, 0x9F)),
    ["\ud800", "\udbff", "\udc00", "\udfff", "\ud83d", "\ude00"],
    ["\ue000", "\uf8ff", "\U0010fffd", "\ufffe", "\ufdd0", "\U0001ffff", "\ufffd"],
    [*"😀👩👩🏽🇩🇪❤", "👩\u200d👩\u200d👧", "❤\ufe0f", "\u200d", "\u200c", "\U0001f3fd"],
    [*CONTRACTIONS, "'K", "\u2019s", "'", "ſ", "\u212a"],
    ["<0x41>", "<0xE3>", "<|endoftext|>", "<0x", "¹", "²", "␣", "⏎", "∅", "…"],
    [" the", " and", "the ", "ing", "  ", "\r\n", "\n\n", "11", "...", "aaaa"],
]


def random_texts(count):
    draw = random.Random(0)
    every = [c for alphabet in ALPHABETS for c in alphabet]
    texts = ["".join(every[at : at + 40]) for at in range(0, len(every), 40)]
    texts += [f"it{contraction}{letter}bc" for contraction in CONTRACTIONS for letter in "aegkz"]
    while len(texts) < count:
        kinds = draw.choices(ALPHABETS, k=draw.randint(1, 3))
        texts.append("".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 30))))
    return texts


def a_trained_tokenizer():
    sample = Sample()
    for text in random_texts(3000):
        sample.add((text * 3).encode("utf-8", "ignore"))
    return train_tokenizer(sample, 3000)


def pairs_tokenizer(pattern):
    """Every two bytes are a token, so the ids depend on where the pattern splits a text. Its other
    tokens look like text."""
    words = [bytes([byte]) for byte in range(256)]
    pairs = [left + right for left in words for right in words]
    random.Random(3).shuffle(pairs)
    pairs.sort(key=lambda pair: min(pair) > 127)  # the pairs inside a character come last
    ranks = {word: number for number, word in enumerate(words + pairs)}
    special = ["ing", "<0x41>", END_OF_TEXT]
    return Tokenizer(ranks, pattern, {name: len(ranks) + n for n, name in enumerate(special)})


COUNT = 1000  # texts; 10,000 were compared once
TOKENIZERS = {
    "byte": lambda: get_tokenizer("byte"),
    "gpt2": lambda: get_tokenizer("gpt2"),
    "own": a_trained_tokenizer,
} | {f"pairs-{pattern}": functools.partial(pairs_tokenizer, pattern) for pattern in PATTERNS}
DESCRIBED = """(texts) => JSON.parse(texts).map((text) => {
  const ids = tokenizer.encode(text);
  const { tokens, texts, labels, signs } = tokenizer.describe(ids);
  return [ids, tokens, texts, labels, signs];
})"""


@pytest.fixture
def page(opened, tmp_path):
    return module_page(opened, tmp_path, "tokenizer.js", "readTokenizer")


def use(page, tokenizer):
    code = "async (packed) => { window.tokenizer = await readTokenizer(packed); }"
    page.evaluate(code, packed_tokenizer(tokenizer))


def expected(tokenizer, text):
    prompt = make_prompt(1, text, lens_tokenizer(tokenizer), 10**6)
    tokens = prompt.tokens
    return [prompt.token_ids, tokens, texts_of(tokens), labels_of(tokens), signs_of(tokens)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_and_labels_are_those_of_python(page, name):
    tokenizer, texts = TOKENIZERS[name](), random_texts(COUNT)
    use(page, tokenizer)
    found = page.evaluate(DESCRIBED, json.dumps(texts))
    for text, of_page in zip(texts, found, strict=True):
        assert of_page == expected(tokenizer, text), ascii(text)


def is_known(tokenizer, ids):
    """Returns whether all characters of tokens are those of Unicode 3.2."""
    content = b"".join(tokenizer.decode_single_token_bytes(i) for i in ids if i < tokenizer.n_vocab)
    return all(KNOWN.category(c) != "Cn" for c in content.decode("utf-8", "ignore"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_generated_ids_have_the_labels_of_python(page, name):
    """They may begin inside a character, and be beyond the vocabulary of the tokenizer."""
    tokenizer, draw = TOKENIZERS[name](), random.Random(1)
    use(page, tokenizer)
    some = [*range(128, 256), *draw.sample(range(tokenizer.n_vocab), 200)]
    some += [*tokenizer.special.values(), tokenizer.n_vocab, tokenizer.n_vocab + 46]
    lists = [draw.choices(some, k=draw.randint(1, 40)) for _ in range(300)]
    lists = [ids for ids in lists if is_known(tokenizer, ids)]
    assert len(lists) > 100
    found = page.evaluate("(lists) => lists.map((ids) => tokenizer.describe(ids))", lists)
    token_bytes = tokenizer.decode_single_token_bytes
    for ids, of_page in zip(lists, found, strict=True):
        tokens = token_texts(ids, token_bytes)
        wanted = {"tokens": tokens, "texts": texts_of(tokens), "labels": labels_of(tokens)}
        assert of_page == wanted | {"signs": signs_of(tokens)}
    labels = page.evaluate("(ids) => ids.map((id) => tokenizer.label(id))", some)
    assert labels == [labels_of([text])[0] for text in token_texts(some, token_bytes)]


def test_only_the_beginning_of_a_long_text_is_encoded(page):
    tokenizer = get_tokenizer("gpt2")
    use(page, tokenizer)
    text = "The ferry bell rang. " * 50_000
    ids = page.evaluate("([text, most]) => tokenizer.encode(text, most)", [text, 64])
    assert 64 < len(ids) < 100
    assert ids == tokenizer.encode_ordinary(text[:10_000])[: len(ids)]


def test_a_long_word_is_encoded(page):
    tokenizer, draw = a_trained_tokenizer(), random.Random(2)
    use(page, tokenizer)
    for text in ("a" * 20_000, "".join(draw.choice("etaoin") for _ in range(20_000))):
        assert page.evaluate("(text) => tokenizer.encode(text)", text) == tokenizer.encode(text)
