"""Calls that may never come back, and how long they are waited for.

within(5, lambda: server.answer())    # what it returns or raises; NoAnswer after 5 seconds
"""

import queue
import threading
from collections.abc import Callable


class NoAnswer(Exception):
    """A call has not come back in time."""


class _Worker:
    """A thread that makes calls for others, who need not wait for them to the end."""

    def __init__(self):
        self.calls = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            action, outcome = self.calls.get()
            try:
                outcome.put((action(), None))
            except BaseException as error:  # wandb.teardown() leaves through sys.exit
                outcome.put((None, error))


_worker: list[_Worker] = []  # the one that is free; a new one takes the place of one that is stuck


def within(seconds: float, action: Callable):
    """What action() returns or raises; NoAnswer when that takes longer. It then goes on unheard."""
    worker, outcome = _worker.pop() if _worker else _Worker(), queue.SimpleQueue()
    worker.calls.put((action, outcome))
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer within {seconds:g} s") from None
    _worker.append(worker)
    if error is not None:
        ours = isinstance(error, Exception)  # what would end Python ends the other part alone
        raise error if ours else RuntimeError(f"{type(error).__name__} {error}")
    return result
