"""tokens/encoding.py: texts of any length, cut at any places, against one call of tiktoken.

The pieces are tens of bytes here instead of a quarter of a megabyte, so that a short text has many.
"""

import functools
import importlib.util
import itertools
import mmap
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import gigatoken.gigatoken_rs
import numpy as np
import pytest
import regex  # tiktoken's own dependency: its engine knows \p{L}
import tiktoken
from helpers.refusals import refused
from helpers.tally import CAMPAIGN
from helpers.texts import FRAGMENTS, encode_at_once, numbers_in, peak_memory
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext.openai_public import r50k_pat_str

from errors import DataError
from tokens import END_OF_TEXT
from tokens import encoding as module
from tokens.encoding import CUT, Gigatoken, StreamEncoder, character_end, find_cut, text_blocks
from tokens.tokenizers import get_tokenizer

some = settings(max_examples=400 if CAMPAIGN else 30, deadline=None, derandomize=True)

FRAGMENTS = [
    *FRAGMENTS,
    *"\x0b\x0c\x1d\x1e\x1f\u1680\u180e\u2003\u2029\u202f\u205f\u00ad\0ls½…Ⅷ１\U0001d7d9\u0301\u088f",
    *("I'M", "''", "x'", "'ll", "...", "_", "-", "=", "aa", "ab", "ÃÂ", " \u00a0 ", "❤️", "สวัสดี"),
    *("ひらがな", "カタカナー", "한국어", "。", "、", "「", "」", "，", "：", "“", "”"),
    *("endoftext", "<|", "|>", "|", "||", "<", ">"),
]
fragments = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
# Each fragment once or many times: runs of one kind, and changes from kind to kind.
repeated = st.tuples(fragments, st.sampled_from([1, 1, 1, 2, 7, 60])).map(
    lambda pair: "".join([pair[0]] * pair[1])
)
mixes = st.lists(repeated, max_size=40).map("".join)
engines = st.sampled_from(["gigatoken", "tiktoken", "byte"])
WORDS = "One bell rang, then two, then three; nobody came down to the ferry. " * 20


@functools.cache
def kept(engine: str, endoftext: str) -> StreamEncoder:
    name, engine = ("byte", "auto") if engine == "byte" else ("gpt2", engine)
    return StreamEncoder(name, endoftext, engine, check_every=10**12)


def encoder_of(engine: str, endoftext: str = "token", piece: int = 32) -> StreamEncoder:
    """An encoder that leaves the comparison to the test; kept, because making one takes time."""
    encoder = kept(engine, endoftext)
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


def check_ids(encoder: StreamEncoder, text: str, blocks: Iterable[bytes], endoftext="token"):
    """That the ids are those of one call of tiktoken. Returns the arrays."""
    before = encoder.text_bytes
    arrays = list(encoder.encode(blocks))
    expected = encode_at_once(text, encoder.tokenizer.name, endoftext)
    assert np.array_equal(joined(arrays), expected)
    assert encoder.text_bytes - before == len(text.encode())
    assert all(ids.dtype == np.uint16 and len(ids) for ids in arrays)
    return arrays


@pytest.fixture
def pieces(monkeypatch):
    """A list that receives every text that gigatoken encodes."""
    texts, encode = [], Gigatoken.encode
    monkeypatch.setattr(Gigatoken, "encode", lambda self, t: texts.append(t) or encode(self, t))
    return texts


# ---------------------------------------------------------------------------- ids of the whole


@settings(some, max_examples=400 if CAMPAIGN else 80)
@given(
    st.tuples(mixes, st.integers(1, 5)).map(lambda pair: pair[0] * pair[1]),
    engines,
    st.sampled_from(["token", "text"]),
    st.integers(32, 100),
    st.lists(st.integers(0, 60) | st.just(10_000), max_size=8),
)
@example("", "gigatoken", "token", 32, [0, 0])
@example("=" * 159, "gigatoken", "token", 63, [])  # a token is longer than such a piece
@example("ÃÂ" * 200, "tiktoken", "token", 32, [])
@example("a \u2028 b\x1c c\x1f\n d \n\n e\u00a0 f" * 9, "tiktoken", "token", 32, [])
@example("a <|endoftext|> b <|endoftext|>\n\nc" * 9, "gigatoken", "token", 32, [33] * 9)
@example("||||<|endoftext|>||||" * 40, "gigatoken", "token", 32, [])
@example("!'s" * 300, "gigatoken", "token", 32, [])
def test_streamed_ids_are_those_of_one_call(text, engine, endoftext, piece, sizes):
    encoder = encoder_of(engine, endoftext, piece)
    for _ in range(2):  # one text after the other: each by itself
        check_ids(encoder, text, in_blocks(text, sizes), endoftext)


ORDINARY = [
    "One bell rang, then two; nobody came down to the ferry (it was 6:15).\n",
    "def cut(text,start=1):\n\treturn[x for x in range(start)if text[x]=='|']\n",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。",
    "いろはにほへと、ちりぬるを。わがよたれぞ、つねならむ。",
    "나랏말싸미 듕귁에 달아, 문자와로 서르 사맛디 아니할쌔.",
    "Буря мглою небо кроет, вихри снежные крутя.",
    "สวัสดีครับ๑๒๓ไทยแลนด์",  # without blanks
    "left\tright\t12\t13\r",
    "3f9a01bc77de" * 5,
]


def test_ordinary_text_is_cut_into_pieces_of_about_the_size(pieces):
    encoder = encoder_of("gigatoken", piece=256)
    for text in ORDINARY:
        check_ids(encoder, text * 100, text_blocks(text * 100, 999))
        assert b"".join(pieces).decode() == text * 100
        assert {len(piece) in range(256, 300) for piece in pieces[:-1]} == {True}, text
        pieces.clear()
    for size in (-1, 0, 1, 31):  # below the smallest
        arrays = list(StreamEncoder("byte", piece=size).encode([WORDS.encode()]))
        assert all(32 <= len(ids) <= 64 for ids in arrays[:-1])


def test_memory_is_a_few_pieces():
    lines = [b"Line %d of a text that goes on and on, mostly words.\n" % n for n in range(100)]
    encoder = encoder_of("tiktoken", piece=2**12)
    assert list(encoder.encode(lines[:1]))  # what is made once
    stream = encoder.encode(line * 250 for line in lines)
    count, peak = peak_memory(lambda: sum(map(len, stream)))
    assert encoder.text_bytes > 1_200_000
    assert count > 250_000
    assert peak < 20 * 2**12  # the rest, a block, a piece, its string and its ids


# ---------------------------------------------------------------------- runs of one kind, no cut


def characters(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


RUNS = [
    *("a", "abcdefghijklmnopqrstuvwxyz", "etaoinsr", "AaBb", "0", "0123456789", ["ÃÂ"], "ÃÂ"),
    *(" ", "\n", "\t ", " \n\t\r\u00a0\u2003\u3000\u2028", "-", "=", "'", "'\"!-.", "|"),
    *('!"#$%&()*+,-./:;<=>?@[]^_`{}~', ["<|", "|>", "|", "<", ">"], ["👩‍👩‍👧", "🇳🇱", "❤️", "🙂"]),
    *(characters(0x3B1, 0x3C9), characters(0x4E00, 0x9FA5), characters(0x3041, 0x3096)),
    *(characters(0xAC00, 0xD7A3), characters(0xE01, 0xE2E), characters(0x1F600, 0x1F64F)),
    *(characters(0x300, 0x340), characters(0x1D400, 0x1D454), characters(0xE000, 0xE0FF)),
]
ENDINGS = ["", " ", "  b", "\n", "a", "1", "!", "'", "'s", "|", "é。", END_OF_TEXT, "<|endof"]
BEGINNINGS = ["", "x ", " ", "'"]


@pytest.mark.parametrize("engine", ["gigatoken", "tiktoken", "byte"])
def test_a_run_without_a_cut_has_the_ids_of_one_call(engine):
    draw = random.Random(engine)
    endings = itertools.cycle(enumerate(ENDINGS))
    for alphabet, _ in itertools.product(RUNS, range(13 if CAMPAIGN else 2)):
        run = "".join(draw.choices(alphabet, k=6000))
        run = run.encode()[: draw.randint(5000, 6000)].decode(errors="ignore")
        assert find_cut(run.encode(), 1, len(run.encode())) is None
        number, ending = next(endings)
        text = BEGINNINGS[number % len(BEGINNINGS)] + run + ending
        encoder = encoder_of(engine, piece=draw.choice([32, 100, 256]))
        arrays = check_ids(encoder, text, in_blocks(text, [draw.randint(0, 999) for _ in range(5)]))
        assert len(arrays) > 4


@pytest.mark.parametrize("character", [*"a \n-'日\u0301"])
def test_a_long_run_is_encoded_in_pieces(character, pieces):
    """The engine gets hardly more text than the run has; after it pieces are small again."""
    size = 1_000_000 if CAMPAIGN else 200_000
    text = character * (size // len(character.encode()))
    check_ids(encoder_of("gigatoken", piece=2**12), text, text_blocks(text))
    assert max(map(len, pieces)) <= 3 * 2**12
    assert sum(map(len, pieces)) < 1.5 * len(text.encode())
    pieces.clear()
    text = f"{character * 3000}\n{WORDS}"
    check_ids(encoder_of("gigatoken", piece=32), text, [text.encode()])
    assert max(map(len, pieces)) > 64
    assert max(map(len, pieces[-10:])) <= 64


@pytest.mark.parametrize(("white", "engine"), [(" ", "gigatoken"), ("\n", "tiktoken")])
def test_a_million_blanks_before_a_word(white, engine):
    """tiktoken's own pattern fails on them all at once, not on pieces of the real size."""
    text = f"a{white * 1_000_000}b c"
    with pytest.raises(ValueError, match="stack size"):
        encode_at_once(text)
    encoder = StreamEncoder("gpt2", engine=engine, check_every=1)
    ids = joined(encoder.encode(text_blocks(text)))
    assert np.array_equal(ids, module.gigatoken(True).encode(text.encode()))


def test_a_run_that_cannot_be_continued_is_refused(monkeypatch):
    """It would need a vocabulary whose tokens depend on much later text. So what tiktoken returns
    for the second stretch of the run is replaced by an id that cannot follow the first one's."""
    stretches, given, real = [], [], tiktoken.Encoding.encode_to_numpy

    def encode(self, part, **options):
        ids = real(self, part, **options).copy()
        if len(part) >= 1200:
            stretches.append(part)
            if len(stretches) == 2:
                ids[0] = never_after(given[-1])
        return ids

    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", encode)
    stream = StreamEncoder("gpt2", engine="tiktoken", piece=600).encode([b"ab" * 2000], "run", 5)
    given.extend(next(stream).tolist())
    with refused(DataError, "data.path", "run") as caught:
        next(stream)
    done = len(get_tokenizer("gpt2").decode_bytes(given))
    assert numbers_in(caught.value) == {5 + done}


# ----------------------------------------------------------------------------------------- cuts

PATTERN = regex.compile(r50k_pat_str)
KINDS = "a1!\u2003"  # a letter, a digit, another character, white space


def pattern_cuts(text: str) -> set[int]:
    """The bytes of a text where a match of the pattern begins."""
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])
    return {int(ends[match.start()]) for match in PATTERN.finditer(text)}


@functools.cache
def is_cut(left: str, right: str) -> bool:
    """Whether there is a cut between two neighbours."""
    place = len(left.encode())
    return find_cut((left + right).encode(), place, place + 1) == place


def cuts_of(text: str) -> list[int]:
    """The plain definition of find_cut: each two neighbours by themselves."""
    ends = np.cumsum([len(character.encode()) for character in text]).tolist()
    return [end for end, pair in zip(ends, itertools.pairwise(text), strict=False) if is_cut(*pair)]


def test_cuts_between_two_characters_are_those_of_tiktoken():
    """Each character with one of each kind behind it, and all of ASCII with all of ASCII: a single
    match of the pattern, or two.

    tiktoken returns a match that is in the vocabulary as that id, so the vocabulary made here, of
    all these pairs, shows what the pattern takes together.
    """
    codes = [*range(0x3400), *range(0x3400, 0xD800, 16), *range(0xE000, 0x20000, 5)]
    alphabet = [chr(code) for code in [*codes, *range(0x2F800, 0x2FA1E, 5)]]
    ranks = {bytes([byte]): byte for byte in range(256)}
    neighbours = [*itertools.product(alphabet, KINDS), *itertools.product(alphabet[:128], repeat=2)]
    for pair in neighbours:
        ranks.setdefault("".join(pair).encode(), len(ranks))
    pairs = tiktoken.Encoding(
        "pairs", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    cuts, parted = set(), set()
    for left, right in neighbours:
        if is_cut(left, right):
            cuts.add((left, right))
        if len(pairs.encode_ordinary(left + right)) > 1:
            parted.add((left, right))
    assert cuts <= parted
    # All of them, where the kind of the left one is certain, and between visible ASCII characters.
    certain = {left for left, _ in cuts if left > "\x7f"}
    assert len(certain) > 8000
    skipped = {*"|'\x1c\x1d\x1e\x1f"}
    assert cuts >= {
        (left, right)
        for left, right in parted
        if left in certain or (" " < left <= "\x7f" and not {left, right} & skipped)
    }


@settings(some, max_examples=400 if CAMPAIGN else 60)
@given(mixes | st.text(), st.integers(0, 1000), st.integers(0, 1000))
@example("abc def", 0, 2)
@example("left\tright\0 end\r", 4, 9)
@example("日本語 αβγ1", 3, 18)
@example("日本語", 0, 7)
@example("'sé", 0, 2)
@example(f"é{END_OF_TEXT}é", 0, 90)
@example(f"|{END_OF_TEXT}|", 0, 90)
def test_the_first_cut_is_found_and_is_one_of_the_pattern(text, start, length):
    """In the text, and in a window of any bytes of it with four before, as parts of files are."""
    whole, cuts = text.encode(), cuts_of(text)
    assert set(cuts) <= pattern_cuts(text)
    ids = get_tokenizer("gpt2").encode_ordinary
    for place in cuts[:5]:
        assert ids(whole[:place].decode()) + ids(whole[place:].decode()) == ids(text)
    begin = whole.find(END_OF_TEXT.encode())
    inside = range(begin + 1, begin + len(END_OF_TEXT)) if begin >= 0 else ()
    assert not set(inside) & {*cuts, *(found.start() for found in CUT.finditer(whole))}
    start = 1 + start % max(1, len(whole))
    for stop in (min(start + length % 20, len(whole)), len(whole)):
        first = next((cut for cut in cuts if start <= cut < stop), None)
        assert find_cut(whole, start, stop) == first
        end = character_end(whole, stop)  # the last character may be cut off
        base = start - min(4, start)
        found = find_cut(whole[base:stop], start - base, stop - base)
        expected = next((cut for cut in cuts if start <= cut < end), None)
        assert (found if found is None else found + base) == expected


def test_engines_agree_on_all_of_unicode():
    """Their versions of Unicode differ: text with characters that only gigatoken knows is encoded
    by tiktoken."""
    encoder, step = encoder_of("gigatoken", piece=2**14), 1 if CAMPAIGN else 4
    blocks = [*range(0, 0xD800, 256), *range(0xE000, 0x40000, 256), 0xE0000, 0xE0100]
    for first in blocks:
        texts = {True: "", False: ""}
        for character in characters(first, first + 255)[first // 256 % step :: step]:
            newer = module.NEWER.search(character.encode()) is not None
            texts[newer] += f"{character}'s {character}1  {character}!{character}日{character} \n"
        for text in filter(None, texts.values()):
            assert np.array_equal(joined(encoder.encode([text.encode()])), encode_at_once(text))
            cuts = {found.start() for found in CUT.finditer(text.encode())}
            assert cuts <= pattern_cuts(text), hex(first)


# ------------------------------------------------------------------- the engines and the check


@pytest.mark.parametrize("damage", ["another id", "one id less", "one id more"])
def test_a_difference_from_tiktoken_is_refused(damage, monkeypatch):
    texts, real = [], Gigatoken.encode

    def encode(self, text):
        ids = real(self, text).copy()
        texts.append(text)
        if len(texts) - 1 != number:
            return ids
        ids[-1] ^= damage == "another id"
        return ids[:-1] if "less" in damage else np.append(ids, [0] * ("more" in damage))

    monkeypatch.setattr(Gigatoken, "encode", encode)
    for number in range(6):
        texts.clear()
        encoder = StreamEncoder("gpt2", engine="gigatoken", piece=64, check_every=4)
        stream = encoder.encode([WORDS.encode()], "words.txt", offset=5)
        if number % 4:  # not checked
            assert len(joined(stream))
            continue
        with refused(DataError, "data.path", "words.txt") as caught:
            list(stream)
        begin, end = sum(map(len, texts[:-1])), sum(map(len, texts))
        assert {5 + begin, 5 + end} <= numbers_in(caught.value)
        assert "engine=tiktoken" in caught.value.hint
        assert len(texts) == number + 1


def test_the_engine_that_is_used(monkeypatch):
    used = {"auto": "gigatoken", "gigatoken": "gigatoken", "tiktoken": "tiktoken"}
    for tokenizer, engine in itertools.product(("gpt2", "byte"), used):
        encoder = StreamEncoder(tokenizer, engine=engine)
        assert encoder.engine == (used[engine] if tokenizer == "gpt2" else "numpy")
        text = WORDS * 100  # of which only the beginning is checked
        check_ids(encoder, text, text_blocks(text))
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gigatoken" else real(name)
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "gigatoken"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    encoder = StreamEncoder("gpt2", piece=64)
    assert encoder.engine == "tiktoken"
    check_ids(encoder, WORDS, [WORDS.encode()])
    with refused(DataError, "engine", "gigatoken"):
        StreamEncoder("gpt2", engine="gigatoken")


# ------------------------------------------------------------------------- gigatoken's memory


@pytest.fixture
def memory(monkeypatch):
    """Replaces the memory of this process as the module reads it; counts gigatoken's tokenizers."""
    state = {"resident": 10**9, "made": 0}
    real = gigatoken.gigatoken_rs.BPETokenizer.from_tiktoken

    class Counted:
        @staticmethod
        def from_tiktoken(*arguments):
            state["made"] += 1
            return real(*arguments)

    monkeypatch.setattr(gigatoken.gigatoken_rs, "BPETokenizer", Counted)
    monkeypatch.setattr(module, "resident_bytes", lambda: state["resident"])
    monkeypatch.setattr(module, "give_back_memory", lambda: None)
    monkeypatch.setattr(Gigatoken, "LOOK_EVERY", 100)
    return state


def test_gigatoken_is_made_anew_when_the_process_has_grown(memory, monkeypatch):
    expected, words = encode_at_once(WORDS).tolist(), WORDS.encode()
    encoder = Gigatoken(special=True)

    def encode(text, made):
        assert encoder.encode(text).tolist() == encode_at_once(text.decode()).tolist()
        assert memory["made"] == made

    memory["resident"] += Gigatoken.MOST_GROWTH
    encode(words, 1)  # grown, but not by more than that
    memory["resident"] += 1
    encode(words[:99], 1)  # not read again before LOOK_EVERY bytes
    assert encoder.encode(words + b"<|endoftext|>").tolist() == [*expected, 50256]
    encode(words, 2)  # counted from what the process has now
    memory["resident"] += 2 * Gigatoken.MOST_GROWTH
    monkeypatch.setattr(module, "give_back_memory", lambda: memory.update(resident=10**9))
    encode(words, 2)  # the memory could be given back
    monkeypatch.setattr(module, "give_back_memory", lambda: None)
    memory["resident"] = 0  # unknown
    monkeypatch.setattr(Gigatoken, "RENEW_EVERY", 3 * len(words))
    encoder = Gigatoken(special=True)
    for number in range(9):
        encode(words, 3 + (number + 1) // 4)  # with each fourth of them


def test_a_process_has_one_gigatoken_of_each_kind(memory):
    """Each remembers the words that it has seen."""
    module.gigatoken.cache_clear()
    for endoftext in ("token", "text", "token", "text"):
        StreamEncoder("gpt2", endoftext, "gigatoken")
    assert memory["made"] == 2


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
odd_texts = st.lists(st.sampled_from([*HALVES, "a", "é", "🙂", "\ufeff", "\uffff", " \n"]))


@some
@given(odd_texts.map("".join) | mixes, st.integers(1, 9))
@example("\ufeffabc", 2)
@example("\ud83d\ude42", 1)
@example("\ud83d\ud83d\ude42\ud83d", 2)
def test_lone_surrogates_are_as_with_tiktoken(text, size):
    blocks = list(text_blocks(text, size))
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert b"".join(blocks).decode() == whole
    assert all(block.decode() for block in blocks)  # whole characters
    assert all(len(block.decode()) <= size for block in blocks)
    ids = joined(encoder_of("gigatoken").encode(blocks))
    assert np.array_equal(ids, encode_at_once(text))


@some
@given(mixes | st.text())
def test_the_end_of_a_character(text):
    whole = text.encode()[:200]
    ends = np.cumsum([0, *(len(character.encode()) for character in text)])
    for place in range(len(whole)):
        for kind in (bytes, bytearray):
            assert character_end(kind(whole), place) == ends[ends <= place].max()
    assert character_end(text.encode(), ends[-1]) == ends[-1]


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


def never_after(left: int) -> int:
    """An id that does not stand behind this one: the two would have been merged."""
    together = ((right, single_piece(words()[left] + words()[right])) for right in range(50256))
    return next(right for right, ids in together if ids != [left, right])


def test_each_token_encodes_to_itself():
    """Also by merges: tiktoken looks a whole match up before it merges anything."""
    assert len(ranks()) == 50256
    for rank, word in [*enumerate(words())][:: 1 if CAMPAIGN else 10]:
        assert single_piece(word) == plain_merges(word) == [rank]
    for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):  # not cut in a run
        assert len(single_piece(contraction.encode())) == 1


def test_ids_are_an_encoding_exactly_when_each_two_neighbours_are():
    """The property that StreamEncoder relies on in a run without a cut."""
    draw, seen = random.Random(0), Counter()
    alphabets = ["ab", "etaoin", "-=", " \n", "'s", "0123456789", "日本語", "🙂🙃", "ÃÂ", "é\u0301"]
    for number in range(1000):
        alphabet = draw.choice(alphabets)
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
