"""tokens/readers.py, sources.py: files -> documents -> ids, of files and of parts; errors."""

import errno
import json
import os
import re
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from helpers.refusals import refused, time_limit
from helpers.tally import trials
from helpers.texts import expected_ids, numbers_in, peak_memory, write_source
from helpers.texts import mixes as any_text
from helpers.texts import write_packed as write
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, VOCABULARIES, readers, records, text_files
from clearhead.tokens.encoding import StreamEncoder
from clearhead.tokens.readers import documents, encode_part, split_file
from clearhead.tokens.sources import find_files
from clearhead.tokens.text_files import FilePart, decoded_blocks
from clearhead.tokens.tokenizer import get_tokenizer

some = trials(10, 150)

mixes = any_text.map(lambda text: text.replace("\0", "")).filter(bool)
sizes = st.just(2**16) | st.integers(4, 64)


def write_parquet(path: Path, texts: list, key: str = "text", **options) -> Path:
    table = pyarrow.table({"number": list(range(len(texts))), key: texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def json_line(text: str, key: str = "text") -> str:
    return json.dumps({"number": 1, key: text}) + "\n"


def read(path: object, *rest, **options) -> list[bytes]:
    """The documents of a file or of a part, each as one block."""
    return [b"".join(blocks) for blocks in documents(FilePart(str(path), *rest, **options))]


def read_parts(path: object, most: int) -> list[bytes]:
    """The documents of all parts."""
    parts = list(split_file(str(path), most))
    return [b"".join(blocks) for part in parts for blocks in documents(part)]


def encode_all(path: object, encoder: StreamEncoder, most: int = 10**9) -> list[int]:
    """The ids of all parts, from one encoder."""
    arrays = [encode_part(part, encoder) for part in split_file(str(path), most)]
    return [token for part in arrays for ids in part for token in ids.tolist()]


def ids_of(texts: list[str], tokenizer: str = "gpt2") -> list[int]:
    return expected_ids([("jsonl", texts)], tokenizer)


def check_refused(path: object, *rest) -> DataError:
    """The error of reading a file; asserts that it names the file."""
    with refused(DataError, "data.path", path) as caught:
        read(path, *rest)
    return caught.value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for tests with hypothesis, which overwrite their files."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def encoder():
    return StreamEncoder(get_tokenizer("gpt2"))


def test_find_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = "A.TXT B.Jsonl.GZ a.ndjson.zst b/b.txt.gz e.txt.zst f.MD.GZ i.parquet"
    texts = [f"all/{name}" for name in texts.split()]
    others = "b.txt a.txt c.tex deep/z.txt deep/er/y.txt a[1].txt x.txt.bak"
    ignored = "all/j.bin all/k.json all/l.gz all/~$m.txt"
    ignored += " notes/a.html .git/x.txt .hidden .x.txt all/.git/y.txt"
    for name in (*texts, *others.split(), *ignored.split()):
        write(tmp_path / name)
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    deep = ["deep/er/y.txt", "deep/z.txt"]
    for path, expected in (
        (".", ["a.txt", "a[1].txt", *texts, "b.txt", *deep]),
        ("a[1].txt", ["a[1].txt"]),  # a file with this name has precedence over the pattern
        (["b.txt", "deep", "c.tex", "b.*"], ["b.txt", *deep, "c.tex"]),
        (["b.txt", "b.txt"], ["b.txt", "b.txt"]),
        ("~/deep", [f"{tmp_path}/{name}" for name in deep]),
        ("*.txt", ["a.txt", "a[1].txt", "b.txt"]),
        ("**/er/**/*.txt", ["deep/er/y.txt"]),
    ):
        assert find_files(path) == expected, path
    find_files(["all", "deep", "a.txt", "c.tex"], notes := [])
    (note,) = notes  # of the folder that has other files
    found = {*re.findall(r"\d+ [.\w]+", note)}
    assert found == {f"{len(texts)} files", "1 .bin", "1 .gz", "1 .json"}
    for path in (".", "**", "*.txt", ["deep", "**"]):  # each has a FIFO or files of another entry
        find_files(path, notes := [])
        assert notes, path
    for path in ("missing.txt", "notes", "no/*", "**.txt", "zero byte\0.txt"):
        with refused(DataError, "data.path", path):
            find_files(["a.txt", path])


def test_links_are_followed_and_not_circular(tmp_path):
    top = tmp_path / "outside" / "texts"
    a = write(top / "a.txt")
    write(tmp_path / "elsewhere" / "b.txt")
    for n, target in enumerate([top, top.parent, tmp_path / "elsewhere", top / "gone"]):
        (top / f"link{n}").symlink_to(target)
    (top / "z.txt").symlink_to(a)  # a linked file is listed once
    with time_limit():
        assert find_files(str(top)) == [str(a), f"{top}/link2/b.txt"]
        for path in (f"{top}/**/*.txt", [str(top), f"{tmp_path}/**/*.txt"]):
            files = find_files(path)
            assert sorted(os.path.basename(file) for file in files) == ["a.txt", "b.txt"]


def test_invalid_text_is_refused(tmp_path, monkeypatch):
    """With its byte, also if a character continues in the next block."""
    good = "Größe und Straße, überall. ".encode()
    for content, numbers in (  # numbers: in the reason
        (b"x" * 2_000_000 + b"\0", (2_000_000,)),
        ("text".encode("utf-16"), ()),
        (b"a\x03\x04\x14\0", (4,)),
    ):
        for ending in ("", ".gz", ".zst"):
            path = write(tmp_path / f"bad.txt{ending}", content)
            assert set(numbers) <= numbers_in(check_refused(path)), content[:9]
    for block in (2**20, len(good), 5):
        monkeypatch.setattr(text_files, "BLOCK", block)
        for end in (b"\xe9 " + good, b"\xc3", b"\0"):  # a wrong byte; a truncated file; no text
            error = check_refused(write(tmp_path / "a.txt", good + end))
            assert {len(good), end[0]} <= numbers_in(error)
            assert end != b"\xc3" or "utf-8" in error.hint
    for encoding, content in (
        ("latin-1", good.decode().encode("utf-16")),  # all bytes are valid
        ("utf-16", "text".encode("utf-32")),
        ("utf-7", b"+2AA-"),  # a lone surrogate
    ):
        with refused(DataError, "data.path", write(path := tmp_path / "a.txt", content)):
            read(path, encoding=encoding)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_whole_and_damaged_archives(ending, tmp_path):
    files = [tmp_path / f"a.txt{ending}", tmp_path / f"a.jsonl{ending}"]
    line = json_line("some text").encode()
    for file, text in zip(files, (line, b"some text"), strict=True):
        whole = write(file, line).read_bytes()
        file.write_bytes(whole * 2)  # a file with two members
        assert b"".join(read(file)) == text * 2
        truncated = [(2 * whole)[:end] for end in range(1, 2 * len(whole)) if end != len(whole)]
        damaged = whole[:12] + b"\xff" * 9 + whole[21:]
        followed = whole + b"something else"
        for content in (*truncated, damaged, b"Never packed.\n", followed):
            file.write_bytes(content)
            check_refused(file)


def test_json_lines(tmp_path):
    """A lone surrogate becomes U+FFFD, as in tiktoken; a surrogate pair is one character."""
    lines = (
        '\n{"text": "one", "id": 1}\n   \t\r\n  {"id": 2, "text": "two\\n"}  \r\n{"text": ""}\n\n\n'
        '{"text": "é日 \u2028 \\u65e5 \\ud83d\\ude42 \\ude42 \\u0000"}\n{"text": "\ufeffmark"}'
    )
    texts = ["one", "two\n", "", "é日 \u2028 日 🙂 \ufffd \0", "\ufeffmark"]
    for name in ("a.JSON", "a.ndjson.gz", "a.jsonl.zst"):
        assert read(write(tmp_path / name, lines)) == [text.encode() for text in texts]
    assert read(write(tmp_path / "a.jsonl", "\ufeff" + json_line("é") * 2)) == ["é".encode()] * 2


def test_json_array(tmp_path):
    """A .json file without an array has JSON lines."""
    texts = ["one", "", "é日 \u2028 🙂", "a" * 3000, "end"]
    records = [{"id": 1, "text": text} for text in texts] + [{"text": None}]
    for name, indent in (("a.json", None), ("a.JSON.gz", 2)):
        path = write(tmp_path / name, "\ufeff" + json.dumps(records, indent=indent))
        assert read(path) == [*(text.encode() for text in texts), b""]
    assert read(write(tmp_path / "b.json", json_line("x") * 2)) == [b"x", b"x"]
    for bad in (
        b'[{"text": "a"}, {"text"',
        b'[{"text": "a"}]\n[]',
        b'[{"text": "\xe9"}]',
        b'["a"]',
    ):
        check_refused(write(path, bad))
    assert 1 in numbers_in(check_refused(write(path, '[{"text": "a"}, {"text": 1}]')))
    path = write(path, '[{"text": "é"}]')
    assert read(path, encoding="cp1252") == ["é".encode()]  # JSON is always UTF-8


def test_text_in_another_encoding(tmp_path):
    """It is refused, and read with data.encoding."""
    cases = {
        "cp1252": "Le café était fermé, mais l’été arrive à Noël. ",
        "koi8_r": "Все счастливые семьи похожи друг на друга. ",
        "cp932": "吾輩は猫である。名前はまだ無い。",
        "utf_16": "A text of Notepad.",
    }
    for encoding, text in cases.items():
        path = write(tmp_path / "a.txt", (text * 9).encode(encoding))
        assert "data.encoding" in check_refused(path).hint
        (part,) = split_file(str(path), 50, encoding=encoding)
        assert b"".join(b"".join(blocks) for blocks in documents(part)).decode() == text * 9


HEADER = "The Project Gutenberg eBook of A Tale\r\n\r\nTitle: A Tale\r\n\r\n"
STARTS = (
    "*** START OF THE PROJECT GUTENBERG EBOOK A TALE ***\n",
    "***START OF THIS PROJECT GUTENBERG EBOOK A TALE***\r\n\r\n",
    "*** Start of this Project Gutenberg EBook A TALE\nOF TWO TOWNS ***\n",
    "*** START OF THE COPYRIGHTED PROJECT GUTENBERG ETEXT A TALE ***\n",
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n",
)
END, END_OLD = (f"{stars}END OF {which} PROJECT GUTENBERG EBOOK A TALE ***\r\n"
                for stars, which in (("*** ", "THE"), ("***", "THIS")))  # fmt: skip
LICENCE = "You agree to comply with paragraph 1.E.8 of this licence.\r\n" * 300
TALE, LONG_TALE = (f"Où est la marée{n}? demanda-t-il.\n" * n for n in (70, 9000))
BOOKS = {
    **{f"start {n}": (HEADER + start + TALE + END, TALE) for n, start in enumerate(STARTS)},
    "with a licence": (HEADER + STARTS[0] + LONG_TALE + END_OLD + LICENCE, LONG_TALE),
    "with its makers and its title": (
        (HEADER + STARTS[1] + "Produced by A. Nother and the\nProofreading Team\n\n\n" + LONG_TALE)
        + ("\r\n\r\nEnd of the Project Gutenberg EBook of A Tale,\r\nby Anon\r\n\r\n" + END)
        + LICENCE,
        LONG_TALE.rstrip(),
    ),
    "two books": (
        (HEADER + STARTS[0] + TALE + END + LICENCE) + HEADER + STARTS[1] + LONG_TALE + END,
        TALE + LONG_TALE,
    ),
    "without an end": (HEADER + STARTS[0] + TALE, TALE),
    "without a start": (LONG_TALE + END + LICENCE, LONG_TALE),
    "empty": (HEADER + STARTS[0] + END + LICENCE, ""),
    # Nothing may be lost of a text that only contains a book or speaks of one.
    "start in the middle": (LONG_TALE + STARTS[0] + TALE, None),
    "end in the middle": (TALE + END + LONG_TALE, None),
    "a book in the middle": (LONG_TALE + END + LICENCE + STARTS[0] + LONG_TALE, None),
    "another text after it": (HEADER + STARTS[0] + TALE + END + LONG_TALE, TALE + END + LONG_TALE),
}


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
@pytest.mark.parametrize("case", BOOKS)
def test_a_book_is_what_is_between_its_markers(tmp_path, monkeypatch, case, encoding, name):
    content, expected = BOOKS[case]
    expected = content if expected is None else expected
    path = str(write(tmp_path / name, content.encode(encoding)))
    for block in (text_files.BLOCK, 999):
        monkeypatch.setattr(text_files, "BLOCK", block)
        for trim, text in ((True, expected), (False, content)):
            counted = Counter()
            parts = split_file(path, 2**14, encoding=encoding, trim=trim)
            blocks = [*chain(*(chain(*documents(part, counted)) for part in parts))]
            assert "".join(block.decode() for block in blocks) == text
            sizes = {"read": len(content.encode()), "kept": len(text.encode())}
            assert counted == (sizes if text != content else {})


ZIP = b"PK\x03\x04" + b"\0" * 26
REFUSED = {  # the first bytes of files that are not text, and a part of the advice
    "a.pdf": (b"%PDF-1.4\n1 0 obj", "pdftotext"),
    "a.rtf": (rb"{\rtf1\ansi Hello.}", "plain text"),
    "a.docx": (ZIP + b"[Content_Types].xml", "plain text"),
    "a.epub": (ZIP + b"mimetypeapplication/epub+zip", "pandoc"),
    "a.tar": (b"a.txt".ljust(257, b"\0") + b"ustar", "unpack"),
    "a.mid": (b"MThd\0\0\0\6", "ABC"),
    "gzip": (b"\x1f\x8b\x08\0", ".gz"),
    "a.parquet": (b"PAR1\x15\4", "*.parquet"),
    "tokens": (b"\x88\xd8\x34\x01\1\0\0\0", "*.bin"),
    "a.arrow": (b"\xff\xff\xff\xff\xf0\0\0\0", "text files"),
    "a.h5": (b"\x89HDF\r\n", "text files"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_text_is_refused_with_what_to_do(name, tmp_path):
    """By its first bytes, whatever its name."""
    content, advice = REFUSED[name]
    for path in (write(tmp_path / n, content) for n in ("a.txt", "a.csv", "a.txt.gz", "b")):
        with refused(DataError, "data.path", path) as caught:
            find_files(str(path))
        assert advice in caught.value.hint
    path = write(tmp_path / "a.ipynb", b'{"nbformat": 4, "cells": []}')
    with refused(DataError, "data.path", path):
        find_files(str(path))


SENTENCES = {
    "fr": "Le café était fermé, mais l’été arrive à Noël. ",
    "ru": "Все счастливые семьи похожи друг на друга. ",
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "zh": "子曰：学而时习之，不亦说乎？有朋自远方来，不亦乐乎？",
    "ko": "모든 국민은 인간으로서의 존엄과 가치를 가지며, 행복을 추구할 권리를 가진다. ",
    "pl": "Zażółć gęślą jaźń, w źródle żółwi. ",
    "en": "A text of Notepad. ",
}


@pytest.mark.parametrize(
    "case",
    [
        *("fr:cp1252", "ru:cp1251", "ru:koi8_r", "ru:cp866", "pl:cp1250", "zh:gb18030"),
        *("ko:cp949", "ja:cp932", "ja:euc_jp", "ja:utf_16_le", "en:utf_16", "fr:utf_32"),
    ],
)
def test_likely_encoding_of_a_text(case, tmp_path):
    language, encoding = case.split(":")
    raw, path = ((SENTENCES[language] + "\n") * 20).encode(encoding), tmp_path / "a.txt"
    assert encoding in check_refused(write(path, raw)).hint
    (text,) = read(path, encoding=encoding)
    assert text.decode().startswith(SENTENCES[language])


@pytest.mark.parametrize("language", [name for name in SENTENCES if name != "en"])
def test_one_wrong_byte_of_utf8(language, tmp_path):
    raw = b"Title\n\xfc\n" + (SENTENCES[language] * 20).encode()
    assert "utf-8" in check_refused(write(tmp_path / "a.txt", raw)).hint


def test_utf8_in_place_of_the_given_encoding_is_refused(tmp_path):
    for encoding, language in (("cp1252", "fr"), ("latin-1", "zh")):
        path = write(tmp_path / "a.txt", SENTENCES[language] * 9)
        with refused(DataError, "data.path", path):
            read(path, encoding=encoding)
        assert read(write(path, "plain"), encoding="cp1252") == [b"plain"]
    for text in (SENTENCES["fr"] * 9, "A text +Facebook and no more"):
        for encoding in ("utf-8", "UTF8", "utf-8-sig"):
            assert read(write(path, text), encoding=encoding) == [text.encode()]
    mixed = (SENTENCES["fr"] * 9).encode() + (SENTENCES["fr"] * 99).encode("cp1252")
    assert "cp1252" not in check_refused(write(path, mixed)).hint


CSV = 'id,text\r\n1,"One, ""two"".\r\nThree."\r\n\r\n2,\r\n3,été\r\n'
CSV_TEXTS = ['One, "two".\r\nThree.', "", "été"]


def test_csv(tmp_path, monkeypatch):
    """Separated by commas, semicolons or tabs; each line end; blocks of any size."""
    for block in (2**20, 3):
        monkeypatch.setattr(text_files, "BLOCK", block)
        for change in ((",", ","), ("id,", "\ufeffid,"), ("\r\n", "\r"), ("\r\n", "\n")):
            texts = [text.replace(*change).encode() for text in CSV_TEXTS]
            assert read(write(tmp_path / "a.CSV.gz", CSV.replace(*change))) == texts
        for mark in ";\t":
            path = write(tmp_path / "a.tsv", CSV.replace(",", mark).replace("One;", "One,"))
            assert len(read(path)) == 3
    path = write(tmp_path / "a.csv", CSV.encode("cp1252"))
    assert "data.encoding" in check_refused(path).hint
    assert read(path, encoding="cp1252")[2] == "été".encode()
    assert read(path, encoding="cp1252", text_key=["body", "id"]) == [b"1", b"2", b"3"]
    assert read(write(path, "text\nOne\ntwo")) == [b"One", b"two"]
    assert read(write(path, "")) == []


@pytest.mark.parametrize(
    "line", ["4", "4,one,two", '4,"open', '4,"one" two', "4," + "a" * 99, '4,"' + "a\n" * 99 + '"']
)
def test_invalid_row_of_csv_is_refused(line, tmp_path, monkeypatch):
    """With its line. A text must not lose or gain a part silently."""
    monkeypatch.setattr(records, "MAX_RECORD", 98)
    path = write(tmp_path / "a.csv", CSV + line + "\n5,six\n")
    if len(line) != 101:
        assert 7 in numbers_in(check_refused(path))
    check_refused(path)
    check_refused(write(path, "text,text\na,b\n"))
    assert "'body'" in check_refused(write(path, CSV.replace("text", "body"))).reason


def test_a_new_text_format(tmp_path, monkeypatch, encoder):
    """Its files are split, and a wrong byte has the answer for text."""

    def without_times(part: FilePart):
        yield re.sub(rb"00:[^\n]*\n", b"", b"".join(decoded_blocks(part)))  # lines cross blocks

    def next_time(text, position: int, special) -> int | None:
        return text.find(b"\n00:", position) + 1 or None

    subtitles = readers.Format(without_times, (".srt",), is_text=True, boundary=next_time)
    monkeypatch.setitem(readers.FORMATS, "subtitles", subtitles)
    path = write(tmp_path / "a.srt", "00:01 --> 00:02\nThe café.\n" * 20)
    assert read(path) == ["The café.\n".encode() * 20]
    assert len(list(split_file(str(path), 100))) > 4
    assert encode_all(path, encoder, 100) == encode_all(path, encoder)
    write(path, b"00:01 --> 00:02\nThe caf\xe9.\n")
    assert "data.encoding" in check_refused(path).hint
    assert read(path, encoding="cp1252") == ["The café.\n".encode()]


def test_invalid_json_line_is_refused(tmp_path):
    good = b'{"text": "good"}\n'
    lines = [b"some text", b'{"text": "a\xff"}', b'{"id": 1, "a\\nb": ""}', b'{"text": 5}']
    for line in (*lines, b'[{"text": "a"}]', b'{"a":' * 100_000):
        path = write(tmp_path / "a.jsonl", good + b"\n" + line + b"\n" + good)
        assert b"".join(next(documents(FilePart(str(path))))) == b"good"  # is read first
        for error in (check_refused(path), check_refused(path, 17)):
            assert 18 in numbers_in(error), line


def test_one_of_several_keys(tmp_path):
    """Each record has exactly one of them."""
    path, keys = tmp_path / "a.jsonl", ["content", "text"]
    write(path, json_line("one") + json_line("two", "content"))
    assert read(path, text_key=keys) == [b"one", b"two"]
    assert read(write_parquet(tmp_path / "a.parquet", ["three"]), text_key=keys) == [b"three"]
    for line in ('{"text": "one", "content": "two"}', '{"body": "three"}'):
        with refused(DataError, "data.path", write(path, line)):
            read(path, text_key=keys)


def test_parquet(tmp_path):
    texts = ["one", "", "é日🙂\n\0", "one", None] * 200  # more rows than one batch
    for kind in ("string", "large_string", "string_view", "dictionary"):
        column = pyarrow.array(texts)
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
        path = write_parquet(tmp_path / "a.parquet", column, row_group_size=300)
        expected = [(text or "").encode() for text in texts]
        assert read(path) == read_parts(path, 1) == expected
    whole = path.read_bytes()
    for content in [whole[:end] for end in range(0, len(whole), 23)]:
        path.write_bytes(content)
        check_refused(path)
    assert "'content'" in check_refused(write_parquet(path, ["a"], "content")).reason
    check_refused(write_parquet(path, [b"a", b"b"]))


DOCUMENTS = ["one", "", f"{END_OF_TEXT}two", END_OF_TEXT, "é日🙂 ", "three " * 99]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_each_document_or_text_file_begins_with_the_end_of_text_token(name, tmp_path):
    encoder = StreamEncoder(get_tokenizer(name), 100)  # a long document has several chunks
    for file in ("a.jsonl", "a.ndjson.gz", "a.parquet"):
        path = write_source(tmp_path / file, DOCUMENTS)
        assert encode_all(path, encoder) == ids_of(DOCUMENTS, name)
    for text in ("one", f"{END_OF_TEXT}one"):
        path = write(tmp_path / "a.txt", "\ufeff" + text)
        assert encode_all(path, encoder) == ids_of([text], name), text
    for text in ("\ufeff", ""):
        assert encode_all(write(tmp_path / "a.txt", text), encoder) == []


sizes = st.integers(1, 90)  # of parts


@some
@given(mixes, sizes)
@example(f"one{END_OF_TEXT}two", 1)
@example("don't we'll ' s 'ś", 1)
@example("é" * 15 + "1" * 30, 4)
@example("日" * 50 + " " + "a" * 100, 60)
@example(f"\ufeff'Hello{END_OF_TEXT}", 1)
def test_parts_of_a_text_give_the_ids_of_the_whole(folder, encoder, text, most):
    path = write(folder / "a.txt", text)
    text = text.removeprefix("\ufeff")
    assert b"".join(read_parts(path, most)) == text.encode()
    assert encode_all(path, encoder, most) == encode_all(path, encoder) == ids_of([text])


STRAYS = [b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\x80", b"\x80" * 6, b"\0"]
not_text = st.tuples(mixes, st.sampled_from(STRAYS), mixes | st.just("")).map(
    lambda parts: parts[0].encode() + parts[1] + parts[2].encode()
)


@some
@given(not_text, sizes)
@example("é".encode() * 8 + b"1" + b"\x80" * 12 + b"x", 4)
@example("aé日 é日".encode() + b"\xf0\x9f" + "é日本é!é! é".encode(), 1)
def test_bad_bytes_are_refused_whichever_part_has_them(folder, content, most):
    try:
        content.decode()
        expected = {content.index(0)}
    except UnicodeDecodeError as error:
        expected = {content[error.start], error.start}
    path = write(folder / "a.txt", content)
    with refused(DataError, "data.path", path) as caught:
        read_parts(path, most)
    assert expected <= numbers_in(caught.value)


def test_a_document_that_is_too_long_for_memory_is_refused(tmp_path, monkeypatch):
    """The error names the limit and the position. At most `limit` bytes are read at once."""
    monkeypatch.setattr(records, "MAX_RECORD", 100_000)
    line, place = json_line("a" * 99_950), len(json_line("b"))
    assert len(line) <= 100_000
    for ending in ("", ".gz", ".zst"):
        path = write(tmp_path / f"a.jsonl{ending}", json_line("b") + line)
        assert len(read(path)) == 2
        write(path, json_line("b") + "[" * 10**7)
        error, peak = peak_memory(lambda path=path: check_refused(path))
        assert {100_000, place} <= numbers_in(error)
        assert peak < 2**22
    path = write_parquet(tmp_path / "a.parquet", ["b", "a" * 100_000])
    assert len(read(path)) == 2
    write_parquet(path, ["b", "a" * 100_001], row_group_size=1)
    assert {100_000, 0, 1} <= numbers_in(check_refused(path))


def test_what_cannot_be_opened_is_refused(tmp_path, monkeypatch):
    """System calls are patched, because root may read everything."""
    path = write(tmp_path / "a.txt.gz")
    denied = mock.Mock(side_effect=PermissionError(errno.EACCES, "denied", str(tmp_path)))
    monkeypatch.setitem(text_files.OPENERS, ".gz", denied)
    check_refused(path)
    monkeypatch.setattr(os, "scandir", denied)
    with refused(DataError, "data.path", tmp_path):
        find_files(str(tmp_path))
    os.mkfifo(tmp_path / "fifo")  # opening it would block until another process writes
    with time_limit():
        check_refused(tmp_path / "fifo")


def test_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    files = [(write(tmp_path / name), "pyarrow") for name in ("a.parquet", "a.txt.zst")]
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # import raises ModuleNotFoundError
    for path, package in [*files, ("hub:some/name", "datasets")]:
        assert check_refused(path).hint == f"pip install {package}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with a dataset, as on the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "set"


def test_hub_data_set(hub, encoder):
    """The complete dataset, and each part separately."""
    shards = [DOCUMENTS[:2], DOCUMENTS[2:3], DOCUMENTS[3:]]
    for number, rows in enumerate(shards):
        write_source(hub / f"train-{number}.jsonl", rows)
    assert records.load_hub_dataset(f"hub:{hub}").num_shards == 3
    for number, rows in enumerate(shards):
        assert [text.decode() for text in read(f"hub:{hub}", number, 3)] == rows
    assert encode_all(f"hub:{hub}", encoder) == ids_of(DOCUMENTS)


def test_hub_config_split_and_text_key(hub):
    configs = "---\nconfigs:\n- config_name: first\n  data_files: a.jsonl\n- config_name: second\n"
    configs += "  data_files: [{split: train, path: b.jsonl}, {split: test, path: c.jsonl}]\n---\n"
    write(hub / "README.md", configs)
    for name, key in (("a", "content"), ("b", "text"), ("c", "text")):
        write(hub / f"{name}.jsonl", json_line(name, key))
    assert read(f"hub:{hub}:first", text_key="content") == [b"a"]
    assert read(f"hub:{hub}:second") == [b"b"]
    assert read(f"hub:{hub}:second:test") == [b"c"]
    write(hub / "b.jsonl", json_line("b") + "not JSON\n")
    for config in ("", ":first", ":second", ":second:val", ":third", "/no/such/folder"):
        check_refused(f"hub:{hub}{config}")
    with refused(DataError, "data.path", f"hub:{hub}/no/such/folder"):
        list(split_file(f"hub:{hub}/no/such/folder", 100))
