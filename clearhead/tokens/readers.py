"""Reads documents from files as blocks of UTF-8, with a bounded amount of memory (a JSON array is
read at once).

    for part in split_file("web.jsonl", max_bytes=2**24):
        for blocks in documents(part):
            for block in blocks:  # bytes; no character is split between two blocks
                ...

The file extension selects the format, an entry of FORMATS. text_files.py opens files and reads
plain text, records.py reads JSON, CSV, Parquet and datasets of the Hugging Face hub. Files with
other content (KINDS) are refused. An error in a file raises DataError.
"""

import codecs
import itertools
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from clearhead.errors import DataError
from clearhead.tokens import HUB, records
from clearhead.tokens.encoding import StreamEncoder, find_boundary, utf8_blocks
from clearhead.tokens.gutenberg import between_markers, has_markers
from clearhead.tokens.text_files import (
    BLOCK,
    COMPRESSED,
    CREATE_AGAIN,
    HEAD,
    READ_ERRORS,
    FilePart,
    decoded_blocks,
    extension_of,
    open_decompressed,
    translate_read_errors,
)

NO_TEXT = (
    "the files contain no text",
    "use other files, or data.trim=false for the licence of a book",
)

# ------------------------------------------------------------------------------- formats


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
    split: Callable[[FilePart, int], Iterator[FilePart]] | None = None  # None: at boundaries
    errors: tuple[type[Exception], ...] = READ_ERRORS  # of files that cannot be read
    hint: str = CREATE_AGAIN  # what to do then
    is_in_folders: bool = True  # whether a folder means these files, too
    is_file: bool = True  # not a dataset of the hub


# Parquet and the hub have errors of many types: damaged files, the network, unknown names.
FORMATS = {
    "text": Format(decoded_blocks, (".txt", ".md"), is_text=True, boundary=find_boundary),
    "JSON lines": Format(records.json_lines, (".jsonl", ".ndjson"), boundary=records.next_line),
    "JSON array": Format(records.json_records, (".json",), is_in_folders=False),
    "CSV": Format(records.csv_rows, (".csv", ".tsv"), is_in_folders=False),
    "Parquet": Format(
        records.parquet_rows, (".parquet",), split=records.split_row_groups, errors=(Exception,)
    ),
    "hub": Format(
        records.hub_rows,
        split=records.split_hub_dataset,
        errors=(Exception,),
        hint="check NAME:CONFIG:SPLIT and the network connection",
        is_file=False,
    ),
}
# Extensions of the files that are read in folders.
IN_FOLDERS = [e for format in FORMATS.values() if format.is_in_folders for e in format.extensions]


def format_of(path: str) -> Format:
    """Returns the format of a file, plain text for unknown extensions, or that of hub datasets."""
    if path.startswith(HUB):
        return FORMATS["hub"]
    extension = extension_of(path)
    found = (format for format in FORMATS.values() if extension in format.extensions)
    return next(found, FORMATS["text"])


# ------------------------------------------------------------------------------- what is not text

_SAVE = "save it as plain text (UTF-8), a table as CSV"
_ZIP = rb"PK\x03\x04(.{26}mimetypeapplication/|.*\[Content_Types\]|.*word/)"
_PACKED = rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|BZh\d1AY&SY|\xfd7zXZ\0"
_OTHER = rb"SQLite format 3\0|\x93NUMPY|.{4}\0{4}\{\"|\x80[\2-\5][\x95\]})(c]|ARROW1\0|\x7fELF"
_OTHER += rb"|MZ.\0|\x89PNG|\xff\xd8\xff|GIF8[79]a|ID3[\2-\4]|RIFF.{4}WAVE|OggS\0|fLaC\0"
_OTHER += rb"|\xff{4}.{3}\0|\x89HDF|GGUF.\0|bplist00|AT&TFORM"  # \xff{4}: Arrow's stream
KINDS = (  # what a file is, what to do, and the first bytes as a regular expression
    ("a PDF document", "extract its text: pdftotext FILE", rb"%PDF-"),
    ("an office document or e-book", f"{_SAVE}, or convert it: pandoc -t plain FILE", _ZIP),
    ("an old office document, or rich text", _SAVE, rb"\xd0\xcf\x11\xe0|\{\\rtf\d"),
    ("an archive", "unpack it and give the folder", rb"PK\x03\x04|.{257}ustar|7z\xbc|Rar!\x1a"),
    ("compressed", "decompress it, or add .gz or .zst to its name", _PACKED),
    ("a Parquet file", "name it *.parquet", rb"PAR1[\0-\x1f]"),
    ("a file of token ids", "name it *.bin", rb"\x88\xd8\x34\x01|\x80\xd4\x34\x01"),
    ("music as MIDI", "write it as text, such as ABC notation", rb"MThd\0"),
    ("data, an image, a recording or a program", "give text files", _OTHER),
)


def check_kinds(files: Iterable[str]) -> None:
    """Raises DataError for a file that is not text (KINDS), unless its format is Parquet or a
    dataset."""
    for path in files:
        if format_of(path).split:
            continue
        if extension_of(path) == ".ipynb":
            hint = "convert it: jupyter nbconvert --to markdown FILE"
            raise DataError("data.path", path, "is a notebook", hint)
        with translate_read_errors(path, *READ_ERRORS), open_decompressed(path) as file:
            head = file.peek(HEAD)[:HEAD]
        for what, advice, start in KINDS:
            if re.match(start, head, re.DOTALL):
                raise DataError("data.path", path, f"is {what}", advice)


# ------------------------------------------------------------------------------- documents, ids


def documents(part: FilePart, trimmed: Counter | None = None) -> Iterator[Iterable[bytes]]:
    """Yields the documents of a part, each as an iterable of blocks of UTF-8. Raises DataError.
    trimmed: counts what `between_markers` removes."""
    format = format_of(part.path)
    found = _translated(part.path, format.errors, format.hint, format.read(part))
    if format.is_text:
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
    is_inside = format_of(part.path).is_text and part.start > 0  # of a document
    for blocks in documents(part, encoder.trimmed):
        is_empty = True
        # tiktoken raises ValueError for a million characters of white space without another one.
        hint = "shorten its runs of white space"
        for ids in _translated(part.path, [ValueError], hint, encoder.encode(blocks)):
            if is_empty and not is_inside and ids[0] != end_of_text[0]:
                yield end_of_text
            is_empty = False
            yield ids
        encoder.empty_documents += is_empty


def _translated(
    path: str, errors: Iterable[type[Exception]], hint: str, items: Iterator
) -> Iterator:
    """Yields the same items. Such errors become DataError with this hint."""
    with translate_read_errors(path, *errors, hint=hint):
        yield from items


# ------------------------------------------------------------------------------- parts of a file


def split_file(path: str, max_bytes: int, **options) -> Iterator[FilePart]:
    """Splits a file into parts of about `max_bytes` bytes, which have the same tokens as the file.
    options: text_key, encoding, trim and special of the parts. Raises DataError."""
    part, format = FilePart(path, **options), format_of(path)
    parts = (format.split or _split_at_boundaries)(part, max_bytes)
    return _translated(path, format.errors, format.hint, parts)


def _split_at_boundaries(part: FilePart, max_bytes: int) -> Iterator[FilePart]:
    """Splits a file at boundaries of its format. Compressed files, books of Project Gutenberg and
    text in other encodings than UTF-8 are not split."""
    format, size = format_of(part.path), os.path.getsize(part.path)
    count = -(-size // max_bytes)
    can_split = count > 1 and format.boundary and not part.path.lower().endswith(COMPRESSED)
    if can_split and format.is_text:
        is_utf8 = codecs.lookup(part.encoding).name == "utf-8"
        can_split = is_utf8 and not (part.trim and has_markers(part.path))
    bounds = _boundaries(part, format.boundary, size, count) if can_split else []
    for start, stop in itertools.pairwise([0, *bounds, size]):
        yield replace(part, start=start, stop=None if stop == size else stop, size=stop - start)


def _boundaries(part: FilePart, boundary: Callable, size: int, count: int) -> list[int]:
    """Returns byte positions that split a file into `count` parts, or fewer if it has too few
    boundaries."""
    bounds = [0]
    with (
        open(part.path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        for number in range(1, count):
            position = max(4, number * size // count)  # after a byte-order mark
            if position > bounds[-1]:  # otherwise the search would find the same boundary
                bounds.append(boundary(text, position, special=part.special) or size)
    return [bound for bound in bounds[1:] if bound < size]
