"""Reads documents from files as blocks of UTF-8, with a bounded amount of memory.

    for part in split_file("web.jsonl", max_bytes=2**24):
        for blocks in documents(part):
            for block in blocks:  # bytes; no character is split between two blocks
                ...

The file extension selects the format, an entry of FORMATS: plain text (one document per file),
JSON lines (one JSON object per line), a JSON array of objects, CSV, Parquet, and data sets on the
Hugging Face hub. Text, JSON and CSV may be compressed (*.gz, *.zst). Parquet and zstd need the
package pyarrow, the hub needs datasets; both are imported on first use. Files with other content
(file_kinds.py) are refused.

An error in a file raises DataError with the byte or the row. A byte-order mark at the start of a
file and empty texts are skipped, as is null in place of a text. A lone surrogate in JSON becomes
U+FFFD, as in tiktoken.
"""

import codecs
import contextlib
import csv
import gzip
import importlib
import io
import itertools
import json
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clearhead.errors import DataError, message_of, sanitize
from clearhead.tokens import HUB
from clearhead.tokens.encoding import StreamEncoder, find_boundary, utf8_blocks
from clearhead.tokens.file_kinds import (
    HEAD,
    Kind,
    chat_code,
    is_utf8,
    kind_of,
    likely_encodings,
    seven_bit_encoding,
)
from clearhead.tokens.gutenberg import between_markers, has_markers

COMPRESSED = (".gz", ".zst")
BLOCK = 2**20  # bytes read at once
ROWS = 16  # of Parquet, read at once; each may have MAX_RECORD characters
MAX_RECORD = 2**26  # maximum bytes of a JSON line and characters of a record's text
NO_TEXT = ("the files contain no text", "use other files, or data.trim=false if they have markers")
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

    @property
    def format(self) -> "Format":
        return format_of(self.path)


def split_file(path: str, max_bytes: int, **options) -> Iterator[FilePart]:
    """Splits a file into parts of about `max_bytes` bytes, which have the same tokens as the file.
    options: text_key, encoding, trim and special of the parts. Raises DataError."""
    part = FilePart(path, **options)
    return _translated(part, part.format.split(part, max_bytes))


def documents(part: FilePart, trimmed: Counter | None = None) -> Iterator[Iterable[bytes]]:
    """Yields the documents of a part, each as an iterable of blocks of UTF-8. Raises DataError.
    trimmed: counts what `between_markers` removes."""
    found = _translated(part, part.format.read(part))
    if part.format.is_text:
        if part.trim and part.start == 0 and part.stop is None:
            found = between_markers(found, Counter() if trimmed is None else trimmed)
        yield found
    else:
        for text in found:
            yield utf8_blocks(text, BLOCK)


def encode_part(part: FilePart, encoder: StreamEncoder) -> Iterator[np.ndarray]:
    """Yields the token ids of a part, uint16. An end-of-text token is inserted before each document
    that does not start with one. Empty documents are skipped and counted by the encoder."""
    end_of_text = np.array([encoder.tokenizer.eot_token], np.uint16)
    offset = part.start if part.format.is_text else 0  # > 0: the part starts inside a document
    for blocks in documents(part, encoder.trimmed):
        is_empty = True
        for ids in encoder.encode(blocks):
            if is_empty and not offset and ids[0] != end_of_text[0]:
                yield end_of_text
            is_empty = False
            yield ids
        encoder.empty_documents += is_empty


# ------------------------------------------------------------------------------ opening, splitting


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


def _translated(part: FilePart, items: Iterator) -> Iterator:
    """Yields the same items. Errors that the format names become DataError."""
    with translate_read_errors(part.path, *part.format.errors, hint=part.format.hint):
        yield from items


def check_regular_file(path: str) -> None:
    """Raises DataError if the path is a folder, a FIFO or a device, or does not exist."""
    if not os.path.isfile(path):
        raise DataError("data.path", path, "not a regular file", "give a text file")


def open_decompressed(path: str) -> io.BufferedIOBase:
    """Opens a file for reading, and decompresses it."""
    check_regular_file(path)
    return OPENERS.get(os.path.splitext(path.lower())[1], _open_plain)(path)


def check_kinds(files: Iterable[str]) -> list[str]:
    """Raises DataError for a file that is not text (KINDS), unless its format is Parquet or a
    dataset. Returns a note for each kind of text files that are probably not plain text."""
    found: dict[Kind, list[str]] = {}
    for path in (path for path in files if format_of(path).split is _split_bytes):
        with translate_read_errors(path, *READ_ERRORS), open_decompressed(path) as file:
            kind = kind_of(extension_of(path), file.peek(HEAD))
        if kind and not kind.is_read:
            raise DataError("data.path", path, f"is {kind.what}", kind.advice)
        if kind and format_of(path).is_text:
            found.setdefault(kind, []).append(path)
    notes = []
    for kind, paths in found.items():
        which = f"{paths[0]} and {len(paths) - 1} more" if paths[1:] else paths[0]
        note = f"{which}: read as plain text, with {kind.what}; to change that: {kind.advice}"
        notes.append(sanitize(f"data.path: {note}", keep=""))
    return notes


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


def _split_bytes(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
    """Splits a file at boundaries of its format. Compressed files and text in other encodings than
    UTF-8 are not split."""
    size = os.path.getsize(part.path)
    is_utf8 = not part.format.is_text or codecs.lookup(part.encoding).name == "utf-8"
    can_split = part.format.boundary and is_utf8 and not part.path.lower().endswith(COMPRESSED)
    if can_split and size > max_bytes and part.format.is_text and part.trim:
        can_split = not has_markers(part.path)
    bounds = _boundaries(part, size, -(-size // max_bytes)) if can_split else []
    for start, stop in itertools.pairwise([0, *bounds, size]):
        yield replace(part, start=start, stop=None if stop == size else stop, size=stop - start)


def _boundaries(part: FilePart, size: int, count: int) -> list[int]:
    """Returns byte positions that split a file into `count` parts, or fewer if it has too few
    boundaries."""
    if count < 2:
        return []
    bounds = [0]
    with (
        open(part.path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        for number in range(1, count):
            position = max(4, number * size // count)  # after a byte-order mark
            if position > bounds[-1]:  # otherwise the search would find the same boundary
                found = part.format.boundary(text, position, special=part.special)
                bounds.append(found or size)
    return [bound for bound in bounds[1:] if bound < size]


# -------------------------------------------------------------------------------------- plain text


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
                hint = _encoding_hint(part, raw, start - len(carried))
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


def _encoding_hint(part: FilePart, raw: bytes, position: int) -> str:
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
    if part.format.read in (_json_lines, _json_records):
        return f"JSON must be in UTF-8: iconv -f {names[0] if names else 'ENCODING'} -t utf-8 FILE"
    probably = f"probably {' or '.join(names)}" if names else "which an editor may show"
    return f"set data.encoding for all files, {probably}"


# ----------------------------------------------------------------------- JSON, CSV, Parquet, hub


def _next_line(text: mmap.mmap, position: int, special: Sequence[bytes]) -> int | None:
    """Returns the first position from this one on where a line starts."""
    return text.find(b"\n", position - 1) + 1 or None


# Lines that are not valid JSON, and what to do.
LINE_HINTS = (
    (rb".*\}\s*,\s*$", "remove the comma at the end of each line"),
    (rb"\s*\[", "an array is read from a file that is named *.json"),
    (rb"\s*\{(.*[,\[{])?\s*$", "write one object per line, or an array in a *.json file"),
    (rb"", "correct the line"),
)


def _json_lines(part: FilePart) -> Iterator[str]:
    """Reads the text of each line; blank lines are skipped."""
    offset, end = part.start, part.stop
    with open_decompressed(part.path) as file:
        if offset:
            file.seek(offset)
        while (end is None or offset < end) and (line := file.readline(MAX_RECORD + 1)):
            where = f"the line at byte {offset}"
            _check_length(line, part, where)
            if line.strip():
                try:
                    record = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                    reason = f"{where} is not valid JSON ({message_of(error)})"
                    hint = next(h for line_end, h in LINE_HINTS if re.match(line_end, line, re.S))
                    if isinstance(error, UnicodeDecodeError):
                        hint = _encoding_hint(part, line, error.start)
                    raise DataError("data.path", part.path, reason, hint) from error
                yield text_field(record, part, where)
            offset += len(line)


def _json_records(part: FilePart) -> Iterator[str]:
    """Reads the text of each record of a JSON array. Other files are read as JSON lines."""
    blocks = (block.decode() for block in decoded_blocks(replace(part, encoding="utf-8")))
    text = next(blocks, "")
    if not text.lstrip().startswith("["):
        yield from _json_lines(part)
        return
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    position, number = text.index("[") + 1, 0
    while not text.startswith("]", position := between.match(text, position).end()):
        where = f"record {number}"
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            more = "".join(itertools.islice(blocks, 1 + (len(text) - position) // BLOCK))
            text, position = text[position:] + more, 0
            if not more or len(text) > 2 * MAX_RECORD or isinstance(error, RecursionError):
                reason = f"{where} is not valid JSON ({message_of(error)})"
                raise DataError("data.path", part.path, reason, "correct it") from error
            continue
        yield text_field(record, part, where)
        number += 1
    if any(block.strip() for block in itertools.chain([text[position + 1 :]], blocks)):
        reason = f"there is more after the array, which has {number} records"
        raise DataError("data.path", part.path, reason, "give one array, or one object per line")


def text_field(record: object, part: FilePart, where: str) -> str:
    """Returns the text of a record, "" for null. Raises DataError if it has none. where: its
    position."""
    keys = record if isinstance(record, dict) else {}
    key = _text_key(keys, part, where)
    text = keys[key]
    if isinstance(text, str):
        _check_length(text, part, where)
        return text
    if text is None:
        return ""
    reason = f"the value of {key!r} in {where} has the type {type(text).__name__}, not text"
    raise DataError(
        "data.path", part.path, reason, _chat_hint(keys) or "set data.text_key, or correct the file"
    )


def _chat_hint(record: dict) -> str:
    """Returns a hint for a record of a chat or an instruction, or ""."""
    code = chat_code(record)
    return code and f"write one text per record with Python (docs/data.md): {code}"


def _text_key(keys: dict, part: FilePart, where: str) -> str:
    """Returns the key of the text. Raises DataError unless exactly one is in `keys`."""
    wanted = [part.text_key] if isinstance(part.text_key, str) else part.text_key
    found = [key for key in wanted if key in keys]
    if len(found) == 1:
        return found[0]
    shown = [", ".join(f"{key!r:.60}" for key in itertools.islice(of, 10)) for of in (wanted, keys)]
    how_many = "no key" if not found else "more than one key of"
    reason = f"{where} has {how_many} {shown[0]} (its keys: {shown[1] or 'none'})"
    hint = "set data.text_key, to a list such as [text,content] if files differ"
    if not keys:
        hint = 'write objects such as {"text": ...}, one per line, or an array in a *.json file'
    hint = (not found and _chat_hint(keys)) or hint
    raise DataError("data.path", part.path, reason, hint)


def _check_length(text: bytes | str, part: FilePart, where: str) -> None:
    """Raises DataError for a text that would need too much memory."""
    if len(text) > MAX_RECORD:
        unit = "bytes" if isinstance(text, bytes) else "characters"
        reason = f"{where} is longer than {MAX_RECORD:,} {unit}"
        raise DataError("data.path", part.path, reason, "split the text into several records")


def _csv_rows(part: FilePart) -> Iterator[str]:
    """Reads the text of each row. The first row has the names of the columns. The delimiter is the
    one that separates data.text_key in it, or separates most names."""
    csv.field_size_limit(MAX_RECORD)
    lines = _text_lines(part)
    if not (first := next(lines, "")):
        return
    delimiters = "\t,;" if extension_of(part.path) == ".tsv" else ",;\t"
    names = {mark: next(csv.reader([first], delimiter=mark), []) for mark in delimiters}
    wanted = {part.text_key} if isinstance(part.text_key, str) else {*part.text_key}
    delimiter = max(names, key=lambda mark: (not wanted.isdisjoint(names[mark]), len(names[mark])))
    header = names[delimiter]
    key = _text_key(dict.fromkeys(header, ""), part, "the first line")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    where = "the row in line 2"
    try:
        if header.count(key) > 1:
            raise csv.Error(f"several columns {key!r:.60}")
        for row in rows:
            if len(row) not in (0, len(header)):
                raise csv.Error(f"{len(row)} fields, but {len(header)} names")
            if row:
                yield row[header.index(key)]
            where = f"the row in line {rows.line_num + 2}"
    except csv.Error as error:
        reason = f"{where} is not valid CSV ({message_of(error)})"
        hint = f"each row needs one field per name, separated by {delimiter!r}; quote texts"
        raise DataError("data.path", part.path, reason, hint) from error


def _text_lines(part: FilePart) -> Iterator[str]:
    """Yields the lines of a text with their ends: line feed, carriage return, or both."""
    rest = b""
    for block in decoded_blocks(part):
        *lines, rest = (rest + block).splitlines(keepends=True)  # "\n" may follow a last "\r"
        _check_length(rest, part, "a line")
        yield from (line.decode() for line in lines)
    yield rest.decode()


def _parquet_rows(part: FilePart) -> Iterator[str]:
    with _open_parquet(part.path) as file:
        key = _text_key(_empty_record(file.schema_arrow), part, "the file")
        for group in range(file.num_row_groups)[part.start : part.stop]:
            _check_row_group(file.metadata.row_group(group), key, part, group)
            batches = file.iter_batches(ROWS, row_groups=[group], columns=[key])
            values = itertools.chain.from_iterable(batch.column(0) for batch in batches)
            for row, value in enumerate(values):
                where = f"row {row} of row group {group}"
                yield text_field({key: value.as_py()}, part, where)


def _empty_record(schema) -> dict:
    """Returns a record of a Parquet file with its keys, and those of lists of objects."""
    types = {name: str(schema.field(name).type) for name in schema.names}
    keys = re.compile(r"(\w+): string")
    return {n: [dict.fromkeys(keys.findall(t))] if "<" in t else "" for n, t in types.items()}


def _check_row_group(metadata, key: str, part: FilePart, group: int) -> None:
    """Raises DataError if few rows have very much text: Arrow needs five times the memory of a
    page, which has at least one text."""
    columns = map(metadata.column, range(metadata.num_columns))
    for column in (column for column in columns if column.path_in_schema == key):
        size = column.total_uncompressed_size
        is_repeated = size > 1000 * column.total_compressed_size
        if size > max(4 * MAX_RECORD, 0 if is_repeated else metadata.num_rows * MAX_RECORD // 16):
            reason = f"row group {group} has {size:,} bytes of text in {metadata.num_rows:,} rows"
            hint = "split long texts, or write the file with fewer rows per row group"
            raise DataError("data.path", part.path, reason, hint)


def _split_row_groups(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
    with _open_parquet(part.path) as file:
        groups = range(file.num_row_groups)
        sizes = [file.metadata.row_group(group).total_byte_size for group in groups]
    first = size = 0
    for group in groups:
        size += sizes[group]
        if size >= max_bytes or group == groups[-1]:
            yield replace(part, start=first, stop=group + 1, size=size)
            first, size = group + 1, 0


def _open_parquet(path: str):
    parquet = import_optional("pyarrow.parquet", path, "Parquet", "pyarrow")
    check_regular_file(path)
    return parquet.ParquetFile(path)


def _hub_rows(part: FilePart) -> Iterator[str]:
    """Reads the texts of a hub dataset's part number `start`; the dataset has `stop` parts."""
    rows = load_hub_dataset(part.path)
    if part.stop:
        rows = rows.shard(num_shards=part.stop, index=part.start)
    for record in rows:
        yield text_field(record, part, "a row")


def _split_hub_dataset(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
    """Splits a dataset as it is stored."""
    count = load_hub_dataset(part.path).num_shards
    return (replace(part, start=number, stop=count) for number in range(count))


def load_hub_dataset(path: str):
    """Streams the dataset hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT.

    Only this function reads data from the network.
    """
    datasets = import_optional("datasets", path, "the Hugging Face hub", "datasets")
    name, config, split = [*path.removeprefix(HUB).split(":"), "", ""][:3]
    return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)


# ----------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """How the files of a format are read."""

    read: Callable[[FilePart], Iterator[str] | Iterator[bytes]]  # yields the text of each document
    extensions: tuple[str, ...] = ()  # of its files, before one of COMPRESSED
    is_text: bool = False  # one document per file, in data.encoding; `read` yields blocks of UTF-8
    # (bytes, position, special) -> the first position from this one on where a new part may start,
    # or None. In a text, it must be between two tokens (tokens/encoding.py), such as after a single
    # line break, and `read` must find text before it: the end-of-text token precedes that of the
    # first part. Without this function, a file has one part.
    boundary: Callable[..., int | None] | None = None
    split: Callable[[FilePart, int], Iterator[FilePart]] = _split_bytes
    errors: tuple[type[Exception], ...] = READ_ERRORS  # of files that cannot be read
    hint: str = CREATE_AGAIN  # what to do then
    is_in_folders: bool = True  # whether a folder means these files, too
    is_file: bool = True  # not a dataset of the hub


# Parquet and the hub have errors of many types: damaged files, the network, unknown names.
FORMATS = {
    "text": Format(decoded_blocks, (".txt", ".md"), is_text=True, boundary=find_boundary),
    "JSON lines": Format(_json_lines, (".jsonl", ".ndjson"), boundary=_next_line),
    "JSON array": Format(_json_records, (".json",), is_in_folders=False),
    "CSV": Format(_csv_rows, (".csv", ".tsv"), is_in_folders=False),
    "Parquet": Format(_parquet_rows, (".parquet",), split=_split_row_groups, errors=(Exception,)),
    "hub": Format(
        _hub_rows,
        split=_split_hub_dataset,
        errors=(Exception,),
        hint="check NAME:CONFIG:SPLIT and the network connection",
        is_file=False,
    ),
}


def format_of(path: str) -> Format:
    """Returns the format of a file, plain text for unknown extensions, or that of hub datasets."""
    if path.startswith(HUB):
        return FORMATS["hub"]
    extension = extension_of(path)
    found = (format for format in FORMATS.values() if extension in format.extensions)
    return next(found, FORMATS["text"])


def extension_of(path: str) -> str:
    """Returns the extension of a file in lower case, without that of its compression."""
    name, extension = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if extension in COMPRESSED else extension


# Extensions of the files that are read in folders.
IN_FOLDERS = [e for format in FORMATS.values() if format.is_in_folders for e in format.extensions]
