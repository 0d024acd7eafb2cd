"""How much of the validation text also occurs in the training text.

    overlap(data.train, data.val, tokenizer.byte_lengths)  # "about 12 %"

It compares pieces of about 64 bytes. A hash of the first tokens of a piece decides whether it is
compared. So the same pieces of both texts are compared, wherever they are (Manber 1994, "Finding
similar files in a large file system"). No piece reaches into the next document, but a short
document is a piece.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from clearhead.tokens.token_stream import TokenStream

PIECE_BYTES = 64
MIN_FOUND, MIN_BYTES = 0.01, 256  # less is not reported: a refrain, a heading
# The hashed tokens of a piece. Neighbours alone would often be the same in a text with templates.
KEY = (0, 1, 3, 5)
MAX_VAL, MAX_TRAIN = 2**12, 2**18  # about the largest numbers of pieces that are compared
BLOCK = 2**18  # ids; in the cache of a processor
MAX_READ = 2**29  # ids, the size of token files that are verified; of more, blocks are read
FACTORS = np.random.default_rng(0).integers(2**63, size=PIECE_BYTES, dtype=np.uint64) * 2 + 1


def overlap(train: Any, val: Any, byte_lengths: np.ndarray) -> str | None:
    """Returns how much of `val` is also in `train`, None if it is little. Both are datasets of
    windows of text, or mixtures. byte_lengths: of the token ids. Of more than MAX_READ ids,
    evenly spaced blocks are read: then it is "at least" so much."""
    train, val = (
        [each.tokens for each in getattr(dataset, "datasets", [dataset])]
        for dataset in (train, val)
    )
    sample = next(val[0].blocks(BLOCK))
    token_bytes = byte_lengths.take(sample, mode="clip").mean()
    size = int(np.clip(PIECE_BYTES / max(1, token_bytes), 8, PIECE_BYTES))
    num_val, num_train = (sum(map(len, streams)) for streams in (val, train))
    density = min(1, MAX_VAL / min(num_val, MAX_READ), MAX_TRAIN / min(num_train, MAX_READ))
    wanted = np.unique(np.concatenate([*_pieces(val, size, density)]))
    if not len(wanted):
        return None
    found = np.zeros(len(wanted), bool)
    for hashes in _pieces(train, size, density):
        at = np.searchsorted(wanted, hashes)
        found[at[wanted.take(at, mode="clip") == hashes]] = True
    fraction = float(found.mean())
    if fraction < MIN_FOUND or fraction * num_val * token_bytes < MIN_BYTES:
        return None
    return f"{'about' if num_train <= MAX_READ else 'at least'} {100 * fraction:.0f} %"


def _pieces(streams: list[TokenStream], size: int, density: float) -> Iterator[np.ndarray]:
    """Yields the hashes of a fraction `density` of the pieces of `size` tokens, uint64."""
    every = -(-sum(map(len, streams)) // MAX_READ)
    for stream in streams:
        end_of_text = np.uint16(stream.end_of_text)
        for ids in stream.blocks(BLOCK, every):
            count = max(0, len(ids) - size + 1)
            key = np.zeros(count, np.uint16)
            for n in KEY:
                key += ids[n : n + count] * FACTORS[n].astype(np.uint16)
            starts = np.flatnonzero(key <= np.uint16(density * (2**16 - 1)))
            hashes, is_over = np.zeros(len(starts), np.uint64), np.zeros(len(starts), bool)
            valid = ids[starts] == end_of_text  # of those that are over, only whole documents
            for n in range(size):
                tokens = ids[starts + n]
                is_over |= (n > 0) & (tokens == end_of_text)
                valid &= (n > KEY[-1]) | ~is_over
                hashes += np.where(is_over, end_of_text, tokens) * FACTORS[n]
            yield hashes[valid | ~is_over]
