"""Fonts of images: DejaVu Sans, which comes with matplotlib, and installed fonts for other scripts.

DejaVu Sans has Latin, Greek, Cyrillic, Arabic and Hebrew. For other scripts the fonts of STACK are
searched where the system keeps its fonts. A character that no font has is drawn as its code, such
as \\u65e5. Right-to-left text and combining marks need the library raqm, which Pillow contains, and
the system's library fribidi; without it they become codes too.
"""

import contextlib
import functools
import importlib.util
import re
import unicodedata
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from PIL import ImageDraw, ImageFont, features

# Linux: Noto, and fonts that distributions install by default; macOS; Windows.
STACK = (
    *("NotoSansCJK-Regular.ttc", "NotoSansDevanagari-Regular.ttf", "NotoSansThai-Regular.ttf"),
    *("NotoSansBengali-Regular.ttf", "NotoSansTamil-Regular.ttf", "NotoSansHebrew-Regular.ttf"),
    *("DroidSansFallbackFull.ttf", "wqy-zenhei.ttc", "FreeSans.ttf", "unifont.otf"),
    *("Arial Unicode.ttf", "Hiragino Sans GB.ttc", "AppleSDGothicNeo.ttc", "Kohinoor.ttc"),
    *("msyh.ttc", "meiryo.ttc", "malgun.ttf", "Nirmala.ttf", "LeelawUI.ttf"),
)
# DejaVu Sans has all of these. Looking for other characters needs matplotlib, which takes a quarter
# of a second to import.
LATIN = re.compile("[ -~\xa0-\u024f‘’“”…–—␣⏎⇥∅⁴]*")


@functools.cache
def font_of(size: int, weight: str = "") -> ImageFont.FreeTypeFont:
    """Returns DejaVu Sans at `size` pixels."""
    name = f"DejaVuSans-{weight}.ttf" if weight else "DejaVuSans.ttf"
    spec = importlib.util.find_spec("matplotlib")
    assert spec
    assert spec.origin
    return _at_size(str(Path(spec.origin).parent / "mpl-data/fonts/ttf" / name), size)


class DrawnText(NamedTuple):
    """A text as runs of characters, each with a font that has them."""

    runs: list[tuple[str, ImageFont.FreeTypeFont]]

    @property
    def length(self) -> float:
        """The width in pixels."""
        return sum(font.getlength(run) for run, font in self.runs)

    def draw(self, draw: ImageDraw.ImageDraw, x: float, y: float, ink: int, anchor: str) -> None:
        """Draws the text from (x, y) to the right. anchor: as in Pillow, "la" or "lm", of DejaVu
        Sans. All runs have the same baseline."""
        ascent, descent = font_of(self.runs[0][1].size).getmetrics()
        baseline = y + (ascent if anchor == "la" else (ascent - descent) / 2)
        # Otherwise a run that begins with Arabic would have its other words in reverse order.
        direction = "ltr" if len(self.runs) > 1 and features.check("raqm") else None
        for run, font in self.runs:
            draw.text((x, baseline), run, ink, font, anchor="ls", direction=direction)
            x += font.getlength(run)


def drawn(text: str, size: int) -> DrawnText:
    """Returns a text of `size` pixels, with codes in place of characters that no font has.

    A run keeps its font as long as possible, because a script is shaped within a run. The runs are
    drawn from left to right: Arabic and Hebrew, which DejaVu Sans has, are in one run with spaces.
    """
    if LATIN.fullmatch(text):
        return DrawnText([(text, font_of(size))])
    paths = (font_of(size).path, *installed())
    path, runs = paths[0], []
    for character in text:
        having = [p for p in paths if _is_drawn(character, _characters(p))]
        if path == paths[0] or path not in having or character.isascii():
            # White space and punctuation after other scripts stay in the run if its font has them.
            path = next(iter(having), paths[0])
        shown = character if having else character.encode("unicode_escape").decode()
        if runs and runs[-1][1] == path:
            runs[-1][0] += shown
        else:
            runs.append([shown, path])
    return DrawnText([(run, _at_size(path, size)) for run, path in runs])


@functools.cache
def installed() -> tuple[str, ...]:
    """Returns the paths of the fonts of STACK that are installed."""
    found: list[str] = []
    for name in STACK:
        with contextlib.suppress(OSError):
            found.append(str(ImageFont.truetype(name).path))
    return tuple(found)


def _is_drawn(character: str, known: Set[int]) -> bool:
    needs_raqm = unicodedata.bidirectional(character) in ("R", "AL", "AN")
    needs_raqm |= unicodedata.category(character) in ("Mn", "Mc")
    return ord(character) in known and (features.check("raqm") or not needs_raqm)


@functools.cache
def _at_size(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@functools.cache
def _characters(path: str) -> Set[int]:
    """Returns the code points for which a font has a glyph."""
    from matplotlib.ft2font import FT2Font

    return FT2Font(path).get_charmap().keys()
