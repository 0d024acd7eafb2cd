"""A text of any length -> the ids that one call of the tokenizer on all of it would give.

    for ids in StreamEncoder("gpt2").encode(blocks):  # uint16 arrays
        ...

A long text is cut into pieces at places where GPT-2's pattern always cuts, so that the ids of the
pieces are those of the whole, and memory stays at a few pieces. The pattern (Radford et al. 2019;
`r50k_pat_str` in tiktoken) takes, from the left,

    's 't 're 've 'm 'll 'd | ?letters | ?digits | ?others | white space

where an optional blank goes with what follows it, and white space before a visible character
leaves its last one to it. No alternative looks back, so two neighbours are always parted when

- the left one is visible and the right one is white space, or
- they are of two different kinds among letters, digits and others, the left one not being an
  apostrophe, which a letter may follow in a contraction.

Text in which BOUNDARY finds no such position, for example a gigabyte of one letter, is encoded
chunk by chunk by a property of byte-pair encoding; see `StreamEncoder`.

Bulk encoding is gigatoken's (some ten to thirty times the speed of tiktoken); tiktoken stays the
tokenizer of record: a sample of the pieces is encoded by both, and a difference ends the work. One
difference is known, of the versions of Unicode that they are built on; see UNICODE_DIFFERENCES.
"""

import functools
import itertools
import mmap
import re
from collections.abc import Iterable, Iterator

import numpy as np
import tiktoken

from errors import DataError
from tokens import END_OF_TEXT
from tokens.gigatoken_engine import gigatoken
from tokens.tokenizers import TOKENIZERS, get_tokenizer, token_byte_lengths

CHUNK_BYTES = 2**18  # bytes; gigatoken is fastest with pieces from a quarter of a megabyte to one
CHECK_EVERY = 128  # pieces: the beginning of every 128th, and of the first, is checked by tiktoken
CHECKED_BYTES = 2**15  # bytes of such a beginning

# Where the pattern always cuts, in UTF-8, as far as it is seen without knowing all of Unicode: the
# end of what is visible; a change of kind in ASCII. "|" is on no side, so the end-of-text token is
# never cut in two.
_BEFORE_WHITE_SPACE = (
    rb"(?=[\t-\r ])(?<![\t-\r\x1c-\x20])(?<!\xc2\x85)(?<!\xc2\xa0)(?<!\xe1\x9a\x80)"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)"
)
_OTHER = rb"\x00-\x08\x0e-\x1b\x7f!-/:-@\[-`{}~"
BOUNDARY = re.compile(
    rb"|".join(
        (
            _BEFORE_WHITE_SPACE,
            rb"(?<=[A-Za-z])(?=[0-9%s])" % _OTHER,
            rb"(?<=[0-9])(?=[A-Za-z%s])" % _OTHER,
            rb"(?<=[%s])(?<!')(?=[A-Za-z0-9])" % _OTHER,
        )
    )
)


# gigatoken 0.10 takes 4,657 characters for letters or digits, as Unicode 17 does, that tiktoken,
# of an older version, takes for others. It shows before a contraction: "\u088f's" is two matches of
# the pattern for the one, "\u088f'" and "s" for the other. No other difference was found
# (docs/data.md). Text with one of these characters, or a neighbour of theirs, goes to tiktoken.
UNICODE_DIFFERENCES = re.compile(
    rb"\xe0(?:\xa2\x8f|\xb1\x9c|\xb3\x9c)|\xea\x9f[\x8e\x8f\x92\x94\xb1]"
    rb"|\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]"
    rb"|\x9e\x9b|\xab\x9c|\xac\xba|[\xb2\xb3])"
)


def find_boundary(text: bytes | bytearray | mmap.mmap, start: int, stop: int) -> int | None:
    """The first place from `start` > 0 to before `stop` where BOUNDARY finds a cut, or None."""
    found = BOUNDARY.search(text, start, min(len(text), stop + 1))  # it looks at the byte behind
    return found.start() if found and found.start() < stop else None


# --------------------------------------------------------------------------------- the encoder


class StreamEncoder:
    """Encodes texts of any length, piece by piece, in a few megabytes.

    tokenizer: gpt2 | byte. endoftext: what "<|endoftext|>" in the text is, token | text.
    engine: gigatoken | tiktoken; bytes need neither.

    A run without a cut. Byte-pair encoding has this property: a sequence of tokens is the
    encoding of its text exactly when each two neighbours are the encoding of theirs (van Antwerpen
    and Neubeck 2024, "So many tokens, so little time"; crate `bpe`). So when a run is encoded up to
    somewhere as A, and again from the end of A's k-th token on as B, and A's token k and B's first
    are the encoding of theirs, then A's first k tokens followed by B are the encoding of it all.
    """

    def __init__(
        self,
        tokenizer: str,
        endoftext: str = "token",
        engine: str = "gigatoken",
        chunk_bytes: int = CHUNK_BYTES,
        check_every: int = CHECK_EVERY,
    ):
        self.tokenizer = get_tokenizer(tokenizer)
        self.chunk_bytes = max(chunk_bytes, 32)  # several times the longest character
        self.check_every = check_every
        self.chunks = self.text_bytes = 0  # encoded so far
        special = {END_OF_TEXT} if endoftext == "token" else set()
        self._reference = functools.partial(
            self.tokenizer.encode_to_numpy, allowed_special=special, disallowed_special=()
        )
        if tokenizer == "byte":
            engine = "numpy"
            self._encode = functools.partial(_encode_bytes, special=bool(special))
        elif engine == "gigatoken":
            self._gigatoken = gigatoken(bool(special))
            self._encode = self._encode_with_gigatoken
        else:
            self._encode = lambda text: self._reference(text.decode())
        self.engine = engine

    def encode(
        self, blocks: Iterable[bytes], what: str = "the text", offset: int = 0
    ) -> Iterator[np.ndarray]:
        """Blocks of UTF-8, whole characters each -> ids, uint16 arrays, in order.

        `what` names the text in errors, and `offset` is the byte where it begins there. Raises
        DataError when the two tokenizers differ.
        """
        rest = bytearray()  # the text from `offset` on, as far as it was read
        span = 2 * self.chunk_bytes  # a stretch without a cut is encoded so far at once
        follows: int | None = None  # in a run: the id that is to come next
        for block in itertools.chain(blocks, [None]):
            rest += block or b""
            while len(rest) > span or (block is None and rest):
                end = cut = len(rest)
                if len(rest) > span:
                    end = cut = find_boundary(rest, self.chunk_bytes, span)
                if cut is None:
                    end = span
                    while rest[end] & 0xC0 == 0x80:  # inside a character
                        end -= 1
                text = bytes(rest[:end])
                ids = self._encode_chunk(text, what, offset)
                if follows not in (None, ids[0]):  # not seen yet
                    cause = f"a run without a break at byte {offset} cannot be tokenized in parts"
                    raise DataError("data.path", what, cause, "put a line break into it")
                if cut is None:
                    count = self._num_final(text, ids)
                    if count is None:
                        span *= 2
                        continue
                    follows, ids = int(ids[count]), ids[:count]
                    end = int(token_byte_lengths(self.tokenizer.name)[ids].sum())
                else:
                    follows, span = None, 2 * self.chunk_bytes
                self.text_bytes += end
                yield ids
                offset += end
                del rest[:end]

    def _num_final(self, text: bytes, ids: np.ndarray) -> int | None:
        """How many ids of a run that was encoded up to somewhere can be given out.

        Its last tokens may change with more text. Before them: a place at the end of a character
        where encoding what follows by itself begins with the same token.
        """
        ends = np.cumsum(token_byte_lengths(self.tokenizer.name)[ids])
        last = int(np.searchsorted(ends, len(text) - max(512, self.chunk_bytes // 16)))
        for count in range(last, max(0, last - 100), -1):
            begin = int(ends[count - 1])
            if text[begin] & 0xC0 != 0x80 and self._encode(text[begin:])[0] == ids[count]:
                return count
        return None

    def _encode_with_gigatoken(self, text: bytes) -> np.ndarray:
        # The search is a hundred times as slow as the rest of the test.
        foreign = not text.isascii() and any(byte in text for byte in (b"\xe0", b"\xea", b"\xf0"))
        if foreign and UNICODE_DIFFERENCES.search(text):
            return self._reference(text.decode())
        return self._gigatoken.encode(text)

    def _encode_chunk(self, text: bytes, what: str, offset: int) -> np.ndarray:
        """The ids of a piece; the beginning of one in `check_every` compared with tiktoken's."""
        ids = self._encode(text).astype(np.uint16)
        if self.chunks % self.check_every == 0 and self.engine == "gigatoken":
            cut = find_boundary(text, CHECKED_BYTES, len(text))
            expected = self._reference(text[:cut].decode())
            if not np.array_equal(ids[: len(expected)] if cut else ids, expected):
                raise DataError(
                    "data.path",
                    what,
                    "gigatoken and tiktoken disagree on the text from byte "
                    f"{offset} to {offset + (cut or len(text))}",
                    "prepare it with engine=tiktoken (python -m scripts.prepare_data), which is "
                    "slower",
                )
        self.chunks += 1
        return ids


def encode_text(txt: str, tokenizer: tiktoken.Encoding) -> np.ndarray:
    """The ids of a text; any encoding of tiktoken's will do, GPT-2's is the fastest."""
    if tokenizer.name in TOKENIZERS:
        return concatenate(StreamEncoder(tokenizer.name).encode(utf8_blocks(txt)))
    txt = b"".join(utf8_blocks(txt)).decode()  # without halves of surrogate pairs
    ids = tokenizer.encode_to_numpy(txt, allowed_special={END_OF_TEXT}, disallowed_special=())
    return ids.astype(np.uint16) if tokenizer.n_vocab <= 2**16 else ids


def concatenate(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """uint16 arrays, as they come, as one."""
    data = bytearray()
    for ids in arrays:
        data += memoryview(ids)
    return np.frombuffer(data, np.uint16)


def utf8_blocks(txt: str, size: int = 2**16) -> Iterator[bytes]:
    """A string as blocks of UTF-8; a lone half of a surrogate pair becomes U+FFFD, as with
    tiktoken."""
    start = 0
    while start < len(txt):
        end = start + size
        while "\ud800" <= txt[end - 1 : end] <= "\udbff":  # its other half may follow
            end += 1
        part, start = txt[start:end], end
        try:
            yield part.encode()
        except UnicodeEncodeError:
            yield part.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _encode_bytes(text: bytes, special: bool) -> np.ndarray:
    """The byte tokenizer's ids: tiktoken's would be the same, one match of a pattern a byte."""
    end_of_text = np.array([256], np.uint16)
    parts = text.split(END_OF_TEXT.encode()) if special else [text]
    arrays = [np.frombuffer(part, np.uint8).astype(np.uint16) for part in parts]
    return np.concatenate([a for part in arrays for a in (end_of_text, part)][1:])
