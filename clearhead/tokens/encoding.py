"""Encodes texts of any length; the ids are those of one call of tiktoken for the complete text.

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

tiktoken and transformers first split a text at its special tokens. No two of them overlap, so each
place where one is written is one, wherever encoding starts, and a chunk does not end inside it.

Text in which BOUNDARY finds no such position, for example a megabyte of one letter, is one chunk.
"""

import itertools
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tiktoken

from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.tokenizer import Tokenizer

CHUNK_BYTES = 2**16

# Finds boundaries between two matches of every pattern, in UTF-8, but only those that do not need a
# table of all Unicode characters. "|" is in none of these sets, so <|endoftext|> has none inside.
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


def find_boundary(
    text: bytes | bytearray | mmap.mmap,
    start: int,
    stop: int | None = None,
    special: Sequence[bytes] = (),
) -> int | None:
    """Returns the first boundary at a position p with 0 < start <= p < stop, or None. stop: None
    for the end of the text. special: tokens that have no boundary inside."""
    stop = len(text) if stop is None else stop
    # + 3: it reads the next character, up to three bytes of it.
    for found in BOUNDARY.finditer(text, start, min(len(text), stop + 3)):
        p = found.start()
        if p >= stop:
            return None
        if not any(t in text[max(0, p - len(t) + 1) : p + len(t) - 1] for t in special):
            return p
    return None


class StreamEncoder:
    """Encodes texts of any length, chunk by chunk, with a few megabytes of memory.

    A special token of the tokenizer in a text is its id. tiktoken releases the GIL, so several
    encoders can work in threads.
    """

    def __init__(self, tokenizer: Tokenizer, chunk_bytes: int = CHUNK_BYTES):
        self.tokenizer = tokenizer
        self.chunk_bytes = chunk_bytes
        self.empty_documents = 0  # until now
        self.trimmed = Counter()  # of gutenberg.between_markers
        self._longest = max(map(len, tokenizer.special_bytes))

    def encode(self, blocks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Encodes blocks of UTF-8 (no character split between blocks); yields uint16 arrays of
        ids."""
        buffer = bytearray()  # text that is read but not encoded yet
        limit = 2 * self.chunk_bytes  # maximum length of a chunk; grows if no boundary is found
        special = self.tokenizer.special_bytes
        for block in itertools.chain(blocks, [None]):
            buffer += block or b""
            while len(buffer) > limit + self._longest or (block is None and buffer):
                end = len(buffer)
                if end > limit:
                    end = find_boundary(buffer, self.chunk_bytes, limit, special)
                if end is None:
                    limit *= 2
                    continue
                yield self._encode(bytes(buffer[:end]))
                del buffer[:end]
                limit = 2 * self.chunk_bytes

    def _encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a chunk, uint16."""
        if self.tokenizer.name == "byte":
            return _encode_bytes(text)
        ids = self.tokenizer.encode_to_numpy(text.decode(), allowed_special="all")
        return ids.astype(np.uint16)


def _encode_bytes(text: bytes) -> np.ndarray:
    """Returns the byte tokenizer's ids, which are equal to tiktoken's but computed faster."""
    arrays = []
    for part in text.split(END_OF_TEXT.encode()):
        arrays += [np.array([256], np.uint16), np.frombuffer(part, np.uint8).astype(np.uint16)]
    return np.concatenate(arrays[1:])


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


class AnyTokenizer(Protocol):
    """An object that can be the tokenizer of GPTDatasetV1, as tiktoken's encodings."""

    def encode(self, text: str, *, allowed_special: Any) -> Sequence[int]: ...


def encode_text(txt: str, tokenizer: AnyTokenizer) -> np.ndarray:
    """Returns the ids of a text. A `Tokenizer` is fastest."""
    if isinstance(tokenizer, Tokenizer):
        return concatenate(StreamEncoder(tokenizer).encode(utf8_blocks(txt)))
    is_tiktoken = isinstance(tokenizer, tiktoken.Encoding)
    txt = b"".join(utf8_blocks(txt)).decode()  # without lone surrogates
    special = "all" if is_tiktoken else {END_OF_TEXT}
    ids = np.array(tokenizer.encode(txt, allowed_special=special), np.uint32)
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
