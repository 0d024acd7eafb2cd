"""tokens/encoding.py: texts of any length, split at any position, compared with one tiktoken call.

Chunks have tens of bytes here instead of 64 KiB, so that a short text has many.
"""

import functools
import itertools
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import regex  # a dependency of tiktoken, for \p{L}
import tiktoken
from helpers.refusals import time_limit
from helpers.tally import CAMPAIGN, trials
from helpers.texts import FRAGMENTS, encode_at_once
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.encoding import BOUNDARY, StreamEncoder, find_boundary, utf8_blocks
from clearhead.tokens.sources import encode_files
from clearhead.tokens.tokenizer import PATTERNS, Tokenizer, get_tokenizer

FRAGMENTS = [
    *FRAGMENTS,
    *"\x0b\x0c\x1d\x1f\u1680\u180e\u2003\u2029\u00ad\0ls½…Ⅷ１\U0001d7d9\u0301\u088f_-=|",
    *("I'M", "''", "x'", "'ll", "...", "aa", "ÃÂ", " \u00a0 ", "❤️", "สวัสดี", "한국어", "カタカナー"),
    *("。", "、", "「", "，", "：", "“", "endoftext", "<|", "|>", "||", "<", ">"),
]
fragments = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
# Each fragment once or many times: long text of one kind, and changes of the kind.
repeated = st.tuples(fragments, st.sampled_from([1, 1, 1, 2, 7, 60])).map(
    lambda pair: "".join([pair[0]] * pair[1])
)
mixes = st.lists(repeated, max_size=40).map("".join)


def check_ids(name: str, text: str, blocks: Iterable[bytes], chunk_bytes: int) -> None:
    """Asserts that the ids equal those of one tiktoken call."""
    arrays = list(StreamEncoder(get_tokenizer(name), chunk_bytes).encode(blocks))
    assert all(ids.dtype == np.uint16 and len(ids) for ids in arrays)
    assert np.array_equal(np.concatenate([[], *arrays]), encode_at_once(text, name))


@trials(40, 600)
@given(
    st.tuples(mixes, st.integers(1, 5)).map(lambda pair: pair[0] * pair[1]),
    st.sampled_from(["gpt2", "byte"]),
    st.integers(32, 100),
    st.integers(1, 60) | st.just(10_000),
)
@example("=" * 159, "gpt2", 63, 1000)  # a token is longer than a chunk
@example("ÃÂ" * 200, "gpt2", 32, 1000)
@example("a <|endoftext|> b <|endoftext|>\n\nc" * 9, "gpt2", 32, 33)
@example("!'s" * 300, "gpt2", 32, 1000)
@example(f".{'※' * 170}'{'s' * 999}", "gpt2", 32, 1000)  # not a contraction
@example(END_OF_TEXT * 300, "gpt2", 32, 1000)
def test_streamed_ids_are_those_of_one_call(text, name, chunk_bytes, size):
    check_ids(name, text, utf8_blocks(text, size), chunk_bytes)


# Most have a boundary inside. The first one ends a text.
SPECIAL = ["</s>", "<s>", "<fim_prefix>", "a1 b2!c", "\nUser: ", "x\n\ny 3", " 漢 é", "-5", "...1"]


@functools.cache
def chat_tokenizer(pattern: str) -> Tokenizer:
    ranks = get_tokenizer("gpt2").ranks
    special = {name: len(ranks) + number for number, name in enumerate(SPECIAL)}
    return Tokenizer(ranks, pattern, special, end=SPECIAL[0])


special_mixes = st.lists(
    st.sampled_from([*SPECIAL, *"<s>1 \na5.", " 漢", "<fim", "a1 b2", "\nUser", END_OF_TEXT])
    | fragments,
    max_size=60,
).map(lambda parts: "x" + "".join(parts).replace("\0", ""))  # a file starts with no BOM


@trials(60, 600)
@given(
    special_mixes,
    st.sampled_from([*PATTERNS]),
    st.integers(32, 100),
    st.integers(1, 60),
    st.integers(1, 40),
)
@example("a1 b2!c" * 90, "gpt2", 32, 7, 20)
@example("<s>" * 300 + "x", "gpt2", 32, 1000, 20)
@example("x" * 62 + "a1 b2!c", "gpt2", 32, 1, 20)  # read in part when a chunk is full
@example(" 漢 é" * 90, "qwen35", 33, 20, 20)
def test_special_tokens_of_chunks_and_parts_are_those_of_one_call(
    text, pattern, chunk_bytes, size, part_bytes
):
    """They have boundaries inside, and lie across the ends of blocks, chunks and parts of files."""
    tokenizer = chat_tokenizer(pattern)
    expected = tokenizer.encode(text, allowed_special="all")
    arrays = StreamEncoder(tokenizer, chunk_bytes).encode(utf8_blocks(text, size))
    assert np.concatenate([[], *arrays]).tolist() == expected
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "a.txt")
        file.write_bytes(text.encode())
        patch.setattr("clearhead.tokens.sources.PART_BYTES", part_bytes)
        found, *_ = encode_files([str(file)], tokenizer)
    starts = [tokenizer.eot_token] * (expected[0] != tokenizer.eot_token)
    assert found.tolist() == starts + expected


def characters(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


RUNS = [
    *("a", "etaoinsr", "0123456789", "ÃÂ", " ", " \n\t\r\u00a0\u2003\u2028"),
    *("=", "'\"!-.", ["<|", "|>", "|", "<", ">"], ["👩‍👩‍👧", "🇳🇱", "❤️", "🙂"]),
    *(characters(0x3B1, 0x3C9), characters(0x4E00, 0x9FA5), characters(0xAC00, 0xD7A3)),
    characters(0x1F600, 0x1F64F),
]
ENDINGS = ["", " ", "  b", "\n", "a", "1", "!", "'", "'s", "|", "é。", END_OF_TEXT, "<|endof"]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_run_without_a_cut_has_the_ids_of_one_call(name):
    draw = random.Random(name)
    for alphabet, _ in itertools.product(RUNS, range(13 if CAMPAIGN else 2)):
        run = "".join(draw.choices(alphabet, k=draw.randint(3000, 4000)))
        assert find_boundary(run.encode(), 1, len(run.encode())) is None
        text = draw.choice(["", "x ", " ", "'"]) + run + draw.choice(ENDINGS)
        check_ids(name, text, utf8_blocks(text, draw.randint(1, 999)), draw.choice([32, 100, 256]))


def test_a_million_equal_characters():
    text = "b" + "a" * 1_000_000 + " c"
    with time_limit():
        check_ids("gpt2", text, utf8_blocks(text), 2**16)


def pattern_cuts(text: str) -> set[int]:
    """The positions in bytes where a match of every pattern starts."""
    starts = [
        {len(text[: match.start()].encode()) for match in regex.finditer(pattern, text)}
        for pattern in PATTERNS.values()
    ]
    return set.intersection(*starts)


@functools.cache
def is_cut(before: str, right: str) -> bool:
    """Whether there is a boundary between two neighbours. before: the left one, and the character
    before it."""
    place = len(before.encode())
    return find_boundary((before + right).encode(), place, place + 1) == place


def cuts_of(text: str) -> list[int]:
    """The plain definition of find_boundary: each pair of neighbours separately."""
    places = range(1, len(text))
    return [len(text[:n].encode()) for n in places if is_cut(text[max(0, n - 2) : n], text[n])]


def test_cuts_between_two_characters_are_those_of_tiktoken():
    """For each character followed by one of each kind, and for all pairs of ASCII characters: one
    match of a pattern, or two with every pattern.

    tiktoken encodes a match that is in the vocabulary as one id. The vocabulary in this test
    consists of all these pairs, so one id means one match.
    """
    codes = [*range(0x3400), *range(0x3400, 0xD800, 16), *range(0xE000, 0x20000, 5)]
    alphabet = [chr(code) for code in [*codes, *range(0x2F800, 0x2FA1E, 5)]]
    neighbours = [*itertools.product(alphabet, "a1!\u2003")]
    neighbours += itertools.product(alphabet[:128], repeat=2)
    words = [bytes([byte]) for byte in range(256)] + ["".join(pair).encode() for pair in neighbours]
    ranks = {word: rank for rank, word in enumerate(dict.fromkeys(words))}
    cuts = {pair for pair in neighbours if is_cut(*pair)}
    parted = {*neighbours}
    for pattern in PATTERNS.values():
        pairs = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        parted = {pair for pair in parted if len(pairs.encode_ordinary("".join(pair))) > 1}
    assert cuts <= parted
    # All of them between visible ASCII characters.
    skipped = {*"|'\x1c\x1d\x1e\x1f"}
    assert cuts >= {
        (left, right)
        for left, right in parted
        if " " < left <= "\x7f" >= right not in "\n\v\f\r" and not {left, right} & skipped
    }


@trials(30, 400)
@given(mixes | st.text(), st.integers(0, 1000), st.integers(0, 1000))
@example("abc def", 0, 2)
@example("日本語", 0, 7)
@example("'sé", 0, 2)
@example(f"|{END_OF_TEXT}|", 0, 90)
def test_the_first_cut_is_found_and_is_one_of_the_pattern(text, start, length):
    """In the text, and in a byte range of it with four bytes before it, as in a part of a file."""
    whole, cuts = text.encode(), cuts_of(text)
    assert set(cuts) <= pattern_cuts(text)
    begin = whole.find(END_OF_TEXT.encode())
    inside = range(begin + 1, begin + len(END_OF_TEXT)) if begin >= 0 else ()
    assert not set(inside) & {*cuts, *(found.start() for found in BOUNDARY.finditer(whole))}
    start = 1 + start % max(1, len(whole))
    for stop in (min(start + length % 20, len(whole)), len(whole)):
        first = next((cut for cut in cuts if start <= cut < stop), None)
        assert find_boundary(whole, start, stop) == first
        end = len(whole[:stop].decode(errors="ignore").encode())  # without a split character
        base = start - min(4, start)
        found = find_boundary(whole[base:stop], start - base, stop - base)
        expected = next((cut for cut in cuts if start <= cut < end), None)
        assert (found if found is None else found + base) == expected
