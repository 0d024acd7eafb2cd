"""Finds the files that data.path names."""

import glob
import os
from collections import Counter
from collections.abc import Iterable
from os.path import isfile
from pathlib import Path

from clearhead.errors import DataError, sanitize
from clearhead.tokens import HUB
from clearhead.tokens.readers import (
    IN_FOLDERS,
    check_regular_file,
    extension_of,
    translate_read_errors,
)


def find_files(path: str | list[str], notes: list[str] | None = None) -> list[str]:
    """Returns the files of data.path: a file, a folder (read recursively), a glob, or a list.

    The files of each entry are sorted, so that a folder always gives the same tokens. Appends a
    note for each folder with other files. Raises DataError if an entry matches no file or a folder
    cannot be listed.
    """
    files: list[str] = []
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        if entry.startswith(HUB):
            found = [entry]
        elif os.path.isdir(entry):
            found, others = _text_files_in(entry)
            if others and notes is not None:
                kinds = Counter(Path(name).suffix.lower() or "without extension" for name in others)
                skipped = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(9))
                read = f"{len(found)} file{'s' * (len(found) != 1)} read"
                notes.append(sanitize(f"{entry}: {read}; skipped: {skipped}", keep=""))
            if not found:
                hint = "use a glob for files with another extension, such as FOLDER/*.html"
                names = ", ".join(f"*{extension}" for extension in IN_FOLDERS)
                raise DataError("data.path", entry, f"the folder contains no {names}", hint)
        elif os.path.exists(entry):
            check_regular_file(entry)
            found = [entry]
        else:
            found = sorted(filter(os.path.isfile, glob.glob(entry, recursive=True)))
            if not found:
                reason = "no file matches" if glob.has_magic(entry) else "file not found"
                hint = f"check the path (relative to {os.getcwd()})"
                hint += "; write a list as [a,b]" if "," in entry else ""
                raise DataError("data.path", entry, reason, hint)
        files += found
    return files


def _text_files_in(folder: str) -> tuple[list[str], list[str]]:
    """Returns the text files in a folder and its subfolders, and the names of its other files, both
    without hidden ones. Follows links, but lists each folder and each file only once."""
    found, others, seen = [], [], {*map(str, Path(os.path.realpath(folder)).parents)}
    for here, folders, names in os.walk(folder, onerror=_raise_read_error, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if (real := os.path.realpath(here)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(names):
            path = str(Path(here, name))
            if name[0] == "." or (real := os.path.realpath(path)) in seen or not isfile(path):
                continue
            seen.add(real)
            if extension_of(name) in IN_FOLDERS:
                found.append(path)
            else:
                others.append(name)
    return sorted(found, key=Path), others


def notes_about_repeated(files: Iterable[str | Path], val_files: Iterable = ()) -> list[str]:
    """Returns notes about files that are read more than once. val_files: those of data.val_path."""
    counts = Counter(map(os.path.realpath, files))
    notes = [f"{file} is read more than once" for file, n in counts.most_common(3) if n > 1]
    both = counts.keys() & {*map(os.path.realpath, val_files)}
    notes += [f"{file} is also in data.val_path, so training sees it" for file in sorted(both)[:1]]
    return [sanitize(f"data.path: {note}", keep="") for note in notes]


def _raise_read_error(error: OSError) -> None:
    with translate_read_errors(error.filename, OSError):
        raise error
