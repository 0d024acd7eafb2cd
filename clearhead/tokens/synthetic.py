"""Random sequences on which a model learns induction heads: `experiment=induction`.

In these sequences the next token can be predicted in only one way: find the previous occurrence of
the current token and copy the token after it. The attention heads that do this are known (Olsson et
al. 2022, In-context Learning and Induction Heads): a previous-token head in the first layer writes
to each position which token precedes it. An induction head in the second layer attends to the
position whose preceding token is equal to the current token.

Window i is a function of i alone. No window is stored, and none is repeated in training. Needs
numpy and torch.

Shapes: B batch, T positions in a window, K symbols in use.
"""

import string

import numpy as np
import torch
from torch import Tensor

from clearhead.tokens.windows import IGNORED, WindowDataset

SYMBOLS = np.frombuffer((string.ascii_letters + string.digits).encode(), np.uint8)  # 62 ids
BOS = 256  # <|endoftext|> of the byte tokenizer; every sequence starts with it
JUMP_PROBABILITY = 0.05  # probability that the next symbol is random


class CycleWalks(WindowDataset):
    """Training windows: walks along a random cycle of symbols, with random jumps.

    Each window has its own random cycle of K symbols, K from 4 to T / 2 - 1. The next symbol is the
    one after the current symbol in the cycle or, with probability 0.05, a random one of the K. The
    new cycle makes it useless to memorise symbols. The jumps make it useless to memorise distances:
    without jumps each symbol is the one K positions before, and no induction head forms.

    Only predictable targets count for the loss: steps of the cycle that occurred earlier in the
    window.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def __len__(self) -> int:
        return 2**31  # more than any run reads

    def common_tokens(self) -> np.ndarray:
        """Returns the ids of all symbols."""
        return SYMBOLS.astype(np.int64)

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        length = self.max_length
        order, rest = _random_numbers(windows, "walk", length)
        sizes = 4 + (rest[:, 0] * (length // 2 - 4)).astype(np.int64)[:, None]  # (B, 1): K
        targets_of_jumps = (rest[:, 1 : 1 + length] * sizes).astype(np.int64)  # (B, T), below K
        jumps = rest[:, 1 + length : 1 + 2 * length] < JUMP_PROBABILITY  # (B, T)
        jumps[:, 0] = True  # the first symbol is a random one
        # Index in the cycle: the target of the last jump, plus the number of steps since then.
        steps = np.arange(length)
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0), axis=1)
        start = np.take_along_axis(targets_of_jumps, last_jump, 1)
        indices = (start + steps - last_jump) % sizes  # (B, T)

        current, following = indices[:, :-1], indices[:, 1:]
        along = following == (current + 1) % sizes  # (B, T - 1): this is a step of the cycle
        same = current[:, :, None] == current[:, None, :]  # (B, T - 1, T - 1)
        known = (same & along[:, None, :]).astype(np.uint8)
        known = np.tril(known, -1).any(-1)  # (B, T - 1): the same step occurred before
        symbols = SYMBOLS[np.take_along_axis(order, indices, 1)].astype(np.int64)
        ids = np.concatenate([np.full((len(windows), 1), BOS), symbols], axis=1)  # (B, T + 1)
        targets = np.where(along & known, symbols[:, 1:], IGNORED)
        targets = np.concatenate([np.full((len(windows), 1), IGNORED), targets], axis=1)
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


class RepeatedSequences(WindowDataset):
    """Validation windows: [BOS] + R + R, where R is T / 2 different random symbols.

    The targets in the first R are IGNORED because they are not predictable. So the validation
    accuracy measures how well the model copies the second R. Training has no such windows.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def __len__(self) -> int:
        return 1000

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        order, _ = _random_numbers(windows, "repeat", 0)
        half = (self.max_length + 1) // 2
        copy = SYMBOLS[np.resize(order.T, (half, len(windows))).T].astype(np.int64)  # (B, T / 2)
        bos = np.full((len(windows), 1), BOS)
        ids = np.concatenate([bos, copy, copy], axis=1)[:, : self.max_length + 1]
        targets = ids[:, 1:].copy()
        targets[:, : half + 1] = IGNORED  # the first symbol of the second R is not predictable
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


def _random_numbers(windows: np.ndarray, kind: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random numbers for each window: a permutation of the symbols (B, 62), and numbers in
    [0, 1) (B, 1 + 2 T).

    Each pair of kind and window is the key of a separate Philox generator, so that a window does
    not depend on others.
    """
    key = int.from_bytes(kind.encode(), "big")
    draws = np.stack(
        [
            np.random.Generator(np.random.Philox(key=[key, window])).random(
                len(SYMBOLS) + 1 + 2 * length
            )
            for window in windows.tolist()
        ]
    )
    return np.argsort(draws[:, : len(SYMBOLS)], axis=1), draws[:, len(SYMBOLS) :]
