"""tokens/encoding.py: texts of any length, split at any position, compared with one tiktoken call.

Chunks have tens of bytes here instead of a quarter of a megabyte, so that a short text has many.
"""

import functools
import itertools
import random
from collections.abc import Iterable

import numpy as np
import pytest
import regex  # a dependency of tiktoken, for \p{L}
import tiktoken
from helpers.refusals import refused
from helpers.tally import CAMPAIGN, trials
from helpers.texts import FRAGMENTS, encode_at_once, numbers_in
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens import encoding as module
from clearhead.tokens.encoding import BOUNDARY, Gigatoken, StreamEncoder, find_boundary, utf8_blocks
from clearhead.tokens.tokenizer import PATTERNS, get_tokenizer

some = trials(15, 400)

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
WORDS = "One bell rang, then two, then three; nobody came down to the ferry. " * 20


@functools.cache
def kept(engine: str, endoftext: str) -> StreamEncoder:
    name, engine = ("byte", "gigatoken") if engine == "byte" else ("gpt2", engine)
    return StreamEncoder(get_tokenizer(name), endoftext, engine, check_every=10**12)


def encoder_of(engine: str, endoftext: str = "token", chunk_bytes: int = 32) -> StreamEncoder:
    """A cached encoder without its comparison with tiktoken, which the test makes."""
    encoder = kept(engine, endoftext)
    encoder.chunk_bytes, encoder.chunks = chunk_bytes, 1
    return encoder


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint16), *arrays])


def check_ids(encoder: StreamEncoder, text: str, blocks: Iterable[bytes], endoftext="token"):
    """Asserts that the ids equal those of one tiktoken call. Returns the arrays."""
    arrays = list(encoder.encode(blocks))
    assert all(ids.dtype == np.uint16 and len(ids) for ids in arrays)
    expected = encode_at_once(text, encoder.tokenizer.name, endoftext)
    assert np.array_equal(joined(arrays), expected)
    return arrays


@trials(30, 400)
@given(
    st.tuples(mixes, st.integers(1, 5)).map(lambda pair: pair[0] * pair[1]),
    st.sampled_from(["gigatoken", "tiktoken", "byte"]),
    st.sampled_from(["token", "text"]),
    st.integers(32, 100),
    st.integers(1, 60) | st.just(10_000),
)
@example("=" * 159, "gigatoken", "token", 63, 1000)  # a token is longer than a chunk
@example("ÃÂ" * 200, "tiktoken", "token", 32, 1000)
@example("a <|endoftext|> b <|endoftext|>\n\nc" * 9, "gigatoken", "token", 32, 33)
@example("!'s" * 300, "gigatoken", "token", 32, 1000)
@example(f".{'※' * 170}'{'s' * 999}", "tiktoken", "token", 32, 1000)  # not a contraction
def test_streamed_ids_are_those_of_one_call(text, engine, endoftext, piece, size):
    encoder = encoder_of(engine, endoftext, piece)
    for _ in range(2):  # two texts sequentially: the first has no effect on the second
        check_ids(encoder, text, utf8_blocks(text, size), endoftext)


def characters(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


RUNS = [
    *("a", "etaoinsr", "0123456789", "ÃÂ", " ", " \n\t\r\u00a0\u2003\u2028"),
    *("=", "'\"!-.", ["<|", "|>", "|", "<", ">"], ["👩‍👩‍👧", "🇳🇱", "❤️", "🙂"]),
    *(characters(0x3B1, 0x3C9), characters(0x4E00, 0x9FA5), characters(0xAC00, 0xD7A3)),
    characters(0x1F600, 0x1F64F),
]
ENDINGS = ["", " ", "  b", "\n", "a", "1", "!", "'", "'s", "|", "é。", END_OF_TEXT, "<|endof"]


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken", "byte"])
def test_a_run_without_a_cut_has_the_ids_of_one_call(engine):
    draw = random.Random(engine)
    for alphabet, _ in itertools.product(RUNS, range(13 if CAMPAIGN else 2)):
        run = "".join(draw.choices(alphabet, k=draw.randint(3000, 4000)))
        assert find_boundary(run.encode(), 1, len(run.encode())) is None
        text = draw.choice(["", "x ", " ", "'"]) + run + draw.choice(ENDINGS)
        encoder = encoder_of(engine, chunk_bytes=draw.choice([32, 100, 256]))
        arrays = check_ids(encoder, text, utf8_blocks(text, draw.randint(1, 999)))
        assert len(arrays) > 4


def test_a_million_line_ends_before_a_word():
    """tiktoken's pattern fails for all of them in one call, but not for chunks of the real size."""
    text = "a" + "\n" * 1_000_000 + "b c"
    ids = joined(StreamEncoder(get_tokenizer("gpt2"), engine="tiktoken").encode(utf8_blocks(text)))
    assert np.array_equal(ids, module.gigatoken(get_tokenizer("gpt2"), True).encode(text.encode()))


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


def test_engines_agree_on_all_of_unicode():
    """Their versions of Unicode differ: tiktoken encodes text with characters that only gigatoken
    knows."""
    encoder, step = encoder_of("gigatoken", chunk_bytes=2**14), 1 if CAMPAIGN else 16
    blocks = [*range(0, 0xD800, 256), *range(0xE000, 0x40000, 256), 0xE0000, 0xE0100]
    for first in blocks:
        texts = {True: "", False: ""}
        for character in characters(first, first + 255)[first // 256 % step :: step]:
            newer = module.UNICODE_DIFFERENCES.search(character.encode()) is not None
            texts[newer] += f"{character}'s {character}1  {character}!{character}日{character} \n"
        for text in filter(None, texts.values()):
            assert np.array_equal(joined(encoder.encode([text.encode()])), encode_at_once(text))
            cuts = {found.start() for found in BOUNDARY.finditer(text.encode())}
            assert cuts <= pattern_cuts(text), hex(first)


def test_a_difference_from_tiktoken_is_refused(monkeypatch):
    """In the chunks that are checked, every fourth one here."""
    texts, real = [], Gigatoken.encode

    def encode(self, text):
        ids = real(self, text).copy()
        ids[-1] ^= len(texts) == number
        texts.append(text)
        return ids

    monkeypatch.setattr(Gigatoken, "encode", encode)
    for number in range(6):
        texts.clear()
        encoder = StreamEncoder(
            get_tokenizer("gpt2"), engine="gigatoken", chunk_bytes=64, check_every=4
        )
        stream = encoder.encode([WORDS.encode()], "words.txt", offset=5)
        if number % 4:
            assert len(joined(stream))
            continue
        with refused(DataError, "data.path", "words.txt") as caught:
            list(stream)
        begin, end = sum(map(len, texts[:-1])), sum(map(len, texts))
        assert {5 + begin, 5 + end} <= numbers_in(caught.value)
        assert "engine=tiktoken" in caught.value.hint


def test_the_engine_that_is_used():
    for tokenizer, engine, used in (
        ("gpt2", "gigatoken", "gigatoken"),
        ("gpt2", "tiktoken", "tiktoken"),
        ("byte", "gigatoken", "numpy"),
    ):
        encoder = StreamEncoder(get_tokenizer(tokenizer), engine=engine)
        assert encoder.engine == used
        check_ids(encoder, WORDS * 100, utf8_blocks(WORDS * 100))
