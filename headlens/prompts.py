"""Prompts of the lens: short texts, and the repeated sequence, with texts and labels of tokens.

Shapes: T tokens, P period of the repeated sequence.
"""

import codecs
import contextlib
import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .tokens import LensTokenizer

MAX_SHOWN = 256  # maximum number of tokens on pages and images; statistics use all tokens
LABEL = 24  # maximum number of characters of a label
PARTS = "¹²³⁴"  # a character has at most four bytes
BYTES_OF_TOKEN = re.compile(r"(<0x[0-9A-F]{2}>)+")
BYTES_OF_LABEL = re.compile(r"␣*<0x[0-9A-F ]+>␣*")
# What labels and texts have in place of characters that cannot be seen.
CONTROLS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # others of these categories: "·"
JOINERS = "\u200c\u200d"  # needed between letters, and between the parts of an emoji
SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\n\r\t")
SIGNS = {"␣": "space", "⏎": "line break", "␍": "carriage return", "⇥": "tab", "∅": "empty token"}
# The page makes the labels of typed texts by the same rules (page/tokenizer.js).
LABEL_RULES = {"longest": LABEL, "parts": PARTS, "controls": CONTROLS, "unseen": sorted(UNSEEN)}
LABEL_RULES |= {"joiners": JOINERS, "spaces": SPACES, "signs": SIGNS}


@dataclass
class Prompt:
    """A prompt and its tokens."""

    name: str  # short; used in file names and dashboard keys
    text: str
    token_ids: list[int]
    tokens: list[str]  # the text of each token; bytes of incomplete UTF-8 as <0xE2>
    truncated: bool = False  # whether the text has more tokens than are used or shown
    period: int = 0  # P, if the prompt is [BOS] + R + R, where R has P tokens; otherwise 0
    num_symbols: int = 0  # number of tokens that R is drawn from
    # Each statistic for uniform attention on this prompt, see statistics.Chance.
    uniform: dict[str, float | list[float | None] | None] = field(default_factory=dict)

    @functools.cached_property
    def labels(self) -> list[str]:
        """The tokens as labels: see labels_of."""
        return labels_of(self.tokens)

    @functools.cached_property
    def texts(self) -> list[str]:
        """The shown tokens as running text: see texts_of."""
        return texts_of(self._spaced)

    @functools.cached_property
    def _spaced(self) -> list[str]:
        shown = self.tokens[: self.shown]
        return spaced(shown) if any(map(str.isspace, self.text)) else shown

    @property
    def title(self) -> str:
        """The prompt in one line, for lists and captions."""
        text = visible(" ".join(plain_text(self._spaced).split()))
        return "repeated sequence" if self.period else clipped(text, 200) or self.name

    @property
    def shown(self) -> int:
        """Number of leading tokens that pages and images show."""
        return min(len(self.token_ids), MAX_SHOWN)


def make_prompt(number: int, text: str, tokenizer: LensTokenizer, limit: int) -> Prompt:
    """Returns the prompt of a text, truncated to `limit` tokens, named by number and first words.
    Raises ValueError if the text has no tokens."""
    # A terminal may pass a lone surrogate; it becomes the replacement character.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    token_ids = tokenizer.encode_text(text)
    if not token_ids:
        raise ValueError(f"a prompt without tokens: {text!r}")
    kept = token_ids[:limit]
    texts = token_texts(kept, tokenizer.token_bytes)
    truncated = len(token_ids) > min(limit, MAX_SHOWN)
    return Prompt(f"{number}-{_slug(text)}", text, kept, texts, truncated)


def repeated_prompt(
    number: int, vocabulary: Sequence[int], bos: int, token_bytes: Callable, period: int
) -> Prompt | None:
    """Returns the prompt [BOS] + R + R, where R is `period` random tokens of the vocabulary.

    The tokens of R are distinct if the vocabulary is large enough. The sequence depends only on the
    vocabulary and the period. Returns None if the period is below 2 or the vocabulary is empty.
    """
    tokens = np.asarray(vocabulary)
    tokens = tokens[tokens != bos]
    if period < 2 or not len(tokens):
        return None
    drawn = np.random.default_rng(0).choice(tokens, period, replace=len(tokens) < period)
    token_ids = [bos, *drawn.tolist(), *drawn.tolist()]
    text = f"{period} random tokens, written twice"
    texts = token_texts(token_ids, token_bytes)
    name, num_symbols = f"{number}-repeated", len(vocabulary)
    return Prompt(name, text, token_ids, texts, period=period, num_symbols=num_symbols)


def token_texts(token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """Returns the text of each token. A byte of an incomplete UTF-8 character becomes <0xE2>.

    An id that the tokenizer does not know (vocabularies may be padded) becomes <id NUMBER>.
    """
    texts = []
    for token in token_ids:
        try:
            texts.append(token_bytes(token).decode("utf-8"))
        except UnicodeDecodeError as error:
            texts.append("".join(f"<0x{byte:02X}>" for byte in error.object))
        except (KeyError, OverflowError):
            texts.append(f"<id {token}>")
    return texts


def texts_of(tokens: Sequence[str]) -> list[str]:
    """Returns the text of each token in running text, one after another, without a gap. The first
    of the tokens that share a character has it, the others have "". Control characters are visible,
    so that they cannot affect other text."""
    return [visible(text) for text, _ in _joined(tokens)]


def spaced(tokens: Sequence[str]) -> list[str]:
    """Returns tokens with a space in front of each word, if they are words without spaces, as of a
    word-level tokenizer."""
    are_words = any(
        len(token) > 1 and token.isalpha() and token.lower() != token.upper() for token in tokens
    )
    if not are_words or any(character.isspace() for token in tokens for character in token):
        return [*tokens]
    return [*tokens[:1], *(" " * token[:1].isalnum() + token for token in tokens[1:])]


def labels_of(tokens: Sequence[str]) -> list[str]:
    """Returns each token as a label, for axes, lists and sentences: at most LABEL characters, with
    visible white space. Each of the tokens that share a character has it, with the number of the
    part: 語¹, 語², 語³. Bytes of no character are <0xE3 81>."""
    return [_label(label) for _, label in _joined(tokens)]


def signs_of(tokens: Sequence[str]) -> str:
    """Returns an explanation of the signs in labels of tokens, "" if there are none."""
    joined = [*dict.fromkeys(_joined(tokens))]
    labels = [_label(label) for _, label in joined]
    used = set("".join(label.rstrip("…") for label in labels))
    meanings = [f"{sign} {what}" for sign, what in SIGNS.items() if sign in used]
    if part := next((label for label in labels if BYTES_OF_LABEL.fullmatch(label)), None):
        meanings.append(f"{part} part of a character, in bytes")
    if part := next((label for text, label in joined if text != label), None):
        meanings.append(f"{_label(part)} part of a character that has several tokens")
    return " · ".join(meanings)


def clipped(text: str, longest: int) -> str:
    """Returns a text of at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def visible(text: str) -> str:
    """Returns a text with signs in place of characters that cannot be seen: one for each."""
    return "".join(
        CONTROLS.get(c, "·" if unicodedata.category(c) in UNSEEN and c not in JOINERS else c)
        for c in text
    )


def _label(token: str) -> str:
    inner = token.strip(SPACES)
    before = len(token) - len(token.lstrip(SPACES)) if inner else len(token)
    spaces = "␣" * before, "␣" * (len(token) - before - len(inner))
    if BYTES_OF_TOKEN.fullmatch(inner):
        inner = inner.replace("><0x", " ")
    shown = visible(inner.join(spaces))
    return clipped(shown, LABEL) if shown.strip(JOINERS) else "·" if shown else "∅"


def _joined(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (text, label) of each token, with characters in place of their bytes: of a character
    that several tokens share, the first has the text, and the labels of all have its number."""
    joined, first = [(token, token) for token in tokens], 0
    while first < len(tokens):
        owners: list[int] = []  # the token of each byte
        decoder, found, text, n = codecs.getincrementaldecoder("utf-8")(), "", "", first
        with contextlib.suppress(UnicodeDecodeError):
            while n < len(tokens) and BYTES_OF_TOKEN.fullmatch(tokens[n]):
                own = bytes_of(tokens[n])
                found, owners, n = found + decoder.decode(own), owners + [n] * len(own), n + 1
                if not decoder.getstate()[0]:  # the character is complete
                    text = found if n - first > 1 else ""  # one token is a text such as <0x41>
                    break
        if text:
            joined[first:n] = [("", "")] * (n - first)
        at = 0
        for character in text:
            parts = sorted({*owners[at : at + len(character.encode())]})
            is_mark = unicodedata.category(character)[0] == "M"  # belongs to the letter before
            for part, owner in enumerate(parts):
                known, label = joined[owner]
                stem = label.rstrip(PARTS) if is_mark else label
                number = label[len(stem) :] + (PARTS[part] if parts[1:] else "")
                joined[owner] = known + ("" if part else character), stem + character + number
            at += len(character.encode())
        first = n if text else first + 1
    return joined


def plain_text(tokens: Sequence[str]) -> str:
    """Returns the text of tokens, without bytes of incomplete characters."""
    return b"".join(map(bytes_of, tokens)).decode("utf-8", "ignore")


def bytes_of(token: str) -> bytes:
    """Returns the bytes of the text of a token, see token_texts."""
    if BYTES_OF_TOKEN.fullmatch(token):
        return bytes.fromhex(token.replace("<0x", "").replace(">", ""))
    return token.encode()


def is_separator(token: str) -> bool:
    """Whether a token is punctuation or white space, such as a space between letters."""
    punctuation = (unicodedata.category(character).startswith("P") for character in token.strip())
    return token != "" and all(punctuation)


def _slug(text: str) -> str:
    """Returns the first words of a text as a file name: "Où est-ce, là?" -> "ou-est-ce-la"."""
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return "-".join(re.findall(r"[a-z0-9]+", plain)[:4])[:40] or "prompt"
