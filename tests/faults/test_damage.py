"""Damaged files: a checkpoint or token files of which any part is cut off or any bit is another
are refused in one line, and never loaded as if nothing had been.

Some 200 damages here, thousands with CAMPAIGN=1. Needs no network.
"""

import random
import struct

import numpy as np
import pytest
from helpers import TEXT, TINY
from helpers.tally import tally
from helpers.texts import prepare
from helpers.trainings import campaign

from errors import CheckpointError, DataError
from tokens.shards import open_shards
from training import checkpoint

FAULT = "truncations and bit flips of checkpoint and shard files"
PARTS = 4  # of the cuts, for as many processes as may test
RANDOM = campaign("CAMPAIGN_DAMAGES", 8, 100)  # of each kind, of each file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and what its files hold."""
    from train import Trainer
    from training.command import compose

    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        run = Trainer(compose([*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=2"]))
        run.train()
        run.close(0)
    found = checkpoint.find(folder / "runs" / "run", names=checkpoint.FILES)
    return found, {name: (found / name).read_bytes() for name in (*checkpoint.FILES, "SHA256SUMS")}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Token files, and what they hold."""
    folder = tmp_path_factory.mktemp("tokens")
    text = TEXT.replace("3 jumps", "3 jumps<|endoftext|>")
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare(folder / "text.txt", folder / "out", tokenizer="byte", shard_tokens=1500)
    return folder / "out", {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def flips(raw: bytes, count: int, chance: random.Random):
    """(what was done, the bytes with one bit another), of bits at random."""
    for _ in range(count if raw else 0):
        place, bit = chance.randrange(len(raw)), chance.randrange(8)
        damaged = bytearray(raw)
        damaged[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", bytes(damaged)


def cuts(raw: bytes, count: int, chance: random.Random):
    """(what was done, the bytes that are left), of cuts at random."""
    for size in [chance.randrange(len(raw)) for _ in range(count if raw else 0)]:
        yield f"cut to {size} bytes", raw[:size]


def refused(file, raw: bytes, whole: bytes, opens, kind: type[Exception], exit_code: int) -> None:
    """A file with this content is refused by opens(), in one line that names its folder or it."""
    file.write_bytes(raw)
    try:
        with pytest.raises(kind) as caught:
            opens()
    finally:
        file.write_bytes(whole)
    line = str(caught.value)
    assert "\n" not in line
    assert line.isprintable()
    assert str(file.parent.name) in line
    assert "; " in line
    assert caught.value.exit_code == exit_code


# ---------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_no_cut_of_the_header_is_read(saved, name, part):
    """At every byte; with its checksum, and without, as files of older formats are read."""
    folder, whole = saved
    raw = whole[name]
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    apart = PARTS * campaign("CAMPAIGN_CUTS_APART", 64, 4)
    sizes = range(part, header, apart)

    def opens():
        with pytest.raises(CheckpointError, match=name):
            checkpoint.read_tensors(folder / name)
        checkpoint.find(folder, names=checkpoint.FILES)

    for size in sizes:
        refused(folder / name, raw[:size], raw, opens, CheckpointError, 3)
    tally(FAULT, len(sizes))


@pytest.mark.parametrize("name", [*checkpoint.FILES, "SHA256SUMS"])
@pytest.mark.parametrize("damage", [flips, cuts])
def test_no_damaged_checkpoint_is_read(saved, name, damage):
    folder, whole = saved
    raw = whole[name]
    done = list(damage(raw, RANDOM, random.Random(name)))
    for what, damaged in done:
        try:
            refused(
                folder / name,
                damaged,
                raw,
                lambda: checkpoint.find(folder, names=checkpoint.FILES),
                CheckpointError,
                3,
            )
        except BaseException as error:
            error.add_note(f"{name}: {what}")
            raise
    assert checkpoint.find(folder, names=checkpoint.FILES) == folder
    tally(FAULT, len(done))


# ---------------------------------------------------------------------------------- token files


def read(folder) -> tuple:
    """All of what training has of token files: ids and where documents begin."""
    stream = open_shards(str(folder), "byte", True)["train"]
    ids = stream.gather(np.array([0]), len(stream))[0]
    return ids.tolist(), stream.document_starts().tolist()


@pytest.mark.parametrize("damage", [flips, cuts])
@pytest.mark.parametrize("kind", [".bin", ".documents"])
def test_no_damaged_token_file_is_read(tokens, kind, damage):
    folder, whole = tokens
    count = 0
    for name in sorted(name for name in whole if name.endswith(kind) and whole[name]):
        for what, damaged in damage(whole[name], RANDOM, random.Random(name)):
            try:
                refused(folder / name, damaged, whole[name], lambda: read(folder), DataError, 3)
            except BaseException as error:
                error.add_note(f"{name}: {what}")
                raise
            count += 1
    assert count >= RANDOM
    tally(FAULT, count)


@pytest.mark.parametrize("damage", [flips, cuts])
def test_a_damaged_manifest_changes_nothing_that_is_read(tokens, damage):
    """It is refused, or it is only a figure for people that is another, such as text_bytes."""
    folder, whole = tokens
    raw, expected, count = whole["manifest.json"], read(folder), 0
    for what, damaged in damage(raw, 4 * RANDOM, random.Random(1)):

        def opens():
            assert read(folder) == expected
            raise DataError(f"data.path={folder}: is what it was; all is well")

        try:
            refused(folder / "manifest.json", damaged, raw, opens, DataError, 3)
        except BaseException as error:
            error.add_note(f"manifest.json: {what}")
            raise
        count += 1
    tally(FAULT, count)
