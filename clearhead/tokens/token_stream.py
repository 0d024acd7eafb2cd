"""TokenStream: one or more arrays of token ids, in memory or memory-mapped, used as one long array.

    stream = TokenStream([np.array([5, 6, 7], np.uint16)], vocab_size=10, end_of_text=9)
    stream.gather(np.array([0, 1]), 2)  # [[5, 6], [6, 7]]

Shapes: B windows in a batch, N ids in a window.
"""

import hashlib
import json
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from clearhead.errors import DataError, shorten

SEARCH_BLOCK = 2**20  # number of ids searched at once
MAX_MEASURED = 2**27  # larger streams, which are token files, are not read completely at the start
Checksums = list[tuple[str, str]]  # of each file: (name, 12 hexadecimal digits)
# In a checkpoint. Version 3 stored a list of checksums for each file, one for each 4 MiB.
StoredChecksums = list[tuple[str, str | list[str]]]


class TokenStream:
    """Arrays of token ids, concatenated without copying.

    names: of each array, its name in errors and the position of its first id in the file, in bytes.
    checksums: of each array; None: computed when they are needed.
    """

    def __init__(
        self,
        arrays: list[np.ndarray],
        vocab_size: int,
        end_of_text: int,
        names: list[tuple[str, int]] | None = None,
        checksums: Checksums | None = None,
    ):
        self.arrays = arrays
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.names = names or [("the text", 0)] * len(arrays)
        self._checksums = checksums
        self.array_starts = np.cumsum([0, *map(len, arrays)])  # and the end of the last array
        self.dtype = np.result_type(np.uint16, *(array.dtype for array in arrays))
        self._maps = [_mmap_of(array) for array in arrays]

    def __len__(self) -> int:
        return int(self.array_starts[-1])

    def gather(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Reads `size` ids from each start: (B,) int64 -> (B, N = size), with the arrays' dtype.

        Positions after the end of the stream are 0. Raises DataError for an id that is not in the
        vocabulary, with its position in the file.
        """
        ids = np.empty((len(starts), size), self.dtype)
        numbers = np.searchsorted(self.array_starts, starts, side="right") - 1  # of the arrays
        numbers = np.minimum(numbers, len(self.arrays) - 1)
        for n in np.unique(numbers):
            array, rows = self.arrays[n], np.flatnonzero(numbers == n)
            local = starts[rows] - self.array_starts[n]
            inside = local + size <= len(array)
            if inside.any():
                windows = np.lib.stride_tricks.sliding_window_view(array, size)
                ids[rows[inside]] = windows[local[inside]]
            for row in rows[~inside]:
                ids[row] = self._gather_across_arrays(int(starts[row]), size)
            self._release_pages(n)
        if ids.size and ids.max() >= self.vocab_size:
            row, column = np.argwhere(ids >= self.vocab_size)[0]
            self._raise_invalid_id(int(ids[row, column]), int(starts[row] + column))
        return ids

    def _gather_across_arrays(self, start: int, size: int) -> np.ndarray:
        """Reads one window that is in several arrays, or reaches beyond the end."""
        ids = np.zeros(size, self.dtype)
        for _, position, part in self._slices(start, start + size):
            ids[position - start : position - start + len(part)] = part
        return ids

    def _slices(self, start: int, end: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yields the ids of positions start to end - 1 by array: (array number, position, ids)."""
        number = np.searchsorted(self.array_starts, start, side="right") - 1
        for n in range(number, len(self.arrays)):
            first = int(self.array_starts[n])
            if first >= end:
                break
            yield n, max(start, first), self.arrays[n][max(0, start - first) : end - first]

    def _release_pages(self, n: int) -> None:
        """Releases the pages of an array that were read. They count as memory of this process: 2 MB
        for each window on file systems with large pages."""
        if self._maps[n]:
            self._maps[n].madvise(mmap.MADV_DONTNEED)

    def _raise_invalid_id(self, token: int, position: int) -> None:
        number = int(np.searchsorted(self.array_starts, position, side="right")) - 1
        name, first_byte = self.names[number]
        index = position - int(self.array_starts[number])
        byte = first_byte + index * self.arrays[number].itemsize
        raise invalid_id(name, token, byte, self.vocab_size)

    def split_positions(self, fractions: Sequence[float], byte_lengths: np.ndarray) -> list[int]:
        """Returns, for each fraction, the position where that last fraction of the text begins. It
        is measured in bytes, with the byte_lengths of the ids; in tokens if there are more than
        MAX_MEASURED."""
        if len(self) > MAX_MEASURED:
            return [len(self) - int(len(self) * fraction) for fraction in fractions]
        starts = range(0, len(self), SEARCH_BLOCK)
        blocks = (self._slices(start, start + SEARCH_BLOCK) for start in starts)
        sizes = [sum(int(byte_lengths[ids].sum()) for *_, ids in block) for block in blocks]
        ends, positions = np.cumsum(sizes), []
        for fraction in fractions:
            wanted = ends[-1] - int(ends[-1] * fraction)  # bytes before the position
            block = int(np.searchsorted(ends, wanted))
            slices = self._slices(starts[block], starts[block] + SEARCH_BLOCK)
            ids = np.concatenate([ids for *_, ids in slices])
            within = ends[block] - sizes[block] + np.cumsum(byte_lengths[ids])
            positions.append(starts[block] + int(np.searchsorted(within, wanted)) + 1)
        return positions

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """Splits the stream before a position, without copying."""
        return self._substream(0, position), self._substream(position, len(self))

    def _substream(self, start: int, end: int) -> "TokenStream":
        arrays, names = [], []
        for n, position, part in self._slices(start, end):
            name, byte = self.names[n]
            byte += (position - int(self.array_starts[n])) * part.itemsize
            arrays.append(part)
            names.append((name, byte))
        return TokenStream(arrays, self.vocab_size, self.end_of_text, names)

    def blocks(self, size: int, every: int = 1) -> Iterator[np.ndarray]:
        """Yields the ids in blocks of at most `size`, or only each `every`-th block."""
        for start in range(0, len(self), every * size):
            for n, _, ids in self._slices(start, start + size):
                yield ids
                self._release_pages(n)

    def num_words(self, words: np.ndarray) -> int:
        """Returns the number of words of the text. words: Tokenizer.words."""
        count, is_inside = 0, 0
        for ids in self.blocks(SEARCH_BLOCK):
            each, begins, ends = words[:, ids]
            ends = np.append(is_inside, ends)  # of the token before each one, and of the last one
            count += int(each.sum() - (ends[:-1] * begins).sum())  # two parts of a word are one
            is_inside = ends[-1]
        return count

    def document_starts(self) -> np.ndarray:
        """Returns the first position of each document, int64: 0 and those of end-of-text tokens."""
        blocks = range(0, len(self), SEARCH_BLOCK)
        found = [self._document_starts(first, first + SEARCH_BLOCK) for first in blocks]
        return np.concatenate([np.zeros(1, np.int64), *found])

    def _document_starts(self, low: int, high: int) -> np.ndarray:
        """Returns the positions of end-of-text tokens from `low` to `high` - 1, without 0."""
        found = [np.zeros(0, np.int64)]
        for n, position, part in self._slices(max(1, low), high):
            found.append(np.flatnonzero(part == self.end_of_text) + position)
            self._release_pages(n)
        return np.concatenate(found)

    def first_document_start(self, low: int, high: int) -> int | None:
        """Returns the first document start from `low` to `high` - 1, without 0; None if there is
        none."""
        for start in range(low, min(high, len(self)), SEARCH_BLOCK):
            found = self._document_starts(start, min(high, start + SEARCH_BLOCK))
            if len(found):
                return int(found[0])
        return None

    def checksums(self) -> Checksums:
        """Returns the checksum of each array, which a checkpoint stores: the beginning of its
        SHA-256."""
        if self._checksums is None:
            named = zip(self.names, map(np.ascontiguousarray, self.arrays), strict=True)
            sums = [(name, hashlib.sha256(array).hexdigest()[:12]) for (name, _), array in named]
            self._checksums = sums
        return self._checksums


def checksum_of_all(checksums: Checksums) -> str | None:
    """Returns one checksum of all tokens, without the names of files; None for no files."""
    content = json.dumps([[checksum] for _, checksum in checksums])
    return hashlib.sha256(content.encode()).hexdigest()[:12] if checksums else None


def invalid_id(path: object, token: int, byte: int, vocab_size: int) -> DataError:
    reason = f"id {token} at byte {byte} is not below the vocabulary size {vocab_size}"
    return DataError("data.path", path, reason, "set data.tokenizer, or create the file again")


def _mmap_of(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory map behind an array; None if there is none or madvise is missing."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def check_checksums(
    expected: StoredChecksums, found: Checksums, path: object, whose: str, hint: str
) -> None:
    """Raises DataError when the tokens of data.path differ from those of the checkpoint or rank 0.

    whose: "the checkpoint" or "rank 0". hint: what to do.
    """
    before, now = ([name for name, _ in files] for files in (expected, found))
    if before != now:
        kinds = {"added": Counter(now) - Counter(before), "missing": Counter(before) - Counter(now)}
        changes = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        reason = f"{whose} read {len(before)} files, this process reads {len(now)}; "
        reason = shorten(reason + ("; ".join(changes) or "their order differs"))
        raise DataError("data.path", path, reason, hint)
    for (file, theirs), (_, ours) in zip(expected, found, strict=True):
        if theirs not in (ours, [ours]):
            is_old = isinstance(theirs, list) and len(theirs) > 1
            how = "cannot be compared with the one (version 3)" if is_old else "differs from that"
            raise DataError("data.path", path, f"{file} {how} of {whose}", hint)
