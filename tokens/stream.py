"""Token ids in one array or many, in memory or mapped from files, addressed as one long array.

    stream = TokenStream([np.array([5, 6, 7], np.uint16)], vocab_size=10)
    stream.gather(np.array([0, 1]), 2)  # [[5, 6], [6, 7]]

Shapes: B windows of a batch, N ids in each.
"""

import hashlib
import mmap

import numpy as np

from errors import DataError

NO_TOKEN = 2**16 - 1  # padding of a window behind its document's end; no id of GPT-2's
BLOCK_BYTES = 2**22  # of one checksum
Checksums = list[tuple[str, list[str]]]  # (file, checksum of each of its blocks)


class TokenStream:
    """Arrays of token ids, one after the other.

    names: what the arrays are called in errors, with the byte where their ids begin in the file;
    None for what is in memory only. checksums: (name, of each block) of each array, "" where a
    block was not read.
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
        self.names = names
        self._checksums = checksums
        self.begins = np.cumsum([0, *map(len, arrays)])  # of each array, and the end of all
        self.dtype = arrays[0].dtype if arrays else np.dtype(np.uint16)
        self._maps = [_mapping(array) for array in arrays]

    def __len__(self) -> int:
        return int(self.begins[-1])

    def gather(self, starts: np.ndarray, size: int) -> np.ndarray:
        """The ids from each start on: (B,) int64 -> (B, N = size), in the stream's own dtype.

        Behind the stream's end is NO_TOKEN. Raises DataError for an id that the vocabulary
        does not have, with its place.
        """
        ids = np.empty((len(starts), size), self.dtype)
        number = np.searchsorted(self.begins, starts, side="right") - 1  # of the array it starts in
        number = np.minimum(number, len(self.arrays) - 1)
        for n in np.unique(number):
            array, rows = self.arrays[n], np.flatnonzero(number == n)
            local = starts[rows] - self.begins[n]
            inside = local + size <= len(array)
            if inside.any():
                windows = np.lib.stride_tricks.sliding_window_view(array, size)
                ids[rows[inside]] = windows[local[inside]]
            for row in rows[~inside]:
                ids[row] = self._across(int(starts[row]), size)
            if self._maps[n]:
                # Pages that were looked at count as this process's memory as long as they are
                # mapped, 2 MB for each window where the file system uses large ones.
                self._maps[n].madvise(mmap.MADV_DONTNEED)
        if ids.size and ids.max() >= self.vocab_size:
            self._check(starts, ids)
        return ids

    def _across(self, start: int, size: int) -> np.ndarray:
        """One window that reaches over the ends of arrays."""
        ids = np.full(size, NO_TOKEN, self.dtype)
        done = 0
        for begin, array in zip(self.begins, self.arrays, strict=False):
            part = array[max(0, start + done - begin) : max(0, start + size - begin)]
            if begin <= start + done and len(part):
                ids[done : done + len(part)] = part
                done += len(part)
        return ids

    def _check(self, starts: np.ndarray, ids: np.ndarray) -> None:
        """Raises DataError for the first id beyond the vocabulary, if it is not padding."""
        for row, column in np.argwhere(ids >= self.vocab_size):
            position = int(starts[row] + column)
            if position >= len(self):
                continue
            number = int(np.searchsorted(self.begins, position, side="right")) - 1
            local = position - int(self.begins[number])
            name, first_byte = self.names[number] if self.names else ("the text", 0)
            byte = first_byte + local * self.dtype.itemsize
            cause = f"id {ids[row, column]} at byte {byte} is beyond the vocabulary of "
            fix = "create the file again, or use its tokenizer"
            raise DataError("data.path", name, f"{cause}{self.vocab_size}", fix)

    def split(self, position: int) -> tuple["TokenStream", "TokenStream"]:
        """The stream before a position, and from it on; nothing is copied."""
        return self._part(0, position), self._part(position, len(self))

    def _part(self, begin: int, end: int) -> "TokenStream":
        arrays, names = [], []
        for n, array in enumerate(self.arrays):
            first = int(self.begins[n])
            low, high = max(0, begin - first), min(len(array), end - first)
            if low >= high:
                continue
            arrays.append(array[low:high])
            if self.names:
                name, byte = self.names[n]
                names.append((name, byte + low * self.dtype.itemsize))
        return TokenStream(arrays, self.vocab_size, self.end_of_text, names or None)

    def document_starts(self) -> np.ndarray:
        """Where documents begin, int64: 0, and every place of the end-of-text token."""
        found = [np.zeros(1, np.int64)]
        for begin, array in zip(self.begins, self.arrays, strict=False):
            found.append(self._search(array) + begin)
        starts = np.concatenate(found)
        return starts[1:] if len(starts) > 1 and starts[1] == 0 else starts

    def _search(self, array: np.ndarray) -> np.ndarray:
        """The places of the end-of-text token; a million ids are searched at a time."""
        size, found, mapping = 2**20, [np.zeros(0, np.int64)], _mapping(array)
        for first in range(0, len(array), size):
            found.append(np.flatnonzero(array[first : first + size] == self.end_of_text) + first)
            if mapping:
                mapping.madvise(mmap.MADV_DONTNEED)
        return np.concatenate(found)

    def nearest_document(self, position: int, reach: int) -> int | None:
        """The beginning of a document nearest to a position, at most `reach` tokens away."""
        size = 2**20  # of what is looked at at once, on either side
        for near in range(0, reach + 1, size):
            far = min(reach, near + size - 1)
            sides = ((position - far, position - near), (position + near, position + far))
            found = []
            for low, high in sides:
                low, high = max(1, low), min(len(self) - 1, high)
                if low <= high:
                    ids = self._across(low, high + 1 - low)
                    found.append(np.flatnonzero(ids == self.end_of_text) + low)
            places = np.concatenate([np.zeros(0, np.int64), *found])
            if len(places):
                return int(places[np.abs(places - position).argmin()])
        return None

    def checksums(self) -> Checksums:
        """What the ids are known by, later: (name, a checksum of each block) of each array."""
        if self._checksums is None:
            self._checksums = []
            for n, array in enumerate(self.arrays):
                name = self.names[n][0] if self.names else "the text"
                raw = memoryview(np.ascontiguousarray(array)).cast("B")
                blocks = range(0, len(raw), BLOCK_BYTES)
                checksums = [short_checksum(raw[b : b + BLOCK_BYTES]) for b in blocks]
                self._checksums.append((name, checksums))
        return self._checksums


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array is a view of, if it is one and the system can unmap pages."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def short_checksum(block: bytes | memoryview) -> str:
    """The first 12 hexadecimal digits of the SHA-256: enough to notice a change."""
    return hashlib.sha256(block).hexdigest()[:12]
