"""manifest.json: what prepared token files are, with their checksums; written and read.

A checksum is the SHA-256 of a block of 4 MiB, so that damage is known by its place.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from errors import DataError, message_of
from files import atomic_write, read_json
from tokens.stream import BLOCK_BYTES
from tokens.tokenizers import TOKENIZERS

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 2**28  # bytes; of 15 TB of shards


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
    vocab_size: int
    tokens: int
    documents: int
    block_bytes: int
    shards: list[ShardEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_consistent(self) -> "Manifest":
        expected = _facts(self.shards, self.tokenizer)
        wrong = [key for key, value in expected.items() if getattr(self, key) != value]
        if wrong or len({shard.file for shard in self.shards}) < len(self.shards):
            raise ValueError(f"{wrong[0] if wrong else 'a file twice'} contradicts its shards")
        return self


def _facts(shards: list[ShardEntry], tokenizer: str) -> dict[str, int]:
    return {
        "vocab_size": TOKENIZERS[tokenizer],
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "block_bytes": BLOCK_BYTES,
    }


def write_manifest(
    folder: Path, shards: list[ShardEntry], tokenizer: str, **facts: str | int
) -> dict:
    """The manifest of the shards in this folder, in this order; facts go into it as they are."""
    manifest = {
        "format": "clearhead-shards",
        "version": 1,
        "tokenizer": tokenizer,
        **facts,
        **_facts(shards, tokenizer),
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
