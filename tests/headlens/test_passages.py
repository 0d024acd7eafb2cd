"""headlens/passages.py: passages in which a word occurs again, in several scripts."""

import itertools
import unicodedata

import pytest

from headlens import beginning
from headlens.passages import passages

TEXTS = {
    "English": "The tide was low at noon. Mr. Gosse looked at Wenna, and then Gosse looked away. "
    "She rang the bell. Nobody came down the steps before dark.\n\nThe keeper of the light slept "
    "all day. In the evening the keeper lit his lamp. It rained.\n",
    "verse": "ROMEO:\nWhat light is this? It is the east,\nand Juliet, Juliet is the sun.\n\n"
    "JULIET:\nO Romeo, wherefore art thou Romeo?\nDeny thy father and refuse thy name.\n\n"
    "NURSE:\nMadam, madam!\nYour mother craves a word with you.\n",
    "Japanese": "霧の深い朝、美咲は鐘の前に立っていた。源蔵は川を見て、川は何も言わないと答えた。"
    "「手紙があるよ」と佐藤さんは言った。灯台は岬の先にあり、人々は灯台の火を守ってきた。"
    "町の窓に明かりがついた。",
    "Chinese": "清晨的雾很大。小梅问爷爷河水说什么，爷爷说河水要我们等。镇上的人都知道这个规矩。"
    "小梅把信读了两遍，然后把信交给爷爷。钟响了三声！\n灯塔的钟停了，船不能进港。\n",
    "Korean": "안개가 짙은 아침이었다. 민수는 강물을 보고 다시 강물을 보았다. 배가 떠났다. "
    "종을 한 번 치면 배가 떠나고 종을 두 번 치면 돌아온다. 마을은 조용했다.\n",
    "Arabic": "كان الضباب كثيفا. سألت مريم جدها عن النهر فنظر الجد إلى النهر. دقت الجرس مرتين. "
    "كان الجرس قديما وكان صوت الجرس عاليا. ثم جاء الليل.\n",
    "Hindi": "सुबह घना कोहरा था। मीरा ने नदी को देखा और कहा कि नदी रुक गई। घंटी बजी। दादा ने "
    "घंटी की आवाज़ सुनी और फिर घंटी बजाई। सब लोग सो गए।\n",
    "code": "import os\n\n\ndef total(values):\n    count = 0\n    return sum(values) + count\n\n\n"
    "class Reader:\n    def read(self, path):\n        return open(path).read()\n\n\nx = 3\n",
}
# Where a sentence or a line may have ended before a passage.
ENDED = ".!?…؟।。！？\n」"


def of_bytes(most):
    """The function fit for passages of at most this number of bytes."""
    return lambda text: len(text.encode()[:most].decode("utf-8", "ignore"))


def repeats(passage: str) -> bool:
    """Whether two adjacent letters occur again after at least four other characters."""
    letters = [n for n, c in enumerate(passage) if unicodedata.category(c)[0] in "LM"]
    pairs = [passage[n : n + 2] for n in letters if n + 1 in letters]
    return any(passage.find(pair, passage.find(pair) + 6) > 0 for pair in pairs)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("most", [64, 120])
def test_a_word_occurs_again_in_text_of_any_script(name, most):
    text = TEXTS[name]
    found = passages([text], 3, of_bytes(most))
    places = sorted((text.index(passage), len(passage)) for passage in found)
    assert 2 <= len(set(found)) == len(found) <= 3
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    for passage in found:
        assert len(passage.encode()) <= most
        assert passage == passage.strip()
    assert repeats(found[0])
    before = text[: text.index(found[0])].rstrip(" ")
    assert not before or before[-1] in ENDED


def test_the_best_passage_repeats_a_name_and_is_a_sentence():
    """It does not repeat a word that is frequent in the text, nor one next to itself, and it is
    not the beginning of a longer sentence."""
    words = [
        "".join(syllables) for syllables in itertools.product(["ba", "co", "du", "fi"], repeat=3)
    ]
    pairs = zip(words[::2], words[1::2], strict=True)
    filler = [f"In the {a} and the {b} there was the ocean." for a, b in pairs]
    near = "Nobody knew a long long way home."
    cut = "Quillby took every bag from Quillby to an inn beyond a hill far away."
    planted = "Gosse counted his bags, but who thanked Gosse."
    text = " ".join([*filler[:16], near, cut, planted, *filler[16:]])
    assert passages([text], 1, of_bytes(64)) == [planted]
    assert passages(["", text[:150], text[150:]], 1, of_bytes(64)) == [planted]


def test_a_passage_ends_with_its_sentence_if_it_fits():
    text = "They rested. Tam saw the ferry and rang until the ferry came. " + "Nobody slept " * 9
    first = "Tam saw the ferry and rang until the ferry came."
    assert passages([text], 1, of_bytes(64)) == [first]
    (cut,) = passages([text], 1, of_bytes(40))
    assert len(cut) <= 40
    assert (text + " ")[text.index(cut) + len(cut)] == " "  # after a word


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12, 26, 60])
def test_no_character_is_divided(most):
    """Letters with accents, families of emoji, skin tones: several code points each."""
    characters = ["e\u0301", "👍🏽", "👩\u200d👩\u200d👧", "ก\u0e34", "क\u093f", "日", "x"]
    text = "".join(characters) * 20
    ends = set(itertools.accumulate(map(len, characters * 20), initial=0))
    found = passages([text], 3, of_bytes(most))
    assert bool(found) == (most >= 1)
    for passage in found:
        assert 0 < len(passage.encode()) <= most
        start = next(n for n in range(len(text)) if n in ends and text.startswith(passage, n))
        assert start + len(passage) in ends
        assert unicodedata.category(passage[0])[0] != "M"


def test_short_texts_and_texts_without_a_passage():
    for texts in ([], [""], [" \n\t\n "], ["\0" * 300], ["\u202e\ufffd" * 50]):
        assert passages(texts, 3, len) == []
    assert not any("\x1b" in passage for passage in passages(["\x1b[31m"], 3, len))
    assert passages(["hello"], 3, len) == ["hello"]
    assert passages(["one line without an end"], 3, len)[0].startswith("one line without an")
    letters = "".join(itertools.islice(itertools.cycle("ACGTTGCA"), 500))
    assert {len(passage) for passage in passages([letters], 3, of_bytes(64))} == {64}


def test_the_beginning_of_a_passage_is_short_and_in_one_line():
    assert beginning("Now the Lord is that Spirit, and where he is.") == "Now the Lord is"
    assert beginning('"The ledger says what the ledger says," said Mr. Gosse.') == "The ledger says"
    assert beginning("e\u0301x") == "e\u0301x"
    assert beginning('"""\r\nReads the file of the reader, a file.\n"""') == "Reads the file"
    assert beginning('""""""') == '""'
    assert beginning("ROMEO:\nWhat light is this? It is the east.") == "ROMEO:"
    for text in TEXTS.values():
        for passage in passages([text], 3, of_bytes(64)):
            start = beginning(passage)
            assert start in passage
            assert 0 < len(start) <= len(passage) / 3 + 1
            assert "\n" not in start
