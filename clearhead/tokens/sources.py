"""The files that data.path names, and the tokens of a run.

    find_files("books/")                                  # text files
    tokens = load_tokens(config.data, get_tokenizer("gpt2"))
    tokens.train[0], tokens.val[0]  # TokenStream; of a mixture, one for each source

data.py makes windows of the tokens.
"""

import glob
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path

import numpy as np

from clearhead.config.schema import DataConfig
from clearhead.errors import DataError, sanitize
from clearhead.tokens import HUB
from clearhead.tokens.encoding import StreamEncoder, available_cores, concatenate
from clearhead.tokens.readers import (
    IN_FOLDERS,
    FilePart,
    check_regular_file,
    encode_part,
    extension_of,
    format_of,
    notes_about_kinds,
    split_file,
    translate_read_errors,
)
from clearhead.tokens.shards import MANIFEST, open_shards, read_manifest, split_by_name
from clearhead.tokens.token_stream import Checksums, TokenStream
from clearhead.tokens.tokenizer import Tokenizer

PART_BYTES = 2**19  # of text that a thread encodes at once
HIDDEN = (".", "~$")  # first characters of the names of hidden files; "~$": of a lock of Word
NO_FILE = "broken link or special file"

# ------------------------------------------------------------------------------------------- files


def find_files(path: str | list[str], notes: list[str] | None = None) -> list[str]:
    """Returns the files of data.path: a file, a folder (read recursively), a glob, or a list.

    The files of each entry are sorted, so that a folder always gives the same tokens. Folders and
    globs add only files that are not in the list yet. Appends notes about skipped files, and about
    text files that are probably not plain text. Raises DataError if an entry matches no file or a
    folder cannot be listed.
    """
    files: list[str] = []
    seen: set[str] = set()  # their real paths
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        others: list[str] = []  # what is skipped
        if entry.startswith(HUB):
            found = [entry]
        elif os.path.isdir(entry):
            found, others = _text_files_in(entry)
            if not found:
                hint = "use a glob for files with another extension, such as FOLDER/*.html"
                names = ", ".join(f"*{extension}" for extension in IN_FOLDERS)
                raise DataError("data.path", entry, f"the folder contains no {names}", hint)
        elif os.path.exists(entry):
            check_regular_file(entry)
            found = [entry]
        else:
            names = [name for name in sorted({*_glob(entry)}) if not os.path.isdir(name)]
            names = [name for name in names if not os.path.basename(name).startswith(HIDDEN[1:])]
            found = list(filter(isfile, names))
            others = [NO_FILE] * (len(names) - len(found))
            if not found:
                reason = "no file matches" if glob.has_magic(entry) else "file not found"
                hint = f"check the path (relative to {os.getcwd()})"
                hint += "; write a list as [a,b]" if "," in entry else ""
                raise DataError("data.path", entry, reason, hint)
        if found != [entry]:
            real = {os.path.realpath(file): file for file in reversed(found)}  # each one once
            others += ["already read"] * len(real.keys() & seen)
            found = [file for file in found if file in {real[r] for r in real.keys() - seen}]
        if others and notes is not None:
            skipped = ", ".join(f"{n} {kind}" for kind, n in Counter(others).most_common(9))
            read = f"{len(found)} file{'s' * (len(found) != 1)} read"
            notes.append(sanitize(f"{entry}: {read}; skipped: {skipped}", keep=""))
        files += found
        seen |= {*map(os.path.realpath, found)}
    if notes is not None:
        notes += [sanitize(note, keep="") for note in notes_about_kinds(files)]
    return files


def _text_files_in(folder: str) -> tuple[list[str], list[str]]:
    """Returns the text files in a folder and its subfolders, and the kinds of its other files."""
    found, others = [], []
    for here, names in _folders_in(folder):
        for path in (str(Path(here, name)) for name in names):
            if isfile(path) and extension_of(path) in IN_FOLDERS:
                found.append(path)
            else:
                kind = Path(path).suffix.lower() or "without extension"
                others.append(kind if isfile(path) else NO_FILE)
    return sorted(found, key=Path), others


def _folders_in(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yields a folder and its subfolders, with the names of their files, without hidden ones.
    Follows links, but yields each folder only once."""
    seen = {*map(str, Path(os.path.realpath(folder)).parents)}
    for here, folders, names in os.walk(folder, onerror=_raise_read_error, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        if (real := os.path.realpath(here)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield here, sorted(name for name in names if not name.startswith(HIDDEN))


def _glob(pattern: str) -> list[str]:
    """Returns the paths that match a pattern. ** stands for all folders of `_folders_in`."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    tops = filter(os.path.isdir, glob.glob(str(Path(*parts[:at]))))
    folders = itertools.chain.from_iterable(map(_folders_in, tops))
    rest = parts[at + 1 :] or ("*",)
    return [path for here, _ in folders for path in _glob(str(Path(glob.escape(here), *rest)))]


def _raise_read_error(error: OSError) -> None:
    with translate_read_errors(error.filename, OSError):
        raise error


def token_files(path: str | list[str] | None) -> list[Path]:
    """Returns the token files of data.path, *.bin, in order: files, globs, and folders with a
    manifest or *.bin. [] if it names text files. Raises DataError if it names both."""
    entries = [path] if isinstance(path, str) else path or []
    found = [_token_files_of(os.path.expanduser(entry)) for entry in entries]
    for entry, files in zip(entries, found, strict=True):
        if any(found) and not files:
            find_files(entry)  # raises DataError if there is no file
            reason = "is a text file, but other entries of data.path are token files"
            hint = "convert it to token files: python -m scripts.prepare_data"
            raise DataError("data.path", entry, reason, hint)
    return [*itertools.chain(*found)]


def _token_files_of(entry: str) -> list[Path]:
    if os.path.isdir(entry):
        folder = Path(entry)
        if os.path.lexists(folder / MANIFEST):
            return [folder / shard.file for shard in read_manifest(folder).shards]
        if os.path.exists(folder / "preparing"):
            hint = "rerun python -m scripts.prepare_data with the same settings"
            raise DataError("data.path", entry, "the preparation is not complete", hint)
        return sorted(folder.glob("*.bin"))
    if os.path.isfile(entry):
        return [Path(entry)] if entry.endswith(".bin") else []
    return sorted(Path(p) for p in _glob(entry) if p.endswith(".bin"))


def files_by_name(path: str | list[str]) -> dict[str, list]:
    """Returns the files of data.path: {"train": files}, or with "val" as in `split_by_name`."""
    shards = token_files(path)
    return split_by_name(shards) if shards else {"train": find_files(path)}


def notes_about_repeated(files: Iterable[str | Path], val_files: Iterable = ()) -> list[str]:
    """Returns notes about files that are read more than once. val_files: those of data.val_path."""
    counts = Counter(map(os.path.realpath, files))
    notes = [f"{file} is read more than once" for file, n in counts.most_common(3) if n > 1]
    both = counts.keys() & {*map(os.path.realpath, val_files)}
    notes += [f"{file} is also in data.val_path, so training sees it" for file in sorted(both)[:1]]
    return [sanitize(f"data.path: {note}", keep="") for note in notes]


# ------------------------------------------------------------------------------------------ tokens


@dataclass
class LoadedTokens:
    """The tokens of a run. No token is in both parts."""

    train: list[TokenStream] = field(default_factory=list)  # of each source
    val: list[TokenStream] = field(default_factory=list)  # of each source, of data.val_path, or []
    checksums: Checksums = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages for the user


def load_tokens(config: DataConfig, tokenizer: Tokenizer) -> LoadedTokens:
    """Returns the tokens of data.path and data.val_path. Raises DataError.

    Without data.val_path or token files named val, the last part of each source (about
    data.val_fraction of it) is the validation data. There is none if val_fraction is 0.
    """
    loaded, is_mixture = LoadedTokens(), config.weights and isinstance(config.path, list)
    sources, key = (config.path if is_mixture else [config.path]), "data.path"
    files, val_files = [], []
    for source in sources:
        streams = load_streams(config, source, tokenizer, loaded.notes)
        loaded.checksums += itertools.chain(*(s.checksums() for s in streams.values()))
        train, val = streams["train"], streams.get("val")
        if config.val_path or config.val_fraction == 0:
            val = None
        elif val is None:
            train, val = split_tokens(config, train, tokenizer, loaded.notes)
        else:
            names = ", ".join(os.path.basename(name) for name, _ in val.names[:3])
            reason = f"validation uses the files named val ({names}) and ignores data.val_fraction"
            loaded.notes.append(sanitize(f"data.path={source}: {reason}", keep=""))
        loaded.train.append(train)
        loaded.val += [] if val is None else [val]
        files += files_by_name(source)["train"]
    if config.val_path:
        sources, key = [config.val_path], "data.val_path"
        try:
            streams = load_streams(config, config.val_path, tokenizer, loaded.notes)
        except DataError as error:
            error.key = error.key.replace("data.path", key)
            raise
        loaded.val = [streams.get("val", streams["train"])]
        loaded.checksums += loaded.val[0].checksums()
        by_name = files_by_name(config.val_path)
        val_files = by_name.get("val", by_name["train"])
    for source, val in zip(sources, loaded.val, strict=False):  # no validation data, or of each
        if len(val) <= config.max_length:
            reason = f"{len(val)} validation tokens, but a window needs {config.max_length + 1}"
            hint = "use a longer text, a smaller data.max_length, or another data.val_fraction"
            raise DataError(key, source, reason, f"{hint} (0: no validation)")
    loaded.notes += notes_about_repeated(files, val_files)
    return loaded


def load_streams(
    config: DataConfig, path: str | list[str], tokenizer: Tokenizer, notes: list[str]
) -> dict[str, TokenStream]:
    """Returns {"train": stream}; also "val" if some, not all, token files are named val. Appends
    notes about skipped files and texts."""
    if shards := token_files(path):
        return open_shards(shards, tokenizer)
    options = {"text_key": config.text_key, "encoding": config.encoding}
    tokens, empty = encode_files(find_files(path, notes), tokenizer, **options)
    if not len(tokens):
        raise DataError("data.path", path, "the files contain no text", "use other files")
    if empty:
        notes.append(f"data.path: {empty:,} empty texts skipped")
    return {"train": TokenStream([tokens], tokenizer.n_vocab, tokenizer.eot_token)}


def encode_files(files: list[str], tokenizer: Tokenizer, **options) -> tuple[np.ndarray, int]:
    """Returns the token ids of text files, uint16, and the number of their empty documents. Encodes
    parts of the files in threads. options: text_key and encoding. Raises DataError."""

    def encode(part: FilePart) -> tuple[np.ndarray, int]:
        encoder = StreamEncoder(tokenizer)
        return concatenate(encode_part(part, encoder)), encoder.empty_documents

    parts, ids, num_empty = [], bytearray(), 0
    for file in files:
        if format_of(file).is_file:
            parts += split_file(file, PART_BYTES, **options)
        else:  # each part of a dataset of the hub would need requests
            parts.append(FilePart(file, **options))
    with ThreadPoolExecutor(available_cores()) as threads:
        for of_part, empty in threads.map(encode, parts):
            ids += memoryview(of_part)
            num_empty += empty
    return np.frombuffer(ids, np.uint16), num_empty


def split_tokens(
    config: DataConfig, tokens: TokenStream, tokenizer: Tokenizer, notes: list[str]
) -> tuple[TokenStream, TokenStream]:
    """Splits a stream into training tokens and validation tokens, if possible between documents.
    Positions are measured in bytes, so the validation text is the same with every tokenizer."""
    fractions = (config.val_fraction, config.val_fraction / 2)
    target, latest = tokens.split_positions(fractions, tokenizer.byte_lengths)
    position = tokens.first_document_start(target, latest)
    if position is None:
        position = target
        if tokens.first_document_start(1, 10**8) is not None:
            notes.append("the validation data starts inside a document (the documents are long)")
    return tokens.split(position)
