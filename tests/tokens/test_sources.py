"""tokens/sources.py: files -> documents -> ids, whole or in parts, and what is refused.

The data sets of the hub are local folders here.
"""

import codecs
import errno
import glob
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.refusals import not_waiting, refused
from helpers.tally import CAMPAIGN
from helpers.texts import expected_ids, numbers_in, packed, peak_memory, write_packed, write_source
from helpers.texts import mixes as any_text
from hypothesis import example, given, settings
from hypothesis import strategies as st

from errors import DataError
from tokens import END_OF_TEXT, sources
from tokens.encoding import StreamEncoder
from tokens.sources import Part, documents, encode_part, find_files, hub_data, kind_of, row_groups
from tokens.tokenizers import TOKENIZERS, get_tokenizer

some = settings(max_examples=150 if CAMPAIGN else 25, deadline=None, derandomize=True)

mixes = any_text.map(lambda text: text.replace("\0", "")).filter(bool)
endings = st.sampled_from(["", ".gz", ".zst"])
windows = st.just(sources.WINDOW) | st.integers(1, 64)
MARK = codecs.BOM_UTF8
BELL = b"One bell rang, then two; nobody came down to the ferry.\n"


def write(path: Path, content: str | bytes = "text") -> Path:
    """A file with this content, compressed as its name says."""
    return write_packed(path, content.encode() if isinstance(content, str) else content)


def write_parquet(path: Path, texts: list, key: str = "text", **options) -> Path:
    table = pyarrow.table({"number": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def json_line(text: str, key: str = "text", **options) -> str:
    return json.dumps({"number": 1, key: text}, **options) + "\n"


def read(path: object, *rest, **options) -> list[bytes]:
    """Each document of a file, or of a part of one, as one block."""
    return [b"".join(blocks) for blocks in documents(Part(str(path), *rest, **options))]


def parts_of(path: object, bounds: Iterable[int]) -> list[tuple]:
    """The consecutive (path, start, stop) of a file that is divided at these places."""
    return [(path, *ends) for ends in itertools.pairwise([0, *bounds, None])]


def read_all(path: object, bounds: Iterable[int]) -> list[bytes]:
    """The documents of all parts of a file that is divided at these places."""
    return [text for part in parts_of(path, bounds) for text in read(*part)]


def encode_all(path: object, encoder: StreamEncoder, bounds: Iterable[int] = ()) -> list[int]:
    """The ids of all parts of a file that is divided at these places, by one encoder."""
    parts = [Part(str(path), start, stop) for path, start, stop in parts_of(path, bounds)]
    return [i for part in parts for ids in encode_part(part, encoder) for i in ids.tolist()]


def ids_of(texts: list[str], tokenizer: str = "gpt2", endoftext: str = "token") -> list[int]:
    return expected_ids([("jsonl", texts)], tokenizer, endoftext)


def check_refused(path: object, *rest, **options) -> DataError:
    """The error of reading a file, which names the file."""
    with refused(DataError, "data.path", path) as caught:
        read(path, *rest, **options)
    return caught.value


def undecodable(content: bytes) -> tuple[int, ...]:
    """(byte, place) where Python's decoder stops."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content[error.start], error.start
    return ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For tests with hypothesis, which write the same files over and over."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def encoder():
    return StreamEncoder("gpt2", "token")


def blocks_of(size: int):
    """Files are read in blocks of so many bytes."""
    return mock.patch.object(sources, "BLOCK", size)


# -------------------------------------------------------------------------------- finding files

ALL = "a.ndjson.zst b/b.ndjson.gz b/d.jsonl.zst c.ndjson e.jsonl.gz f.jsonl g.txt.zst h.txt.gz"
ALL = [f"all/{name}" for name in ("A.TXT", "B.Jsonl.GZ", *ALL.split(), "i.parquet")]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A few texts in the working folder, which is the home folder too."""
    others = "b.txt a.txt c.md deep/z.txt deep/er/y.txt a[1].txt x.txt.bak"
    ignored = "all/j.bin all/k.json all/l.gz all/m.zip all/n.parquet.gz notes/a.md"
    for name in (*ALL, *others.split(), *ignored.split()):
        write(tmp_path / name)
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_find_files(tree):
    for path, expected in (
        ("c.md", ["c.md"]),
        ("all", ALL),
        (".", ["a.txt", "a[1].txt", *ALL, "b.txt", "deep/er/y.txt", "deep/z.txt"]),
        ("a[1].txt", ["a[1].txt"]),  # a file of that name comes before a pattern
        (["deep", "c.md", "b.*"], ["deep/er/y.txt", "deep/z.txt", "c.md", "b.txt"]),
        (["b.txt", "a.txt", "b.txt"], ["b.txt", "a.txt", "b.txt"]),
        ("~/deep", [f"{tree}/deep/er/y.txt", f"{tree}/deep/z.txt"]),
        (["hub:name:config:split", "a.txt"], ["hub:name:config:split", "a.txt"]),
    ):
        assert find_files(path) == expected, path
    for path in ("missing.txt", "notes", "zero byte\0.txt"):
        for given_path in (path, ["a.txt", path]):
            with refused(DataError, "data.path", path):
                find_files(given_path)
    for name in (".git/x.txt", ".hidden"):
        write(tree / name)
    patterns = "* *.txt ** **/ **/* **/*.txt */ */* deep/** **/er/**/*.txt ./*.txt .* **/.* "
    patterns += ".git/* ./**/*.txt deep/../*.txt deep//*.txt [!a]* a[[]1].txt d*/er no/* **x "
    for pattern in [*patterns.split(), "?.txt", f"{tree}/*.txt", f"{tree}/**/y.txt"]:
        if expected := sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True))):
            assert find_files(pattern) == expected, pattern
        else:
            with refused(DataError, "data.path", pattern):
                find_files(pattern)


def test_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """Permissions do not stop root, so the system calls are replaced."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a" / "a.txt")
    write(tmp_path / "b" / "deep" / "b.txt")
    for call, denied, paths in (
        (os.scandir, "b", ("**/*.txt", "*/*.txt", "b/*.txt", ["a/a.txt", "**/a.txt"])),
        (os.scandir, "b/deep", (".", "*/deep/*.txt")),
        (os.stat, "b", (".", "**/*.txt")),
        (os.stat, "b/deep/b.txt", (".", "**/*.txt")),
    ):

        def deny(path=".", *args, call=call, denied=denied, **options):
            if not isinstance(path, int) and os.path.abspath(path) == str(tmp_path / denied):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **options)

        for path in paths:
            with monkeypatch.context() as patch, refused(DataError, "data.path") as caught:
                patch.setattr(os, call.__name__, deny)
                find_files(path)
            assert Path(caught.value.value) == Path(denied)


def test_each_file_is_read_once_and_links_are_not_circular(tmp_path):
    top = tmp_path / "outside" / "texts"
    write(tmp_path / "outside" / "not_this.txt")
    a = write(top / "a.txt")
    write(tmp_path / "elsewhere" / "b.txt")
    write(top / "deep" / "c.txt")
    (top / "before").symlink_to(top / "deep")  # its own name comes first
    for n, target in enumerate([top, top, top.parent, tmp_path, top / "deep"]):
        (top / "deep" / f"link{n}").symlink_to(target)
    (top / "itself").symlink_to(top / "itself")
    (top / "nowhere").symlink_to(top / "gone")
    (top / "hard.txt").hardlink_to(a)
    (top / "link.txt").symlink_to(a)
    for name in ("another", "one"):
        (top / name).symlink_to(tmp_path / "elsewhere")
    found_in = [str(a), f"{top}/another/b.txt", f"{top}/deep/c.txt"]
    for path in ("", "**/*.txt", "**/**/*.txt", "**", "*"):
        with not_waiting():
            found = find_files(str(top / path))
        assert found == ([str(a)] if path == "*" else found_in), path


def test_files_that_are_not_texts_are_noted(tmp_path):
    for name in ("a.txt", ".git/HEAD", ".hidden"):
        write(tmp_path / name)
    notes: list[str] = []
    find_files(str(tmp_path), notes)
    assert notes == []
    write(tmp_path / "deep" / "b.md")
    find_files(str(tmp_path), notes)
    write(tmp_path / "c.py")
    find_files([str(tmp_path), str(tmp_path / "c.py")], notes)
    one, two = (note.removeprefix(f"data.path={tmp_path}: ") for note in notes)
    assert "b.md" in one
    assert "2" in two


def test_commands_have_a_path_as_one_word(tmp_path, encoder):
    """Whatever characters are in its name."""
    folder = tmp_path / "it's mine"

    def hint(path):
        with pytest.raises(DataError) as caught:
            list(encode_part(Part(*find_files(str(path))), encoder))
        return shlex.split(caught.value.hint)

    write(folder / "a.md")
    assert f"data.path={folder}/*.md" in hint(folder)
    write(folder / "train.bin", b"\1\0")
    assert {"data=shards", f"data.path={folder}"} <= set(hint(folder))
    assert f"data.path=[{folder},b]" in hint(f"{folder},b")
    for raw in (b"caf\xe9", b"\xff\xfea\0"):
        path = write(folder / "a.txt", raw)
        assert str(path) in hint(path)


def test_kind_is_known_by_the_name():
    for kind, names in (
        ("text", "a.txt a.md a a.txt.gz a.zst a.csv jsonl a.parquet.gz"),
        ("jsonl", "a.jsonl a.jsonl.gz a.ndjson a.ndjson.zst a.json a.json.gz a.JSONL A.Json.GZ"),
        ("parquet", "a.parquet A.PARQUET"),
        ("hub", "hub:a.parquet hub:some/name"),
    ):
        assert {kind_of(name) for name in names.split()} == {kind}
        assert {Part(name).kind for name in names.split()} == {kind}


# ----------------------------------------------------------------------------------- plain text


def test_text_is_read_unchanged_without_the_byte_order_mark(tmp_path):
    for content, text in (
        (MARK + b"Hello", "Hello"),
        (MARK + MARK + b"Hello", "\ufeffHello"),
        (b"Hello" + MARK, "Hello\ufeff"),
        (MARK, ""),
        (b"one\r\ntwo\rthree\n", "one\r\ntwo\rthree\n"),
        (b" \n\x1c text \n\n", " \n\x1c text \n\n"),
        (b'{"text": "a"}\n', '{"text": "a"}\n'),  # JSON by another name is a text
    ):
        for ending in ("", ".gz", ".zst", ".GZ"):
            assert read(write(tmp_path / f"a.txt{ending}", content)) == [text.encode()], content


@some
@given(st.lists(mixes, max_size=4), st.integers(4, 40), endings)
@example(["é🙂日本", "a🙂日é" * 30], 4, "")
@example(["\ufeff🙂x🙂x🙂"], 4, ".gz")
def test_blocks_are_whole_characters(folder, texts, size, ending):
    """Also where the border of a block divides a character."""
    lines = write(folder / f"a.jsonl{ending}", "".join(map(json_line, texts)))
    rows = write_parquet(folder / "a.parquet", pyarrow.array(texts, pyarrow.string()))
    files = [
        (write(folder / f"{n}.txt{ending}", text), [text.removeprefix("\ufeff")])
        for n, text in enumerate(texts)
    ]
    for path, expected in [*files, (lines, texts), (rows, texts)]:
        with blocks_of(size):
            found = [[b.decode() for b in blocks] for blocks in documents(Part(str(path)))]
        assert ["".join(blocks) for blocks in found] == expected
        assert all(0 < len(block) <= size + 3 for blocks in found for block in blocks)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_text_is_read_in_little_memory(ending, tmp_path):
    path = write(tmp_path / f"a.txt{ending}", BELL * 50_000)
    found = (block for blocks in documents(Part(str(path))) for block in blocks)
    with blocks_of(2**16):
        size, peak = peak_memory(lambda: sum(map(len, found)))
    assert size == len(BELL) * 50_000
    assert peak < 10 * 2**16


UNUSABLE = {  # content, numbers in the reason, words in the hint (programs, encodings, endings)
    "empty": (b"", (), ""),
    "zero byte": (b"x" * 2_000_000 + b"\0def", (2_000_000,), ""),
    "Latin-1": ("café".encode("latin1"), (0xE9, 3), "iconv LATIN1"),
    "bad byte after 3 MB": (b"\n" * 3_000_000 + b"\x80", (0x80, 3_000_000), "iconv LATIN1"),
    "bad byte after a mark": (MARK + b"ab\xff", (0xFF, 5), "iconv LATIN1"),
    "UTF-16 LE": (b"\xff\xfe" + "text".encode("utf-16-le"), (), "iconv UTF-16"),
    "UTF-16 BE": (b"\xfe\xff" + "text".encode("utf-16-be"), (), "iconv UTF-16"),
    "UTF-32 LE": (codecs.BOM_UTF32_LE + b"t\0\0\0", (), "iconv UTF-32"),
    "UTF-32 BE": (codecs.BOM_UTF32_BE + b"\0\0\0t", (), "iconv UTF-32"),
    "gzip": (packed(b"text", Path("a.gz")), (), ".gz"),
    "zip": (b"PK\x03\x04\x14", (), "unpack"),
    "zstd": (packed(b"text", Path("a.zst")), (), ".zst"),
    "Parquet": (b"PAR1\x15", (), ".parquet"),
    "token file": (b"\x88\xd8\x34\x01\1\0\0\0", (), "data=shards"),
}


def test_unusable_text_is_refused(tmp_path):
    for kind, (content, numbers, words) in UNUSABLE.items():
        for ending in ("", ".gz", ".zst"):
            error = check_refused(write(tmp_path / f"bad.txt{ending}", content))
            assert set(numbers) <= numbers_in(error), kind
            assert all(word in error.hint for word in words.split()), kind
    for name in ("a.txt.bz2", "a.jsonl.xz", "A.ZSTD", "a.parquet.lz4", "a.txt.7z"):
        check_refused(write(tmp_path / name))


BAD = [b"\xff", b"\x80", b"\xc0\x80", b"\xe6\x97", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xf5"]


@pytest.mark.parametrize("size", [4, 5, 7, 1000])
def test_bad_bytes_at_borders_of_blocks_are_refused_with_their_place(size, folder):
    """Bytes that are not UTF-8, as Python's decoder finds them; zero bytes; a partial character."""
    text = "aé日🙂z🙂日é🙂".encode()
    rows = [(text[:end], undecodable(text[:end])) for end in range(1, len(text) + 1)]
    for place in range(len(text) + 1):
        rows += [(c, undecodable(c)) for c in (text[:place] + bad + text[place:] for bad in BAD)]
        if not undecodable(text[:place]):
            rows.append((text[:place] + b"\0" + text[place:], (place,)))
    for content, expected in rows:
        path = write(folder / "bad.txt", content)
        with blocks_of(size):
            if expected:
                assert set(expected) <= numbers_in(check_refused(path)), content
            else:
                assert read(path) == [content]


# ------------------------------------------------------------------------------------- archives

# As the zstd program packs BELL, with a checksum: pyarrow makes none.
SUMMED = (
    b'(\xb5/\xfd\x04h\x9d\x01\x00\x82\xc3\x0b\x11\xb0\xebG\x0e^"`cX\xe5\xe2\x80\xb9\xc8W\x89\x01@'
    b"<\xd5'\x7f\xads\x8d.\x91\xdf\xca\xf1Ci\x12=\xd2\xad\xf1k\x1d\x14\x165c7>\x92\x00\x81~:\x00"
)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_whole_and_damaged_archives(ending, tmp_path):
    path = tmp_path / f"a.txt{ending}"
    whole = SUMMED if ending == ".zst" else packed(BELL, path)
    path.write_bytes(whole * 2)  # of two members
    assert read(path) == [BELL * 2]
    ignored = range(4, 10) if ending == ".gz" else ()  # the time and system in gzip's header
    for place in set(range(len(whole))).difference(ignored):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        check_refused(path)
    lines = "".join(json_line(f"Line {n}") for n in range(9)).encode()
    other = tmp_path / f"a.jsonl{ending}"
    other.write_bytes(packed(lines[:9], path) + packed(lines[9:], path))  # one ends inside a line
    assert read(other) == [f"Line {n}".encode() for n in range(9)]
    member = packed(lines, path)
    truncated = [(2 * member)[:end] for end in range(1, 2 * len(member), 2) if end != len(member)]
    for content in (*truncated, b"This was never packed.\n", member + b"something else"):
        for file in (path, other):
            file.write_bytes(content)
            check_refused(file)


# ----------------------------------------------------------------------------------- JSON lines


def test_json_lines(tmp_path):
    lines = [
        *("\n", '{"text": "one", "id": 1}\n', "   \t\r\n", '  {"id": 2, "text": "two\\n"}  \r\n'),
        *('{"text": ""}\n', "\n\n", '{"text": "é日 \u2028 \\u65e5 \\ud83d\\ude42 \\u0000"}\n'),
        *('{"text": "\ufeffmark"}\n', '{"text": "last"}'),
    ]
    texts = ["one", "two\n", "", "é日 \u2028 日 🙂 \0", "\ufeffmark", "last"]
    for name, content, expected in (
        *((name, "".join(lines), texts) for name in ("a.jsonl", "a.ndjson.gz", "a.jsonl.zst")),
        ("a.jsonl", "\ufeff" + json_line("é") * 2, ["é", "é"]),
        ("a.jsonl", "", []),
        ("a.jsonl", " \n\n", []),
    ):
        assert [text.decode() for text in read(write(tmp_path / name, content))] == expected


def test_text_key(tmp_path):
    for key in ("content", "", "é\n"):
        path = write(tmp_path / "a.jsonl", '{"text": 1, "content": "a", "": "a", "é\\n": "a"}\n')
        assert read(path, text_key=key) == [b"a"]
        path = write_parquet(tmp_path / "a.parquet", ["a", "b"], key or "x.y")
        assert read(path, text_key=key or "x.y") == [b"a", b"b"]


def test_lone_surrogates_become_replacement_characters(tmp_path, encoder):
    """As with tiktoken; a pair of them is one character."""
    texts = ["a\ud800", "\udc00b\ud83d", "\ud83d\ude42", "\ude42\ud83d"]
    path = write(tmp_path / "a.jsonl", "".join(map(json_line, texts)))
    expected = ["a\ufffd", "\ufffdb\ufffd", "🙂", "\ufffd" * 2]
    assert [text.decode() for text in read(path)] == expected
    assert encode_all(path, encoder) == ids_of(texts)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_line_above_the_limit_is_refused_without_reading_it(ending, tmp_path, monkeypatch):
    limit = 2**17
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", limit)
    monkeypatch.setattr(sources, "BLOCK", 2**14)
    longest = json_line("x" * (limit - len(json_line(""))))
    good = write(tmp_path / f"good.jsonl{ending}", longest * 2 + longest[:-1])  # no line end
    assert [len(text) for text in read(good)] == [limit - len(json_line(""))] * 3
    path = write(tmp_path / f"bad.jsonl{ending}", longest + json_line("x" * 40 * limit))
    error, peak = peak_memory(lambda: check_refused(path))
    assert limit in numbers_in(error)
    assert peak < 10 * limit


UNUSABLE_LINES = {  # a line, words of the reason, words of the hint
    "not JSON": (b"some text", "", ""),
    "cut off": (b'{"text": "a"', "", ""),
    "two objects": (b'{"text": "a"} {"text": "b"}', "", ""),
    "not UTF-8": (b'{"text": "a\xff"}', "0xff", ""),
    "a string": (b'"text"', "'text'", "data.text_key"),
    "other keys": (b'{"id": 1, "a\\nb": ""}', "'id' 'a\\nb'", "data.text_key"),
    "20,000 keys": (json.dumps(dict.fromkeys(range(20_000))).encode(), "20,000", "data.text_key"),
    "a long key": (json.dumps({"long" * 10_000: 1}).encode(), "", "data.text_key"),
    "a number": (b'{"text": 5}', "int", ""),
    "no text": (b'{"text": null}', "null", ""),
    "a list of texts": (b'{"text": ["a"]}', "list", ""),
    "too deep": (b'{"a":' * 100_000, "", ""),
    "an array": (b'[{"text": "a"}]', "", "jq"),
    "an array of many lines": (b'\xef\xbb\xbf [\n{"text": "a"}]', "", "jq"),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_unusable_json_line_is_refused(ending, tmp_path):
    good = b'{"text": "good"}\n'
    for kind, (line, reason, hint) in UNUSABLE_LINES.items():
        path = write(tmp_path / f"a.jsonl{ending}", good + b"\n" + line + b"\n" + good)
        assert next(iter(map(b"".join, documents(Part(str(path)))))) == b"good"  # read before it
        errors = [check_refused(path, start) for start in ([0] if ending else [0, 5])]
        for error in errors:
            assert 18 in numbers_in(error), kind
            assert all(word in error.reason for word in reason.split()), kind
            assert hint in error.hint, kind
            assert len(str(error)) - len(str(path)) < 1000, kind


# -------------------------------------------------------------------------------------- Parquet


def test_parquet(tmp_path):
    texts = ["one", "", "é日🙂\n\0", "one"] * 200  # more than are read at once
    for compression, kind in itertools.product(
        ("none", "snappy", "zstd"), ("string", "large_string", "string_view", "dictionary")
    ):
        column = pyarrow.array(texts)
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
        path = write_parquet(tmp_path / "a.parquet", column, compression=compression)
        assert read(path) == [text.encode() for text in texts], (compression, kind)
    assert read(write_parquet(path, pyarrow.array([], pyarrow.string()))) == []


def test_row_groups(tmp_path):
    texts = ["x" * 1000, "y" * 50, "z" * 2000]
    options = {"row_group_size": 1, "compression": "none", "use_dictionary": False}
    path = write_parquet(tmp_path / "a.parquet", texts, **options)
    for size, text in zip(row_groups(str(path)), texts, strict=True):
        assert len(text) < size < len(text) * 3 + 500  # statistics have the text twice at most
    assert read(path, 1, 3) == [texts[1].encode(), texts[2].encode()]
    assert read(path, 2) == [texts[2].encode()]
    assert read(path, 1, 1) == read(path, 3) == []


def test_unusable_parquet_is_refused(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ["a"], "content")
    error = check_refused(path)
    assert all(word in error.reason for word in ("'text'", "'number'", "'content'"))
    assert "data.text_key" in error.hint
    write_parquet(path, ["a", "b", "c", None], row_group_size=2)
    assert numbers_in(check_refused(path)) == {3, 0}
    assert numbers_in(check_refused(path, 1, 2)) == {1}
    for column in ([1, 2], [b"a", b"b"], [["a"], ["b"]], [{"text": "a"}, {"text": "b"}]):
        error = check_refused(write_parquet(path, column))
        assert type(column[0]).__name__ in error.reason
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 1000)
    assert len(read(write_parquet(path, ["x" * 1000, "é" * 1000, "one"]))) == 3
    for text in ("x" * 1001, "é" * 1001):
        write_parquet(path, ["x" * 1000, text, "one"])
        assert {1, 0, 1000} <= numbers_in(check_refused(path))
    raising = mock.Mock(side_effect=MemoryError)  # which has no message
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", raising)
    check_refused(write_parquet(path, ["one"]))


def test_damaged_parquet_is_refused(tmp_path):
    """Some changed bytes cannot be seen, because the format has no checksums by default."""
    texts = [f"text {n} é日" for n in range(60)]
    path = write_parquet(tmp_path / "a.parquet", texts, use_dictionary=False, compression="none")
    whole = path.read_bytes()
    truncated = [whole[:end] for end in range(0, len(whole), 23)]
    for content in [*truncated, b"PAR1", b"Never a Parquet file.\n" * 9]:
        path.write_bytes(content)
        check_refused(path)
        with refused(DataError, "data.path", path):
            row_groups(str(path))
    places, errors = range(0, len(whole), 11), 0
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read(path)
        except DataError:
            errors += 1
    assert errors > len(places) // 4


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
    text = "long " * 40_000
    monkeypatch.setattr(sources, "ROWS_SIZE", 4 * len(text))
    path = write_repeated(tmp_path / "a.parquet", text, 100)
    assert [len(b"".join(blocks)) for blocks in documents(Part(str(path)))] == [len(text)] * 100
    assert arrow_peak() < 12 * len(text)


@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_with_an_extreme_compression_ratio_is_refused_unread(
    dictionary, tmp_path, arrow_peak, monkeypatch
):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 2**20)
    text = "x" * (2**20 + 1)
    path = tmp_path / "a.parquet"
    if dictionary:
        write_repeated(path, text, 3)
    else:
        write_parquet(path, [text], compression="zstd", use_dictionary=False)
    del text
    written = arrow_peak()
    check_refused(path)
    assert arrow_peak() == written


# --------------------------------------------------------------------------- documents -> tokens

DOCUMENTS = ["one", "", f"{END_OF_TEXT}two", END_OF_TEXT, "é日🙂 ", f"a{END_OF_TEXT}b", " three"]


@pytest.mark.parametrize("endoftext", ["token", "text"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_document_or_text_file_begins_with_the_end_of_text_token(name, endoftext, tmp_path):
    encoder = StreamEncoder(name, endoftext)
    for file in ("a.jsonl", "a.ndjson.gz", "a.parquet"):
        path = write_source(tmp_path / file, DOCUMENTS)
        found = list(encode_part(Part(str(path)), encoder))
        assert all(ids.dtype == np.uint16 and len(ids) for ids in found)
        ids = np.concatenate(found).tolist()
        assert ids == ids_of(DOCUMENTS, name, endoftext)
        assert ids.count(encoder.tokenizer.eot_token) == (7 if endoftext == "token" else 6)
    for text in ("one", END_OF_TEXT, f"{END_OF_TEXT}one", f"a{END_OF_TEXT}", " "):
        for mark in ("", "\ufeff"):
            path = write(tmp_path / "a.txt", mark + text)
            assert encode_all(path, encoder) == ids_of([text], name, endoftext), text
    assert encode_all(write(tmp_path / "a.txt", MARK), encoder) == []


def test_a_long_document_has_one_end_of_text_token(tmp_path):
    text = "One bell rang, then two.\n" * 300
    path = write(tmp_path / "a.jsonl", json_line(text) * 2)
    ids = encode_all(path, StreamEncoder("byte", piece=100))
    assert ids == [256, *text.encode(), 256, *text.encode()]


def test_a_folder_of_all_kinds(tmp_path, encoder):
    """Read in the order of the names."""
    names = "a.jsonl b/c.txt b/d.parquet b.txt.gz e.ndjson.zst f.jsonl.gz g.txt.zst"
    texts = [["one", "two"], ["three\n"], ["four", "five"], ["six"], ["seven"], ["eight"], ["9\n"]]
    for name, own in zip(names.split(), texts, strict=True):
        write_source(tmp_path / name, own)
    write(tmp_path / "readme.md", "not this")
    files, whole = find_files(str(tmp_path)), list(itertools.chain(*texts))
    assert [text.decode() for file in files for text in read(file)] == whole
    assert [i for file in files for i in encode_all(file, encoder)] == ids_of(whole)


# ---------------------------------------------------------------------------------- parts of files


@st.composite
def divided(draw, texts) -> tuple:
    """(the content of a file, the places where it is divided): anywhere but at its start."""
    text = draw(texts)
    raw = text if isinstance(text, bytes) else text.encode()
    places = range(1, len(raw) + 1)
    if draw(st.booleans()):
        return text, draw(st.lists(st.sampled_from(places), max_size=8).map(sorted))
    first = draw(st.sampled_from(places))
    return text, list(places[first - 1 : first + 40])  # parts of one byte each


@some
@given(divided(mixes), windows)
@example((f"one{END_OF_TEXT}two", list(range(1, 20))), 64)
@example(("don't we'll ' s 'ś", list(range(1, 20))), 64)
@example(("  \n \n\n  x", list(range(1, 10))), 64)
@example(("日本日本日本日本、" * 3, [12, 14]), 17)
@example(("é" * 15 + "1" * 30, [1, 4, 8]), 16)  # the only cut lies on a border of windows
@example(("a" * 30 + "\t" + "b" * 40 + "é", [4, 10]), 64)
@example(("日" * 50 + " " + "a" * 100, [3, 63, 65, 131]), 64)
@example((f"\ufeff'Hello{END_OF_TEXT}", [1]), 64)
@example((f"\ufeff{END_OF_TEXT}a", [4]), 64)
def test_parts_of_a_text_give_the_ids_of_the_whole(folder, encoder, text_and_bounds, size):
    """Whatever the size of the windows in which cuts are looked for."""
    text, bounds = text_and_bounds
    path = write(folder / "a.txt", text)
    text = text.removeprefix("\ufeff")
    parts = read_all(path, bounds)
    assert b"".join(parts) == text.encode()
    with mock.patch.object(sources, "WINDOW", size):
        assert encode_all(path, encoder, bounds) == encode_all(path, encoder) == ids_of([text])
        assert read_all(path, bounds) == parts


def test_parts_have_their_place_in_the_file_and_about_the_length_asked_for(tmp_path):
    """The encoder is given the place, for its errors."""
    encoder = mock.Mock(tokenizer=get_tokenizer("byte"))
    encoder.encode = mock.Mock(return_value=[])
    path = write(tmp_path / "a.txt", "One bell rang, 日本 then two.")
    encode_all(path, encoder, [6, 16])
    assert [call.args[1:] for call in encoder.encode.call_args_list] == [
        *((str(path), 0), (str(path), 8), (str(path), 21))
    ]
    assert read_all(path, [6, 16]) == [b"One bell", " rang, 日本".encode(), b" then two."]
    path = write(tmp_path / "a.txt", "One bell rang, then two. " * 40)
    sizes = list(map(len, read_all(path, range(100, 1000, 100))))
    assert len(sizes) == 10
    assert all(90 < size < 110 for size in sizes)


STRAYS = [b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\x80", b"\x80" * 6, b"\0"]
not_text = st.tuples(mixes, st.sampled_from(STRAYS), mixes | st.just("")).map(
    lambda parts: parts[0].encode() + parts[1] + parts[2].encode()
)


@some
@given(divided(not_text), windows)
@example(("é".encode() * 8 + b"1" + b"\x80" * 12 + b"x", [4, 6]), 10)  # on a border of windows
@example((b"\xff" + b"abc", [1, 2]), 10)
@example(("aé日 é日".encode() + b"\xf0\x9f" + "é日本é!é! é".encode(), [*range(1, 30)]), 64)
def test_bad_bytes_are_refused_whichever_part_has_them(folder, content_and_bounds, size):
    content, bounds = content_and_bounds
    expected = undecodable(content) or ((content.index(0),) if 0 in content else ())
    path, errors = write(folder / "a.txt", content), []
    with mock.patch.object(sources, "WINDOW", size):
        for part in parts_of(path, bounds):
            try:
                read(*part)
            except DataError as error:
                errors.append(error)
    if expected:  # otherwise the parts are UTF-8 together
        assert set(expected) <= numbers_in(errors[0])


@st.composite
def json_files(draw) -> tuple[list[str], str]:
    """(texts, the content of a file with them)"""
    texts = draw(st.lists(any_text, min_size=1, max_size=6))
    content = ""
    for text in texts:
        content += draw(st.sampled_from(["", "\n", " \r\n"]))
        content += json_line(text, ensure_ascii=draw(st.booleans()))
    return texts, content if draw(st.booleans()) else content.rstrip("\n")


@some
@given(json_files(), st.data(), windows)
def test_parts_of_json_lines_give_the_ids_of_the_whole(folder, encoder, file, draw, size):
    texts, content = file
    _, bounds = draw.draw(divided(st.just(content)))
    path = write(folder / "a.jsonl", content)
    with mock.patch.object(sources, "WINDOW", size):
        assert [text.decode() for text in read_all(path, bounds)] == texts
        assert encode_all(path, encoder, bounds) == encode_all(path, encoder) == ids_of(texts)


@some
@given(st.lists(any_text, min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_parts_of_parquet_give_the_ids_of_the_whole(folder, encoder, texts, size, draw):
    path = write_parquet(folder / "a.parquet", texts, row_group_size=size)
    groups = len(row_groups(str(path)))
    assert groups == -(-len(texts) // size)
    bounds = draw.draw(st.lists(st.integers(0, groups), max_size=4).map(sorted))
    assert encode_all(path, encoder, bounds) == encode_all(path, encoder) == ids_of(texts)


# ------------------------------------------------------------------------------------ opening files


def test_special_files_are_refused_at_once(tmp_path):
    """Opening a FIFO would wait for somebody to write into it."""
    for number, name in enumerate(("a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.zst")):
        fifo, folder = tmp_path / name, tmp_path / str(number) / name
        os.mkfifo(fifo)
        folder.mkdir(parents=True)
        for path in (fifo, folder):
            with not_waiting():
                check_refused(path)


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    """root may read everything, so the opening is replaced."""
    for name, opener in (
        ("a.txt", "builtins.open"),
        ("a.txt.gz", "gzip.open"),
        ("a.jsonl.zst", "pyarrow.input_stream"),
    ):
        path = write(tmp_path / name)
        with monkeypatch.context() as patch, refused(DataError, "data.path", path):
            patch.setattr(opener, mock.Mock(side_effect=PermissionError(13, "Permission denied")))
            read(path)


def test_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    names = ("a.parquet", "a.txt.zst", "a.jsonl.zst")
    files = [(write(tmp_path / name), "pyarrow") for name in names]
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # import raises ModuleNotFoundError
    for path, package in [*files, ("hub:some/name", "datasets")]:
        assert check_refused(path).hint == f"pip install {package}"
    for name in ("b.txt", "b.jsonl", "b.txt.gz"):  # which need neither
        assert read(write(tmp_path / name, json_line("one")))


# ------------------------------------------------------------------------------------------ hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub({file: texts or content}) -> hub:FOLDER, a data set on this machine."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(files: dict, name: str = "set") -> str:
        for file, content in files.items():
            writer = write_source if isinstance(content, list) else write
            writer(tmp_path / name / file, content)
        return f"hub:{tmp_path / name}"

    return make


def test_hub_data_set(hub, encoder):
    """Whole, and shard by shard."""
    for name, texts in (("a.parquet", DOCUMENTS), ("a.txt", ["1\n", "é"])):
        path = hub({name: texts}, f"of {name}")
        expected = [text.rstrip("\n") for text in texts]
        assert [text.decode() for text in read(path)] == expected
        assert encode_all(path, encoder) == ids_of(expected)
    shards = [DOCUMENTS[:2], DOCUMENTS[2:3], DOCUMENTS[3:]]
    path = hub({f"train-{number}.jsonl": rows for number, rows in enumerate(shards)})
    assert hub_data(path).num_shards == 3
    for number, rows in enumerate(shards):
        assert [text.decode() for text in read(path, number, 3)] == rows
        ids = [i for ids in encode_part(Part(path, number, 3), encoder) for i in ids.tolist()]
        assert ids == ids_of(rows)
    assert [text.decode() for text in read(path)] == DOCUMENTS


def test_hub_config_and_split_in_the_name(hub):
    configs = "---\nconfigs:\n- config_name: first\n  data_files: a.jsonl\n- config_name: second\n"
    configs += "  data_files:\n  - split: train\n    path: b.jsonl\n"
    configs += "  - split: test\n    path: c.jsonl\n---\n"
    path = hub({"README.md": configs, "a.jsonl": ["one"], "b.jsonl": ["two"], "c.jsonl": ["three"]})
    assert read(f"{path}:first") == [b"one"]
    assert read(f"{path}:second") == [b"two"]
    assert read(f"{path}:second:test") == [b"three"]
    for wrong in (path, f"{path}:third", f"{path}:second:val", "hub:/no/such/folder", "hub:no/set"):
        assert "NAME:CONFIG:SPLIT" in check_refused(wrong).hint
    path = hub({"train.jsonl": ["one"], "test.jsonl": ["two"]}, "splits")
    assert read(path) == [b"one"]
    assert read(f"{path}::test") == [b"two"]


def test_unusable_hub_rows_are_refused(hub):
    path = hub({"a.jsonl": json_line("one", "content")})
    assert read(path, text_key="content") == [b"one"]
    assert "'content'" in check_refused(path).reason
    null = hub({"a.jsonl": json_line("one") + '{"number": 2, "text": null}\n'}, "null")
    assert "null" in check_refused(null).reason
    check_refused(hub({"a.jsonl": ["one"], "b.jsonl": json_line("two") + "not JSON\n"}, "damaged"))
