"""Chooses short passages of texts in which a word occurs again, in any script.

    passages(["The bell rang. Tam heard the bell ..."], 3, fit=lambda text: 64)
    text_prompts(texts, tokenizer, most=64)  # at most three, of at most 64 tokens

The result depends on the texts alone. The best passages begin and end with a sentence and have a
word twice, at a distance, so that attention to its earlier occurrence can be seen. A name or a rare
word counts more than "the". In scripts without spaces, two adjacent characters are a word.
"""

import math
import re
import unicodedata
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .tokens import lens_tokenizer

LONGEST, MOST_STARTS = 100, 1000  # characters of a passage; number of starts that are compared
DISTANCE = 4  # words between the first and the last occurrence, at least
# Scripts without spaces between words, and Korean, where a word and its ending are not separated.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3041-\u30ff"
UNSPACED += "\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
# Marks inside words of Arabic, Hebrew and the scripts of India, which \w does not match.
MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u0670\u0900-\u0963\u0966-\u0dff\u200c\u200d"
LETTER = f"[\\w{MARKS}]"
WORD = re.compile(f"(?=([{UNSPACED}]{{2}}))|(?<!{LETTER})((?![{UNSPACED}\\d_]){LETTER}{{2,}})")
SYMBOL = re.compile(f"[^\\w\\s{MARKS}]|\\d")
# Control characters, of which some change the direction of text, and the sign of a wrong encoding.
REFUSED = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffd]")
# A period only after four letters, so that it is not that of Mr. or of an initial.
SENTENCE_END = "(?:(?:(?<=\\w{4})[.]|[!?…؟۔।॥])[\"'”’»)\\]]*(?!\\S)|[。！？｡][」』”’）]*)"
BLANK_LINE = r"\n[^\S\n]{,99}\n"
SENTENCE = rf"(?:{SENTENCE_END}|{BLANK_LINE})\s{{,99}}(?=\S)"
OPENING = "\"'“‘„«「『"  # quotation marks
# A passage may begin at a sentence or a line; if these are too few, at a word or a character.
STARTS = (SENTENCE, r"(?:\A|\n)(?=\S)", r"(?<=\s)(?=\S)", r"(?=\S)")
# It may end after a sentence, a line, a word, a character; the first that leaves enough.
ENDS = (rf"{SENTENCE_END}|(?={BLANK_LINE})", r"(?=\r?\n)", r"(?=\s)", "")
NUM_PROMPTS = 3
# At most 8 excerpts of a text are read. Passages in different places differ more.
MOST_EXCERPTS, EXCERPT = 8, 16_384  # characters
# number, start: of its text, in its text. word: that occurs again; "" if none does.
Passage = namedtuple("Passage", "score word number start text")


def text_prompts(texts: Sequence[str], tokenizer: Any, most: int) -> list[str]:
    """Returns at most three passages of at most `most` tokens. tokenizer: as for lens_tokenizer."""
    tokens = lens_tokenizer(tokenizer)

    def fit(text: str) -> int:
        ids = tokens.encode(text)
        if len(ids) <= most:
            return len(text)
        raw = b"".join(tokens.token_bytes(token) for token in ids[:most])
        return len(raw.decode("utf-8", "ignore"))

    return passages(texts, NUM_PROMPTS, fit)


def excerpts(text: str) -> list[str]:
    """Returns evenly spaced parts of a text."""
    count = min(MOST_EXCERPTS, len(text) // EXCERPT)
    if count < 2:
        return [text[:EXCERPT]]
    starts = [(len(text) - EXCERPT) * n // (count - 1) for n in range(count)]
    parts = [text[start : start + EXCERPT] for start in starts]
    # They may begin inside a word.
    return parts[:1] + [re.sub(r"\A\S{,40}(?=\s)", "", part) for part in parts[1:]]


def passages(texts: Sequence[str], count: int, fit: Callable[[str], int]) -> list[str]:
    """Returns at most `count` passages, the best first. None begins or ends inside a character, has
    a control character or overlaps with another one. fit(text): how many of its first characters a
    passage may have."""
    weights, found = _weights(texts), []
    for level, pattern in enumerate(STARTS):
        matches = [(n, m.end()) for n, text in enumerate(texts) for m in re.finditer(pattern, text)]
        for n, start in matches[:: 1 + len(matches) // MOST_STARTS]:
            text, level_of_end = _cut(texts[n], start, fit)
            if text and not REFUSED.search(text):
                score, word = _repeated(text, weights)
                score += (level_of_end == 0) - 2 * level - text[0].islower()
                score -= text.count("\n") / 2 + 4 * len(SYMBOL.findall(text)) / len(text)
                found.append(Passage(score, word, n, start, text))
        chosen = _distinct(found, count)
        if level and len(chosen) == count:
            break
    return [passage.text for passage in chosen]


def beginning(passage: str) -> str:
    """Returns the first words of a passage: at most a third of it if possible, in one line, without
    an opening quotation mark, which a shell command would have to quote."""
    most = -(-len(passage) // 3)
    line = (passage.lstrip(OPENING + "\r\n ") or passage).splitlines()[0]
    return line if len(line) <= most else _cut(line, 0, lambda _: most)[0] or line


def _words(text: str) -> Iterator[str]:
    return (match[1] or match[2] for match in WORD.finditer(text))


def _cut(text: str, start: int, fit: Callable[[str], int]) -> tuple[str, int]:
    """Returns the passage that begins there, and the index in ENDS of its end; "" for none."""
    room = fit(text[start : start + LONGEST]) if _is_boundary(text, start) else 0
    least = start + room * 2 // 5
    for level, pattern in enumerate(ENDS if room else ()):
        matches = re.compile(pattern).finditer(text, least, start + room + 1)
        for end in reversed([match.end() for match in matches]):
            passage = text[start:end].rstrip()  # may have more tokens than in a longer text
            if passage and len(passage) <= min(room, fit(passage)) and _is_boundary(text, end):
                return passage, level
    return "", 0


def _is_boundary(text: str, at: int) -> bool:
    """Returns whether no character of several code points is divided there."""
    after = text[at : at + 1] or " "
    joins = unicodedata.category(after)[0] == "M" or "\U0001f3fb" <= after <= "\U0001f3ff"
    return not joins and "\u200d" not in (after, text[at - 1 : at])


def _weights(texts: Sequence[str]) -> dict[str, float]:
    """Returns how significant each word is: at most 2 for its rarity, and 1 for a name."""
    counts = Counter(word for text in texts for word in _words(text))
    total, names = counts.total(), {w for w, n in counts.items() if counts[w.lower()] < n > 2}
    rare = min(5, math.log(max(total, 4) / 2))  # a word twice in the texts, or once in 150 words
    rarity = {word: min(2, 4 * math.log(total / n) / rare - 2) for word, n in counts.items()}
    return {word: value + (word in names) for word, value in rarity.items()}


def _repeated(text: str, weights: Mapping[str, float]) -> tuple[float, str]:
    """Returns a score and the most significant word that occurs again, "" if none does."""
    places: dict[str, list[int]] = {}
    for place, word in enumerate(_words(text)):
        places.setdefault(word, []).append(place)
    again = [(weights[word], word) for word, at in places.items() if at[-1] - at[0] >= DISTANCE]
    again = sorted([*again, (0.0, ""), (0.0, "")], key=lambda pair: -pair[0])
    return again[0][0] + again[1][0] / 4, again[0][1]


def _distinct(found: Sequence[Passage], count: int) -> list[Passage]:
    """Returns the best passages that do not overlap and have different repeated words."""
    least, chosen = max((len(passage.text) for passage in found), default=0) / 3, []
    for p in sorted(found, key=lambda passage: -passage.score):
        differs = len(p.text) >= least and all(
            (p.number != q.number or abs(p.start - q.start) >= max(len(p.text), len(q.text)))
            and (p.text != q.text and (not p.word or p.word != q.word))
            for q in chosen
        )
        if differs and len(chosen) < count:
            chosen.append(p)
    return chosen
