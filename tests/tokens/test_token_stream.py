"""tokens/token_stream.py: each method of TokenStream compared with a plain definition."""

import hashlib
import itertools
from unittest import mock

import numpy as np
from helpers.refusals import refused
from helpers.tally import trials
from helpers.texts import numbers_in
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.errors import DataError
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.tokenizer import get_tokenizer

some = trials(15, 150)

VOCAB, EOT = 8, 7
# Arrays of any length, including 0.
divisions = st.lists(st.lists(st.integers(0, 6) | st.just(EOT), max_size=12), max_size=6)
dtypes = st.sampled_from([np.uint16, np.uint32])
places = st.lists(st.integers(0, 100), max_size=4)


def make(lists: list[list[int]], dtype: type = np.uint16, **more) -> TokenStream:
    return TokenStream([np.array(ids, dtype) for ids in lists], VOCAB, EOT, **more)


def split_at(stream: TokenStream, cuts: list[int]) -> list[TokenStream]:
    """The parts between these positions; each call splits the last part of the call before."""
    parts, begin = [], 0
    for cut in sorted(cut % (len(stream) + 1) for cut in cuts):
        first, stream = stream.split(cut - begin)
        parts.append(first)
        begin = cut
    return [*parts, stream]


def test_positions_beyond_32_bits():
    """Arrays of five billion tokens in total, views of the same two bytes of memory."""
    size = 5 * 10**9
    same = np.broadcast_to(np.zeros(1, np.uint16), (size,))
    names = [("a.bin", 1024), ("b.bin", 1024), ("c.bin", 1024)]
    last, bad = np.array([1, EOT, 2, 0], np.uint16), np.array([99], np.uint16)
    stream = TokenStream([same, same, last], VOCAB, EOT, names)
    assert len(stream) == 2 * size + 4
    assert stream.gather(np.array([2 * size - 1, size - 1]), 3).tolist() == [[0, 1, 7], [0, 0, 0]]
    assert stream.first_document_start(2 * size, 2 * size + 5) == 2 * size + 1
    train, val = stream.split(2 * size - 10)
    assert (len(train), len(val)) == (2 * size - 10, 14)
    assert val.document_starts().tolist() == [0, 11]
    far = TokenStream([same, np.broadcast_to(bad, (size,))], VOCAB, EOT, names[:2])
    with refused(DataError, "data.path", "b.bin") as caught:
        far.gather(np.array([2 * size - 3]), 1)
    assert {99, 1024 + 2 * (size - 3)} <= numbers_in(caught.value)


@some
@given(
    divisions.filter(any), dtypes, st.sampled_from([VOCAB, VOCAB + 1, 2**16 - 1]), places, st.data()
)
def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(lists, dtype, bad, cuts, draw):
    """The error has the file and the byte, also after splits of the stream."""
    number = draw.draw(st.sampled_from([n for n, ids in enumerate(lists) if ids]), label="array")
    local = draw.draw(st.integers(0, len(lists[number]) - 1), label="place in it")
    names = [(f"file_{n}.bin", 100 * n) for n in range(len(lists))]
    stream = make(lists, dtype, names=names)
    stream.arrays[number][local] = bad
    position = sum(map(len, lists[:number])) + local
    byte = 100 * number + local * np.dtype(dtype).itemsize
    for part in split_at(stream, cuts):
        starts = np.arange(len(part))
        for size in (1, 5):  # without padding and with it
            if 0 <= position < len(part):
                with refused(DataError, "data.path", f"file_{number}.bin") as caught:
                    part.gather(starts, size)
                assert {bad, byte, VOCAB} <= numbers_in(caught.value)
            elif len(part):
                part.gather(starts, size)
        position -= len(part)


@some
@given(divisions, dtypes, places, st.integers(1, 40))
def test_parts_windows_and_document_starts(lists, dtype, cuts, size):
    """After several splits no id is lost, repeated or moved."""
    whole = [*itertools.chain(*lists)]
    stream = make(lists, dtype)
    parts = split_at(stream, cuts)
    bounds = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    spans = [(0, None), *itertools.pairwise(bounds)]
    for part, (begin, end) in zip([stream, *parts], spans, strict=True):
        ids = whole[begin:end]
        assert (len(part), part.vocab_size, part.end_of_text) == (len(ids), VOCAB, EOT)
        if ids:
            starts = np.arange(len(ids) + 2)[::-1]
            windows = part.gather(starts, size)
            assert windows.dtype == part.dtype == dtype
            padded = ids + [0] * (size + 2)
            assert windows.tolist() == [padded[start : start + size] for start in starts]
        found = part.document_starts()
        assert found.dtype == np.int64
        assert found.tolist() == sorted({0} | {n for n, token in enumerate(ids) if token == EOT})


@some
@given(divisions, dtypes, st.integers(0, 80), st.integers(0, 80))
@example([[7, 0, 0, 0]], np.uint16, 0, 5)  # only the end-of-text token of the first document
@example([[0, 0], [0, 7]], np.uint16, 1, 3)  # one after the end
def test_first_document_start(lists, dtype, low, high):
    """Without position 0."""
    ids = [*itertools.chain(*lists)]
    starts = [place for place in range(max(1, low), min(len(ids), high)) if ids[place] == EOT]
    expected, stream = min(starts, default=None), make(lists, dtype)
    with mock.patch("clearhead.tokens.token_stream.SEARCH_BLOCK", 3):  # a search has several blocks
        assert stream.first_document_start(low, high) == expected


def test_checksums():
    """The first digits of the SHA-256, as in existing checkpoints. Given ones are those of the
    unsplit stream only."""
    ids = np.arange(2**16, dtype=np.uint16)
    arrays = [ids, ids[:11:2], ids[:7].astype(np.uint32)]
    stream = TokenStream(arrays, VOCAB, EOT)
    expected = [hashlib.sha256(array.tobytes()).hexdigest()[:12] for array in arrays]
    assert [checksum for _, checksum in stream.checksums()] == expected
    known = [("a.bin", "0123456789ab")]
    stream = TokenStream([ids], VOCAB, EOT, [("a.bin", 1024)], checksums=known)
    assert stream.checksums() == known
    first, _ = stream.split(5)
    assert first.checksums() == [("a.bin", hashlib.sha256(ids[:5].tobytes()).hexdigest()[:12])]


@some
@given(st.text(st.sampled_from("ab \n\tä\u00a0")), st.booleans(), st.integers(0, 9))
def test_the_number_of_words_is_that_of_the_text(text, is_byte, cut):
    """Words are separated by ASCII white space, as in bytes.split()."""
    tokenizer = get_tokenizer("byte" if is_byte else "gpt2")
    ids = [tokenizer.encode_ordinary(text), [tokenizer.eot_token], tokenizer.encode_ordinary("ab")]
    ids = np.array([*itertools.chain(*ids)], np.uint16)
    stream = TokenStream([ids[:cut], ids[cut:]], tokenizer.n_vocab, tokenizer.eot_token)
    with mock.patch("clearhead.tokens.token_stream.SEARCH_BLOCK", 3):
        assert stream.num_words(tokenizer.words) == len(text.encode().split()) + 1
