"""scripts/prepare_data.py and tokens/prepare.py: the shards hold tiktoken's ids, whichever process
does which part of the work. Interrupted preparations: tests/faults/test_prepare_stopped.py.

Needs no network.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import NO_NETWORK, REPOSITORY
from helpers.refusals import SPECIAL_FILES, not_waiting, printed_keys, refused
from helpers.tally import CAMPAIGN
from helpers.texts import (
    check_kept,
    check_manifest,
    collections,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    packed,
    varied_text,
    write_collection,
    write_source,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import ConfigError, DataError
from scripts.prepare_data import PrepareConfig, Progress, main
from tokens import END_OF_TEXT, encoding
from tokens import prepare as prepare_module
from tokens import sources as sources_module
from tokens.prepare import Preparation, Recipe, make_tasks
from tokens.shards import open_shards
from tokens.sources import find_files
from training.command import parse

some = settings(max_examples=300 if CAMPAIGN else 25, deadline=None, derandomize=True)
few = settings(max_examples=100 if CAMPAIGN else 10, deadline=None, derandomize=True)

TEXT = "Some words of a text. " * 20  # four tasks of 30 tokens a shard
ARGUMENTS = ["data.path=a.txt", "out=out", "shard_tokens=30"]


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, out, err) of the command, run in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


def preparation(path: object, folder: Path, text_key: str = "text", **changes) -> Preparation:
    values = {"tokenizer": "gpt2", "endoftext": "token", "engine": "auto", "check_every": 512}
    recipe = Recipe(**values | {"shard_tokens": 30} | changes)
    files = find_files(path if isinstance(path, list) else str(path))
    return Preparation(files, folder, text_key, recipe)


def prepare(path: object, folder: Path, i: int = 1, n: int = 1, workers: int = 1, **changes):
    """What the command does with part=i/n: the manifest; None while other parts are missing."""
    made = preparation(path, folder, **changes)
    if made.begin():
        made.run(made.unfinished(i, n), workers, lambda count: None, (i, n))
    return made.finish()


# ------------------------------------------------------------------------------------------- tasks


@st.composite
def known_files(draw) -> list[tuple[str, object]]:
    """(name, size): bytes, those of each row group, or the parts of a data set of the hub."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["txt", "jsonl", "txt.gz", "jsonl.zst", "parquet", "hub"]))
        if kind == "hub":
            found.append((f"hub:set{number}", draw(st.integers(1, 4))))
        elif kind == "parquet":
            groups = draw(st.lists(st.integers(1, 300), max_size=6))
            found.append((f"{number}.parquet", groups))
        else:
            found.append((f"{number}.{kind}", draw(st.integers(0, 2000))))
    return found


@some
@given(known_files(), st.integers(1, 200), st.integers(1, 200))
@example([("0.txt", 0)], 1, 1)
@example([("0.parquet", [])], 1, 1)
@example([("0.parquet", [5]), ("hub:set1", 1), ("2.txt", 3)], 100, 100)
def test_tasks_cover_every_byte_once_in_order(files, smallest, shard_tokens):
    sizes = {name: sum(size) if isinstance(size, list) else size for name, size in files}
    sizes |= {name: 0 for name in sizes if name.startswith("hub:")}
    known = dict(files)
    with (
        mock.patch.object(prepare_module, "SMALLEST_TASK", smallest),
        mock.patch.object(prepare_module.os.path, "getsize", sizes.get),
        mock.patch.object(prepare_module, "row_groups", known.get),
        mock.patch.object(
            prepare_module, "hub_data", lambda n: SimpleNamespace(num_shards=known[n])
        ),
    ):
        tasks = make_tasks([name for name, _ in files], "body", shard_tokens)
    most = min(max(smallest, sum(sizes.values()) // 32), 4 * shard_tokens)

    assert [task.number for task in tasks] == list(range(len(tasks)))
    parts = [part for task in tasks for part in task.parts]
    assert {part.text_key for part in parts} <= {"body"}
    empty = {name for name, size in files if size == []}
    assert [name for name, _ in itertools.groupby(part.path for part in parts)] == [
        name for name, _ in files if name not in empty
    ]
    for name, size in files:
        own = [(part.start, part.stop) for part in parts if part.path == name]
        if name.startswith("hub:"):
            assert own == [(number, size) for number in range(size)]
            continue
        end = len(size) if isinstance(size, list) else None  # None: to the end of the file
        if own:
            assert own[0][0] == 0
            assert own[-1][1] == end
        assert all(one[1] == other[0] for one, other in itertools.pairwise(own))
        assert all(stop is None or start < stop for start, stop in own)
        assert len(own) == 1 or not name.endswith((".gz", ".zst"))

    def size_of(part):
        if part.kind == "hub":
            return 0
        if part.kind == "parquet":
            return sum(known[part.path][part.start : part.stop])
        return (sizes[part.path] if part.stop is None else part.stop) - part.start

    for task in tasks:
        assert task.size == sum(map(size_of, task.parts))
        assert sum(part.kind == "hub" for part in task.parts) <= 1
        if task.size > most:  # what cannot be divided
            (part,) = task.parts
            assert part.path.endswith((".gz", ".zst", ".parquet"))
            if part.kind == "parquet":
                assert task.size < most + known[part.path][part.stop - 1]
    for one, other in itertools.pairwise(tasks):  # no more tasks than necessary
        assert one.size + size_of(other.parts[0]) > most or other.parts[0].kind == "hub"


def test_number_of_tasks(monkeypatch):
    for size, shard_tokens, count in (
        (2**24, 10**8, 1),
        (2**24 + 1, 10**8, 2),
        (10**10, 10**8, 32),  # a large text: enough for many workers
        (10**12, 10**8, 2500),  # about a shard each: four bytes per token
        (1000, 10, 25),
    ):
        monkeypatch.setattr(os.path, "getsize", lambda path, size=size: size)
        assert len(make_tasks(["a.txt"], "text", shard_tokens)) == count


# ---------------------------------------------------------------------------------------- contents


@few
@given(
    collections,
    st.sampled_from(["gpt2", "byte"]),
    st.sampled_from(["token", "text"]),
    st.sampled_from(["auto", "gigatoken", "tiktoken"]),
    st.integers(8, 200),
    st.integers(5, 500),
)
@example([("txt", ["a" * 500 + "\n" + " " * 300]), ("txt", ["b"])], "gpt2", "token", "auto", 8, 90)
@example([("txt", ["日本語" * 90 + END_OF_TEXT * 9])], "byte", "text", "auto", 10, 7)
@example([("jsonl", ["", "a", "", END_OF_TEXT + "b"])], "gpt2", "token", "auto", 8, 5)
@example([("jsonl", [""])], "gpt2", "token", "auto", 8, 5)
def test_shards_hold_the_ids_of_each_document(
    collection, tokenizer, endoftext, engine, smallest, shard_tokens
):
    expected = expected_ids(in_order(collection), tokenizer, endoftext)
    recipe = {"tokenizer": tokenizer, "endoftext": endoftext, "engine": engine}
    recipe["shard_tokens"] = shard_tokens
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(prepare_module, "SMALLEST_TASK", smallest),
        mock.patch("os.fsync"),  # for speed
    ):
        out = Path(name) / "out"
        path = write_collection(Path(name) / "texts", collection)
        if not expected:
            with refused(DataError, "out", out):
                prepare(path, out, **recipe)
            return
        manifest = prepare(path, out, **recipe)
        assert ids_of(out) == expected
        check_manifest(out, manifest, tokenizer, shard_tokens)
        texts = [t.removeprefix("\ufeff") if "txt" in k else t for k, ts in collection for t in ts]
        assert manifest["text_bytes"] == len("".join(texts).encode())
        assert manifest["endoftext"] == endoftext


def test_command_with_two_processes(command, here, tmp_path):
    """It makes the same files as one process does. Run again, it changes nothing."""
    kinds = ["txt", "jsonl", "txt.gz", "parquet", "jsonl.zst", "txt.zst"]
    texts = [varied_text(60_000, number) for number in range(6)]
    split = [[t] if "txt" in kind else t.split("\n") for kind, t in zip(kinds, texts, strict=True)]
    collection = list(zip(kinds, split, strict=True))
    write_collection(tmp_path / "web", collection)
    manifest = prepare(tmp_path / "web", tmp_path / "one", shard_tokens=10_000, engine="tiktoken")
    arguments = ["data.path=web", "out=a/b", "shard_tokens=10000"]
    done = command("scripts.prepare_data", *arguments, "workers=2")
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "a" / "b"
    assert ids_of(out) == expected_ids(in_order(collection))
    check_manifest(out, manifest, "gpt2", 10_000)
    tasks = {shard["file"][:11] for shard in manifest["shards"]}
    assert 7 <= len(tasks) < len(manifest["shards"])
    before = files_of(out)
    assert before == files_of(tmp_path / "one")
    counts = {f"{manifest[key]:,}" for key in ("tokens", "documents")}
    assert {*counts, f"{len(manifest['shards'])}"} <= set(done.stdout.split())
    assert f"{manifest['text_bytes'] / 1e6:.1f} MB" in done.stdout
    # The counts are those of the shards.
    for changed in ({}, {"tokens": "5"}, {"documents": -1}):
        (out / "manifest.json").write_text(json.dumps(manifest | changed))
        code, printed, errors = here(*arguments)
        assert (code, errors) == (0, "")
        assert counts <= set(printed.split())
    assert files_of(out) == before | {"manifest.json": json.dumps(manifest | changed).encode()}


def test_text_key(here, tmp_path):
    """A preparation that failed because of it does not prevent the next one."""
    (tmp_path / "a.jsonl").write_text('{"body": "One bell.", "text": 5}\n')
    table = pyarrow.table({"text": [1, 2], "body": ["Two bells.", "Three."]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    arguments = ["data.path=[a.jsonl,b.parquet]", "out=out"]
    for more in ([], ["data.text_key=other"]):
        code, _, errors = here(*arguments, *more)
        assert (code, printed_keys(errors)) == (3, ["data.path"])
    assert here(*arguments, "data.text_key=body")[0] == 0
    known = [("jsonl", ["One bell."]), ("parquet", ["Two bells.", "Three."])]
    assert ids_of(tmp_path / "out") == expected_ids(known)


def test_data_set_of_the_hub_is_prepared_in_its_parts(tmp_path, monkeypatch):
    """A stand-in of three parts; the real ones need the network."""
    rows = [[{"text": f"Part {n}, row {row}."} for row in range(4)] for n in range(3)]
    asked = []

    def shard(num_shards, index):
        asked.append((num_shards, index))
        return rows[index]

    data_set = SimpleNamespace(num_shards=3, shard=shard)
    for module in (prepare_module, sources_module):
        monkeypatch.setattr(module, "hub_data", {"hub:some:thing": data_set}.get)
    path = write_source(tmp_path / "a.txt", ["And a file."])
    prepare(["hub:some:thing", str(path)], tmp_path / "out")
    assert asked == [(3, 0), (3, 1), (3, 2)]
    texts = [record["text"] for part in rows for record in part]
    assert ids_of(tmp_path / "out") == expected_ids([("hub", texts), ("txt", ["And a file."])])


# ----------------------------------------------------------------------- parts, by several machines


@few
@given(st.data(), collections.filter(expected_ids), st.integers(1, 6), st.integers(10, 80))
def test_parts_in_any_order_make_the_same_files(draw, collection, n, smallest):
    """The last part writes the manifest. A part that is done twice changes nothing."""
    order = draw.draw(st.permutations(range(1, n + 1)))
    twice = draw.draw(st.lists(st.sampled_from(order), max_size=2))
    order = [*twice, *order, *twice]
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(prepare_module, "SMALLEST_TASK", smallest),
        mock.patch("os.fsync"),
    ):
        path = write_collection(Path(name) / "texts", collection)
        whole, shared = Path(name) / "whole", Path(name) / "shared"
        prepare(path, whole, shard_tokens=10_000)
        count = len(make_tasks(find_files(str(path)), "text", 10_000))
        needed = {number % n + 1 for number in range(count)}
        for place, i in enumerate(order):
            manifest = prepare(path, shared, i, n, shard_tokens=10_000)
            assert (manifest is not None) == (needed <= set(order[: place + 1]))
        assert files_of(shared) == files_of(whole)


@pytest.mark.parametrize(
    ("owner", "name", "method"),
    [(os, "replace", "begin"), (os, "replace", "finish"), (prepare_module, "read_json", "finish")],
)
def test_two_machines_at_once(tmp_path, monkeypatch, owner, name, method):
    """Another begins or finishes the same folder just before this one writes or reads a file."""
    path = write_source(tmp_path / "a.txt", [TEXT])
    monkeypatch.setattr(os, "getpid", lambda: 7)  # process ids of containers are often equal
    one, other = (preparation(path, tmp_path / "out") for _ in range(2))
    if method == "finish":
        for number, made in enumerate((one, other), 1):
            assert made.begin()
            made.run(made.unfinished(number, 2), 1, lambda count: None, (number, 2))
    real, done = getattr(owner, name), []

    def call(*arguments):
        if not done:
            done.append(1)
            getattr(other, method)()
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)
    result = getattr(one, method)()
    assert done
    if method == "finish":
        assert result == json.loads((tmp_path / "out" / "manifest.json").read_text())


def test_another_process_finishes_before_the_lock_is_taken(tmp_path):
    path, out = write_source(tmp_path / "a.txt", [TEXT]), tmp_path / "out"
    made = preparation(path, out)
    assert made.begin()
    tasks = made.unfinished()
    manifest = prepare(path, out)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    made.run(tasks, 1, lambda count: None)
    assert made.finish() == manifest
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


# ------------------------------------------------------------------------ the folder and its files


def test_other_texts_or_settings_are_refused(tmp_path, subtests):
    path = write_source(tmp_path / "a.txt", [TEXT])
    other = str(write_source(tmp_path / "other.txt", [TEXT.replace("text", "test")]))
    for n in (1, 2):  # complete, and begun
        out = tmp_path / f"out{n}"
        manifest = prepare(path, out, 1, n)
        assert (manifest is not None) == (n == 1)
        before = files_of(out)
        for changed, changes in (
            (other, {}),
            ([str(path), other], {}),
            (path, {"tokenizer": "byte"}),
            (path, {"endoftext": "text"}),
            (path, {"text_key": "body"}),
            (path, {"shard_tokens": 29}),
        ):
            with subtests.test(n=n, path=changed, **changes), refused(DataError, "out", out, 3):
                prepare(changed, out, **changes)
            assert files_of(out) == before
        # Settings that change no token may change.
        prepare(path, out, 2, 2, engine="tiktoken", check_every=1)
        assert ids_of(out) == expected_ids([("txt", [TEXT])])
    os.utime(path, ns=(1, 1))  # a changed text
    with refused(DataError, "out", out, 3):
        prepare(path, out)


NOT_OBJECTS = ("", "{", "[" * 100_000, '["plan"]', "null", "-1", "{}")
BAD_PLANS = ("null", "[1, {}]", "{}", "1e999", "9" * 4000, "true")
BAD_RECORDS = {
    "made_of": (None, 5),
    "text_bytes": (None, "5", True, -5),
    "shards": (None, {}, ["a.bin"], [{}], [{"file": "a.bin", "more": 1}]),
}
BAD_SHARDS = {
    "file": (None, "../a.bin"),
    "tokens": (None, "5"),
    "documents": (None, 1.5),
    "sha256": (None, [5]),
    "documents_sha256": ([],),
}


def damaged(sound: dict, keys: tuple[str, ...]):
    """A record or manifest with one value that is wrong."""
    for key in keys:
        for value in BAD_RECORDS[key]:
            yield json.dumps(sound | {key: value})
    for key, values in BAD_SHARDS.items():
        for value in values:
            shard = sound["shards"][0] | {key: value}
            yield json.dumps(sound | {"shards": [shard, *sound["shards"][1:]]})


def test_damaged_files_of_a_preparation_are_refused(tmp_path, subtests):
    path = write_source(tmp_path / "a.txt", [TEXT])
    begun, complete, other = (tmp_path / name for name in ("begun", "complete", "other"))
    prepare(path, begun, 1, 2)
    prepare(path, complete)
    other.mkdir()
    record, manifest = begun / "preparing/00000.json", complete / "manifest.json"
    records = damaged(json.loads(record.read_text()), tuple(BAD_RECORDS))
    manifests = damaged(json.loads(manifest.read_text()), ("shards",))
    plans = [f'{{"plan": {plan}}}' for plan in BAD_PLANS]
    for file, contents in (
        (begun / "preparing/plan.json", [*NOT_OBJECTS, *plans]),
        (record, records),
        (manifest, manifests),
        (other / "manifest.json", [*NOT_OBJECTS, *plans]),
    ):
        folder = begun if begun in file.parents else file.parent
        whole = file.read_text() if file.exists() else None
        for content in contents:
            file.write_text(content)
            with subtests.test(file.name, content=content[:99]):
                with refused(DataError, "out", folder, 3) as caught:
                    prepare(path, folder)
                assert folder == other or file.name in caught.value.reason
        assert file.read_text() == content
        if whole:
            file.write_text(whole)
    for kind, replace in SPECIAL_FILES.items():
        for name in ("preparing/plan.json", "preparing/00000.json", "manifest.json"):
            out = tmp_path / kind / name.replace("/", "_")
            prepare(path, out, 1, 2)
            replace(out / name)
            with subtests.test(kind, name=name), not_waiting(), refused(DataError, "out", out, 3):
                prepare(path, out)


def test_control_characters_in_names_are_escaped(here, tmp_path):
    name = "a\x1b]0;title\x07\x9b2J\u202e\nb"
    write_source(tmp_path / f"{name} texts" / f"{name}.txt", ["Some words. " * 20])
    write_source(tmp_path / f"{name} texts" / f"{name}.md", ["Skipped."])
    for more in (["part=1/2"], ["part=2/2"], [], ["data.tokenizer=byte"]):
        code, out, errors = here(f"data.path={name} texts", f"out={name} out", *more)
        assert code == (3 if more == ["data.tokenizer=byte"] else 0), errors
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + errors)
        assert not re.search(r"^b", out + errors, re.MULTILINE)
        assert "\\x1b]0;title\\x07" in out + errors or more


def test_other_files_in_the_folder(here, tmp_path, subtests):
    """They stay as they are. Token files of another origin and source code are refused."""
    write_source(tmp_path / "a.txt", ["Some words."])
    other = {"film.part-1.rar": b"mine", "notes.txt": b"mine"}
    for name in other:
        write_source(tmp_path / "out" / name, ["mine"])
    prepare(tmp_path / "a.txt", tmp_path / "out")
    assert other.items() <= files_of(tmp_path / "out").items()
    for name in ("shard_00000_00.bin", "shard_7.bin", "fineweb_train_000001.bin", "__init__.py"):
        out = tmp_path / name.replace(".", "_")
        write_source(out / name, ["mine"])
        with subtests.test(name), refused(DataError, "out", out, 3):
            prepare(tmp_path / "a.txt", out)
        assert files_of(out) == {name: b"mine"}
    for out in ("a.txt", "a.txt/below"):
        code, _, errors = here("data.path=a.txt", f"out={out}")
        assert (code, printed_keys(errors)) == (2, ["out"])
    assert (tmp_path / "a.txt").read_text() == "Some words."


# ------------------------------------------------------------------------------- texts with errors


def test_missing_and_empty_texts_are_refused(tmp_path, subtests):
    for path in ("nowhere.txt", "nothing*.txt"):
        with refused(DataError, "data.path", tmp_path / path, 3):
            prepare(tmp_path / path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for number, (name, texts) in enumerate(
        (
            ("a.txt", [""]),
            ("a.jsonl", ["", ""]),
            ("a.jsonl", []),
            ("a.parquet", [""]),
            ("a.parquet", []),
            ("a.txt.gz", ["\ufeff"]),
        )
    ):
        out = tmp_path / f"out{number}"
        path = write_source(tmp_path / name, texts)
        key, value = ("data.path", path) if name == "a.txt" else ("out", out)
        with subtests.test(name, texts=texts):
            with refused(DataError, key, value, 3):
                prepare(path, out)
            assert not (out / "manifest.json").exists()
            write_source(path, ["Now there is a text."])
            prepare(path, out)
            assert ids_of(out) == expected_ids([(name, ["Now there is a text."])])


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_byte_is_reported_with_its_position(tmp_path, workers):
    """Once it is corrected, the shards of the files before it are kept."""
    collection = [("txt", [f"Text {n}, some words of it.\n" * 300]) for n in range(4)]
    web, out = tmp_path / "web", tmp_path / "out"
    for number, (_, texts) in enumerate(collection):
        write_source(web / f"{number}.txt", texts)
    raw = bytearray((web / "2.txt").read_bytes())
    place = len(raw) // 2 + 11
    raw[place] = 0xE9
    (web / "2.txt").write_bytes(raw)
    with refused(DataError, "data.path", web / "2.txt", 3) as caught:
        prepare(web, out, workers=workers, shard_tokens=2000)
    assert {str(place), "0xe9"} <= set(re.findall(r"\w+", caught.value.reason))
    assert not (out / "manifest.json").exists()
    kept = finished_shards(out)
    assert kept or workers == 2
    write_source(web / "2.txt", collection[2][1])
    manifest = prepare(web, out, shard_tokens=2000)
    check_kept(out, kept)
    check_manifest(out, manifest, "gpt2", 2000)
    assert ids_of(out) == expected_ids(collection)


@pytest.mark.parametrize("share", [0.3, 1, 1.2])
def test_text_that_changes_during_preparation_is_prepared_again(tmp_path, share):
    """The others are not. No shard is left of one that became shorter."""
    collection = [("txt", [f"Text {n}, some words of it. " * 300]) for n in range(5)]
    web, out = write_collection(tmp_path / "web", collection), tmp_path / "out"
    recipe = {"tokenizer": "byte", "shard_tokens": 2500}
    prepare(web, out, 1, 2, **recipe)
    before = finished_shards(out)
    assert {name[:11] for name in before} == {"shard_00000", "shard_00002", "shard_00004"}
    text = f"Other words, {share} times as many. " * int(share * 240)
    collection[4] = ("txt", [text])  # the third that is read
    write_source(web / "0" / "04.txt", [text])
    manifest = prepare(web, out, **recipe)
    kept = {name: known for name, known in before.items() if not name.startswith("shard_00002")}
    assert 0 < len(kept) < len(before)
    check_kept(out, kept)
    assert ids_of(out) == expected_ids(in_order(collection), "byte")
    check_manifest(out, manifest, "byte", 2500)


def test_text_with_fewer_tasks_leaves_no_shards_of_the_longer_one(tmp_path):
    path = write_source(tmp_path / "a.txt", [TEXT])
    prepare(path, tmp_path / "out", 1, 2)
    assert len(finished_shards(tmp_path / "out")) > 2
    write_source(path, ["A few words."])
    check_manifest(tmp_path / "out", prepare(path, tmp_path / "out"), "gpt2", 30)
    assert ids_of(tmp_path / "out") == expected_ids([("txt", ["A few words."])])


def test_text_that_changes_and_changes_back(tmp_path, monkeypatch):
    """Stopped between a shard of the changed text and its record."""
    path, out = write_source(tmp_path / "a.txt", ["Some words of a text."]), tmp_path / "out"
    write_source(tmp_path / "b.txt", ["More words."])
    prepare(f"{tmp_path}/*.txt", out, 1, 2, shard_tokens=6)
    path.rename(tmp_path / "old")
    write_source(path, ["Four words of a text."])
    os.utime(path, ns=(1, 1))
    real = prepare_module.write_whole

    def stop(file, content):
        if file.name == "00000.json":
            raise KeyboardInterrupt
        real(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_whole", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(f"{tmp_path}/*.txt", out, 1, 2, shard_tokens=6)
    (tmp_path / "old").rename(path)
    prepare(f"{tmp_path}/*.txt", out, shard_tokens=6)
    open_shards(str(out), "gpt2", verify=True)
    texts = ["Some words of a text."], ["More words."]
    assert ids_of(out) == expected_ids([("txt", text) for text in texts])


def test_task_whose_tokenizers_disagree_is_not_finished(tmp_path, monkeypatch):
    """A gigatoken that is wrong from the second task on."""
    text = TEXT * 10
    path, out = write_source(tmp_path / "a.txt", [text]), tmp_path / "out"
    real, made = encoding.gigatoken, []

    def gigatoken(special):
        made.append(special)
        if len(made) == 1:
            return real(special)
        return SimpleNamespace(encode=lambda text: np.append(real(special).encode(text)[:-1], 7))

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "gigatoken", gigatoken)
        with refused(DataError, "data.path", path, 3) as caught:
            prepare(path, out, engine="gigatoken", shard_tokens=500)
    _, second, third = np.linspace(0, len(text), len(text) // 2000 + 2).astype(int)[:3]
    places = {str(text.index(" ", place)) for place in (second, third)}
    assert places <= set(re.findall(r"\d+", caught.value.reason))
    assert "engine=tiktoken" in caught.value.hint
    assert {name[:11] for name in finished_shards(out)} == {"shard_00000"}
    assert not list(out.glob("shard_00001*"))
    assert not (out / "manifest.json").exists()
    prepare(path, out, engine="tiktoken", shard_tokens=500)
    assert ids_of(out) == expected_ids([("txt", [text])])


# ---------------------------------------------------------------------------------------- settings


def test_settings_are_taken_as_they_are_given():
    given = parse(PrepareConfig, ["data.path=a b,c", "out=x y", "data.endoftext=text", "workers=3"])
    assert (given.data.path, given.out, given.workers) == ("a b,c", "x y", 3)
    assert (given.data.tokenizer, given.data.endoftext, given.part) == ("gpt2", "text", "1/1")
    listed = parse(PrepareConfig, ["data.path=[a.txt,web/*.gz]", "out=1", "part=2/16"])
    assert (listed.data.path, listed.out, listed.part) == (["a.txt", "web/*.gz"], "1", "2/16")
    for text in ("hub:name:config:train", "[a", "a]", "~/a", "web/**/*.jsonl", "'a'", "null", "3"):
        assert parse(PrepareConfig, [f"data.path={text}", "out=x"]).data.path == text


def test_each_mistake_is_refused(subtests):
    """With the key, and where a similar one exists, with that one as a hint."""
    unknown = {"data.pth": "data.path", "text_key": "data.text_key", "data.out": "out", "zzz": ""}
    for key, meant in unknown.items():
        with subtests.test(key), refused(ConfigError, key, "a", 2) as caught:
            parse(PrepareConfig, ["data.path=a.txt", "out=x", f"{key}=a"])
        assert re.search(rf"\b{meant}\b", caught.value.hint)
    for argument in ("a.txt", "+out=a"):  # not key=value
        with subtests.test(argument), refused(ConfigError, argument, exit_code=2):
            parse(PrepareConfig, ["data.path=a.txt", "out=x", argument])
    for key, values in {
        "data": ("a.txt",),
        "data.path": ("", "[]", "[[a]]"),
        "data.tokenizer": ("words",),
        "data.endoftext": ("no",),
        "out": ("",),
        "part": ("0/4", "5/4", "x", "1"),
        "workers": ("-1", "all", "[1,2]"),
        "shard_tokens": ("0", "2147483648"),
        "engine": ("fast",),
        "check_every": ("0",),
        "debug": ("maybe",),
    }.items():
        for value in values:
            with subtests.test(key, value=value), refused(ConfigError, key, exit_code=2):
                parse(PrepareConfig, ["data.path=a.txt", "out=x", f"{key}={value}"])


def test_every_mistake_is_reported_at_once(here):
    arguments = ["data.path=a", "data.tokenizer=words", "out=x", "part=9/3", "workers=all"]
    code, out, errors = here(*arguments, "data.endoftext=5", "ou=x")
    assert (code, out) == (2, "")
    keys = ["data.endoftext", "data.tokenizer", "ou", "part", "workers"]
    assert sorted(printed_keys(errors)) == keys
    assert printed_keys(here()[2]) == ["data.path", "out"]  # missing


def test_help_lists_every_setting(here):
    code, out, _ = here("data.pth=1", "--help")
    assert code == 0
    names = ["data.path", "data.tokenizer", "data.text_key", "data.endoftext"]
    names += [field.name for field in dataclasses.fields(PrepareConfig)][1:]
    lines = {line.split()[0]: line.split()[-1] for line in out.splitlines()[2:]}
    assert list(lines) == names
    assert (lines["data.tokenizer"], lines["debug"]) == ("[gpt2]", "[false]")


def test_progress_lines(monkeypatch, capsys):
    """Megabytes, speed and seconds left, every ten seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(40_000_000) as progress:
        for now[0], done in ((105, 5e6), (110, 10e6), (119, 15e6), (120, 20e6), (131, 60e6)):
            progress.show(int(done))
        assert progress.done == 60_000_000
    lines = [re.findall(r"[\d.]+", line) for line in capsys.readouterr().out.splitlines()]
    expected = [["10", "40", "1.0", "30"], ["20", "40", "1.0", "20"], ["60", "40", "1.9", "0"]]
    assert lines == expected


@pytest.mark.parametrize("total", [0, 40_000_000])
def test_progress_bar_on_a_terminal(monkeypatch, capsys, total):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress(total) as progress:
        for done in (0, 30_000_000, 60_000_000):
            progress.show(done)
    assert progress.done == 60_000_000
    assert progress.bar.tasks[0].completed == progress.bar.tasks[0].total == 60_000_000


# ------------------------------------------------------------------------------------------ memory

PEAK = """
import re, sys
from scripts.prepare_data import main
for name in sys.argv[1:]:
    sys.argv[1:] = [f"data.path={name}.txt.zst", f"out=out{name}", "workers=1"]
    main()
    print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def test_memory_does_not_grow_with_the_text(tmp_path, command):
    """A compressed file is one task, whatever its size. Its words are random and do not recur."""
    write_source(tmp_path / "peak.py", [PEAK])
    chance = np.random.default_rng(0)
    for size in (3, 12):  # megabytes
        letters = chance.integers(ord("a"), ord("z"), size * 10**6, np.uint8)
        letters[chance.random(len(letters)) < 1 / 6] = ord(" ")
        letters[:: len(letters) // 100] = ord("\n")
        file = tmp_path / f"{size}.txt.zst"
        file.write_bytes(packed(letters.tobytes(), file))
    path = os.pathsep.join(map(str, (tmp_path, NO_NETWORK, REPOSITORY)))
    done = command("peak", "3", "12", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    peaks = [int(peak) / 1000 for peak in re.findall(r"peak (\d+)", done.stdout)]  # megabytes
    assert 30 < peaks[1] < peaks[0] + 50, peaks
