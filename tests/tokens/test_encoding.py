"""tokens/encoding.py: texts of any length, cut at any places, against one call of tiktoken.

Needs no network and no files but corpus/sample.txt.
The pieces are tiny here, tens of bytes instead of a quarter of a megabyte, so that a short text
has many; that cuts did happen is asserted besides.
"""

import functools
import importlib
import importlib.util
import itertools
import mmap
import random
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import regex  # tiktoken's own dependency: its engine knows \p{L}
import tiktoken
from helpers import REPOSITORY
from helpers.refusals import check_refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from errors import DataError
from tokens import END_OF_TEXT
from tokens import encoding as module
from tokens.encoding import Gigatoken, StreamEncoder, character_end, find_cut, text_blocks
from tokens.tokenizers import get_tokenizer

SAMPLE = REPOSITORY / "corpus" / "sample.txt"

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

FRAGMENTS = [
    *" \n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\u00a0\u1680\u180e\u2003\u2028\u2029\u202f\u205f\u3000",
    *("\u200b", "\ufeff", "\u00ad", "\0", "  ", "\r\n", "\n\n\n", "\n ", " \n", " \u00a0 "),
    *("the", "Naïve", "don't", "we'll", "I'M", "'s", "'", "''", "x'", "'ll", "l", "s", "1234", "½"),
    *("...", "_", "-", "=", "e\u0301", "\u0301", "aa", "ab", "ÃÂ", "Ⅷ", "１２", "\U0001d7d9"),
    *("日本語", "ひらがな", "カタカナー", "한국어", "。", "、", "「", "」", "，", "：", "“", "”"),
    *("Ελλάδα", "שלום", "नमस्ते", "สวัสดีครับ", "🙂", "👩‍👩‍👧", "🇳🇱", "❤️", "…", "\u088f"),
    *(END_OF_TEXT, "<|endof", "text|>", "endoftext", "<|", "|>", "|", "||", "<", ">"),
]
WORDS = b"One bell rang, then two, then three; nobody came down to the ferry. " * 20

fragments = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
# Each fragment once or many times: runs of one kind besides the changes from kind to kind.
repeated = st.tuples(fragments, st.sampled_from([1, 1, 1, 2, 7, 60])).map(
    lambda pair: "".join([pair[0]] * pair[1])
)
mixes = st.lists(repeated, max_size=40).map("".join)
long_mixes = st.tuples(mixes, st.integers(1, 5)).map(lambda pair: pair[0] * pair[1])
pieces = st.integers(32, 100)
engines = st.sampled_from(["gigatoken", "tiktoken", "byte"])
endoftexts = st.sampled_from(["token", "text"])
block_sizes = st.lists(st.integers(0, 60) | st.just(10_000), max_size=8)


def at_once(text: str, name: str = "gpt2", endoftext: str = "token") -> np.ndarray:
    """The ids by a single call of tiktoken."""
    special = {END_OF_TEXT} if endoftext == "token" else set()
    tokenizer = get_tokenizer(name)
    return tokenizer.encode_to_numpy(text, allowed_special=special, disallowed_special=())


@functools.cache
def _kept(engine: str, endoftext: str) -> StreamEncoder:
    name, engine = ("byte", "auto") if engine == "byte" else ("gpt2", engine)
    return StreamEncoder(name, endoftext, engine, check_every=10**12)


def encoder_of(engine: str, endoftext: str = "token", piece: int = 32) -> StreamEncoder:
    """An encoder that leaves the comparing to the test; made once, for making one takes time."""
    encoder = _kept(engine, endoftext)
    encoder.piece, encoder.pieces, encoder.text_bytes = piece, 1, 0
    return encoder


def in_blocks(text: str, sizes: Iterable[int]) -> Iterator[bytes]:
    """The text as blocks of so many characters each, and one with the rest."""
    start = 0
    for size in sizes:
        yield text[start : start + size].encode()
        start += size
    yield text[start:].encode()


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint16), *arrays])


def asked(encoder: StreamEncoder, monkeypatch) -> list[bytes]:
    """A list that receives every text that the encoder's engine is asked for."""
    texts, inner = [], encoder._encode

    def encode(text):
        texts.append(text)
        return inner(text)

    monkeypatch.setattr(encoder, "_encode", encode)
    return texts


# ---------------------------------------------------------------------------- ids of the whole


@settings(many, max_examples=400)
@given(long_mixes, engines, endoftexts, pieces, block_sizes)
@example("=" * 159, "gigatoken", "token", 63, [])  # a token is longer than such a piece
@example("ÃÂ" * 200, "tiktoken", "token", 32, [])
@example("a \u2028 b\x1c c\x1f\n d \n\n e\u00a0 f" * 9, "tiktoken", "token", 32, [])
@example("a <|endoftext|> b <|endoftext|>\n\nc" * 9, "gigatoken", "token", 32, [33] * 9)
@example("||||<|endoftext|>||||" * 40, "gigatoken", "token", 32, [])
@example("!'s" * 300, "gigatoken", "token", 32, [])
def test_streamed_ids_are_those_of_one_call(text, engine, endoftext, piece, sizes):
    encoder = encoder_of(engine, endoftext, piece)
    arrays = list(encoder.encode(in_blocks(text, sizes)))
    assert all(ids.dtype == np.uint16 and len(ids) for ids in arrays)
    expected = at_once(text, encoder.tokenizer.name, endoftext)
    assert joined(arrays).tolist() == expected.tolist()
    assert encoder.text_bytes == len(text.encode())


@settings(some, max_examples=25)
@given(st.lists(mixes, max_size=3), pieces)
def test_an_encoder_takes_text_after_text(texts, piece):
    """Each is a text of its own, and nothing is carried over but the counts."""
    encoder = encoder_of("gigatoken", "token", piece)
    for text in texts:
        ids = joined(encoder.encode([text.encode()]))
        assert ids.tolist() == at_once(text).tolist()
    assert encoder.text_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("blocks", [[], [b""], [b"", b""]])
def test_no_text_has_no_ids(blocks):
    assert list(encoder_of("gigatoken").encode(blocks)) == []


@pytest.mark.parametrize("piece", [-1, 0, 1, 31])
def test_a_piece_has_32_bytes_at_least(piece):
    encoder = StreamEncoder("byte", piece=piece)
    arrays = list(encoder.encode([b"Some words, more than sixty-four bytes. " * 5]))
    assert all(32 <= len(ids) <= 64 for ids in arrays)


@pytest.mark.parametrize("endoftext", ["token", "text"])
@pytest.mark.parametrize("piece", [32, 1000, 2**14])
def test_ids_of_the_sample_text(piece, endoftext):
    text = SAMPLE.read_text(encoding="utf-8")
    text = f"{text}{END_OF_TEXT}\n{text} {END_OF_TEXT}"
    whole = at_once(text, "gpt2", endoftext)
    for engine in ("gigatoken", "tiktoken"):
        encoder = encoder_of(engine, endoftext, piece)
        assert np.array_equal(joined(encoder.encode(text_blocks(text, 5000))), whole)
        assert encoder.pieces > len(text) // (2 * piece)
    assert (get_tokenizer("gpt2").eot_token in whole) == (endoftext == "token")


ORDINARY = {
    "English": "One bell rang, then two; nobody came down to the ferry (it was 6:15).\n",
    "code": "def cut(text,start=1):\n\treturn[x for x in range(start)if text[x]=='|']\n",
    "Chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。",
    "Japanese": "いろはにほへと、ちりぬるを。わがよたれぞ、つねならむ。",
    "Korean": "나랏말싸미 듕귁에 달아, 문자와로 서르 사맛디 아니할쌔.",
    "Russian": "Буря мглою небо кроет, вихри снежные крутя.",
    "Thai, without blanks": "สวัสดีครับ๑๒๓ไทยแลนด์",
    "a table": "left\tright\t12\t13\r",
    "digits and letters": "3f9a01bc77de" * 5,
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_text_is_cut_into_pieces_of_about_the_size(kind, monkeypatch):
    text = ORDINARY[kind] * 200
    encoder = encoder_of("gigatoken", piece=256)
    texts = asked(encoder, monkeypatch)
    ids = joined(encoder.encode(text_blocks(text, 999)))
    assert b"".join(texts).decode() == text
    assert {len(piece) in range(256, 300) for piece in texts[:-1]} == {True}
    assert np.array_equal(ids, at_once(text))


def test_memory_is_a_few_pieces():
    def blocks():
        for number in range(300):
            yield b"Line %d of a text that goes on and on, mostly words.\n" % number * 250

    encoder = encoder_of("tiktoken", piece=2**12)
    warm = sum(len(ids) for ids in encoder.encode([next(blocks())]))
    tracemalloc.start()
    try:
        count = sum(len(ids) for ids in encoder.encode(blocks()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert encoder.text_bytes > 3_500_000
    assert count > 250 * warm
    assert peak < 20 * 2**12  # the rest, a block, a piece, its string and its ids


# ---------------------------------------------------------------------- runs of one kind, no cut


def characters(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


RUNS = {
    "one letter": "a",
    "letters": "abcdefghijklmnopqrstuvwxyz",
    "common letters": "etaoinsr",
    "capitals": "AaBb",
    "Greek": characters(0x3B1, 0x3C9),
    "one digit": "0",
    "digits": "0123456789",
    "blanks": " ",
    "newlines": "\n",
    "tabs and blanks": "\t ",
    "white space": " \n\t\r\u00a0\u2003\u3000\u2028",
    "dashes": "-",
    "equals signs": "=",
    "punctuation": '!"#$%&()*+,-./:;<=>?@[]^_`{}~',
    "apostrophes": "'",
    "punctuation and apostrophes": "'\"!-.",
    "bars": "|",
    "pieces of the end of text": ["<|", "|>", "|", "<", ">"],
    "CJK": characters(0x4E00, 0x9FA5),
    "kana": characters(0x3041, 0x3096),
    "Hangul": characters(0xAC00, 0xD7A3),
    "Thai letters": characters(0xE01, 0xE2E),
    "emoji": characters(0x1F600, 0x1F64F),
    "emoji sequences": ["👩‍👩‍👧", "🇳🇱", "❤️", "🙂"],
    "combining marks": characters(0x300, 0x340),
    "mathematical letters": characters(0x1D400, 0x1D454),
    "misread UTF-8": ["ÃÂ"],
    "misread UTF-8 at random": "ÃÂ",
    "private use": characters(0xE000, 0xE0FF),
}
ENDINGS = ["", " ", "  b", "\n", "a", "1", "!", "'", "'s", "|", "é。", END_OF_TEXT, "<|endof"]
BEGINNINGS = ["", "x ", " ", "'"]


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken", "byte"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_without_a_cut_has_the_ids_of_one_call(kind, engine):
    draw = random.Random(kind)
    for place, ending in enumerate(ENDINGS):
        run = "".join(draw.choices(RUNS[kind], k=6000))
        run = run.encode()[: draw.randint(5000, 6000)].decode(errors="ignore")
        assert find_cut(run.encode(), 1, len(run.encode())) is None
        text = BEGINNINGS[place % len(BEGINNINGS)] + run + ending
        encoder = encoder_of(engine, piece=draw.choice([32, 100, 256]))
        arrays = list(encoder.encode(in_blocks(text, [draw.randint(0, 999) for _ in range(5)])))
        expected = at_once(text, encoder.tokenizer.name)
        assert joined(arrays).tolist() == expected.tolist()
        assert len(arrays) > 4
        assert encoder.text_bytes == len(text.encode())


@pytest.mark.parametrize("character", [*"a \n-'日\u0301"])
def test_a_million_of_one_character(character, monkeypatch):
    """A megabyte at least: the ids are tiktoken's, and the engine never sees more than pieces."""
    text = character * (1_000_000 // len(character.encode()))
    encoder = encoder_of("gigatoken", piece=2**14)
    texts = asked(encoder, monkeypatch)
    ids = joined(encoder.encode(text_blocks(text)))
    assert max(map(len, texts)) <= 3 * 2**14
    assert sum(map(len, texts)) < 1.5 * len(text.encode())
    assert np.array_equal(ids, at_once(text))


@pytest.mark.parametrize("kind", ["one letter", "letters", "digits", "CJK"])
def test_a_run_goes_on_with_another_token_than_was_expected(kind, monkeypatch):
    """What counts is that the last token given out and the next one are the encoding of theirs."""
    encoder = encoder_of("gigatoken", piece=600)
    settled, wrong = encoder._settled, []

    def settle(text, ids):
        count = settled(text, ids)
        ids[count] += 1
        wrong.append(int(ids[count]))
        return count

    monkeypatch.setattr(encoder, "_settled", settle)
    text = "".join(random.Random(kind).choices(RUNS[kind], k=5000))
    arrays = list(encoder.encode([text.encode()]))
    assert np.array_equal(joined(arrays), at_once(text))
    assert [int(ids[0]) + 1 for ids in arrays[1:]] == wrong
    assert len(wrong) > 3


def test_pieces_are_small_again_behind_a_run(monkeypatch):
    encoder = encoder_of("gigatoken", piece=32)
    texts = asked(encoder, monkeypatch)
    text = "=" * 3000 + "\n" + WORDS.decode()
    assert np.array_equal(joined(encoder.encode([text.encode()])), at_once(text))
    assert max(map(len, texts)) > 64
    assert max(map(len, texts[-10:])) <= 64


@pytest.mark.parametrize(
    ("white", "engine"), [(" ", "gigatoken"), ("\n", "tiktoken"), ("\t ", "gigatoken")]
)
def test_a_million_blanks_before_a_word(white, engine):
    """tiktoken's own pattern gives up on them all at once, not on pieces of the real size."""
    text = f"a{white * (1_000_000 // len(white))}b c"
    with pytest.raises(ValueError, match="stack size"):
        at_once(text)
    encoder = StreamEncoder("gpt2", engine=engine, check_every=1)
    ids = joined(encoder.encode(text_blocks(text)))
    assert np.array_equal(ids, Gigatoken(special=True).encode(text.encode()))


def test_a_run_that_cannot_be_continued_is_refused(monkeypatch):
    """It would take a vocabulary whose tokens depend on what comes much later."""
    encoder = encoder_of("tiktoken", piece=300)
    inner, calls, given = encoder._encode, [], []

    def never_after(left):
        """An id that does not stand behind this one: the two would have been merged."""
        together = ((right, single_piece(words()[left] + words()[right])) for right in range(50256))
        return next(right for right, ids in together if ids != [left, right])

    def encode(text):
        calls.append(len(text))
        ids = inner(text).copy()
        if len(calls) == 3:  # the run's first stretch, the look ahead, and now the second stretch
            ids[0] = never_after(given[-1])
        return ids

    monkeypatch.setattr(encoder, "_encode", encode)
    stream = encoder.encode([b"\n" + b"ab" * 2000], "run.txt", offset=5)
    first = next(stream)
    given.extend(first.tolist())
    done = len(encoder.tokenizer.decode_bytes(first.tolist()))
    with pytest.raises(DataError) as caught:
        next(stream)
    assert encoder.text_bytes == done
    cause = f"a run without a break at byte {5 + done} cannot be tokenised in parts"
    check_refusal(caught.value, "data.path=run.txt", cause, "put a line break into it")


# ----------------------------------------------------------------------------------------- cuts

PATTERN = regex.compile(r50k_pat_str)


def pattern_cuts(text: str) -> set[int]:
    """The bytes of a text where a match of the pattern begins."""
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])
    return {int(ends[match.start()]) for match in PATTERN.finditer(text)}


def all_cuts(text: bytes) -> list[int]:
    """Every place that find_cut names."""
    found, start = [], 1
    while start < len(text):
        place = find_cut(text, start, min(start + 64, len(text)))
        found += [] if place is None else [place]
        start = start + 64 if place is None else place + 1
    return found


def always_parted(left: str, right: str) -> bool:
    """The rule of tokens/encoding.py for two neighbours, by itself."""
    if right in " \t\n\r\x0b\x0c" and not left.isspace():
        return True
    kinds = module._kind(left), module._kind(right)
    return None not in kinds and kinds[0] not in ("S", kinds[1]) and left != "'"


def first_cut(text: str, start: int, stop: int) -> int | None:
    """find_cut's plain definition: each two neighbours looked at."""
    place = 0
    for left, right in itertools.pairwise(text):
        place += len(left.encode())
        if start <= place < stop and always_parted(left, right):
            return place
    return None


@many
@given(long_mixes | st.text())
def test_every_cut_is_one_of_the_pattern(text):
    places = all_cuts(text.encode())
    assert set(places) <= pattern_cuts(text)
    tokenizer = get_tokenizer("gpt2")
    whole = tokenizer.encode_ordinary(text)
    for place in places[:20]:
        left, right = text.encode()[:place].decode(), text.encode()[place:].decode()
        assert tokenizer.encode_ordinary(left) + tokenizer.encode_ordinary(right) == whole


def test_cuts_between_any_two_characters():
    """All of ASCII, and some of each other kind."""
    others = "\x85\u00a0\u1680\u180e\u2003\u202f\u205f\u3000é½\u0301\u088f\u200b日。「・々ー가🙂"
    alphabet = characters(0, 127) + others
    for left, right in itertools.product(alphabet, repeat=2):
        place = len(left.encode())
        cut = place if always_parted(left, right) else None
        assert find_cut((left + right).encode(), 1, place + 1) == cut
        assert cut is None or place in pattern_cuts(left + right)


places = st.integers(0, 1000)


@many
@given(mixes | st.text(), places, places)
@example("abc def", 0, 2)
@example("left\tright\0 end\r", 4, 9)
@example("日本語 αβγ1", 3, 18)
def test_the_first_cut_is_found(text, start, length):
    whole = text.encode()
    start = 1 + start % max(1, len(whole))
    for stop in (min(start + length % 20, len(whole)), len(whole)):
        assert find_cut(whole, start, stop) == first_cut(text, start, stop)


@many
@given(mixes | st.text(min_size=2), places, places)
@example("日本語", 0, 7)
def test_a_cut_is_seen_in_a_window_of_the_text(text, start, length):
    """As parts of files are looked at: any bytes, and the four before them."""
    whole = text.encode()
    start = 1 + start % max(1, len(whole))
    stop = min(start + length, len(whole))
    begin = start - min(4, start)
    found = find_cut(whole[begin:stop], start - begin, stop - begin)
    end = character_end(whole, stop)  # the last character may be cut off
    expected = first_cut(whole[:end].decode(), start, end)
    assert (found if found is None else found + begin) == expected


@many
@given(st.lists(st.sampled_from([END_OF_TEXT, *FRAGMENTS]), min_size=1, max_size=12).map("".join))
@example(END_OF_TEXT)
@example(f"é{END_OF_TEXT}é")
@example(f"|{END_OF_TEXT}|")
def test_the_end_of_text_is_never_cut_in_two(text):
    whole = text.encode()
    inside = {
        match.start() + place
        for match in re.finditer(re.escape(END_OF_TEXT.encode()), whole)
        for place in range(1, len(END_OF_TEXT))
    }
    assert inside.isdisjoint(all_cuts(whole))
    for place in inside:  # nor where it is looked for there
        assert find_cut(whole, place, place + 1) is None
    assert inside.isdisjoint(found.start() for found in module.CUT.finditer(whole))


def test_kinds_are_those_of_tiktoken():
    """Each character with one of each kind behind it: a single match, or two.

    tiktoken gives a match that is in the vocabulary as that id: so the made-up one here, of all
    these pairs, shows what the pattern takes together.
    """
    codes = [code for code in range(0x20000) if code >> 11 != 0x1B]
    codes = [code for code in codes if not 0x4E00 <= code < 0xF900 or code % 16 == 0]  # alike
    kinds = {chr(code): module._kind(chr(code)) for code in [*codes, *range(0x2F800, 0x2FA1E)]}
    kinds = {character: kind for character, kind in kinds.items() if kind}
    assert len(kinds) > 20_000
    partners = {"L": "a", "N": "1", "O": "!", "S": "\u2003"}
    ranks = {bytes([byte]): byte for byte in range(256)}
    for character in kinds:
        for partner in partners.values():
            ranks[(character + partner).encode()] = len(ranks)
    pairs = tiktoken.Encoding(
        "pairs", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    together = {
        character: {
            kind
            for kind, partner in partners.items()
            if len(pairs.encode_ordinary(character + partner)) == 1
        }
        for character in kinds
    }
    assert together.pop(" ") == set("LNOS")  # the optional blank
    assert [c for c, found in together.items() if found != {kinds[c]}] == []


@pytest.mark.parametrize(
    "partner",
    [" ", "\n", "\u3000", " \n", "\n ", "a", "1", "!", "'", "'s", "。", "日", "Ⅷ", "é"],
)
def test_any_character_may_stand_on_either_side_of_a_cut(partner):
    """Python's notions of letters, digits and white space differ from tiktoken's: tries the whole
    basic plane."""
    plane = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    alike = range(0x4E00, 0xD7A4)  # ideographs, syllables: one in twenty will do
    text = partner.join(c for c in plane if ord(c) not in alike or ord(c) % 20 == 0)
    whole = text.encode()
    encoder = encoder_of("gigatoken")
    ids = joined(encoder.encode([whole]))
    assert encoder.pieces > len(whole) // 80
    assert np.array_equal(ids, at_once(text))
    # Most wrong cuts would leave the ids as they are, there being no such token to be cut in two.
    assert pattern_cuts(text).issuperset(found.start() for found in module.CUT.finditer(whole))


# ------------------------------------------------------------------- the engines and the check


@pytest.fixture
def checked():
    """A new encoder that checks every third piece."""
    return StreamEncoder("gpt2", engine="gigatoken", piece=64, check_every=3)


def test_the_first_piece_and_every_so_many_are_checked(checked, monkeypatch):
    texts, references = asked(checked, monkeypatch), []
    reference = checked._reference
    monkeypatch.setattr(
        checked, "_reference", lambda text: references.append(text) or reference(text)
    )
    for _ in range(2):  # the count goes on from text to text
        assert joined(checked.encode([WORDS])).tolist() == at_once(WORDS.decode()).tolist()
    assert len(texts) > 30
    assert references == [text.decode() for text in texts[::3]]


@pytest.mark.parametrize("damage", ["another id", "one id less", "one id more"])
@pytest.mark.parametrize("number", range(7))
def test_a_difference_from_tiktoken_is_refused(number, damage, checked, monkeypatch):
    texts, inner = [], checked._encode

    def encode(text):
        texts.append(text)
        ids = inner(text).copy()
        if len(texts) - 1 != number:
            return ids
        if damage == "another id":
            ids[-1] ^= 1
        return ids if damage == "another id" else ids[:-1] if "less" in damage else [*ids, 0]

    monkeypatch.setattr(checked, "_encode", lambda text: np.array(encode(text)))
    if number % 3:  # not looked at
        assert len(joined(checked.encode([WORDS], "words.txt")))
        return
    with pytest.raises(DataError) as caught:
        list(checked.encode([WORDS], "words.txt", offset=5))
    begin, end = sum(map(len, texts[:-1])), sum(map(len, texts))
    assert WORDS[begin:end] == texts[-1]
    cause = f"gigatoken and tiktoken disagree on the text from byte {5 + begin} to {5 + end}"
    check_refusal(caught.value, "data.path=words.txt", cause, "prepare it with engine=tiktoken")
    assert len(texts) == number + 1


@pytest.mark.parametrize(
    ("tokenizer", "engine", "used"),
    [
        ("gpt2", "auto", "gigatoken"),
        ("gpt2", "gigatoken", "gigatoken"),
        ("gpt2", "tiktoken", "tiktoken"),
        ("byte", "auto", "numpy"),
        ("byte", "tiktoken", "numpy"),
    ],
)
def test_the_engine_that_is_used(tokenizer, engine, used):
    encoder = StreamEncoder(tokenizer, engine=engine)
    assert encoder.engine == used
    assert joined(encoder.encode([WORDS])).tolist() == at_once(WORDS.decode(), tokenizer).tolist()


def test_without_gigatoken_tiktoken_encodes(monkeypatch):
    real = importlib.util.find_spec
    get_tokenizer("gpt2")  # looks for a package, too
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gigatoken" else real(name)
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "gigatoken"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(ImportError):
        importlib.import_module("gigatoken.gigatoken_rs")
    encoder = StreamEncoder("gpt2", piece=64)
    assert encoder.engine == "tiktoken"
    assert joined(encoder.encode([WORDS])).tolist() == at_once(WORDS.decode()).tolist()


def test_engines_agree_on_all_of_unicode():
    """Their versions of Unicode differ: what only gigatoken knows is left to tiktoken."""
    encoder = encoder_of("gigatoken")
    for first in [*range(0, 0xD800, 256), *range(0xE000, 0x40000, 256), 0xE0000, 0xE0100]:
        texts = {True: "", False: ""}
        for character in characters(first, first + 255):
            newer = module.NEWER.search(character.encode()) is not None
            texts[newer] += f"{character}'s {character}1  {character}!{character}"
        ids = encoder._gigatoken.encode(texts[False].encode())
        assert np.array_equal(ids, at_once(texts[False])), hex(first)
        ids = encoder._encode(texts[True].encode()) if texts[True] else []
        assert np.array_equal(ids, at_once(texts[True])), hex(first)


# ------------------------------------------------------------------------- gigatoken's memory


@pytest.fixture
def memory(monkeypatch):
    """The memory of this process as the module reads it, to be set; how often it is given back."""
    state = {"resident": 10**9, "given back": 0}

    def give_back():
        state["given back"] += 1

    monkeypatch.setattr(module, "resident_bytes", lambda: state["resident"])
    monkeypatch.setattr(module, "give_back_memory", give_back)
    monkeypatch.setattr(Gigatoken, "LOOK_EVERY", 100)
    return state


def test_gigatoken_is_made_anew_when_the_process_has_grown(memory):
    gigatoken = Gigatoken(special=True)
    expected = at_once(WORDS.decode()).tolist()
    first = gigatoken._tokenizer
    memory["resident"] += Gigatoken.MOST_GROWTH
    assert gigatoken.encode(WORDS).tolist() == expected
    assert gigatoken._tokenizer is first  # grown, but not by more than that
    memory["resident"] += 1
    assert gigatoken.encode(WORDS[:99]).tolist() == at_once(WORDS[:99].decode()).tolist()
    assert gigatoken._tokenizer is first  # not looked at again before so much text
    assert gigatoken.encode(WORDS + b"<|endoftext|>").tolist() == [*expected, 50256]
    second = gigatoken._tokenizer
    assert second is not first
    assert gigatoken.encode(WORDS).tolist() == expected
    assert gigatoken._tokenizer is second  # counted from what the process has now


def test_a_process_has_one_gigatoken_of_each_kind():
    """For each remembers the words that it has seen."""
    with_special, without = (
        {StreamEncoder("gpt2", endoftext, "gigatoken")._gigatoken for _ in range(3)}
        for endoftext in ("token", "text")
    )
    assert len(with_special) == len(without) == 1
    assert with_special != without


def test_gigatoken_stays_when_memory_can_be_given_back(memory, monkeypatch):
    gigatoken = Gigatoken(special=True)
    first = gigatoken._tokenizer
    memory["resident"] += 2 * Gigatoken.MOST_GROWTH
    monkeypatch.setattr(module, "give_back_memory", lambda: memory.update(resident=10**9))
    gigatoken.encode(WORDS)
    assert gigatoken._tokenizer is first


def test_gigatoken_is_made_anew_now_and_then_where_memory_cannot_be_read(memory, monkeypatch):
    memory["resident"] = 0
    monkeypatch.setattr(Gigatoken, "RENEW_EVERY", 3 * len(WORDS))
    gigatoken = Gigatoken(special=False)
    made = [gigatoken._tokenizer]
    for _ in range(9):
        assert gigatoken.encode(WORDS).tolist() == at_once(WORDS.decode()).tolist()
        if gigatoken._tokenizer is not made[-1]:
            made.append(gigatoken._tokenizer)
    assert len(made) == 3  # after each fourth of them


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own figure")
def test_the_memory_of_this_process_is_read():
    before = module.resident_bytes()
    # 64 MB from the system itself: the C library may still hold what other tests have freed.
    held = np.frombuffer(mmap.mmap(-1, 2**26), np.uint8)
    held.fill(1)
    assert 2**24 < before < module.resident_bytes() - held.nbytes // 2
    module.give_back_memory()


# ------------------------------------------------------------------------- strings as UTF-8

HALVES = ["\ud800", "\udbff", "\udc00", "\udfff", "\ud83d", "\ude42", "\ud83d\ude42"]
odd_texts = st.lists(st.sampled_from([*HALVES, "a", "é", "🙂", "\ufeff", "\uffff", " \n"])).map(
    "".join
)


@many
@given(odd_texts | mixes, st.integers(1, 9))
@example("\ufeffabc", 2)
@example("\ud83d\ude42", 1)
@example("\ud83d\ud83d\ude42\ud83d", 2)
def test_halves_of_surrogate_pairs_are_as_with_tiktoken(text, size):
    blocks = list(text_blocks(text, size))
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert b"".join(blocks).decode() == whole
    for block in blocks:
        assert block.decode()  # whole characters, some
    tokenizer = get_tokenizer("gpt2")
    expected = tokenizer.encode(text, allowed_special="all")
    encoder = encoder_of("gigatoken")
    assert joined(encoder.encode(blocks)).tolist() == expected
    assert encoder.text_bytes == len(whole.encode())


def test_blocks_are_of_the_size():
    assert list(text_blocks("")) == []
    assert list(text_blocks("abcdefgh", 3)) == [b"abc", b"def", b"gh"]
    assert list(text_blocks("ab\ud83d\ude42cd", 3)) == [b"ab\xf0\x9f\x99\x82", b"cd"]
    assert list(text_blocks("ab\ud83d\ud83d\ud83dcd", 3)) == [
        b"ab" + b"\xef\xbf\xbd" * 3 + b"c",
        b"d",
    ]
    assert [len(block) for block in text_blocks("x" * 200_000)] == [65536, 65536, 65536, 3392]


@many
@given(mixes | st.text())
def test_the_end_of_a_character(text):
    whole = text.encode()
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])
    for place in range(len(whole) + 1):
        for kind in (bytes, bytearray):
            assert character_end(kind(whole), place) == ends[ends <= place].max()


# ------------------------------------------------------------------------- GPT-2's vocabulary


@functools.cache
def words() -> list[bytes]:
    """The 50,256 byte sequences, by id."""
    return get_tokenizer("gpt2").decode_tokens_bytes(range(50256))


@functools.cache
def ranks() -> dict[bytes, int]:
    return {word: rank for rank, word in enumerate(words())}


def plain_merges(text: bytes) -> list[int]:
    """Byte-pair encoding by its definition: the lowest rank first, the leftmost of these."""
    parts = [text[place : place + 1] for place in range(len(text))]
    while len(parts) > 1:
        pairs = [ranks().get(left + right, 10**9) for left, right in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest == 10**9:
            break
        place = pairs.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks()[part] for part in parts]


def single_piece(text: bytes) -> list[int]:
    """tiktoken's ids of a text as one match of the pattern."""
    return get_tokenizer("gpt2")._encode_single_piece(text)


def test_each_token_encodes_to_itself():
    """Also by merges: tiktoken looks a whole match up before it merges anything."""
    assert len(ranks()) == 50256
    for rank, word in enumerate(words()):
        assert single_piece(word) == [rank]
        assert plain_merges(word) == [rank]


ALPHABETS = ["ab", "etaoin", "-=", " \n", "'s", "0123456789", "日本語", "🙂🙃", "ÃÂ", "é\u0301"]


def test_ids_are_an_encoding_exactly_when_each_two_neighbours_are():
    """What StreamEncoder goes by in a run without a cut."""
    draw, seen = random.Random(0), Counter()
    for number in range(1000):
        alphabet = draw.choice(ALPHABETS)
        parts = [
            "".join(draw.choices(alphabet, k=draw.randint(1, 20))).encode()
            for _ in range(1 + number % 3)
        ]
        if number % 4 == 0:  # any bytes: also from the inside of a character
            parts = [part[1:] or part for part in parts]
        ids = [token for part in parts for token in single_piece(part)]
        text = b"".join(words()[token] for token in ids)
        is_encoding = single_piece(text) == ids
        assert single_piece(text) == plain_merges(text)
        assert is_encoding == all(
            single_piece(words()[left] + words()[right]) == [left, right]
            for left, right in itertools.pairwise(ids)
        )
        seen[is_encoding] += 1
    assert min(seen[True], seen[False]) > 200


def test_contractions_are_single_tokens():
    """So no token of a run ends inside of one."""
    for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        assert len(single_piece(contraction.encode())) == 1
