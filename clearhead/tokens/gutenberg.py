"""Books of Project Gutenberg: the text between the marker lines, without header and licence."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from clearhead.errors import sanitize

# The lines around a book of Project Gutenberg, in all their forms. The title may have a line break.
MARKER = rb"\*\*\* ?%s OF TH(?:E|IS) (?:COPYRIGHTED )?PROJECT GUTENBERG E-?(?:BOOK|TEXT)"
START = MARKER % b"START" + rb"(?:[^*]{0,400}\*\*\*|[^\n]*)|\*END[* ]THE SMALL PRINT![^\n]*"
# Who has made the book, after a start marker; a line that repeats its title, before an end marker.
MAKERS = rb"(?:(?:E-text )?(?:Produced|Prepared|Transcribed) by .*\n(?:.*\S.*\n){0,6}\s*)?"
START = re.compile(rb"(?:%s)\s*%s" % (START, MAKERS), re.IGNORECASE)
END = re.compile(MARKER % b"END", re.IGNORECASE)
LAST_LINE = re.compile(rb"\s*End of (?:the |this )?Project Gutenberg[^*]{0,300}\Z", re.IGNORECASE)
FRAME = 2**16  # bytes; a header before a book is shorter, and so is a licence after it
LINE = 400  # bytes; LAST_LINE is shorter


def has_markers(path: str) -> bool:
    """Returns whether `between_markers` removes something from a file in UTF-8."""
    with open(path, "rb") as file:
        start = file.read(FRAME + 3)  # with a byte-order mark
        file.seek(max(0, os.path.getsize(path) - FRAME))
        return bool(START.search(start) or END.search(file.read()))


def between_markers(blocks: Iterable[bytes], trimmed: Counter) -> Iterator[bytes]:
    """Yields the blocks of a text without the headers and licences of Project Gutenberg.

    Removed is what precedes a start marker in the first FRAME bytes, what is between the end marker
    of such a text and the next start marker, up to 2 * FRAME bytes, and what follows an end marker
    in the last FRAME bytes. Then `trimmed` counts the bytes of the text, and those that are kept.
    """
    text, is_book, read, kept = b"", None, 0, 0
    for block in itertools.chain(blocks, [b""]):  # b"": the end
        text, read, position, found = text + block, read + len(block), 0, []
        known = len(text) - 3 * FRAME * bool(block)  # what matters for a marker before it is read
        if known <= 0:
            continue
        if is_book is None and (is_book := START.search(text, 0, FRAME)):
            position = is_book.end()
        while (end := END.search(text, position)) and end.start() < known + LINE:
            stop = after = end.end()  # not removed
            if following := is_book and START.search(text, stop, stop + 2 * FRAME):
                after = following.end()
            elif len(text) - end.start() <= FRAME:  # at the end of the text
                after = len(text)
            if after > stop:
                line = LAST_LINE.search(text, max(position, end.start() - LINE), end.start())
                stop = line.start() if line else end.start()
            found.append(text[position:stop])
            position = after
        known = max(known, position)
        while known < len(text) and text[known] & 0xC0 == 0x80:  # inside a character
            known += 1
        found = b"".join([*found, text[position:known]])
        text, kept, is_book = text[known:], kept + len(found), is_book or False
        if found:
            yield found
    if kept < read:
        trimmed.update(read=read, kept=kept)


def notes_about_trimmed(path: str | list[str], trimmed: Counter) -> list[str]:
    """Returns a note about what `between_markers` has removed."""
    if not trimmed:
        return []
    where = path if isinstance(path, str) else "data.path"
    used = "of Project Gutenberg's books, only the part between the marker lines is used"
    share = f"{trimmed['kept'] / trimmed['read']:.0%} of the text"
    return [sanitize(f"{where}: {used}, {share}; data.trim=false uses all", keep="")]
