"""Sequences made on the spot, for an experiment whose answer is known: `experiment=induction`.

A text mixes everything that a head could learn. Here only one thing helps: to find where the
current symbol stood before, and to say what followed it there. The circuit for that is known
(Olsson et al. 2022, In-context Learning and Induction Heads): a head of the first layer tells each
position what the token before it was; a head of the second layer looks for the position whose
"token before" is the current one.

Both data sets are made of window numbers alone: window i is the same whenever and wherever it is
asked for, nothing is stored, and none is ever seen twice in training. Needs numpy and torch.

Shapes: B batch, T positions in a window, K symbols in use.
"""

import string

import numpy as np
import torch
from torch import Tensor

from tokens.windows import IGNORED, WindowDataset

SYMBOLS = np.frombuffer((string.ascii_letters + string.digits).encode(), np.uint8)  # 62 ids
BOS = 256  # the byte tokenizer's <|endoftext|>, which every sequence begins with
JUMP_PROBABILITY = 0.05  # how often a walk leaves its cycle for a random symbol of it


class CycleWalks(WindowDataset):
    """Training windows: walks around a random cycle of symbols, now and then with a jump.

    Each window draws K from 4 to T / 2 - 1 symbols and puts them into a random cycle. The next
    symbol is the one after the current in the cycle or, one time in twenty, any of the K. The
    cycle is new in each window and the jumps make all distances different, so neither symbols nor
    positions tell what comes next. Without jumps the successor always stands K back, and a model
    gets by with positions alone: no induction head forms.

    The loss counts only the targets that can be known: steps along the cycle seen before.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def __len__(self) -> int:
        return 2**31  # more than any run will ask for

    def common_tokens(self) -> np.ndarray:
        """The ids that sequences are made of."""
        return SYMBOLS.astype(np.int64)

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        length = self.max_length
        order, rest = _random_numbers(windows, "walk", length)
        sizes = 4 + (rest[:, 0] * (length // 2 - 4)).astype(np.int64)[:, None]  # K of each window
        jumps_to = (rest[:, 1 : 1 + length] * sizes).astype(np.int64)  # (B, T) places in the cycle
        jumps = rest[:, 1 + length : 1 + 2 * length] < JUMP_PROBABILITY
        jumps[:, 0] = True  # the first symbol is any of the K
        # From the last jump on, one place further at each step.
        steps = np.arange(length)
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0), axis=1)
        places = (np.take_along_axis(jumps_to, last_jump, 1) + steps - last_jump) % sizes  # (B, T)

        current, following = places[:, :-1], places[:, 1:]
        along = following == (current + 1) % sizes  # (B, T - 1): a step along the cycle
        same = current[:, :, None] == current[:, None, :]  # (B, T - 1, T - 1)
        known = (same & along[:, None, :]).astype(np.uint8)
        known = np.tril(known, -1).any(-1)  # this step was made before
        symbols = SYMBOLS[np.take_along_axis(order, places, 1)].astype(np.int64)
        ids = np.concatenate([np.full((len(windows), 1), BOS), symbols], axis=1)  # (B, T + 1)
        targets = np.where(along & known, symbols[:, 1:], IGNORED)
        targets = np.concatenate([np.full((len(windows), 1), IGNORED), targets], axis=1)
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


class RepeatedSequences(WindowDataset):
    """Windows to validate on: [BOS] + R + R, R of T / 2 different random symbols.

    Never seen in training, where no window is such a sequence. The targets of the first copy, which
    nobody can know, are left out; so the share of right ones is how well the second is copied.
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
        targets[:, : half + 1] = IGNORED  # where the second copy begins cannot be known either
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


def _random_numbers(windows: np.ndarray, kind: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The random numbers of each window: an order of all symbols (B, 62), numbers (B, 1 + 2 T).

    Philox is a generator with a key: one for each kind and window, none depends on another.
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
