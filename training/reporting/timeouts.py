"""Calls of W&B that may never return."""

import shlex
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

WORKSPACE_SECONDS = 10  # to create the view of the project


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


def create_workspace(run, keys: Iterable[str]) -> str | None:
    """Creates the saved view of the project of an online run, unless it has one.

    run: the W&B run. keys: what it has logged. Returns a line for the user, also after an error.
    """
    entity, project = run.entity, run.project

    def create() -> str | None:
        from training.reporting.workspace import save_view  # imports an optional package

        return save_view(entity, project, keys, replace=False)

    try:
        url = None if run.offline else call_with_timeout(WORKSPACE_SECONDS, create)
        return url and f"created the workspace {url}"
    except Exception as error:
        command = f"python -m scripts.wandb_workspace project={shlex.quote(project)}"
        command += f" entity={entity}"
        return f"no workspace was created ({cause(error)}); create it with: {command}"
