"""Tokens of hundreds of MB of real text: streaming compared with one call of tiktoken and, for a
tokenizer that is trained on these texts, with Hugging Face's `tokenizers`.

    make campaign TEXTS=FOLDER          # any folder of texts; files that are not UTF-8 are skipped

The default folder is site-packages of this Python. Not part of `make test`: pytest does not collect
a file with this name.
"""

import functools
import itertools
import os
import random
import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.texts import FRAGMENTS

from clearhead.tokens.encoding import StreamEncoder, concatenate, utf8_blocks
from clearhead.tokens.tokenizer import Sample, get_tokenizer, train_tokenizer
from clearhead.tokens.tokenizer_json import to_json

GROUP = 20_000_000  # bytes that one call encodes
FOLDER = os.environ.get("TEXTS") or sysconfig.get_path("purelib")


def texts():
    """Yields the texts of the folder in random order, joined to strings of about GROUP bytes."""
    files = sorted(path for path in Path(FOLDER).rglob("*") if path.is_file())
    random.Random(0).shuffle(files)
    group, size = [], 0
    for path in files:
        try:
            text = path.read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue
        if "\0" in text:
            continue
        group.append(text)
        size += len(text.encode())
        if size >= GROUP:
            yield "".join(group)
            group, size = [], 0
    if group:
        yield "".join(group)


@functools.cache
def tokenizer_of(name):
    """gpt2, or "trained": 16,384 ids, of a part of all texts."""
    if name == "gpt2":
        return get_tokenizer("gpt2")
    sample = Sample(limit=10**7)
    for text in texts():
        sample.add(text.encode())
    return train_tokenizer(sample, 16384)


@pytest.mark.parametrize("name", ["gpt2", "trained"])
def test_streamed_tokens_are_those_of_one_call(name):
    tokenizer, draw, total = tokenizer_of(name), random.Random(1), 0
    for text in itertools.islice(texts(), 10):
        expected = tokenizer.encode_to_numpy(text, allowed_special="all")
        encoder = StreamEncoder(tokenizer, draw.choice([2**10, 2**14, 2**18]))
        ids = concatenate(encoder.encode(utf8_blocks(text, draw.randint(1, 2**20))))
        assert np.array_equal(ids, expected)
        assert tokenizer.decode(ids.tolist()) == text
        total += len(text.encode())
        print(f"{name}: {total / 1e6:,.0f} MB alike", flush=True)
    assert total > 0


@pytest.mark.parametrize("name", ["gpt2", "trained"])
def test_tokens_are_those_of_tokenizers(name):
    """60 MB of the texts in parts of 100,000 characters, and 100,000 random strings of characters
    that Python's version of Unicode knows."""
    ours, total, draw = tokenizer_of(name), 0, random.Random(2)
    theirs = tokenizers.Tokenizer.from_str(to_json(ours).decode())

    def check(text):
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids, text[:200]

    for text in itertools.islice(texts(), 3):
        for start in range(0, len(text), 100_000):
            check(part := text[start : start + 100_000])
            total += len(part.encode())
        print(f"{name}, tokenizers: {total / 1e6:,.0f} MB alike", flush=True)
    known = [chr(n) for n in range(0x110000) if unicodedata.category(chr(n)) not in ("Cn", "Cs")]
    for _ in range(100_000):
        kinds = draw.choice([FRAGMENTS, known, known[:3000], known[:200] + FRAGMENTS])
        check("".join(draw.choices(kinds, k=draw.randint(1, 40))))
