"""tokens/sources.py: files -> documents -> ids, whole or in parts, and what is refused.

Needs pyarrow and datasets, and no network: the hub's
data sets are local folders here.
"""

import codecs
import errno
import functools
import glob
import gzip
import itertools
import json
import os
import re
import shlex
import sys
import threading
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.refusals import check_refusal, not_waiting
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import END_OF_TEXT, sources
from tokens.encoding import StreamEncoder
from tokens.sources import Part, documents, encode_part, find_files, hub_data, kind_of, row_groups
from tokens.tokenizers import get_tokenizer

many = settings(max_examples=150, deadline=None, derandomize=True)
some = settings(max_examples=50, deadline=None, derandomize=True)

BYTE_ORDER_MARK = codecs.BOM_UTF8
FRAGMENTS = [
    *" \n\r\t\x1c\x85\u00a0\u2028\u3000\u200b\ufeff'",
    *("  ", "\r\n", "\n\n\n", "\n ", " \n", " \u00a0 "),
    *("the", "Naïve", "don't", "we'll", "'s", "x'", "1234", "½", "...", "_", "e\u0301", "|"),
    *("日本語", "本、", "Ελλάδα", "שלום", "नमस्ते", "🙂", "👩‍👩‍👧", "🇳🇱"),
    *("x" * 40, "é" * 20, "1" * 30, " " * 20),  # runs without a cut
    *(END_OF_TEXT, "<|endof", "text|>"),
]
characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
mixes = (
    st.lists(st.sampled_from(FRAGMENTS) | st.text(characters, max_size=3), max_size=25)
    .map("".join)
    .filter(bool)
)
packings = st.sampled_from(["", ".gz", ".zst"])

encoder_of = functools.cache(StreamEncoder)  # (tokenizer, endoftext); made once


def write(path: Path, content: str | bytes) -> Path:
    """A file of this content, packed when its name says so."""
    raw = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(raw, path.suffix))
    return path


def packed(raw: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(raw, mtime=0)
    if ending == ".zst":
        return pyarrow.compress(raw, codec="zstd", asbytes=True)
    return raw


def write_parquet(path: Path, texts: list, key: str = "text", **options) -> Path:
    table = pyarrow.table({"number": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def json_line(text: str, key: str = "text", **options) -> str:
    return json.dumps({"number": 1, key: text}, **options) + "\n"


def read(path: object, *rest, **options) -> list[bytes]:
    """Each document of a file, or of a part of one, as one block."""
    return [b"".join(blocks) for blocks in documents(Part(str(path), *rest, **options))]


def read_all(path: object, bounds: Iterable[int] = ()) -> bytes:
    """The documents of all parts of a file that is divided at these places."""
    return b"".join(text for part in parts_of(path, bounds) for text in read(*part))


def parts_of(path: object, bounds: Iterable[int]) -> list[tuple]:
    """The consecutive (path, start, stop) of a file that is divided at these places."""
    return [(path, *ends) for ends in itertools.pairwise([0, *bounds, None])]


def encode_all(path: object, encoder: StreamEncoder, bounds: Iterable[int] = ()) -> list[int]:
    """The ids of all parts of a file that is divided at these places, by one encoder."""
    parts = [Part(str(path), start, stop) for path, start, stop in parts_of(path, bounds)]
    return [i for part in parts for ids in encode_part(part, encoder) for i in ids.tolist()]


def expected_ids(texts: Iterable[str], name: str = "gpt2", endoftext: str = "token") -> list[int]:
    """By single calls of tiktoken; each text begins with the end-of-text token."""
    tokenizer = get_tokenizer(name)
    special = {END_OF_TEXT} if endoftext == "token" else set()
    found = []
    for text in texts:
        ids = tokenizer.encode(text, allowed_special=special, disallowed_special=())
        begins = ids[:1] in ([], [tokenizer.eot_token])
        found += ids if begins else [tokenizer.eot_token, *ids]
    return found


def check_refused(path: object, cause: str, fix: str, *rest, **options) -> None:
    """That reading the file is refused so."""
    with pytest.raises(DataError) as caught:
        read(path, *rest, **options)
    check_refusal(caught.value, f"data.path={path}", cause, fix)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for tests under hypothesis, which write the same files over and over."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def encoder():
    return encoder_of("gpt2", "token")


def blocks_of(size: int):
    """Files are read so many bytes at a time."""
    return mock.patch.object(sources, "BLOCK", size)


def windows_of(size: int):
    """Places for cuts are looked for in so many bytes at a time."""
    return mock.patch.object(sources, "WINDOW", size)


# -------------------------------------------------------------------------------- finding files


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A few texts in the working folder."""
    for name in (
        *("b.txt", "a.txt", "c.md", "deep/z.txt", "deep/er/y.txt", "a[1].txt", "x.txt.bak"),
        *("all/h.txt.gz", "all/g.txt.zst", "all/f.jsonl", "all/e.jsonl.gz", "all/b/d.jsonl.zst"),
        *("all/c.ndjson", "all/b/b.ndjson.gz", "all/a.ndjson.zst", "all/i.parquet", "all/j.bin"),
        *("all/k.json", "all/l.gz", "all/m.zip", "all/n.parquet.gz", "all/A.TXT", "all/B.Jsonl.GZ"),
    ):
        write(tmp_path / name, f"text of {name}")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


ALL = "a.ndjson.zst b/b.ndjson.gz b/d.jsonl.zst c.ndjson e.jsonl.gz f.jsonl g.txt.zst h.txt.gz"
ALL = [f"all/{name}" for name in ("A.TXT", "B.Jsonl.GZ", *ALL.split(), "i.parquet")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("c.md", ["c.md"]),
        ("all", ALL),
        (".", ["a.txt", "a[1].txt", *ALL, "b.txt", "deep/er/y.txt", "deep/z.txt"]),
        ("deep", ["deep/er/y.txt", "deep/z.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("**/[yz].txt", ["deep/er/y.txt", "deep/z.txt"]),
        ("a[1].txt", ["a[1].txt"]),  # a file of that name, before a pattern
        (["deep", "c.md", "b.*"], ["deep/er/y.txt", "deep/z.txt", "c.md", "b.txt"]),
        (["b.txt", "a.txt", "b.txt"], ["b.txt", "a.txt", "b.txt"]),  # as they are given
        ("hub:some/name", ["hub:some/name"]),  # looked at when it is read
        (["hub:name:config:split", "a.txt"], ["hub:name:config:split", "a.txt"]),
    ],
)
def test_find_files(path, expected, tree):
    assert find_files(path) == expected


def test_find_files_at_home(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert find_files("~/deep") == [f"{tree}/deep/er/y.txt", f"{tree}/deep/z.txt"]


@pytest.mark.parametrize(
    ("entry", "cause", "fix"),
    [
        ("missing.txt", "no such file", "check the path; relative ones start at "),
        ("*.csv", "no such file", "check the path"),
        ("notes", "no *.txt, *.jsonl or *.parquet file in this folder", "/*.md'"),
    ],
)
def test_path_that_names_nothing_is_refused(entry, cause, fix, tmp_path):
    write(tmp_path / "notes" / "notes.md", "text")
    path = tmp_path / entry
    for given_path in (str(path), [str(tmp_path / "notes" / "notes.md"), str(path)]):
        with pytest.raises(DataError) as caught:
            find_files(given_path)
        check_refusal(caught.value, f"data.path={path}", cause, fix)


@pytest.fixture
def deny(monkeypatch):
    """deny(folder): it cannot be listed. Permissions do not stop root."""
    scandir = os.scandir

    def patch(folder: Path) -> None:
        def denied(path="."):
            if os.path.abspath(path) == str(folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", denied)

    return patch


@pytest.mark.parametrize(
    "path", ["", "**/*.txt", "*/*.txt", "*/deep/*.txt", "b/*.txt", ["a/a.txt", "**/a.txt"]]
)
def test_a_folder_that_cannot_be_listed_is_refused(path, tmp_path, monkeypatch, deny):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a" / "a.txt", "text")
    write(tmp_path / "b" / "deep" / "b.txt", "text")
    denied = "b/deep" if path in ("", "*/deep/*.txt") else "b"
    deny(tmp_path / denied)
    with pytest.raises(DataError) as caught:
        find_files(path or str(tmp_path))
    folder = tmp_path / denied if path == "" else denied
    check_refusal(caught.value, f"data.path={folder}", "cannot be read", "permissions")


@pytest.mark.parametrize("denied", ["folder", "folder/inside.txt"])
def test_a_folder_whose_files_cannot_be_looked_at_is_refused(denied, tmp_path, monkeypatch):
    """It may be listed (r) and not entered (x)."""
    stat = os.stat

    def deny(path, *args, **options):
        if not isinstance(path, int) and str(path).endswith(f"/{denied}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    write(tmp_path / "a.txt", "text")
    write(tmp_path / "folder" / "inside.txt", "text")
    monkeypatch.setattr(os, "stat", deny)
    for path in (tmp_path, tmp_path / "**" / "*.txt"):
        with pytest.raises(DataError) as caught:
            find_files(str(path))
        check_refusal(caught.value, f"data.path={tmp_path / denied}", "cannot be read", "")


LINKED = ["", "**/*.txt", "**/**/*.txt", "**"]


@pytest.mark.parametrize("path", LINKED)
def test_links_in_circles_are_not_followed(path, tmp_path):
    top = tmp_path / "outside" / "texts"
    write(tmp_path / "outside" / "not_this.txt", "text")
    write(top / "a.txt", "text")
    write(top / "deep" / "b.txt", "text")
    for n, target in enumerate([top, top, top.parent, tmp_path, top / "deep"]):
        (top / "deep" / f"link{n}").symlink_to(target)
    (top / "itself").symlink_to(top / "itself")
    (top / "nowhere").symlink_to(top / "gone")
    with not_waiting():
        found = find_files(str(top / path))
    assert found == [f"{top}/a.txt", f"{top}/deep/b.txt"]


@pytest.mark.parametrize("path", [*LINKED, "*"])
def test_a_file_with_several_names_is_read_once(path, tmp_path):
    a = write(tmp_path / "texts" / "a.txt", "text")
    (tmp_path / "texts" / "hard.txt").hardlink_to(a)
    (tmp_path / "texts" / "link.txt").symlink_to(a)
    write(tmp_path / "elsewhere" / "b.txt", "text")
    for name in ("another", "one"):
        (tmp_path / "texts" / name).symlink_to(tmp_path / "elsewhere")
    expected = [str(a)] if path == "*" else [str(a), f"{tmp_path}/texts/another/b.txt"]
    assert find_files(str(tmp_path / "texts" / path)) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("*", "*.txt", "**", "**/", "**/*", "**/*.txt", "*/", "*/*", "deep/**", "**/er/**/*.txt"),
        *(
            "./*.txt",
            ".*",
            "**/.*",
            ".git/*",
            "./**/*.txt",
            "deep/../*.txt",
            "deep//*.txt",
            "[!a]*",
        ),
        *("{tree}/*.txt", "{tree}/**/y.txt", "a[[]1].txt", "d*/er", "no/*", "[!a]*", "**x"),
    ],
)
def test_globs_are_those_of_python(pattern, tree):
    write(tree / ".git" / "x.txt", "text")
    write(tree / ".hidden", "text")
    pattern = pattern.format(tree=tree)
    expected = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if expected:
        assert find_files(pattern) == expected
    else:
        with pytest.raises(DataError):
            find_files(pattern)


def test_what_a_folder_has_besides_its_texts_is_told(tmp_path):
    write(tmp_path / "a.txt", "text")
    write(tmp_path / ".git" / "HEAD", "hidden")
    write(tmp_path / ".hidden", "hidden")
    notes: list[str] = []
    find_files(str(tmp_path), notes)
    assert notes == []
    write(tmp_path / "deep" / "b.md", "text")
    find_files(str(tmp_path), notes)
    write(tmp_path / "c.py", "text")
    find_files([str(tmp_path), str(tmp_path / "c.py")], notes)
    for note, told in zip(
        notes, ["a file is passed over, such as b.md;", "2 files are"], strict=True
    ):
        assert note.startswith(f"data.path={tmp_path}: {told}")


def test_a_folder_of_token_files_is_no_folder_of_texts(tmp_path):
    write(tmp_path / "tokens" / "train.bin", b"\1\0")
    with pytest.raises(DataError) as caught:
        find_files(str(tmp_path))
    fix = f"python train.py data=shards data.path={tmp_path / 'tokens'}"
    check_refusal(caught.value, f"data.path={tmp_path}", "no *.txt,", fix)


def test_commands_name_a_path_as_one_word(tmp_path):
    """Whatever is in its name."""
    folder = tmp_path / "it's mine"

    def words_about(path):
        with pytest.raises(DataError) as caught:
            list(encode_part(Part(*find_files(str(path))), encoder_of("byte", "token")))
        return shlex.split(str(caught.value).partition("; ")[2])

    write(folder / "a.md", "text")
    assert f"data.path={folder}/*.md" in words_about(folder)
    write(folder / "train.bin", b"\1\0")
    assert f"data.path={folder}" in words_about(folder)
    assert f"data.path=[{folder},b]" in words_about(f"{folder},b")
    for raw in (b"caf\xe9", b"\xff\xfea\0"):
        path = write(folder / "a.txt", raw)
        assert str(path) in words_about(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("a.txt", "text"), ("a.md", "text"), ("a", "text"), ("a.txt.gz", "text")),
        *(("a.zst", "text"), ("a.csv", "text"), ("jsonl", "text"), ("a.parquet.gz", "text")),
        *(("a.jsonl", "jsonl"), ("a.jsonl.gz", "jsonl"), ("a.jsonl.zst", "jsonl")),
        *(("a.ndjson", "jsonl"), ("a.ndjson.gz", "jsonl"), ("a.ndjson.zst", "jsonl")),
        *(
            ("a.json", "jsonl"),
            ("a.json.gz", "jsonl"),
            ("a.JSONL", "jsonl"),
            ("A.Json.GZ", "jsonl"),
        ),
        ("A.PARQUET", "parquet"),
        *(("a.parquet", "parquet"), ("hub:a.parquet", "hub"), ("hub:some/name", "hub")),
    ],
)
def test_kind_is_known_by_the_name(name, kind):
    assert kind_of(name) == Part(name).kind == kind


# ----------------------------------------------------------------------------------- plain text


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfHello", "Hello"),
        (b"\xef\xbb\xbf\xef\xbb\xbfHello", "\ufeffHello"),
        (b"Hello\xef\xbb\xbf", "Hello\ufeff"),
        (b"\xef\xbb\xbf", ""),
        (b"one\r\ntwo\rthree\n", "one\r\ntwo\rthree\n"),
        (b" \n\x1c text \n\n", " \n\x1c text \n\n"),
        (b'{"text": "a"}\n', '{"text": "a"}\n'),  # JSON by another name is a text
    ],
)
def test_text_is_read_as_it_is_but_for_the_byte_order_mark(content, text, ending, tmp_path):
    assert read(write(tmp_path / f"a.txt{ending}", content)) == [text.encode()]


@many
@given(mixes, st.integers(4, 40), packings)
@example("é🙂日本", 4, "")
@example("\ufeff🙂x🙂x🙂", 4, ".gz")
def test_blocks_are_whole_characters(folder, text, size, packing):
    """However the borders of what is read at once cut characters."""
    path = write(folder / f"a.txt{packing}", text)
    with blocks_of(size):
        (blocks,) = (list(blocks) for blocks in documents(Part(str(path))))
    assert all(blocks)
    assert "".join(block.decode() for block in blocks) == text.removeprefix("\ufeff")
    if len(text.encode()) > size + 3:
        assert len(blocks) > 1


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_text_is_read_in_little_memory(ending, tmp_path):
    path = write(tmp_path / f"a.txt{ending}", b"One bell rang, then two.\n" * 400_000)
    tracemalloc.start()
    try:
        with blocks_of(2**16):
            size = sum(len(block) for blocks in documents(Part(str(path))) for block in blocks)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 10_000_000
    assert peak < 10 * 2**16


UNUSABLE = {
    "empty": (b"", "the file is empty", "give a text"),
    "zero byte": (b"abc\0def", "binary (a zero byte at byte 3)", "give a text file"),
    "zero byte far in": (b"x" * 2_000_000 + b"\0", "at byte 2000000)", "give a text file"),
    "Latin-1": ("café".encode("latin1"), "not UTF-8 (0xe9 at byte 3)", "iconv -f LATIN1"),
    "after other characters": ("é🙂".encode() + b"\xff", "(0xff at byte 6)", "iconv"),
    "bad byte far in": (b"\n" * 3_000_000 + b"\x80", "(0x80 at byte 3000000)", "iconv"),
    "bad byte after a mark": (b"\xef\xbb\xbfab\xff", "(0xff at byte 5)", "iconv"),
    "cut off": ("abc🙂".encode()[:-1], "(0xf0 at byte 3)", "iconv"),
    "surrogate": (b"ab\xed\xa0\x80", "(0xed at byte 2)", "iconv"),
    "UTF-16 LE": (b"\xff\xfe" + "text".encode("utf-16-le"), "UTF-16, not", "iconv -f UTF-16"),
    "UTF-16 BE": (b"\xfe\xff" + "text".encode("utf-16-be"), "UTF-16, not", "iconv -f UTF-16"),
    "UTF-32 LE": (codecs.BOM_UTF32_LE + b"t\0\0\0", "UTF-32, not", "iconv -f UTF-32"),
    "UTF-32 BE": (codecs.BOM_UTF32_BE + b"\0\0\0t", "UTF-32, not", "iconv -f UTF-32"),
    "gzip": (packed(b"text", ".gz"), "a gzip archive", "ends in .gz, or unpack it"),
    "zip": (b"PK\x03\x04\x14\0", "a zip archive", "unpack it"),
    "zstd": (packed(b"text", ".zst"), "a zstd archive", "ends in .zst, or unpack it"),
    "Parquet": (b"PAR1\x15\0", "Parquet, not text", "ends in .parquet"),
    "token file": (b"\x88\xd8\x34\x01\1\0\0\0", "tokens, not text", "train on them: python train"),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_text_is_refused(kind, ending, tmp_path):
    content, cause, fix = UNUSABLE[kind]
    check_refused(write(tmp_path / f"bad.txt{ending}", content), cause, fix)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 1000])
def test_bad_bytes_are_told_wherever_the_borders_of_blocks_are(size, folder):
    """The byte and its place are those that Python's own decoder stops at."""
    text = "aé日🙂z🙂日éa日🙂".encode()
    bad = [b"\xff", b"\x80", b"\xc0\x80", b"\xe6\x97", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xf5"]
    for place, wrong in itertools.product(range(len(text) + 1), bad):
        content = text[:place] + wrong + text[place:]
        with pytest.raises(UnicodeDecodeError) as expected:
            content.decode()
        byte, offset = content[expected.value.start], expected.value.start
        path = write(folder / "bad.txt", content)
        with blocks_of(size):
            check_refused(path, f"not UTF-8 (0x{byte:02x} at byte {offset})", "iconv")


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 1000])
def test_text_that_ends_inside_a_character_is_refused(size, folder):
    text = "aé日🙂z🙂日é🙂".encode()
    for end in range(1, len(text) + 1):
        path = write(folder / "bad.txt", text[:end])
        whole = len(text[:end].decode(errors="ignore").encode())
        with blocks_of(size):
            if whole == end:
                assert read(path) == [text[:end]]
            else:
                check_refused(path, f"(0x{text[whole]:02x} at byte {whole})", "iconv")


@pytest.mark.parametrize("size", [4, 5, 7, 1000])
def test_zero_bytes_are_told_wherever_the_borders_of_blocks_are(size, folder):
    text = "aé日🙂z🙂日é".encode()
    for place in (0, 1, 3, 6, 10, 11, 15, 18, 20):
        path = write(folder / "bad.txt", text[:place] + b"\0" + text[place:])
        with blocks_of(size):
            check_refused(path, f"binary (a zero byte at byte {place})", "give a text file")


# ------------------------------------------------------------------------------ damaged archives


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_archives_may_have_several_members(ending, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(b"".join(packed(part, ending) for part in (b"\xef\xbb\xbfone ", b"", b"two")))
    assert read(path) == [b"one two"]
    lines = tmp_path / f"a.jsonl{ending}"
    content = (json_line("one") + json_line("two")).encode()  # a member may end inside a line
    lines.write_bytes(packed(content[:9], ending) + packed(content[9:], ending))
    assert read(lines) == [b"one", b"two"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_truncated_archive_is_refused(name, ending, tmp_path):
    content = "".join(json_line(f"Line {n}: the quick fox.") for n in range(20)).encode()
    members = [packed(content, ending), packed(content, ending)]
    path = tmp_path / f"{name}{ending}"
    both = b"".join(members)
    for end in range(1, len(both)):
        path.write_bytes(both[:end])
        if end == len(members[0]):  # what the whole archive is, no one can tell
            assert len(b"".join(read(path))) > 0
        else:
            check_refused(path, "cannot be read (", "create or download it again")


# As the zstd program packs it, with a checksum: pyarrow makes none.
SUMMED = (
    b'(\xb5/\xfd\x04h\x9d\x01\x00\x82\xc3\x0b\x11\xb0\xebG\x0e^"`cX\xe5\xe2\x80\xb9\xc8W\x89\x01@'
    b"<\xd5'\x7f\xads\x8d.\x91\xdf\xca\xf1Ci\x12=\xd2\xad\xf1k\x1d\x14\x165c7>\x92\x00\x81~:\x00"
)
BELL = b"One bell rang, then two; nobody came down to the ferry.\n"


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_damaged_archive_is_refused(ending, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    whole = SUMMED if ending == ".zst" else packed(BELL, ending)
    path.write_bytes(whole)
    assert read(path) == [BELL]
    ignored = range(4, 10) if ending == ".gz" else ()  # the time and system in gzip's header
    for place in set(range(len(whole))).difference(ignored):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        check_refused(path, "cannot be read (", "create or download it again")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_archive_is_refused(name, ending, tmp_path):
    path = tmp_path / f"{name}{ending}"
    good = packed(json_line("one").encode(), ending)
    for content in (b"This was never packed.\n", good + b"and something else"):
        path.write_bytes(content)
        check_refused(path, "cannot be read (", "create or download it again")


@pytest.mark.parametrize("name", ["a.txt.bz2", "a.jsonl.xz", "A.ZSTD", "a.parquet.lz4", "a.txt.7z"])
def test_other_compression_is_refused_by_its_name(name, tmp_path):
    path = write(tmp_path / name, "text")
    check_refused(path, "this kind of compression is not read", "unpack it, or pack it as .gz or")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_names_may_be_in_capitals(ending, tmp_path):
    path = tmp_path / f"A.JSONL{ending.upper()}"
    path.write_bytes(packed(json_line("one").encode(), ending))
    assert read(path) == [b"one"]


# ----------------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson"])
def test_json_lines(name, ending, tmp_path):
    lines = [
        *("\n", '{"text": "one", "id": 1}\n', "   \t\r\n", '  {"id": 2, "text": "two\\n"}  \r\n'),
        *('{"text": ""}\n', "\n\n", '{"text": "é日 \u2028 \\u65e5 \\ud83d\\ude42 \\u0000"}\n'),
        *('{"text": "\ufeffmark"}\n', '{"text": "last"}'),
    ]
    path = write(tmp_path / f"{name}{ending}", "".join(lines))
    texts = ["one", "two\n", "", "é日 \u2028 日 🙂 \0", "\ufeffmark", "last"]
    assert read(path) == [text.encode() for text in texts]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "a.jsonl", BYTE_ORDER_MARK + json_line("é").encode() * 2)
    assert read(path) == ["é".encode()] * 2


def test_json_lines_without_a_text_are_no_documents(tmp_path):
    assert read(write(tmp_path / "a.jsonl", "")) == []
    assert read(write(tmp_path / "a.jsonl", " \n\n")) == []


@pytest.mark.parametrize("key", ["content", "", "é\n"])
def test_text_key(key, tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": 1, "content": "a", "": "a", "é\\n": "a"}\n')
    assert read(path, text_key=key) == [b"a"]
    path = write_parquet(tmp_path / "a.parquet", ["a", "b"], key or "x.y")
    assert read(path, text_key=key or "x.y") == [b"a", b"b"]


def test_lone_surrogates_become_replacement_characters(tmp_path, encoder):
    """As with tiktoken; a pair of them is one character."""
    texts = ["a\ud800", "\udc00b\ud83d", "\ud83d\ude42", "\ude42\ud83d"]
    path = write(tmp_path / "a.jsonl", "".join(map(json_line, texts)))
    assert [text.decode() for text in read(path)] == [
        "a\ufffd",
        "\ufffdb\ufffd",
        "🙂",
        "\ufffd" * 2,
    ]
    assert encode_all(path, encoder) == expected_ids(texts)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_line_beyond_the_limit_is_refused(ending, tmp_path, monkeypatch):
    limit = 2**20
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", limit)
    longest = json_line("x" * (limit - len(json_line(""))))
    good = write(tmp_path / f"good.jsonl{ending}", longest * 2 + longest[:-1])  # no line end
    assert [len(text) for text in read(good)] == [limit - len(json_line(""))] * 3
    path = write(tmp_path / f"bad.jsonl{ending}", longest + json_line("x" * 40 * limit))
    tracemalloc.start()
    try:
        found = documents(Part(str(path)))
        next(found)
        with pytest.raises(DataError) as caught:
            next(found)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check_refusal(caught.value, f"data.path={path}", f"the line at byte {limit}", "")
    assert peak < 10 * limit


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_of_many_keys_some_are_told(name, tmp_path):
    keys = [f"key number {n}" for n in range(20_000)] + ["long" * 10_000]
    path = tmp_path / name
    if name == "a.jsonl":
        write(path, json.dumps(dict.fromkeys(keys)))
    else:
        keys = keys[:1000] + keys[-1:]
        pyarrow.parquet.write_table(pyarrow.table({key: [1] for key in keys}), path)
    with pytest.raises(DataError) as caught:
        read(path)
    assert "'key number 0', 'key number 1'" in str(caught.value)
    assert f"{len(keys):,}" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(str(caught.value)) - len(str(path)) < 1000
    path = write(tmp_path / "b.jsonl", json.dumps({"long" * 10_000: 1}))
    with pytest.raises(DataError) as caught:
        read(path)
    assert len(str(caught.value)) - len(str(path)) < 1000


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_long_lines(ensure_ascii, tmp_path):
    texts = ["x" * 3_000_000, "short", "a🙂日é" * 300_000]
    lines = (json_line(text, ensure_ascii=ensure_ascii) for text in texts)
    path = write(tmp_path / "a.jsonl", "".join(lines))
    assert [text.decode() for text in read(path)] == texts


@some
@given(st.lists(mixes, max_size=5), st.integers(4, 40), packings)
def test_json_lines_in_blocks_of_any_size(folder, texts, size, packing):
    path = write(folder / f"a.jsonl{packing}", "".join(map(json_line, texts)))
    with blocks_of(size):
        found = [[block.decode() for block in blocks] for blocks in documents(Part(str(path)))]
    assert ["".join(blocks) for blocks in found] == texts
    assert all(len(block) <= size for blocks in found for block in blocks)


MEND, SET_KEY = "mend it or leave it out", "set data.text_key"
UNUSABLE_LINES = {
    "not JSON": (b"some text", "is not JSON (Expecting value", MEND),
    "cut off": (b'{"text": "a"', "is not JSON (Expecting ',' delimiter", MEND),
    "two objects": (b'{"text": "a"} {"text": "b"}', "is not JSON (Extra data", MEND),
    "not UTF-8": (b'{"text": "a\xff"}', "is not JSON ('utf-8' codec can't decode byte 0xff", MEND),
    "half a character": (
        b'{"text": "a\xf0\x9f\x99"}',
        "is not JSON ('utf-8' codec can't decode",
        MEND,
    ),
    "a string": (b'"text"', "has no text under 'text' (it has no keys)", SET_KEY),
    "null": (b"null", "has no text under 'text' (it has no keys)", SET_KEY),
    "other keys": (
        b'{"id": 1, "a\\nb": ""}',
        "has no text under 'text' (it has 'id', 'a\\nb')",
        SET_KEY,
    ),
    "a number": (b'{"text": 5}', "has under 'text' what is of type int, not a text", MEND),
    "no text": (b'{"text": null}', "has under 'text' what is null, not a text", MEND),
    "a list of texts": (b'{"text": ["a"]}', "has under 'text' what is of type list", MEND),
    "surrogate": (b'{"text": "a\xed\xa0\x80"}', "is not JSON ('utf-8' codec", MEND),
    "too deep": (b'{"a":' * 100_000, "is not JSON (", MEND),
    "an array": (b'[{"text": "a"}]', "begins an array, not an object", "jq -c '.[]'"),
    "an array of many lines": (b'\xef\xbb\xbf [\n{"text": "a"}]', "begins an array", "jq -c '.[]'"),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", UNUSABLE_LINES)
def test_unusable_json_line_is_refused(kind, ending, tmp_path):
    line, cause, fix = UNUSABLE_LINES[kind]
    good = b'{"text": "good"}\n'
    path = write(tmp_path / f"a.jsonl{ending}", good + b"\n" + line + b"\n" + good)
    found = documents(Part(str(path)))
    assert b"".join(next(found)) == b"good"  # what comes before it is given out
    with pytest.raises(DataError) as caught:
        next(found)
    check_refusal(caught.value, f"data.path={path}", f"the line at byte 18 {cause}", fix)
    if not ending:
        check_refused(path, f"the line at byte 18 {cause}", fix, 5)


# -------------------------------------------------------------------------------------- Parquet


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet(compression, kind, tmp_path):
    texts = ["one", "", "é日🙂\n\0", "one"] * 200  # more than are read at once
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    path = write_parquet(tmp_path / "a.parquet", column, compression=compression)
    assert read(path) == [text.encode() for text in texts]


def test_parquet_without_rows_has_no_documents(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array([], pyarrow.string()))
    assert read(path) == []


def test_long_texts_of_parquet_come_in_blocks(tmp_path):
    text = "a🙂日é" * 30
    path = write_parquet(tmp_path / "a.parquet", [text, text])
    with blocks_of(16):
        found = [list(blocks) for blocks in documents(Part(str(path)))]
    assert ["".join(block.decode() for block in blocks) for blocks in found] == [text, text]
    assert max(len(block) for block in found[0]) <= 4 * 16


def test_row_groups(tmp_path):
    texts = ["x" * 1000, "y" * 50, "z" * 2000]
    path = write_parquet(
        *(tmp_path / "a.parquet", texts), row_group_size=1, compression="none", use_dictionary=False
    )
    sizes = row_groups(str(path))
    assert len(sizes) == 3
    for size, text in zip(sizes, texts, strict=True):
        assert len(text) < size < len(text) * 3 + 500  # the text once, once or twice in statistics
    assert read(path, 1, 3) == [texts[1].encode(), texts[2].encode()]
    assert read(path, 2) == [texts[2].encode()]
    assert read(path, 1, 1) == read(path, 3) == []


def test_unusable_parquet_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a"], "content")
    check_refused(path, "has no text under 'text' (it has 'number', 'content')", SET_KEY)
    path = write_parquet(tmp_path / "b.parquet", ["a", "b", "c", None], row_group_size=2)
    check_refused(path, "row 3 of the row groups from 0 has under 'text' what is null", MEND)
    check_refused(path, "row 1 of the row groups from 1 has under 'text' what is null", MEND, 1, 2)
    for column in ([1, 2], [b"a", b"b"], [["a"], ["b"]], [{"text": "a"}, {"text": "b"}]):
        path = write_parquet(tmp_path / "c.parquet", column)
        kind = type(column[0]).__name__
        check_refused(
            path, f"row 0 of the row groups from 0 has under 'text' what is of type {kind}", MEND
        )


@pytest.mark.parametrize("function", [read, row_groups])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"Never a Parquet file.\n" * 9])
def test_what_is_no_parquet_is_refused(content, function, tmp_path):
    path = write(tmp_path / "a.parquet", content)
    with pytest.raises(DataError) as caught:
        function(str(path))
    check_refusal(
        caught.value, f"data.path={path}", "cannot be read (", "create or download it again"
    )


def test_truncated_parquet_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [f"text {n}" for n in range(100)])
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        check_refused(path, "cannot be read (", "create or download it again")


@pytest.fixture
def arrow_peak():
    """A function: the most bytes that Arrow has had at once since the test began."""
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    yield pool.max_memory
    pyarrow.set_memory_pool(before)


def write_repeated(path: Path, text: str, rows: int) -> Path:
    """A Parquet file that has the text once, and in every row a reference to it."""
    indices = pyarrow.array([0] * rows, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([text]))
    return write_parquet(path, column, compression="zstd", store_schema=False)


def test_repeated_texts_of_parquet_are_not_in_memory_all_at_once(tmp_path, arrow_peak, monkeypatch):
    text = "long " * 100_000
    monkeypatch.setattr(sources, "ROWS_SIZE", 4 * len(text))
    path = write_repeated(tmp_path / "a.parquet", text, 300)
    assert [len(b"".join(blocks)) for blocks in documents(Part(str(path)))] == [len(text)] * 300
    assert arrow_peak() < 12 * len(text)


@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_that_unpacks_to_far_more_is_refused_unread(
    dictionary, tmp_path, arrow_peak, monkeypatch
):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 2**22)
    text = "x" * (2**22 + 1)
    path = tmp_path / "a.parquet"
    if dictionary:
        write_repeated(path, text, 3)
    else:
        write_parquet(path, [text], compression="zstd", use_dictionary=False)
    del text
    written = arrow_peak()
    check_refused(path, "", "")
    assert arrow_peak() == written


def test_parquet_texts_beyond_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 1000)
    write_parquet(tmp_path / "a.parquet", ["x" * 1000, "é" * 1000, "one"])
    assert len(read(tmp_path / "a.parquet")) == 3
    for text in ("x" * 1001, "é" * 1001):
        path = write_parquet(tmp_path / "b.parquet", ["x" * 1000, text, "one"])
        check_refused(path, "row 1 of the row groups from 0", "")


def test_parquet_that_memory_does_not_hold(tmp_path, monkeypatch):
    """Such errors have no text."""

    def read_nothing(*_args, **_options):
        raise MemoryError

    path = write_parquet(tmp_path / "a.parquet", ["one"])
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", read_nothing)
    with pytest.raises(DataError) as caught:
        read(path)
    check_refusal(caught.value, f"data.path={path}", "cannot be read (", "")
    assert re.search(r"\(.+\)", str(caught.value).removeprefix(f"data.path={path}"))


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_damaged_parquet_is_read_or_refused(compression, tmp_path):
    """The format has no checksums by default, so that some damage cannot be seen."""
    texts = [f"text {n} é日" for n in range(60)]
    path = write_parquet(
        *(tmp_path / "a.parquet", texts), compression=compression, use_dictionary=False
    )
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read(path)
        except DataError as error:
            check_refusal(error, f"data.path={path}", "", "")
            refused += 1
    assert refused > len(whole) // 5 // 4


# --------------------------------------------------------------------------- documents -> tokens

DOCUMENTS = ["one", "", f"{END_OF_TEXT}two", END_OF_TEXT, "é日🙂 ", f"a{END_OF_TEXT}b", " three"]


@pytest.mark.parametrize("endoftext", ["token", "text"])
@pytest.mark.parametrize("name", ["gpt2", "byte"])
@pytest.mark.parametrize("file", ["a.jsonl", "a.ndjson.gz", "a.jsonl.zst", "a.parquet"])
def test_each_document_begins_with_the_end_of_text_token(file, name, endoftext, tmp_path):
    if file.endswith(".parquet"):
        path = write_parquet(tmp_path / file, DOCUMENTS, row_group_size=3)
    else:
        path = write(tmp_path / file, "".join(map(json_line, DOCUMENTS)))
    encoder = encoder_of(name, endoftext)
    found = list(encode_part(Part(str(path)), encoder))
    assert all(ids.dtype == np.uint16 and len(ids) for ids in found)
    ids = np.concatenate(found).tolist()
    assert ids == expected_ids(DOCUMENTS, name, endoftext)
    assert ids.count(encoder.tokenizer.eot_token) == 7 if endoftext == "token" else 6


@pytest.mark.parametrize("endoftext", ["token", "text"])
@pytest.mark.parametrize("text", ["one", END_OF_TEXT, f"{END_OF_TEXT}one", f"a{END_OF_TEXT}", " "])
def test_a_text_file_begins_with_the_end_of_text_token(text, endoftext, tmp_path):
    encoder = encoder_of("gpt2", endoftext)
    for mark in (b"", BYTE_ORDER_MARK):
        path = write(tmp_path / "a.txt", mark + text.encode())
        assert encode_all(path, encoder) == expected_ids([text], "gpt2", endoftext)


def test_a_byte_order_mark_alone_is_no_document(tmp_path, encoder):
    assert encode_all(write(tmp_path / "a.txt", BYTE_ORDER_MARK), encoder) == []


def test_a_long_document_has_one_end_of_text_token(tmp_path):
    text = "One bell rang, then two.\n" * 3000
    encoder = StreamEncoder("byte", piece=1000)
    path = write(tmp_path / "a.jsonl", json_line(text) * 2)
    ids = encode_all(path, encoder)
    assert ids == [256, *text.encode(), 256, *text.encode()]


def test_a_folder_of_all_kinds(tmp_path, encoder):
    """Read in the order of the names."""
    write(tmp_path / "a.jsonl", json_line("one") + json_line("two"))
    write(tmp_path / "b/c.txt", "three\n")
    write_parquet(tmp_path / "b/d.parquet", ["four", "five"])
    write(tmp_path / "b.txt.gz", "six\n")
    write(tmp_path / "e.ndjson.zst", json_line("seven"))
    write(tmp_path / "f.jsonl.gz", json_line("eight"))
    write(tmp_path / "g.txt.zst", "nine\n")
    write(tmp_path / "readme.md", "not this")
    files = find_files(str(tmp_path))
    texts = ["one", "two", "three\n", "four", "five", "six\n", "seven", "eight", "nine\n"]
    assert [text.decode() for file in files for text in read(file)] == texts
    assert [i for file in files for i in encode_all(file, encoder)] == expected_ids(texts)


# ---------------------------------------------------------------------------------- parts of files


@st.composite
def divided(draw, texts) -> tuple:
    """(what is to be written, where the file is divided): anywhere but at its beginning."""
    text = draw(texts)
    raw = text if isinstance(text, bytes) else text.encode()
    places = range(1, len(raw) + 1)
    if draw(st.booleans()):
        return text, draw(st.lists(st.sampled_from(places), max_size=8).map(sorted))
    first = draw(st.sampled_from(places))
    return text, list(places[first - 1 : first + 40])  # parts of one byte each


@many
@given(divided(mixes))
@example((f"one{END_OF_TEXT}two", list(range(1, 20))))
@example(("x" * 50, list(range(1, 51))))
@example(("日本語" * 9, list(range(1, 82))))
@example(("don't we'll ' s 'ś", list(range(1, 20))))
@example(("  \n \n\n  x", list(range(1, 10))))
def test_parts_of_a_text_give_the_ids_of_the_whole(folder, encoder, text_and_bounds):
    text, bounds = text_and_bounds
    path = write(folder / "a.txt", text)
    text = text.removeprefix("\ufeff")
    whole = encode_all(path, encoder)
    assert whole == expected_ids([text])
    assert read_all(path, bounds) == text.encode()
    assert encode_all(path, encoder, bounds) == whole


@many
@given(divided(mixes), st.integers(1, 64))
@example(("日本日本日本日本、" * 3, [12, 14]), 17)
@example(("é" * 15 + "1" * 30, [1, 4, 8]), 16)
def test_parts_of_a_text_do_not_depend_on_windows(folder, text_and_bounds, size):
    text, bounds = text_and_bounds
    path = write(folder / "a.txt", text)
    expected = [read(*part) for part in parts_of(path, bounds)]
    with windows_of(size):
        assert [read(*part) for part in parts_of(path, bounds)] == expected


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("é" * 32_770 + "1" * 1000, [4, 10]),  # the only cut lies on a border of windows
        ("é" * 40_000 + "1" * 10_000 + " end", [4, 20_004]),  # two cuts, of which one is preferred
        ("a" * 30_000 + "\t" + "b" * 40_000 + "é", [4, 10_000]),
        ("a" * 200_000, [1, 70_000, 140_000]),
        ("日" * 50_000 + " " + "a" * 100_000, [3, 65_536, 65_540, 131_072]),
    ],
    ids=["border", "preferred", "tab", "none", "two runs"],
)
def test_parts_of_runs_longer_than_a_window(text, bounds, tmp_path):
    path = write(tmp_path / "a.txt", text)
    assert read_all(path, bounds) == text.encode()


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_parts_of_a_text_with_a_byte_order_mark(stop, tmp_path, encoder):
    for text in ("Hello", " Hello", "'Hello", f"{END_OF_TEXT}a"):
        path = write(tmp_path / "a.txt", BYTE_ORDER_MARK + text.encode())
        assert encode_all(path, encoder, [stop]) == expected_ids([text])
        assert read_all(path, [stop]) == text.encode()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_part_has_nothing(name, tmp_path):
    content = (json_line("one two") + json_line("é日🙂")).encode()
    path = write(tmp_path / name, content)
    for place in range(len(content) + 1):
        assert b"".join(read(path, place, place)) == b""


def test_places_in_a_part_are_told_as_places_in_the_file(tmp_path):
    """The encoder tells them when its two tokenizers differ."""

    class Recorder:
        tokenizer = get_tokenizer("byte")
        begins: ClassVar = []

        def encode(self, blocks, what, offset):
            assert what == str(path)
            self.begins.append(offset)
            assert content[offset:].startswith(b"".join(blocks))
            return []

    content = "One bell rang, 日本 then two.".encode()
    path = write(tmp_path / "a.txt", content)
    encode_all(path, Recorder(), [6, 16])
    assert Recorder.begins == [0, 8, 21]


def test_parts_of_a_text_are_about_as_long_as_asked_for(tmp_path):
    """Or dividing would be of no use."""
    text = ("One bell rang, then two. " * 40).encode()
    path = write(tmp_path / "a.txt", text)
    sizes = [len(b"".join(read(*part))) for part in parts_of(path, range(100, 1000, 100))]
    assert len(sizes) == 10
    assert all(90 < size < 110 for size in sizes)


@pytest.mark.parametrize("after", ["é日本é!é!é", "é日本é!é! é"])
@pytest.mark.parametrize("bad", [b"\xff", b"\0", b"\xf0\x9f", b"\xed\xa0\x80"])
def test_bad_byte_is_told_exactly_whichever_part_has_it(bad, after, tmp_path):
    before = "aé日 é日".encode()
    content = before + bad + after.encode()
    path = write(tmp_path / "a.txt", content)
    what = "a zero byte" if bad == b"\0" else f"0x{bad[0]:02x}"
    for bounds in itertools.combinations(range(1, len(content)), 2):
        (told,) = refusals(path, bounds)
        assert f"({what} at byte {len(before)})" in told


def refusals(path: Path, bounds: Iterable[int]) -> list[str]:
    """What is told by the parts of a file that is divided at these places."""
    told = []
    for part in parts_of(path, bounds):
        try:
            read(*part)
        except DataError as error:
            told.append(str(error))
    return told


STRAYS = [b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\x80", b"\x80" * 6]


@st.composite
def spoilt(draw) -> bytes:
    """A text with something in it that is not UTF-8."""
    raw = draw(mixes).encode()
    place = draw(st.integers(0, len(raw)))
    return raw[:place] + draw(st.sampled_from(STRAYS)) + raw[place:]


@many
@given(divided(spoilt()), st.just(sources.WINDOW) | st.integers(1, 64))
@example(("é".encode() * 8 + b"1" + b"\x80" * 12 + b"x", [4, 6]), 10)
def test_bad_bytes_are_never_passed_over(folder, content_and_bounds, size):
    content, bounds = content_and_bounds
    try:
        content.decode()  # what is spoilt may be a text by chance
    except UnicodeDecodeError as error:
        expected = f"(0x{content[error.start]:02x} at byte {error.start})"
        with windows_of(size):
            assert expected in refusals(write(folder / "a.txt", content), bounds)[0]


def test_bad_bytes_on_the_border_of_windows_are_told(tmp_path):
    """A cut before them must be seen by all parts, or what lies between two cuts is lost."""
    content = "é".encode() * 65_534 + b"1" + b"\x80" * 12 + "é".encode() * 1000
    (told,) = refusals(write(tmp_path / "a.txt", content), [4, 10])
    assert "(0x80 at byte 131069)" in told


@st.composite
def json_files(draw) -> tuple[list[str], str]:
    """(texts, the content of a file with them)"""
    texts = draw(st.lists(mixes | st.just(""), min_size=1, max_size=6))
    content = ""
    for text in texts:
        content += draw(st.sampled_from(["", "\n", " \r\n"]))
        content += json_line(text, ensure_ascii=draw(st.booleans()))
    return texts, content if draw(st.booleans()) else content.rstrip("\n")


@many
@given(json_files(), st.data(), st.just(sources.WINDOW) | st.integers(1, 64))
def test_parts_of_json_lines_give_the_ids_of_the_whole(folder, encoder, file, draw, size):
    texts, content = file
    _, bounds = draw.draw(divided(st.just(content)))
    path = write(folder / "a.jsonl", content)
    whole = encode_all(path, encoder)
    assert whole == expected_ids(texts)
    with windows_of(size):
        found = [text.decode() for part in parts_of(path, bounds) for text in read(*part)]
        assert found == texts
        assert encode_all(path, encoder, bounds) == whole


def test_json_lines_may_be_divided_at_any_byte(tmp_path):
    texts = ["one", "é日🙂", "", "two\nlines"]
    content = "\n".join(json_line(text, ensure_ascii=False) for text in texts).encode()
    path = write(tmp_path / "a.jsonl", content)
    for bounds in itertools.combinations(range(1, len(content) + 1), 2):
        found = [text.decode() for part in parts_of(path, bounds) for text in read(*part)]
        assert found == texts
    bounds = range(1, len(content))
    assert [len(read(*part)) for part in parts_of(path, bounds)].count(1) == len(texts)


@some
@given(st.lists(mixes | st.just(""), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_parts_of_parquet_give_the_ids_of_the_whole(folder, encoder, texts, size, draw):
    path = write_parquet(folder / "a.parquet", texts, row_group_size=size)
    groups = len(row_groups(str(path)))
    assert groups == -(-len(texts) // size)
    bounds = draw.draw(st.lists(st.integers(0, groups), max_size=4).map(sorted))
    whole = encode_all(path, encoder)
    assert whole == expected_ids(texts)
    assert encode_all(path, encoder, bounds) == whole


# ------------------------------------------------------------------------------------ opening files

NAMES = ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.zst"]


@pytest.mark.parametrize("name", NAMES)
def test_fifo_is_refused_at_once(name, tmp_path):
    """Where opening it would wait for somebody to write into it."""
    fifo = tmp_path / name
    os.mkfifo(fifo)
    told = []

    def refused():
        check_refused(fifo, "not a regular file", "give a text file")
        told.append(True)

    thread = threading.Thread(target=refused, daemon=True)  # if it waits, then till the very end
    thread.start()
    thread.join(timeout=10)
    assert told


@pytest.mark.parametrize("name", NAMES)
def test_folder_by_the_name_of_a_file_is_refused(name, tmp_path):
    (tmp_path / name).mkdir()
    check_refused(tmp_path / name, "not a regular file", "give a text file")


@pytest.mark.parametrize(
    ("name", "opener"),
    [
        ("a.txt", "builtins.open"),
        ("a.jsonl", "builtins.open"),
        ("a.txt.gz", "gzip.open"),
        ("a.jsonl.zst", "pyarrow.input_stream"),
    ],
)
def test_unreadable_file_is_refused(name, opener, tmp_path, monkeypatch):
    def deny(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / name, "text")
    with monkeypatch.context() as patch:
        patch.setattr(opener, deny)  # root may read everything
        with pytest.raises(DataError) as caught:
            read(path)
    check_refusal(
        caught.value,
        f"data.path={path}",
        "cannot be read (Permission denied)",
        "check its permission",
    )


@pytest.mark.parametrize(
    ("path", "what", "package"),
    [
        ("a.parquet", "Parquet", "pyarrow"),
        ("a.txt.zst", "zstd", "pyarrow"),
        ("a.jsonl.zst", "zstd", "pyarrow"),
        ("hub:some/name", "the Hugging Face hub", "datasets"),
    ],
)
def test_missing_library_is_told_with_the_command(path, what, package, tmp_path, monkeypatch):
    if not path.startswith("hub:"):
        path = write(tmp_path / path, "text")
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)  # import raises ModuleNotFoundError
    with pytest.raises(DataError) as caught:
        read(path)
    check_refusal(
        caught.value,
        f"data.path={path}",
        f"reading {what} needs {package}",
        f"pip install {package}",
    )
    assert str(caught.value).endswith(package)  # no more than the command


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_other_files_do_without_the_libraries(name, tmp_path, monkeypatch):
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    assert read(write(tmp_path / name, json_line("one")))


# ------------------------------------------------------------------------------------------ hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub({file: texts or content}) -> hub:FOLDER, a data set on this machine."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(files: dict) -> str:
        place = tmp_path / "set"
        for name, content in files.items():
            if isinstance(content, list) and name.endswith(".parquet"):
                place.mkdir(exist_ok=True)
                write_parquet(place / name, content)
            else:
                lines = content if isinstance(content, str) else "".join(map(json_line, content))
                write(place / name, lines)
        return f"hub:{place}"

    return make


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt"])
def test_hub_data_set(name, hub, encoder):
    texts = ["one", "é日🙂", "two"]
    path = hub({name: "".join(f"{text}\n" for text in texts) if name == "a.txt" else texts})
    assert [text.decode() for text in read(path)] == texts
    assert encode_all(path, encoder) == expected_ids(texts)


def test_hub_documents_begin_with_the_end_of_text_token(hub, encoder):
    path = hub({"a.jsonl": DOCUMENTS})
    assert encode_all(path, encoder) == expected_ids(DOCUMENTS)


def test_hub_data_set_is_read_shard_by_shard(hub, encoder):
    texts = [[f"text {shard} {row}" for row in range(2 + shard)] for shard in range(3)]
    path = hub({f"train-{shard}.jsonl": rows for shard, rows in enumerate(texts)})
    assert hub_data(path).num_shards == 3
    for shard, rows in enumerate(texts):
        assert [text.decode() for text in read(path, shard, 3)] == rows
        ids = np.concatenate(list(encode_part(Part(path, shard, 3), encoder)))
        assert ids.tolist() == expected_ids(rows)
    assert [text.decode() for text in read(path)] == list(itertools.chain(*texts))


def test_hub_config_and_split_in_the_name(hub):
    configs = "---\nconfigs:\n- config_name: first\n  data_files: a.jsonl\n- config_name: second\n"
    configs += "  data_files:\n  - split: train\n    path: b.jsonl\n"
    configs += "  - split: test\n    path: c.jsonl\n---\n"
    path = hub({"README.md": configs, "a.jsonl": ["one"], "b.jsonl": ["two"], "c.jsonl": ["three"]})
    assert read(f"{path}:first") == [b"one"]
    assert read(f"{path}:second") == [b"two"]
    assert read(f"{path}:second:test") == [b"three"]
    check = "check NAME:CONFIG:SPLIT"
    check_refused(path, "cannot be opened (Config name is missing", check)  # a choice to make
    check_refused(f"{path}:third", "cannot be opened (BuilderConfig 'third' not found", check)
    check_refused(f"{path}:second:val", "cannot be opened (Bad split: val", check)


def test_hub_split_without_a_config(hub):
    path = hub({"train.jsonl": ["one"], "test.jsonl": ["two"]})
    assert read(path) == [b"one"]
    assert read(f"{path}::test") == [b"two"]


@pytest.mark.parametrize("name", ["no-such/data-set", "nosuchset", "/no/such/folder", ""])
def test_hub_name_that_does_not_exist_is_refused(name):
    check_refused(f"hub:{name}", "cannot be opened (", "check NAME:CONFIG:SPLIT, and the network")


def test_hub_text_key(hub):
    path = hub({"a.jsonl": json_line("one", "content")})
    assert read(path, text_key="content") == [b"one"]
    check_refused(path, "has no text under 'text' (it has 'number', 'content')", SET_KEY)


def test_hub_row_without_a_text_is_refused(hub):
    path = hub({"a.jsonl": json_line("one") + '{"number": 2, "text": null}\n'})
    check_refused(path, "has under 'text' what is null, not a text", MEND)


def test_hub_data_set_that_breaks_off_is_refused(hub):
    path = hub({"a.jsonl": json_line("one"), "b.jsonl": json_line("two") + "not JSON\n"})
    check_refused(path, "", "")
