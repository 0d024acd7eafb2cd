"""Files of text -> documents, as blocks of UTF-8, without ever holding a file whole.

    for number, blocks in enumerate(documents(Part(path))):
        for block in blocks:  # bytes, whole characters
            ...

By name: *.jsonl (also *.ndjson, *.json) is a JSON object a line, *.parquet is Parquet, anything
else is plain text, one document a file. Each but Parquet also as *.gz and *.zst. Parquet and zstd
need pyarrow, a data set of the Hugging Face hub needs datasets; both are asked for when needed.

What cannot be read is a DataError with the file and the byte (or line, or row) where it happens.
Passed over are a byte-order mark at the start of a text, an empty text in JSON or Parquet, and
half a surrogate pair in JSON, which becomes U+FFFD as with tiktoken.
"""

import codecs
import contextlib
import errno
import fnmatch
import glob
import gzip
import importlib
import io
import itertools
import json
import os
import shlex
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from errors import DataError, message_of, visible
from tokens import SHARD_MAGIC
from tokens.encoding import StreamEncoder, find_cut, text_blocks

BLOCK = 2**20  # bytes read at once
WINDOW = 2**16  # bytes in which a cut is looked for
LONGEST_DOCUMENT = 2**26  # bytes of a JSON line, or characters of a row: each is in memory whole
MOST_UNPACKED = 100  # times its compressed size, of a Parquet column above LONGEST_DOCUMENT
MOST_ROWS = 256  # of Parquet read at once
ROWS_SIZE = 2**29  # bytes: limit of a batch if every row had the longest text
SIDE = 4  # bytes on each side of a cut in which it shows: the longest character
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)  # the first begins as one of UTF-16 does
TEXTS = (".txt", ".jsonl", ".ndjson")  # what a folder is searched for, besides *.parquet
COMPRESSED = (".gz", ".zst")
HUB = "hub:"  # data.path=hub:NAME is a data set of the Hugging Face hub

AnyPath = TypeVar("AnyPath", str, Path)


@dataclass(frozen=True)
class Part:
    """A file, or the part of a large one that is read by itself.

    Parts meet where a text may be cut without changing its tokens; in JSON lines between lines, in
    Parquet between row groups. `start` and `stop` are where the cut is looked for: bytes, or row
    groups in Parquet. stop=None: to the end.
    """

    path: str
    start: int = 0
    stop: int | None = None
    text_key: str = "text"  # where JSON and Parquet have the text

    @property
    def kind(self) -> str:
        """text | jsonl | parquet | hub"""
        return kind_of(self.path)


def kind_of(path: str) -> str:
    if path.startswith(HUB):
        return "hub"
    name = path.lower()
    for packed in COMPRESSED:
        name = name.removesuffix(packed)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if path.lower().endswith(".parquet") else "text"


def find_files(path: str | list[str], notes: list[str] | None = None) -> list[str]:
    """The files that data.path names: a file, a folder (its texts, at any depth), a glob, a list.

    In sorted order for each entry, so that the same folder is always the same text. Links are
    followed; within an entry each file is named once. `notes` are added to when a folder has files
    besides, which are not taken.
    Raises DataError when an entry names nothing, or for a folder that cannot be listed.
    """
    files: list[str] = []
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        if entry.startswith(HUB):
            found = [entry]
        elif os.path.isdir(entry):
            found, others = _texts_in(Path(entry))
            if not found:
                what = "no *.txt, *.jsonl or *.parquet file in this folder"
                pattern = shlex.quote(f"data.path={entry}/*.md")
                fix = f"name the files with a glob, such as {pattern}"
                if of_tokens := [p for p in others if p.suffix == ".bin"]:
                    where = of_tokens[0].parent
                    what = f"{what}, but *.bin"
                    fix = f"if these are tokens, {_train_on_tokens(where)}"
                raise DataError("data.path", entry, what, fix)
            if others and notes is not None:
                files_are = "a file is" if len(others) == 1 else f"{len(others):,} files are"
                note = (
                    f"data.path={entry}: {files_are} passed over, such as {others[0].name}; "
                    f"a folder's texts are *.txt, *.jsonl and *.parquet, a glob takes all"
                )
                notes.append(visible(note, keep=""))
        elif os.path.exists(entry):
            _check_regular(entry)
            found = [entry]
        else:
            found = [p for p in each_once(sorted(expand(entry))) if os.path.isfile(p)]
            if not found:
                fix = f"check the path; relative ones start at {os.getcwd()}"
                if "," in str(entry):
                    fix = f"several are a list: {shlex.quote(f'data.path=[{entry}]')}"
                raise DataError("data.path", entry, "no such file", fix)
        files += map(str, found)
    return files


def _train_on_tokens(path: str | Path) -> str:
    return f"train on them: python train.py data=shards {shlex.quote(f'data.path={path}')}"


def _texts_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The texts in a folder, at any depth, and the other files, but for hidden ones."""
    endings = (*(text + packed for text in TEXTS for packed in ("", *COMPRESSED)), ".parquet")
    texts, others = [], []
    for inner in _folders_in(str(folder), hidden=True):
        for path in (Path(inner, name) for name in list_folder(inner)):
            if path.name.lower().endswith(endings):
                texts.append(path)
            elif not any(part.startswith(".") for part in path.relative_to(folder).parts):
                others.append(path)
    return [[p for p in each_once(sorted(paths)) if p.is_file()] for paths in (texts, others)]


def expand(pattern: str, only_folders: bool = False) -> Iterator[str]:
    """The paths that a glob names, "**" being folders at any depth; in no order.

    Unlike with glob.glob, a folder is entered once however many links lead to it, and one that
    cannot be listed is a DataError. only_folders: files may be left out.
    """
    head, name = os.path.split(pattern)
    for folder in expand(head, True) if glob.has_magic(head) else [head]:
        if not _is_folder(folder):
            continue
        if name == "**":
            for inner in _folders_in(folder, hidden=False):
                yield inner
                if not only_folders:
                    yield from (os.path.join(inner, n) for n in list_folder(inner) if n[0] != ".")
        elif glob.has_magic(name):
            names = fnmatch.filter(list_folder(folder), name)
            yield from (os.path.join(folder, n) for n in names if n[0] != "." or name[0] == ".")
        elif _identity(path := os.path.join(folder, name)):
            yield path


def _folders_in(folder: str, hidden: bool) -> Iterator[str]:
    """A folder and those in it, at any depth, each once.

    Links are followed, after everything else and not to a folder that this one is in.
    """
    seen = {None, *map(_identity, map(str, Path(os.path.realpath(folder)).parents))}
    waiting, linked = [folder], []
    while waiting or linked:
        here = (waiting or linked).pop(0)
        if _identity(here) in seen:
            continue
        seen.add(_identity(here))
        yield here
        for name in list_folder(here):
            path = os.path.join(here, name)
            if (hidden or name[0] != ".") and _is_folder(path):
                (linked if os.path.islink(path) else waiting).append(path)


def list_folder(folder: str) -> list[str]:
    """The names in a folder, sorted; DataError when they cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        raise _unreadable(folder or ".", error) from error


def each_once(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """The paths without later names of the same file."""
    found: dict[object, AnyPath] = {}
    for path in paths:
        found.setdefault(_identity(path) or path, path)
    return list(found.values())


def _identity(path: AnyPath) -> tuple[int, int] | None:
    """By what a file or folder is known under all its names; None when there is none."""
    state = _state(path)
    return state and (state.st_dev, state.st_ino)


def _is_folder(path: str) -> bool:
    state = _state(path)
    return state is not None and stat.S_ISDIR(state.st_mode)


def _state(path: AnyPath) -> os.stat_result | None:
    """What the system says of a file or folder; None when there is none."""
    try:
        return os.stat(path or ".")
    except ValueError:  # no name of a file: it has a zero byte
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise _unreadable(path, error) from error


def _unreadable(path: AnyPath, error: OSError) -> DataError:
    cause = f"cannot be read ({error.strerror or error})"
    return DataError("data.path", path, cause, "check its permissions")


def documents(part: Part) -> Iterator[Iterable[bytes]]:
    """The documents of a file or part of one, each as blocks of UTF-8.

    Raises DataError naming the file, the place and a way out.
    """
    readers = {"text": _texts, "jsonl": _json_lines, "parquet": _parquet_rows, "hub": _hub_rows}
    return readers[part.kind](part)


def encode_part(part: Part, encoder: StreamEncoder) -> Iterator[np.ndarray]:
    """The token ids of a file or part of one, uint16; each document begins with the end-of-text
    token. One that stands there already is not doubled; a document without a text is none."""
    end_of_text = np.array([encoder.tokenizer.eot_token], np.uint16)
    continues = part.kind == "text" and part.start > 0
    begin = _place(part)[0] if continues else 0
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
    begin, end = _place(part)
    with _opened(part.path) as file:
        if begin:
            file.seek(begin)
        offset = begin
        carried = b""  # the beginning of a character that the next block completes
        while raw := _read(
            file.read, part.path, BLOCK if end is None else min(BLOCK, end - offset)
        ):
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
        raise DataError("data.path", path, "tokens, not text", _train_on_tokens(path))
    if raw.startswith(b"PAR1"):
        fix = "give it a name that ends in .parquet"
        raise DataError("data.path", path, "Parquet, not text", fix)
    if raw.startswith((*UTF_32, *UTF_16)):
        name = "UTF-32" if raw.startswith(UTF_32) else "UTF-16"
        fix = f"convert it: iconv -f {name} -t UTF-8 {shlex.quote(str(path))} > utf8.txt"
        raise DataError("data.path", path, f"{name}, not UTF-8, at byte 0", fix)


def _place(part: Part) -> tuple[int, int | None]:
    """From which byte to which a part of a text or of JSON lines is; None: to the file's end."""
    if part.stop is None:
        return (_cut_from(part, part.start) if part.start else 0), None
    begin = _cut_from(part, part.start, part.stop) if part.start else 0
    if begin is None or begin >= part.stop:
        return 0, 0  # nothing, or the inside of a run, which belongs to the part where it began
    return begin, _cut_from(part, part.stop)


def _cut_from(part: Part, place: int, before: int | None = None) -> int | None:
    """The first place from `place` on where the file may be cut: in a text where the tokens stay
    the same, in JSON lines at the beginning of a line. The file's end when there is none; None
    when there is none before `before`."""
    place = max(place, SIDE)  # behind a byte-order mark
    with _opened(part.path) as file:
        base = place - SIDE  # of the window in the file
        file.seek(base)
        window = b""
        while before is None or base < before:
            block = _read(file.read, part.path, WINDOW)
            window += block
            # Of the last places, what stands behind them is not seen yet.
            stop = len(window) - SIDE if block else len(window)
            if part.kind == "jsonl":  # a line begins where there is a line end before
                found = window.find(b"\n", SIDE - 1, stop - 1) + 1 or None
            else:
                found = find_cut(window, SIDE, stop) if stop > SIDE else None
            if found is not None or not block:
                return base + (len(window) if found is None else found)
            if stop > SIDE:
                base, window = base + stop - SIDE, window[stop - SIDE :]
        return None


# --------------------------------------------------------------------- JSON lines, Parquet, hub


def _json_lines(part: Part) -> Iterator[Iterable[bytes]]:
    """The texts of the lines; a blank line is passed over."""
    begin, end = _place(part)
    with _opened(part.path) as file:
        if begin:
            file.seek(begin)
        offset = begin
        while end is None or offset < end:
            line = _read(file.readline, part.path, LONGEST_DOCUMENT + 1)
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
        raise DataError("data.path", part.path, cause, "mend it or leave it out") from error
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
        return DataError("data.path", part.path, cause, "mend it or leave it out")
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
            raise _damaged(part.path, error) from error


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
    parquet = _needed("pyarrow.parquet", path, "Parquet", "pyarrow")
    _check_regular(path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # damage shows in many ways
        raise _damaged(path, error) from error
    with file:
        yield file


def row_groups(path: str) -> list[int]:
    """The bytes of each row group of a Parquet file."""
    with _parquet(path) as file:
        meta = file.metadata
        return [meta.row_group(number).total_byte_size for number in range(file.num_row_groups)]


def _hub_rows(part: Part) -> Iterator[Iterable[bytes]]:
    """The texts of part `start` of `stop`; a hub data set is stored in so many."""
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
            raise _damaged(part.path, error) from error
        text = record.get(part.text_key)
        if not isinstance(text, str):
            raise _no_text(part, record)
        yield text_blocks(text, BLOCK)


def hub_data(path: str):
    """The streamed data set of hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT.

    The one place where data comes over the network, because the user named it so.
    """
    datasets = _needed("datasets", path, "the Hugging Face hub", "datasets")
    name, config, split = [*path.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:  # of many kinds: no such name, no network, a choice to make
        cause = f"cannot be opened ({message_of(error)})"
        fix = "check NAME:CONFIG:SPLIT, and the network"
        raise DataError("data.path", path, cause, fix) from error


# -------------------------------------------------------------------------------- opening files


def _check_regular(path: str) -> None:
    if not os.path.isfile(path):
        raise DataError("data.path", path, "not a regular file", "give a text file")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked where its name says so."""
    _check_regular(path)
    try:
        if path.lower().endswith((".bz2", ".xz", ".zstd", ".lz4", ".7z")):
            fix = "unpack it, or pack it as .gz or .zst"
            raise DataError("data.path", path, "this kind of compression is not read", fix)
        if path.lower().endswith(".gz"):
            file = gzip.open(path)  # noqa: SIM115 closed below
        elif path.lower().endswith(".zst"):
            arrow = _needed("pyarrow", path, "zstd", "pyarrow")
            file = io.BufferedReader(arrow.input_stream(path, compression="zstd"), BLOCK)
        else:
            file = open(path, "rb", buffering=BLOCK)  # noqa: SIM115 closed below
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        yield file


def _read(read: Callable[[int], bytes], path: str, size: int) -> bytes:
    """What a file's `read` or `readline` gives, at most `size` bytes."""
    try:
        return read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> DataError:
    cause = message_of(error) or type(error).__name__
    fix = "create or download it again"
    if isinstance(error, MemoryError):
        cause, fix = f"out of memory: {cause}", "use fewer processes or shorter texts"
    return DataError("data.path", path, f"cannot be read ({cause})", fix)


def _needed(module: str, path: str, what: str, package: str):
    """A library that only some data needs; DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}"
        raise DataError("data.path", path, f"reading {what} needs {package}", fix) from error
