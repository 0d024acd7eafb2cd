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
# That a text may be in, if not in UTF-8. ISO 8859 and others are nearly parts of those of Windows.
ENCODINGS = "cp1252 mac_roman cp1250 cp1251 koi8_r cp866 cp1253 cp1254 cp1255 cp1256 cp874 cp932 "
ENCODINGS += "euc_jp gb18030 big5 cp949 utf_16 utf_16_le utf_16_be utf_32"


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
    """Raises DataError for UTF-8 that would be read as text in another encoding."""
    given = codecs.lookup(part.encoding).name
    if not offset and given not in ("utf-8", "utf-8-sig") and _is_utf8(raw):
        reason = f"is utf-8 text, not {part.encoding}"
        hint = f"set data.encoding=utf-8, or convert the file if other files are {part.encoding}"
        raise DataError("data.path", part.path, reason, hint)


def _is_utf8(raw: bytes) -> bool:
    """Returns whether bytes, of which the last character may be incomplete, are certainly UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return sum(character > "\x7f" for character in text) > 7


def encoding_hint(part: FilePart, raw: bytes, position: int) -> str:
    """Returns what to do about a byte that cannot be decoded. raw: what was read of the file."""
    from charset_normalizer import from_bytes

    position = max(0, position)
    start = max(0, position - HEAD // 4) // 4 * 4  # a character of UTF-32 has four bytes
    sample = raw[start : position + HEAD // 4]
    valid = sample.decode("utf-8", "ignore").encode()
    most = 0.8 * sum(byte > 127 for byte in sample)
    is_utf8 = codecs.lookup(part.encoding).name == "utf-8"
    # Nothing was read: the end of the file is inside a character.
    if not raw or (is_utf8 and sum(byte > 127 for byte in valid) > most):
        return f"most of it is {part.encoding}: correct the byte, or convert what follows"
    found = from_bytes(sample, cp_isolation=ENCODINGS.split())
    # Of encodings that read the sample alike, the first one in ENCODINGS.
    names = [min(match.could_be_from_charset, key=ENCODINGS.find) for match in found][:2]
    if extension_of(part.path) in JSON:
        return f"JSON must be in UTF-8: iconv -f {names[0] if names else 'ENCODING'} -t utf-8 FILE"
    probably = f"probably {' or '.join(names)}" if names else "which an editor may show"
    return f"set data.encoding for all files, {probably}, or convert this one, or correct the byte"
