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


def same_purpose(name: str, known: Sequence[str]) -> tuple[str, str] | None:
    """(one of the settings `known`, what to know about its value) for a name of another project.

    name: without its group. None when the name is in no row whose setting is known.
    """
    for setting, names, remark in other_names():
        if name.lower() in names.split() and setting in known:
            return setting, remark
    return None


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The setting that a misspelt key probably means: one of the same name in another group, else
    the nearest name, its own group first."""
    group, _, last = key.rpartition(".")
    there = [name for name in known if name.rpartition(".")[0] == group]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += [name for name in there if last and name.rpartition(".")[2].startswith(last)]
    for names in (there, known):
        # Without their groups: a group that two names share makes any two of them look alike.
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        hits = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
        near += [by_last[hit] for hit in hits]
    return near[0] if near else None


def unknown_key(key: str, value: object, known: Sequence[str]) -> UnknownSetting:
    """The problem of a key that does not exist, with the setting that was probably meant."""
    group, _, last = key.rpartition(".")
    if found := same_purpose(last, known):
        setting, remark = found
        hint = f"use {setting}{remark and f' ({remark})'}"
    elif near := nearest(key, known):
        hint = f"did you mean {near}?"
    else:
        there = [name for name in known if group and name.startswith(f"{group}.")]
        names = ", ".join(name.rpartition(".")[2] for name in there)
        hint = f"{group} has {names}" if there else "--help lists all settings"
    return UnknownSetting(key, value, "no such setting", hint)
