"""Prompts of the lens: short texts, and the repeated sequence, with the text of each token.

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

MAX_SHOWN = 256  # maximum number of tokens on pages and images; statistics use all tokens
PARTS = "¹²³⁴"  # a character has at most four bytes
BYTES_OF_TOKEN = re.compile(r"(<0x[0-9A-F]{2}>)+")


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
    # Each statistic for uniform attention on this prompt, None if it is undefined.
    uniform: dict[str, float | None] = field(default_factory=dict)

    @functools.cached_property
    def labels(self) -> list[str]:
        """The tokens for axes: see labels_of."""
        return labels_of(self.tokens)

    @property
    def shown(self) -> int:
        """Number of leading tokens that pages and images show."""
        return min(len(self.token_ids), MAX_SHOWN)


def make_prompt(
    number: int, text: str, encode: Callable, token_bytes: Callable, limit: int
) -> Prompt:
    """Returns the prompt of a text, truncated to `limit` tokens, named by number and first words.

    encode(text) returns token ids, token_bytes(id) the bytes of a token.
    Raises ValueError if the text has no tokens.
    """
    # A terminal may pass a lone surrogate; it becomes the replacement character.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    token_ids = list(encode(text))
    if not token_ids:
        raise ValueError(f"a prompt without tokens: {text!r}")
    kept = token_ids[:limit]
    truncated = len(token_ids) > min(limit, MAX_SHOWN)
    return Prompt(f"{number}-{_slug(text)}", text, kept, token_texts(kept, token_bytes), truncated)


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
            raw = token_bytes(token)
        except (KeyError, OverflowError):
            texts.append(f"<id {token}>")
            continue
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append("".join(f"<0x{byte:02X}>" for byte in raw))
    return texts


def labels_of(tokens: Sequence[str]) -> list[str]:
    """Returns the tokens with characters in place of their bytes. Each of the tokens that share a
    character has it, with the number of the part: 語¹, 語², 語³. Bytes of no character stay."""
    labels, first = [*tokens], 0
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
            labels[first:n] = [""] * (n - first)
        at = 0
        for character in text:
            parts = sorted({*owners[at : at + len(character.encode())]})
            for part, owner in enumerate(parts):
                labels[owner] += character + (PARTS[part] if len(parts) > 1 else "")
            at += len(character.encode())
        for each in range(first, n if text else first):
            labels[each] = _with_marks_first(labels[each])
        first = n if text else first + 1
    return labels


def _with_marks_first(label: str) -> str:
    """Returns a label with the numbers of parts after combining marks, which belong to a letter."""
    shown, numbers = "", ""
    for character in label:
        if character in PARTS:
            numbers += character
            continue
        if not unicodedata.category(character).startswith("M"):
            shown, numbers = shown + numbers, ""
        shown += character
    return shown + numbers


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
