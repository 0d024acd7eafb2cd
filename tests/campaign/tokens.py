"""Tokens of hundreds of MB of real text: streaming compared with one call of tiktoken.

    make campaign TEXTS=FOLDER          # any folder of texts; files that are not UTF-8 are skipped

The default folder is site-packages of this Python. Not part of `make test`: pytest does not collect
a file with this name.
"""

import os
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from clearhead.tokens.encoding import StreamEncoder
from clearhead.tokens.tokenizers import get_tokenizer

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


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken"])
def test_streamed_tokens_are_those_of_one_call(engine):
    tokenizer, draw, total = get_tokenizer("gpt2"), random.Random(1), 0
    for text in texts():
        if engine == "tiktoken" and total > 200e6:
            break  # ten times slower
        expected = tokenizer.encode_to_numpy(text, allowed_special="all")
        chunk_bytes = draw.choice([2**10, 2**14, 2**18])
        encoder = StreamEncoder(get_tokenizer("gpt2"), engine=engine, chunk_bytes=chunk_bytes)
        blocks, start = [], 0
        while start < len(text):
            end = start + draw.randint(1, 2**20)
            blocks.append(text[start:end].encode())
            start = end
        ids = np.concatenate(list(encoder.encode(blocks)))
        assert np.array_equal(ids, expected)
        assert encoder.text_bytes == len(text.encode())
        total += encoder.text_bytes
        print(f"{engine}: {total / 1e6:,.0f} MB alike", flush=True)
    assert total > 0
