"""Files of text -> documents, as blocks of UTF-8, without ever holding a file whole.

    for blocks in documents(Part(path)):
        for block in blocks:  # bytes, whole characters
            ...

The kind of a file follows from its name (tokens/paths.py), and READERS has a function for each
kind: JSON lines (an object a line), Parquet, a data set of the Hugging Face hub, and plain text,
one document a file. Each but Parquet also as *.gz and *.zst. Parquet and zstd need pyarrow, the
hub needs datasets; both are imported when needed.

What cannot be read is a DataError with the file and the byte (or line, or row) where it happens.
Skipped are a byte-order mark at the start of a text, an empty text in JSON or Parquet, and half a
surrogate pair in JSON, which becomes U+FFFD as with tiktoken.
"""

import codecs
import contextlib
import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from errors import DataError, message_of
from tokens import SHARD_MAGIC
from tokens.encoding import StreamEncoder, text_blocks
from tokens.parts import BLOCK, Part, bounds, damaged, needed, opened, read
from tokens.paths import HUB, check_regular, train_on_tokens

LONGEST_DOCUMENT = 2**26  # bytes of a JSON line, or characters of a row: each is in memory whole
MOST_UNPACKED = 100  # times its compressed size, of a Parquet column above LONGEST_DOCUMENT
MOST_ROWS = 256  # of Parquet read at once
ROWS_SIZE = 2**29  # bytes: limit of a batch if every row had the longest text
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)  # the first begins as one of UTF-16 does


def documents(part: Part) -> Iterator[Iterable[bytes]]:
    """The documents of a file or part of one, each as blocks of UTF-8.

    Raises DataError naming the file, the place and a way out.
    """
    return READERS[part.kind](part)


def encode_part(part: Part, encoder: StreamEncoder) -> Iterator[np.ndarray]:
    """The token ids of a file or part of one, uint16; each document begins with the end-of-text
    token, which is not added where it is there already. A document without a text is skipped."""
    end_of_text = np.array([encoder.tokenizer.eot_token], np.uint16)
    continues = part.kind == "text" and part.start > 0
    begin = bounds(part)[0] if continues else 0
    for blocks in documents(part):
        for number, ids in enumerate(encoder.encode(blocks, part.path, begin)):
            if number == 0 and not continues and ids[0] != end_of_text[0]:
                yield end_of_text
            yield ids


# ------------------------------------------------------------------------------------ plain text


def _texts(part: Part) -> Iterator[Iterable[bytes]]:
    yield _text_blocks(part)


def _text_blocks(part: Part) -> Iterator[bytes]:
    """A text file as it is, line ends included, in whole characters; checked on the way."""
    begin, end = bounds(part)
    with opened(part.path) as file:
        if begin:
            file.seek(begin)
        offset = begin
        carried = b""  # the beginning of a character that the next block completes
        while raw := read(file.read, part.path, BLOCK if end is None else min(BLOCK, end - offset)):
            if offset == 0:
                _check_beginning(part.path, raw)
            if (zero := raw.find(b"\0")) >= 0:
                raise DataError(
                    "data.path",
                    part.path,
                    f"binary (a zero byte at byte {offset + zero})",
                    "give a text file",
                )
            block = carried + raw
            whole = _whole_characters(block, offset - len(carried), part.path)
            carried = block[whole:]
            text = block[:whole]
            if offset == 0:
                text = text.removeprefix(b"\xef\xbb\xbf")
            offset += len(raw)
            if text:
                yield text
        if carried:
            raise _not_utf8(part.path, carried[0], offset - len(carried))
        if offset == 0 and end is None:
            raise DataError(
                "data.path", part.path, "the file is empty", "give a text of some length"
            )


def _whole_characters(block: bytes, offset: int, path: str) -> int:
    """How much of the block is whole characters; DataError where it is not UTF-8."""
    try:
        block.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return error.start
        raise _not_utf8(path, block[error.start], offset + error.start) from error
    return len(block)


def _not_utf8(path: str, byte: int, offset: int) -> DataError:
    fix = f"convert it: iconv -f LATIN1 -t UTF-8 {shlex.quote(str(path))} > utf8.txt"
    return DataError("data.path", path, f"not UTF-8 (0x{byte:02x} at byte {offset})", fix)


def _check_beginning(path: str, raw: bytes) -> None:
    """Refuses what is known by its first bytes not to be text."""
    kinds = ((b"\x1f\x8b", "gzip", ".gz"), (b"\x28\xb5\x2f\xfd", "zstd", ".zst"))
    for magic, kind, ending in kinds:
        if raw.startswith(magic):
            fix = f"give it a name that ends in {ending}, or unpack it"
            raise DataError("data.path", path, f"a {kind} archive, not text", fix)
    if raw.startswith(b"PK\x03\x04"):
        raise DataError("data.path", path, "a zip archive, not text", "unpack it first")
    if raw.startswith(SHARD_MAGIC.to_bytes(4, "little")):
        raise DataError("data.path", path, "tokens, not text", train_on_tokens(path))
    if raw.startswith(b"PAR1"):
        fix = "give it a name that ends in .parquet"
        raise DataError("data.path", path, "Parquet, not text", fix)
    if raw.startswith((*UTF_32, *UTF_16)):
        name = "UTF-32" if raw.startswith(UTF_32) else "UTF-16"
        fix = f"convert it: iconv -f {name} -t UTF-8 {shlex.quote(str(path))} > utf8.txt"
        raise DataError("data.path", path, f"{name}, not UTF-8, at byte 0", fix)


# --------------------------------------------------------------------- JSON lines, Parquet, hub


def _json_lines(part: Part) -> Iterator[Iterable[bytes]]:
    """The texts of the lines; blank lines are skipped."""
    begin, end = bounds(part)
    with opened(part.path) as file:
        if begin:
            file.seek(begin)
        offset = begin
        while end is None or offset < end:
            line = read(file.readline, part.path, LONGEST_DOCUMENT + 1)
            if not line:
                break
            if len(line) > LONGEST_DOCUMENT:
                cause = f"the line at byte {offset} is longer than {LONGEST_DOCUMENT:,} bytes"
                raise DataError("data.path", part.path, cause, "divide its text into several")
            if line.strip():
                yield text_blocks(_json_text(line, part, offset), BLOCK)
            offset += len(line)


def _json_text(line: bytes, part: Part, offset: int) -> str:
    where = f"the line at byte {offset}"
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        fix = "make a line of each of its objects: jq -c '.[]' FILE > lines.jsonl"
        raise DataError("data.path", part.path, f"{where} begins an array, not an object", fix)
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        cause = f"{where} is not JSON ({message_of(error)})"
        raise DataError("data.path", part.path, cause, "correct it or remove it") from error
    text = record.get(part.text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise _no_text(part, record, f"{where} ")
    return text


def _no_text(part: Part, record: object, where: str = "") -> DataError:
    """The error of a record without a text under the part's key. where: which record it is."""
    key = part.text_key
    if isinstance(record, dict) and key in record:
        kind = "null" if record[key] is None else f"of type {type(record[key]).__name__}"
        cause = f"{where}has under {key!r} what is {kind}, not a text"
        return DataError("data.path", part.path, cause, "correct it or remove it")
    keys = "no keys"
    if isinstance(record, dict):
        keys = ", ".join(f"{name!r:.60}" for name in itertools.islice(record, 10))
        if len(record) > 10:
            keys += f" and others, {len(record):,} keys in all"
    cause = f"{where}has no text under {key!r} (it has {keys})"
    return DataError("data.path", part.path, cause, "set data.text_key")


def _parquet_rows(part: Part) -> Iterator[Iterable[bytes]]:
    with _parquet(part.path) as file:
        if part.text_key not in file.schema_arrow.names:
            record = dict.fromkeys(file.schema_arrow.names)
            raise _no_text(part, record)
        groups = range(file.num_row_groups)[part.start : part.stop]
        rows = _rows_at_once(file.metadata, groups, part)
        row = 0
        try:
            for batch in file.iter_batches(rows, row_groups=groups, columns=[part.text_key]):
                for value in batch.column(0):
                    text = value.as_py()
                    where = f"row {row} of the row groups from {part.start}"
                    if not isinstance(text, str):
                        raise _no_text(part, {part.text_key: text}, f"{where} ")
                    if len(text) > LONGEST_DOCUMENT:
                        cause = f"{where} is longer than {LONGEST_DOCUMENT:,} characters"
                        raise DataError("data.path", part.path, cause, "divide it into several")
                    row += 1
                    yield text_blocks(text, BLOCK)
        except DataError:
            raise
        except Exception as error:  # damage shows in many ways
            raise damaged(part.path, error) from error


def _rows_at_once(metadata, groups: Iterable[int], part: Part) -> int:
    """How many rows of Parquet to read at once, so that they take at most ROWS_SIZE.

    Raises DataError for a column of texts that a small file unpacks to: a page of it is in memory
    whole.
    """
    longest = 1  # bytes a text may have
    for number in range(metadata.num_columns):
        if f"{metadata.schema.column(number).path}.".startswith(f"{part.text_key}."):
            for group in groups:
                column = metadata.row_group(group).column(number)
                size, packed = column.total_uncompressed_size, column.total_compressed_size
                if size > max(LONGEST_DOCUMENT, MOST_UNPACKED * packed):
                    cause = f"row group {group} unpacks {packed:,} bytes of texts to {size:,}"
                    fix = f"write it with shorter texts; up to {MOST_UNPACKED} times are read"
                    raise DataError("data.path", part.path, cause, fix)
                longest = max(longest, min(size, LONGEST_DOCUMENT))
    return max(1, min(MOST_ROWS, ROWS_SIZE // longest))


@contextlib.contextmanager
def _parquet(path: str):
    """The open Parquet file."""
    parquet = needed("pyarrow.parquet", path, "Parquet", "pyarrow")
    check_regular(path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # damage shows in many ways
        raise damaged(path, error) from error
    with file:
        yield file


def row_groups(path: str) -> list[int]:
    """The bytes of each row group of a Parquet file."""
    with _parquet(path) as file:
        meta = file.metadata
        return [meta.row_group(number).total_byte_size for number in range(file.num_row_groups)]


def _hub_rows(part: Part) -> Iterator[Iterable[bytes]]:
    """The texts of part `start` of `stop` parts, as the hub stores the data set."""
    rows = hub_data(part.path)
    if part.stop:
        rows = rows.shard(num_shards=part.stop, index=part.start)
    records = iter(rows)
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except Exception as error:  # of the network, of a file
            raise damaged(part.path, error) from error
        text = record.get(part.text_key)
        if not isinstance(text, str):
            raise _no_text(part, record)
        yield text_blocks(text, BLOCK)


def hub_data(path: str):
    """The streamed data set of hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT.

    The one place where data comes over the network, because the user named it so.
    """
    datasets = needed("datasets", path, "the Hugging Face hub", "datasets")
    name, config, split = [*path.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # of many kinds: no such name, no network, a choice to make
        cause = f"cannot be opened ({message_of(error)})"
        fix = "check NAME:CONFIG:SPLIT, and the network"
        raise DataError("data.path", path, cause, fix) from error


# Kind of file: its reader, a function of the part that yields each document as blocks of UTF-8.
READERS: dict[str, Callable[[Part], Iterator[Iterable[bytes]]]] = {
    "text": _texts,
    "jsonl": _json_lines,
    "parquet": _parquet_rows,
    "hub": _hub_rows,
}
