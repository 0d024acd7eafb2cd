"""Files of text -> documents, as blocks of UTF-8, without ever holding a file whole.

    for part in split_file("web.jsonl", most=2**24):
        for blocks in documents(part):
            for block in blocks:  # bytes, whole characters
                ...

The kind of a file follows from its name (tokens/paths.py), and READERS has a function for each
kind: JSON lines (an object a line), Parquet, a data set of the Hugging Face hub, and plain text,
one document a file. Each but Parquet also as *.gz and *.zst. Parquet and zstd need pyarrow, the
hub needs datasets; both are imported when needed.

What cannot be read is a DataError with the file and the byte (or line, or row) where it happens.
Skipped are a byte-order mark at the start of a text, an empty text, and half a surrogate pair in
JSON, which becomes U+FFFD as with tiktoken.
"""

import codecs
import contextlib
import gzip
import importlib
import io
import itertools
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from errors import DataError, message_of
from tokens.encoding import StreamEncoder, find_boundary, utf8_blocks
from tokens.paths import COMPRESSED, HUB, check_regular_file, format_of, translate_read_errors

BLOCK = 2**20  # bytes read at once
MAX_ROWS = 64  # of Parquet read at once, fewer where a row may be long
MAX_RECORD = 2**26  # bytes of a line of JSON lines, characters of a text in Parquet
MAX_COMPRESSION_RATIO = 100  # of the texts of a row group, if they exceed MAX_RECORD bytes


@dataclass(frozen=True)
class FilePart:
    """A file, or the part of a large one that is read by itself.

    `start` and `stop`: bytes; row groups of Parquet; of a hub data set, which part of how many.
    stop=None: to the end.
    """

    path: str
    start: int = 0
    stop: int | None = None
    text_key: str = "text"  # where JSON and Parquet have the text
    size: int = 0  # bytes to read, about; 0 for the hub

    @property
    def format(self) -> str:
        """A key of READERS."""
        return format_of(self.path)


def split_file(path: str, most: int, text_key: str = "text") -> Iterator[FilePart]:
    """The parts of a file, of about `most` bytes, which together have its documents and tokens.

    A text is divided where that changes no token, JSON lines at the beginning of a line, Parquet
    between row groups, a hub data set as it is stored. What is compressed is not divided.
    """
    format = format_of(path)
    if format == "hub":
        count = load_hub_dataset(path).num_shards
        for number in range(count):
            yield FilePart(path, number, count, text_key)
    elif format == "parquet":
        with _open_parquet(path) as file:
            groups = range(file.num_row_groups)
            sizes = [file.metadata.row_group(group).total_byte_size for group in groups]
        first = size = 0
        for group in groups:
            size += sizes[group]
            if size >= most or group == groups[-1]:
                yield FilePart(path, first, group + 1, text_key, size)
                first, size = group + 1, 0
    else:
        size = os.path.getsize(path)
        can_divide = format in ("text", "jsonl") and not path.lower().endswith(COMPRESSED)
        cuts = []
        if can_divide and size > most:
            cuts = _part_boundaries(path, format, -(-size // most))
        for start, stop in itertools.pairwise([0, *cuts, size]):
            yield FilePart(path, start, None if stop == size else stop, text_key, stop - start)


def _part_boundaries(path: str, format: str, count: int) -> list[int]:
    """The bytes where a file is divided into `count` parts; fewer where it has a long run."""
    cuts, cut = [], 0
    with (
        open_decompressed(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        for number in range(1, count):
            place = max(4, number * len(text) // count)  # behind a byte-order mark
            if place <= cut:  # in a long run that is searched already
                continue
            if format == "jsonl":
                cut = text.find(b"\n", place - 1) + 1 or len(text)
            else:
                cut = find_boundary(text, place, len(text)) or len(text)
            cuts.append(cut)
        return [cut for cut in cuts if cut < len(text)]


def documents(part: FilePart) -> Iterator[Iterable[bytes]]:
    """The documents of a file or part of one, each as blocks of UTF-8.

    Raises DataError naming the file, the place and a way out.
    """
    return READERS[part.format](part)


def encode_part(part: FilePart, encoder: StreamEncoder) -> Iterator[np.ndarray]:
    """The token ids of a file or part of one, uint16; each document begins with the end-of-text
    token, which is not added where it is there already. A document without a text is skipped."""
    end_of_text = np.array([encoder.tokenizer.eot_token], np.uint16)
    begin = part.start if part.format == "text" else 0  # above 0: inside a document
    for blocks in documents(part):
        for number, ids in enumerate(encoder.encode(blocks, part.path, begin)):
            if number == 0 and not begin and ids[0] != end_of_text[0]:
                yield end_of_text
            yield ids


# ----------------------------------------------------------------------------------------- opening


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, unpacked where its name says so. An error of reading is a DataError."""
    check_regular_file(path)
    with translate_read_errors(path, OSError, EOFError, zlib.error):
        file: io.BufferedIOBase
        if path.lower().endswith(".gz"):
            file = gzip.open(path)  # noqa: SIM115 closed below
        elif path.lower().endswith(".zst"):
            arrow = import_optional("pyarrow", path, "zstd", "pyarrow")
            file = io.BufferedReader(arrow.input_stream(path, compression="zstd"), BLOCK)
        else:
            file = io.BufferedReader(io.FileIO(path), BLOCK)
        with file:
            yield file


def import_optional(module: str, path: str, what: str, package: str):
    """A library that only some data needs; DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}"
        raise DataError("data.path", path, f"reading {what} needs {package}", fix) from error


# -------------------------------------------------------------------------------------- plain text


def _plain_text(part: FilePart) -> Iterator[Iterable[bytes]]:
    yield _decoded_blocks(part)


def _decoded_blocks(part: FilePart) -> Iterator[bytes]:
    """A text file as it is, line ends included, in whole characters; checked on the way."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, end = part.start, part.stop
    with open_decompressed(part.path) as file:
        if offset:
            file.seek(offset)
        raw = b" "
        while raw:
            raw = file.read(BLOCK if end is None else min(BLOCK, end - offset))
            if (zero := raw.find(b"\0")) >= 0:
                cause = f"binary (a zero byte at byte {offset + zero})"
                fix = "unpack it (*.gz and *.zst are read) or convert it to UTF-8"
                raise DataError("data.path", part.path, cause, fix)
            carried = decoder.getstate()[0]  # of a character that this block completes
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                byte = (carried + raw)[error.start]
                cause = f"not UTF-8 (0x{byte:02x} at byte {offset - len(carried) + error.start})"
                fix = "convert it: iconv -f LATIN1 -t UTF-8 FILE > utf8.txt"
                raise DataError("data.path", part.path, cause, fix) from error
            if offset == 0:
                text = text.removeprefix("\ufeff")
            offset += len(raw)
            if text:
                yield text.encode()


# ----------------------------------------------------------------------- JSON lines, Parquet, hub


def _json_lines(part: FilePart) -> Iterator[Iterable[bytes]]:
    """The texts of the lines; blank lines are skipped."""
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
                    cause = f"{where} is not JSON ({message_of(error)})"
                    raise DataError("data.path", part.path, cause, "correct it") from error
                yield utf8_blocks(_text_field(record, part, where), BLOCK)
            offset += len(line)


def _text_field(record: object, part: FilePart, where: str) -> str:
    """The text under the part's key; DataError without one. where: which record it is."""
    text = record.get(part.text_key) if isinstance(record, dict) else None
    if isinstance(text, str):
        _check_length(text, part, where)
        return text
    keys = itertools.islice(record, 10) if isinstance(record, dict) else ()
    names = ", ".join(f"{name!r:.60}" for name in keys) or "no keys"
    cause = f"{where} has no text under {part.text_key!r} (it has {names})"
    raise DataError("data.path", part.path, cause, "set data.text_key, or correct it")


def _check_length(text: bytes | str, part: FilePart, where: str) -> None:
    """Raises DataError for a text that would take too much memory."""
    if len(text) > MAX_RECORD:
        unit = "bytes" if isinstance(text, bytes) else "characters"
        cause = f"{where} is longer than {MAX_RECORD:,} {unit}"
        raise DataError("data.path", part.path, cause, "divide its text into several")


def _parquet_rows(part: FilePart) -> Iterator[Iterable[bytes]]:
    with _open_parquet(part.path) as file:
        if part.text_key not in file.schema_arrow.names:
            _text_field(dict.fromkeys(file.schema_arrow.names), part, "the file")
        groups = {
            number: file.metadata.row_group(number)
            for number in range(file.num_row_groups)[part.start : part.stop]
        }
        rows = min((_rows_per_batch(groups[n], n, part) for n in groups), default=MAX_ROWS)
        batches = file.iter_batches(rows, row_groups=list(groups), columns=[part.text_key])
        values = itertools.chain.from_iterable(batch.column(0) for batch in batches)
        places = ((row, n) for n, group in groups.items() for row in range(group.num_rows))
        for value, (row, number) in zip(values, places, strict=True):
            where = f"row {row} of row group {number}"
            yield utf8_blocks(_text_field({part.text_key: value.as_py()}, part, where), BLOCK)


def _rows_per_batch(metadata, group: int, part: FilePart) -> int:
    """How many rows to read at once, in at most half a gigabyte.

    Raises DataError for texts that are far longer than the file, as repetitions of a long one are.
    """
    columns = [metadata.column(number) for number in range(metadata.num_columns)]
    columns = [c for c in columns if f"{c.path_in_schema}.".startswith(f"{part.text_key}.")]
    size = sum(column.total_uncompressed_size for column in columns)
    packed = sum(column.total_compressed_size for column in columns)
    if size > max(MAX_RECORD, MAX_COMPRESSION_RATIO * packed):
        cause = f"the texts of row group {group} are unpacked to {size:,} bytes, more than "
        cause += f"{MAX_COMPRESSION_RATIO} times their packed size and more than {MAX_RECORD:,}"
        raise DataError("data.path", part.path, cause, "write smaller row groups")
    return min(MAX_ROWS, 8 * MAX_RECORD // max(1, min(size, MAX_RECORD)))


@contextlib.contextmanager
def _open_parquet(path: str):
    """The open Parquet file. Damage shows in many ways: any error inside is a DataError."""
    parquet = import_optional("pyarrow.parquet", path, "Parquet", "pyarrow")
    check_regular_file(path)
    with translate_read_errors(path, Exception), parquet.ParquetFile(path) as file:
        yield file


def _hub_rows(part: FilePart) -> Iterator[Iterable[bytes]]:
    """The texts of part `start` of `stop` parts, as the hub stores the data set."""
    rows = load_hub_dataset(part.path)
    if part.stop:
        rows = rows.shard(num_shards=part.stop, index=part.start)
    with translate_read_errors(part.path, Exception):  # of the network, of a file
        for record in rows:
            yield utf8_blocks(_text_field(record, part, "a row"), BLOCK)


def load_hub_dataset(path: str):
    """The streamed data set of hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT.

    The one place where data comes over the network, because the user named it so.
    """
    datasets = import_optional("datasets", path, "the Hugging Face hub", "datasets")
    name, config, split = [*path.removeprefix(HUB).split(":"), "", ""][:3]
    with translate_read_errors(path, Exception):  # unknown name, no network, no configuration
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)


# Kind of file: its reader, a function of the part that yields each document as blocks of UTF-8.
READERS: dict[str, Callable[[FilePart], Iterator[Iterable[bytes]]]] = {
    "text": _plain_text,
    "jsonl": _json_lines,
    "parquet": _parquet_rows,
    "hub": _hub_rows,
}
