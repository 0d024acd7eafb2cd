"""tokens/stream.py: many arrays as one, each method against its plain definition."""

import hashlib
import itertools
from collections.abc import Iterable
from unittest import mock

import numpy as np
from helpers.refusals import refused
from helpers.tally import CAMPAIGN
from helpers.texts import numbers_in, peak_memory
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import stream as module
from tokens.stream import BLOCK_BYTES, NO_TOKEN, TokenStream, short_checksum

some = settings(max_examples=150 if CAMPAIGN else 30, deadline=None, derandomize=True)

EOT = 7
VOCAB = 8
# Arrays of any length, also empty.
divisions = st.lists(st.lists(st.integers(0, 6) | st.just(EOT), max_size=12), max_size=6)
filled = divisions.filter(lambda arrays: any(arrays))
dtypes = st.sampled_from([np.uint16, np.uint32])


def as_arrays(lists: list[list[int]], dtype: type = np.uint16) -> list[np.ndarray]:
    return [np.array(ids, dtype) for ids in lists]


def make(lists: list[list[int]], dtype: type = np.uint16, **more) -> TokenStream:
    return TokenStream(as_arrays(lists, dtype), VOCAB, EOT, **more)


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [*itertools.chain(*lists)]


def all_of(stream: TokenStream) -> list[int]:
    return [token for array in stream.arrays for token in array.tolist()]


def window(ids: list[int], start: int, size: int) -> list[int]:
    """What `gather` returns, by slicing and padding."""
    found = ids[start : start + size]
    return found + [NO_TOKEN] * (size - len(found))


def split_at(stream: TokenStream, cuts: list[int]) -> list[TokenStream]:
    """Its parts between these places; each split divides the rest of the one before."""
    parts, begin = [], 0
    for cut in sorted(cut % (len(stream) + 1) for cut in cuts):
        first, stream = stream.split(cut - begin)
        parts.append(first)
        begin = cut
    return [*parts, stream]


@some
@given(filled, dtypes, st.integers(1, 40), st.data())
def test_gather_equals_slices_of_the_whole(lists, dtype, size, draw):
    ids = joined(lists)
    starts = draw.draw(st.lists(st.integers(0, len(ids) + 2), max_size=8), label="starts")
    stream = make(lists, dtype)
    assert len(stream) == len(ids)
    found = stream.gather(np.array(starts, np.int64), size)
    assert found.dtype == stream.dtype == dtype
    assert found.shape == (len(starts), size)
    assert found.tolist() == [window(ids, start, size) for start in starts]
    found[:] = 0  # a copy: the caller may change it
    assert all_of(stream) == ids


def test_a_stream_without_arrays_and_a_large_vocabulary():
    empty = TokenStream([], VOCAB, EOT)
    assert len(empty) == 0
    assert empty.gather(np.zeros(0, np.int64), 3).shape == (0, 3)
    for last, dtype in ((2**16 - 1, np.uint16), (200_000, np.uint32)):
        stream = TokenStream([np.array([5, last], dtype)], last + 1, last)
        assert stream.gather(np.array([0]), 2).tolist() == [[5, last]]


def test_positions_beyond_32_bits():
    """Arrays of five thousand million tokens, views of the same two bytes of memory."""
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
    with refused(DataError, "data.path", "c.bin") as caught:
        stream.gather(np.array([2 * size]), 4)
    assert {99, 1030} <= numbers_in(caught.value)
    far = TokenStream([same, np.broadcast_to(last[-1:], (size,))], VOCAB, EOT, names[:2])
    with refused(DataError, "data.path", "b.bin") as caught:
        far.gather(np.array([2 * size - 3]), 1)
    assert {99, 1024 + 2 * (size - 3)} <= numbers_in(caught.value)


@some
@given(
    filled,
    dtypes,
    st.sampled_from([VOCAB, VOCAB + 1, NO_TOKEN]),
    st.lists(st.integers(0, 100), max_size=3),
    st.data(),
)
def test_an_id_beyond_the_vocabulary_is_refused_with_its_file_and_byte(
    lists, dtype, bad, cuts, draw
):
    """Wherever it is, and however the stream was split before."""
    arrays = as_arrays(lists, dtype)
    number = draw.draw(st.sampled_from([n for n, ids in enumerate(lists) if ids]), label="array")
    local = draw.draw(st.integers(0, len(lists[number]) - 1), label="place in it")
    arrays[number][local] = bad
    position = sum(map(len, lists[:number])) + local
    first_bytes = [1024 if n % 2 == 0 else 0 for n in range(len(lists))]
    names = [(f"file_{n}.bin", byte) for n, byte in enumerate(first_bytes)]
    byte = first_bytes[number] + local * np.dtype(dtype).itemsize
    for part in split_at(TokenStream(arrays, VOCAB, EOT, names), cuts):
        begin, end = max(0, position - 2), min(len(part), position + 2)
        if not 0 <= position < len(part):
            if len(part):  # padding is NO_TOKEN too, and is no id of the file
                part.gather(np.arange(len(part)), 5)
        else:
            starts = np.array([begin, position, max(0, end - 1)])
            with refused(DataError, "data.path", f"file_{number}.bin") as caught:
                part.gather(starts, 5)
            assert {bad, byte, VOCAB} <= numbers_in(caught.value)
        position -= len(part)


def test_the_first_bad_id_of_the_first_window_is_named():
    """In memory, by its place in the array."""
    stream = make([[0, 1], [2, 3, 99]])
    assert stream.gather(np.array([0]), 4).tolist() == [[0, 1, 2, 3]]
    several = make([[0, 98, 99, 0, 97]])
    for made, starts, size, expected in (
        (stream, [1], 5, {99, 2}),
        (several, [3, 0], 2, {97, 4}),
        (several, [0, 3], 3, {98, 1}),
    ):
        with refused(DataError, "data.path") as caught:
            made.gather(np.array(starts), size)
        assert numbers_in(caught.value) == expected | {VOCAB}


# ---------------------------------------------------------------------------- split and documents


@some
@given(divisions, dtypes, st.lists(st.integers(0, 100), max_size=4), st.data())
def test_parts_and_document_starts(lists, dtype, cuts, draw):
    """After several splits no id is lost, doubled or moved; each part is a stream itself. Starts of
    documents are those of a search where they are known, and are not asked for before."""
    asked = []

    def known(n):
        return lambda: asked.append(n) or np.flatnonzero(np.array(lists[n]) == EOT)

    starts = [known(n) if draw.draw(st.booleans()) else None for n in range(len(lists))]
    stream = make(lists, dtype, starts=starts)
    parts = split_at(stream, cuts)
    ends = [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    assert np.cumsum([len(part) for part in parts]).tolist() == ends
    assert joined(map(all_of, parts)) == joined(lists) == all_of(stream)
    assert not asked
    for part in [stream, *parts]:
        ids = all_of(part)
        assert (len(part), part.vocab_size, part.end_of_text) == (len(ids), VOCAB, EOT)
        if ids:
            assert part.dtype == dtype
            expected = [window(ids, start, 4) for start in range(len(ids))]
            assert part.gather(np.arange(len(ids)), 4).tolist() == expected
        found = part.document_starts()
        assert found.dtype == np.int64
        assert found.tolist() == sorted({0} | {n for n, token in enumerate(ids) if token == EOT})


def test_document_starts_that_are_known_are_not_searched():
    stream = make([[0, 0, 0], [0, 0, 0]], starts=[lambda: np.array([2]), lambda: np.array([0, 1])])
    assert stream.document_starts().tolist() == [0, 2, 3, 4]
    first, second = stream.split(4)
    assert first.document_starts().tolist() == [0, 2, 3]
    assert second.document_starts().tolist() == [0]


def test_split_copies_nothing(tmp_path):
    """Neither an array in memory nor a file that is mapped."""
    path = tmp_path / "ids.bin"
    ids = np.arange(2**20, dtype=np.uint16) % VOCAB
    ids.tofile(path)
    mapped = np.memmap(path, np.uint16, "r")
    stream = TokenStream([ids, np.asarray(mapped)], VOCAB, EOT)
    cuts = [1000, 2**20 - 5, 2**20 + 1000, 2**20 + 70_000]
    parts, peak = peak_memory(lambda: split_at(stream, cuts))
    assert peak < 100_000
    for part in parts:
        for array in part.arrays:
            assert np.shares_memory(array, ids) or np.shares_memory(array, mapped)
    starts = np.flatnonzero(np.tile(ids, 2) == EOT)
    assert stream.document_starts().tolist() == [0, *starts]
    with open(path, "r+b") as file:  # a change in the file is seen through the last part
        file.seek(-2, 2)
        file.write(b"\x03\x00")
    assert ids[-1] != 3
    assert parts[-1].gather(np.array([len(parts[-1]) - 1]), 1).item() == 3


def plain_nearest(ids: np.ndarray, position: int, reach: int) -> int | None:
    """The nearest start of a document but the first; of two at the same distance, the earlier."""
    starts = [int(p) for p in np.flatnonzero(ids == EOT) if p > 0 and abs(p - position) <= reach]
    return min(starts, key=lambda p: (abs(p - position), p), default=None)


@some
@given(divisions, dtypes, st.integers(0, 80), st.integers(0, 80))
@example([[0, 7, 0, 7]], np.uint16, 2, 1)  # the same distance on both sides
@example([[7, 0, 0, 0]], np.uint16, 1, 5)  # only the first document's
@example([[0, 0], [0, 7]], np.uint16, 1, 1)  # one out of reach
@example([[0, 0], [0, 7]], np.uint16, 1, 2)
def test_nearest_document(lists, dtype, position, reach):
    ids = np.array(joined(lists), dtype)
    position = min(position, len(ids))
    found = make(lists, dtype).nearest_document(position, reach)
    assert found == plain_nearest(ids, position, reach)


def test_nearest_document_far_away():
    """The search proceeds in blocks of 2**20 tokens on either side."""
    block = 2**20
    position, ids = 2_200_000, np.zeros(4_400_000, np.uint16)
    stream = TokenStream(np.split(ids, [700_000, 2_300_000]), VOCAB, EOT)
    distances = ((), (-1,), (1 - block,), (-block,), (-block - 1,))
    for before, behind in itertools.product(distances, ((), (block - 1,), (block,), (2 * block,))):
        places = [position + distance for distance in (*before, *behind)]
        ids[places] = EOT
        for reach in (block - 1, block, 10**8):
            near = [place for place in places if abs(place - position) <= reach]
            expected = min(near, key=lambda place: abs(place - position), default=None)
            found = stream.nearest_document(position, reach)
            assert found == expected, (before, behind, reach)
        ids[places] = 0


# ------------------------------------------------------------------------------------ checksums


def plain_checksums(raw: bytes, block: int) -> list[str]:
    return [hashlib.sha256(raw[b : b + block]).hexdigest()[:12] for b in range(0, len(raw), block)]


@some
@given(filled, dtypes, st.data())
def test_checksums_show_which_block_of_which_array_changed(lists, dtype, draw):
    number = draw.draw(st.sampled_from([n for n, ids in enumerate(lists) if ids]), label="array")
    place = draw.draw(st.integers(0, len(lists[number]) - 1), label="place in it")
    changed = [list(ids) for ids in lists]
    changed[number][place] = (changed[number][place] + 1) % VOCAB
    with mock.patch.object(module, "BLOCK_BYTES", 8):
        one, same, other = (make(ids, dtype).checksums() for ids in (lists, lists, changed))
        strided = [np.repeat(array, 2)[::2] for array in as_arrays(lists, dtype)]
        assert one == same == TokenStream(strided, VOCAB, EOT).checksums()
    raws = [array.tobytes() for array in as_arrays(lists, dtype)]
    assert [sums for _, sums in one] == [plain_checksums(raw, 8) for raw in raws]
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
    ((_, sums),) = TokenStream([ids], 2**16, 0).checksums()
    assert sums == plain_checksums(ids.tobytes(), 2**22)
    assert len(sums) == 3


def test_checksums_that_are_known_are_used_for_the_whole_only():
    """Each part has checksums of its own."""
    known = [("a.bin", ["0123456789ab"])]
    stream = make([[1, 2, 3]], names=[("a.bin", 1024)], checksums=known)
    assert stream.checksums() == known
    raws = [array.tobytes() for array in as_arrays([[1], [2, 3]])]
    expected = [[("a.bin", plain_checksums(raw, 8))] for raw in raws]
    assert [part.checksums() for part in stream.split(1)] == expected


def test_short_checksum_is_the_beginning_of_the_sha256():
    """Of the empty string and of "abc", as published in FIPS 180-2 and its test vectors."""
    assert short_checksum(b"") == "e3b0c44298fc"
    assert short_checksum(b"abc") == "ba7816bf8f01"
