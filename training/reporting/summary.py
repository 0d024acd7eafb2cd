"""What a run prints on the console at its start and at its end."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from training.checkpoint.format import State

if TYPE_CHECKING:
    from training.config.schema import Config


def windows(config: "Config", train: int, val: int, evaluated: int) -> str:
    """How many windows there are to train on, to validate on, and how many of those are used."""
    used = f" ({evaluated:,} of them each time)" if evaluated < val else ""
    length = config.data.max_length
    return f"{train:,} windows of {length} tokens to train on, {val:,} to validate{used}"


def division(batch_size: int, ranks: int, micro_batch_size: int) -> str:
    """How the windows of a step are divided, such as ", 8 on each of 2 ranks, 4 at a time".

    batch_size: over all ranks. micro_batch_size: windows at a time on a rank.
    """
    share = batch_size // ranks
    text = f", {share} on each of {ranks} ranks" if ranks > 1 else ""
    return f"{text}, {micro_batch_size} at a time" if micro_batch_size < share else text


def results(state: State, train_loss: float | None, sample: str) -> Iterable[str]:
    """Losses in nats per token, and the last sample of text."""
    if train_loss is not None:
        yield f"training loss    {train_loss:.4f}  (step {state.step})"
    if state.val_loss is not None:
        best = ""
        if state.best_loss is not None:
            best = f"; best {state.best_loss:.4f} at step {state.best_step}"
        yield f"validation loss  {state.val_loss:.4f}{best}"
    if sample:
        yield f"\n{sample}\n"


def files(directory: Path, prompt: str, lens_seconds: float, seconds: float) -> Iterable[str]:
    """What to open after a run, and how to get more text. seconds: of training."""
    if (timelapse := directory / "attention" / "timelapse.html").is_file():
        share = f"  (attention logging took {lens_seconds:.1f} s of {seconds:.0f} s)"
        yield f"watch the heads  {timelapse}{share if lens_seconds else ''}"
    yield f"report           {directory / 'report.html'}"
    command = shlex.join(["python", "generate.py", f"checkpoint={directory}", f"prompt={prompt}"])
    yield f"more text        {command}"
