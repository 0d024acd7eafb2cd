"""tokens/shards.py: token files in llm.c's and nanoGPT's layouts, their manifest, and damaged ones.

Needs no network.
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import SPECIAL_FILES, not_waiting, refused
from helpers.tally import CAMPAIGN
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import shards as module
from tokens.shards import (
    MANIFEST,
    ShardEntry,
    ShardWriter,
    block_checksums,
    documents_file,
    is_shards,
    open_shards,
    write_manifest,
)
from tokens.stream import TokenStream
from tokens.tokenizers import TOKENIZERS

some = settings(max_examples=500 if CAMPAIGN else 25, deadline=None, derandomize=True)

EOT = 50256
BLOCK = 2048  # bytes of a checksum in tests that need several blocks in a small file


@pytest.fixture(autouse=True, scope="module")
def no_fsync():
    """Hundreds of small files are written here, and none has to survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Checksums of 2 KiB instead of 4 MiB."""
    monkeypatch.setattr("tokens.shards.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("tokens.stream.BLOCK_BYTES", BLOCK)


def ids_of(count: int, period: int = 50) -> list[int]:
    """Token ids of documents of `period` tokens."""
    return [EOT if place % period == 0 else (place * 7919) % EOT for place in range(count)]


def write_shards(
    folder: Path, *shards: list[int], tokenizer: str = "gpt2", names: tuple[str, ...] = ()
) -> Path:
    """A folder of shards with their manifest, as scripts/prepare_data.py writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, ids in enumerate(shards):
        name = names[number] if names else f"shard_{number:05d}_00.bin"
        writer = ShardWriter(folder / name, TOKENIZERS[tokenizer] - 1)
        writer.append(np.array(ids, np.uint16))
        entries.append(writer.close())
    write_manifest(folder, entries, tokenizer)
    return folder


def opened(
    path: object, tokenizer: str = "gpt2", verify: str | bool = True
) -> dict[str, TokenStream]:
    return open_shards(path if isinstance(path, list) else str(path), tokenizer, verify)


def ids_in(stream: TokenStream) -> list[int]:
    """All ids of a stream."""
    return stream.gather(np.array([0]), len(stream))[0].tolist() if len(stream) else []


def read(path: object, tokenizer: str = "gpt2", verify: str | bool = True) -> list[int]:
    """All ids of what has training data only."""
    streams = opened(path, tokenizer, verify)
    assert list(streams) == ["train"]
    return ids_in(streams["train"])


@contextlib.contextmanager
def refuses(file: object, *numbers: int):
    """Expects a DataError of this file, whose reason has these numbers (such as the byte)."""
    with refused(DataError, "data.path", file, exit_code=3) as caught:
        yield
    reason = caught.value.reason
    assert set(numbers) <= set(map(int, re.findall(r"-?\d+", reason))), reason


@contextlib.contextmanager
def little_memory():
    """Less memory is allocated than five of the blocks of 4 MiB that are verified."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**22


def put(path: Path, byte: int, content: bytes) -> None:
    """Overwrites the bytes of a file from this one on; negative: from its end."""
    with open(path, "r+b") as file:
        file.seek(byte, 2 if byte < 0 else 0)
        file.write(content)


# ------------------------------------------------------------------------------------- the layout

HAND_MADE = (
    b"\x88\xd8\x34\x01"  # 20240520
    b"\x01\x00\x00\x00"  # version 1
    b"\x07\x00\x00\x00"  # seven tokens
    + bytes(253 * 4)
    + b"\x50\xc4"  # 50256: a document begins
    + b"\x88\x3c\x0b\x00\xe3\x03\x00\x00"  # 15496, 11, 995, 0: "Hello, world!"
    + b"\x50\xc4\x0d\x00"  # 50256, 13
)
HAND_MADE_IDS = [50256, 15496, 11, 995, 0, 50256, 13]
HAND_MADE_DOCUMENTS = b"\x00\x00\x00\x00\x05\x00\x00\x00"


def llm_c_bytes(ids: list[int]) -> bytes:
    """A shard after llm.c's description alone: 256 int32, of which three are used; uint16 ids."""
    return struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + plain(ids)


def plain(ids: list[int]) -> bytes:
    """nanoGPT's layout: ids without a header."""
    return struct.pack(f"<{len(ids)}H", *ids)


def as_modded_nanogpt(path: Path) -> list[int]:
    """A shard read as modded-nanogpt's loader does it."""
    with open(path, "rb") as file:
        header = struct.unpack("<256i", file.read(1024))
        assert header[0] == 20240520
        assert header[1] == 1
        raw = file.read()
    assert len(raw) == 2 * header[2]
    assert set(header[3:]) == {0}
    return list(struct.unpack(f"<{header[2]}H", raw))


def test_shard_made_by_hand(tmp_path):
    """It is read, and the writer makes the same bytes."""
    assert llm_c_bytes(HAND_MADE_IDS) == HAND_MADE
    path = tmp_path / "made.bin"
    writer, ids = ShardWriter(path, EOT), np.array(HAND_MADE_IDS, np.uint16)
    for piece in (ids[:0], ids[:3], ids[3:]):
        writer.append(piece)
    assert not path.exists()  # it has its name when it is complete
    entry = writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made.bin", "made.documents"]
    assert path.read_bytes() == HAND_MADE
    assert documents_file(path).read_bytes() == HAND_MADE_DOCUMENTS
    sums = [hashlib.sha256(raw).hexdigest() for raw in (HAND_MADE, HAND_MADE_DOCUMENTS)]
    assert entry == ShardEntry("made.bin", 7, 2, [sums[0]], sums[1])

    assert read(path) == HAND_MADE_IDS
    stream = opened(path)["train"]
    assert stream.dtype == np.uint16
    assert (stream.vocab_size, stream.end_of_text) == (50257, 50256)
    assert stream.document_starts().tolist() == [0, 5]
    assert not stream.arrays[0].flags.writeable
    with refuses(path, 50256, 1024, 257):  # not a file of the byte tokenizer
        opened(path, "byte")


def test_manifest_format_is_frozen(tmp_path):
    """Later versions must read existing files."""
    folder = write_shards(tmp_path, HAND_MADE_IDS, names=("a.bin",))
    expected = {"format": "clearhead-shards", "version": 1, "tokenizer": "gpt2"}
    expected |= {"vocab_size": 50257, "tokens": 7, "documents": 2, "block_bytes": 4194304}
    entry = {"file": "a.bin", "tokens": 7, "documents": 2}
    entry["sha256"] = [hashlib.sha256(HAND_MADE).hexdigest()]
    entry["documents_sha256"] = hashlib.sha256(HAND_MADE_DOCUMENTS).hexdigest()
    assert json.loads((folder / MANIFEST).read_bytes()) == expected | {"shards": [entry]}


@some
@given(st.lists(st.lists(st.integers(0, 50255) | st.just(EOT), max_size=300), max_size=8))
def test_other_programs_read_what_is_written_and_vice_versa(lists):
    ids = [token for part in lists for token in part]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours.bin"), Path(folder, "theirs.bin")
        writer = ShardWriter(ours, EOT)
        for part in lists:
            writer.append(np.array(part, np.uint16))
        entry = writer.close()
        theirs.write_bytes(llm_c_bytes(ids))
        assert as_modded_nanogpt(ours) == ids
        assert read(theirs) == ids
        assert ours.read_bytes() == theirs.read_bytes()
        starts = [place for place, token in enumerate(ids) if token == EOT]
        documents = documents_file(ours).read_bytes()
        assert documents == struct.pack(f"<{len(starts)}I", *starts)
        assert (entry.tokens, entry.documents) == (len(ids), len(starts))


def test_shard_of_several_blocks(tmp_path):
    """Longer than the writer's buffer and three checksums long. A changed byte is found."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50257, 2**22 + 1000).astype(np.uint16)
    ids[rng.integers(0, len(ids), 500)] = EOT
    path = tmp_path / "a.bin"
    writer, place = ShardWriter(path, EOT), 0
    for size in [2**20 - 1, 1, 1, 2**21 + 17, 0, 2**20]:
        writer.append(ids[place : place + size])
        place += size
    writer.append(ids[place:])
    entry = writer.close()
    write_manifest(tmp_path, [entry], "gpt2")
    raw = llm_c_bytes([])[:8] + struct.pack("<i", len(ids)) + bytes(1012) + ids.tobytes()
    assert path.read_bytes() == raw
    blocks = (raw[:4194304], raw[4194304:8388608], raw[8388608:])
    assert entry.sha256 == [hashlib.sha256(block).hexdigest() for block in blocks]
    assert entry.sha256 == list(block_checksums(path))
    stream = opened(tmp_path)["train"]
    assert np.array_equal(stream.arrays[0], ids)
    assert np.array_equal(stream.document_starts(), np.union1d([0], np.flatnonzero(ids == EOT)))
    for byte, block in ((5_000_000, 1), (len(raw) - 1, 2)):
        put(path, byte, bytes([raw[byte] ^ 1]))
        with refuses(path, block * 4194304, len(blocks[block])):
            opened(tmp_path)
        put(path, byte, raw[byte : byte + 1])


def test_files_are_renamed_after_fsync(tmp_path, monkeypatch):
    """Each file: fsync, rename, fsync of the directory. A shard is renamed after its .documents."""
    done, replace = [], os.replace

    def sync(descriptor):
        found = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(found.st_mode) else found.st_size)

    def rename(old, new):
        done.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_shards(tmp_path, HAND_MADE_IDS, names=("a.bin",))
    size = os.path.getsize(tmp_path / MANIFEST)
    of_shard = [8, "a.documents", "folder", len(HAND_MADE), "a.bin", "folder"]
    assert done == [*of_shard, size, MANIFEST, "folder"]


def test_document_starts_are_read_from_the_documents_file(tmp_path, monkeypatch):
    """Of a stream of several shards, one of which begins within a document, and of its parts."""
    write_shards(tmp_path, [], ids_of(120), [], [1, 2, 3, EOT, 4], [9, 9])
    assert read(tmp_path / "shard_00000_00.bin") == []
    assert read(tmp_path) == [*ids_of(120), 1, 2, 3, EOT, 4, 9, 9]
    stream = opened(tmp_path)["train"]
    first, second = stream.split(110)
    monkeypatch.setattr(np, "flatnonzero", None)  # no search
    assert stream.document_starts().tolist() == [0, 50, 100, 123]
    assert first.document_starts().tolist() == [0, 50, 100]
    assert second.document_starts().tolist() == [0, 13]


# -------------------------------------------------------------------------------- damaged shards


def shard(*header: int, ids: list[int]) -> bytes:
    """A file with these words at the beginning of its header, and zeros."""
    return struct.pack("<256i", *header, *[0] * (256 - len(header))) + plain(ids)


IDS = ids_of(3000)
WHOLE = llm_c_bytes(IDS)  # 7024 bytes


def with_count(count: bytes) -> bytes:
    """The shard with these eight bytes where its count is."""
    return WHOLE[:8] + count.ljust(8, b"\0") + WHOLE[16:]


# What the file is, and numbers that the error must name.
DAMAGED = {
    "Llama 3's tokens": (shard(20240801, 7, 4, ids=[62464, 1, 1, 0, 2, 0, 3, 0]), (20240801,)),
    "weights of llm.c": (
        shard(20240326, 3, 1024, 50257, 12, 12, 768, ids=[16256] * 50),
        (20240326,),
    ),
    "big-endian": (struct.pack(">256i", 20240520, 1, 0, *[0] * 253), ()),
    "empty": (b"", (0,)),
    "version 7": (shard(20240520, 7, 3000, ids=IDS), (7, 4)),
    "version -1": (shard(20240520, -1, 3000, ids=IDS), (-1, 4)),
    "one token is missing": (shard(20240520, 1, 3001, ids=IDS), (7024, 3001, 7026)),
    "count 2^31 - 1": (with_count(struct.pack("<i", 2**31 - 1)), (7024, 2147483647)),
    "count 2^63": (with_count(struct.pack("<Q", 2**63)), (9223372036854775808,)),
    "count -1 in 64 bits": (with_count(b"\xff" * 8), (18446744073709551615,)),
    "count 0": (with_count(b""), (1024, 7024)),
    "one byte too many": (WHOLE + b"\0", (7024, 7025, 3000)),
    "half an id is missing": (WHOLE[:-1], (7023,)),
    "the header only": (WHOLE[:1024], (1024,)),
    "half the header": (WHOLE[:512], (512,)),
    "the magic and half the version": (WHOLE[:6], (6,)),
    "half the magic": (WHOLE[:2], (0,)),
    "plain ids like a header": (plain([1, 2, 3, 4, 5, 6, *[0] * 506, 1, 2, 3]), (131073, 0)),
}


def test_damaged_shard_is_refused(tmp_path, subtests):
    """Alone, and with the manifest of the whole one; even with verify=false."""
    folder = write_shards(tmp_path / "prepared", IDS, names=("a.bin",))
    assert (folder / "a.bin").read_bytes() == WHOLE
    alone = tmp_path / "a.bin"
    for damage, (content, numbers) in DAMAGED.items():
        for path, file in ((alone, alone), (folder, folder / "a.bin")):
            file.write_bytes(content)
            for verify in ("auto", True, False):
                with (
                    subtests.test(damage, path=path, verify=verify),
                    little_memory(),
                    refuses(file, *numbers),
                ):
                    opened(path, verify=verify)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("layout", ["llm.c", "nanoGPT"])
def test_id_beyond_the_vocabulary_is_refused(layout, manifest, tmp_path, small_blocks, subtests):
    """When the file is read at opening; with verify=false, in the window that contains it."""
    first_byte = 1024 if layout == "llm.c" else 0
    for bad, place in ((50257, 0), (65535, 0), (50257, 600), (50257, 1499), (60000, 2999)):
        ids = [*IDS[:place], bad, *IDS[place + 1 :]]
        path = tmp_path / f"{bad}_{place}" / "a.bin"
        write_shards(path.parent, ids, names=("a.bin",))
        if layout == "nanoGPT" or not manifest:
            (path.parent / MANIFEST).unlink()
            path.write_bytes(llm_c_bytes(ids)[1024 - first_byte :])
        numbers = bad, first_byte + 2 * place, 50257
        with subtests.test(bad=bad, place=place):
            with refuses(path, *numbers):
                opened(path)
            if layout == "nanoGPT" and place < 512:  # it may be a damaged header
                with refuses(path, *numbers):
                    opened(path, verify=False)
                continue
            stream = opened(path, verify=False)["train"]
            for start in {max(0, place - 9), place}:
                with refuses(path, *numbers):
                    stream.gather(np.array([start]), 10)
            good = [start for start in (0, 1000, 2900) if not start <= place < start + 100]
            windows = stream.gather(np.array(good), 100).tolist()
            assert windows == [IDS[start : start + 100] for start in good]


def test_changed_byte_is_refused_with_its_block(tmp_path, small_blocks, subtests):
    folder = write_shards(tmp_path, ids_of(70), IDS)
    path = folder / "shard_00001_00.bin"
    assert read(folder) == ids_of(70) + IDS
    # 900 is in the header, where nothing else is checked.
    for byte, block in ((900, 0), (1024, 0), (2047, 0), (2048, 1), (5000, 2), (6144, 3), (7023, 3)):
        content = bytearray(WHOLE)
        content[byte] ^= 1
        path.write_bytes(content)
        size = min(BLOCK, 7024 - block * BLOCK)
        for given_path in (folder, path):  # the manifest is found for a single file too
            with subtests.test(byte=byte, path=given_path), refuses(path, size, block * BLOCK):
                opened(given_path)
        assert len(opened(folder, verify=False)["train"]) == 3070


def make_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


NOT_FILES = SPECIAL_FILES | {"missing": Path.unlink, "directory": make_directory}


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_not_a_regular_file_is_refused_without_waiting(kind, tmp_path):
    """In the place of each file of a preparation. Reading some of them would not end."""
    replace = NOT_FILES[kind]
    for ids in ([1], [EOT, 1]):  # without a document, and with one
        folder = write_shards(tmp_path / f"{len(ids)}", ids)
        file = folder / "shard_00000_00.bin"
        stream = opened(folder)["train"]
        replace(documents_file(file))
        with not_waiting(), refuses(documents_file(file)):
            stream.document_starts()
    replace(file)
    with not_waiting(), refuses(file):
        opened(folder)


@pytest.mark.parametrize("kind", [*SPECIAL_FILES, "directory"])
def test_manifest_or_plan_that_is_not_a_regular_file_is_refused(kind, tmp_path):
    folder = write_shards(tmp_path / "manifest", [1])
    NOT_FILES[kind](folder / MANIFEST)
    for path in (folder, folder / "shard_00000_00.bin"):
        with not_waiting(), refuses(folder / MANIFEST):
            opened(path)
    plan = tmp_path / "unfinished" / "preparing" / "plan.json"
    plan.parent.mkdir(parents=True)
    (tmp_path / "unfinished" / "a.bin").write_bytes(llm_c_bytes([1]))
    NOT_FILES[kind](plan)
    with not_waiting(), refuses(tmp_path / "unfinished"):
        opened(tmp_path / "unfinished")


def test_damaged_documents_file_is_refused(tmp_path, subtests):
    """When it is needed: training across documents does not need it."""
    write_shards(tmp_path, IDS)
    path = tmp_path / "shard_00000_00.documents"
    raw = path.read_bytes()
    for damage, content, numbers in (
        ("empty", b"", (0, 240)),
        ("a byte missing", raw[:-1], (239, 240)),
        ("a document missing", raw[:-4], (236, 240)),
        ("a document too many", raw + b"\0" * 4, (244, 240)),
        ("another order", raw[:-4] + raw[:4], (240, 0)),
        ("beyond the shard", b"\xff" * 240, (240, 0)),
        ("large", b"", (2**26, 240)),
    ):
        path.write_bytes(content)
        if damage == "large":
            os.truncate(path, 2**26)
        stream = opened(tmp_path)["train"]
        for part in (stream, stream.split(100)[1]):
            with subtests.test(damage), little_memory(), refuses(path, *numbers):
                part.document_starts()
    assert ids_in(stream) == IDS


# ------------------------------------------------------------------------------------ the manifest

NAMES = (
    *("../shard_00001_00.bin", "outside/shard_00001_00.bin", "./shard_00001_00.bin"),
    *("/etc/passwd", "/tmp/shard.bin", "..", ".", "", "..bin", ".bin", ".hidden.bin"),
    *("..\\shard.bin", "C:shard.bin", "a b.bin", "a.bin\n", "a\nb.bin", "a\0.bin", "é.bin"),
    *("shard_00001_00.documents", "manifest.json", "*.bin", "~.bin", "-.bin"),
    "a" * 300 + ".bin",
)
MISSING = object()
# Values of the manifest, and of its second shard, that are refused.
BAD_VALUES = {
    "format": (MISSING, "webdataset", ["clearhead-shards"]),
    "version": (MISSING, 2, "1\n2"),
    "block_bytes": (MISSING, 2**20, "1\n2"),
    "tokenizer": (MISSING, "words", ["gpt2"], {}),
    "shards": (MISSING, {"0": {}}, ["shard_00000_00.bin"], []),
}
BAD_SHARD_VALUES = {
    "file": (MISSING, 5, None, *NAMES, "shard_00000_00.bin"),  # the last one is listed already
    "tokens": (MISSING, "70", 70.0, True, None),
    "documents": (MISSING, "2", 2.0, False),
    "sha256": (MISSING, "00", None, [5], [["00"]]),
    "documents_sha256": (MISSING, None, []),
}
NOT_OBJECTS = (b"", b"{", b"\xff\xfe\xff", b"9" * 5000, b"[" * 100_000, b"[]", b"null", b"{}")


def damaged_manifests(sound: dict):
    """(what is wrong, the content of the file)"""
    for content in NOT_OBJECTS:
        yield content[:9], content
    rows = [(None, key, value) for key, values in BAD_VALUES.items() for value in values]
    rows += [(1, key, value) for key, values in BAD_SHARD_VALUES.items() for value in values]
    for number, key, value in rows:
        changed = copy.deepcopy(sound)
        place = changed if number is None else changed["shards"][number]
        place[key] = value
        if value is MISSING:
            del place[key]
        yield f"{key}: {'missing' if value is MISSING else value!r}", json.dumps(changed).encode()


def test_damaged_manifest_is_refused(tmp_path, subtests):
    folder = write_shards(tmp_path / "folder", IDS, ids_of(70))
    for name in (tmp_path, folder / "outside"):  # where a name leads that leaves the directory
        name.mkdir(exist_ok=True)
        (name / "shard_00001_00.bin").write_bytes((folder / "shard_00001_00.bin").read_bytes())
    path = folder / MANIFEST
    for damage, content in damaged_manifests(json.loads(path.read_bytes())):
        path.write_bytes(content)
        with subtests.test(damage):
            for verify in (True, False):
                with refuses(path):
                    opened(folder, verify=verify)
            with refuses(path):  # nor is it taken for a folder of texts
                is_shards(str(folder))


def test_manifest_that_contradicts_its_shards_is_refused(tmp_path, subtests):
    write_shards(tmp_path, IDS, ids_of(70))
    sound = json.loads((tmp_path / MANIFEST).read_bytes())
    path = tmp_path / "shard_00001_00.bin"

    def write(**changes) -> dict:
        changed = copy.deepcopy(sound)
        changed["shards"][1] |= changes
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        return changed

    checksums = sound["shards"][1]["sha256"]
    rows = [({"tokens": count}, (70, count)) for count in (69, 71, 0, -70, 2**64)]
    rows += [({"sha256": checksums * number}, (number,)) for number in (0, 2)]
    for changes, numbers in rows:
        write(**changes)
        for verify in (True, False):
            with subtests.test(**changes, verify=verify), refuses(path, *numbers):
                opened(tmp_path, verify=verify)
    for count in (1, 0, -2, 2**31):
        changed = write(documents=count)
        with subtests.test(documents=count):
            with refuses(tmp_path / MANIFEST, 62, 60 + count):  # the sum
                opened(tmp_path, verify=False)
            changed["documents"] += count - 2
            (tmp_path / MANIFEST).write_text(json.dumps(changed))
            stream = opened(tmp_path)["train"]
            with little_memory(), refuses(documents_file(path), 8, 4 * count):
                stream.document_starts()


def test_another_tokenizer_is_refused(tmp_path):
    """By the manifest, though every id is in both vocabularies."""
    for made, wanted in (("gpt2", "byte"), ("byte", "gpt2")):
        folder = write_shards(tmp_path / made, [1, 2, 3], tokenizer=made, names=("a.bin",))
        for path in (folder, folder / "a.bin"):
            assert read(path, made) == [1, 2, 3]
            with refused(DataError, "data.tokenizer", wanted, 3) as caught:
                opened(path, wanted, verify=False)
            assert f"data.tokenizer={made}" in caught.value.hint


# ---------------------------------------------------------------------------- nanoGPT's plain ids


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
def test_plain_ids_are_read(tokenizer, tmp_path):
    """nanoGPT's train.bin and val.bin, as its prepare.py writes them, of any length."""
    highest = TOKENIZERS[tokenizer] - 1
    train, val = [highest, *range(1, 200), highest, highest] * 5, [5, highest, 6]
    (tmp_path / "train.bin").write_bytes(plain(train))
    (tmp_path / "val.bin").write_bytes(plain(val))
    for verify in ("auto", True, False):
        streams = opened(tmp_path, tokenizer, verify)
        found = {name: ids_in(stream) for name, stream in streams.items()}
        assert found == {"train": train, "val": val}
    assert streams["train"].document_starts()[:4].tolist() == [0, 200, 201, 202]
    assert streams["val"].document_starts().tolist() == [0, 1]
    assert streams["val"].end_of_text == highest
    for length in (1, 2, 511, 512, 513):
        (tmp_path / "some.bin").write_bytes(plain(train[:length]))
        assert read(tmp_path / "some.bin", tokenizer) == train[:length]
    (tmp_path / "some.bin").write_bytes(plain(train)[:-1])
    with refuses(tmp_path / "some.bin", 2 * len(train) - 1):
        opened(tmp_path / "some.bin", tokenizer)


def test_plain_ids_that_resemble_a_header(tmp_path):
    """A header is known by the zeros that follow its three words."""
    path = tmp_path / "train.bin"
    for place, length in ((6, 515), (511, 515), (0, 511)):  # the last one is shorter than a header
        ids = [1, 2, 3, 4, 5, 6, *[0] * 509][:length]
        ids[place] = 1
        path.write_bytes(plain(ids))
        assert read(path) == ids
    write_shards(tmp_path, ids_of(600), names=("train.bin",))
    path.write_bytes(plain(ids_of(1112)))  # with a manifest every file needs a header
    with refuses(path, struct.unpack("<i", plain(ids_of(2)))[0]):
        opened(tmp_path, verify=False)


def test_neither_shard_nor_plain_ids(tmp_path, subtests):
    """The first 512 ids are always checked, others with verify=true only."""
    path = tmp_path / "a.bin"
    for content, bad, byte in (
        (b"This is a text, and not at all of token ids.", 0x6854, 0),
        (plain([5, 6, 300, 7]), 300, 4),
        (plain([*[5] * 511, 257]), 257, 1022),
    ):
        path.write_bytes(content)
        magic = struct.unpack("<i", content[:4])[0]
        with subtests.test(content[:9]), refuses(path, magic, bad, byte, 257):
            opened(path, "byte", verify=False)
    path.write_bytes(plain([*[5] * 511, 256, 257]))
    assert len(opened(path, "byte", verify=False)["train"]) == 513
    with refuses(path, 257, 1024):
        opened(path, "byte")


# -------------------------------------------------------------------------- what data.path can name


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Token files and texts in the working directory, which is the home directory too."""
    write_shards(tmp_path / "prepared", [1, 2], [3], [4, 5], names=("c.bin", "a.bin", "b.bin"))
    others = {"y/2": 12, "y/1": 11, "y/10": 10, "z/one": 7, "y/deep/3": 13, "y/[1]": 14}
    for name, token in (others | {"prepared/left_over": 99}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.bin").write_bytes(llm_c_bytes([token]))
    (tmp_path / "texts").mkdir()
    for name in ("prepared/notes.txt", "y/log.txt", "plain.txt", "texts/a.txt"):
        (tmp_path / name).write_text("a text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_data_path_names_token_files(tree, subtests):
    for path, expected in (
        ("prepared", [1, 2, 3, 4, 5]),  # the manifest's order, only what it lists
        ("prepared/", [1, 2, 3, 4, 5]),
        ("prepared/a.bin", [3]),
        ("prepared/left_over.bin", [99]),
        ("prepared/[abc].bin", [3, 4, 5, 1, 2]),
        ("y", [11, 10, 12, 14]),  # sorted by name, without subdirectories
        ("y/*.bin", [11, 10, 12, 14]),
        ("y/?.bin", [11, 12]),
        ("y/*", [11, 10, 12, 14]),
        ("*/1*.bin", [11, 10]),
        ("y/[1].bin", [14]),  # a file of that name takes precedence over a pattern
        ("~/z", [7]),
        ("~/z/one.bin", [7]),
        (["y/2.bin", "prepared", "~/z/*.bin"], [12, 1, 2, 3, 4, 5, 7]),
        (["z/one.bin", "z/one.bin"], [7, 7]),
        ("**/3.bin", [13]),
        ("**/[23].bin", [12, 13]),
    ):
        with subtests.test(path=path):
            assert is_shards(path)
            assert read(path) == expected
    for name in ("link", "another"):  # a link to a parent is not followed
        (tree / "y" / name).symlink_to(tree)
    with not_waiting():
        assert sorted(read("**/[123].bin")) == [11, 12, 13]
        assert sorted(read("y/**/[123].bin")) == [11, 12, 13]


def test_folder_that_cannot_be_listed_is_refused(tree, monkeypatch, subtests):
    def deny(folder="."):
        if os.path.abspath(folder) == str(tree / "y"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", deny)  # root may list everything
    for path in ("y", "y/*.bin", "*/*.bin", "**/3.bin"):
        with subtests.test(path):
            with refuses("y"):
                opened(path)
            with refuses("y"):
                is_shards(path)


def test_data_path_without_token_files(tree, subtests):
    texts = ["plain.txt", "texts", "*.txt"]
    for path in (None, "", [], "nothing.bin", "no/*.bin", *texts, texts):
        assert not is_shards(path), path
    for text in (*texts, "hub:name"):  # texts and token files do not mix
        for shards in ("prepared", "y/1.bin", "y/*.bin"):
            for path in ([text, shards], [shards, text]):
                with subtests.test(path=path), refuses(text):
                    assert is_shards(path)
                    opened(path)
    for missing in ("nothing.bin", "no/*.bin", "nowhere"):
        with subtests.test(missing), refused(DataError, "data.path", missing, 3):
            opened(["y/1.bin", missing])


def test_files_named_val_are_validation_data(tmp_path, subtests):
    for number, (names, train, val) in enumerate(
        (
            (["fineweb_train_000001.bin", "fineweb_val_000000.bin"], [0], [1]),
            (["train.bin", "val.bin"], [0], [1]),
            (["a.bin", "b.val.bin", "c-val-2.bin", "val_3.bin"], [0], [1, 2, 3]),
            (["fineweb_val_000000.bin", "val.bin"], [0, 1], None),  # nothing else: training data
            (["val.bin"], [0], None),
            (["arrival.bin", "b.bin", "interval_1.bin", "valley.bin"], range(4), None),
        )
    ):
        ids = [[n, 7] for n in range(len(names))]
        folder = write_shards(tmp_path / f"val{number}", *ids, names=tuple(names))
        expected = {"train": train} | ({"val": val} if val else {})
        expected = {name: [t for n in of for t in (n, 7)] for name, of in expected.items()}
        for manifest in (True, False):
            if not manifest:
                (folder / MANIFEST).unlink()
            for path in (folder, [str(folder / name) for name in names]):
                with subtests.test(names=names, manifest=manifest):
                    streams = opened(path)
                    assert {name: ids_in(s) for name, s in streams.items()} == expected


def test_bad_id_in_a_window_is_reported_with_its_file(tmp_path):
    for name, ids in {"a.bin": [1, 2], "b_val.bin": [3, 60000], "c.bin": [4, 60001]}.items():
        (tmp_path / name).write_bytes(llm_c_bytes(ids))
    streams = opened(tmp_path, verify=False)
    for name, file, bad in (("train", "c.bin", 60001), ("val", "b_val.bin", 60000)):
        with refuses(tmp_path / file, bad, 1026):
            streams[name].gather(np.array([0]), len(streams[name]))


# ------------------------------------------------------------------------------------- data.verify

SIZES = {"a.bin": 7024, "b.bin": 1026, "val.bin": 2448}
EVERY_BLOCK = [("a.bin", n) for n in range(4)] + [("b.bin", 0), ("val.bin", 0), ("val.bin", 1)]
OUTER_BLOCKS = [block for block in EVERY_BLOCK if block not in (("a.bin", 1), ("a.bin", 2))]


@pytest.mark.parametrize(
    ("verify", "most", "expected"),
    [
        (True, 0, EVERY_BLOCK),
        ("auto", sum(SIZES.values()), EVERY_BLOCK),
        ("auto", sum(SIZES.values()) - 1, OUTER_BLOCKS),
        (False, 2**30, []),
    ],
)
def test_blocks_that_verify_reads(verify, most, expected, tmp_path, monkeypatch, small_blocks):
    """Damage is found in these blocks only, and without a manifest they alone have checksums."""
    monkeypatch.setattr(module, "VERIFY_AT_MOST", most)
    with_manifest = write_shards(tmp_path / "one", IDS, [5], ids_of(712), names=tuple(SIZES))
    without = write_shards(tmp_path / "two", IDS, [5], ids_of(712), names=tuple(SIZES))
    (without / MANIFEST).unlink()
    for folder in (with_manifest, without):
        known = EVERY_BLOCK if folder == with_manifest else expected
        checksums = []
        for name, size in SIZES.items():
            raw = (folder / name).read_bytes()
            assert len(raw) == size
            blocks = [raw[first : first + BLOCK] for first in range(0, size, BLOCK)]
            sums = [hashlib.sha256(block).hexdigest()[:12] for block in blocks]
            checksums.append((name, [x if (name, n) in known else "" for n, x in enumerate(sums)]))
        streams = opened(folder, verify=verify)
        assert streams["train"].checksums() + streams["val"].checksums() == checksums
        for name, block in EVERY_BLOCK:
            path, byte = folder / name, max(1024, block * BLOCK)
            whole = path.read_bytes()
            put(path, byte, b"\xff\xff")
            found = contextlib.nullcontext()
            if (name, block) in expected:  # with a manifest by the checksum, else by the id
                found = refuses(path, block * BLOCK if folder == with_manifest else byte)
            with found:
                opened(folder, verify=verify)
            path.write_bytes(whole)


@pytest.mark.parametrize("layout", ["llm.c", "nanoGPT"])
def test_opening_three_gigabytes_reads_the_header_only(layout, tmp_path):
    """A sparse file."""
    path = tmp_path / "big.bin"
    count = 3 * 2**29
    first = 1024 if layout == "llm.c" else 0
    path.write_bytes(shard(20240520, 1, count, ids=[]) if first else plain([*range(1, 513)]))
    os.truncate(path, first + 2 * count)
    put(path, -4, plain([60000, 17]))
    byte = first + 2 * (count - 2)
    with little_memory():
        stream = opened(path, verify=False)["train"]
        assert len(stream) == count
        assert stream.gather(np.array([count // 2, count - 1]), 1).tolist() == [[0], [17]]
        ends = stream.split(count - 10)
        assert [len(part) for part in ends] == [count - 10, 10]
        with refuses(path, 60000, byte):
            ends[1].gather(np.array([7]), 3)
    ((_, checksums),) = stream.checksums()
    assert set(checksums) == {""}  # nothing was read
    assert module.VERIFY_AT_MOST == 2**30  # so its first and last block are read
    with little_memory(), refuses(path, 60000, byte):
        opened(path, verify="auto")
