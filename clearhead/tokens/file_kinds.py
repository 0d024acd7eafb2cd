r"""What a file contains that is not plain UTF-8, and what to do with it.

kind_of(".docx", b"PK\x03\x04...").advice         # "save it as plain text (UTF-8) or as CSV"
likely_encodings("Größe".encode("cp1252"))        # ["cp1252"]
chat_code({"messages": [{"role": "user", "content": "Hello."}]})       # Python code for its text
"""

import codecs
import re
from typing import NamedTuple

HEAD = 2**16  # bytes at the start of a file, which are compared with KINDS


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
    Kind("Windows line ends (\\r\\n)", "tr -d '\\r' < FILE", rb"[^\n]{0,9999}\r\n", "", True),
    Kind("the syntax of JSON", "name it *.jsonl or *.json", _JSON, is_read=True),
)


def kind_of(extension: str, head: bytes) -> Kind | None:
    """Returns the kind of a file, or None for plain text. head: its first bytes."""
    head = head[:HEAD].removeprefix(codecs.BOM_UTF8)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head.decode("utf-16", "ignore").encode("utf-8", "ignore")
    found = (k for k in KINDS if re.match(k.start, head, re.S) or extension in k.extensions.split())
    return next(found, None)


# --------------------------------------------------------------------------------------- encodings

# Encodings that write other letters with ASCII only, and bytes that are in each such text.
SEVEN_BIT = {"iso2022_jp": b"\x1b$", "iso2022_kr": b"\x1b$)C", "hz": b"~{", "utf-7": b"+"}
WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
# In the order of preference. ISO 8859-1, -7, -9 and others are nearly parts of the Windows ones.
OTHERS = "utf-8 cp1252 mac_roman cp850 cp1250 iso8859-2 cp1251 koi8_r iso8859-5 cp866 cp1253 cp1254"
OTHERS += " cp1255 cp1256 cp874 cp932 euc_jp gb18030 big5 cp949"
FREQUENT = frozenset(
    "éèàêçôùîâœäöüßÄÖÜáíóñúãõåæø’“”«»–—…ąćęłńśźżčěňřšťžőűğışİ"
    "оеаинтсрвлкмдпуяыьαοειητνσςρκπυλμάίόέήיוהלאמרשבתנםדاليومنترةبعدفسهانรกอเงมยลวดทสต่้ัีิ"
    "のにはをたがでてとしれさいるかなもらっくきこすまう、。「」，？！：；（）《》이다는의에을가고하지를은한로어사있도기자나아리서시인그"
    "的一是不了在人有我他这中大来上国说们为子和你地出道也时年得就那要下以生会自之這來國個說們為時學"
)
# What texts do not contain: control and private characters, box drawing, half-width katakana, a
# capital after a small letter, two scripts in a word, three accented letters in a row.
IMPLAUSIBLE = re.compile(
    "[\ufffd\0-\x08\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\u2500-\u259f\uff61-\uff9f]"
    "|[a-zß-ÿа-яα-ώ](?=[A-ZÀ-ÞА-ЯΑ-Ω])|[À-ɏ]{3}"
    "|[A-Za-z](?=[\u0370-\u0e7f])|[\u0370-\u0e7f](?=[A-Za-z])"
)


def seven_bit_encoding(raw: bytes) -> str | None:
    """Returns the encoding of a text in ASCII that is other text in an encoding of SEVEN_BIT."""
    for name, mark in SEVEN_BIT.items() if raw.isascii() else ():
        try:
            text = codecs.getincrementaldecoder(name)().decode(raw) if mark in raw else ""
        except UnicodeDecodeError:
            continue
        others = [c for c in text if c > "\x7f"]
        if sum(c in FREQUENT for c in others) > max(2, len(others) / 4):
            return name
    return None


def is_utf8(raw: bytes, encoding: str) -> bool:
    """Returns whether bytes that should be in another encoding are certainly UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    if raw.isascii():  # these characters are other ones in UTF-16 or EBCDIC
        return len(raw) > 16 and b"\0" not in raw and "a".encode(encoding) != b"a"
    return sum(c > "\x7f" for c in text) > 7


def likely_encodings(sample: bytes) -> list[str]:
    """Returns the one or two most likely encodings of a part of a text, or [].

    Most encodings decode all bytes. So they are compared by their characters outside ASCII: how
    many are frequent in a language that uses it, less those that are implausible where they are.
    The part must begin at a multiple of four bytes of the file.
    """
    texts = {}  # the first encoding of each text, and its share of frequent characters
    for name in WIDE if b"\0" in sample else OTHERS.split():
        text = sample.decode(name, "replace")
        counted = text if b"\0" in sample else [c for c in text if c > "\x7f"]
        good = sum(c in FREQUENT or "\0" < c < "\x7f" for c in counted)
        score = (good - len(IMPLAUSIBLE.findall(text))) / max(1, len(counted))
        texts.setdefault(text, (score, name))
    found = sorted(texts.values(), key=lambda found: -found[0])[:2]
    return [name for score, name in found if score > 0.3 and score > 0.9 * found[0][0]]


# ------------------------------------------------------------------------ chats and instructions

TURNS = (("role", "content"), ("from", "value"))  # keys of a message
PARTS = ("system", "instruction", "prompt", "question", "input", "context")
PARTS += ("completion", "response", "output", "answer", "chosen")  # in the order of a text


def chat_code(record: dict) -> str:
    """Returns Python code for the text of a record that has messages, or several of the PARTS; ""
    for other records."""
    lists = {key: value[0] for key, value in record.items() if isinstance(value, list) and value}
    for key, first in lists.items():
        for who, what in TURNS:
            if isinstance(first, dict) and {who, what} <= first.keys():
                return f'"\\n\\n".join("%({who})s: %({what})s" % m for m in record[{key!r}])'
    parts = [key for key in PARTS if isinstance(record.get(key), str)]
    return f'"\\n\\n".join(filter(None, map(record.get, {parts})))' if len(parts) > 1 else ""
