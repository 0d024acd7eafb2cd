"""Token ids in one array or many, in memory or mapped from files, addressed as one long array.

    stream = TokenStream([np.array([5, 6, 7], np.uint16)], vocab_size=10, end_of_text=9)
    stream.gather(np.array([0, 1]), 2)  # [[5, 6], [6, 7]]

Shapes: B windows of a batch, N ids in each.
"""

import hashlib
import itertools
import mmap
from collections.abc import Iterator

import numpy as np

from errors import DataError

BLOCK_BYTES = 2**22  # of one checksum
SEARCH_BLOCK = 2**20  # ids that are searched at once
Checksums = list[tuple[str, list[str]]]  # (file, checksum of each of its blocks)


class TokenStream:
    """Arrays of token ids, one after the other.

    names: what each array is called in errors, and the byte where its ids begin in the file.
    checksums: (name, of each block) of each array, "" where a block was not read.
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
        self.array_starts = np.cumsum([0, *map(len, arrays)])  # of each array, and the end of all
        self.dtype = arrays[0].dtype if arrays else np.dtype(np.uint16)
        self._maps = [_mmap_of(array) for array in arrays]

    def __len__(self) -> int:
        return int(self.array_starts[-1])

    def gather(self, starts: np.ndarray, size: int) -> np.ndarray:
        """The ids from each start on: (B,) int64 -> (B, N = size), in the stream's own dtype.

        Behind the stream's end are zeros. Raises DataError for an id that the vocabulary does not
        have, with its place.
        """
        ids = np.empty((len(starts), size), self.dtype)
        number = np.searchsorted(self.array_starts, starts, side="right") - 1  # of the array
        number = np.minimum(number, len(self.arrays) - 1)
        for n in np.unique(number):
            array, rows = self.arrays[n], np.flatnonzero(number == n)
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
        """One window that reaches over the ends of arrays."""
        ids = np.zeros(size, self.dtype)
        for _, position, part in self._slices(start, start + size):
            ids[position - start : position - start + len(part)] = part
        return ids

    def _slices(self, begin: int, end: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """What each array has from `begin` to before `end`: (its number, position, ids)."""
        number = np.searchsorted(self.array_starts, begin, side="right") - 1
        for n in range(number, len(self.arrays)):
            first = int(self.array_starts[n])
            if first >= end:
                break
            yield n, max(begin, first), self.arrays[n][max(0, begin - first) : end - first]

    def _release_pages(self, n: int) -> None:
        """Pages that were read count as this process's memory as long as they are mapped, 2 MB for
        each window where the file system uses large ones."""
        if self._maps[n]:
            self._maps[n].madvise(mmap.MADV_DONTNEED)

    def _raise_invalid_id(self, token: int, position: int) -> None:
        """Raises DataError for an id beyond the vocabulary."""
        number = int(np.searchsorted(self.array_starts, position, side="right")) - 1
        name, first_byte = self.names[number]
        byte = first_byte + (position - int(self.array_starts[number])) * self.dtype.itemsize
        cause = f"id {token} at byte {byte} is beyond the vocabulary of {self.vocab_size}"
        raise DataError("data.path", name, cause, "create the file again, or use its tokenizer")

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """The stream before a position, and from it on; nothing is copied."""
        return self._substream(0, position), self._substream(position, len(self))

    def _substream(self, begin: int, end: int) -> "TokenStream":
        arrays, names = [], []
        for n, position, part in self._slices(begin, end):
            name, byte = self.names[n]
            arrays.append(part)
            names.append(
                (name, byte + (position - int(self.array_starts[n])) * self.dtype.itemsize)
            )
        return TokenStream(arrays, self.vocab_size, self.end_of_text, names)

    def document_starts(self) -> np.ndarray:
        """Where documents begin, int64: 0, and every place of the end-of-text token."""
        blocks = range(0, len(self), SEARCH_BLOCK)
        found = [self._document_starts(first, first + SEARCH_BLOCK) for first in blocks]
        return np.concatenate([np.zeros(1, np.int64), *found])

    def _document_starts(self, low: int, high: int) -> np.ndarray:
        """Where documents but the first begin, from `low` to before `high`."""
        found = [np.zeros(0, np.int64)]
        for n, position, part in self._slices(max(1, low), high):
            found.append(np.flatnonzero(part == self.end_of_text) + position)
            self._release_pages(n)
        return np.concatenate(found)

    def nearest_document_start(self, position: int, reach: int) -> int | None:
        """The beginning of a document nearest to a position, at most `reach` tokens away."""
        for near in range(0, reach + 1, SEARCH_BLOCK):
            far = min(reach + 1, near + SEARCH_BLOCK)
            before = self._document_starts(position - far + 1, position - near + 1)
            after = self._document_starts(position + near, position + far)
            starts = np.concatenate([before, after])
            if len(starts):
                return int(starts[np.abs(starts - position).argmin()])
        return None

    def checksums(self) -> Checksums:
        """What the ids are known by, later: (name, the first 12 hexadecimal digits of the SHA-256
        of each block) of each array."""
        if self._checksums is None:
            self._checksums = []
            for array, (name, _) in zip(self.arrays, self.names, strict=True):
                raw = memoryview(np.ascontiguousarray(array)).cast("B")
                blocks = (raw[b : b + BLOCK_BYTES] for b in range(0, len(raw), BLOCK_BYTES))
                sums = [hashlib.sha256(block).hexdigest()[:12] for block in blocks]
                self._checksums.append((name, sums))
        return self._checksums


def _mmap_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array is a view of, if it is one and the system can unmap pages."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def compare_checksums(
    expected: Checksums, found: Checksums, path: object, whose: str, fix: str
) -> None:
    """Raises DataError when the tokens of data.path are not those of the checkpoint, or of rank 0.

    whose: which of the two; fix: the hint. A checksum "" is not known.
    """
    files = itertools.zip_longest(expected, found, fillvalue=("nothing", []))
    for (name, theirs), (file, ours) in files:
        pairs = enumerate(itertools.zip_longest(theirs, ours))
        blocks = [block for block, (a, b) in pairs if a != b and "" not in (a, b)]
        if name != file:
            reason = f"{whose} has {name} where there is {file} here"
        elif blocks:
            reason = f"{file} differs from that of {whose} from byte {blocks[0] * BLOCK_BYTES} on"
        else:
            continue
        raise DataError("data.path", path, reason, fix)
