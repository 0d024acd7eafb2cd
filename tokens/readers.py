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
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from errors import DataError, message_of
from tokens.encoding import StreamEncoder, text_blocks
from tokens.parts import BLOCK, Part, bounds, damaged, needed, opened, read
from tokens.paths import HUB, check_regular

ROWS = 64  # of Parquet read at once


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
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(part.path) as file:
        if begin:
            file.seek(begin)
        offset, raw = begin, b" "
        while raw:
            raw = read(file, part.path, BLOCK if end is None else min(BLOCK, end - offset))
            if (zero := raw.find(b"\0")) >= 0:
                cause = f"binary (a zero byte at byte {offset + zero})"
                raise DataError("data.path", part.path, cause, "give a text file, as UTF-8")
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
        if offset == 0 and end is None:
            fix = "leave it out, or give a text of some length"
            raise DataError("data.path", part.path, "the file is empty", fix)


# --------------------------------------------------------------------- JSON lines, Parquet, hub


def _json_lines(part: Part) -> Iterator[Iterable[bytes]]:
    """The texts of the lines; blank lines are skipped."""
    offset, end = bounds(part)
    with opened(part.path) as file:
        if offset:
            file.seek(offset)
        while end is None or offset < end:
            try:
                line = file.readline()
            except (OSError, EOFError, zlib.error) as error:
                raise damaged(part.path, error) from error
            if not line:
                break
            if line.strip():
                yield text_blocks(_json_text(line, part, f"the line at byte {offset}"), BLOCK)
            offset += len(line)


def _json_text(line: bytes, part: Part, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        cause = f"{where} is not JSON ({message_of(error)})"
        raise DataError("data.path", part.path, cause, "correct it or remove it") from error
    return _text_of(record, part, where)


def _text_of(record: object, part: Part, where: str) -> str:
    """The text under the part's key; DataError without one. where: which record it is."""
    text = record.get(part.text_key) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    keys = itertools.islice(record, 10) if isinstance(record, dict) else ()
    names = ", ".join(f"{name!r:.60}" for name in keys) or "no keys"
    cause = f"{where} has no text under {part.text_key!r} (it has {names})"
    raise DataError("data.path", part.path, cause, "set data.text_key, or correct it")


def _parquet_rows(part: Part) -> Iterator[Iterable[bytes]]:
    with _parquet(part.path) as file:
        if part.text_key not in file.schema_arrow.names:
            _text_of(dict.fromkeys(file.schema_arrow.names), part, "the file")
        groups = range(file.num_row_groups)[part.start : part.stop]
        batches = file.iter_batches(ROWS, row_groups=groups, columns=[part.text_key])
        values = itertools.chain.from_iterable(batch.column(0) for batch in batches)
        try:
            for row, value in enumerate(values):
                where = f"row {row} of the row groups from {part.start}"
                yield text_blocks(_text_of({part.text_key: value.as_py()}, part, where), BLOCK)
        except DataError:
            raise
        except Exception as error:  # damage shows in many ways
            raise damaged(part.path, error) from error


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
    try:
        for record in rows:
            yield text_blocks(_text_of(record, part, "a row"), BLOCK)
    except DataError:
        raise
    except Exception as error:  # of the network, of a file
        raise damaged(part.path, error) from error


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
