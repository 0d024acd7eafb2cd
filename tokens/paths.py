"""Which files data.path names, and what kind of text each of them is."""

import errno
import fnmatch
import glob
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from errors import DataError, visible

HUB = "hub:"  # data.path=hub:NAME is a data set of the Hugging Face hub
COMPRESSED = (".gz", ".zst")


def _and_compressed(kinds: dict[str, str]) -> dict[str, str]:
    return {f"{ending}{more}": kind for ending, kind in kinds.items() for more in ("", *COMPRESSED)}


# Ending of a name: kind of text (tokens/readers.py). A folder is searched for these.
TEXTS = _and_compressed({".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl"})
TEXTS[".parquet"] = "parquet"
# A file of any other name is plain text, apart from these.
KINDS = TEXTS | _and_compressed({".json": "jsonl"})

AnyPath = TypeVar("AnyPath", str, Path)


def kind_of(path: str) -> str:
    """text | jsonl | parquet | hub"""
    if path.startswith(HUB):
        return "hub"
    name = path.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "text")


def find_files(path: str | list[str], notes: list[str] | None = None) -> list[str]:
    """The files that data.path names: a file, a folder (its texts, at any depth), a glob, a list.

    In sorted order for each entry, so that the same folder is always the same text. Links are
    followed; within an entry each file is named once. A note is added to
    `notes` when a folder has other files, which are skipped.
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
                    fix = f"if these are tokens, {train_on_tokens(where)}"
                raise DataError("data.path", entry, what, fix)
            if others and notes is not None:
                files_are = "a file is" if len(others) == 1 else f"{len(others):,} files are"
                note = (
                    f"data.path={entry}: {files_are} skipped, such as {others[0].name}; "
                    f"a folder's texts are *.txt, *.jsonl and *.parquet, a glob takes all"
                )
                notes.append(visible(note, keep=""))
        elif os.path.exists(entry):
            check_regular(entry)
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


def train_on_tokens(path: str | Path) -> str:
    return f"train on them: python train.py data=shards {shlex.quote(f'data.path={path}')}"


def _texts_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """The texts in a folder, at any depth, and the other files; hidden ones are skipped."""
    texts, others = [], []
    for inner in _folders_in(str(folder)):
        for name in list_folder(inner):
            if name[0] != ".":
                is_text = name.lower().endswith(tuple(TEXTS))
                (texts if is_text else others).append(Path(inner, name))
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
            for inner in _folders_in(folder):
                yield inner
                if not only_folders:
                    yield from (os.path.join(inner, n) for n in list_folder(inner) if n[0] != ".")
        elif glob.has_magic(name):
            names = fnmatch.filter(list_folder(folder), name)
            yield from (os.path.join(folder, n) for n in names if n[0] != "." or name[0] == ".")
        elif _identity(path := os.path.join(folder, name)):
            yield path


def _folders_in(folder: str) -> Iterator[str]:
    """A folder and those in it, at any depth, each once; hidden ones are skipped.

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
            if name[0] != "." and _is_folder(path):
                (linked if os.path.islink(path) else waiting).append(path)


def list_folder(folder: str) -> list[str]:
    """The names in a folder, sorted; DataError when they cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            return sorted(entry.name for entry in entries)
    except OSError as error:
        raise unreadable(folder or ".", error) from error


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
        raise unreadable(path, error) from error


def unreadable(path: AnyPath, error: OSError) -> DataError:
    cause = f"cannot be read ({error.strerror or error})"
    return DataError("data.path", path, cause, "check its permissions")


def check_regular(path: str) -> None:
    """Raises DataError for a folder, a FIFO, a device, or nothing."""
    if not os.path.isfile(path):
        raise DataError("data.path", path, "not a regular file", "give a text file")
