"""Checks of JSON values in files that may be damaged, hostile or of another program.

check(OPTIONAL, [[0.5, None]], 1, 2)  # raises ValueError for other values
"""

import functools
import sys
from typing import Any, NamedTuple

from .prompts import visible

MOST = 3.4e38  # the largest fp32 number


class Kind(NamedTuple):
    """Values of one of these types; numbers from `least` to below `below`."""

    types: tuple[type, ...]
    least: float = -MOST
    below: float = MOST


TEXT, FLAG, COUNT = Kind((str,)), Kind((bool,)), Kind((int,), 0, 2**53)
NUMBER, OPTIONAL = Kind((int, float)), Kind((int, float, type(None)))  # None: undefined


def index(below: int) -> Kind:
    return Kind((int,), 0, below)


def check(kind: Kind, values: Any, *shape: int) -> None:
    """Raises ValueError unless `values` are nested lists of this shape, without a shape one value,
    and all values are of this kind."""
    types, least, below = kind
    flat = [values]
    for length in shape:
        if {*map(type, flat)} - {list} or {*map(len, flat)} - {length}:
            raise ValueError("a list has another type or length")
        flat = [value for of in flat for value in of]
    if {*map(type, flat)} - {*types}:
        raise ValueError("a value has another type")
    if kind == TEXT:
        "".join(flat).encode()  # raises ValueError for lone surrogates
    elif not all(least <= value < below for value in flat if value is not None):  # or NaN
        raise ValueError("a value is out of range")


@functools.lru_cache(1000)
def note(text: str) -> None:
    """Prints a line on stderr, once."""
    print(visible(" ".join(text.split()))[:400], file=sys.stderr)
