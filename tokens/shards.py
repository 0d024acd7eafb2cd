"""Token files: llm.c's shards, nanoGPT's plain ones, written and read.

A shard, as llm.c published the layout and modded-nanogpt reads it, all little-endian:

    256 x int32   header: magic 20240520, version 1, number of tokens, zeros
    n x uint16    token ids

nanoGPT's train.bin and val.bin are the ids without a header. `scripts/prepare_data.py` writes
shards, and next to them manifest.json: tokenizer, counts, and the SHA-256 of each 4 MiB, so that
the place of damage is known.

    streams = open_shards("fineweb/", "gpt2")     # maps the files
    streams["train"].gather(np.array([5]), 1024)  # ids from the fifth on (tokens/stream.py)
"""

import functools
import glob
import hashlib
import json
import os
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from errors import DataError, message_of
from files import atomic_write, open_regular, read_json, rename, temporary_name
from tokens.paths import find_files, translate_read_errors
from tokens.stream import BLOCK_BYTES, TokenStream
from tokens.tokenizers import TOKENIZERS

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**28  # bytes; of 15 TB of shards
MAGIC = 20240520  # how a token file of llm.c begins
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_VERIFY_ALL = 2**30  # bytes that are that are verified completely whenever they are opened
TOKEN_DTYPE = np.dtype("<u2")
# Names of files to validate on, without the ending.
VALIDATION_NAME = re.compile(r"(?:^|[_.-])val(?:id(?:ation)?)?(?:[_.-]|$)")


# --------------------------------------------------------------------------------------- manifest


class ShardEntry(BaseModel):
    """What the manifest says of one shard."""

    model_config = ConfigDict(strict=True)

    # A name in the manifest's folder.
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.bin$")]
    tokens: NonNegativeInt
    documents: NonNegativeInt  # that begin in it
    sha256: list[str]  # of each BLOCK_BYTES of the file


class Manifest(BaseModel):
    """What a folder of token files is; more may be in the file, for people."""

    model_config = ConfigDict(strict=True)

    format: Literal["clearhead-shards"]
    version: Literal[1]
    tokenizer: Literal["gpt2", "byte"]
    tokens: int
    block_bytes: int
    shards: list[ShardEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        files = {shard.file for shard in self.shards}
        tokens = sum(shard.tokens for shard in self.shards)
        if (len(files), tokens, BLOCK_BYTES) != (len(self.shards), self.tokens, self.block_bytes):
            raise ValueError("it contradicts its shards")
        return self


def write_manifest(
    folder: Path, shards: list[ShardEntry], tokenizer: str, **extra: str | int
) -> dict:
    """The manifest of the shards in this folder, in this order; extra go into it as they are."""
    manifest = {
        "format": "clearhead-shards",
        "version": 1,
        "tokenizer": tokenizer,
        **extra,
        "vocab_size": TOKENIZERS[tokenizer],
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "block_bytes": BLOCK_BYTES,
        "shards": [shard.model_dump() for shard in shards],
    }
    atomic_write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, every value of it checked: it may come from anywhere."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(read_json(path, MANIFEST_LIMIT))
    except (OSError, ValueError) as error:
        cause = f"cannot be used ({message_of(error)})"
        raise DataError("data.path", path, cause, "prepare the data again") from error


# ---------------------------------------------------------------------------------------- writing


class ShardWriter:
    """Writes one shard; until `close` under another name, so that a shard is always whole."""

    def __init__(self, path: Path, end_of_text: int):
        self.path = path
        self.end_of_text = end_of_text
        self.tokens = 0
        self._buffer: list[np.ndarray] = []  # to be written
        self._written = self._documents = 0
        self._part = temporary_name(path)
        self._file = open(self._part, "wb")  # noqa: SIM115 closed in close
        self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: np.ndarray) -> None:
        """More token ids, uint16."""
        self._buffer.append(ids)
        self.tokens += len(ids)
        if self.tokens - self._written >= 2**20:
            self._write()

    def _write(self) -> None:
        ids = np.concatenate([np.zeros(0, TOKEN_DTYPE), *self._buffer])
        self._documents += int((ids == self.end_of_text).sum())
        self._file.write(ids.astype(TOKEN_DTYPE, copy=False).tobytes())
        self._buffer, self._written = [], self.tokens

    def close(self) -> ShardEntry:
        """Completes the file and gives it its name."""
        self._write()
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, self.tokens
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with open(self._part, "rb", buffering=0) as file:
            blocks = iter(functools.partial(file.read, BLOCK_BYTES), b"")
            checksums = [hashlib.sha256(block).hexdigest() for block in blocks]
        rename(self._part, self.path)
        return ShardEntry(
            file=self.path.name, tokens=self.tokens, documents=self._documents, sha256=checksums
        )

    def discard(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- reading


def is_shards(path: str | list[str] | None) -> bool:
    """Whether data.path names token files: *.bin, or a folder with a manifest or *.bin in it."""
    entries = [path] if isinstance(path, str) else path or []
    return any(_shard_files(os.path.expanduser(entry)) for entry in entries)


def _shard_files(entry: str) -> list[Path]:
    """The token files that one entry of data.path names, in order; none for an entry of texts."""
    if os.path.isdir(entry):
        folder = Path(entry)
        if os.path.lexists(folder / MANIFEST):
            return [folder / shard.file for shard in read_manifest(folder).shards]
        if os.path.exists(folder / "preparing"):
            fix = "rerun the command that prepares it"
            raise DataError("data.path", entry, "is not completely prepared", fix)
        return sorted(folder.glob("*.bin"))
    if os.path.isfile(entry):
        return [Path(entry)] if entry.endswith(".bin") else []
    return sorted(Path(p) for p in glob.glob(entry, recursive=True) if p.endswith(".bin"))


def open_shards(
    path: str | list[str], tokenizer: str, verify: str | bool = "auto"
) -> dict[str, TokenStream]:
    """The token files that data.path names, mapped: {"train": ..., "val": ...}.

    Files with "val" in their names are for validation where others are not: llm.c's and nanoGPT's
    way; otherwise there is no "val". verify: true reads every byte, false only headers, auto all
    of it up to 1 GiB and beyond that the first and last block of each file.
    Raises DataError naming the file and the byte, before anything large is allocated.
    """
    files = []
    for entry in [path] if isinstance(path, str) else path:
        found = _shard_files(os.path.expanduser(entry))
        if not found:
            find_files(entry)  # refuses what is not there
            cause = "a text, and other entries of data.path are token files"
            fix = "prepare it too: python -m scripts.prepare_data"
            raise DataError("data.path", entry, cause, fix)
        files += found
    folders = {file.parent for file in files}
    manifests = {f: read_manifest(f) for f in folders if os.path.lexists(f / MANIFEST)}
    for folder, manifest in manifests.items():
        if manifest.tokenizer != tokenizer:
            raise DataError(
                "data.tokenizer",
                tokenizer,
                f"{folder / MANIFEST} is of shards made with {manifest.tokenizer}",
                f"train with data.tokenizer={manifest.tokenizer}, or prepare them with {tokenizer}",
            )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(files) + 256  # each mapped file is an open one
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    shards = [_open_shard(file, manifests.get(file.parent), tokenizer) for file in files]
    total = sum(shard.size for shard in shards)
    for shard in shards:
        blocks = range(len(shard.checksums))
        if verify == "auto" and total > MAX_VERIFY_ALL:
            blocks = sorted({0, len(blocks) - 1})
        if verify:
            shard.verify(blocks)
    train = [shard for shard in shards if not VALIDATION_NAME.search(shard.path.stem)]
    val = [shard for shard in shards if VALIDATION_NAME.search(shard.path.stem)]
    if not train or not val:
        return {"train": _stream(shards)}
    return {"train": _stream(train), "val": _stream(val)}


def _stream(shards: list["_Shard"]) -> TokenStream:
    return TokenStream(
        [shard.ids for shard in shards],
        shards[0].vocab_size,
        shards[0].vocab_size - 1,
        [(str(shard.path), shard.first_byte) for shard in shards],
        [(shard.path.name, shard.checksums) for shard in shards],
    )


@dataclass
class _Shard:
    """A token file whose header fits its size."""

    path: Path
    size: int  # bytes of the file
    first_byte: int  # where its ids begin
    ids: np.ndarray  # mapped, not read
    vocab_size: int
    entry: ShardEntry | None  # what the manifest says of it
    checksums: list[str]  # of its blocks, shortened; "" for one that was not read

    def verify(self, blocks: Iterable[int]) -> None:
        """Reads these blocks: are their ids in the vocabulary, and is their checksum right?"""
        with open(self.path, "rb", buffering=0) as file:
            for block in blocks:
                first = block * BLOCK_BYTES
                file.seek(first)
                raw = file.read(BLOCK_BYTES)
                checksum = hashlib.sha256(raw).hexdigest()
                if self.entry and checksum != self.entry.sha256[block]:
                    cause = f"checksum mismatch in the {len(raw)} bytes from byte {first} on"
                    raise _bad_file(self.path, f"{cause} ({MANIFEST})")
                self.checksums[block] = checksum[:12]
                skip = max(0, self.first_byte - first)
                ids = np.frombuffer(raw[skip : len(raw) // 2 * 2], TOKEN_DTYPE)
                if len(ids) and ids.max() >= self.vocab_size:
                    place = int((ids >= self.vocab_size).argmax())
                    cause = (
                        f"id {ids[place]} at byte {first + skip + 2 * place} is beyond the "
                        f"vocabulary of {self.vocab_size}"
                    )
                    raise _bad_file(self.path, cause, "use its own tokenizer, or prepare it again")


def _bad_file(path: Path, cause: str, fix: str = "prepare or copy it again") -> DataError:
    return DataError("data.path", path, cause, fix)


def _open_shard(path: Path, manifest: Manifest | None, tokenizer: str) -> _Shard:
    """Maps a token file after its header, its size and the manifest agree."""
    with translate_read_errors(str(path), OSError), open_regular(path) as file:
        header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    vocab_size = TOKENIZERS[tokenizer]
    entry = manifest and next((e for e in manifest.shards if e.file == path.name), None)
    if int.from_bytes(header[:4], "little") == MAGIC:
        first_byte, count = HEADER_BYTES, _count_in_header(path, header, size)
    else:
        # nanoGPT's: ids without a header, which is known by the zeros behind its three words.
        ids = np.frombuffer(header[: len(header) // 2 * 2], TOKEN_DTYPE)
        is_header = len(header) == HEADER_BYTES and not any(header[12:])
        if entry or is_header or size == 0 or size % 2 or ids.max() >= vocab_size:
            magic = int.from_bytes(header[:4], "little", signed=True)
            cause = f"wrong magic {magic} at byte 0 instead of {MAGIC}, and its {size} bytes "
            cause += f"are no plain uint16 ids below {vocab_size} either"
            raise _bad_file(path, cause, "give token files of llm.c's or nanoGPT's layout")
        first_byte, count = 0, size // 2
    blocks = -(-size // BLOCK_BYTES)
    checksums = [checksum[:12] for checksum in entry.sha256] if entry else [""] * blocks
    if len(checksums) != blocks or (entry and entry.tokens != count):
        raise _bad_file(path, f"its {count} tokens (byte 8) contradict {MANIFEST}")
    try:
        ids = np.asarray(np.memmap(path, TOKEN_DTYPE, "r", first_byte, (count,)))
    except OSError as error:
        fix = "raise the limit of open files: ulimit -n"
        raise _bad_file(path, f"cannot be mapped ({error.strerror})", fix) from error
    return _Shard(path, size, first_byte, ids, vocab_size, entry, checksums)


def _count_in_header(path: Path, header: bytes, size: int) -> int:
    """The number of tokens in llm.c's header; DataError unless the file is as long as that."""
    version = int.from_bytes(header[4:8], "little", signed=True)
    if version != VERSION:
        cause = f"version {version} at byte 4, and this reads version {VERSION}"
        raise _bad_file(path, cause, "get the GPT-2 files, of uint16 ids")
    # Read as 64 bits, of which the layout uses 31, so that a wrong count is reported as it is.
    count = int.from_bytes(header[8:16], "little")
    needed = HEADER_BYTES + 2 * count
    if needed != size:
        wrong = f"truncated at byte {size}" if needed > size else f"trailing bytes up to {size}"
        cause = f"{wrong}: the header (byte 8) counts {count} tokens, which end at byte {needed}"
        raise _bad_file(path, cause)
    return count
