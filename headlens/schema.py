"""Types, lengths and ranges of the JSON values in the files of a run, which may be damaged or of
another program.

    check([[0.5, None]], numbers(1, 2), "entropy")  # raises ValueError for any other value
"""

import functools
import sys
from typing import Any, NamedTuple

from .prompts import visible

MOST = 3.4e38  # the largest fp32 number


class Kind(NamedTuple):
    """A value, or values in nested lists."""

    types: tuple[type, ...]
    lengths: tuple[int | None, ...] = ()  # of the lists, the outer one first; None: any
    least: float = -MOST
    below: float = MOST


def numbers(*lengths: int | None) -> Kind:
    """None: undefined."""
    return Kind((int, float, type(None)), lengths)


def indices(below: int, *lengths: int | None) -> Kind:
    return Kind((int,), lengths, 0, below)


def texts(*lengths: int | None) -> Kind:
    return Kind((str,), lengths)


COUNT, NUMBER = indices(2**53), Kind((int, float))


def check(value: Any, kind: Any, name: str) -> None:
    """Raises ValueError for a value of another kind.

    kind: a Kind; {key: kind} for an object with at least these keys; [kind, ...] for a list with
    these items. name: of the value, for the message.
    """
    if isinstance(kind, Kind):
        level = [value]
        for length in kind.lengths:
            if not all(type(part) is list and length in (None, len(part)) for part in level):
                raise ValueError(f"{name} has another length")
            level = [item for part in level for item in part]
        found = [item for item in level if type(item) in (int, float)]
        if not {*map(type, level)} <= {*kind.types}:
            raise ValueError(f"{name} has another type")
        if not all(kind.least <= number < kind.below for number in found):  # also NaN
            raise ValueError(f"{name} is out of range")
    elif type(value) is not type(kind):
        raise ValueError(f"{name} has another type")
    elif isinstance(kind, dict):
        for key in kind:
            if key not in value:
                raise ValueError(f"{name} has no {key}")
            check(value[key], kind[key], f"{name}.{key}")
    else:
        for item, of_item in zip(value, kind, strict=True):
            check(item, of_item, name)


@functools.lru_cache(1000)
def note(text: str) -> None:
    """Prints a line on stderr, once."""
    print(visible(" ".join(text.split()))[:400], file=sys.stderr)
