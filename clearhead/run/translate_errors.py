"""Replaces errors of torch during training by errors with a message for users."""

import contextlib
import re
from collections.abc import Iterator

from clearhead.checkpoint.saving import Checkpointer
from clearhead.config.schema import Config
from clearhead.errors import DivergedError, NotSavedError, RankLostError
from clearhead.parallel.memory import is_out_of_memory, out_of_memory_error
from clearhead.parallel.strategy import Strategy


@contextlib.contextmanager
def translate_errors(
    config: Config,
    strategy: Strategy,
    checkpointer: Checkpointer | None = None,
    micro_batch_size: int | None = None,
) -> Iterator[None]:
    """Raises OutOfMemoryError if a step does not fit into memory, RankLostError if another rank
    died or timed out, and other errors unchanged. Hints name the newest intact checkpoint.

    micro_batch_size: of the steps inside; None if there are no steps.
    """
    try:
        yield
    except DivergedError as error:
        if checkpointer:
            error.hint += f"; {checkpointer.describe()}"
        raise
    except NotSavedError as error:
        if checkpointer:
            error.hint += f"; {checkpointer.how_to_resume()}"
        raise
    except Exception as error:
        if micro_batch_size and is_out_of_memory(error):
            intact = checkpointer.describe() if checkpointer else "no checkpoint was saved yet"
            raise out_of_memory_error(config, strategy, micro_batch_size, intact) from error
        if not strategy.is_lost_rank(error):
            raise
        # The first sentence of the library's message, without its file names and addresses.
        text = re.sub(r"\[[^\]]*\](:\d+)?:?\s*", "", " ".join(str(error).split()))
        reason = f"another rank died or timed out ({text.partition('. ')[0].strip()})"
        hint = checkpointer.how_to_resume() if checkpointer else "rerun the same command"
        raise RankLostError("parallel.timeout", config.parallel.timeout, reason, hint) from error
