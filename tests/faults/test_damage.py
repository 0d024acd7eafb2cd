"""Checkpoints and token files with flipped bits or truncated files are refused and never loaded.

378 damaged files here, 16,192 with CAMPAIGN=1.
"""

import random
import struct
from functools import partial

import numpy as np
import pytest
from helpers import TEXT
from helpers.runs import train_in
from helpers.tally import campaign, tally
from helpers.texts import files_of, prepare

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.tensors import read_tensors
from clearhead.errors import CheckpointError, ClearheadError, DataError
from clearhead.tokens.shards import open_shards

FAULT = "truncations and bit flips of checkpoint and shard files"
RANDOM = campaign("CAMPAIGN_DAMAGES", 6, 100)  # of each kind, of each file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint and the contents of its files."""
    run = train_in(tmp_path_factory.mktemp("damage"), "name=run", "trainer.max_steps=2")
    found = listing.find_checkpoint(run, names=checkpoint.FILES)
    return found, {path.name: path.read_bytes() for path in found.iterdir()}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Token files and their contents."""
    folder = tmp_path_factory.mktemp("tokens")
    text = TEXT.replace("3 jumps", "3 jumps<|endoftext|>")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare(folder / "text.txt", folder / "out", tokenizer="byte", shard_tokens=1500)
    return folder / "out", files_of(folder / "out")


def damages(raw: bytes, count: int, chance: random.Random):
    """Yields (description, damaged bytes): flipped bits and truncations at random positions."""
    for _ in range(count):
        place, bit = chance.randrange(len(raw)), chance.randrange(8)
        damaged = bytearray(raw)
        damaged[place] ^= 1 << bit
        yield f"bit {bit} of byte {place} flipped", bytes(damaged)
        size = chance.randrange(len(raw))
        yield f"truncated to {size} bytes", raw[:size]


def outcome(file, raw: bytes, whole: bytes, reads) -> ClearheadError | None:
    """Returns the error of reading a file with this content; None without an error."""
    file.write_bytes(raw)
    try:
        reads()
    except ClearheadError as error:
        return error
    finally:
        file.write_bytes(whole)
    return None


def check_refused(error: ClearheadError | None, kind: type, folder, what: str) -> None:
    assert isinstance(error, kind), what
    assert error.exit_code == 3, what
    assert folder.name in str(error.value), what
    assert str(error).isprintable(), what


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_truncated_header_is_refused_without_checksums(saved, name):
    folder, whole = saved
    raw = whole[name]
    sizes = range(0, 8 + struct.unpack("<Q", raw[:8])[0], campaign("CAMPAIGN_CUTS_APART", 64, 1))
    for size in sizes:
        read = partial(read_tensors, folder / name)
        error = outcome(folder / name, raw[:size], raw, read)
        check_refused(error, CheckpointError, folder, f"truncated to {size}")
        assert error.value.name == name
    tally(FAULT, len(sizes))


@pytest.mark.parametrize("name", [*checkpoint.FILES, "SHA256SUMS"])
def test_a_damaged_checkpoint_is_refused(saved, name):
    folder, whole = saved
    for what, damaged in damages(whole[name], RANDOM, random.Random(name)):
        find = partial(listing.find_checkpoint, folder, names=checkpoint.FILES)
        error = outcome(folder / name, damaged, whole[name], find)
        check_refused(error, CheckpointError, folder, f"{name}: {what}")
    assert listing.find_checkpoint(folder, names=checkpoint.FILES) == folder
    tally(FAULT, 2 * RANDOM)


def read(folder) -> tuple:
    """Returns everything that training reads from token files: ids and document starts."""
    stream = open_shards(str(folder), "byte", True)["train"]
    ids = stream.gather(np.array([0]), len(stream))[0]
    return ids.tolist(), stream.document_starts().tolist()


def test_a_damaged_token_file_is_refused(tokens):
    folder, whole = tokens
    files = sorted(name for name, raw in whole.items() if raw and name != "manifest.json")
    assert len(files) > 1
    for name in files:
        for what, damaged in damages(whole[name], RANDOM, random.Random(name)):
            error = outcome(folder / name, damaged, whole[name], lambda: read(folder))
            check_refused(error, DataError, folder, f"{name}: {what}")
    tally(FAULT, 2 * RANDOM * len(files))


def test_a_damaged_manifest_changes_nothing_that_is_read(tokens):
    """It is refused, or the change is in a value that only users read, such as text_bytes."""
    folder, whole = tokens
    raw, expected = whole["manifest.json"], read(folder)
    for what, damaged in damages(raw, 4 * RANDOM, random.Random(1)):
        values = []
        file = folder / "manifest.json"
        error = outcome(file, damaged, raw, lambda found=values: found.append(read(folder)))
        if error is not None:
            check_refused(error, DataError, folder, what)
        else:
            assert values == [expected], what
    tally(FAULT, 8 * RANDOM)
