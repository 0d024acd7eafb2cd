"""Opens files, compressed or not, and reads plain text in any encoding as blocks of UTF-8.

    for block in decoded_blocks(FilePart("book.txt", encoding="cp1252")):
        ...  # bytes; no character is split between two blocks

A text that is not in its encoding raises DataError, with the position of the byte and the probable
encoding. A byte-order mark at the start of a file is skipped.
"""

import codecs
import contextlib
import gzip
import importlib
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clearhead.errors import DataError, message_of

COMPRESSED = (".gz", ".zst")
JSON = (".jsonl", ".ndjson", ".json")  # always in UTF-8
BLOCK = 2**20  # bytes read at once
HEAD = 2**16  # bytes of a file that tell what it is
CREATE_AGAIN = "create or download it again"
READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class FilePart:
    """A file, or a part of a large file.

    start, stop: byte positions; row groups of a Parquet file; for a hub dataset, the number of the
    part and the number of parts. stop=None: until the end.
    """

    path: str
    start: int = 0
    stop: int | None = None
    text_key: str | list[str] = "text"  # of JSON and Parquet; of several, a record has one
    encoding: str = "utf-8"  # of plain text
    trim: bool = True  # of plain text: only what is between the markers of Project Gutenberg
    size: int = 0  # approximate number of bytes to read; 0 for a hub dataset
    special: Sequence[bytes] = ()  # special tokens of the tokenizer, which are not split


# ------------------------------------------------------------------------------- opening


@contextlib.contextmanager
def translate_read_errors(
    path: str, *errors: type[Exception], hint: str = CREATE_AGAIN
) -> Iterator[None]:
    """Raises DataError for this file in place of errors of the system or another library."""
    try:
        yield
    except DataError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or message_of(error) or type(error).__name__
        if isinstance(error, PermissionError):
            hint = "check its permissions"
        raise DataError("data.path", path, f"cannot be read ({reason})", hint) from error


def check_regular_file(path: str) -> None:
    """Raises DataError if the path is a folder, a FIFO or a device, or does not exist."""
    if not os.path.isfile(path):
        raise DataError("data.path", path, "not a regular file", "give a text file")


def open_decompressed(path: str) -> io.BufferedIOBase:
    """Opens a file for reading, and decompresses it."""
    check_regular_file(path)
    return OPENERS.get(os.path.splitext(path.lower())[1], _open_plain)(path)


def _open_plain(path: str) -> io.BufferedIOBase:
    return io.BufferedReader(io.FileIO(path), BLOCK)


def _open_zstd(path: str) -> io.BufferedIOBase:
    arrow = import_optional("pyarrow", path, "zstd", "pyarrow")
    return io.BufferedReader(arrow.input_stream(path, compression="zstd"), BLOCK)


OPENERS = {".gz": gzip.open, ".zst": _open_zstd}


def import_optional(module: str, path: str, what: str, package: str):
    """Imports an optional library. Raises DataError with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"pip install {package}"
        raise DataError("data.path", path, f"reading {what} needs {package}", hint) from error


def extension_of(path: str) -> str:
    """Returns the extension of a file in lower case, without that of its compression."""
    name, extension = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if extension in COMPRESSED else extension


# ------------------------------------------------------------------------------- plain text


def decoded_blocks(part: FilePart) -> Iterator[bytes]:
    """Reads a text file as blocks of UTF-8, without changing line ends, and checks the encoding."""
    decoder = codecs.getincrementaldecoder(part.encoding)()
    offset, end = part.start, part.stop
    with open_decompressed(part.path) as file:
        if offset:
            file.seek(offset)
        raw = b" "
        while raw:
            raw = file.read(BLOCK if end is None else min(BLOCK, end - offset))
            _check_encoding(part, raw, offset)
            carried = decoder.getstate()[0]  # first bytes of a character that continues here
            try:
                text = decoder.decode(raw, final=not raw)
                if (zero := text.find("\0")) >= 0:  # not in a text, whatever its encoding
                    start = len(text[:zero].encode(part.encoding))
                    raise UnicodeDecodeError(part.encoding, raw, start, start + 1, "zero")
                block = text.removeprefix("" if offset else "\ufeff").encode()
            except UnicodeError as error:  # other types have no position in the file
                start = error.start if isinstance(error, UnicodeDecodeError) else 0
                byte = f"0x{(carried + raw)[start : start + 1].hex()}"
                position = offset - len(carried) + start
                reason = f"not {part.encoding} text ({byte} at byte {position})"
                hint = encoding_hint(part, raw, start - len(carried))
                raise DataError("data.path", part.path, reason, hint) from error
            offset += len(raw)
            if block:
                yield block


def _check_encoding(part: FilePart, raw: bytes, offset: int) -> None:
    """Raises DataError for a text that can be decoded, but is certainly in another encoding."""
    if codecs.lookup(part.encoding).name in ("utf-8", "utf-8-sig"):
        if name := seven_bit_encoding(raw[:HEAD]):
            reason = f"is {name} text, not {part.encoding}"
            raise DataError("data.path", part.path, reason, _change_encoding(part, [name]))
    elif not offset and is_utf8(raw, part.encoding):
        reason = f"is utf-8 text, not {part.encoding}"
        hint = f"set data.encoding=utf-8, or convert the file if other files are {part.encoding}"
        raise DataError("data.path", part.path, reason, hint)


def encoding_hint(part: FilePart, raw: bytes, position: int) -> str:
    """Returns what to do about a byte that cannot be decoded. raw: what was read of the file."""
    start = max(0, position - HEAD // 4) // 4 * 4  # a character of UTF-32 has four bytes
    names = likely_encodings(raw[start : max(0, position) + HEAD // 4])
    given = codecs.lookup(part.encoding).name
    # Nothing was read: the end of the file is inside a character.
    is_correct = not raw or (given == "utf-8" and is_utf8(raw[: max(0, position)], "latin-1"))
    if is_correct or given in [codecs.lookup(name).name for name in names[:1]]:
        return f"most of it is {part.encoding}: correct the byte, or convert what follows"
    return f"{_change_encoding(part, names)}, or correct the byte"


def _change_encoding(part: FilePart, names: list[str]) -> str:
    if extension_of(part.path) in JSON:
        return f"JSON must be in UTF-8: iconv -f {names[0] if names else 'ENCODING'} -t utf-8 FILE"
    probably = f"probably {' or '.join(names)}" if names else "which an editor may show"
    return f"set data.encoding for all files, {probably}, or convert this one to utf-8"


# ------------------------------------------------------------------------------- encodings

# Encodings that write other letters with ASCII only, and bytes that are in each such text.
SEVEN_BIT = {"iso2022_jp": b"\x1b$", "iso2022_kr": b"\x1b$)C", "hz": b"~{", "utf-7": b"+"}
WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
# In the order of preference. ISO 8859-1, -7, -9 and others are nearly parts of the Windows ones.
OTHERS = "utf-8 cp1252 mac_roman cp850 cp1250 iso8859-2 cp1251 koi8_r iso8859-5 cp866 cp1253 cp1254"
OTHERS += " cp1255 cp1256 cp874 cp932 euc_jp gb18030 big5 cp949"
FREQUENT = frozenset(
    "éèàêçôùîâœäöüßÄÖÜáíóñúãõåæø’“”«»–—…ąćęłńśźżčěňřšťžőűğışİ"
    "оеаинтсрвлкмдпуяыьαοειητνσςρκπυλμάίόέήיוהלאמרשבתנםדاليومنترةبعدفسهانรกอเงมยลวดทสต่้ัีิ"
    "のにはをたがでてとしれさいるかなもらっくきこすまう、。「」，？！：；（）《》이다는의에을가고하지를은한로어사있도기자나아리서시인그"
    "的一是不了在人有我他这中大来上国说们为子和你地出道也时年得就那要下以生会自之這來國個說們為時學"
)
# What texts do not contain: control and private characters, box drawing, half-width katakana, a
# capital after a small letter, two scripts in a word, three accented letters in a row.
IMPLAUSIBLE = re.compile(
    "[\ufffd\0-\x08\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\u2500-\u259f\uff61-\uff9f]"
    "|[a-zß-ÿа-яα-ώ](?=[A-ZÀ-ÞА-ЯΑ-Ω])|[À-ɏ]{3}"
    "|[A-Za-z](?=[\u0370-\u0e7f])|[\u0370-\u0e7f](?=[A-Za-z])"
)


def seven_bit_encoding(raw: bytes) -> str | None:
    """Returns the encoding of a text in ASCII that is other text in an encoding of SEVEN_BIT."""
    for name, mark in SEVEN_BIT.items() if raw.isascii() else ():
        try:
            text = codecs.getincrementaldecoder(name)().decode(raw) if mark in raw else ""
        except UnicodeDecodeError:
            continue
        others = [c for c in text if c > "\x7f"]
        if sum(c in FREQUENT for c in others) > max(2, len(others) / 4):
            return name
    return None


def is_utf8(raw: bytes, encoding: str) -> bool:
    """Returns whether bytes that should be in another encoding are certainly UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    if raw.isascii():  # these characters are other ones in UTF-16 or EBCDIC
        return len(raw) > 16 and b"\0" not in raw and "a".encode(encoding) != b"a"
    return text.startswith("\ufeff") or sum(c > "\x7f" for c in text) > 7


def likely_encodings(sample: bytes) -> list[str]:
    """Returns the one or two most likely encodings of a part of a text, or [].

    Most encodings decode all bytes. So they are compared by their characters outside ASCII: how
    many are frequent in a language that uses it, less those that are implausible where they are.
    The part must begin at a multiple of four bytes of the file.
    """
    texts = {}  # the first encoding of each text, and its share of frequent characters
    for name in WIDE if b"\0" in sample else OTHERS.split():
        text = sample.decode(name, "replace")
        counted = text if b"\0" in sample else [c for c in text if c > "\x7f"]
        good = sum(c in FREQUENT or "\0" < c < "\x7f" for c in counted)
        score = (good - len(IMPLAUSIBLE.findall(text))) / max(1, len(counted))
        texts.setdefault(text, (score, name))
    found = sorted(texts.values(), key=lambda found: -found[0])[:2]
    return [name for score, name in found if score > 0.3 and score > 0.9 * found[0][0]]
