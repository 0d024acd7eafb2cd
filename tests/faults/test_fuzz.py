"""Fuzzing: readers of files get random mutations of valid input.

Each reader must accept an input or refuse it with one of our errors, in one line: without another
exception, an endless loop or too much memory. CAMPAIGN_FUZZ: the number of inputs of all readers
together (make campaign).
"""

import json
import os
import random
import resource
import struct
from pathlib import Path

import pytest
from helpers.refusals import time_limit
from helpers.runs import train_in, write_checksums
from helpers.settings import settings
from helpers.tally import tally
from helpers.texts import prepare

from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.errors import CheckpointError, DataError
from clearhead.models.pretrained import load_pretrained
from data import get_tokenizer, load_datasets

INPUTS = int(os.environ.get("CAMPAIGN_FUZZ", "400"))
ROOM = 2**30  # bytes that a reader of a small input may allocate at most
FAULT = "a fuzzer on readers"
DATA = settings("data.tokenizer=byte").data

ODD = b"""0 -1 1e400 -1e400 NaN Infinity null true [] {} 18446744073709551616 *a ../../etc/passwd
!!python/object/apply:os.system ${oc.env:HOME} _target_ : = , ' " \x00 \xff \xed\xa0\x80""".split()
ODD += [b"", b"\n", b"  ", b": ", b"9" * 5000, b"[" * 2000, b'{"a":' * 500]


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """Returns the seed after one or a few mutations."""
    raw = bytearray(seed)
    for _ in range(1 + int(chance.expovariate(0.7))):
        place = chance.randrange(len(raw) + 1)
        end = min(len(raw), place + 1 + int(chance.expovariate(0.1)))
        kind = chance.randrange(8)
        if kind <= 1 and raw:
            raw[place % len(raw)] ^= 1 << chance.randrange(8)
        elif 2 <= kind <= 5:
            part, odd = bytes(raw[place:end]), chance.choice(ODD)
            raw[place:end] = (odd, odd + part, b"", part * 3)[kind - 2]
        elif kind == 6:
            del raw[place:]
        elif kind == 7 and len(raw) >= 8:
            number = chance.choice([0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, len(raw)])
            place = min(place, len(raw) - 8)
            raw[place : place + 8] = struct.pack("<Q", number)
    return bytes(raw)


def odd_json(value: object, chance: random.Random) -> object:
    """Returns a JSON value in which one part is replaced by another value."""
    strange = [None, True, -1, 0, 2**63, 10**30, 1.5, -0.0, "", "x" * 999, "../x", [], {}, [[]]]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: odd_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], odd_json(value[place], chance), *value[place + 1 :]]
    return chance.choice(strange)


def read_tokens(path: Path) -> None:
    """Reads the first window of token files, as a training does."""
    values = {"path": str(path), "tokenizer": "byte", "max_length": 8, "val_fraction": 0.0}
    loaded = load_datasets(DATA.model_copy(update=values), get_tokenizer("byte"))
    if len(loaded.train):
        loaded.train[0]


def shard(folder: Path):
    """One token file."""
    (folder / "a.txt").write_text("The ferry is late. " * 11)
    prepare(folder / "a.txt", folder / "tokens", tokenizer="byte")
    (file,) = (folder / "tokens").glob("*.bin")
    seed = file.read_bytes()

    def read(chance: random.Random) -> None:
        raw = seed
        if chance.random() < 0.7:  # most of a header is zeros that mean nothing
            raw = mutated(raw[:16], chance).ljust(16, b"\0")[:16] + raw[16:]
        (folder / "b.bin").write_bytes(mutated(raw, chance) if chance.random() < 0.5 else raw)
        read_tokens(folder / "b.bin")

    return read


def manifest(folder: Path):
    """manifest.json of a token file and its documents."""
    (folder / "a.jsonl").write_text('{"text": "A ferry"}\n' * 9)
    tokens = folder / "tokens"
    prepare(folder / "a.jsonl", tokens, tokenizer="byte")
    seed = (tokens / "manifest.json").read_bytes()

    def read(chance: random.Random) -> None:
        raw = mutated(seed, chance)
        if chance.random() < 0.5:
            raw = json.dumps(odd_json(json.loads(seed), chance)).encode()
        (tokens / "manifest.json").write_bytes(raw)
        read_tokens(tokens)

    return read


def saved_state(folder: Path):
    """A checkpoint with mutated files, mostly with correct checksums."""
    run = train_in(folder, "name=made")
    last = run / "checkpoints" / "last"
    seeds = {path.name: path.read_bytes() for path in last.iterdir()}
    at = folder / "step_00000004"
    at.mkdir()

    def read(chance: random.Random) -> None:
        name = chance.choice(["model.safetensors", "state.json", "SHA256SUMS"])
        raw = seeds[name]
        if name == "model.safetensors":  # only the header; the rest is numbers
            length = 8 + int.from_bytes(raw[:8], "little")
            head = mutated(raw[8:length], chance)
            raw = struct.pack("<Q", len(head)) + head + raw[length:]
        elif name == "state.json" and chance.random() < 0.5:
            raw = json.dumps(odd_json(json.loads(raw), chance)).encode()
        else:
            raw = mutated(raw, chance)
        for file, content in (seeds | {name: raw}).items():
            if file != "optimizer.safetensors" or not (at / file).exists():
                (at / file).write_bytes(content)
        has_checksums = name != "SHA256SUMS" and chance.random() < 0.8
        if has_checksums:
            write_checksums(at)
        listing.find_checkpoint(at, names=checkpoint.FILES)  # as to resume, with all files
        assert load_pretrained(at).model.num_parameters() < 10**6
        assert has_checksums or raw == seeds[name], "damage was not noticed"

    return read


READERS = {
    shard: (0.35, DataError),
    manifest: (0.35, DataError),
    saved_state: (0.3, CheckpointError),
}


@pytest.fixture
def bounded():
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_mutated_input_is_accepted_or_refused(tmp_path, bounded, reader, monkeypatch):
    monkeypatch.chdir(tmp_path)
    share, refuses = READERS[reader]
    read, number, refusals = reader(tmp_path), max(10, int(INPUTS * share)), []
    for seed in range(number):
        try:
            with time_limit(120):
                read(random.Random(f"{reader.__name__} {seed}"))
        except refuses as error:
            refusals.append((str(error).split("\n"), len(error.problems)))
        except Exception as error:
            raise AssertionError(f"seed {seed} of {reader.__name__}: {error!r}") from error
    assert refusals
    for lines, problems in refusals:  # a line of limited length for each problem
        assert len(lines) == problems
        assert max(map(len, lines)) < 4000
    tally(FAULT, number)
