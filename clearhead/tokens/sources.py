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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path

import numpy as np

from clearhead.config.schema import DataConfig
from clearhead.errors import DataError, sanitize
from clearhead.tokens import HUB
from clearhead.tokens.encoding import StreamEncoder, available_cores, concatenate
from clearhead.tokens.gutenberg import notes_about_trimmed
from clearhead.tokens.readers import (
    IN_FOLDERS,
    NO_TEXT,
    check_kinds,
    encode_part,
    format_of,
    split_file,
)
from clearhead.tokens.shards import MANIFEST, open_shards, read_manifest
from clearhead.tokens.text_files import (
    FilePart,
    check_regular_file,
    extension_of,
    translate_read_errors,
)
from clearhead.tokens.token_stream import MAX_MEASURED, SEARCH_BLOCK, Checksums, TokenStream
from clearhead.tokens.tokenizer import Tokenizer

PART_BYTES = 2**19  # of text that a thread encodes at once
HIDDEN = (".", "~$")  # first characters of the names of hidden files; "~$": of a lock of Word

# ------------------------------------------------------------------------------------------- files


def find_files(path: str | list[str], notes: list[str] | None = None) -> list[str]:
    """Returns the files of data.path: a file, a folder (read recursively), a glob, or a list.

    The files of each entry are sorted, so that a folder always gives the same tokens. Folders and
    globs add only files that are not in the list yet. Appends notes about skipped files. Raises
    DataError if an entry matches no file, a folder cannot be listed or a file is not text.
    """
    files, seen = [], set()  # seen: their real paths
    notes = [] if notes is None else notes
    for entry in map(os.path.expanduser, [path] if isinstance(path, str) else path):
        found, skipped = _files_of(entry)
        for file in found:
            if (real := os.path.realpath(file)) in seen and file != entry:
                skipped.append("already read")
            else:
                files.append(file)
            seen.add(real)
        if skipped:
            num_read = len(found) - skipped.count("already read")
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(skipped).most_common(9))
            note = f"{entry}: {num_read} file{'s' * (num_read != 1)} read; skipped: {kinds}"
            notes.append(sanitize(note, keep=""))
    check_kinds(files)
    return files


def _files_of(entry: str) -> tuple[list[str], list[str]]:
    """Returns the files of an entry of data.path, and the kinds of what is skipped."""
    if entry.startswith(HUB):
        return [entry], []
    if os.path.isdir(entry):
        paths = [str(Path(here, name)) for here, names in _folders_in(entry) for name in names]
        found = [path for path in paths if isfile(path) and extension_of(path) in IN_FOLDERS]
        if not found:
            hint = "use a glob for files with another extension, such as FOLDER/*.html"
            names = ", ".join(f"*{extension}" for extension in IN_FOLDERS)
            raise DataError("data.path", entry, f"the folder contains no {names}", hint)
        others = {*paths} - {*found}
        kinds = [Path(path).suffix.lower() or "without extension" for path in others]
        return sorted(found, key=Path), kinds
    if os.path.exists(entry):
        check_regular_file(entry)
        return [entry], []
    if wrong := [part for part in Path(entry).parts if "**" in part and part != "**"]:
        hint = "use **/ for all folders: " + wrong[0].replace("**", "**/*")
        raise DataError("data.path", entry, "** is only a part of a name", hint)
    paths = {path for path in _glob(entry) if not os.path.isdir(path)}
    paths = [path for path in paths if not os.path.basename(path).startswith(HIDDEN[1:])]
    found = sorted(filter(isfile, paths))
    if not found:
        reason = "no file matches" if glob.has_magic(entry) else "file not found"
        hint = f"check the path (relative to {os.getcwd()})"
        hint += "; write a list as [a,b]" if "," in entry else ""
        raise DataError("data.path", entry, reason, hint)
    return found, ["broken link or special file"] * (len(paths) - len(found))


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
    """Returns the paths that a pattern matches. ** stands for all folders of `_folders_in`: with
    links in a circle, glob.glob would not end."""
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
    if config.val_path:
        sources, key = [config.val_path], "data.val_path"
        try:
            streams = load_streams(config, config.val_path, tokenizer, loaded.notes)
        except DataError as error:
            error.key = error.key.replace("data.path", key)
            raise
        loaded.val = [streams.get("val", streams["train"])]
        loaded.checksums += loaded.val[0].checksums()
    for source, val in zip(sources, loaded.val, strict=False):  # no validation data, or of each
        if len(val) <= config.max_length:
            reason = f"{len(val)} validation tokens, but a window needs {config.max_length + 1}"
            hint = "use a longer text, a smaller data.max_length, or another data.val_fraction"
            raise DataError(key, source, reason, f"{hint} (0: no validation)")
    loaded.notes += notes_about_special(loaded.train, tokenizer)
    return loaded


def notes_about_special(streams: list[TokenStream], tokenizer: Tokenizer) -> list[str]:
    """Returns a note about special tokens in the training text, except the end-of-text token."""
    names = {number: name for name, number in tokenizer.special.items() if name != tokenizer.end}
    if not names or sum(map(len, streams)) > MAX_MEASURED:
        return []
    blocks = itertools.chain(*(stream.blocks(SEARCH_BLOCK) for stream in streams))
    counts = sum((Counter(ids[np.isin(ids, [*names])].tolist()) for ids in blocks), Counter())
    if not counts:
        return []
    found = ", ".join(f"{names[number]} ({n:,})" for number, n in counts.most_common(5))
    note = f"special tokens of the tokenizer are read as their ids, not as text: {found}"
    return [sanitize(f"data.path: {note}", keep="")]


def load_streams(
    config: DataConfig, path: str | list[str], tokenizer: Tokenizer, notes: list[str]
) -> dict[str, TokenStream]:
    """Returns {"train": stream}; also "val" if some, not all, token files are named val. Appends
    notes about skipped files and texts."""
    if shards := token_files(path):
        return open_shards(shards, tokenizer)
    options = {key: getattr(config, key) for key in ("text_key", "encoding", "trim")}
    tokens, empty, trimmed = encode_files(find_files(path, notes), tokenizer, **options)
    if not len(tokens):
        raise DataError("data.path", path, *NO_TEXT)
    notes += notes_about_trimmed(path, trimmed)
    if empty:
        notes.append(f"data.path: {empty:,} empty texts skipped")
    return {"train": TokenStream([tokens], tokenizer.n_vocab, tokenizer.eot_token)}


def encode_files(
    files: list[str], tokenizer: Tokenizer, **options
) -> tuple[np.ndarray, int, Counter]:
    """Returns the token ids of text files, uint16, the number of their empty documents, and what
    was trimmed. Encodes parts of the files in threads. options: those of a FilePart. Raises
    DataError."""

    def encode(part: FilePart) -> tuple[np.ndarray, StreamEncoder]:
        encoder = StreamEncoder(tokenizer)
        return concatenate(encode_part(part, encoder)), encoder

    options["special"] = tokenizer.special_bytes
    parts, ids, num_empty, trimmed = [], bytearray(), 0, Counter()
    for file in files:
        if format_of(file).is_file:
            parts += split_file(file, PART_BYTES, **options)
        else:  # each part of a dataset of the hub would need requests
            parts.append(FilePart(file, **options))
    with ThreadPoolExecutor(available_cores()) as threads:
        for of_part, encoder in threads.map(encode, parts):
            ids += memoryview(of_part)
            num_empty += encoder.empty_documents
            trimmed += encoder.trimmed
    return np.frombuffer(ids, np.uint16), num_empty, trimmed


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
