"""scripts/prepare_data.py and tokens/prepare.py: the shards hold tiktoken's ids, whoever did which
part of the work; what is refused, and how. Stopped and gone on with: test_prepare_stopped.py.

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
from helpers.refusals import SPECIAL_FILES, check_refusal, not_waiting
from helpers.texts import (
    SMALL,
    check_kept,
    check_manifest,
    collections,
    every_kind,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    packed,
    prepare,
    write_collection,
    write_source,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import ConfigError, DataError
from scripts.prepare_data import PrepareConfig, Progress, main
from tokens import END_OF_TEXT
from tokens import prepare as prepare_module
from tokens import sources as sources_module
from tokens.prepare import Preparation, Recipe, make_tasks
from tokens.shards import open_shards
from tokens.sources import find_files
from training.command import parse

many = settings(max_examples=100, deadline=None, derandomize=True)
some = settings(max_examples=30, deadline=None, derandomize=True)


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, out, err) of the command, run in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return every_kind(tmp_path_factory.mktemp("texts"))


# ------------------------------------------------------------------------------------------- tasks


@st.composite
def known_files(draw) -> list[tuple[str, object]]:
    """(name, what its size is): bytes, those of each row group, or the parts of a hub data set."""
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


@many
@given(known_files(), st.integers(1, 200), st.integers(1, 200))
@example([("0.txt", 0)], 1, 1)
@example([("0.parquet", [])], 1, 1)
@example([("0.parquet", [5]), ("hub:set1", 1), ("2.txt", 3)], 100, 100)
def test_tasks_cover_every_byte_once_and_in_order(files, smallest, shard_tokens):
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
        assert make_tasks([name for name, _ in files], "body", shard_tokens) == tasks
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
        end = len(size) if isinstance(size, list) else None  # None: to the file's end
        if own:
            assert own[0][0] == 0
            assert own[-1][1] == end
        assert all(one[1] == other[0] for one, other in itertools.pairwise(own))
        assert all(stop is None or start < stop for start, stop in own)
        assert len(own) == 1 or not name.endswith((".gz", ".zst"))

    def size_of(part):
        groups = known[part.path]
        if part.kind == "hub":
            return 0
        if part.kind == "parquet":
            return sum(groups[part.start : part.stop])
        return (sizes[part.path] if part.stop is None else part.stop) - part.start

    for task in tasks:
        assert task.size == sum(map(size_of, task.parts))
        assert sum(part.kind == "hub" for part in task.parts) <= 1
        if task.size > most:  # what cannot be divided
            (part,) = task.parts
            assert part.path.endswith((".gz", ".zst", ".parquet"))
            if part.kind == "parquet":
                assert task.size < most + known[part.path][part.stop - 1]
    for one, other in itertools.pairwise(tasks):  # no more tasks than need be
        assert one.size + size_of(other.parts[0]) > most or other.parts[0].kind == "hub"


@pytest.mark.parametrize(
    ("size", "shard_tokens", "count"),
    [
        (1000, 10**8, 1),
        (2**24, 10**8, 1),
        (2**24 + 1, 10**8, 2),
        (10**10, 10**8, 32),  # a large text: enough for many workers
        (10**12, 10**8, 2500),  # about a shard each: four bytes to a token
        (1000, 10, 25),
    ],
)
def test_how_many_tasks(size, shard_tokens, count, monkeypatch):
    monkeypatch.setattr(os.path, "getsize", lambda path: size)
    assert len(make_tasks(["a.txt"], "text", shard_tokens)) == count


# ----------------------------------------------------------------------------- the tokens are right


@some
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
def test_shards_hold_the_ids_of_each_document(
    collection, tokenizer, endoftext, engine, smallest, shard_tokens
):
    expected = expected_ids(in_order(collection), tokenizer, endoftext)
    recipe = {"tokenizer": tokenizer, "endoftext": endoftext, "engine": engine}
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(prepare_module, "SMALLEST_TASK", smallest),
        mock.patch("os.fsync"),  # for speed
    ):
        out = Path(name) / "out"
        path = write_collection(Path(name) / "texts", collection)
        if not expected:
            with pytest.raises(DataError, match="no text in any of the files"):
                prepare(path, out, **recipe, shard_tokens=shard_tokens)
            return
        manifest = prepare(path, out, **recipe, shard_tokens=shard_tokens)
        assert ids_of(out) == expected
        check_manifest(out, manifest, tokenizer, shard_tokens)
        texts = [t.removeprefix("\ufeff") if "txt" in k else t for k, ts in collection for t in ts]
        assert manifest["text_bytes"] == len("".join(texts).encode())
        assert manifest["endoftext"] == endoftext


def test_a_shard_that_is_written_in_several_goes(tmp_path):
    """Its documents are counted from its beginning."""
    text = (f"Line {10**9}: some words of it.\n" * 3000 + END_OF_TEXT) * 30
    manifest = prepare(write_source(tmp_path / "a.txt", [text]), tmp_path / "out", tokenizer="byte")
    assert len(manifest["shards"]) == 1
    assert manifest["tokens"] > 2 * 2**20
    check_manifest(tmp_path / "out", manifest, "byte", 10**8)


def test_a_preparation_from_the_command_line(command, tmp_path, texts):
    """By two processes, in many tasks of several shards; then again."""
    arguments = ["scripts.prepare_data", f"data.path={texts.folder}", "out=a/b", SMALL]
    done = command(*arguments, "workers=2")
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "a" / "b"
    assert ids_of(out) == texts.ids
    manifest = json.loads((out / "manifest.json").read_text())
    check_manifest(out, manifest, "gpt2", 100_000)
    tasks = {shard["file"][:11] for shard in manifest["shards"]}
    assert 10 <= len(tasks) < len(manifest["shards"])

    speed, counts, then = done.stdout.splitlines()
    assert speed.startswith(f"{manifest['text_bytes'] / 1e6:.1f} MB of text in ")
    numbers = [manifest["tokens"], manifest["documents"], len(manifest["shards"])]
    words = "{:,} tokens, {:,} documents, {} shards in a/b".format(*numbers)
    assert counts == words
    assert then == "train on them: python train.py data=shards data.path=a/b"

    before = files_of(tmp_path / "a")
    again = command(*arguments)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines() == ["a/b is complete already", counts, then]
    assert files_of(tmp_path / "a") == before


@pytest.mark.parametrize("entries", ["file", "glob", "list", "list of globs"])
def test_data_path_names_texts_in_every_way(here, tmp_path, entries):
    one = write_source(tmp_path / "one.txt", ["First, with a bell."])
    two = write_source(tmp_path / "two.jsonl", ["Second.", "Third."])
    names = {
        "file": str(one),
        "glob": f"{tmp_path}/*o*.*",
        "list": f"[{two},{one}]",
        "list of globs": f"[{tmp_path}/t*, {tmp_path}/on?.txt]",
    }
    known = [("txt", ["First, with a bell."]), ("jsonl", ["Second.", "Third."])]
    wanted = {"file": known[:1], "glob": known}.get(entries, known[::-1])
    code, out, _ = here(f"data.path={names[entries]}", "out=made")
    assert code == 0, out
    assert ids_of(tmp_path / "made") == expected_ids(wanted)


def test_the_text_may_be_under_another_key(here, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "One bell.", "text": 5}\n')
    table = pyarrow.table({"text": [1, 2], "body": ["Two bells.", "Three."]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    arguments = ["data.path=[a.jsonl,b.parquet]", "out=out"]
    assert here(*arguments, "data.text_key=body")[0] == 0
    known = [("jsonl", ["One bell."]), ("parquet", ["Two bells.", "Three."])]
    assert ids_of(tmp_path / "out") == expected_ids(known)
    code, _, errors = here(*arguments[:1], "out=other")
    assert code == 3
    check_refusal(errors, "data.path=a.jsonl", "has under 'text' what is of type int", "mend it")


def test_a_hub_data_set_is_prepared_part_by_part(tmp_path, monkeypatch):
    """A stand-in of three parts; the real ones need the network."""
    rows = [[{"text": f"Part {n}, row {row}."} for row in range(4)] for n in range(3)]
    asked = []

    def shard(num_shards, index):
        asked.append((num_shards, index))
        return rows[index]

    data_set = SimpleNamespace(num_shards=3, shard=shard)
    for module in (prepare_module, sources_module):
        monkeypatch.setattr(module, "hub_data", {"hub:some:thing": data_set}.get)
    path = write_source(tmp_path / "a.txt", ["A file besides."])
    prepare(["hub:some:thing", path], tmp_path / "out")
    assert asked == [(3, 0), (3, 1), (3, 2)]
    texts = [record["text"] for part in rows for record in part]
    assert ids_of(tmp_path / "out") == expected_ids([("hub", texts), ("txt", ["A file besides."])])


# ----------------------------------------------------------- the same, whoever did what of the work


def run_part(path: Path, folder: Path, i: int, n: int, recipe: Recipe) -> dict | None:
    """What `part=i/n` does; None while others have something to do."""
    preparation = Preparation(find_files(str(path)), folder, "text", recipe)
    if not preparation.begin():
        return json.loads((folder / "manifest.json").read_text())
    preparation.run(preparation.unfinished(i, n), 1, lambda count: None, (i, n))
    return preparation.finish()


@some
@given(st.data(), collections.filter(expected_ids), st.integers(1, 6), st.integers(10, 80))
def test_parts_in_any_order_make_the_same_files(draw, collection, n, smallest):
    """The last part to come writes the manifest; a part that comes twice changes nothing."""
    order = draw.draw(st.permutations(range(1, n + 1)))
    twice = draw.draw(st.lists(st.sampled_from(order), max_size=2))
    order = [*twice, *order, *twice]
    recipe = Recipe("gpt2", "token", "auto", 512, 10_000)
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(prepare_module, "SMALLEST_TASK", smallest),
        mock.patch("os.fsync"),
    ):
        path = write_collection(Path(name) / "texts", collection)
        whole, shared = Path(name) / "whole", Path(name) / "shared"
        run_part(path, whole, 1, 1, recipe)
        count = len(make_tasks(find_files(str(path)), "text", 10_000))
        for place, i in enumerate(order):
            needed = {number % n + 1 for number in range(count)}
            manifest = run_part(path, shared, i, n, recipe)
            assert (manifest is not None) == (needed <= set(order[: place + 1]))
        assert files_of(shared) == files_of(whole)


def test_any_number_of_processes_makes_the_same_files(command, tmp_path, texts):
    prepare(texts.folder, tmp_path / "one", shard_tokens=100_000)
    expected = files_of(tmp_path / "one")
    base = ["scripts.prepare_data", f"data.path={texts.folder}", SMALL, "engine=tiktoken"]
    for arguments in (
        ["out=three", "workers=3"],
        ["out=shared", "workers=2", "part=2/2"],
        ["out=shared", "workers=1", "part=1/2"],
    ):
        done = command(*base, *arguments)
        assert done.returncode == 0, done.stderr
    for name in ("three", "shared"):
        made = files_of(tmp_path / name)
        assert made.keys() == expected.keys()
        assert all(made[file] == content for file, content in expected.items())


def test_what_a_part_says(here, tmp_path):
    path = write_source(tmp_path / "a.txt", ["One bell rang, then two. " * 20])
    arguments = [f"data.path={path}", "out=made", "data.tokenizer=byte", "shard_tokens=50"]
    code, out, _ = here(*arguments, "part=2/2")
    assert code == 0
    assert out.splitlines()[-1] == "part 2/2 is done; 2 tasks of other parts are not yet"
    code, out, _ = here(*arguments, "part=2/2")
    assert out.splitlines() == [
        "going on: 1 of 1 tasks were done before",
        "part 2/2 is done; 2 tasks of other parts are not yet",
    ]
    code, out, _ = here(*arguments)  # the rest, by one
    assert out.splitlines()[0] == "going on: 1 of 3 tasks were done before"
    assert out.splitlines()[-1].endswith("data=shards data.path=made data.tokenizer=byte")


def two_at_once(tmp_path, monkeypatch):
    """Two preparations of one text into one folder, both machines giving the same process id."""
    path = write_source(tmp_path / "a.txt", ["Some words of a text. " * 20])
    recipe = Recipe("byte", "token", "auto", 512, 50)
    files = find_files(str(path))
    monkeypatch.setattr(os, "getpid", lambda: 7)  # containers tend to begin alike
    return [Preparation(files, tmp_path / "out", "text", recipe) for _ in range(2)]


def both_done(preparations):
    """Each has done its half, and none has finished yet."""
    for number, preparation in enumerate(preparations, 1):
        assert preparation.begin()
        preparation.run(preparation.unfinished(number, 2), 1, lambda count: None, (number, 2))
    return preparations


def at_the_first(monkeypatch, owner, name, happens) -> None:
    """At the first call of owner.name something else happens before."""
    real, done = getattr(owner, name), []

    def call(*arguments):
        if not done:
            done.append(1)
            happens()
        return real(*arguments)

    monkeypatch.setattr(owner, name, call)


def test_two_machines_may_begin_at_once(tmp_path, monkeypatch):
    one, other = two_at_once(tmp_path, monkeypatch)
    at_the_first(monkeypatch, os, "replace", other.begin)
    assert one.begin()


def test_two_parts_may_finish_at_once(tmp_path, monkeypatch):
    one, other = both_done(two_at_once(tmp_path, monkeypatch))
    at_the_first(monkeypatch, os, "replace", other.finish)
    manifest = one.finish()
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())


def test_a_part_knows_when_another_has_just_finished_all(tmp_path, monkeypatch):
    one, other = both_done(two_at_once(tmp_path, monkeypatch))
    at_the_first(monkeypatch, one, "_finished", other.finish)
    assert one.finish() == json.loads((tmp_path / "out" / "manifest.json").read_text())


def test_another_finishes_just_before_the_lock(here, tmp_path, monkeypatch):
    write_source(tmp_path / "a.txt", ["Some words of a text. " * 20])
    before, real = {}, Preparation.run

    def run(*args, **kwargs):
        monkeypatch.setattr(Preparation, "run", real)
        prepare(tmp_path / "a.txt", tmp_path / "out", shard_tokens=30)
        before.update(files_of(tmp_path / "out"))
        return real(*args, **kwargs)

    monkeypatch.setattr(Preparation, "run", run)
    code, _, errors = here("data.path=a.txt", "out=out", "shard_tokens=30")
    assert (code, errors) == (0, "")
    assert files_of(tmp_path / "out") == before


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        "data.path=other.txt",
        "data.path=[a.txt,other.txt]",
        "data.tokenizer=byte",
        "data.endoftext=text",
        "data.text_key=body",
        "shard_tokens=29",
    ],
)
def test_other_texts_or_settings_do_not_go_into_the_same_folder(here, tmp_path, change, complete):
    write_source(tmp_path / "a.txt", ["Some words of a text. " * 20])
    write_source(tmp_path / "other.txt", ["Some words of a test. " * 20])
    arguments = ["data.path=a.txt", "out=out", "shard_tokens=30"]
    assert here(*arguments, "part=1/1" if complete else "part=1/2")[0] == 0
    before = files_of(tmp_path / "out")
    assert ("manifest.json" in before) == complete
    code, _, errors = here(*arguments, change)
    assert code == 3
    cause = "was begun with other texts"
    if complete:
        cause = "holds the token files of other (or changed) texts"
        if change in ("data.tokenizer=byte", "data.endoftext=text"):
            before_it = {"byte": "gpt2", "text": "token"}[change.partition("=")[2]]
            cause = f"holds token files made with {change.partition('=')[0]}={before_it}"
    check_refusal(errors, "out=out", cause, "give another out=, or delete the folder")
    assert files_of(tmp_path / "out") == before


def test_a_text_that_changed_when_all_was_done_is_refused(here, tmp_path):
    path = write_source(tmp_path / "a.txt", ["Some words of a text. " * 20])
    assert here("data.path=a.txt", "out=out")[0] == 0
    before = files_of(tmp_path / "out")
    os.utime(path, ns=(1, 1))
    code, _, errors = here("data.path=a.txt", "out=out")
    assert code == 3
    check_refusal(
        errors, "out=out", "holds the token files of other (or changed) texts", "give another out="
    )
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("change", ["engine=tiktoken", "check_every=1", "debug=true", "part=2/2"])
def test_settings_that_change_no_token_may_change(here, tmp_path, change):
    write_source(tmp_path / "a.txt", ["Some words of a text. " * 20])
    arguments = ["data.path=a.txt", "out=out", "shard_tokens=30"]
    assert here(*arguments, "part=1/2")[0] == 0
    code, out, errors = here(*arguments, "part=2/2", change)
    assert (code, errors) == (0, "")
    assert "data=shards" in out
    assert ids_of(tmp_path / "out") == expected_ids([("txt", ["Some words of a text. " * 20])])


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"a"', '{"plan": null}', "{}"])
def test_a_manifest_of_something_else_is_refused(here, tmp_path, content):
    write_source(tmp_path / "a.txt", ["Some words."])
    write_source(tmp_path / "out" / "manifest.json", [content])
    code, _, errors = here("data.path=a.txt", "out=out")
    assert code == 3
    check_refusal(errors, "out=out", "", "give another out=, or delete the folder")
    assert files_of(tmp_path / "out") == {"manifest.json": content.encode()}


ARGUMENTS = ["data.path=a.txt", "out=out", "shard_tokens=30"]  # which makes four tasks


def begun(here, folder: Path, part: str = "1/2") -> Path:
    """The folder of a preparation that is not finished, or with part=1/1 is."""
    write_source(folder / "a.txt", ["Some words of a text. " * 20])
    assert here(*ARGUMENTS, f"part={part}")[0] == 0
    return folder / "out"


PLANS = {
    "not JSON": "{",
    "too deep": "[" * 100_000,
    "a list": '["plan"]',
    "text": '"plan"',
    "null": "null",
    "a number": "-1",
    **{
        f"plan is {value[:20]}": f'{{"plan": {value}}}'
        for value in ("null", "[]", "[1, {}]", "{}", "-1", "1e999", "9" * 4000, "true")
    },
    "no plan": "{}",
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_damaged_plan_is_refused(here, tmp_path, plan):
    path = begun(here, tmp_path) / "preparing" / "plan.json"
    path.write_text(PLANS[plan])
    for part in ("1/1", "2/2"):
        code, _, errors = here(*ARGUMENTS, f"part={part}")
        assert code == 3
        check_refusal(errors, "out=out", "preparing/plan.json", "")
        assert ("'plan'" in errors) == (PLANS[plan][0] == "{" and PLANS[plan] != "{")


RECORDS = {
    **{key: (key, value) for key in ("made_of", "text_bytes", "shards") for value in (None, {})},
    "made_of: a number": ("made_of", 5),
    "text_bytes: text": ("text_bytes", "5"),
    "text_bytes: true": ("text_bytes", True),
    "text_bytes: negative": ("text_bytes", -5),
    "shards: text": ("shards", ["a.bin"]),
    "shards: an empty one": ("shards", [{}]),
    "shards: more": ("shards", [{"file": "a.bin", "more": 1}]),
}
SHARDS = {
    **{f"{key}: null": (key, None) for key in ("file", "tokens", "documents", "sha256")},
    "file: another folder": ("file", "../a.bin"),
    "tokens: text": ("tokens", "5"),
    "documents: a fraction": ("documents", 1.5),
    "sha256: numbers": ("sha256", [5]),
    "documents_sha256: a list": ("documents_sha256", []),
}


@pytest.mark.parametrize(
    ("damage", "finished"),
    [
        *((damage, False) for damage in [*RECORDS, *SHARDS]),
        *((damage, True) for damage in RECORDS if damage.startswith("shards")),
        *((damage, True) for damage in SHARDS),
    ],
)
def test_a_damaged_record_or_manifest_is_refused(here, tmp_path, damage, finished):
    folder = begun(here, tmp_path, "1/1" if finished else "1/2")
    path = folder / ("manifest.json" if finished else "preparing/00000.json")
    record = json.loads(path.read_bytes())
    key, value = (RECORDS | SHARDS)[damage]
    (record if damage in RECORDS else record["shards"][0])[key] = value
    path.write_text(json.dumps(record))
    code, _, errors = here(*ARGUMENTS)
    assert code == 3
    check_refusal(errors, "out=out", path.relative_to(folder).as_posix(), "")
    assert key in errors


@pytest.mark.parametrize("counts", [{}, {"tokens": "5"}, {"documents": -1}])
def test_the_counts_of_a_complete_folder_are_those_of_its_shards(here, tmp_path, counts):
    folder = begun(here, tmp_path, "1/1")
    told = here(*ARGUMENTS)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["tokens"], manifest["documents"]
    (folder / "manifest.json").write_text(json.dumps(manifest | counts))
    assert here(*ARGUMENTS) == told
    assert told[0] == 0


@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", ["preparing/plan.json", "preparing/00000.json", "manifest.json"])
def test_what_is_no_regular_file_is_refused_at_once(here, tmp_path, kind, name):
    SPECIAL_FILES[kind](begun(here, tmp_path) / name)
    with not_waiting():
        code, _, errors = here(*ARGUMENTS)
    assert code == 3
    check_refusal(errors, "out=out", name, "")


def test_names_reach_the_terminal_without_control_characters(here, tmp_path):
    name = "a\x1b]0;title\x07\x9b2J\u202e\nb"
    write_source(tmp_path / f"{name} texts" / f"{name}.txt", ["Some words. " * 20])
    write_source(tmp_path / f"{name} texts" / f"{name}.md", ["Passed over."])
    for more in (["part=1/2"], ["part=2/2"], [], ["data.tokenizer=byte"]):
        code, out, errors = here(f"data.path={name} texts", f"out={name} out", *more)
        assert code == (3 if more == ["data.tokenizer=byte"] else 0), errors
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + errors)
        assert not re.search(r"^b", out + errors, re.MULTILINE)
        assert "\\x1b]0;title\\x07" in out + errors or more


def test_other_files_in_the_folder_stay(here, tmp_path):
    write_source(tmp_path / "a.txt", ["Some words."])
    write_source(tmp_path / "out" / "film.part-1.rar", ["mine"])
    write_source(tmp_path / "out" / "notes.txt", ["mine"])
    assert here("data.path=a.txt", "out=out")[0] == 0
    found = files_of(tmp_path / "out")
    assert found["notes.txt"] == b"mine"
    assert found["film.part-1.rar"] == b"mine"


@pytest.mark.parametrize("name", ["shard_00000_00.bin", "shard_7.bin", "fineweb_train_000001.bin"])
def test_a_folder_of_other_token_files_is_refused(here, tmp_path, name):
    write_source(tmp_path / "a.txt", ["Some words."])
    write_source(tmp_path / "out" / name, ["precious"])
    code, _, errors = here("data.path=a.txt", "out=out")
    assert code == 3
    check_refusal(errors, "out=out", "token files", "give another out=")
    assert files_of(tmp_path / "out") == {name: b"precious"}


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("nowhere.txt", "no such file"),
        ("nothing*.txt", "no such file"),
        ("[a.txt,nowhere.txt]", "no such file"),
        ("bare", "no *.txt, *.jsonl or *.parquet file in this folder"),
    ],
)
def test_texts_that_are_not_there(here, tmp_path, path, cause):
    write_source(tmp_path / "a.txt", ["Some words."])
    write_source(tmp_path / "bare" / "image.png", ["x"])
    code, out, errors = here(f"data.path={path}", "out=out")
    assert (code, out) == (3, "")
    named = "nowhere.txt" if "nowhere" in path else path
    check_refusal(errors, f"data.path={named}", cause, "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "texts", "key", "cause"),
    [
        ("a.txt", [""], "data.path=a.txt", "the file is empty"),
        ("a.jsonl", ["", ""], "out=out", "no text in any of the files"),
        ("a.jsonl", [], "out=out", "no text in any of the files"),
        ("a.parquet", [""], "out=out", "no text in any of the files"),
        ("a.parquet", [], "out=out", "no text in any of the files"),
        ("a.txt.gz", ["\ufeff"], "out=out", "no text in any of the files"),
    ],
)
def test_nothing_to_read_is_refused_and_can_be_mended(here, tmp_path, name, texts, key, cause):
    write_source(tmp_path / name, texts)
    code, out, errors = here(f"data.path={name}", "out=out")
    assert code == 3
    assert "tokens" not in out
    check_refusal(errors, key, cause, "")
    assert not (tmp_path / "out" / "manifest.json").exists()
    write_source(tmp_path / name, ["Now there is a text."])
    code, _, errors = here(f"data.path={name}", "out=out")
    assert (code, errors) == (0, "")
    assert ids_of(tmp_path / "out") == expected_ids([(name, ["Now there is a text."])])


BAD = [f"Text {n}, some words of it.\n" * 3000 for n in range(6)]


def write_bad(folder: Path) -> int:
    """Six texts, in the third of which a byte is not UTF-8; its place."""
    for number, text in enumerate(BAD):
        write_source(folder / f"{number}.txt", [text])
    raw = bytearray((folder / "2.txt").read_bytes())
    place = len(raw) // 2 + 11
    raw[place] = 0xE9
    (folder / "2.txt").write_bytes(raw)
    return place


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_byte_is_named_by_its_place(command, tmp_path, workers):
    place = write_bad(tmp_path / "web")
    arguments = ["data.path=web", "out=out", "shard_tokens=9000", f"workers={workers}"]
    done = command("scripts.prepare_data", *arguments)
    assert done.returncode == 3
    cause, fix = f"not UTF-8 (0xe9 at byte {place})", "convert it: iconv -f LATIN1"
    check_refusal(done.stderr, "data.path=web/2.txt", cause, fix)
    assert not (tmp_path / "out" / "manifest.json").exists()
    write_source(tmp_path / "web" / "2.txt", [BAD[2]])
    done = command("scripts.prepare_data", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    check_manifest(tmp_path / "out", manifest, "gpt2", 9000)
    assert ids_of(tmp_path / "out") == expected_ids([("txt", [text]) for text in BAD])


def test_a_mended_file_is_no_reason_to_begin_anew(here, tmp_path):
    write_bad(tmp_path / "web")
    arguments = ["data.path=web", "out=out", "shard_tokens=20000"]
    assert here(*arguments)[0] == 3
    kept = finished_shards(tmp_path / "out")
    assert kept  # those of the files before it
    write_source(tmp_path / "web" / "2.txt", [BAD[2]])
    code, _, errors = here(*arguments)
    assert (code, errors) == (0, "")
    check_kept(tmp_path / "out", kept)
    assert ids_of(tmp_path / "out") == expected_ids([("txt", [text]) for text in BAD])


@pytest.mark.parametrize("share", [0.3, 1, 1.2])
def test_a_text_that_changes_meanwhile_is_prepared_again(here, tmp_path, share):
    """The others are not; and of one that became shorter no shard is left."""
    collection = [("txt", [f"Text {n}, some words of it. " * 300]) for n in range(5)]
    write_collection(tmp_path / "web", collection)
    arguments = ["data.path=web", "out=out", "data.tokenizer=byte", "shard_tokens=2500"]
    assert here(*arguments, "part=1/2")[0] == 0
    before = finished_shards(tmp_path / "out")
    assert {name[:11] for name in before} == {"shard_00000", "shard_00002", "shard_00004"}
    text = f"Other words, {share} times as many. " * int(share * 240)
    collection[4] = ("txt", [text])  # the third that is read
    write_source(tmp_path / "web" / "0" / "04.txt", [text])
    code, out, errors = here(*arguments)
    assert (code, errors) == (0, "")
    assert out.startswith("going on: 2 of 5 tasks were done before")
    kept = {name: known for name, known in before.items() if not name.startswith("shard_00002")}
    assert 0 < len(kept) < len(before)
    check_kept(tmp_path / "out", kept)
    assert ids_of(tmp_path / "out") == expected_ids(in_order(collection), "byte")
    check_manifest(
        tmp_path / "out", json.loads((tmp_path / "out/manifest.json").read_text()), "byte", 2500
    )


def test_nothing_is_left_of_tasks_that_there_are_no_more(here, tmp_path):
    path = write_source(tmp_path / "a.txt", ["Some words of a long text. " * 300])
    arguments = ["data.path=a.txt", "out=out", "shard_tokens=300"]
    assert here(*arguments, "part=1/2")[0] == 0
    assert len(finished_shards(tmp_path / "out")) > 4
    write_source(path, ["A few words."])
    assert here(*arguments)[0] == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    check_manifest(tmp_path / "out", manifest, "gpt2", 300)
    assert ids_of(tmp_path / "out") == expected_ids([("txt", ["A few words."])])


def test_a_text_that_changes_and_changes_back(here, tmp_path, monkeypatch):
    path = write_source(tmp_path / "a.txt", ["Some words of a text."])
    write_source(tmp_path / "b.txt", ["More words."])
    arguments = ["data.path=*.txt", "out=out", "shard_tokens=6"]
    assert here(*arguments, "part=1/2")[0] == 0
    path.rename(tmp_path / "old")
    write_source(path, ["Four words of a text."])
    with monkeypatch.context() as patch:

        def stop(*_args):
            raise KeyboardInterrupt

        patch.setattr(prepare_module, "_record", stop)  # the shard is there, its record is not
        patch.setattr(Preparation, "_finished", lambda self, task: False)
        assert here(*arguments, "part=1/2")[0] == 130
    (tmp_path / "old").rename(path)
    assert here(*arguments)[0] == 0
    open_shards(str(tmp_path / "out"), "gpt2", verify=True)
    assert ids_of(tmp_path / "out") == expected_ids(
        [("txt", ["Some words of a text."]), ("txt", ["More words."])]
    )


def test_where_the_tokenizers_differ_nothing_is_finished(here, tmp_path, monkeypatch):
    """A gigatoken that takes another way from the second task on."""
    text = "Some words of a text. " * 200
    path = write_source(tmp_path / "a.txt", [text])
    real, made = prepare_module.StreamEncoder, []

    def encoder(*args, **kwargs):
        found = real(*args, **kwargs)
        made.append(found)
        if len(made) == 2:
            right = found._encode
            found._encode = lambda text: np.append(right(text)[:-1], 7)
        return found

    arguments = [f"data.path={path}", "out=out", "shard_tokens=500"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "StreamEncoder", encoder)
        code, _, errors = here(*arguments, "engine=gigatoken")
    assert code == 3
    assert {name[:11] for name in finished_shards(tmp_path / "out")} == {"shard_00000"}
    assert not list((tmp_path / "out").glob("shard_00001*"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    _, second, third = np.linspace(0, len(text), 4).astype(int)[:3]
    begin, end = (text.index(" ", place) for place in (second, third))
    cause = f"gigatoken and tiktoken disagree on the text from byte {begin} to {end}"
    check_refusal(errors, f"data.path={path}", cause, "prepare it with engine=tiktoken")
    assert here(*arguments, "engine=tiktoken")[0] == 0
    assert ids_of(tmp_path / "out") == expected_ids([("txt", [text])])


# ----------------------------------------------------------------------------------------- settings


def test_settings_as_they_are_given():
    given = parse(PrepareConfig, ["data.path=a b,c", "out=x y", "data.endoftext=text", "workers=3"])
    assert (given.data.path, given.out, given.workers) == ("a b,c", "x y", 3)
    assert (given.data.tokenizer, given.data.endoftext, given.part) == ("gpt2", "text", "1/1")
    listed = parse(PrepareConfig, ["data.path=[a.txt,web/*.gz]", "out=1", "part=2/16"])
    assert listed.data.path == ["a.txt", "web/*.gz"]
    assert (listed.out, listed.part) == ("1", "2/16")
    for text in ("hub:name:config:train", "[a", "a]", "~/a", "web/**/*.jsonl", "'a'", "null", "3"):
        assert parse(PrepareConfig, [f"data.path={text}", "out=x"]).data.path == text


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("data.pth=a", "data.pth=a: no such setting; did you mean data.path?"),
        ("data.token=a", "data.token=a: no such setting; did you mean data.tokenizer?"),
        ("dat.path=a", "dat.path=a: no such setting; did you mean data.path?"),
        ("text_key=a", "text_key=a: no such setting; did you mean data.text_key?"),
        ("shard_token=1", "shard_token=1: no such setting; did you mean shard_tokens?"),
        ("data.workers=2", "data.workers=2: no such setting; did you mean workers?"),
        (
            "data.zzz=1",
            "data.zzz=1: no such setting; data has path, tokenizer, text_key, endoftext",
        ),
        ("zzz=1", "zzz=1: no such setting; --help lists all settings"),
        ("data=a.txt", "data=a.txt: no such setting; --help lists all settings"),
        ("a.txt", "a.txt: is not of the form key=value; write key=value without blanks"),
        ("+out=a", "+out=a: is not of the form key=value; "),
        ("data.path=", "data.path=: no text given; set data.path=FILE"),
        ("data.path=[]", "data.path=[]: no text given; set data.path=FILE"),
        ("data.path=[[a]]", "data.path=[['a']]: must be text or a list of texts; "),
        ("data.tokenizer=words", "data.tokenizer=words: no such tokenizer; use gpt2 or byte"),
        ("data.endoftext=no", "data.endoftext=no: no such choice; use token or text"),
        ("out=", "out=: no folder given; set out=DIR"),
        ("part=0/4", "part=0/4: is to be i/n, i from 1 to n; such as part=1/4"),
        ("part=5/4", "part=5/4: is to be i/n, i from 1 to n; such as part=1/4"),
        ("part=x", "part=x: is to be i/n, i from 1 to n; such as part=1/4"),
        ("part=1", "part=1: is to be i/n, i from 1 to n; such as part=1/4"),
        ("part=-1/4", "part=-1/4: is to be i/n, i from 1 to n; such as part=1/4"),
        ("part=0/0", "part=0/0: is to be i/n, i from 1 to n; such as part=1/4"),
        ("workers=-1", "workers=-1: must be 0 to 1024; use 0 for all cores"),
        ("workers=all", "workers=all: must be a whole number; such as 0"),
        ("workers=1.5", "workers=1.5: must be a whole number; such as 0"),
        ("workers=[1,2]", "workers=[1, 2]: must be a whole number; such as 0"),
        ("shard_tokens=0", "shard_tokens=0: must be from 1 to 2^31 - 1"),
        ("shard_tokens=2147483648", "shard_tokens=2147483648: must be from 1 to 2^31 - 1"),
        ("engine=fast", "engine=fast: no such engine; use auto, gigatoken or tiktoken"),
        ("check_every=0", "check_every=0: must be at least 1; use 128"),
        ("debug=maybe", "debug=maybe: must be true or false; such as false"),
    ],
)
def test_each_mistake_is_one_line(argument, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse(PrepareConfig, ["data.path=a.txt", "out=x", argument])
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("typed", "meant"), [("path", "data.path"), ("data.out", "out")])
def test_the_right_word_in_the_wrong_group(typed, meant):
    with pytest.raises(ConfigError, match=f"^{typed}=a: no such setting; did you mean {meant}[?]$"):
        parse(PrepareConfig, ["data.path=a.txt", "out=x", f"{typed}=a"])


def test_every_mistake_is_named_at_once():
    arguments = ["data.path=a", "data.tokenizer=words", "out=x", "part=9/3", "workers=all"]
    arguments += ["data.endoftext=5", "ou=x"]
    with pytest.raises(ConfigError) as caught:
        parse(PrepareConfig, arguments)
    lines = str(caught.value).splitlines()
    keys = ["data.tokenizer=words", "data.endoftext=5", "part=9/3", "workers=all", "ou=x"]
    assert sorted(line.partition(":")[0] for line in lines) == sorted(keys)


def test_what_is_missing_is_named(here):
    code, out, errors = here()
    assert (code, out) == (2, "")
    assert errors.splitlines() == [
        "data.path: missing; give it as data.path=...",
        "out: missing; give it as out=...",
    ]


def test_out_is_a_file(here, tmp_path):
    write_source(tmp_path / "a.txt", ["Some words."])
    write_source(tmp_path / "b.txt", ["Other words."])
    code, _, errors = here("data.path=a.txt", "out=b.txt")
    assert code == 2
    check_refusal(errors, "out=b.txt", "is a file", "give a folder")
    code, _, errors = here("data.path=a.txt", "out=b.txt/below")
    assert code == 2
    check_refusal(errors, "out=b.txt/below", "cannot be written (Not a directory)", "give another")
    assert (tmp_path / "b.txt").read_text() == "Other words."


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_tells_of_every_setting(here, flag):
    code, out, _ = here("data.pth=1", flag)
    assert code == 0
    usage, blank, *lines = out.splitlines()
    assert usage == "python -m scripts.prepare_data data.path=TEXTS out=DIR [KEY=VALUE ...]"
    assert blank == ""
    names = ["data.path", "data.tokenizer", "data.text_key", "data.endoftext"]
    names += [field.name for field in dataclasses.fields(PrepareConfig)][1:]
    assert [line.split()[0] for line in lines] == names
    assert len({line[:17].rstrip() + line[17:18] for line in lines}) == len(lines)  # a column each
    told = dict(zip(names, lines, strict=True))
    assert told["data.path"].endswith("[required]")
    assert told["out"].endswith("the folder of the token files  [required]")
    assert told["data.tokenizer"].endswith("gpt2 | byte  [gpt2]")
    assert told["shard_tokens"].endswith("tokens in a file at most  [100000000]")
    assert told["debug"].endswith("[false]")


def test_debug_shows_the_traceback(command, tmp_path):
    done = command("scripts.prepare_data", "data.path=nowhere", "out=x", "debug=true")
    assert done.returncode == 3
    assert done.stderr.startswith("Traceback")
    assert "DataError: data.path=nowhere: no such file" in done.stderr


# ----------------------------------------------------------------------------------------- progress


def test_progress_is_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(40_000_000) as progress:
        for now[0], done in ((105, 5e6), (110, 10e6), (119, 15e6), (120, 20e6), (131, 60e6)):
            progress.show(int(done))
        assert progress.done == 60_000_000
    assert capsys.readouterr().out.splitlines() == [
        "10 MB of 40, 1.0 MB/s, about 30 s left",
        "20 MB of 40, 1.0 MB/s, about 20 s left",
        "60 MB of 40, 1.9 MB/s, about 0 s left",
    ]


@pytest.mark.parametrize("total", [0, 40_000_000])
def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys, total):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress(total) as progress:
        progress.show(0)
        progress.show(30_000_000)
        progress.show(60_000_000)
    assert progress.done == 60_000_000
    assert progress.bar.tasks[0].completed == progress.bar.tasks[0].total == 60_000_000


# ------------------------------------------------------------------------------------------- memory

PEAK = """
import re, sys
from scripts.prepare_data import main
try:
    main()
finally:
    print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def made_up(size: int, words: int) -> bytes:
    """Words of letters as they come, so many of them, over and over; 0: no two alike."""
    chance = np.random.default_rng(0)
    letters = chance.integers(ord("a"), ord("z"), min(size, words * 6 or size), np.uint8)
    letters[chance.random(len(letters)) < 1 / 6] = ord(" ")
    letters[:: len(letters) // 100] = ord("\n")
    return (letters.tobytes() * (size // len(letters) + 1))[:size]


@pytest.mark.parametrize(("words", "sizes"), [(0, (4, 20)), (10_000, (10, 50))])
def test_memory_stays_flat_however_long_the_text(tmp_path, command, words, sizes):
    """A compressed file, which is one task whatever its size."""
    write_source(tmp_path / "peak.py", [PEAK])
    path = os.pathsep.join(map(str, (tmp_path, NO_NETWORK, REPOSITORY)))
    peaks = []
    for size in sizes:
        file = tmp_path / f"{size}.txt.zst"
        file.write_bytes(packed(made_up(size * 10**6, words), file))
        done = command("peak", f"data.path={file}", f"out=out{size}", PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1000)
    assert 30 < peaks[1] < peaks[0] + 50, peaks  # megabytes


def test_after_a_mistake_the_mended_command_begins_anew(here, tmp_path):
    write_source(tmp_path / "a.jsonl", ["Some words."])
    code, _, errors = here("data.path=a.jsonl", "data.text_key=body", "out=out")
    assert code == 3
    check_refusal(errors, "data.path=a.jsonl", "no text under 'body'", "set data.text_key")
    assert here("data.path=a.jsonl", "out=out")[0] == 0
    assert ids_of(tmp_path / "out") == expected_ids([("jsonl", ["Some words."])])


def test_source_code_is_left_alone(tmp_path, in_process):
    """Such as this repository's own tokens/."""
    (tmp_path / "my.txt").write_text("a text")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "__init__.py").write_text("")
    arguments = ["data.path=my.txt", "out=tokens", "data.tokenizer=byte"]
    code, _, err = in_process(main, tmp_path, *arguments)
    assert (code, err) == (3, "out=tokens: holds source code; give another out=\n")
    assert [file.name for file in (tmp_path / "tokens").iterdir()] == ["__init__.py"]
