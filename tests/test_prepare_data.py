"""scripts/prepare_data.py and tokens/prepare.py: the shards hold tiktoken's ids, whoever did which
part of the work, however often it was stopped; and training on them is training on the texts.

Run: python -m pytest tests/test_prepare_data.py. CAMPAIGN_KILLS=20 before it kills that often.
"""

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import REPOSITORY, TEXT, TINY
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts.prepare_data import PrepareConfig, Progress, main
from tokens import END_OF_TEXT, DataError
from tokens import prepare as prepare_module
from tokens import sources as sources_module
from tokens.prepare import Preparation, Recipe, make_tasks
from tokens.shards import HEADER_BYTES, open_shards
from tokens.sources import find_files
from tokens.stream import BLOCK_BYTES
from tokens.tokenizers import TOKENIZERS, get_tokenizer
from training.command import parse
from training.config import ConfigError

KILLS = int(os.environ.get("CAMPAIGN_KILLS", "6"))
NO_NETWORK = REPOSITORY / "tests" / "no_network"
PATIENCE = 60  # seconds until a test gives up waiting; nothing is expected to take so long

many = settings(max_examples=100, deadline=None, derandomize=True)
some = settings(max_examples=30, deadline=None, derandomize=True)


# -------------------------------------------------------------------------------- what is prepared

FRAGMENTS = [
    *" \n\r\t\x0b\x1c\x85\u00a0\u2028\u3000\u200b\ufeff",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", "the", "Naïve", "don't", "we'll", "'s", "'", "1234"),
    *("日本語", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "e\u0301", "a" * 40, " " * 40),
    *(END_OF_TEXT, "<|endof", "text|>"),
]
mixes = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=40).map("".join)
# A text file is one document, neither empty nor with a zero byte; the others hold any number.
a_text = mixes.map(lambda text: [text.replace("\0", "") or "x"])
kinds = st.sampled_from(["txt", "txt.gz", "txt.zst"])
row_kinds = st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "parquet"])
sources = st.tuples(kinds, a_text) | st.tuples(row_kinds, st.lists(mixes, max_size=5))
collections = st.lists(sources, min_size=1, max_size=5)


def write_source(path: Path, texts: list[str]) -> Path:
    """A file of these documents, of the kind and compression that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
        return path
    content = "".join(texts)
    if path.name.split(".")[1] in ("jsonl", "ndjson"):
        content = "".join(json.dumps({"n": n, "text": t}) + "\n" for n, t in enumerate(texts))
    path.write_bytes(packed(content.encode(), path))
    return path


def packed(raw: bytes, path: Path) -> bytes:
    """The content of a file, compressed as its name says."""
    if path.suffix == ".gz":
        return gzip.compress(raw, 1, mtime=0)
    return pyarrow.compress(raw, "zstd", asbytes=True) if path.suffix == ".zst" else raw


def write_collection(folder: Path, collection: list[tuple[str, list[str]]]) -> Path:
    """A folder of files, whose sorted order is that of the list."""
    for number, (kind, texts) in enumerate(collection):
        write_source(folder / f"{number % 2}" / f"{number:02d}.{kind}", texts)
    return folder


def in_order(collection: list) -> list:
    """The order in which a folder of two folders is read."""
    return [*collection[::2], *collection[1::2]]


def expected_ids(collection: list, tokenizer: str = "gpt2", endoftext: str = "token") -> list[int]:
    """One call of tiktoken for each document, each behind an end-of-text token."""
    known = get_tokenizer(tokenizer)
    special = {END_OF_TEXT} if endoftext == "token" else set()
    ids = []
    for kind, texts in collection:
        for text in texts:
            text = text.removeprefix("\ufeff") if "txt" in kind else text
            own = known.encode(text, allowed_special=special, disallowed_special=())
            if own and own[0] != known.eot_token:
                ids.append(known.eot_token)
            ids += own
    return ids


def varied_text(size: int, seed: int = 0) -> str:
    """Lines of made-up words, numbers and documents, no two stretches alike."""
    chance = random.Random(seed)
    letters = ["etaoinshrdlucmfwypvbgkjqxz", "αβγδεζηθ", "あいうえお"]
    words = [
        "".join(chance.choices(chance.choice(letters), k=chance.randint(1, 9))) for _ in range(3000)
    ]
    lines, length = [], 0
    while length < size:
        line = " ".join(chance.choices(words, k=40)) + f", {chance.random()}.\n"
        lines.append(line if chance.random() > 0.05 else line + END_OF_TEXT)
        length += len(lines[-1])
    return "".join(lines)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of every kind of text, enough for a dozen tasks of `SMALL`."""
    chance = random.Random(1)
    collection = []
    for number, kind in enumerate(["txt", "jsonl", "txt.gz", "parquet", "jsonl.zst", "txt.zst"]):
        text = varied_text(900_000 if kind in ("txt", "jsonl") else 300_000, number)
        if "txt" not in kind:
            cuts = sorted(chance.sample(range(len(text)), 200))
            text = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        collection.append((kind, [text] if isinstance(text, str) else text))
    folder = write_collection(tmp_path_factory.mktemp("texts") / "web", collection)
    return SimpleNamespace(folder=folder, ids=expected_ids(in_order(collection)))


SMALL = "shard_tokens=100000"  # which makes tasks of 400 kB


# ------------------------------------------------------------------------------------ preparing it


def prepare(path: object, folder: Path, **recipe) -> dict:
    """Prepares in this process, all of it; the manifest."""
    values = {"tokenizer": "gpt2", "endoftext": "token", "engine": "auto", "check_every": 512}
    values |= {"shard_tokens": 10**8} | recipe
    path = [str(p) for p in path] if isinstance(path, list) else str(path)
    preparation = Preparation(find_files(path), folder, "text", Recipe(**values))
    assert preparation.begin()
    preparation.run(preparation.unfinished(), 1, lambda count: None)
    return preparation.finish()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ids_of(folder: Path) -> list[int]:
    """The ids of all shards, in the manifest's order, read without any code of ours."""
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    raw = [(folder / shard["file"]).read_bytes()[HEADER_BYTES:] for shard in shards]
    return np.frombuffer(b"".join(raw), "<u2").tolist()


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """here(*arguments) -> (exit code, out, err) of the command, run in this process."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["prepare_data", "workers=1", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def start(tmp_path):
    """start(*arguments) -> the command as a process that goes on, with a group of its own."""
    started = []

    def run(*arguments, path=(), **options):
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        path = [*path, NO_NETWORK, REPOSITORY]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
        }
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.prepare_data", *map(str, arguments)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in group_of(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def group_of(process: subprocess.Popen) -> list[int]:
    """The processes that a command started, itself too, as far as they live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
                continue
            if int(group) == process.pid and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(happens, process: subprocess.Popen | None = None) -> None:
    """Waits for something that is certain to come; the process has to be alive when it does."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_refusal(error: str, key: str, cause: str, fix: str) -> None:
    """One line `key=value: cause; fix`."""
    assert error.count("\n") == 1
    assert error.startswith(f"{key}: ")
    told_cause, _, told_fix = error.removeprefix(f"{key}: ").partition("; ")
    assert cause in told_cause
    assert fix in told_fix


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


def check_manifest(folder: Path, manifest: dict, tokenizer: str, shard_tokens: int) -> None:
    """It says what is there, and nothing else is."""
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    end_of_text = TOKENIZERS[tokenizer] - 1
    assert (manifest["tokenizer"], manifest["vocab_size"]) == (tokenizer, end_of_text + 1)
    stream = open_shards(str(folder), tokenizer, verify=True)["train"]
    assert manifest["tokens"] == len(stream) == sum(s["tokens"] for s in manifest["shards"])
    starts = np.flatnonzero(np.array(ids_of(folder)) == end_of_text)
    assert stream.document_starts().tolist() == starts.tolist()
    assert manifest["documents"] == len(starts) == sum(s["documents"] for s in manifest["shards"])
    assert all(1 <= shard["tokens"] <= shard_tokens for shard in manifest["shards"])
    named = {shard["file"] for shard in manifest["shards"]}
    beside = {Path(file).with_suffix(".documents").name for file in named}
    assert {path.name for path in folder.iterdir()} == named | beside | {"manifest.json"}


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
    one, other = two_at_once(tmp_path, monkeypatch)
    for preparation, i in ((one, 1), (other, 2)):
        assert preparation.begin()
        preparation.run(preparation.unfinished(i, 2), 1, lambda count: None, (i, 2))
    at_the_first(monkeypatch, os, "replace", other.finish)
    manifest = one.finish()
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())


def test_a_part_knows_when_another_has_just_finished_all(tmp_path, monkeypatch):
    one, other = two_at_once(tmp_path, monkeypatch)
    for preparation, i in ((one, 1), (other, 2)):
        assert preparation.begin()
        preparation.run(preparation.unfinished(i, 2), 1, lambda count: None, (i, 2))
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


# ------------------------------------------------------------------------------ stopped and gone on


def finished_shards(folder: Path) -> dict[str, tuple]:
    """The shards of all tasks that left a record, and what would change if they were made anew."""
    found = {}
    for path in folder.glob("preparing/[0-9]*.json"):
        for shard in json.loads(path.read_text())["shards"]:
            stat = (folder / shard["file"]).stat()
            found[shard["file"]] = (stat.st_ino, stat.st_mtime_ns)
    return found


def check_kept(folder: Path, before: dict[str, tuple]) -> None:
    """Finished shards are the very same files."""
    for file, known in before.items():
        stat = (folder / file).stat()
        assert (stat.st_ino, stat.st_mtime_ns) == known, file


def test_killed_at_any_moment_it_goes_on_to_the_same_end(start, tmp_path, texts):
    """SIGKILL for the main process only; the command is given again at once, while its workers may
    still notice that they are orphans."""
    log = open(tmp_path / "log", "w")  # noqa: SIM115 closed below; pipes would be waited for

    def begin(out):
        arguments = [f"data.path={texts.folder}", f"out={out}", SMALL, "engine=tiktoken"]
        return start(*arguments, "workers=2", stdout=log, stderr=log)

    begun = time.monotonic()
    assert begin("whole").wait(PATIENCE) == 0
    duration = time.monotonic() - begun
    expected = files_of(tmp_path / "whole")

    chance = random.Random(20)
    moments = [(n + chance.random()) / KILLS * duration for n in range(KILLS)]
    chance.shuffle(moments)
    kept = attempts = completed = 0
    while moments:
        attempts += 1
        assert attempts < 10 * KILLS
        out = tmp_path / f"out{completed}"
        before = finished_shards(out)
        kept += len(before)
        process, begun = begin(out.name), time.monotonic()
        try:
            code = process.wait(moments[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            moments.pop()
        else:
            assert code == 0, (tmp_path / "log").read_text()
            assert files_of(out) == expected
            completed += 1
            moments[-1] = chance.random() * (time.monotonic() - begun)  # else waited for in vain
        check_kept(out, before)
    out = tmp_path / f"out{completed}"
    before = finished_shards(out)
    assert begin(out.name).wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    check_kept(out, before)
    assert files_of(out) == expected
    log.close()
    print(f"{KILLS} kills over {duration:.1f} s each, {attempts} attempts, {kept} shards kept")


# At the start of every process of a preparation: the first task goes through, all else waits for a
# file to go away. So a test finds the preparation in its midst for as long as it likes.
HOLD = """
import os, runpy, time
runpy.run_path({no_network!r})
real = os.fsync
def fsync(file):
    name = os.path.basename(os.readlink(f"/proc/self/fd/{{file}}"))
    while not name.startswith(("shard_00000", "00000", "plan")) and os.path.exists({hold!r}):
        time.sleep(0.005)
    real(file)
os.fsync = fsync
"""
HELD = ["data.path=held", "out=out", "shard_tokens=400", "engine=tiktoken"]
HELD_TEXTS = [("txt", [f"Text {n}, some words of it. " * 50]) for n in range(6)]


@pytest.fixture
def held(start, tmp_path):
    """held(...) -> a process of which one task of six is done, and more not until `let_go`."""
    write_collection(tmp_path / "held", HELD_TEXTS)
    values = {"no_network": str(NO_NETWORK / "sitecustomize.py"), "hold": str(tmp_path / "hold")}
    write_source(tmp_path / "hook" / "sitecustomize.py", [HOLD.format(**values)])
    (tmp_path / "hold").touch()

    def run(*arguments):
        process = start(*HELD, "workers=2", *arguments, path=[tmp_path / "hook"])
        wait_until(lambda: finished_shards(tmp_path / "out"), process)
        return process

    return run


@pytest.fixture
def let_go(tmp_path):
    """let_go(process) -> its exit code, stdout and stderr, when nothing holds it any more."""

    def run(process):
        (tmp_path / "hold").unlink()
        output = process.communicate(timeout=PATIENCE)
        return process.returncode, *output

    return run


def check_goes_on(command, out: Path, *arguments) -> None:
    """The same command finishes what was stopped, and keeps what was finished."""
    kept = finished_shards(out)
    assert kept
    done = command("scripts.prepare_data", *HELD, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("going on: ")
    check_kept(out, kept)
    manifest = json.loads((out / "manifest.json").read_text())
    check_manifest(out, manifest, "gpt2", 400)
    assert ids_of(out) == expected_ids(in_order(HELD_TEXTS))


def stopped_by(process, number: int, group: bool = False) -> tuple[int, str]:
    """Sends a signal and waits for the end, of orphans too; (exit code, stderr)."""
    (os.killpg if group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    wait_until(lambda: not group_of(process))
    return process.returncode, errors


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_how_to_go_on(held, command, tmp_path, workers):
    """A terminal sends it to the whole group."""
    code, errors = stopped_by(held(f"workers={workers}"), signal.SIGINT, group=True)
    assert (code, errors) == (130, "stopped; the same command goes on from here\n")
    check_goes_on(command, tmp_path / "out", f"workers={workers}")


def test_ctrl_c_is_not_the_workers_affair(held, let_go, tmp_path):
    process = held()
    for pid in group_of(process):
        if b"spawn_main" in command_line(pid):
            os.kill(pid, signal.SIGINT)
    code, _, errors = let_go(process)
    assert (code, errors) == (0, "")
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


def test_ctrl_c_while_the_workers_begin(start, tmp_path):
    """Holds the workers while they are starting, before anything of ours is imported."""
    write_collection(tmp_path / "held", HELD_TEXTS)
    hook = (
        "import os, runpy, sys, time\n"
        f"runpy.run_path({str(NO_NETWORK / 'sitecustomize.py')!r})\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv):\n"
        f"    open(f'{tmp_path}/hook/begun-{{os.getpid()}}', 'w').close()\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        time.sleep(0.005)\n"
    )
    write_source(tmp_path / "hook" / "sitecustomize.py", [hook])
    process = start(*HELD, "workers=2", path=[tmp_path / "hook"])
    wait_until(lambda: len(list(tmp_path.glob("hook/begun-*"))) == 2, process)
    for path in tmp_path.glob("hook/begun-*"):
        with contextlib.suppress(ProcessLookupError):  # where one dies, the other is stopped
            os.kill(int(path.name.partition("-")[2]), signal.SIGINT)
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")  # as the main process was not asked to stop


@pytest.mark.parametrize("group", [False, True])
def test_sigterm_leaves_no_orphans(held, command, tmp_path, group):
    code, errors = stopped_by(held(), signal.SIGTERM, group)
    assert code in (143, -signal.SIGTERM)
    assert "Traceback" not in errors
    check_goes_on(command, tmp_path / "out")


def test_a_worker_that_is_killed_ends_the_command_in_one_line(held, command, tmp_path):
    """As the kernel does when memory runs out."""
    process = held()
    workers = [p for p in group_of(process) if b"spawn_main" in command_line(p)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors.count("\n")) == (4, 1)
    wait_until(lambda: not group_of(process))
    check_goes_on(command, tmp_path / "out")


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_full_disk_ends_it_in_one_line_and_it_goes_on(start, tmp_path):
    """A limit on the size of files stands for the disk; the first task stays below it."""
    collection = [("txt", ["Short. " * 6000]), ("txt", ["A text of some length. " * 9000])]
    write_collection(tmp_path / "web", collection)
    base = ["data.path=web", "out=out", "data.tokenizer=byte", "shard_tokens=60000", "workers=1"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(*base, preexec_fn=limit)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4
    check_refusal(errors, "out=out", "cannot be written (File too large)", "the same command goes")
    kept = finished_shards(tmp_path / "out")
    assert list(kept) == ["shard_00000_00.bin"]
    assert start(*base).wait(PATIENCE) == 0
    check_kept(tmp_path / "out", kept)
    assert ids_of(tmp_path / "out") == expected_ids(collection, "byte")
    assert not list((tmp_path / "out").glob("*.part-*"))


def test_two_at_the_same_time_are_refused(held, let_go, command, tmp_path):
    first = held()
    before = finished_shards(tmp_path / "out")
    second = command("scripts.prepare_data", *HELD, "workers=2")
    assert second.returncode == 3
    check_refusal(second.stderr, "out=out", "is being prepared by another process", "wait for it")
    check_kept(tmp_path / "out", before)
    code, told, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert told.splitlines()[-1] == "train on them: python train.py data=shards data.path=out"
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


@pytest.mark.parametrize("part", ["1/1", "2/3"])
def test_another_division_at_the_same_time_is_refused(held, let_go, command, part):
    first = held("part=1/2")
    second = command("scripts.prepare_data", *HELD, f"part={part}")
    code, _, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert second.returncode == 3
    check_refusal(second.stderr, "out=out", "is being prepared by another process", "wait for it")


def test_the_other_part_at_the_same_time_is_not(held, let_go, command, tmp_path):
    first = held("part=1/2")
    second = command("scripts.prepare_data", *HELD, "workers=2", "part=2/2")
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout.splitlines()[-1] == "part 2/2 is done; 2 tasks of other parts are not yet"
    code, told, errors = let_go(first)
    assert (code, errors) == (0, "")
    assert told.splitlines()[-1] == "train on them: python train.py data=shards data.path=out"
    assert ids_of(tmp_path / "out") == expected_ids(in_order(HELD_TEXTS))


def test_stopped_behind_the_manifest(here, tmp_path, monkeypatch):
    path = write_source(tmp_path / "a.txt", ["Some words."])
    with monkeypatch.context() as patch:

        def stop(*_args, **_kwargs):
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", stop)
        assert here(f"data.path={path}", "out=out")[0] == 130
    assert (tmp_path / "out" / "manifest.json").exists()
    code, out, _ = here(f"data.path={path}", "out=out")
    assert code == 0
    assert out.startswith("out is complete already\n")
    assert not (tmp_path / "out" / "preparing").exists()


def test_stopped_while_the_manifest_is_written(here, tmp_path, monkeypatch):
    path = write_source(tmp_path / "a.txt", ["Some words."])
    real = os.replace
    with monkeypatch.context() as patch:

        def stop(source, target):
            if Path(target).name == "manifest.json":
                raise KeyboardInterrupt
            real(source, target)

        patch.setattr(os, "replace", stop)
        patch.setattr(os, "getpid", lambda: 7)  # of another process, then
        assert here(f"data.path={path}", "out=out")[0] == 130
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert here(f"data.path={path}", "out=out")[0] == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    check_manifest(tmp_path / "out", manifest, "gpt2", 10**8)


def test_moved_texts_are_the_same_texts(here, tmp_path):
    path = write_source(tmp_path / "a" / "a.txt", ["Some words of a text. " * 20])
    assert here(f"data.path={path}", "out=out", "shard_tokens=30", "part=1/2")[0] == 0
    path.parent.rename(tmp_path / "b")
    code, out, _ = here(f"data.path={tmp_path}/b", "out=out", "shard_tokens=30")
    assert code == 0
    assert out.startswith("going on: ")
    (tmp_path / "b").rename(tmp_path / "c")
    assert "complete already\n" in here("data.path=c/*.txt", "out=out", "shard_tokens=30")[1]


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
        ("workers=-1", "workers=-1: must not be negative; use 0 for all cores"),
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


# ----------------------------------------------------------------------------------------- training


def rows(run) -> list[dict]:
    """The log, but for the speed."""
    found = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "train/tokens_per_second"} for row in found]


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


TEXTS = {
    "one": [("txt", [TEXT])],
    "marked": [("txt", [TEXT.replace("3 jumps", f"3 jumps{END_OF_TEXT}")])],
    "several": [
        ("txt", [TEXT[:1500]]),
        ("jsonl", [TEXT[1000:1400], "short", TEXT[1400:2200], ""]),
        ("parquet", [TEXT[2200:2300], TEXT[2300:]]),
    ],
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", list(TEXTS))
def test_training_on_shards_is_training_on_the_text(trainer, tmp_path, name, within):
    """Step for step, in every figure but the speed; the shards are many, and cut documents."""
    path = write_collection(tmp_path / "texts", TEXTS[name])
    manifest = prepare(path, tmp_path / "out", tokenizer="byte", shard_tokens=300)
    assert len(manifest["shards"]) > 5
    settings = [f"data.within_documents={within}", "trainer.max_steps=6", "data.val_fraction=0.2"]
    direct = trainer(f"data.path={path}", *settings)
    direct.train()
    shards = trainer("data=shards", f"data.path={tmp_path / 'out'}", *TINY, *settings)
    assert len(shards.train_set) == len(direct.train_set)
    assert len(shards.val_set) == len(direct.val_set)
    shards.train()
    assert [row["step"] for row in rows(shards)] == list(range(7))
    assert rows(shards) == rows(direct)
    assert_same(weights(shards), weights(direct))


def test_the_command_that_is_recommended_works(command, tmp_path, text_file):
    arguments = [f"data.path={text_file}", "out=out", "data.tokenizer=byte", "shard_tokens=900"]
    told = command("scripts.prepare_data", *arguments).stdout.splitlines()[-1]
    told = shlex.split(told.removeprefix("train on them: "))
    assert told[:2] == ["python", "train.py"]
    tiny = [s for s in TINY if s != "data.tokenizer=byte"]
    done = command("train.py", *told[2:], *tiny, "data.val_fraction=0.1", "name=a")
    assert done.returncode == 0, done.stderr
    assert "run directory    runs/a" in done.stdout


@pytest.fixture
def mixture(tmp_path):
    """Two folders of shards, and their weights, as overrides."""
    for name, text in (("a", TEXT), ("b", TEXT.upper()[:2000])):
        path = write_source(tmp_path / f"{name}.txt", [text])
        prepare(path, tmp_path / name, tokenizer="byte", shard_tokens=700)
    return [f"data.path=[{tmp_path}/a,{tmp_path}/b]", "data.weights=[0.7,0.3]"]


def test_a_mixture_of_shards_is_one_of_the_texts(trainer, tmp_path, mixture):
    settings = ["trainer.max_steps=6", mixture[1]]
    shards = trainer(mixture[0], *settings)
    shards.train()
    direct = trainer(f"data.path=[{tmp_path}/a.txt,{tmp_path}/b.txt]", *settings)
    direct.train()
    assert rows(shards) == rows(direct)
    drawn = [w for step in range(10) for w in shards.feed.order.windows(step)]
    share = np.mean(np.array(drawn) < shards.train_set.sizes[0])
    assert share == pytest.approx(0.7, abs=0.02)


def test_a_mixture_goes_on_bit_for_bit(trainer, mixture):
    settings = [*mixture, "model.dropout=0.2", "trainer.max_steps=6", "trainer.save_every=3"]
    whole = trainer("name=whole", *settings)
    whole.train()
    half = trainer("name=half", *settings)
    half.look_up({})
    while half.state.step < 3:
        half.step()
    half.save()
    half.step()  # lost: after the last checkpoint
    torch.manual_seed(12345)
    rest = trainer("name=half", *settings)
    assert rest.state.step == 3
    rest.train()
    assert_same(weights(rest), weights(whole))
    wanted = {row["step"]: row for row in rows(whole) if row["step"] > 3}
    assert {row["step"]: row for row in rows(rest) if row["step"] > 3} == wanted


LONG = (
    "The ferry bell at the top of the steps rang twice, and nobody came.\n" * 35_000
)  # two blocks


@pytest.fixture
def stopped(trainer, tmp_path):
    """A run on shards of two blocks of checksums, stopped at step 2; stopped(path) goes on."""
    path = write_source(tmp_path / "long.txt", [LONG])
    prepare(path, tmp_path / "out", tokenizer="byte")
    assert (tmp_path / "out" / "shard_00000_00.bin").stat().st_size > BLOCK_BYTES

    def go_on(path, *overrides):
        run = trainer(f"data.path={path}", "name=a", "trainer.eval_windows=2", *overrides)
        run.train()
        return run

    go_on(tmp_path / "out", "trainer.max_steps=2")
    return go_on


@pytest.mark.parametrize("place", [HEADER_BYTES + 2, BLOCK_BYTES, BLOCK_BYTES + 1000])
def test_a_damaged_shard_is_found_before_the_run_goes_on(stopped, tmp_path, place):
    shard = tmp_path / "out" / "shard_00000_00.bin"
    with open(shard, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    before = log.read_bytes()
    with pytest.raises(DataError) as caught:
        stopped(tmp_path / "out", "trainer.max_steps=4")
    block = place // BLOCK_BYTES * BLOCK_BYTES
    size = min(BLOCK_BYTES, shard.stat().st_size - block)
    cause = f"checksum mismatch in the {size} bytes from byte {block} on (manifest.json)"
    check_refusal(f"{caught.value}\n", f"data.path={shard}", cause, "prepare or copy it anew")
    assert log.read_bytes() == before


@pytest.mark.parametrize("block", [0, 1])
def test_shards_of_a_changed_text_are_refused(stopped, tmp_path, block):
    place = 100 if block == 0 else len(LONG) - 100
    changed = LONG[:place] + "X" + LONG[place + 1 :]
    path = write_source(tmp_path / "changed.txt", [changed])
    prepare(path, tmp_path / "new", tokenizer="byte")
    with pytest.raises(DataError) as caught:
        stopped(tmp_path / "new", "trainer.max_steps=4")
    assert caught.value.exit_code == 3
    cause = f"shard_00000_00.bin is another from byte {block * BLOCK_BYTES} on than the one that "
    cause += "the checkpoint was trained on"
    check_refusal(f"{caught.value}\n", f"data.path={tmp_path}/new", cause, "restore the data")


def test_shards_of_another_number_are_refused(stopped, tmp_path):
    prepare(tmp_path / "long.txt", tmp_path / "new", tokenizer="byte", shard_tokens=1_000_000)
    with pytest.raises(DataError, match="than the one that the checkpoint was trained on"):
        stopped(tmp_path / "new", "trainer.max_steps=4")


def test_moved_shards_go_on(stopped, tmp_path):
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    run = stopped(tmp_path / "elsewhere", "trainer.max_steps=4")
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]


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
