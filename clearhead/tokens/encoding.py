"""Encodes texts of any length; the ids are the same as those of one tokenizer call for the text.

    for ids in StreamEncoder(get_tokenizer("gpt2")).encode(blocks):  # uint16 arrays
        ...

A long text is encoded in chunks, so that only a few chunks are in memory. A chunk ends only where a
match of the tokenizer's pattern always ends, so the ids do not change. GPT-2's pattern
(Radford et al. 2019; `r50k_pat_str` in tiktoken) matches, from left to right,

    's 't 're 've 'm 'll 'd | ?letters | ?digits | ?other characters | white space

where ? is an optional space. The last white-space character before a visible one is in the next
match. The other of tokenizer.PATTERNS is similar. Neither has a lookbehind, and only the match of
white space depends on what follows it, so a chunk can end between two characters if

- the left one is visible, and the right one is a space or a tab,
- the left one is a line break between visible characters, or
- one is a letter and the other a digit, or the left one is a letter or a digit and the right one
  another visible character, or the left one is such a character, but not an apostrophe, which
  starts a contraction, and the right one is a digit.

Text in which BOUNDARY finds no such position, for example a gigabyte of one letter, is also
encoded in chunks, based on a property of byte-pair encoding; see `StreamEncoder`.

gigatoken is ten to thirty times as fast as tiktoken, the reference. The start of some chunks is
encoded by both, and different ids raise an error. One difference is known; see UNICODE_DIFFERENCES.
"""

import base64
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tiktoken

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.tokenizer import Tokenizer

CHUNK_BYTES = 2**18  # gigatoken is fastest with chunks of 0.25 to 1 MB
CHECK_EVERY = 128  # tiktoken checks the start of chunks 0, 128, 256, ...
CHECKED_BYTES = 2**15  # length of such a start

# Finds boundaries between two matches of every pattern, in UTF-8, but only those that do not need a
# table of all Unicode characters. "|" is in none of these sets, so <|endoftext|> is never split.
_SPACES = (rb"[\t-\r\x1c-\x20]", rb"\xc2[\x85\xa0]", rb"\xe1\x9a\x80")
_SPACES += (rb"\xe2\x80[\x80-\x8a\xa8\xa9\xaf]", rb"\xe2\x81\x9f", rb"\xe3\x80\x80")
_OTHER = rb"\x00-\x08\x0e-\x1b\x7f!-/:-@\[-`{}~"
BOUNDARY = re.compile(
    rb"|".join(
        (
            rb"(?=[\t ])" + b"".join(rb"(?<!%s)" % space for space in _SPACES),
            rb"(?<=\n)(?=[^\t-\r\x1c-\x20])(?!%s)" % b"|".join(_SPACES)
            + b"".join(rb"(?<!%s\n)" % space for space in _SPACES),
            rb"(?<=[A-Za-z])(?=[0-9%s])" % _OTHER,
            rb"(?<=[0-9])(?=[A-Za-z%s])" % _OTHER,
            rb"(?<=[%s])(?<!')(?=[0-9])" % _OTHER,
        )
    )
)


# gigatoken 0.10 uses Unicode 17, tiktoken an older version: 4,699 characters are letters, marks or
# digits for gigatoken and other characters for tiktoken. With GPT-2's pattern this matters before a
# contraction: gigatoken splits "\u088f's" into "\u088f" and "'s", tiktoken into "\u088f'" and "s".
# No other difference was found (docs/data.md). tiktoken encodes chunks that have one of them or a
# nearby code point.
UNICODE_DIFFERENCES = re.compile(
    rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)|\xe1\xab|\xea\x9f[\x8e\x8f\x92\x94\xb1]"
    rb"|\xf0(?:\x90[\xa5\xbb]|\x91[\xad\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]"
    rb"|\x9e\x9b|\xab\x9c|\xac\xba|[\xb2\xb3])"
)


def find_boundary(
    text: bytes | bytearray | mmap.mmap, start: int, stop: int | None = None
) -> int | None:
    """Returns the first boundary at a position p with 0 < start <= p < stop, or None. stop: None
    for the end of the text."""
    stop = len(text) if stop is None else stop
    # + 3: it reads the next character, up to three bytes of it.
    found = BOUNDARY.search(text, start, min(len(text), stop + 3))
    return found.start() if found and found.start() < stop else None


# --------------------------------------------------------------------------------- the encoder


class StreamEncoder:
    """Encodes texts of any length, chunk by chunk, with a few megabytes of memory.

    endoftext: token | text, the meaning of "<|endoftext|>" in the text. engine: gigatoken |
    tiktoken; ignored by the byte tokenizer.

    Text without a boundary. Byte-pair encoding has this property: a sequence of tokens is the
    encoding of its text if and only if each pair of neighbours is the encoding of the pair's text
    (van Antwerpen and Neubeck 2024, crate `bpe`). Let A be the ids of a chunk that ends inside such
    text. The text after A's first k tokens is encoded again, with more text, as B. If B starts with
    A's next token, all pairs of neighbours in A[:k] + B occur in A or in B. So A[:k] + B is the
    encoding of the complete text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        endoftext: str = "token",
        engine: str = "gigatoken",
        chunk_bytes: int = CHUNK_BYTES,
        check_every: int = CHECK_EVERY,
    ):
        self.tokenizer = tokenizer
        self.chunk_bytes = max(chunk_bytes, 32)  # several times the longest character
        self.check_every = check_every
        self.chunks = self.text_bytes = self.empty_documents = 0  # until now
        special = {END_OF_TEXT} if endoftext == "token" else set()
        self._reference = functools.partial(
            self.tokenizer.encode_to_numpy, allowed_special=special, disallowed_special=()
        )
        if tokenizer.name == "byte":
            engine = "numpy"
            self._encode = functools.partial(_encode_bytes, special=bool(special))
        elif engine == "gigatoken":
            self._gigatoken = gigatoken(tokenizer, bool(special))
            self._encode = self._encode_with_gigatoken
        else:
            self._encode = lambda text: self._reference(text.decode())
        self.engine = engine

    def encode(
        self, blocks: Iterable[bytes], what: str = "the text", offset: int = 0
    ) -> Iterator[np.ndarray]:
        """Encodes blocks of UTF-8 (no character split between blocks); yields uint16 arrays of ids.

        what: the name of the text in errors. offset: the position of its first byte in the file.
        Raises DataError when gigatoken and tiktoken return different ids.
        """
        buffer = bytearray()  # text from `offset` on that is read but not encoded yet
        limit = 2 * self.chunk_bytes  # maximum length of a chunk; grows if no boundary is found
        next_id: int | None = None  # after a chunk without a boundary: the first id of the next one
        for block in itertools.chain(blocks, [None]):
            buffer += block or b""
            while len(buffer) > limit or (block is None and buffer):
                end = boundary = len(buffer)
                if len(buffer) > limit:
                    end = boundary = find_boundary(buffer, self.chunk_bytes, limit)
                if boundary is None:
                    end = limit
                    while buffer[end] & 0xC0 == 0x80:  # inside a character
                        end -= 1
                text = bytes(buffer[:end])
                ids = self._encode_chunk(text, what, offset)
                if next_id not in (None, ids[0]):  # has never been observed
                    reason = f"the text without a word boundary at byte {offset} cannot be divided"
                    raise DataError("data.path", what, reason, "insert a line break")
                if boundary is None:
                    count = self._num_final(text, ids)
                    if count is None:
                        limit *= 2
                        continue
                    next_id, ids = int(ids[count]), ids[:count]
                    end = int(self.tokenizer.byte_lengths[ids].sum())
                else:
                    next_id, limit = None, 2 * self.chunk_bytes
                self.text_bytes += end
                yield ids
                offset += end
                del buffer[:end]

    def _num_final(self, text: bytes, ids: np.ndarray) -> int | None:
        """Returns how many ids of a chunk without a boundary do not depend on the text after it.

        The last ids may change with more text. This searches backwards for a `count` such that
        ids[:count] end at the end of a character, and the text after them, encoded separately,
        starts with the id ids[count]. Returns None if there is none.
        """
        ends = np.cumsum(self.tokenizer.byte_lengths[ids])
        last = int(np.searchsorted(ends, len(text) - max(512, self.chunk_bytes // 16)))
        for count in range(last, max(0, last - 100), -1):
            start = int(ends[count - 1])
            if text[start] & 0xC0 != 0x80 and self._encode(text[start:])[0] == ids[count]:
                return count
        return None

    def _encode_with_gigatoken(self, text: bytes) -> np.ndarray:
        # These two tests are a hundred times as fast as the search.
        possible = not text.isascii() and any(
            byte in text for byte in (b"\xe0", b"\xe1", b"\xea", b"\xf0")
        )
        if possible and UNICODE_DIFFERENCES.search(text):
            return self._reference(text.decode())
        return self._gigatoken.encode(text)

    def _encode_chunk(self, text: bytes, what: str, offset: int) -> np.ndarray:
        """Returns the ids of a chunk; tiktoken checks the start of every `check_every`-th chunk."""
        ids = self._encode(text).astype(np.uint16)
        if self.chunks % self.check_every == 0 and self.engine == "gigatoken":
            end = find_boundary(text, CHECKED_BYTES)
            expected = self._reference(text[:end].decode())
            if not np.array_equal(ids[: len(expected)] if end else ids, expected):
                reason = "gigatoken and tiktoken return different ids for the text from byte "
                reason += f"{offset} to {offset + (end or len(text))}"
                hint = "tokenize it with python -m scripts.prepare_data engine=tiktoken (slower)"
                raise DataError("data.path", what, reason, hint)
        self.chunks += 1
        return ids


class AnyTokenizer(Protocol):
    """An object that can be the tokenizer of GPTDatasetV1, as tiktoken's encodings."""

    def encode(self, text: str, *, allowed_special: set[str]) -> Sequence[int]: ...


def encode_text(txt: str, tokenizer: AnyTokenizer) -> np.ndarray:
    """Returns the ids of a text. A `Tokenizer` is fastest."""
    if isinstance(tokenizer, Tokenizer):
        return concatenate(StreamEncoder(tokenizer).encode(utf8_blocks(txt)))
    is_tiktoken = isinstance(tokenizer, tiktoken.Encoding)
    txt = b"".join(utf8_blocks(txt)).decode()  # without lone surrogates
    options = {"disallowed_special": ()} if is_tiktoken else {}
    ids = np.array(tokenizer.encode(txt, allowed_special={END_OF_TEXT}, **options), np.uint32)
    return ids.astype(np.uint16) if ids.max(initial=0) < 2**16 else ids


def concatenate(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenates uint16 arrays."""
    data = bytearray()
    for ids in arrays:
        data += memoryview(ids)
    return np.frombuffer(data, np.uint16)


def utf8_blocks(txt: str, size: int = 2**16) -> Iterator[bytes]:
    """Encodes a string as blocks of UTF-8. A lone surrogate becomes U+FFFD, as in tiktoken."""
    start = 0
    while start < len(txt):
        end = start + size
        while "\ud800" <= txt[end - 1 : end] <= "\udbff":  # do not split a surrogate pair
            end += 1
        part, start = txt[start:end], end
        try:
            yield part.encode()
        except UnicodeEncodeError:
            yield part.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _encode_bytes(text: bytes, special: bool) -> np.ndarray:
    """Returns the byte tokenizer's ids, which are equal to tiktoken's but computed faster."""
    end_of_text = np.array([256], np.uint16)
    parts = text.split(END_OF_TEXT.encode()) if special else [text]
    arrays = [np.frombuffer(part, np.uint8).astype(np.uint16) for part in parts]
    return np.concatenate([a for part in arrays for a in (end_of_text, part)][1:])


# --------------------------------------------------------------------------------- gigatoken


class Gigatoken:
    """A tokenizer in gigatoken.

    special: whether "<|endoftext|>" in the text becomes the end-of-text token. gigatoken caches
    every word, which would need gigabytes for a long text. So a new tokenizer replaces the old one
    when the memory of the process has grown by MAX_GROWTH.
    """

    MAX_GROWTH = 2**25  # bytes
    CHECK_EVERY = 2**20  # bytes of text
    RELOAD_EVERY = 2**26  # bytes of text, on systems that do not report the process's memory

    def __init__(self, tokenizer: Tokenizer, special: bool):
        words = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
        # gigatoken needs the ids 0, 1, 2, ... They differ if special tokens have the first ids.
        ids = np.array([*map(tokenizer.ranks.__getitem__, words), tokenizer.eot_token], np.uint32)
        self._ids = None if np.array_equal(ids, np.arange(len(ids))) else ids
        self._specials = {END_OF_TEXT: len(words)} if special else {}
        self._pattern = tokenizer.pattern
        self._ranks = b"".join(b"%s %d\n" % (base64.b64encode(w), n) for n, w in enumerate(words))
        self._reload()

    def _reload(self) -> None:
        from gigatoken.gigatoken_rs import BPETokenizer

        self._tokenizer = None  # free the old tokenizer first
        with tempfile.TemporaryDirectory() as folder:  # Windows does not open a file twice
            file = os.path.join(folder, "ranks.tiktoken")
            with open(file, "wb") as opened:
                opened.write(self._ranks)
            self._tokenizer = BPETokenizer.from_tiktoken(file, self._pattern, self._specials)
        release_freed_memory()
        self._resident, self._read, self._checked = resident_bytes(), 0, 0

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a UTF-8 text, uint32."""
        self._read += len(text)
        if self._read - self._checked > self.CHECK_EVERY:
            self._checked = self._read
            if self._grown():
                release_freed_memory()
                if self._grown():
                    self._reload()
        ids = self._tokenizer.encode(text)
        return ids if self._ids is None else self._ids[ids]

    def _grown(self) -> bool:
        if not self._resident:
            return self._read > self.RELOAD_EVERY
        return resident_bytes() - self._resident > self.MAX_GROWTH


gigatoken = functools.lru_cache(maxsize=4)(Gigatoken)  # loading takes longer than a short text


def release_freed_memory() -> None:
    """Returns freed memory to the operating system. glibc keeps it otherwise: half a megabyte for
    each megabyte of text, because blocks of many sizes are allocated and freed."""
    # Other C libraries do not have malloc_trim. TypeError: Windows, which has no CDLL(None).
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
