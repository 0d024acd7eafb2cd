"""Losses and speed between two lines of the log."""

import contextlib
import time
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from training.distributed.strategy import Strategy


class Meter:
    """Losses and time since the last line of the log. Keeps device tensors and waits for none."""

    def __init__(self):
        self.start()

    def start(self, losses: list[float] = ()) -> None:
        """Begins anew; losses: of steps that a run that goes on has done since its last line."""
        self._losses, self._unread = list(losses), []
        self.grad_norm, self.steps, self.since = None, 0, time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        self._unread.append(loss)
        self.grad_norm = grad_norm
        self.steps += 1

    @contextlib.contextmanager
    def paused(self):
        """What happens inside is not training time."""
        before = time.perf_counter()
        yield
        self.since += time.perf_counter() - before

    def losses(self, parallel: "Strategy") -> list[float]:
        """The loss of each step, its mean over all ranks; waits for the device."""
        unread, self._unread = self._unread, []
        self._losses += parallel.all_reduce_mean(unread)
        return self._losses

    def steps_per_second(self) -> float:
        return self.steps / (time.perf_counter() - self.since)
