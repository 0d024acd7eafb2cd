"""Which files data.path names, and what kind of text each of them is."""

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from errors import DataError, message_of

HUB = "hub:"  # data.path=hub:NAME is a data set of the Hugging Face hub
COMPRESSED = (".gz", ".zst")
# Ending of a name, before that of a compression: kind of text (tokens/readers.py). A folder is
# searched for these.
TEXT_EXTENSIONS = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
# A file of any other name is plain text, apart from these.
EXTENSIONS = TEXT_EXTENSIONS | {".json": "jsonl"}


def format_of(path: str) -> str:
    """The kind of text: a key of READERS in tokens/readers.py."""
    return "hub" if path.startswith(HUB) else EXTENSIONS.get(_extension(path), "text")


def _extension(path: str) -> str:
    name, ending = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if ending in COMPRESSED else ending


def find_files(path: str | list[str]) -> list[str]:
    """The files that data.path names: a file, a folder (its texts, at any depth), a glob, a list.

    In sorted order for each entry, so that the same folder is always the same text.
    Raises DataError when an entry names nothing, or for a folder that cannot be listed.
    """
    files: list[str] = []
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        if entry.startswith(HUB):
            found = [entry]
        elif os.path.isdir(entry):
            found = _text_files_in(entry)
            if not found:
                fix = "name other files with a glob, such as FOLDER/*.md"
                what = f"no {', '.join(f'*{ending}' for ending in TEXT_EXTENSIONS)} in this folder"
                raise DataError("data.path", entry, what, fix)
        elif os.path.exists(entry):
            check_regular_file(entry)
            found = [entry]
        else:
            found = sorted(filter(os.path.isfile, glob.glob(entry, recursive=True)))
            if not found:
                fix = f"check the path; relative ones start at {os.getcwd()}; a list is [a,b]"
                raise DataError("data.path", entry, "no such file", fix)
        files += found
    return files


def _text_files_in(folder: str) -> list[str]:
    """The texts in a folder, at any depth; what is hidden is skipped. Links are followed, and each
    folder is entered once, each file named once."""
    found, seen = [], {*map(str, Path(os.path.realpath(folder)).parents)}
    for here, folders, names in os.walk(folder, onerror=_raise_read_error, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if (real := os.path.realpath(here)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(names):
            if name[0] != "." and _extension(name) in TEXT_EXTENSIONS:
                path = str(Path(here, name))
                if (real := os.path.realpath(path)) not in seen:
                    seen.add(real)
                    found.append(path)
    return sorted(filter(os.path.isfile, found), key=Path)


def _raise_read_error(error: OSError) -> None:
    with translate_read_errors(error.filename, OSError):
        raise error


@contextlib.contextmanager
def translate_read_errors(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Makes a DataError of this file of the system's or another library's errors."""
    try:
        yield
    except DataError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or message_of(error) or type(error).__name__
        fix = "create or download it again, or check its permissions"
        if path.startswith(HUB):
            fix = "check NAME:CONFIG:SPLIT, and the network"
        raise DataError("data.path", path, f"cannot be read ({reason})", fix) from error


def check_regular_file(path: str) -> None:
    """Raises DataError for a folder, a FIFO, a device, or nothing."""
    if not os.path.isfile(path):
        raise DataError("data.path", path, "not a regular file", "give a text file")
