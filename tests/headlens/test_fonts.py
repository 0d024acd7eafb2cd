"""headlens/fonts.py: the fonts of texts in images, and codes for characters that no font has."""

import matplotlib
import numpy as np
import pytest
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from headlens import fonts
from headlens.drawing import fit_title
from headlens.fonts import drawn, font_of
from headlens.prompts import Prompt

OTHER = f"{matplotlib.get_data_path()}/fonts/ttf/STIXNonUni.ttf"  # has U+E000, DejaVu Sans has not


def only(monkeypatch, *paths):
    monkeypatch.setattr(fonts, "installed", lambda: paths)


def plain(text: str) -> str:
    return "".join(run for run, _ in drawn(text, 16).runs)


def test_the_default_font_has_all_latin_characters():
    """Texts of these characters are drawn without a look into the font."""
    known = FT2Font(font_of(8).path).get_charmap().keys()
    latin = [chr(code) for code in range(0x3000) if fonts.LATIN.fullmatch(chr(code))]
    assert len(latin) > 500
    assert [character for character in latin if ord(character) not in known] == []


def test_characters_without_a_font_become_codes(monkeypatch):
    only(monkeypatch)
    monkeypatch.setattr(fonts.features, "check", lambda name: True)  # fribidi may not be installed
    for text in ("It's 12 “boats”.", "größer, Ελλάδα, Лодка", "قاربان في الميناء", ""):
        assert plain(text) == text
    assert plain("a 船\U0001f6f3 b") == "a \\u8239\\U0001f6f3 b"
    prompt = Prompt("1-x", "船は港に", [1, 2], ["船は", "港に"])
    codes = "".join(run for run, _ in fit_title(prompt, 900, 16).runs)
    assert codes.isprintable()
    assert "\\u8239" in codes


def test_a_run_has_the_font_of_its_characters(monkeypatch):
    only(monkeypatch, OTHER)
    text = drawn("ab \ue000\ue001 c", 16)
    assert [run for run, _ in text.runs] == ["ab ", "\ue000\ue001", " c"]
    assert [font.path for _, font in text.runs] == [font_of(16).path, OTHER, font_of(16).path]
    image = Image.new("L", (400, 40), 255)
    text.draw(ImageDraw.Draw(image), 5, 5, 0, "la")
    columns = np.flatnonzero((np.array(image) < 128).any(axis=0))
    assert 5 <= columns[0] <= 8
    assert text.length - 3 <= columns[-1] <= 5 + text.length + 1


@pytest.mark.parametrize("anchor", ["la", "lm"])
def test_all_runs_have_one_baseline(monkeypatch, anchor):
    only(monkeypatch, OTHER)
    other, size = "\ue000", 30
    image = Image.new("L", (99, 60), 255)
    drawn(f"H{other}", size).draw(ImageDraw.Draw(image), 5, 20, 0, anchor)
    after = 5 + round(drawn("H", size).length)
    baseline = 1 + int(np.flatnonzero((np.array(image)[:, :after] < 128).any(axis=1))[-1])
    expected = Image.new("L", (99, 60), 255)
    font = ImageFont.truetype(OTHER, size)
    ImageDraw.Draw(expected).text((after, baseline), other, 0, font, anchor="ls")
    rows = [(np.array(i)[:, after:] < 128).any(axis=1).nonzero()[0] for i in (image, expected)]
    assert abs(rows[0][0] - rows[1][0]) <= 1
    assert abs(rows[0][-1] - rows[1][-1]) <= 1


def test_words_after_arabic_stay_in_their_order(monkeypatch):
    """Without the library fribidi, the Arabic letters are codes."""
    only(monkeypatch, OTHER)
    text, size = drawn("\ue000 قارب left", 16), (500, 40)
    images = [Image.new("L", size, 255) for _ in range(2)]
    text.draw(ImageDraw.Draw(images[0]), 5, 5, 0, "la")
    x = 5 + text.length - font_of(16).getlength("left")
    drawn("left", 16).draw(ImageDraw.Draw(images[1]), x, 5, 0, "la")
    found, expected = (np.array(image)[:, round(x) :] / 255.0 for image in images)
    assert np.abs(found - expected).mean() < 0.004 < (1 - expected).mean()


def test_without_a_shaping_library_marks_and_arabic_become_codes(monkeypatch):
    """They would be drawn in a wrong order."""
    only(monkeypatch)
    monkeypatch.setattr(fonts.features, "check", lambda name: False)
    assert plain("é ab") == "é ab"
    assert plain("e\u0301 \u0642") == "e\\u0301 \\u0642"


@pytest.mark.parametrize(
    "tokens", [["theboat", "is", "big"] * 30, ["the boat ", "is ", "big "] * 30, ["W"] * 45]
)
def test_a_title_fits(monkeypatch, tokens):
    """In scripts without spaces too, and with wide characters."""
    only(monkeypatch)
    prompt = Prompt("1-x", "".join(tokens), [*range(len(tokens))], tokens)
    for width in (300, 600):
        title = fit_title(prompt, width, 16)
        assert title.length <= width
        assert title.length > width / 2
