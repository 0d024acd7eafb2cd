"""Calls that may never return: call_with_timeout(5, lambda: server.answer())."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def call_with_timeout(seconds: float, function: Callable):
    """What function() returns or raises. Raises TimeoutError when it takes longer than `seconds`.

    It runs in a daemon thread. A call that never returns keeps that thread and nothing else: it
    does not delay the end of the process.
    """
    future = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # wandb.teardown() calls sys.exit
            future.set_exception(RuntimeError(repr(error)))

    threading.Thread(target=call, daemon=True).start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if future.done():  # function() itself raised it
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None
