"""tokens/stream.py: many arrays as one, each part of it against its plain definition.

Needs no network.
"""

import hashlib
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from helpers.refusals import check_refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import stream as module
from tokens.stream import BLOCK_BYTES, NO_TOKEN, TokenStream, short_checksum

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

EOT = 7
VOCAB = 8
# Arrays of any length, empty ones too; every third id or so begins a document.
divisions = st.lists(st.lists(st.integers(0, 6) | st.just(EOT), max_size=12), max_size=6)
filled = divisions.filter(lambda arrays: any(arrays))
dtypes = st.sampled_from([np.uint16, np.uint32])


def as_arrays(lists: list[list[int]], dtype: type = np.uint16) -> list[np.ndarray]:
    return [np.array(ids, dtype) for ids in lists]


def make(lists: list[list[int]], dtype: type = np.uint16, **more) -> TokenStream:
    return TokenStream(as_arrays(lists, dtype), VOCAB, EOT, **more)


def joined(lists: list[list[int]]) -> list[int]:
    return [token for ids in lists for token in ids]


def all_of(stream: TokenStream) -> list[int]:
    return [token for array in stream.arrays for token in array.tolist()]


def window(ids: list[int], start: int, size: int) -> list[int]:
    """What `gather` is to give, by slicing."""
    found = ids[start : start + size]
    return found + [NO_TOKEN] * (size - len(found))


def cut_up(stream: TokenStream, cuts: list[int]) -> list[TokenStream]:
    """Its parts between these places, made by splitting what the last split left."""
    parts, begin = [], 0
    for cut in sorted(cut % (len(stream) + 1) for cut in cuts):
        first, stream = stream.split(cut - begin)
        parts.append(first)
        begin = cut
    return [*parts, stream]


# --------------------------------------------------------------------------------------- gather


@many
@given(filled, dtypes, st.integers(1, 40), st.data())
def test_gather_equals_slices_of_the_whole(lists, dtype, size, draw):
    ids = joined(lists)
    places = st.lists(st.integers(0, len(ids) - 1), max_size=8)
    starts = draw.draw(places, label="starts")
    stream = make(lists, dtype)
    assert len(stream) == len(ids)
    found = stream.gather(np.array(starts, np.int64), size)
    assert found.dtype == stream.dtype == dtype
    assert found.shape == (len(starts), size)
    assert found.tolist() == [window(ids, start, size) for start in starts]
    found[:] = 0  # it is a copy: whoever asked may change it
    assert all_of(stream) == ids


def test_a_window_over_many_arrays_and_past_the_end():
    stream = make([[0, 1], [], [2], [], [], [3, 4], []])
    assert stream.gather(np.array([1, 3, 0]), 4).tolist() == [
        [1, 2, 3, 4],
        [3, 4, NO_TOKEN, NO_TOKEN],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("start", [5, 6, 100])
@pytest.mark.parametrize("lists", [[[0, 1], [2, 3, 4]], [[0, 1, 2, 3, 4], []]])
def test_a_window_behind_the_end_holds_no_token(lists, start):
    assert make(lists).gather(np.array([start, 4]), 2).tolist() == [
        [NO_TOKEN, NO_TOKEN],
        [4, NO_TOKEN],
    ]


def test_no_windows_of_a_stream_without_arrays():
    stream = TokenStream([], VOCAB, EOT)
    assert len(stream) == 0
    assert stream.gather(np.zeros(0, np.int64), 3).shape == (0, 3)


@pytest.mark.parametrize(("last", "dtype"), [(2**16 - 1, np.uint16), (200_000, np.uint32)])
def test_the_last_id_of_a_large_vocabulary(last, dtype):
    stream = TokenStream([np.array([5, last], dtype)], last + 1, last)
    assert stream.gather(np.array([0]), 2).tolist() == [[5, last]]


def test_positions_beyond_32_bits():
    """Arrays of five thousand million tokens, all of them the same two bytes of memory."""
    size = 5 * 10**9
    same = np.broadcast_to(np.zeros(1, np.uint16), (size,))
    starts = [lambda: np.array([0, size - 1]), lambda: np.array([4]), None]
    names = [("a.bin", 1024), ("b.bin", 1024), ("c.bin", 1024)]
    last = np.array([1, EOT, 2, 99], np.uint16)
    stream = TokenStream([same, same, last], VOCAB, EOT, names, starts)
    assert len(stream) == 2 * size + 4
    assert stream.gather(np.array([2 * size - 1, size - 1]), 3).tolist() == [[0, 1, 7], [0, 0, 0]]
    assert stream.document_starts().tolist() == [0, size - 1, size + 4, 2 * size + 1]
    assert stream.nearest_document(2 * size, 5) == 2 * size + 1
    train, val = stream.split(2 * size - 10)
    assert train.document_starts().tolist() == [0, size - 1, size + 4]
    assert val.document_starts().tolist() == [0, 11]
    with pytest.raises(DataError, match="id 99 at byte 1030 is"):
        stream.gather(np.array([2 * size]), 4)
    far = TokenStream([same, np.broadcast_to(last[-1:], (size,))], VOCAB, EOT, names[:2])
    with pytest.raises(DataError, match=rf"b\.bin: id 99 at byte {1024 + 2 * (size - 3)} is"):
        far.gather(np.array([2 * size - 3]), 1)


# --------------------------------------------------------------------------------- ids too large


@many
@given(
    filled,
    dtypes,
    st.sampled_from([VOCAB, VOCAB + 1, NO_TOKEN]),
    st.lists(st.integers(0, 100), max_size=3),
    st.data(),
)
def test_an_id_beyond_the_vocabulary_is_told_with_its_file_and_byte(lists, dtype, bad, cuts, draw):
    """Wherever it is, however the stream was split before."""
    arrays = as_arrays(lists, dtype)
    number = draw.draw(st.sampled_from([n for n, ids in enumerate(lists) if ids]), label="array")
    local = draw.draw(st.integers(0, len(lists[number]) - 1), label="place in it")
    arrays[number][local] = bad
    position = sum(map(len, lists[:number])) + local
    first_bytes = [1024 if n % 2 == 0 else 0 for n in range(len(lists))]
    names = [(f"file_{n}.bin", byte) for n, byte in enumerate(first_bytes)]
    place = f"byte {first_bytes[number] + local * np.dtype(dtype).itemsize} is"
    for part in cut_up(TokenStream(arrays, VOCAB, EOT, names), cuts):
        begin, end = max(0, position - 2), min(len(part), position + 2)
        if not 0 <= position < len(part):
            if len(part):  # padding, which is NO_TOKEN too, is never taken for an id of the file
                part.gather(np.arange(len(part)), 5)
        else:
            starts = np.array([begin, position, max(0, end - 1)])
            with pytest.raises(DataError) as caught:
                part.gather(starts, 5)
            cause = f"id {bad} at {place} beyond the vocabulary of {VOCAB}"
            check_refusal(caught.value, f"data.path=file_{number}.bin", cause, "make the file anew")
        position -= len(part)


def test_an_id_beyond_the_vocabulary_that_is_in_memory_only():
    stream = make([[0, 1], [2, 3, 99]])
    assert stream.gather(np.array([0]), 4).tolist() == [[0, 1, 2, 3]]
    with pytest.raises(DataError) as caught:
        stream.gather(np.array([1]), 5)
    cause = "id 99 at token 2 is beyond the vocabulary of 8"
    check_refusal(caught.value, "data.path=the text", cause, "use its own tokenizer")


def test_of_several_wrong_ids_the_first_window_s_first_is_told():
    stream = make([[0, 98, 99, 0, 97]])
    with pytest.raises(DataError, match="id 97 at token 4"):
        stream.gather(np.array([3, 0]), 2)
    with pytest.raises(DataError, match="id 98 at token 1"):
        stream.gather(np.array([0, 3]), 3)


# ---------------------------------------------------------------------------------------- split


@many
@given(divisions, dtypes, st.lists(st.integers(0, 100), max_size=4), st.booleans())
def test_parts_are_the_whole(lists, dtype, cuts, named):
    """Split again and again: nothing is lost, doubled or moved; each part is a stream itself."""
    names = [(f"{n}.bin", 0) for n in range(len(lists))] if named else None
    stream = make(lists, dtype, names=names)
    parts = cut_up(stream, cuts)
    assert len(parts) == len(cuts) + 1
    assert joined([all_of(part) for part in parts]) == joined(lists) == all_of(stream)
    for part in parts:
        ids = all_of(part)
        assert len(part) == len(ids)
        assert (part.vocab_size, part.end_of_text) == (VOCAB, EOT)
        if ids:
            assert part.dtype == dtype
            starts = np.arange(len(ids))
            expected = [window(ids, start, 4) for start in starts]
            assert part.gather(starts, 4).tolist() == expected


@pytest.mark.parametrize("position", range(8))
def test_split_divides_at_the_position(position):
    first, second = make([[0, 1, 2], [], [3, 4, 5, 6]]).split(position)
    assert all_of(first) == list(range(position))
    assert all_of(second) == list(range(position, 7))


def test_split_copies_nothing(tmp_path):
    """Neither of an array in memory nor of a file that is mapped."""
    path = tmp_path / "ids.bin"
    ids = np.arange(2**20, dtype=np.uint16) % VOCAB
    ids.tofile(path)
    mapped = np.memmap(path, np.uint16, "r")
    stream = TokenStream([ids, np.asarray(mapped)], VOCAB, EOT)
    tracemalloc.start()
    try:
        parts = cut_up(stream, [1000, 2**20 - 5, 2**20 + 1000, 2**20 + 70_000])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    for part in parts:
        for array in part.arrays:
            assert np.shares_memory(array, ids) or np.shares_memory(array, mapped)
    with open(path, "r+b") as file:  # a change in the file is seen through the last part
        file.seek(-2, 2)
        file.write(b"\x03\x00")
    assert ids[-1] != 3
    assert parts[-1].gather(np.array([len(parts[-1]) - 1]), 1).item() == 3


# ------------------------------------------------------------------------------------ documents


def plain_starts(ids: list[int]) -> list[int]:
    """Where documents begin, by their definition."""
    return sorted({0} | {place for place, token in enumerate(ids) if token == EOT})


@many
@given(divisions, dtypes, st.lists(st.integers(0, 100), max_size=3), st.data())
def test_document_starts_known_or_searched(lists, dtype, cuts, draw):
    """Of the whole and of every part; where they are known, nothing is asked before its time."""
    asked = []

    def known(n):
        def starts():
            asked.append(n)
            return np.flatnonzero(np.array(lists[n]) == EOT)

        return starts

    which = draw.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    starts = [known(n) if chosen else None for n, chosen in enumerate(which)]
    searched, told = make(lists, dtype), make(lists, dtype, starts=starts)
    pairs = list(zip([searched, *cut_up(searched, cuts)], [told, *cut_up(told, cuts)], strict=True))
    assert not asked
    for one, other in pairs:
        found, found_too = one.document_starts(), other.document_starts()
        assert found.dtype == found_too.dtype == np.int64
        assert found.tolist() == found_too.tolist() == plain_starts(all_of(one))


def test_document_starts_that_are_known_are_not_searched():
    stream = make([[0, 0, 0], [0, 0, 0]], starts=[lambda: np.array([2]), lambda: np.array([0, 1])])
    assert stream.document_starts().tolist() == [0, 2, 3, 4]
    first, second = stream.split(4)
    assert first.document_starts().tolist() == [0, 2, 3]
    assert second.document_starts().tolist() == [0]


def plain_nearest(ids: np.ndarray, position: int, reach: int) -> int | None:
    """The nearest beginning but the first one's; of two as near, the earlier."""
    starts = [int(p) for p in np.flatnonzero(ids == EOT) if p > 0 and abs(p - position) <= reach]
    return min(starts, key=lambda p: (abs(p - position), p), default=None)


@many
@given(divisions, dtypes, st.integers(0, 80), st.integers(0, 80))
@example([[0, 7, 0, 7]], np.uint16, 2, 1)  # as near on both sides
@example([[7, 0, 0, 0]], np.uint16, 1, 5)  # the beginning of all leaves nothing before it
@example([[0, 0], [0, 7]], np.uint16, 1, 1)  # just out of reach
@example([[0, 0], [0, 7]], np.uint16, 1, 2)
def test_nearest_document_is_the_nearest(lists, dtype, position, reach):
    ids = np.array(joined(lists), dtype)
    position = min(position, len(ids))
    assert make(lists, dtype).nearest_document(position, reach) == plain_nearest(
        ids, position, reach
    )


# How far is looked at first, and then four times as far, and so on.
DISTANCES = [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**18 - 1, 2**18, 2**18 + 1, 600_000]
distances = st.sampled_from(DISTANCES) | st.integers(0, 700_000)


@some
@given(
    st.lists(distances, max_size=3),
    st.lists(distances, max_size=3),
    distances | st.sampled_from([10**8, 10**12]),
    st.lists(st.integers(1, 1_499_999), max_size=3),
)
@example([2**16], [2**16], 10**8, [])
@example([2**18], [2**16 + 1], 2**16 + 1, [])
@example([2**16 + 1], [], 2**16, [700_000])
def test_nearest_document_far_away(before, behind, reach, borders):
    position = 750_000
    ids = np.zeros(1_500_000, np.uint16)
    ids[[position - far for far in before] + [position + far for far in behind]] = EOT
    stream = TokenStream(np.split(ids, sorted(borders)), VOCAB, EOT)
    assert stream.nearest_document(position, reach) == plain_nearest(ids, position, reach)


def test_nearest_document_very_far_away():
    ids = np.zeros(8_000_000, np.uint16)
    ids[10] = EOT
    stream = TokenStream([ids], VOCAB, EOT)
    assert stream.nearest_document(7_900_000, 10**8) == 10
    assert stream.nearest_document(7_900_000, 7_899_989) is None


# ------------------------------------------------------------------------------------ checksums


def plain_checksums(lists: list[list[int]], dtype: type, block: int) -> list[list[str]]:
    raws = [array.tobytes() for array in as_arrays(lists, dtype)]
    return [
        [hashlib.sha256(raw[b : b + block]).hexdigest()[:12] for b in range(0, len(raw), block)]
        for raw in raws
    ]


@many
@given(filled, dtypes, st.data())
def test_checksums_tell_which_block_of_which_array_changed(lists, dtype, draw):
    number = draw.draw(st.sampled_from([n for n, ids in enumerate(lists) if ids]), label="array")
    place = draw.draw(st.integers(0, len(lists[number]) - 1), label="place in it")
    changed = [list(ids) for ids in lists]
    changed[number][place] = (changed[number][place] + 1) % VOCAB
    with mock.patch.object(module, "BLOCK_BYTES", 8):
        one, same, other = (make(ids, dtype).checksums() for ids in (lists, lists, changed))
        strided = [np.repeat(array, 2)[::2] for array in as_arrays(lists, dtype)]
        assert one == same == TokenStream(strided, VOCAB, EOT).checksums()
    assert [sums for _, sums in one] == plain_checksums(lists, dtype, 8)
    differing = [
        (n, block)
        for n, ((_, old), (_, new)) in enumerate(zip(one, other, strict=True))
        for block, (a, b) in enumerate(zip(old, new, strict=True))
        if a != b
    ]
    assert differing == [(number, place * np.dtype(dtype).itemsize // 8)]


def test_checksums_are_of_four_mebibytes_each():
    assert BLOCK_BYTES == 2**22  # of all checksums in manifests and checkpoints that exist
    ids = np.arange(2**22 + 3, dtype=np.uint16)
    ((name, sums),) = TokenStream([ids], 2**16, 0).checksums()
    raw = ids.tobytes()
    parts = (raw[: 2**22], raw[2**22 : 2**23], raw[2**23 :])
    assert name == "the text"
    assert sums == [hashlib.sha256(part).hexdigest()[:12] for part in parts]


def test_checksums_that_are_known_are_not_computed():
    known = [("a.bin", ["0123456789ab", ""])]
    assert make([[1, 2]], names=[("a.bin", 1024)], checksums=known).checksums() == known


def test_parts_have_checksums_of_their_own():
    known = [("a.bin", ["of the whole"])]
    parts = make([[1, 2, 3]], names=[("a.bin", 1024)], checksums=known).split(1)
    expected = [[("a.bin", sums)] for sums in plain_checksums([[1], [2, 3]], np.uint16, 8)]
    assert [part.checksums() for part in parts] == expected


def test_short_checksum_is_the_beginning_of_the_sha256():
    """Of the empty string and of "abc", as published in FIPS 180-2 and its test vectors."""
    assert short_checksum(b"") == "e3b0c44298fc"
    assert short_checksum(b"abc") == "ba7816bf8f01"
