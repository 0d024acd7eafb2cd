"""tokens/shards.py: token files in the formats of llm.c and nanoGPT, manifests, damaged files.

Damage at random positions: tests/faults/test_fuzz.py.
"""

import contextlib
import hashlib
import json
import os
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.refusals import SPECIAL_FILES, refused, time_limit
from helpers.texts import numbers_in, peak_memory, write_packed, write_source

from clearhead.errors import DataError
from clearhead.tokens import VOCABULARIES
from clearhead.tokens import shards as module
from clearhead.tokens.shards import MANIFEST, ShardWriter, open_shards, write_manifest
from clearhead.tokens.sources import token_files
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.tokenizer import get_tokenizer

EOT = 50256


def ids_of(count: int, period: int = 50) -> list[int]:
    """Token ids of documents of `period` tokens."""
    return [EOT if position % period == 0 else (position * 7919) % EOT for position in range(count)]


def write_shards(folder: Path, shards: dict[str, list[int]], tokenizer: str = "gpt2") -> Path:
    """Writes a folder of shards with a manifest, as scripts/prepare_data.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, ids in shards.items():
        writer = ShardWriter(folder / name, VOCABULARIES[tokenizer] - 1)
        writer.append(np.array(ids, np.uint16))
        entries.append(writer.close())
    write_manifest(folder, entries, get_tokenizer(tokenizer))
    return folder


def opened(
    path: object, tokenizer: str = "gpt2", most: int | None = None
) -> dict[str, TokenStream]:
    """most: number of bytes that are read; 0: only the headers."""
    files = token_files(path if isinstance(path, list) else str(path))
    with mock.patch.object(module, "MAX_VERIFIED", module.MAX_VERIFIED if most is None else most):
        return open_shards(files, get_tokenizer(tokenizer))


def ids_in(stream: TokenStream) -> list[int]:
    return stream.gather(np.array([0]), len(stream))[0].tolist()


def read(path: object, tokenizer: str = "gpt2") -> list[int]:
    """All ids of token files that contain only training data."""
    streams = opened(path, tokenizer)
    assert list(streams) == ["train"]
    return ids_in(streams["train"])


@contextlib.contextmanager
def refuses(file: object, *numbers: int):
    """Expects a DataError of this file; its reason contains these numbers (such as the byte)."""
    with refused(DataError, "data.path", file, exit_code=3) as caught:
        yield
    assert set(numbers) <= numbers_in(caught.value), caught.value.reason


def put(path: Path, byte: int, content: bytes) -> None:
    """Overwrites bytes of a file from this position on; negative: counted from its end."""
    with open(path, "r+b") as file:
        file.seek(byte, 2 if byte < 0 else 0)
        file.write(content)


HAND_MADE = (
    b"\x88\xd8\x34\x01"  # 20240520
    b"\x01\x00\x00\x00"  # version 1
    b"\x07\x00\x00\x00"  # seven tokens
    + bytes(253 * 4)
    + b"\x50\xc4"  # 50256: a document starts
    + b"\x88\x3c\x0b\x00\xe3\x03\x00\x00"  # 15496, 11, 995, 0: "Hello, world!"
    + b"\x50\xc4\x0d\x00"  # 50256, 13
)
HAND_MADE_IDS = [50256, 15496, 11, 995, 0, 50256, 13]


def shard(*header: int, ids: list[int]) -> bytes:
    """A header that starts with these numbers, followed by zeros."""
    return struct.pack("<256i", *header, *[0] * (256 - len(header))) + plain(ids)


def llm_c_bytes(ids: list[int]) -> bytes:
    """A shard as llm.c describes it: 256 int32, of which three are used; uint16 ids."""
    return shard(20240520, 1, len(ids), ids=ids)


def plain(ids: list[int]) -> bytes:
    """nanoGPT's format: ids without a header."""
    return struct.pack(f"<{len(ids)}H", *ids)


def test_ids_of_another_width_or_vocabulary_are_refused(tmp_path):
    ids = np.random.default_rng(0).integers(0, 60, 5000)
    ids[::7] = 0
    path = tmp_path / "a.bin"
    for dtype, bits in (("<u4", 32), ("<i8", 64)):
        path.write_bytes(ids.astype(dtype).tobytes())
        with refuses(path, bits):
            opened(path)
    with open(path, "wb") as file:
        np.save(file, ids.astype("<u2"))
    with refuses(path):
        opened(path)
    for few in (ids, np.array([5, 6, 7, 0])):
        path.write_bytes(few.astype("<u2").tobytes())
        assert read(path) == few.tolist()
    (tmp_path / "meta.pkl").write_bytes(b"the names of 60 characters")
    with refuses(path):
        opened(path)


def test_format_is_frozen(tmp_path):
    """Later versions must read existing files and write the same bytes."""
    assert llm_c_bytes(HAND_MADE_IDS) == HAND_MADE
    path = write_shards(tmp_path, {"a.bin": HAND_MADE_IDS}) / "a.bin"
    assert path.read_bytes() == HAND_MADE
    entry = {"file": "a.bin", "tokens": 7, "documents": 2}
    entry["sha256"] = hashlib.sha256(HAND_MADE).hexdigest()
    expected = {"format": "clearhead-shards", "version": 2, "tokenizer": "gpt2"}
    expected |= {"vocab_size": 50257, "tokens": 7, "documents": 2, "empty_documents": 0}
    assert json.loads((tmp_path / MANIFEST).read_bytes()) == expected | {"shards": [entry]}
    assert read(path) == HAND_MADE_IDS
    stream = opened(path)["train"]
    assert (stream.dtype, stream.vocab_size, stream.end_of_text) == (np.uint16, 50257, 50256)
    assert not stream.arrays[0].flags.writeable


IDS = ids_of(3000)

# (content of the file, numbers that the error must contain)
DAMAGED = {
    "Llama 3's tokens": (shard(20240801, 7, 4, ids=[62464, 1, 1, 0, 2, 0, 3, 0]), (20240801,)),
    "one token is missing": (shard(20240520, 1, 3001, ids=IDS), (7024, 3001, 7026)),
    "plain ids like a header": (plain([1, 2, 3, 4, 5, 6, *[0] * 506, 1, 2, 3]), (131073, 0)),
}


def test_damaged_shard_is_refused(tmp_path, subtests):
    """Without a manifest and with the manifest of the undamaged file; before bytes are read."""
    folder = write_shards(tmp_path / "prepared", {"a.bin": IDS})
    alone = tmp_path / "a.bin"
    for damage, (content, numbers) in DAMAGED.items():
        for path, file in ((alone, alone), (folder, folder / "a.bin")):
            file.write_bytes(content)
            with subtests.test(damage, path=path), refuses(file, *numbers):
                opened(path, most=0)


NOT_FILES = SPECIAL_FILES | {"missing": Path.unlink}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_not_a_regular_file_is_refused_without_waiting(kind, tmp_path):
    """It replaces each file of a preparation. Reading some of them would not end."""
    file = write_shards(tmp_path, {"a.bin": [EOT, 1]}) / "a.bin"
    for path in [file] if kind == "missing" else [file, tmp_path / MANIFEST]:
        NOT_FILES[kind](path)
        with time_limit(), refuses(path):
            opened(tmp_path)


def test_damaged_manifest_is_refused(tmp_path, subtests):
    """Other damage: tests/faults/test_fuzz.py."""
    folder = write_shards(tmp_path / "folder", {"a.bin": IDS, "b.bin": ids_of(70)})
    (tmp_path / "b.bin").write_bytes((folder / "b.bin").read_bytes())  # the target of "../b.bin"
    path = folder / MANIFEST
    valid = json.loads(path.read_bytes())
    first, second = valid["shards"]
    damaged = [b"{}", *({**valid, key: value} for key, value in (("version", 3), ("tokens", 3069)))]
    for changes in ({"file": "../b.bin"}, {"file": "a.bin"}, {"tokens": 69}, {"sha256": "0"}):
        damaged.append(valid | {"shards": [first, second | changes]})
    for values in damaged:
        path.write_bytes(values if isinstance(values, bytes) else json.dumps(values).encode())
        with subtests.test(values), refused(DataError, "data.path", exit_code=3) as caught:
            opened(folder)
        assert caught.value.value in (path, folder / "b.bin")


def test_another_tokenizer_is_refused(tmp_path):
    """The manifest names the tokenizer; all ids are in both vocabularies."""
    path = write_shards(tmp_path, {"a.bin": [1, 2, 3]}, tokenizer="byte") / "a.bin"
    assert read(path, "byte") == [1, 2, 3]
    with refused(DataError, "data.tokenizer", "gpt2", 3):
        opened(path, "gpt2", most=0)


def test_plain_ids_are_read(tmp_path):
    """Files as written by nanoGPT's prepare.py, of any length. Unlike them, a header of another
    format has zeros after its three numbers."""
    train = [EOT, *range(1, 200), EOT, EOT] * 5
    path = tmp_path / "train.bin"
    for ids in (train[:1], train[:511], train[:512], train[:513], [*range(1, 7), *[0] * 505, 1]):
        path.write_bytes(plain(ids))
        assert read(path) == ids
    for content, number in ((plain(train)[:-1], 2019), (plain([*train, 50257]), 50257)):
        path.write_bytes(content)
        with refuses(path, number):
            opened(path)
    path.write_bytes(b"This is a text, and not at all of token ids.")
    with refuses(path, int.from_bytes(b"This", "little"), 0, 257):
        opened(path, "byte", most=0)
    write_shards(tmp_path, {"train.bin": ids_of(600)})
    path.write_bytes(plain(ids_of(1112)))  # with a manifest every file needs a header
    with refuses(path, struct.unpack("<i", plain(ids_of(2)))[0]):
        opened(tmp_path, most=0)


def test_data_path_names_token_files(tmp_path, monkeypatch):
    """And not texts. Both together and an incomplete preparation are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_shards(tmp_path / "prepared", {"c.bin": [1, 2], "a.bin": [3], "b.bin": [4, 5]})
    for name, token in {"y/2": 12, "y/10": 10, "y/deep/3": 13, "y/[1]": 14, "y/1": 11}.items():
        write_packed(tmp_path / f"{name}.bin", llm_c_bytes([token]))
    for name in ("prepared/notes.txt", "y/log.txt", "plain.txt", "half/preparing/0.json"):
        write_source(tmp_path / name, ["a text"])
    for path, expected in (
        ("prepared", [1, 2, 3, 4, 5]),  # the order in the manifest
        ("prepared/[abc].bin", [3, 4, 5, 1, 2]),
        ("y", [11, 10, 12, 14]),  # sorted by name, without subdirectories
        ("y/*", [11, 10, 12, 14]),
        ("y/[1].bin", [14]),  # a file with this name has precedence over the pattern
        (["~/y/2.bin", "prepared", "~/y/?.bin"], [12, 1, 2, 3, 4, 5, 11, 12]),
        ("**/[23].bin", [12, 13]),
    ):
        assert read(path) == expected, path
    for path in (None, "", [], "nothing.bin", "no/*.bin", "plain.txt", ["*.txt"]):
        assert token_files(path) == [], path
    for other in ("plain.txt", "*.txt", "hub:name", "nothing.bin", "no/*.bin"):
        for path in (["prepared", other], [other, "y/*.bin"]):
            with refuses(other):
                opened(path)
    with refuses("half"):
        opened("half")


SIZE = 7024 + 1026 + 2448  # bytes of the files below


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize(("most", "is_read"), [(SIZE, True), (SIZE - 1, False)])
def test_all_bytes_are_read_of_files_up_to_a_size(
    most, is_read, with_manifest, tmp_path, monkeypatch
):
    """An id outside the vocabulary is found; with a manifest, any other damage too."""
    monkeypatch.setattr(module, "BLOCK", 2000)
    write_shards(tmp_path, {"a.bin": IDS, "b.bin": [5], "val.bin": ids_of(712)})
    if not with_manifest:
        (tmp_path / MANIFEST).unlink()
    assert sorted(opened(tmp_path, most=most)) == ["train", "val"]
    for name, byte in (("a.bin", 1024), ("a.bin", 5024), ("b.bin", -2), ("val.bin", -2)):
        path = tmp_path / name
        whole = path.read_bytes()
        for damage in (b"\xff\xff", b"\x0a\x00"):  # the id 10
            put(path, byte, damage)
            is_bad_id = damage == b"\xff\xff"
            numbers = [byte % len(whole)] if is_bad_id else []
            is_found = is_read and (is_bad_id or with_manifest)
            with refuses(path, *numbers) if is_found else contextlib.nullcontext():
                opened(tmp_path, most=most)
        path.write_bytes(whole)


def test_checksums_of_token_files(tmp_path, monkeypatch):
    """Those of the manifest; without one, those of the beginning and the end of each file."""
    monkeypatch.setattr(module, "BLOCK", 2000)

    def checksums() -> list[str]:
        return [checksum for _, checksum in opened(tmp_path, most=0)["train"].checksums()]

    path = write_shards(tmp_path, {"a.bin": IDS, "b.bin": [5]}) / "a.bin"
    whole = [hashlib.sha256((tmp_path / name).read_bytes()) for name in ("a.bin", "b.bin")]
    assert checksums() == [digest.hexdigest()[:12] for digest in whole]
    (tmp_path / MANIFEST).unlink()
    raw = path.read_bytes()
    assert checksums()[0] == hashlib.sha256(raw[:2000] + raw[-2000:]).hexdigest()[:12]
    assert checksums()[1] == whole[1].hexdigest()[:12]  # a short file


def test_manifest_of_version_1(tmp_path):
    """It has a checksum for each 4 MiB. That of a file with one block is compared."""
    path = write_shards(tmp_path, {"a.bin": IDS}) / "a.bin"
    manifest = json.loads((tmp_path / MANIFEST).read_bytes())
    (entry,) = manifest["shards"]
    put(path, -2, b"\x0a\x00")
    for checksums, is_found in (([entry["sha256"]], True), (["0" * 64, "1" * 64], False)):
        old = {"version": 1, "block_bytes": 2**22, "shards": [entry | {"sha256": checksums}]}
        (tmp_path / MANIFEST).write_text(json.dumps(manifest | old))
        with refuses(path) if is_found else contextlib.nullcontext():
            opened(tmp_path)


def test_opening_three_gigabytes_reads_the_header_only(tmp_path):
    """A sparse file."""
    path = tmp_path / "big.bin"
    count = 3 * 2**29
    path.write_bytes(shard(20240520, 1, count, ids=[]))
    os.truncate(path, 1024 + 2 * count)
    put(path, -4, plain([60000, 17]))
    streams, peak = peak_memory(lambda: opened(path))
    assert peak < 2**22
    stream, byte = streams["train"], 1024 + 2 * (count - 2)
    assert stream.gather(np.array([count // 2, count - 1]), 1).tolist() == [[0], [17]]
    with refuses(path, 60000, byte):
        stream.gather(np.array([count - 9]), 9)
