"""Readers of records: the texts in JSON, CSV and Parquet files and in datasets of the Hugging Face
hub. The package pyarrow or datasets is imported on first use.

Empty texts and null are no text. A lone surrogate in JSON becomes U+FFFD, as in tiktoken. Errors
raise DataError with the line or row.
"""

import codecs
import csv
import itertools
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clearhead.errors import DataError, message_of
from clearhead.tokens import HUB
from clearhead.tokens.text_files import (
    HEAD,
    FilePart,
    check_regular_file,
    decoded_blocks,
    encoding_hint,
    extension_of,
    import_optional,
    open_decompressed,
)

ROWS = 16  # of Parquet, read at once; each may have MAX_RECORD characters
KEY_HINT = "set data.text_key, or write one text per record (docs/data.md, for chats too)"
MAX_RECORD = 2**26  # maximum bytes of a JSON line and characters of a record's text

# ------------------------------------------------------------------------------- text of a record


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
    raise DataError("data.path", part.path, reason, KEY_HINT)


def _text_key(keys: dict, part: FilePart, where: str) -> str:
    """Returns the key of the text. Raises DataError unless exactly one is in `keys`."""
    wanted = [part.text_key] if isinstance(part.text_key, str) else part.text_key
    found = [key for key in wanted if key in keys]
    if len(found) == 1:
        return found[0]
    shown = [", ".join(f"{key!r:.60}" for key in itertools.islice(of, 10)) for of in (wanted, keys)]
    how_many = "no key" if not found else "more than one key of"
    reason = f"{where} has {how_many} {shown[0]} (its keys: {shown[1] or 'none'})"
    hint = 'write objects such as {"text": ...}, one per line, or an array in a *.json file'
    raise DataError("data.path", part.path, reason, KEY_HINT if keys else hint)


def _check_length(text: bytes | str, part: FilePart, where: str) -> None:
    """Raises DataError for a text that would need too much memory."""
    if len(text) > MAX_RECORD:
        unit = "bytes" if isinstance(text, bytes) else "characters"
        reason = f"{where} is longer than {MAX_RECORD:,} {unit}"
        raise DataError("data.path", part.path, reason, "split the text into several records")


# ------------------------------------------------------------------------------- JSON


def next_line(text: mmap.mmap, position: int, special: Sequence[bytes]) -> int | None:
    """Returns the first position from this one on where a line starts."""
    return text.find(b"\n", position - 1) + 1 or None


def json_lines(part: FilePart) -> Iterator[str]:
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
                    hint = "write one object per line, or an array in a file named *.json"
                    raise _json_error(error, part, line, where, hint) from error
                yield text_field(record, part, where)
            offset += len(line)


def _json_error(error: Exception, part: FilePart, raw: bytes, what: str, hint: str) -> DataError:
    """Returns the error for bytes that are not JSON, or not UTF-8. what: what they are."""
    if isinstance(error, UnicodeDecodeError):
        hint = encoding_hint(part, raw, error.start)
    reason = f"{what} is not valid JSON ({message_of(error)})"
    return DataError("data.path", part.path, reason, hint)


def json_records(part: FilePart) -> Iterator[str]:
    """Reads the text of each record of a JSON array, which must fit into memory. Other files are
    read as JSON lines."""
    with open_decompressed(part.path) as file:
        if not file.peek(HEAD).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from json_lines(part)
            return
        content = file.read()
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise _json_error(error, part, content, "the array", "correct it") from error
    for number, record in enumerate(records):
        yield text_field(record, part, f"record {number}")


# ------------------------------------------------------------------------------- CSV


def csv_rows(part: FilePart) -> Iterator[str]:
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


# ------------------------------------------------------------------------------- Parquet


def parquet_rows(part: FilePart) -> Iterator[str]:
    with _open_parquet(part.path) as file:
        key = _text_key(dict.fromkeys(file.schema_arrow.names), part, "the file")
        for group in range(file.num_row_groups)[part.start : part.stop]:
            batches = file.iter_batches(ROWS, row_groups=[group], columns=[key])
            values = itertools.chain.from_iterable(batch.column(0) for batch in batches)
            for row, value in enumerate(values):
                where = f"row {row} of row group {group}"
                yield text_field({key: value.as_py()}, part, where)


def split_row_groups(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
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


# ------------------------------------------------------------------------------- hub


def hub_rows(part: FilePart) -> Iterator[str]:
    """Reads the texts of a hub dataset's part number `start`; the dataset has `stop` parts."""
    rows = load_hub_dataset(part.path)
    if part.stop:
        rows = rows.shard(num_shards=part.stop, index=part.start)
    for record in rows:
        yield text_field(record, part, "a row")


def split_hub_dataset(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
    """Splits a dataset as it is stored."""
    count = load_hub_dataset(part.path).num_shards
    for number in range(count):
        yield replace(part, start=number, stop=count)


def load_hub_dataset(path: str):
    """Streams the dataset hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT.

    Only this function reads data from the network.
    """
    datasets = import_optional("datasets", path, "the Hugging Face hub", "datasets")
    name, config, split = [*path.removeprefix(HUB).split(":"), "", ""][:3]
    return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
