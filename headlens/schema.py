"""Types, lengths and ranges of JSON values in files that may be damaged or of another program.

    check([[[0.5, None]]], items(OPTIONAL, 1, 2), "entropy")  # raises ValueError for other values

The kind of a value is

    Value, Items        a value without parts; a list of values of one kind
    [kind, ...]         a list with these items
    {key: kind, ...}    an object with at least these keys; a "key?" may be missing or null
    a function          of the value, which returns its kind
"""

import functools
import sys
from typing import Any, NamedTuple

from .prompts import visible

MOST = 3.4e38  # the largest fp32 number


class Value(NamedTuple):
    """A value of one of these types; a number from `least` to below `below`."""

    types: tuple[type, ...]
    least: float = -MOST
    below: float = MOST


class Items(NamedTuple):
    """A list. length: None: any."""

    kind: Any
    length: int | None


TEXT, FLAG, COUNT = Value((str,)), Value((bool,)), Value((int,), 0, 2**53)
NUMBER, OPTIONAL = Value((int, float)), Value((int, float, type(None)))  # None: undefined


def index(below: int) -> Value:
    return Value((int,), 0, below)


def items(kind: Any, *lengths: int | None) -> Any:
    """Returns the kind of nested lists. lengths: the outer list first."""
    return Items(items(kind, *lengths[1:]), lengths[0]) if lengths else kind


def check(values: list, kind: Any, name: str) -> None:
    """Raises an exception of any class if one of the values has another kind. name: of the values,
    for the message."""
    if callable(kind):
        for value in values:
            check([value], kind(value), name)
        return
    types = kind.types if isinstance(kind, Value) else (dict if isinstance(kind, dict) else list,)
    if not {*map(type, values)} <= {*types}:
        raise ValueError(f"{name} has another type")
    if isinstance(kind, Value):
        if types == (str,):
            "".join(values).encode()  # raises ValueError for lone surrogates
        elif not all(kind.least <= v < kind.below for v in values if v is not None):  # also NaN
            raise ValueError(f"{name} is out of range")
    elif isinstance(kind, dict):
        for key, of_key in kind.items():
            short = key.removesuffix("?")
            found = [v[short] for v in values if short == key or v.get(short) is not None]
            check(found, of_key, f"{name}.{short}")
    else:
        length = kind.length if isinstance(kind, Items) else len(kind)
        if not all(length in (None, len(value)) for value in values):
            raise ValueError(f"{name} has another length")
        if isinstance(kind, Items):
            check([item for value in values for item in value], kind.kind, name)
        else:
            for number, of_item in enumerate(kind):
                check([value[number] for value in values], of_item, name)


@functools.lru_cache(1000)
def note(text: str) -> None:
    """Prints a line on stderr, once."""
    print(visible(" ".join(text.split()))[:400], file=sys.stderr)
