"""manifest.json: what prepared token files are, with their checksums; written and read.

A checksum is the SHA-256 of a block of 4 MiB, so that damage is known by its place.
"""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from errors import DataError
from files import atomic_write, read_json
from tokens.stream import BLOCK_BYTES
from tokens.tokenizers import TOKENIZERS

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
MANIFEST_LIMIT = 2**28  # bytes; of 15 TB of shards


@dataclass
class ShardEntry:
    """What the manifest says of one shard."""

    file: str  # a name in the manifest's folder
    tokens: int
    documents: int  # that begin in it
    sha256: list[str]  # of each BLOCK_BYTES of the file
    documents_sha256: str


def write_manifest(
    folder: Path, entries: list[ShardEntry], tokenizer: str, **facts: str | int
) -> dict:
    """The manifest of the shards in this folder, in this order; facts go into it as they are."""
    manifest = {
        "format": "clearhead-shards",
        "version": MANIFEST_VERSION,
        "tokenizer": tokenizer,
        "vocab_size": TOKENIZERS[tokenizer],
        **facts,
        "tokens": sum(entry.tokens for entry in entries),
        "documents": sum(entry.documents for entry in entries),
        "block_bytes": BLOCK_BYTES,
        "shards": [asdict(entry) for entry in entries],
    }
    atomic_write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


@dataclass
class Manifest:
    """What a folder of token files is."""

    tokenizer: str
    shards: list[ShardEntry]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, every value of it checked: it may come from anywhere."""
    path = folder / MANIFEST

    def bad(cause: str) -> DataError:
        cause = cause if len(cause) < 1000 else f"{cause[:1000]}..."
        return DataError("data.path", path, cause, "prepare the data again")

    try:
        values = read_json(path, MANIFEST_LIMIT)
    except OSError as error:
        raise bad(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise bad(f"not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != "clearhead-shards":
        raise bad("not a manifest of token shards")
    if values.get("version") != MANIFEST_VERSION:
        raise bad(f"version {values.get('version')!r}, and this reads version {MANIFEST_VERSION}")
    if values.get("block_bytes") != BLOCK_BYTES:
        raise bad(f"checksums of {values.get('block_bytes')!r} bytes, not of {BLOCK_BYTES}")
    tokenizer, shards = values.get("tokenizer"), values.get("shards")
    if tokenizer not in list(TOKENIZERS):
        raise bad(f"tokenizer {tokenizer!r} is none of {', '.join(TOKENIZERS)}")
    try:
        entries = shard_entries(shards)
    except ValueError as error:
        raise bad(str(error)) from error
    if not entries:
        raise bad("lists no shards")
    totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents")}
    for key, value in (totals | {"vocab_size": TOKENIZERS[tokenizer]}).items():
        if values.get(key, value) != value:
            raise bad(f"says {key} {values[key]!r}, and its shards have {value}")
    return Manifest(tokenizer, entries)


def shard_entries(shards: object) -> list[ShardEntry]:
    """What a manifest lists, checked; ValueError names the field that is wrong."""
    if not isinstance(shards, list):
        raise ValueError("lists no shards")
    kinds = {"file": str, "tokens": int, "documents": int, "sha256": list}
    kinds["documents_sha256"] = str
    for shard in shards:
        if not isinstance(shard, dict) or set(shard) != set(kinds):
            raise ValueError("a shard without one of " + ", ".join(kinds))
        wrong = [key for key, kind in kinds.items() if type(shard[key]) is not kind]
        if not wrong and any(type(checksum) is not str for checksum in shard["sha256"]):
            wrong = ["sha256"]
        if wrong:
            raise ValueError(f"{wrong[0]!r} of shard {shard['file']!r} is of another type")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.bin", shard["file"]):
            raise ValueError(f"file {shard['file'][:200]!r} is not a shard name")
    for name, times in Counter(shard["file"] for shard in shards).most_common(1):
        if times > 1:
            raise ValueError(f"lists {name} twice")
    return [ShardEntry(**shard) for shard in shards]
