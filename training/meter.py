"""Losses and speed between two lines of the log."""

import contextlib
import time


class Meter:
    """Losses and time since the last line of the log. Keeps device tensors and waits for none."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        self.losses, self.grad_norm, self.since = [], None, time.perf_counter()

    def add(self, loss, grad_norm) -> None:
        self.losses.append(loss)
        self.grad_norm = grad_norm

    @contextlib.contextmanager
    def paused(self):
        """What happens inside is not training time."""
        before = time.perf_counter()
        yield
        self.since += time.perf_counter() - before

    def mean_loss(self):
        return sum(self.losses) / len(self.losses)

    def steps_per_second(self) -> float:
        return len(self.losses) / (time.perf_counter() - self.since)
