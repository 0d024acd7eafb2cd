"""Readers of files and arguments, with random mutations of valid input.

Each must take an input or refuse it with its own error, in one line: no other exception, no endless
loop, no memory out of proportion. CAMPAIGN_FUZZ: the number of inputs of all readers together
(make campaign); cheap readers get most of them.
"""

import contextlib
import json
import os
import random
import resource
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers import TEXT, TINY
from helpers.settings import settings as composed
from helpers.tally import CAMPAIGN, tally
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from errors import CheckpointError, ClearheadError, ConfigError, DataError
from generate import GenerateConfig
from tokens.shards import ShardWriter, open_shards, write_manifest
from training import checkpoint
from training.command import compose, parse

INPUTS = int(os.environ.get("CAMPAIGN_FUZZ", "1000"))
PATIENCE = 20  # seconds for one input
ROOM = 2**30  # bytes that a reader of a small input may allocate at most
FAULT = "hypothesis and a fuzzer on readers"


# ------------------------------------------------------------------------------------- mutations

ODD = [b"", b"0", b"-1", b"1e400", b"-1e400", b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}"]
ODD += [b"9" * 5000, b"[" * 2000, b'{"a":' * 500, b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"\n"]
ODD += [b"2147483648", b"18446744073709551616", b"!!python/object/apply:os.system", b"&a", b"*a"]
ODD += [b"../../etc/passwd", b"${oc.env:HOME}", b"_target_", b": ", b"=", b",", b"'", b"  "]


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """The seed after one or a few mutations."""
    raw = bytearray(seed)
    for _ in range(1 + int(chance.expovariate(0.7))):
        place = chance.randrange(len(raw) + 1)
        end = min(len(raw), place + 1 + int(chance.expovariate(0.1)))
        kind = chance.randrange(8)
        if kind == 0 and raw:
            raw[place % len(raw)] ^= 1 << chance.randrange(8)
        elif kind == 1 and raw:
            raw[place % len(raw)] = chance.randrange(256)
        elif kind == 2:
            raw[place:end] = chance.choice(ODD)
        elif kind == 3:
            raw[place:place] = chance.choice(ODD)
        elif kind == 4:
            del raw[place:end]
        elif kind == 5:
            raw[place:place] = raw[place:end] * chance.randrange(1, 4)
        elif kind == 6:
            del raw[place:]
        elif kind == 7 and len(raw) >= 8:
            number = chance.choice([0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, len(raw)])
            place = min(place, len(raw) - 8)
            raw[place : place + 8] = struct.pack("<Q", number)
    return bytes(raw)


def odd_json(value: object, chance: random.Random) -> object:
    """A JSON value with one of its parts replaced by something else."""
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


# --------------------------------------------------------------------------------------- targets


class Target:
    """A reader: what it reads at first, and how it is asked. Made once, in a folder of its own."""

    share = 1.0  # of all inputs
    refuses: type[Exception]

    def __init__(self, folder: Path, made: Path):
        self.folder = folder
        self.prepare(made)

    def prepare(self, made: Path) -> None:
        """made: a run of a tiny model."""

    def read(self, chance: random.Random) -> None:
        raise NotImplementedError


class Shard(Target):
    """A token file: header, size, ids."""

    share, refuses = 0.25, DataError

    def prepare(self, made: Path) -> None:
        writer = ShardWriter(self.folder / "a.bin", 256)
        writer.append(np.arange(200, dtype=np.uint16))
        writer.close()
        self.seed = (self.folder / "a.bin").read_bytes()
        self.file = self.folder / "b.bin"

    def read(self, chance: random.Random) -> None:
        raw = self.seed
        if chance.random() < 0.7:  # most of a header is zeros that mean nothing
            raw = mutated(raw[:16], chance).ljust(16, b"\0")[:16] + raw[16:]
        self.file.write_bytes(mutated(raw, chance) if chance.random() < 0.5 else raw)
        for stream in open_shards(str(self.file), "byte").values():
            stream.gather(np.array([0]), min(8, len(stream)))


class Manifest(Target):
    """manifest.json beside a shard and its documents."""

    share, refuses = 0.25, DataError

    def prepare(self, made: Path) -> None:
        writer = ShardWriter(self.folder / "a.bin", 256)
        writer.append(np.array([256, 1, 2, 256, 3] * 9, np.uint16))
        self.values = write_manifest(self.folder, [writer.close()], "byte")
        self.seed = (self.folder / "manifest.json").read_bytes()

    def read(self, chance: random.Random) -> None:
        raw = mutated(self.seed, chance)
        if chance.random() < 0.5:
            raw = json.dumps(odd_json(self.values, chance)).encode()
        (self.folder / "manifest.json").write_bytes(raw)
        for stream in open_shards(str(self.folder), "byte").values():
            stream.gather(np.array([0]), min(8, len(stream)))


class Checkpoint(Target):
    """A checkpoint whose files have been tampered with; half of them with checksums that fit."""

    share, refuses = 0.3, CheckpointError

    def prepare(self, made: Path) -> None:
        whole = checkpoint.find(made)
        self.seeds = {p.name: p.read_bytes() for p in whole.iterdir()}
        self.state = json.loads(self.seeds["state.json"])
        self.at = self.folder / "step_00000004"
        self.at.mkdir()

    def read(self, chance: random.Random) -> None:
        name = chance.choice(["model.safetensors", "state.json", "SHA256SUMS"])
        raw = self.seeds[name]
        if name == "model.safetensors":  # the header, mostly: the rest are numbers
            length = 8 + int.from_bytes(raw[:8], "little")
            head = mutated(raw[:length], chance)
            if chance.random() < 0.5:  # one whose length is right
                head = struct.pack("<Q", len(head) - 8) + head[8:] if len(head) > 8 else head
            raw = head + raw[length:]
        elif name == "state.json" and chance.random() < 0.5:
            raw = json.dumps(odd_json(self.state, chance)).encode()
        else:
            raw = mutated(raw, chance)
        for file, content in (self.seeds | {name: raw}).items():
            if file != "optimizer.safetensors" or not (self.at / file).exists():
                (self.at / file).write_bytes(content)
        sealed = name != "SHA256SUMS" and chance.random() < 0.8
        if sealed:
            sums = [f"{checkpoint.checksum(self.at / n)}  {n}\n" for n in checkpoint.FILES]
            (self.at / "SHA256SUMS").write_text("".join(sums))
        found = checkpoint.find(self.at, names=checkpoint.FILES)
        assert sealed or raw == self.seeds[name], "damage was not noticed"
        model, state = checkpoint.load_model(found)
        assert model.num_parameters() < 10**6
        assert isinstance(state.settings["data"], dict)


class Commands(Target):
    """Arguments of the commands without groups."""

    share, refuses = 0.18, ConfigError
    seeds = (
        b"checkpoint=runs/a",
        b"prompt=The ferry",
        b"max_new_tokens=5",
        b"temperature=0.5",
        b"top_k=null",
        b"top_p=0.9",
        b'prompt=["a","b, c"]',
        b"interactive=true",
        b"compile=auto",
        b"seed=3",
        b"device=cpu",
    )

    def read(self, chance: random.Random) -> None:
        chosen = chance.sample(self.seeds, chance.randrange(1, 5))
        given = [mutated(a, chance).decode(errors="replace") for a in chosen]
        found = parse(GenerateConfig, ["checkpoint=a", *given])
        assert found.temperature >= 0
        assert found.max_new_tokens >= 1


class Overrides(Target):
    """Arguments of train.py."""

    share, refuses = 0.01, ConfigError

    def read(self, chance: random.Random) -> None:
        touched = chance.sample(TINY, 2)
        changed = [mutated(a.encode(), chance).decode(errors="replace") for a in touched]
        compose(changed)


class Yaml(Target):
    """A file of the user's own, below --config-dir."""

    share, refuses = 0.01, ConfigError

    def prepare(self, made: Path) -> None:
        self.seed = (made / "config.yaml").read_bytes().partition(b"optimizer:\n")[2]
        self.seed = b"\n".join(line[2:] for line in self.seed.split(b"\n")[:6])
        (self.folder / "optimizer").mkdir()
        self.file = self.folder / "optimizer" / "mine.yaml"

    def read(self, chance: random.Random) -> None:
        self.file.write_bytes(mutated(self.seed, chance))
        compose(["optimizer=mine"], str(self.folder))


TARGETS = (Shard, Manifest, Checkpoint, Commands, Overrides, Yaml)


def check_lines(error: ClearheadError) -> None:
    """A line of limited length for each problem."""
    problems = len(error.problems)
    assert str(error).count("\n") < problems, repr(str(error))
    assert len(str(error)) < 4000 * problems, str(error)[:300]


class TooLong(BaseException):
    """Not an Exception: no reader takes it for an error of its own."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a tiny model, whose checkpoint and settings are seeds."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(TEXT)
    with contextlib.chdir(folder):
        run = train.Trainer(composed(*TINY, f"data.path={folder}/text.txt", "name=made"))
        run.train()
        run.close(0)
    return folder / "runs" / "made"


@pytest.fixture
def bounded():
    """Limits memory and time; exceeding them is an error, and the process goes on."""

    def too_long(*_):
        raise TooLong(f"more than {PATIENCE} s")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__.lower())
def test_mutated_input_is_taken_or_refused(made, tmp_path, bounded, target, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, number = target(tmp_path, made), max(10, int(INPUTS * target.share))
    taken = 0
    for seed in range(number):
        signal.alarm(PATIENCE)
        try:
            reader.read(random.Random(f"{target.__name__} {seed}"))
            taken += 1
        except target.refuses as error:
            check_lines(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {target.__name__}: {error!r}") from error
    signal.alarm(0)
    assert taken < number
    tally(FAULT, number)


# ------------------------------------------------------------------------------------ hypothesis

many = settings(
    max_examples=300 if CAMPAIGN else 25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)
FIELDS = st.sampled_from([field.name for field in checkpoint.fields(checkpoint.State)])


@many
@given(values=JSON | st.dictionaries(FIELDS, JSON))
def test_a_state_is_of_the_right_types_or_refused(tmp_path, values):
    """Down to the groups that are read."""
    if isinstance(values, dict):
        values = {"format": 2} | values
    (tmp_path / "state.json").write_text(json.dumps(values))
    try:
        state = checkpoint.load_state(tmp_path)
    except CheckpointError as error:
        check_lines(error)
        return
    assert type(state.step) is int
    assert state.step >= 0
    assert {"model", "data", "trainer"} <= state.settings.keys()
