"""Encodes text with gigatoken, a fast tokenizer, whose memory is limited here."""

import base64
import contextlib
import ctypes
import functools
import os
import tempfile

import numpy as np

from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.tokenizer import Tokenizer


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
