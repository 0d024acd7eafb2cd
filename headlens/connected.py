"""What a head connects in a text: the lines around a query token and its key token, and the pairs
of words that it connects most often.

    Lines(windows).ranges(window=3, query=40, key=12)  # the tokens to show: [8, 47]
    Words(windows).pairs(keys)  # keys: the key token of each query token, or -1

Shapes: N windows, T tokens, L layers, H heads.
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from .passages import BLANK_LINE, SENTENCE_END, UNSPACED
from .prompts import LABEL, labels_of, spaced, texts_of

AROUND = 90  # characters that a line has on each side of its tokens, at most
SLACK = 20  # of these, in which the line looks for a space
LINE_END = re.compile(rf"{SENTENCE_END}|{BLANK_LINE}")
# A token that is no part of a word; in scripts without spaces, each token is a word.
ALONE = re.compile(rf"\s*[{UNSPACED}\W_]*(?<!['’])\s*")
MOST_KEYS, MOST_QUERIES = 8, 6  # of a head, of a key


class Lines:
    """Lines of text around a query token and a key token: their sentences, or AROUND characters on
    each side. windows: the tokens of each window."""

    def __init__(self, windows: Sequence[Sequence[str]]):
        self.starts: list[list[int]] = []  # of each token in its window, and the end of the last
        self.sentences: list[list[int]] = []  # starts
        self.texts: list[str] = []
        for tokens in windows:
            texts = texts_of(spaced(tokens))
            text = "".join(texts).replace("⏎", "\n")
            self.texts.append(text)
            self.starts.append([0, *itertools.accumulate(map(len, texts))])
            ends = (match.end() for match in LINE_END.finditer(text))
            self.sentences.append([0, *ends, len(text)])

    def ranges(self, window: int, query: int, key: int) -> list[int]:
        """Returns the tokens that the line shows as [first, end], or as [first, end, first, end]
        if it omits tokens between the key token and the query token."""
        starts, sentences = self.starts[window], self.sentences[window]
        left, right = starts[key], starts[query + 1]
        if self.texts[window][left : starts[key + 1]].isspace():  # it belongs to the text before it
            left = max(0, len(self.texts[window][:left].rstrip()) - 1)
        low = max(sentences[bisect_right(sentences, left) - 1], self._space(window, left, -1))
        high = min(sentences[bisect_left(sentences, right)], self._space(window, right, 1))
        # A token of several characters, and tokens without a text, belong to the line.
        first = min(bisect_left(starts, low), key)
        end = max(bisect_left(starts, high), query + 1)
        after = bisect_left(starts, self._space(window, starts[key + 1], 1))
        before = bisect_left(starts, self._space(window, starts[query], -1))
        return [first, end] if after >= before else [first, after, before, end]

    def _space(self, window: int, place: int, by: int) -> int:
        """Returns the start of a word about AROUND characters before (by: -1) or after a place."""
        text, far = self.texts[window], place + by * AROUND
        if not 0 < far < len(text):
            return max(0, min(far, len(text)))
        if by < 0:
            return text.find(" ", far, far + SLACK) + 1 or far
        found = text.rfind(" ", far - SLACK, far)
        return far if found < 0 else found


class Words:
    """The words of windows of a text. windows: the tokens of each window, T in all of them."""

    def __init__(self, windows: Sequence[Sequence[str]]):
        known: dict[str, int] = {}
        words, places = [], []
        for window in windows:
            texts, starts, is_alone = texts_of(spaced(window)), [0] * len(window), True
            for n, text in enumerate(texts):
                begins = is_alone or text[:1].isspace()
                is_alone = bool(ALONE.fullmatch(text))
                starts[n] = n if begins or is_alone else starts[n - 1]
            for n, (start, label) in enumerate(zip(starts, labels_of(window), strict=True)):
                word = "".join(texts[start : start + starts.count(start)]).strip()
                is_word = 0 < len(word) <= LABEL  # a sequence without spaces has no words
                words.append(known.setdefault(word if is_word else label, len(known)))
                places.append(start if is_word else n)
        shape = len(windows), -1
        self.texts = list(known)
        # (N, T) each: the number in `texts` of the word that contains a token, and its first token.
        self.words, self.places = np.reshape(words, shape), np.reshape(places, shape)

    def pairs(self, keys: np.ndarray) -> dict:
        """Returns the pairs of words that each head connects most often, and of tokens that are no
        words. Two of them count once, for any number of links between their tokens, and not at all
        if they are the same.

        keys: (L, H, N, T): the key token of each query token, -1 if the head connects it with none.
        The result is {"queries": number of query tokens, "texts": [...], "of_heads": [{"links":
        number of query tokens with a key token, "keys": [[key, count, [[query, count], ...]],
        ...]}]}: the most frequent keys, each with its most frequent queries (numbers of texts).
        """
        count, length = keys.shape[2:]
        window, query = np.indices((count, length)).reshape(2, -1)
        used: dict[int, int] = {}
        of_heads = []
        for of_head in keys.reshape(-1, count * length):
            linked = np.flatnonzero(of_head >= 0)
            from_, to = (window[linked], query[linked]), (window[linked], of_head[linked])
            places = np.stack([window[linked], self.places[from_], self.places[to]])
            _, once = np.unique(places, axis=1, return_index=True)
            once = once[self.places[from_][once] != self.places[to][once]]
            found = _grouped(self.words[from_][once], self.words[to][once])
            number = lambda n: used.setdefault(n, len(used))  # noqa: E731
            grouped = [[number(k), n, [[number(q), m] for q, m in of_k]] for k, n, of_k in found]
            of_heads.append({"links": len(linked), "keys": grouped})
        texts = [self.texts[n] for n in used]
        return {"queries": count * (length - 2), "texts": texts, "of_heads": of_heads}


def _grouped(queries: np.ndarray, keys: np.ndarray) -> list[tuple[int, int, list]]:
    """Returns (key, count, [(query, count), ...]) of the most frequent keys. queries, keys: of each
    link."""
    frequent = [(key, n) for key, n in _most_frequent(keys, MOST_KEYS) if n > 1]
    return [(key, n, _most_frequent(queries[keys == key], MOST_QUERIES)) for key, n in frequent]


def _most_frequent(numbers: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Returns (number, count) of the most frequent numbers, of equal ones the smallest first."""
    counts = np.bincount(numbers)
    order = np.argsort(-counts, kind="stable")[:most].tolist()
    return [(number, int(counts[number])) for number in order if counts[number]]
