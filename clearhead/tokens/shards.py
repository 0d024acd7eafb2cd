"""Reads and writes token files in the formats of llm.c and nanoGPT.

A shard in the format of llm.c and modded-nanogpt, little-endian:

    256 x int32   header: magic 20240520, version 1, number of tokens, zeros
    n x uint16    token ids

nanoGPT's train.bin and val.bin are the ids without a header. `scripts/prepare_data.py` writes
shards, manifest.json and, unless data.tokenizer is gpt2 or byte, tokenizer.json. The manifest
contains the name of the tokenizer, and the numbers of tokens and documents and the SHA-256 of each
shard.

    streams = open_shards(files, get_tokenizer("gpt2"))  # memory-maps the files
    streams["train"].gather(np.array([5]), 1024)         # ids 5 to 1028 (token_stream.py)
"""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    model_validator,
)

from clearhead.errors import DataError, message_of
from clearhead.files import atomic_write, open_regular, read_json, rename, temporary_name
from clearhead.tokens import VOCABULARIES
from clearhead.tokens.text_files import translate_read_errors
from clearhead.tokens.token_stream import TokenStream, invalid_id
from clearhead.tokens.tokenizer import Tokenizer

MANIFEST = "manifest.json"
MANIFEST_VERSION = 2
MAGIC = 20240520  # the first number in the header of llm.c's token files
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_VERIFIED = 2**30  # bytes; token files up to this size are read when they are opened
BLOCK = 2**21  # bytes read at once
TOKEN_DTYPE = np.dtype("<u2")
PLAIN_IDS = "write them with numpy: ids.astype('uint16').tofile('ids.bin')"
# Matches the name of a validation file (without its extension).
VALIDATION_NAME = re.compile(r"(?:^|[_.-])val(?:id(?:ation)?)?(?:[_.-]|$)")


# --------------------------------------------------------------------------------------- manifest


def _whole_file(checksums: object) -> object:
    """Version 1 of the manifest has a checksum for each 4 MiB. Several are not compared."""
    if isinstance(checksums, list):
        return checksums[0] if len(checksums) == 1 else None
    return checksums


class ShardEntry(BaseModel):
    """The entry of a shard in the manifest."""

    model_config = ConfigDict(strict=True)

    # A file name in the folder of the manifest.
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.bin$")]
    tokens: NonNegativeInt
    documents: NonNegativeInt  # number of documents that start in the shard
    sha256: Annotated[str | None, BeforeValidator(_whole_file)]  # of the file


class Manifest(BaseModel):
    """The manifest of a folder of token files. Other keys in the file are ignored."""

    model_config = ConfigDict(strict=True)

    format: Literal["clearhead-shards"]
    version: Literal[1, 2]
    tokenizer: str = Field(pattern=r"^(gpt2|byte|bpe-[0-9a-f]{12})$")
    tokens: int
    shards: list[ShardEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        files = {shard.file for shard in self.shards}
        tokens = sum(shard.tokens for shard in self.shards)
        if (len(files), tokens) != (len(self.shards), self.tokens):
            raise ValueError("the numbers of tokens and shards do not match the list of shards")
        return self


def write_manifest(
    folder: Path, shards: list[ShardEntry], tokenizer: Tokenizer, empty_documents: int = 0
) -> dict:
    """Writes the manifest of the shards in a folder and returns it."""
    manifest = {
        "format": "clearhead-shards",
        "version": MANIFEST_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.n_vocab,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "empty_documents": empty_documents,
        "shards": [shard.model_dump() for shard in shards],
    }
    atomic_write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder and validates it: the file may be from an unknown source."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        reason = f"invalid manifest ({message_of(error)})"
        raise DataError("data.path", path, reason, "prepare the data again") from error


# ---------------------------------------------------------------------------------------- writing


class ShardWriter:
    """Writes one shard atomically: under a temporary name; `close` renames it."""

    def __init__(self, path: Path, end_of_text: int):
        self.path = path
        self.end_of_text = end_of_text
        self.tokens = 0
        self._documents = 0
        self._part = temporary_name(path)
        self._file = open(self._part, "wb", buffering=2**20)  # noqa: SIM115 closed in close
        self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: np.ndarray) -> None:
        """Appends token ids, uint16."""
        self.tokens += len(ids)
        self._documents += int(np.count_nonzero(ids == self.end_of_text))
        self._file.write(ids.astype(TOKEN_DTYPE, copy=False).tobytes())

    def close(self) -> ShardEntry:
        """Writes the header, flushes the file to disk and renames it. Returns its entry."""
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, self.tokens
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with open(self._part, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        rename(self._part, self.path)
        return ShardEntry(
            file=self.path.name, tokens=self.tokens, documents=self._documents, sha256=checksum
        )

    def discard(self) -> None:
        """Removes the temporary file."""
        with contextlib.suppress(OSError):  # it writes what is in the buffer; the disk may be full
            self._file.close()
        self._part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- reading


def open_shards(files: list[Path], tokenizer: Tokenizer) -> dict[str, TokenStream]:
    """Memory-maps token files: {"train": ..., "val": ...} as `split_by_name` divides them.

    Up to 1 GiB in total is read and compared with the checksums of the manifest. Raises DataError
    with the file and the byte position.
    """
    folders = {file.parent for file in files}
    manifests = {f: read_manifest(f) for f in folders if os.path.lexists(f / MANIFEST)}
    for folder, manifest in manifests.items():
        if manifest.tokenizer != tokenizer.name:
            reason = f"{folder} was tokenized with {manifest.tokenizer}"
            name = manifest.tokenizer if manifest.tokenizer in VOCABULARIES else folder
            hint = f"train with data.tokenizer={name}, or create the token files again"
            raise DataError("data.tokenizer", tokenizer.name, reason, hint)
    _raise_file_limit(len(files) + 256)  # each memory-mapped file needs a file descriptor
    shards = {file: _open_shard(file, manifests.get(file.parent), tokenizer) for file in files}
    if sum(shard.size for shard in shards.values()) <= MAX_VERIFIED:
        for shard in shards.values():
            shard.verify()
    return {
        name: _stream([shards[file] for file in part], tokenizer)
        for name, part in split_by_name(files).items()
    }


def split_by_name(files: list[Path]) -> dict[str, list[Path]]:
    """Returns {"train": files, "val": files}: files whose names contain the word "val"
    (VALIDATION_NAME) are the validation data, as in llm.c and nanoGPT. If all files or none have
    such a name, there is only "train"."""
    val = [file for file in files if VALIDATION_NAME.search(file.stem)]
    train = [file for file in files if not VALIDATION_NAME.search(file.stem)]
    return {"train": train, "val": val} if train and val else {"train": files}


def _raise_file_limit(wanted: int) -> None:
    """Raises the limit of open files to `wanted` if the system allows it."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # then _open_shard reports a file
        import resource  # Windows has none and does not limit open files

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass
class _Shard:
    """An opened token file."""

    path: Path
    size: int  # bytes of the file
    first_byte: int  # position of the first id
    ids: np.ndarray  # memory-mapped
    vocab_size: int
    sha256: str | None  # in the manifest

    def verify(self) -> None:
        """Reads the file and checks its checksum and that its ids are in the vocabulary."""
        with open(self.path, "rb") as file:
            digest = hashlib.sha256(file.read(self.first_byte))
            while raw := file.read(BLOCK):
                digest.update(raw)
                ids = np.frombuffer(raw, TOKEN_DTYPE)
                if ids.max() >= self.vocab_size:
                    index = int((ids >= self.vocab_size).argmax())
                    byte = file.tell() - len(raw) + ids.itemsize * index
                    raise invalid_id(self.path, ids[index], byte, self.vocab_size)
        if self.sha256 not in (None, digest.hexdigest()):
            raise _bad_file(self.path, f"checksum mismatch with {MANIFEST}")

    def checksum(self) -> str:
        """Returns 12 digits of the checksum in the manifest, or of the first and the last 2 MiB."""
        if self.sha256:
            return self.sha256[:12]
        with open(self.path, "rb") as file:
            digest = hashlib.sha256(file.read(BLOCK))
            file.seek(max(BLOCK, self.size - BLOCK))
            digest.update(file.read())
        return digest.hexdigest()[:12]


def _stream(shards: list[_Shard], tokenizer: Tokenizer) -> TokenStream:
    return TokenStream(
        [shard.ids for shard in shards],
        tokenizer.n_vocab,
        tokenizer.eot_token,
        [(str(shard.path), shard.first_byte) for shard in shards],
        [(shard.path.name, shard.checksum()) for shard in shards],
    )


def _open_shard(path: Path, manifest: Manifest | None, tokenizer: Tokenizer) -> _Shard:
    """Checks a token file's header against its size and the manifest, and memory-maps it."""
    with translate_read_errors(str(path), OSError), open_regular(path) as file:
        header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    entry = manifest and next((e for e in manifest.shards if e.file == path.name), None)
    if int.from_bytes(header[:4], "little") == MAGIC:
        first_byte, count = HEADER_BYTES, _count_in_header(path, header, size)
    else:
        first_byte, count = 0, size // 2
        _check_plain_ids(path, header, size, tokenizer.n_vocab, is_plain=entry is None)
    if entry and entry.tokens != count:
        raise _bad_file(path, f"its number of tokens, {count} (byte 8), does not match {MANIFEST}")
    try:
        ids = np.asarray(np.memmap(path, TOKEN_DTYPE, "r", first_byte, (count,)))
    except OSError as error:
        reason = f"cannot be memory-mapped ({error.strerror})"
        raise _bad_file(path, reason, "copy the file to a local disk") from error
    return _Shard(path, size, first_byte, ids, tokenizer.n_vocab, entry and entry.sha256)


def _bad_file(path: Path, reason: str, hint: str = "prepare or copy it again") -> DataError:
    return DataError("data.path", path, reason, hint)


def _count_in_header(path: Path, header: bytes, size: int) -> int:
    """Returns the number of tokens in llm.c's header. Raises DataError if the size differs."""
    version = int.from_bytes(header[4:8], "little", signed=True)
    if version != VERSION:
        reason = f"version {version} at byte 4 instead of {VERSION}"
        raise _bad_file(path, reason, "use the files for GPT-2, with uint16 ids")
    # The format has 32 bits. 64 bits are read so that the message shows a damaged count completely.
    count = int.from_bytes(header[8:16], "little")
    needed = HEADER_BYTES + 2 * count
    if needed != size:
        wrong = "truncated" if needed > size else "too long"
        reason = f"{wrong}: {size} bytes, but {count} tokens in the header (byte 8) need {needed}"
        raise _bad_file(path, reason)
    return count


def _check_plain_ids(path: Path, start: bytes, size: int, vocab_size: int, is_plain: bool) -> None:
    """Raises DataError unless a file has nanoGPT's format, 16-bit ids of this vocabulary without a
    header. start: its first bytes. is_plain: false if the file must have a header."""
    if start.startswith(b"\x93NUMPY"):
        raise _bad_file(path, "a file of numpy.save, not plain ids", PLAIN_IDS)
    if (path.parent / "meta.pkl").exists():  # written by nanoGPT's character-level data
        reason = "there is a meta.pkl: these are not ids of a tokenizer of this project"
        raise _bad_file(path, reason, "train on the text: data.path=input.txt data.tokenizer=byte")
    columns = np.frombuffer(start[: len(start) // 8 * 8], TOKEN_DTYPE).reshape(-1, 4)
    zeros = (columns == 0).sum(axis=0) > 0.9 * len(columns)
    if zeros[1] and zeros[3] and not zeros[0]:
        bits = 64 if zeros[2] else 32
        raise _bad_file(path, f"its ids have {bits} bits instead of 16", PLAIN_IDS)
    ids = np.frombuffer(start[: len(start) // 2 * 2], TOKEN_DTYPE)
    # A header has zeros after its three numbers.
    is_header = len(start) == HEADER_BYTES and not any(start[12:])
    if is_plain and not is_header and len(ids) and size % 2 == 0 and ids.max() < vocab_size:
        return
    magic = int.from_bytes(start[:4], "little", signed=True)
    reason = f"not a token file: magic number {magic} at byte 0 instead of {MAGIC}, and its {size} "
    reason += f"bytes are not 16-bit ids below {vocab_size}"
    raise _bad_file(path, reason, "use token files in the format of llm.c or nanoGPT")
