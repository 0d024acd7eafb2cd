"""What a file contains that is not text, and what to do with it.

kind_of(".docx", b"PK\\x03\\x04...").advice  # "save it as plain text (UTF-8) or as CSV"
"""

import re
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of files: those that start with `start` (a regular expression), or that have the
    extension."""

    what: str
    advice: str
    start: bytes = rb"(?!)"
    extension: str = ""


_SAVE = "save it as plain text (UTF-8), a table as CSV"
_ZIP = rb"PK\x03\x04(.{26}mimetypeapplication/|.*\[Content_Types\]|.*word/)"
_PACKED = rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd|BZh\d1AY&SY|\xfd7zXZ\0"
_OTHER = rb"SQLite format 3\0|\x93NUMPY|.{4}\0{4}\{\"|\x80[\2-\5][\x95\]})(c]|ARROW1\0|\x7fELF"
_OTHER += rb"|MZ.\0|\x89PNG|\xff\xd8\xff|GIF8[79]a|ID3[\2-\4]|RIFF.{4}WAVE|OggS\0|fLaC\0"
_OTHER += rb"|\xff{4}.{3}\0|\x89HDF|GGUF.\0|bplist00|AT&TFORM"  # \xff{4}: Arrow's stream
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
    Kind("a notebook", "convert it: jupyter nbconvert --to markdown FILE", extension=".ipynb"),
)


def kind_of(extension: str, head: bytes) -> Kind | None:
    """Returns the kind of a file, or None for text. head: its first bytes."""
    found = (k for k in KINDS if re.match(k.start, head, re.S) or extension == k.extension != "")
    return next(found, None)
