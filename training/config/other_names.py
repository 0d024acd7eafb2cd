"""The setting that was probably meant by an unknown key."""

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

import yaml

from errors import UnknownSetting


@functools.cache
def other_names() -> list[tuple[str, str, str]]:
    """(setting, its names in other projects, what to know about its value) of other_names.yaml."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return [tuple(row) for row in yaml.safe_load(text)]


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The setting that a misspelt key probably means, in its own group first."""
    group, _, last = key.rpartition(".")
    own = [name for name in known if name.rpartition(".")[0] == group]
    for names in (own, known):
        # Without their groups: a group that two names share makes any two of them look alike.
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        if hits := difflib.get_close_matches(last, by_last, n=1, cutoff=0.75):
            return by_last[hits[0]]
    return None


def unknown_key(key: str, value: object, known: Sequence[str]) -> UnknownSetting:
    """The problem of a key that does not exist, with the setting that was probably meant."""
    last = key.rpartition(".")[2].lower()
    for setting, names, remark in other_names():
        if last in names.split() and setting in known:
            hint = f"use {setting}{remark and f' ({remark})'}"
            break
    else:
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else "--help lists all settings"
    return UnknownSetting(key, value, "no such setting", hint)
