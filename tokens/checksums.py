"""Whether tokens are those that a checkpoint was trained on, and those that other ranks have."""

import itertools

from errors import DataError
from tokens.stream import BLOCK_BYTES, Checksums


def check_unchanged(before: Checksums | None, now: Checksums, path: object) -> None:
    """Raises DataError when the tokens differ from those that a checkpoint was trained on."""
    if before is None:
        cause = "the checkpoint is of an earlier version, which made other tokens"
        fix = "start a new run; trainer.init_from= starts it from these weights"
        raise DataError("data.path", path, cause, fix)
    fix = (
        "restore the data, or give another name= for a new run; trainer.resume_override=true "
        "resumes anyway"
    )
    for (old_file, old), (file, new) in itertools.zip_longest(before, now, fillvalue=("none", [])):
        if old_file != file:
            cause = f"the checkpoint was trained on {old_file} where there is {file} now"
            raise DataError("data.path", path, cause, fix)
        if (byte := _first_difference(old, new)) is not None:
            cause = f"{file} differs from byte {byte} on from the one that"
            raise DataError("data.path", path, f"{cause} the checkpoint was trained on", fix)


def check_same(of_rank_0: Checksums, here: Checksums, path: object) -> None:
    """Raises DataError when this rank's tokens differ from those of rank 0."""
    fix = "give every machine the same data"
    for (_, theirs), (file, ours) in itertools.zip_longest(of_rank_0, here, fillvalue=("none", [])):
        if (byte := _first_difference(theirs, ours)) is not None:
            cause = f"{file} differs from byte {byte} on from that of rank 0"
            raise DataError("data.path", path, cause, fix)


def _first_difference(before: list[str], now: list[str]) -> int | None:
    """Where the first block begins whose checksums differ; an empty one is not known."""
    for block, (one, other) in enumerate(itertools.zip_longest(before, now, fillvalue=None)):
        if one != other and "" not in (one, other):
            return block * BLOCK_BYTES
    return None
