"""Calls of W&B that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def call_with_timeout(seconds: float, function: Callable):
    """Returns function(). Raises TimeoutError if it takes longer than `seconds`, and RuntimeError
    for its errors.

    Calls it in a daemon thread: if it never returns, the process can end nevertheless.
    """
    future = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # also SystemExit: wandb.teardown() calls sys.exit
            future.set_exception(RuntimeError(cause(error)))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


def cause(error: BaseException) -> str:
    """Returns the first line of a message; further lines are advice about W&B's settings."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
