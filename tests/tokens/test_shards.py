"""tokens/shards.py: token files against llm.c's layout, and every damage to them.

Needs no network.
"""

import contextlib
import copy
import hashlib
import json
import os
import stat
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.refusals import SPECIAL_FILES, check_refusal, not_waiting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable import write_whole
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

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

EOT = 50256
BLOCK = 2048  # bytes of a checksum, where a test wants several in a small file


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Hundreds of small files are written here, and none has to outlive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Checksums of 2 KiB instead of 4 MiB."""
    monkeypatch.setattr("tokens.shards.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("tokens.stream.BLOCK_BYTES", BLOCK)


def ids_of(count: int, period: int = 50) -> list[int]:
    """Ids of some documents: the first of every `period` begins one."""
    return [EOT if place % period == 0 else (place * 7919) % EOT for place in range(count)]


def prepare(
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


def ids_in(stream: TokenStream) -> list[int]:
    """All of a stream, as training reads it."""
    return stream.gather(np.array([0]), len(stream))[0].tolist() if len(stream) else []


def read(path: object, tokenizer: str = "gpt2", verify: str | bool = True) -> list[int]:
    """All of what there is to train on."""
    streams = open_shards(path if isinstance(path, list) else str(path), tokenizer, verify)
    assert list(streams) == ["train"]
    return ids_in(streams["train"])


@contextlib.contextmanager
def little_memory():
    """Nothing in here allocates more than a few of the blocks of 4 MiB that are verified."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * 2**22


def refusal(path: object, tokenizer: str = "gpt2", verify: str | bool = True) -> DataError:
    """The error of opening this; it has cost no memory to speak of."""
    with little_memory(), pytest.raises(DataError) as caught:
        open_shards(path if isinstance(path, list) else str(path), tokenizer, verify)
    return caught.value


# ------------------------------------------------------------------------------- the layout itself

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
    return struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253) + struct.pack(
        f"<{len(ids)}H", *ids
    )


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


def test_a_shard_made_by_hand_is_read(tmp_path):
    assert llm_c_bytes(HAND_MADE_IDS) == HAND_MADE
    path = tmp_path / "made.bin"
    path.write_bytes(HAND_MADE)
    assert read(path) == HAND_MADE_IDS
    stream = open_shards(str(path), "gpt2")["train"]
    assert stream.dtype == np.uint16
    assert (stream.vocab_size, stream.end_of_text) == (50257, 50256)
    assert stream.document_starts().tolist() == [0, 5]
    assert not stream.arrays[0].flags.writeable
    assert path.read_bytes() == HAND_MADE


@pytest.mark.parametrize("pieces", [[7], [0, 3, 0, 4], [1] * 7])
def test_the_writer_writes_just_that_shard(pieces, tmp_path):
    writer = ShardWriter(tmp_path / "made.bin", EOT)
    ids = np.array(HAND_MADE_IDS, np.uint16)
    for end, size in zip(np.cumsum(pieces), pieces, strict=True):
        writer.append(ids[end - size : end])
    assert not (tmp_path / "made.bin").exists()  # whole or not at all
    entry = writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.bin", "made.documents"]
    assert (tmp_path / "made.bin").read_bytes() == HAND_MADE
    assert (tmp_path / "made.documents").read_bytes() == HAND_MADE_DOCUMENTS
    sums = [hashlib.sha256(raw).hexdigest() for raw in (HAND_MADE, HAND_MADE_DOCUMENTS)]
    assert entry == ShardEntry("made.bin", 7, 2, [sums[0]], sums[1])


def test_the_manifest_word_for_word(tmp_path):
    """Frozen: files that exist already are to be read in time to come."""
    folder = prepare(tmp_path, HAND_MADE_IDS, [5], names=("a.bin", "b.bin"))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    expected = {
        "format": "clearhead-shards",
        "version": 1,
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "tokens": 8,
        "documents": 2,
        "block_bytes": 4194304,
        "shards": [
            {
                "file": f"{name}.bin",
                "tokens": tokens,
                "documents": documents,
                "sha256": [sums[f"{name}.bin"]],
                "documents_sha256": sums[f"{name}.documents"],
            }
            for name, tokens, documents in (("a", 7, 2), ("b", 1, 0))
        ],
    }
    assert json.loads((folder / MANIFEST).read_bytes()) == expected


tokens = st.integers(0, 50255) | st.just(EOT)
id_lists = st.lists(st.lists(tokens, max_size=300), max_size=8)


@many
@given(id_lists)
def test_others_read_what_is_written_and_the_other_way_about(lists):
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


def test_a_shard_of_several_blocks_comes_in_pieces_of_any_size(tmp_path):
    """Longer than what the writer keeps back, and three checksums long."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50257, 2**22 + 1000).astype(np.uint16)
    ids[rng.integers(0, len(ids), 500)] = EOT
    writer, place = ShardWriter(tmp_path / "a.bin", EOT), 0
    for size in [2**20 - 1, 1, 1, 2**21 + 17, 0, 2**20]:
        writer.append(ids[place : place + size])
        place += size
    writer.append(ids[place:])
    entry = writer.close()
    write_manifest(tmp_path, [entry], "gpt2")
    raw = llm_c_bytes([])[:8] + struct.pack("<i", len(ids)) + bytes(1012) + ids.tobytes()
    assert (tmp_path / "a.bin").read_bytes() == raw
    blocks = (raw[:4194304], raw[4194304:8388608], raw[8388608:])
    assert entry.sha256 == [hashlib.sha256(block).hexdigest() for block in blocks]
    assert entry.sha256 == list(block_checksums(tmp_path / "a.bin"))
    stream = open_shards(str(tmp_path), "gpt2", True)["train"]
    assert np.array_equal(stream.arrays[0], ids)
    assert np.array_equal(stream.document_starts(), np.union1d([0], np.flatnonzero(ids == EOT)))


def test_a_shard_that_is_given_up_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path / "a.bin", EOT)
    writer.append(np.zeros(2**20 + 1, np.uint16))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """And a shard its name last of all."""
    done, replace = [], os.replace

    def sync(descriptor):
        found = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(found.st_mode) else found.st_size)

    def rename(old, new):
        done.append(Path(new).name)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    prepare(tmp_path, HAND_MADE_IDS, names=("a.bin",))
    size = os.path.getsize(tmp_path / MANIFEST)
    of_shard = [8, "a.documents", "folder", len(HAND_MADE), "a.bin", "folder"]
    assert done == [*of_shard, size, MANIFEST, "folder"]


def test_write_whole_replaces_a_file(tmp_path):
    for content in (b"long content", b"short", b""):
        write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_shard_of_no_tokens(tmp_path):
    prepare(tmp_path, [], ids_of(9), [])
    assert read(tmp_path) == ids_of(9)
    stream = open_shards(str(tmp_path / "shard_00000_00.bin"), "gpt2")["train"]
    assert len(stream) == 0


def test_documents_are_known_from_the_file_beside_the_shard(tmp_path, monkeypatch):
    """In a stream of several shards, of which one begins within a document, and in its parts."""
    shards = ids_of(120), [1, 2, 3, EOT, 4], [9, 9]
    prepare(tmp_path, *shards)
    ids = [token for part in shards for token in part]
    expected = [place for place, token in enumerate(ids) if token == EOT]
    stream = open_shards(str(tmp_path), "gpt2")["train"]
    first, second = stream.split(110)
    monkeypatch.setattr(np, "flatnonzero", None)  # no search is needed
    assert expected == [0, 50, 100, 123]
    assert stream.document_starts().tolist() == expected
    assert first.document_starts().tolist() == [0, 50, 100]
    assert second.document_starts().tolist() == [0, 13]


# ----------------------------------------------------------------------------- damage to a shard


def shard(*header: int, ids: list[int], kind: str = "H", rest: int = 0) -> bytes:
    """A file with this in its header and the rest of its words `rest`."""
    words = struct.pack("<256i", *header, *[rest] * (256 - len(header)))
    return words + struct.pack(f"<{len(ids)}{kind}", *ids)


IDS = ids_of(3000)
WHOLE = llm_c_bytes(IDS)  # 7024 bytes
ANEW = "prepare or copy it anew"
OTHER_LAYOUT = "give token files of llm.c's or nanoGPT's layout"


def counting(count: bytes) -> bytes:
    """The shard with these eight bytes where its count is."""
    return WHOLE[:8] + count.ljust(8, b"\0") + WHOLE[16:]


DAMAGED = {
    "wrong magic": (
        shard(20240521, 1, 3000, ids=IDS),
        "wrong magic 20240521 at byte 0, where 20240520 is to be",
        OTHER_LAYOUT,
    ),
    "Llama 3's": (
        shard(20240801, 7, 4, ids=[128000, 1, 2, 3], kind="I"),
        "wrong magic 20240801 at byte 0",
        OTHER_LAYOUT,
    ),
    "model weights of llm.c": (
        shard(20240326, 3, 1024, 50257, 12, 12, 768, ids=[16256] * 50),
        "wrong magic 20240326 at byte 0",
        OTHER_LAYOUT,
    ),
    "big-endian": (struct.pack(">256i", 20240520, 1, 0, *[0] * 253), "wrong magic", OTHER_LAYOUT),
    "zeros": (bytes(7024), "wrong magic 0 at byte 0", OTHER_LAYOUT),
    "empty": (b"", "truncated at byte 0", "prepare or copy it anew"),
    "version 7": (
        shard(20240520, 7, 3000, ids=IDS),
        "version 7 at byte 4, and this reads version 1",
        "get the GPT-2 files, of uint16 ids",
    ),
    "version 0": (shard(20240520, 0, 3000, ids=IDS), "version 0 at byte 4", "GPT-2 files"),
    "version -1": (shard(20240520, -1, 3000, ids=IDS), "version -1 at byte 4", "GPT-2 files"),
    "one token is lacking": (
        shard(20240520, 1, 3001, ids=IDS),
        "truncated at byte 7024: the header (byte 8) counts 3001 tokens, which end at byte 7026",
        ANEW,
    ),
    "count 2^31 - 1": (
        counting(struct.pack("<i", 2**31 - 1)),
        "truncated at byte 7024: the header (byte 8) counts 2147483647 tokens",
        ANEW,
    ),
    "count -1": (counting(struct.pack("<i", -1)), "truncated at byte 7024: the header (b", ANEW),
    "count -2^31": (counting(struct.pack("<i", -(2**31))), "(byte 8) counts 2147483648 t", ANEW),
    "count 2^63": (counting(struct.pack("<Q", 2**63)), "counts 9223372036854775808 token", ANEW),
    "count -1 in 64 bits": (counting(b"\xff" * 8), "counts 18446744073709551615 tokens", ANEW),
    "count 0": (counting(b""), "trailing bytes from byte 1024 to 7024: the header (byte 8", ANEW),
    "a trailing byte": (
        WHOLE + b"\0",
        "trailing bytes from byte 7024 to 7025: the header (byte 8) counts 3000 tokens",
        ANEW,
    ),
    "another token": (WHOLE + b"\1\0", "trailing bytes from byte 7024 to 7026", ANEW),
    "the file twice": (WHOLE * 2, "trailing bytes from byte 7024 to 14048", ANEW),
    "half an id is lacking": (WHOLE[:-1], "truncated at byte 7023", ANEW),
}


@pytest.mark.parametrize("verify", ["auto", True, False])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_shard_is_refused(damage, verify, tmp_path):
    """Alone, and with the manifest of the sound one, which is not needed to see it."""
    content, cause, fix = DAMAGED[damage]
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    check_refusal(refusal(path, verify=verify), f"data.path={path}", cause, fix)

    folder = prepare(tmp_path / "prepared", IDS, names=("a.bin",))
    assert (folder / "a.bin").read_bytes() == WHOLE
    (folder / "a.bin").write_bytes(content)
    error = refusal(folder, verify=verify)
    check_refusal(error, f"data.path={folder / 'a.bin'}", cause, fix)


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
def test_a_shard_truncated_anywhere_is_refused(tokenizer, tmp_path):
    ids = [min(token, 255) for token in ids_of(40)]
    folder = prepare(tmp_path / "prepared", ids, tokenizer=tokenizer, names=("a.bin",))
    alone = tmp_path / "a.bin"
    alone.write_bytes((folder / "a.bin").read_bytes())
    assert read(folder, tokenizer) == read(alone, tokenizer) == ids
    with little_memory():
        for length in reversed(range(1024 + 80)):
            for path in (folder / "a.bin", alone):
                os.truncate(path, length)
                with pytest.raises(DataError) as caught:
                    open_shards(str(path), tokenizer, False)
                # With less than the magic and the version the cause can be another.
                cause = f"truncated at byte {length}: the header" if length > 4 else "at byte"
                fix = "anew" if length > 4 else ""
                check_refusal(caught.value, f"data.path={path}", cause, fix)


BEYOND = [(50257, 0), (65535, 0), (50257, 1499), (60000, 2999)]  # in blocks 0, 1 and 3 of four


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("layout", ["llm.c", "nanoGPT"])
@pytest.mark.parametrize(("bad", "place"), [*BEYOND, (50257, 600)])
def test_an_id_beyond_the_vocabulary_is_refused(
    bad, place, layout, manifest, tmp_path, small_blocks
):
    """When the file is read at the opening; without that, in the window that has it."""
    ids = [*IDS[:place], bad, *IDS[place + 1 :]]
    path = tmp_path / "a.bin"
    byte = (1024 if layout == "llm.c" else 0) + 2 * place
    if layout == "llm.c" and manifest:
        prepare(tmp_path, ids, names=("a.bin",))
    else:
        path.write_bytes(llm_c_bytes(ids)[1024 if layout == "nanoGPT" else 0 :])
    cause = f"id {bad} at byte {byte} is beyond the vocabulary of 50257"
    error = refusal(path)
    if layout == "nanoGPT" and place < 512:  # nothing tells that there is no header to be there
        magic = struct.unpack("<i", path.read_bytes()[:4])[0]
        cause = f"wrong magic {magic} at byte 0, where 20240520 is to be, and no plain ids"
        check_refusal(error, f"data.path={path}", cause, OTHER_LAYOUT)
        check_refusal(error, f"data.path={path}", f"(id {bad} at byte {byte} is b", OTHER_LAYOUT)
        return
    check_refusal(error, f"data.path={path}", cause, "use its own tokenizer")
    stream = open_shards(str(path), "gpt2", False)["train"]
    for start in {max(0, place - 9), place}:
        with pytest.raises(DataError) as caught:
            stream.gather(np.array([start]), 10)
        check_refusal(caught.value, f"data.path={path}", cause, "use its own tokenizer")
    sound = [start for start in (0, 1000, 2900) if not start <= place < start + 100]
    assert stream.gather(np.array(sound), 100).tolist() == [IDS[s : s + 100] for s in sound]


def test_shards_of_gpt2_are_refused_by_the_byte_tokenizer(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(HAND_MADE)
    cause = "id 50256 at byte 1024 is beyond the vocabulary of 257"
    check_refusal(refusal(path, "byte"), f"data.path={path}", cause, "use its own tokenizer")


@pytest.mark.parametrize(
    ("byte", "block"),
    [
        (900, 0),  # in the header, where nobody else looks
        (1024, 0),
        (2047, 0),
        (2048, 1),
        (5000, 2),
        (6144, 3),
        (7023, 3),
    ],
)
def test_a_changed_byte_is_refused_with_its_block(byte, block, tmp_path, small_blocks):
    folder = prepare(tmp_path, ids_of(70), IDS)
    path = folder / "shard_00001_00.bin"
    assert read(folder) == ids_of(70) + IDS
    content = bytearray(WHOLE)
    content[byte] ^= 1
    path.write_bytes(content)
    size = min(BLOCK, 7024 - block * BLOCK)
    cause = f"checksum mismatch in the {size} bytes from byte {block * BLOCK} on (manifest.json)"
    check_refusal(refusal(folder), f"data.path={path}", cause, ANEW)
    check_refusal(refusal(path), f"data.path={path}", cause, ANEW)  # the file alone is known too
    assert len(open_shards(str(folder), "gpt2", False)["train"]) == 3070


def test_a_changed_byte_in_blocks_of_the_real_size(tmp_path):
    path = prepare(tmp_path, [1] * (2**22)) / "shard_00000_00.bin"
    with open(path, "r+b") as file:
        file.seek(2**22 + 1)
        file.write(b"\x07")
    cause = "checksum mismatch in the 4194304 bytes from byte 4194304 on"
    check_refusal(refusal(tmp_path), f"data.path={path}", cause, ANEW)
    with open(path, "r+b") as file:
        file.seek(2**22 + 1)
        file.write(b"\x00")
        file.seek(-1, 2)
        file.write(b"\x07")
    cause = "checksum mismatch in the 1024 bytes from byte 8388608 on"
    check_refusal(refusal(tmp_path), f"data.path={path}", cause, ANEW)


@some
@given(st.integers(0, len(HAND_MADE) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(place, mask):
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name), HAND_MADE_IDS)
        content = bytearray(HAND_MADE)
        content[place] ^= mask
        (folder / "shard_00000_00.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"at byte|byte 0 on"):
            open_shards(name, "gpt2", True)


def test_a_shard_that_is_gone_is_refused(tmp_path):
    prepare(tmp_path, [1], [2])
    (tmp_path / "shard_00001_00.bin").unlink()
    key, cause = f"data.path={tmp_path / 'shard_00001_00.bin'}", "No such file or directory"
    check_refusal(refusal(tmp_path), key, f"cannot be read ({cause})", ANEW)


def test_a_folder_named_like_a_shard_is_refused(tmp_path):
    (tmp_path / "a.bin").mkdir()
    error = refusal(tmp_path)
    check_refusal(error, f"data.path={tmp_path / 'a.bin'}", "cannot be read (Is a direct", ANEW)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.bin")
    for path in (tmp_path / "a.bin", tmp_path):
        with not_waiting():
            assert str(tmp_path / "a.bin") in str(refusal(path))


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_a_manifest_that_is_no_regular_file_is_refused_at_once(kind, tmp_path):
    prepare(tmp_path, [1])
    SPECIAL_FILES[kind](tmp_path / MANIFEST)
    for path in (tmp_path, tmp_path / "shard_00000_00.bin"):
        with not_waiting():
            error = refusal(path)
        check_refusal(error, f"data.path={tmp_path / MANIFEST}", "cannot be read", "")


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("ids", [[1], [EOT, 1]])  # without a document, and with one
def test_documents_that_are_no_regular_file_are_refused_at_once(kind, ids, tmp_path):
    prepare(tmp_path, ids)
    path = tmp_path / "shard_00000_00.documents"
    SPECIAL_FILES[kind](path)
    stream = open_shards(str(tmp_path), "gpt2")["train"]
    with not_waiting(), pytest.raises(DataError) as caught:
        stream.document_starts()
    check_refusal(caught.value, f"data.path={path}", "", "")


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_a_preparation_is_unfinished_whatever_its_plan_is(kind, tmp_path):
    (tmp_path / "a.bin").write_bytes(llm_c_bytes([1]))
    (tmp_path / "preparing").mkdir()
    SPECIAL_FILES[kind](tmp_path / "preparing" / "plan.json")
    with not_waiting():
        check_refusal(refusal(tmp_path), f"data.path={tmp_path}", "not prepared to the end", "")


# ----------------------------------------------------------------------------- the .documents file


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (None, "cannot be read (No such file or directory)"),
        (lambda raw: b"", "ends at byte 0, and 240 are to be there"),
        (lambda raw: raw[:-1], "ends at byte 239, and 240 are to be there"),
        (lambda raw: raw[:-4], "ends at byte 236, and 240 are to be there"),
        (lambda raw: raw + b"\0" * 4, "ends at byte 244, and 240 are to be there"),
        (lambda raw: raw[:-4] + raw[:4], "checksum mismatch in the 240 bytes from byte 0 on"),
        (lambda raw: b"\xff" * 240, "checksum mismatch in the 240 bytes from byte 0 on"),
    ],
)
def test_damaged_documents_are_refused(damage, cause, tmp_path):
    """When they are asked for: training that does not part documents has no need of them."""
    prepare(tmp_path, IDS)
    path = tmp_path / "shard_00000_00.documents"
    raw = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(raw))
    stream = open_shards(str(tmp_path), "gpt2", True)["train"]
    assert ids_in(stream) == IDS
    for part in (stream, stream.split(100)[1]):
        with little_memory(), pytest.raises(DataError) as caught:
            part.document_starts()
        check_refusal(caught.value, f"data.path={path}", cause, "anew")


def test_documents_of_a_wrong_length_are_not_read(tmp_path):
    prepare(tmp_path, IDS)
    path = tmp_path / "shard_00000_00.documents"
    os.truncate(path, 2**26)
    stream = open_shards(str(tmp_path), "gpt2", True)["train"]
    with little_memory(), pytest.raises(DataError, match="ends at byte 67108864, and 240 are to"):
        stream.document_starts()


# ------------------------------------------------------------------------------------ the manifest

NOT_OURS = "not a manifest of token shards"
NOT_A_NAME = "is not a shard name"
LACKING = "a shard without one of file, tokens, documents, sha256, documents_sha256"


def setting(key: str, value: object):
    return lambda manifest: manifest | {key: value}


def without(key: str):
    return lambda manifest: {k: v for k, v in manifest.items() if k != key}


def shard_setting(key: str, value: object):
    """Changes the second shard's entry."""

    def change(manifest: dict) -> dict:
        manifest["shards"][1][key] = value
        return manifest

    return change


def shard_without(key: str):
    def change(manifest: dict) -> dict:
        del manifest["shards"][1][key]
        return manifest

    return change


KEYS = ("file", "tokens", "documents", "sha256", "documents_sha256")
NAMES = (
    *("../shard_00001_00.bin", "outside/shard_00001_00.bin", "./shard_00001_00.bin"),
    *("/etc/passwd", "/tmp/shard.bin", "..", ".", "", "..bin", ".bin", ".hidden.bin"),
    *("..\\shard.bin", "C:shard.bin", "a b.bin", "a.bin\n", "a\nb.bin", "a\0.bin", "é.bin"),
    *("shard_00001_00.documents", "manifest.json", "*.bin", "~.bin", "-.bin"),
    "a" * 300 + ".bin",
)
MANIFESTS = {
    **{
        f"not JSON: {content[:8]!r}": (content, "not JSON (")
        for content in (
            b"",
            b"{",
            b"shards",
            b'{"version": 1,}',
            b"\xff\xfe\xff",
            b"{}{}",
            b"9" * 5000,
        )
    },
    **{f"{value!r}": (lambda _, v=value: v, NOT_OURS) for value in ([], 5, "text", None, {})},
    "no format": (without("format"), NOT_OURS),
    "another format": (setting("format", "webdataset"), NOT_OURS),
    "format of another type": (setting("format", ["clearhead-shards"]), NOT_OURS),
    "no version": (without("version"), "version None, and this reads version 1"),
    "newer version": (setting("version", 2), "version 2, and this reads version 1"),
    "version of another type": (setting("version", "1"), "and this reads version 1"),
    "no block_bytes": (without("block_bytes"), "checksums of None bytes, not of 4194304"),
    "other block_bytes": (setting("block_bytes", 2**20), "checksums of 1048576 bytes, not of 4194"),
    "no tokenizer": (without("tokenizer"), "tokenizer None is none of gpt2, byte"),
    "unknown tokenizer": (setting("tokenizer", "words"), "tokenizer 'words' is none of gpt2, byte"),
    "no shards": (without("shards"), "no shards"),
    "shards of another type": (setting("shards", {"0": {}}), "no shards"),
    "a shard of another type": (setting("shards", ["shard_00000_00.bin"]), LACKING),
    **{f"a shard without {key}": (shard_without(key), LACKING) for key in KEYS},
    **{
        f"{key} {value!r}": (shard_setting(key, value), "of another type")
        for key, values in {
            "file": (5, None, ["a.bin"]),
            "tokens": ("70", 70.0, True, None, [70]),
            "documents": ("2", 2.0, False, None),
            "sha256": ("00", None, {}),
            "documents_sha256": (None, 5, []),
        }.items()
        for value in values
    },
    **{f"file {name!r}": (shard_setting("file", name), NOT_A_NAME) for name in NAMES},
}


def check_manifest(tmp_path: Path, change: object, cause: str) -> None:
    """A sound folder whose manifest was changed like this is refused, and a word is said of it."""
    folder = prepare(tmp_path / "folder", IDS, ids_of(70))
    for name in (tmp_path, folder / "outside"):  # what a name that leads away would find
        name.mkdir(exist_ok=True)
        (name / "shard_00001_00.bin").write_bytes((folder / "shard_00001_00.bin").read_bytes())
    path = folder / MANIFEST
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(json.dumps(change(json.loads(path.read_bytes()))))
    for verify in (True, False):
        error = refusal(folder, verify=verify)
        check_refusal(error, f"data.path={path}", cause, "prepare the data anew")
    with pytest.raises(DataError):
        is_shards(str(folder))  # it is not taken for a folder of texts


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_refused(damage, tmp_path):
    check_manifest(tmp_path, *MANIFESTS[damage])


MORE_MANIFESTS = {
    "a tokenizer that is a list": (setting("tokenizer", ["gpt2"]), "tokenizer ['gpt2'] is none"),
    "a tokenizer that is a dict": (setting("tokenizer", {}), "tokenizer {} is none of gpt2, byte"),
    "checksums that are numbers": (shard_setting("sha256", [5]), "of another type"),
    "checksums that are nothing": (shard_setting("sha256", [None]), "of another type"),
    "checksums that are lists": (shard_setting("sha256", [["00"]]), "of another type"),
    "a version of two lines": (setting("version", "1\n2"), "and this reads version 1"),
    "block_bytes of two lines": (setting("block_bytes", "1\n2"), "not of 4194304"),
    "deeply nested": (b"[" * 100_000, "not JSON ("),
    "no shards in the list": (setting("shards", []), "no shards"),
    "a shard twice": (
        lambda manifest: manifest | {"shards": manifest["shards"][:1] * 2},
        "shard_00000_00.bin",
    ),
}


@pytest.mark.parametrize("damage", MORE_MANIFESTS)
def test_a_strange_manifest_is_refused(damage, tmp_path):
    check_manifest(tmp_path, *MORE_MANIFESTS[damage])


def test_a_manifest_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def deny(_path, _flags):
        raise PermissionError(13, "Permission denied")

    prepare(tmp_path, [1])
    monkeypatch.setattr(os, "open", deny)  # root may read everything
    cause = "cannot be read (Permission denied)"
    check_refusal(refusal(tmp_path), f"data.path={tmp_path / MANIFEST}", cause, "")


def test_manifest_and_shard_that_disagree_are_refused(tmp_path):
    prepare(tmp_path, IDS, ids_of(70))
    manifest = json.loads((tmp_path / MANIFEST).read_bytes())
    path = tmp_path / "shard_00001_00.bin"
    for count in (69, 71, 0, -70, 2**31 - 1, 2**64, 10**40):
        changed = shard_setting("tokens", count)(copy.deepcopy(manifest))
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        for verify in (True, False):
            cause = f"has 70 tokens (byte 8), and manifest.json says {count}"
            check_refusal(refusal(tmp_path, verify=verify), f"data.path={path}", cause, ANEW)
    for count in (1, 3, 0, -2, 2**31, 10**40):
        changed = shard_setting("documents", count)(copy.deepcopy(manifest))
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        assert "its shards have" in str(refusal(tmp_path, verify=False))
        changed["documents"] += count - manifest["shards"][1]["documents"]
        (tmp_path / MANIFEST).write_text(json.dumps(changed))
        stream = open_shards(str(tmp_path), "gpt2")["train"]
        with little_memory(), pytest.raises(DataError) as caught:
            stream.document_starts()
        key = f"data.path={path.with_suffix('.documents')}"
        check_refusal(caught.value, key, f"ends at byte 8, and {4 * count} are to be", ANEW)


@pytest.mark.parametrize("number", [0, 2])
def test_a_wrong_number_of_checksums_is_refused(number, tmp_path):
    prepare(tmp_path, ids_of(70))
    manifest = json.loads((tmp_path / MANIFEST).read_bytes())
    manifest["shards"][0]["sha256"] *= number
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    key = f"data.path={tmp_path / 'shard_00000_00.bin'}"
    for verify in (True, False):
        error = refusal(tmp_path, verify=verify)
        check_refusal(error, key, MANIFEST, ANEW)
        assert "checksums" in str(error)


def test_a_shard_of_another_preparation_is_refused(tmp_path):
    prepare(tmp_path, IDS)
    other = prepare(tmp_path / "other", [1] * 3000)
    os.replace(other / "shard_00000_00.bin", tmp_path / "shard_00000_00.bin")
    key = f"data.path={tmp_path / 'shard_00000_00.bin'}"
    cause = "checksum mismatch in the 7024 bytes from byte 0 on"
    check_refusal(refusal(tmp_path), key, cause, ANEW)


@pytest.mark.parametrize(("made", "wanted"), [("gpt2", "byte"), ("byte", "gpt2")])
def test_another_tokenizer_is_refused(made, wanted, tmp_path):
    """By the manifest, though every id would do; for the folder and for a file of it."""
    prepare(tmp_path, [1, 2, 3], tokenizer=made, names=("a.bin",))
    for path in (tmp_path, tmp_path / "a.bin"):
        assert read(path, made) == [1, 2, 3]
        cause = f"{tmp_path / MANIFEST} is of shards made with {made}"
        error = refusal(path, wanted, verify=False)
        check_refusal(error, f"data.tokenizer={wanted}", cause, f"use data.tokenizer={made}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@many
@given(st.data(), json_values)
def test_whatever_a_manifest_says_there_is_one_line_of_complaint_or_none(draw, value):
    """Any value of it replaced by any other: it is refused in a line, or does no harm."""
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name), ids_of(60), ids_of(70))
        manifest = json.loads((folder / MANIFEST).read_bytes())
        places = [
            *[(manifest, key) for key in manifest],
            *[(entry, key) for entry in manifest["shards"] for key in entry],
            *[(entry["sha256"], 0) for entry in manifest["shards"]],
        ]
        holder, key = draw.draw(st.sampled_from(places))
        holder[key] = value
        (folder / MANIFEST).write_text(json.dumps(manifest))
        try:
            stream = open_shards(name, "gpt2", True)["train"]
            found = ids_in(stream), stream.document_starts().tolist()
        except DataError as error:
            complaint = error
        else:
            assert found == (ids_of(60) + ids_of(70), [0, 50, 60, 110])
            return
        assert complaint.exit_code == 3
        assert "\n" not in str(complaint)
        assert str(folder) in str(complaint)


# --------------------------------------------------------------------------- nanoGPT's plain files


def plain(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}H", *ids)


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
@pytest.mark.parametrize("verify", ["auto", True, False])
def test_plain_ids_are_read(tokenizer, verify, tmp_path):
    """nanoGPT's train.bin and val.bin, and what its prepare.py makes of a text of characters."""
    highest = TOKENIZERS[tokenizer] - 1
    train, val = [highest, *range(1, 200), highest, highest] * 5, [5, highest, 6]
    (tmp_path / "train.bin").write_bytes(plain(train))
    (tmp_path / "val.bin").write_bytes(plain(val))
    streams = open_shards(str(tmp_path), tokenizer, verify)
    assert {name: ids_in(stream) for name, stream in streams.items()} == {
        "train": train,
        "val": val,
    }
    assert streams["train"].document_starts()[:4].tolist() == [0, 200, 201, 202]
    assert streams["val"].document_starts().tolist() == [0, 1]
    assert streams["val"].end_of_text == highest


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 5000])
def test_plain_ids_of_any_length(length, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(plain(ids_of(length)))
    assert read(path) == ids_of(length)


def test_plain_ids_that_are_nearly_a_header(tmp_path):
    """What looks like a header is told by the zeros that follow its three words."""
    path = tmp_path / "train.bin"
    like_header = [1, 2, 3, 4, 5, 6, *[0] * 506]
    path.write_bytes(plain([*like_header, 1, 2, 3]))
    check_refusal(refusal(path), f"data.path={path}", "wrong magic 131073 at byte 0", OTHER_LAYOUT)
    for place in (6, 511):
        ids = [*like_header, 1, 2, 3]
        ids[place] = 1
        path.write_bytes(plain(ids))
        assert read(path) == ids
    path.write_bytes(plain(like_header[:-1]))  # shorter than any header
    assert read(path) == like_header[:-1]


def test_plain_ids_with_half_an_id_at_the_end(tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(plain(ids_of(100))[:-1])
    cause = "truncated at byte 199, in the middle of a plain uint16 id"
    check_refusal(refusal(path), f"data.path={path}", cause, ANEW)


def test_plain_ids_are_no_shard_of_a_manifest(tmp_path):
    """There every file has a header, whatever its ids look like."""
    prepare(tmp_path, ids_of(600), names=("train.bin",))
    (tmp_path / "train.bin").write_bytes(plain(ids_of(1112)))  # of the same size
    key = f"data.path={tmp_path / 'train.bin'}"
    magic = struct.unpack("<i", plain(ids_of(2)))[0]
    cause = f"wrong magic {magic} at byte 0, where 20240520 is to be; "
    assert f"{key}: {cause}{OTHER_LAYOUT}" == str(refusal(tmp_path, verify=False))


@pytest.mark.parametrize(
    ("content", "bad", "byte"),
    [
        (b"This is a text, and not at all of token ids.", None, None),
        (plain([5, 6, 300, 7]), 300, 4),
        (plain([*[5] * 511, 256, 257]), None, None),
        (plain([*[5] * 511, 257]), 257, 1022),
    ],
)
def test_what_is_neither_is_told_with_both_reasons(content, bad, byte, tmp_path):
    """Of plain ids the first 512 are always looked at, with verify=false too."""
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    if bad is None and len(content) > 1024:  # the bad one is further on
        assert len(open_shards(str(path), "byte", False)["train"]) == 513
        cause = "id 257 at byte 1024 is beyond the vocabulary of 257"
        check_refusal(refusal(path, "byte"), f"data.path={path}", cause, "use its own tokenizer")
        return
    magic = struct.unpack("<i", content[:4])[0]
    first, place = (bad, byte) if bad else (struct.unpack("<H", content[:2])[0], 0)
    cause = (
        f"wrong magic {magic} at byte 0, where 20240520 is to be, and no plain ids either "
        f"(id {first} at byte {place} is beyond the vocabulary of 257)"
    )
    error = refusal(path, "byte", verify=False)
    check_refusal(error, f"data.path={path}", cause, OTHER_LAYOUT)


# -------------------------------------------------------------------------- what data.path can name


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Token files and texts in the working folder, which is the home folder too."""
    prepare(tmp_path / "prepared", [1, 2], [3], [4, 5], names=("c.bin", "a.bin", "b.bin"))
    (tmp_path / "prepared" / "left_over.bin").write_bytes(llm_c_bytes([99]))
    (tmp_path / "prepared" / "notes.txt").write_text("a text")
    for name, ids in {"y/2.bin": [12], "y/1.bin": [11], "y/10.bin": [10], "z/one.bin": [7]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(llm_c_bytes(ids))
    (tmp_path / "y" / "log.txt").write_text("a text")
    (tmp_path / "y" / "deep").mkdir()
    (tmp_path / "y" / "deep" / "3.bin").write_bytes(llm_c_bytes([13]))
    (tmp_path / "y" / "[1].bin").write_bytes(llm_c_bytes([14]))
    (tmp_path / "plain.txt").write_text("a text")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("prepared", [1, 2, 3, 4, 5]),  # in the manifest's order, and what it lists alone
        ("prepared/", [1, 2, 3, 4, 5]),
        ("prepared/a.bin", [3]),
        ("prepared/left_over.bin", [99]),
        ("prepared/[abc].bin", [3, 4, 5, 1, 2]),
        ("y", [11, 10, 12, 14]),  # sorted by name, not deep
        ("y/*.bin", [11, 10, 12, 14]),
        ("y/?.bin", [11, 12]),
        ("y/*", [11, 10, 12, 14]),
        ("*/1*.bin", [11, 10]),
        ("y/[1].bin", [14]),  # a file of that name, before a pattern
        ("~/z", [7]),
        ("~/z/one.bin", [7]),
        (["y/2.bin", "prepared", "~/z/*.bin"], [12, 1, 2, 3, 4, 5, 7]),
        (["z/one.bin", "z/one.bin"], [7, 7]),
        ("**/3.bin", [13]),
        ("**/[23].bin", [12, 13]),
    ],
)
def test_what_a_path_names(path, expected, tree):
    assert is_shards(path)
    assert read(path) == expected


def test_links_in_circles_are_not_followed(tree):
    for name in ("link", "another"):
        (tree / "y" / name).symlink_to(tree)
    with not_waiting():
        assert sorted(read("**/[123].bin")) == [11, 12, 13]
        assert sorted(read("y/**/[123].bin")) == [11, 12, 13]


@pytest.mark.parametrize("path", ["y", "y/*.bin", "*/*.bin", "**/3.bin"])
def test_a_folder_that_cannot_be_listed_is_refused(path, tree, monkeypatch):
    def deny(folder="."):
        if os.path.abspath(folder) == str(tree / "y"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", deny)  # root may list everything
    check_refusal(refusal(path), "data.path=y", "cannot be read", "permissions")
    with pytest.raises(DataError):
        is_shards(path)


@pytest.mark.parametrize(
    "path", [None, "", [], "plain.txt", "texts", "*.txt", "nothing.bin", "no/*.bin", ["plain.txt"]]
)
def test_what_is_no_token_file(path, tree):
    assert not is_shards(path)


@pytest.mark.parametrize("text", ["plain.txt", "texts", "*.txt", "hub:name"])
@pytest.mark.parametrize("shards", ["prepared", "y/1.bin", "y/*.bin"])
def test_texts_and_token_files_do_not_mix(text, shards, tree):
    for path in ([text, shards], [shards, text]):
        assert is_shards(path)
        cause = "a text, and other entries of data.path are token files"
        check_refusal(refusal(path), f"data.path={text}", cause, "python -m scripts.prepare_data")


@pytest.mark.parametrize("path", ["nothing.bin", "no/*.bin", "nowhere"])
def test_an_entry_of_a_list_that_is_missing(path, tree):
    check_refusal(refusal(["y/1.bin", path]), f"data.path={path}", "no such file", "")


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (["fineweb_train_000001.bin", "fineweb_val_000000.bin"], [0], [1]),
        (["train.bin", "val.bin"], [0], [1]),
        (["TinyStories_train.bin", "TinyStories_val.bin"], [0], [1]),
        (["a.bin", "b.val.bin", "c-val-2.bin", "val_3.bin"], [0], [1, 2, 3]),
        (["fineweb_val_000000.bin", "val.bin"], [0, 1], None),  # asked for by themselves
        (["val.bin"], [0], None),
        (["arrival.bin", "b.bin", "interval_1.bin", "validate.bin", "valley.bin"], range(5), None),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_files_named_val_are_for_validation(names, train, val, manifest, tmp_path):
    folder = prepare(tmp_path / "val", *[[n, 7] for n in range(len(names))], names=tuple(names))
    if not manifest:
        (folder / MANIFEST).unlink()
    expected = {"train": train} | ({"val": val} if val else {})
    for path in (str(folder), [str(folder / name) for name in names]):
        streams = open_shards(path, "gpt2")
        assert list(streams) == list(expected)
        for name, stream in streams.items():
            assert ids_in(stream) == [token for n in expected[name] for token in (n, 7)]


def test_errors_of_gathered_windows_name_the_file_of_each_part(tmp_path):
    for name, ids in {"a.bin": [1, 2], "b_val.bin": [3, 60000], "c.bin": [4, 60001]}.items():
        (tmp_path / name).write_bytes(llm_c_bytes(ids))
    streams = open_shards(str(tmp_path), "gpt2", False)
    for name, file in (("train", "c.bin"), ("val", "b_val.bin")):
        with pytest.raises(DataError) as caught:
            streams[name].gather(np.array([0]), len(streams[name]))
        key = f"data.path={tmp_path / file}"
        check_refusal(caught.value, key, "at byte 1026 is beyond", "use its own tokenizer")


# ---------------------------------------------------------------------------------- what is read


@pytest.fixture
def blocks_read(monkeypatch):
    """[(file, block), ...] of what is verified from here on."""
    found = []
    verify = module._Shard.verify

    def record(self, blocks):
        blocks = list(blocks)
        found.extend((self.path.name, block) for block in blocks)
        verify(self, blocks)

    monkeypatch.setattr(module._Shard, "verify", record)
    return found


def blocks(name: str, *numbers: int) -> list[tuple[str, int]]:
    return [(name, number) for number in numbers]


EACH = [*blocks("a.bin", 0, 1, 2, 3), *blocks("b.bin", 0), *blocks("val.bin", 0, 1)]
OUTERMOST = [*blocks("a.bin", 0, 3), *blocks("b.bin", 0), *blocks("val.bin", 0, 1)]


@pytest.mark.parametrize(
    ("verify", "most", "expected"),
    [
        (
            True,
            2**30,
            [*blocks("a.bin", 0, 1, 2, 3), *blocks("b.bin", 0), *blocks("val.bin", 0, 1)],
        ),
        (True, 0, [*blocks("a.bin", 0, 1, 2, 3), *blocks("b.bin", 0), *blocks("val.bin", 0, 1)]),
        (False, 2**30, []),
        (False, 0, []),
        ("auto", 10_498, EACH),
        ("auto", 10_497, OUTERMOST),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_verify_reads_what_it_says(
    verify, most, expected, manifest, tmp_path, monkeypatch, small_blocks, blocks_read
):
    shards = IDS, [5], ids_of(712)  # of 7024, 1026 and 2448 bytes
    folder = prepare(tmp_path, *shards, names=("a.bin", "b.bin", "val.bin"))
    if not manifest:
        (folder / MANIFEST).unlink()
    assert sum(path.stat().st_size for path in folder.glob("*.bin")) == 10_498
    monkeypatch.setattr(module, "VERIFY_AT_MOST", most)
    open_shards(str(folder), "gpt2", verify)
    assert blocks_read == expected


def test_all_is_verified_up_to_a_gibibyte():
    assert module.VERIFY_AT_MOST == 2**30


@pytest.mark.parametrize("change", ["checksum", "vocabulary"])
@pytest.mark.parametrize(
    ("verify", "noticed"), [(True, {0, 1, 2, 3}), ("auto", {0, 3}), (False, set())]
)
def test_verify_notices_what_it_reads(verify, noticed, change, tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr(module, "VERIFY_AT_MOST", 0)
    for block in range(4):
        byte = max(1024, block * BLOCK) + 1
        folder = prepare(tmp_path / f"{change}_{block}", IDS, names=("a.bin",))
        with open(folder / "a.bin", "r+b") as file:
            file.seek(byte)
            file.write(b"\xff")  # makes it 65,280 or more
        if change == "vocabulary":
            (folder / MANIFEST).unlink()
        if block not in noticed:
            open_shards(str(folder), "gpt2", verify)
            continue
        cause = "checksum mismatch" if change == "checksum" else f"at byte {byte - 1} is beyond"
        check_refusal(refusal(folder, verify=verify), f"data.path={folder / 'a.bin'}", cause, "")


@pytest.mark.parametrize(("verify", "done"), [(True, "1111"), ("auto", "1001"), (False, "0000")])
def test_checksums_of_what_was_read(verify, done, tmp_path, monkeypatch, small_blocks):
    """From the manifest all of them, otherwise of the blocks that were read."""
    monkeypatch.setattr(module, "VERIFY_AT_MOST", 0)
    prepare(tmp_path, IDS, names=("a.bin",))
    sums = [hashlib.sha256(WHOLE[b : b + BLOCK]).hexdigest()[:12] for b in range(0, 7024, BLOCK)]
    assert open_shards(str(tmp_path), "gpt2", verify)["train"].checksums() == [("a.bin", sums)]
    (tmp_path / MANIFEST).unlink()
    known = [checksum if was == "1" else "" for checksum, was in zip(sums, done, strict=True)]
    assert open_shards(str(tmp_path), "gpt2", verify)["train"].checksums() == [("a.bin", known)]


@pytest.mark.parametrize("layout", ["llm.c", "nanoGPT"])
def test_three_gigabytes_are_opened_at_once(layout, tmp_path, blocks_read):
    """A sparse file, of which nothing but the header is read."""
    path = tmp_path / "big.bin"
    count = 3 * 2**29
    first = 1024 if layout == "llm.c" else 0
    beginning = shard(20240520, 1, count, ids=[]) if first else plain([*range(1, 513)])
    path.write_bytes(beginning)
    os.truncate(path, first + 2 * count)
    with open(path, "r+b") as file:
        file.seek(-4, 2)
        file.write(plain([60000, 17]))
    with little_memory():
        stream = open_shards(str(path), "gpt2", False)["train"]
        assert len(stream) == count
        assert stream.gather(np.array([count // 2, count - 1]), 1).tolist() == [[0], [17]]
        ends = stream.split(count - 10)
        assert [len(part) for part in ends] == [count - 10, 10]
        cause = f"id 60000 at byte {first + 2 * (count - 2)} is beyond"
        with pytest.raises(DataError, match=cause):
            ends[1].gather(np.array([7]), 3)
    assert blocks_read == []
    with little_memory(), pytest.raises(DataError, match=cause):  # its last block is looked at
        open_shards(str(path), "gpt2", "auto")
    assert blocks_read == blocks("big.bin", 0, (first + 2 * count - 1) // 2**22)
