"""scripts/prepare_data.py and tokens/prepare.py: the shards contain tiktoken's ids, for any number
of processes. Interrupted preparations: tests/faults/test_prepare_stopped.py.
"""

import functools
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import texts
from helpers.refusals import printed_keys, refused
from helpers.tally import trials
from helpers.texts import (
    check_kept,
    check_manifest,
    collections,
    expected_ids,
    files_of,
    finished_shards,
    ids_of,
    in_order,
    numbers_in,
    peak_memory,
    varied_text,
    write_collection,
    write_packed,
    write_source,
)
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, records
from clearhead.tokens import prepare as module
from scripts.prepare_data import main

few = trials(12, 200)
# Shards have 30 tokens unless a test sets another number.
preparation = functools.partial(texts.preparation, shard_tokens=30)
prepare = functools.partial(texts.prepare, shard_tokens=30)
prepare_half = functools.partial(texts.prepare_half, shard_tokens=30)

TEXT = "Some words of a text. " * 20  # four tasks with shards of 30 tokens


@pytest.fixture
def here(in_process, tmp_path):
    """here(*arguments) -> (exit code, out, err) of the command; it runs in this process."""
    return functools.partial(in_process, main, tmp_path, "workers=1")


@few
@given(
    collections.filter(expected_ids),
    st.sampled_from(["gpt2", "byte"]),
    st.integers(8, 200),
    st.integers(5, 500),
)
@example([("txt", ["a" * 500 + "\n" + " " * 300]), ("txt", ["b"])], "gpt2", 8, 90)
@example([("txt", ["日本語" * 90 + END_OF_TEXT * 9])], "byte", 10, 7)
@example([("jsonl", ["", "a", "", END_OF_TEXT + "b"])], "gpt2", 8, 5)
@example([("jsonl", ["a" * 9, "b"] * 9), ("parquet", ["a", "b"] * 9)], "gpt2", 8, 90)
def test_shards_hold_the_ids_of_each_document(collection, tokenizer, smallest, shard_tokens):
    expected = expected_ids(in_order(collection), tokenizer)
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(module, "MIN_TASK_BYTES", smallest),
        mock.patch("os.fsync"),  # for speed
    ):
        out = Path(name) / "out"
        path = write_collection(Path(name) / "texts", collection)
        manifest = prepare(path, out, tokenizer=tokenizer, shard_tokens=shard_tokens)
        assert ids_of(out) == expected
        check_manifest(out, manifest, tokenizer, shard_tokens)


def test_command_with_two_processes(command, here, tmp_path):
    """It writes the same files as one process. A second call changes nothing."""
    kinds = ["txt", "jsonl", "txt.gz", "parquet", "jsonl.zst"]
    collection = [(kind, [varied_text(60_000, number)]) for number, kind in enumerate(kinds)]
    write_collection(tmp_path / "web", collection)
    manifest = prepare(tmp_path / "web", tmp_path / "one", shard_tokens=10_000)
    arguments = ["data.path=web", "out=a/b", "shard_tokens=10000"]
    done = command("scripts.prepare_data", *arguments, "workers=2")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "a" / "b"
    assert ids_of(out) == expected_ids(in_order(collection))
    check_manifest(out, manifest, "gpt2", 10_000)
    assert files_of(out) == files_of(tmp_path / "one")
    counts = {f"{manifest[key]:,}" for key in ("tokens", "documents")}
    code, printed, _ = here(*arguments)
    assert code == 0
    assert counts <= set(done.stdout.split()) & set(printed.split())
    assert files_of(out) == files_of(tmp_path / "one")


def test_data_set_of_the_hub_is_prepared_in_its_parts(tmp_path, monkeypatch):
    """A fake dataset of three parts; real ones need the network."""
    rows = [[{"text": f"Part {n}, row {row}."} for row in range(4)] for n in range(3)]
    data_set = SimpleNamespace(num_shards=3)
    data_set.shard = lambda num_shards, index: {3: rows}[num_shards][index]
    monkeypatch.setattr(records, "load_hub_dataset", {"hub:some:thing": data_set}.get)
    path = write_source(tmp_path / "a.txt", ["And a file."])
    prepare(["hub:some:thing", str(path)], tmp_path / "out")
    documents = [record["text"] for part in rows for record in part]
    assert ids_of(tmp_path / "out") == expected_ids([("hub", documents), ("txt", ["And a file."])])


def test_other_texts_or_settings_are_refused(tmp_path, subtests):
    path = write_source(tmp_path / "a.txt", [TEXT])
    other = str(write_source(tmp_path / "other.txt", [TEXT.replace("text", "test")]))
    others = [{"path": [str(path), other]}, {"tokenizer": "byte"}]
    others += [{"text_key": "body"}, {"shard_tokens": 29}, {"trim": False}]
    for make in (prepare, prepare_half):  # a complete preparation and an incomplete one
        out = tmp_path / make.func.__name__
        make(path, out)
        before = files_of(out)
        for changes in others:
            with subtests.test(out=out, **changes), refused(DataError, "out", out, 3):
                prepare(**{"path": path, "folder": out} | changes)
            assert files_of(out) == before
        prepare(path, out)  # the same is completed
        assert ids_of(out) == expected_ids([("txt", [TEXT])])
    os.utime(path, ns=(1, 1))  # a changed file
    with refused(DataError, "out", out, 3):
        prepare(path, out)


@pytest.mark.parametrize("size", [None, 0, 1030])
def test_missing_or_truncated_shard_is_made_again(tmp_path, size):
    """If the folder was complete, this is an error: a run may be training on it."""
    path, out = write_source(tmp_path / "a.txt", [TEXT]), tmp_path / "out"
    prepare(path, tmp_path / "whole")
    prepare_half(path, out)
    for number in (1, 2):  # an incomplete preparation and a complete one
        shard = out / "shard_00000_00.bin"
        if size is None:
            shard.unlink()
        else:
            os.truncate(shard, size)
        if number == 2:
            with refused(DataError, "out", out, 3):
                prepare(path, out)
            break
        prepare(path, out)
        assert files_of(out) == files_of(tmp_path / "whole")


def test_shards_of_a_longer_text_do_not_stay(tmp_path):
    """The file is replaced when half of its tasks are done."""
    path, out = write_source(tmp_path / "a.txt", [TEXT]), tmp_path / "out"
    prepare_half(path, out, first=1)
    assert (out / "shard_00003_00.bin").exists()
    write_source(path, ["A few words."])
    check_manifest(out, prepare(path, out), "gpt2", 30)


def test_other_token_files_in_the_folder_are_not_changed(here, tmp_path):
    write_source(tmp_path / "a.txt", [TEXT])
    out = tmp_path / "fineweb"
    write_source(out / "fineweb_train_000001.bin", ["mine"])
    with refused(DataError, "out", out, 3):
        prepare(tmp_path / "a.txt", out)
    assert files_of(out) == {"fineweb_train_000001.bin": b"mine"}
    for out in ("a.txt", "a.txt/below"):
        code, _, errors = here("data.path=a.txt", f"out={out}")
        assert (code, printed_keys(errors)) == (2, ["out"])


def test_empty_texts_are_refused(tmp_path, subtests):
    empty = {"a.txt": [""], "a.jsonl": ["", ""], "a.parquet": [], "a.txt.gz": ["\ufeff"]}
    for name, documents in empty.items():
        out = tmp_path / f"{name}-out"
        path = write_source(tmp_path / name, documents)
        with subtests.test(name), refused(DataError, "out", out, 3):
            prepare(path, out)


def test_bad_byte_is_reported_with_its_position(tmp_path):
    """A worker process finds the error, and the command prints it."""
    web, out = tmp_path / "web", tmp_path / "out"
    raw = b"A text, some words of it.\n" * 600
    write_packed(web / "1.txt", raw)
    write_packed(web / "2.txt", raw[:7811] + b"\xe9" + raw[7811:])
    with refused(DataError, "data.path", web / "2.txt", 3) as caught:
        prepare(web, out, workers=2, shard_tokens=2000)
    assert {7811, 0xE9} <= numbers_in(caught.value)
    assert not (out / "manifest.json").exists()


def test_a_wrong_key_leaves_only_finished_tasks(tmp_path):
    """In a first line it is found before any file is tokenized."""
    web, out = tmp_path / "web", tmp_path / "out"
    lines = [json.dumps({"text": TEXT}) + "\n"] * 9
    write_packed(web / "1.jsonl", "".join(lines))
    for position in (0, 8):
        write_packed(web / "2.jsonl", "".join([*lines[:position], '{"content": ""}\n', *lines]))
        with refused(DataError, "data.path", web / "2.jsonl", 3):
            prepare(web, out, tokenizer="byte", shard_tokens=200)
        assert out.exists() == (position > 0)
    assert {path.name for path in out.glob("*.bin")} == {*finished_shards(out)} != set()


def test_text_that_changes_during_preparation_is_prepared_again(tmp_path):
    """Other files are not."""
    collection = [("txt", [f"Text {n}, some words of it. " * 300]) for n in range(5)]
    web, out = write_collection(tmp_path / "web", collection), tmp_path / "out"
    recipe = {"tokenizer": "byte", "shard_tokens": 2500}
    prepare_half(web, out, **recipe)
    before = finished_shards(out)
    text = "Other words, and fewer. " * 100
    collection[4] = ("txt", [text])  # the third file
    write_source(web / "0" / "04.txt", [text])
    manifest = prepare(web, out, **recipe)
    kept = {name: known for name, known in before.items() if not name.startswith("shard_00002")}
    assert 0 < len(kept) < len(before)
    check_kept(out, kept)
    assert ids_of(out) == expected_ids(in_order(collection), "byte")
    check_manifest(out, manifest, "byte", 2500)


def test_text_that_changes_after_its_task_is_refused(tmp_path):
    path, out = write_source(tmp_path / "a.txt", [TEXT]), tmp_path / "out"
    made = preparation(path, out)
    made.start()
    with refused(DataError, "data.path", path, 3):
        made.run(1, lambda done, total: os.utime(path, ns=(done, done)))
    assert not (out / "manifest.json").exists()
    prepare(path, out)
    assert ids_of(out) == expected_ids([("txt", [TEXT])])


def test_invalid_settings_are_refused(here):
    """All problems are reported together, each with its key."""
    code, out, errors = here("data.path=a", "data.tokenizer=words", "workers=-1", "ou=x", "out=x")
    assert (code, out) == (2, "")
    assert sorted(printed_keys(errors)) == ["data.tokenizer", "ou", "workers"]


def test_memory_does_not_grow_with_the_text(tmp_path):
    """A compressed file of any size is one task."""
    path = write_packed(tmp_path / "a.txt.zst", b"Some words of a text.\n" * 2**21)  # 46 MB
    recipe = {"tokenizer": "byte", "shard_tokens": 10**8}
    manifest, peak = peak_memory(lambda: prepare(path, tmp_path / "out", **recipe))
    assert manifest["tokens"] == 1 + 22 * 2**21
    assert peak < 2e7
