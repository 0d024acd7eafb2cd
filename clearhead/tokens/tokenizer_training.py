"""Trains a byte-level BPE tokenizer on a text, with Hugging Face's library `tokenizers`.

    sample = Sample()
    for block in blocks:
        sample.add(block)
    tokenizer = train_tokenizer(sample, vocab_size=4096)

The most frequent pair of neighbouring tokens becomes a new token, until the vocabulary is complete
(Sennrich et al. 2016). The ids: 0 to 255 are the bytes, then come the new tokens in the order in
which they were found, and the last id is <|endoftext|>. The same text and size give the same ids.
"""

import json
import math

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.tokenizer import PATTERNS, Tokenizer
from clearhead.tokens.tokenizer_json import CHARACTERS, build_tokenizer

PATTERN = "qwen35"  # fewer tokens than with GPT-2's pattern in all measured languages
SAMPLE_BYTES = 16_000_000  # with 100 MB, texts have about as many tokens (docs/data.md)
BLOCK = 2**16  # bytes
# Ids of a vocabulary whose size is not given. With fewer, also books of 0.1 MB are learned worse.
MIN_SIZE, MAX_SIZE = 2**11, 2**15
LONGEST_TOKEN = 64  # bytes, half as many in some scripts; a longer one is a repeated phrase
MIN_FREQUENCY = 2  # of a pair that becomes a token


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
    """Returns a new tokenizer. vocab_size=None: default_vocab_size, or fewer ids if the text is too
    short for them. Raises DataError if it is too short for a given size."""
    from tokenizers import Regex, models, trainers
    from tokenizers import Tokenizer as Model
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    model = Model(models.BPE())
    of_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = Sequence([Split(Regex(PATTERNS[PATTERN]), "isolated"), of_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=(vocab_size or default_vocab_size(sample.text_bytes)) - 1,
        min_frequency=MIN_FREQUENCY,
        max_token_length=LONGEST_TOKEN,
        initial_alphabet=CHARACTERS,
        show_progress=False,
    )
    texts = (
        text.decode("utf-8", "ignore")
        for block in sample.blocks
        for text in block.split(END_OF_TEXT.encode())
    )
    model.train_from_iterator(texts, trainer)
    pairs = json.loads(model.to_str())["model"]["merges"]
    found = 257 + len(pairs)
    if vocab_size and found < vocab_size:
        reason = f"the text supports {found:,} ids: no other pair of tokens occurs twice"
        fewer = f"{found}, " if found > 257 else ""
        raise DataError("data.vocab_size", vocab_size, reason, f"use {fewer}null, or more text")
    tokens = [*CHARACTERS, *(left + right for left, right in pairs), END_OF_TEXT]
    ids = {token: number for number, token in enumerate(tokens)}
    return build_tokenizer(ids, pairs, PATTERN)
