"""The step at which a model learns to copy: a sudden drop of its loss on the repeated sequence.

In the second copy of [BOS] + R + R, each token can be predicted by copying. The loss there falls
from about ln K, K being the number of tokens that R is drawn from, to almost 0 when induction heads
form (Olsson et al. 2022, In-context Learning and Induction Heads: a phase change).
"""

import math
from collections.abc import Sequence

import numpy as np

from .history import Row
from .prompts import Prompt


def copying_begins(losses: Sequence[float | np.ndarray], num_symbols: int) -> int | None:
    """Returns the index of the first snapshot after the drop, or None if there is no clear drop.

    losses: the mean loss on the second copy at each snapshot, in nats. num_symbols: K. The losses
    are fitted by two constants, one before and one after a snapshot, with the least squared error.
    The drop is clear if it is at least ln(K) / 4 and the second constant is below ln(K) / 2.
    """
    values = np.asarray(losses, np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    splits = range(1, len(values))
    errors = [values[:n].var() * n + values[n:].var() * (len(values) - n) for n in splits]
    first = 1 + int(np.argmin(errors))
    before, after = values[:first].mean(), values[first:].mean()
    is_clear = before - after >= math.log(num_symbols) / 4 and after < math.log(num_symbols) / 2
    return first if is_clear else None


def copying_step(prompts: Sequence[Prompt], history: Sequence[Row]) -> int | None:
    """Returns the first step with a low loss on the repeated sequence, or None."""
    rows = [row for row in history if len(row.losses) == len(prompts)]
    for number, prompt in enumerate(prompts):
        if prompt.period:
            losses = [loss_of_copy(row.losses[number], prompt.period) for row in rows]
            first = copying_begins(losses, prompt.num_symbols)
            return None if first is None else rows[first].step
    return None


def loss_of_copy(losses: np.ndarray, period: int) -> np.ndarray:
    """Returns the mean loss on the second copy of a repeated sequence. losses: (..., T - 1).

    The first token of the second copy is not counted, because it is not predictable.
    """
    return losses[..., period + 1 : 2 * period].mean(-1)
