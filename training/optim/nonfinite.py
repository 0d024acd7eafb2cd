"""Steps with a non-finite gradient are skipped; losses far above the others are counted as spikes.

NaN or inf must never reach the parameters, where it would spread to all of them within a step. The
check runs on the device and the host does not wait for it: the optimizer's kernel skips the update.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class NonFiniteCheck:
    """Checks the gradient of every step before the optimizer uses it.

    A step with a non-finite gradient is skipped. After `limit` of them in a row every later step is
    skipped too: the parameters stay as they are until the host reads the counts and ends the run.
    """

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self.in_a_row, self.skipped, self.halted_for = torch.zeros(3, device=device).unbind()

    def found_inf(self, grad_norm: Tensor, loss_scale: Tensor) -> Tensor:
        """1. when the step is to be skipped, else 0., on the device.

        grad_norm: of all ranks' gradients together, (). loss_scale: fp16's, which an overflow
        lowers; while it is above 1 the overflow is not counted towards the limit.
        """
        bad = (~torch.isfinite(grad_norm)).float()
        self.in_a_row = (self.in_a_row + bad * (loss_scale <= 1)) * bad
        halted = (self.in_a_row >= self.limit) | (self.halted_for > 0)
        self.halted_for = self.halted_for + halted.float()
        skip = torch.maximum(bad, halted.float())
        self.skipped = self.skipped + skip
        return skip

    def read(self) -> tuple[int, int, int]:
        """(steps skipped so far, non-finite ones in a row up to now, steps since the limit was
        reached); waits for the device."""
        numbers = torch.stack([self.skipped, self.in_a_row, self.halted_for]).tolist()
        return tuple(round(number) for number in numbers)

    def restore(self, skipped: int, in_a_row: int) -> None:
        """Continues counting from a checkpoint."""
        self.skipped = torch.full_like(self.skipped, skipped)
        self.in_a_row = torch.full_like(self.in_a_row, in_a_row)


@dataclass
class LossSpikes:
    """Counts steps whose loss is far above the losses before it.

    From loss number WARM_UP on, a spike is a loss more than THRESHOLD standard deviations above the
    mean; mean and variance are exponential averages over about 1 / (1 - DECAY) steps, and a loss
    enters them clipped at the threshold, so that one spike does not hide the next. Before that,
    while the loss still falls by nats, a spike is a loss more than EARLY_RISE nats above an
    exponential average over about RECENT steps.
    """

    seen: int = 0  # losses so far
    mean: float = 0.0
    variance: float = 0.0
    count: int = 0  # spikes so far
    recent: float = 0.0  # the short average

    DECAY = 0.98
    THRESHOLD = 6.0  # standard deviations
    WARM_UP = 50  # losses before the first z-score
    EARLY_RISE = 1.0  # nats
    RECENT = 3  # steps

    def __post_init__(self):
        self.recent = self.recent or self.mean  # a checkpoint of version 1 may lack it

    def add(self, loss: float) -> float | None:
        """The z-score of a loss, (loss - mean) / standard deviation; None before there is one."""
        if not math.isfinite(loss):  # a skipped step, counted by NonFiniteCheck
            return None
        z = None
        deviation = math.sqrt(self.variance)
        if self.seen >= self.WARM_UP and deviation > 0:
            z = (loss - self.mean) / deviation
            self.count += z > self.THRESHOLD
            loss = min(loss, self.mean + self.THRESHOLD * deviation)
        elif self.RECENT <= self.seen < self.WARM_UP:
            self.count += loss > self.recent + self.EARLY_RISE
        self.seen += 1
        self.recent += (loss - self.recent) / min(self.seen, self.RECENT)
        # At first the plain mean of all losses so far.
        weight = max(1 - self.DECAY, 1 / self.seen)
        away = loss - self.mean
        self.mean += weight * away
        self.variance = (1 - weight) * (self.variance + weight * away**2)
        return z
