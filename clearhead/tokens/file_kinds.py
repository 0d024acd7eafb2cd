"""What a file contains that is not plain text, and what to do with it.

kind_of(".docx", b"PK\\x03\\x04...").advice  # "save it as plain text (UTF-8) or as CSV"
"""

import codecs
import re
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of files: those that start with `start` (a regular expression), or that have one of
    the extensions."""

    what: str
    advice: str
    start: bytes = rb"(?!)"
    extensions: str = ""
    is_read: bool = False  # as plain text, with a note. Other files are refused


_SAVE = "save it as plain text (UTF-8), a table as CSV"
_ZIP = rb"PK\x03\x04(.{26}mimetypeapplication/|.*\[Content_Types\]|.*word/)"
_PACKED = rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|BZh\d1AY&SY|\xfd7zXZ\0"
_OTHER = rb"SQLite format 3\0|\x93NUMPY|.{4}\0{4}\{\"|\x80[\2-\5][\x95\]})(c]|ARROW1\0|\x7fELF"
_OTHER += rb"|MZ.\0|\x89PNG|\xff\xd8\xff|GIF8[79]a|ID3[\2-\4]|RIFF.{4}WAVE|OggS\0|fLaC\0"
_OTHER += rb"|\xff{4}.{3}\0|\x89HDF|GGUF.\0|bplist00|AT&TFORM"  # \xff{4}: Arrow's stream
_MAIL = rb"From \S+ [^\n]+\d:\d\d|(From|Message-ID|Received|Return-Path): [^\n]+\n[\w-]+: "
_TIMES = rb"WEBVTT\b|1\r?\n\d\d:\d\d:\d\d,|\[Script Info\]|\[\d\d:\d\d[.:]\d\d\]|\{\d+\}\{\d+\}"
_FASTA, _JSON = rb">[^\n]+\n[A-Za-z*-]{40}", rb"\s*([\w.]+ = )?(\[\s*)?\{\s*\""
_COLUMNS = rb"([^\t\n]+\t[^\n]+\n){3}|\"?\w+\"?([,;\t]\"?\w+\"?)+\r?\n|-DOCSTART-"
KINDS = (
    Kind("a PDF document", "extract its text: pdftotext FILE", rb"%PDF-"),
    Kind("an office document or e-book", f"{_SAVE}, or convert it: pandoc -t plain FILE", _ZIP),
    Kind("an old office document, or rich text", _SAVE, rb"\xd0\xcf\x11\xe0|\{\\rtf\d"),
    Kind("an archive", "unpack it and give the folder", rb"PK\x03\x04|.{257}ustar|7z\xbc|Rar!\x1a"),
    Kind("compressed", "decompress it, or add .gz or .zst to its name", _PACKED),
    Kind("a Parquet file", "name it *.parquet", rb"PAR1[\0-\x1f]"),
    Kind("a file of token ids", "name it *.bin", rb"\x88\xd8\x34\x01|\x80\xd4\x34\x01"),
    Kind("music as MIDI", "write it as text, such as ABC notation", rb"MThd\0"),
    Kind("data, an image, a recording or a program", "give text files", _OTHER),
    Kind("a notebook", "convert it: jupyter nbconvert --to markdown FILE", extensions=".ipynb"),
    Kind("HTML tags", "pandoc -t plain FILE", rb"\s*<(?i:!doctype )?html\b", ".html .htm", True),
    Kind("XML tags", "give the texts only", rb"\s*<(\?xml|doc) ", ".xml", True),
    Kind("times", "give the texts only", _TIMES, ".srt .vtt .ass .lrc", True),
    Kind("headers of mail", "give the texts only", _MAIL, ".eml .mbox .mht .mhtml", True),
    Kind("columns of a table", "name it *.csv or *.tsv", _COLUMNS, ".conll .conllu", True),
    Kind("names of sequences", "grep -v '^>' FILE", _FASTA, ".fasta .fa", True),
    Kind("codes of a terminal", "give the texts only", rb"[^\x1b]*\x1b\[", "", True),
    Kind("Windows line ends (\\r\\n)", "tr -d '\\r' < FILE > NEW", rb"[^\n]{0,9999}\r\n", "", True),
    Kind("the syntax of JSON", "name it *.jsonl or *.json", _JSON, is_read=True),
)


def kind_of(extension: str, head: bytes) -> Kind | None:
    """Returns the kind of a file, or None for plain text. head: its first bytes."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head.decode("utf-16", "ignore").encode("utf-8", "ignore")
    found = (k for k in KINDS if re.match(k.start, head, re.S) or extension in k.extensions.split())
    return next(found, None)
