"""Loss spikes: the metrics `train/loss_spikes` and `train/loss_z_score`."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

# Types of values in a checkpoint. The square of a Number is finite.
StoredCount = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Number = Annotated[float, Field(strict=True, ge=-1e100, le=1e100)]


@dataclass
class LossSpikes:
    """Counts steps whose loss is much larger than the losses before it.

    After WARM_UP losses, a spike is a loss more than THRESHOLD standard deviations above the mean.
    Mean and variance are exponential averages over about 1 / (1 - DECAY) steps. Losses are clipped
    at the threshold before they are averaged, so that one spike does not hide the next. During the
    first WARM_UP losses, which fall fast, a spike is a loss more than EARLY_RISE nats above an
    exponential average over about RECENT steps.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    seen: StoredCount = 0  # losses so far
    mean: Number = 0.0
    variance: Annotated[Number, Field(ge=0)] = 0.0
    count: StoredCount = 0  # spikes so far
    recent: Number = 0.0  # average over about RECENT steps

    DECAY = 0.98
    THRESHOLD = 6.0  # standard deviations
    WARM_UP = 50  # losses before the first z-score
    EARLY_RISE = 1.0  # nats
    RECENT = 3  # steps

    def add(self, loss: float) -> float | None:
        """Adds a loss. Returns its z-score, (loss - mean) / standard deviation; None at first."""
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
        # For the first losses, this is the plain mean.
        weight = max(1 - self.DECAY, 1 / self.seen)
        away = loss - self.mean
        self.mean += weight * away
        self.variance = (1 - weight) * (self.variance + weight * away**2)
        return z
