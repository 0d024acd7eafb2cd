"""Other names of settings: names in other projects, misspelled names."""

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

import yaml

from clearhead.errors import Problem


@functools.cache
def other_names() -> list[tuple[str, str, str]]:
    """Rows of other_names.yaml: (setting, its names in other projects, remark about its value)."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return [tuple(row) for row in yaml.safe_load(text)]


def nearest(key: str, known: Sequence[str]) -> str | None:
    """Returns the setting with the most similar name, preferably in the same group."""
    group, _, last = key.rpartition(".")
    own = [name for name in known if name.rpartition(".")[0] == group]
    for names in (own, known):
        # Compares names without groups: a common group would make any two names similar.
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        if hits := difflib.get_close_matches(last, by_last, n=1, cutoff=0.75):
            return by_last[hits[0]]
    return None


def unknown_key(key: str, value: object, known: Sequence[str]) -> Problem:
    """Returns the problem of an unknown key. The hint is the setting that was probably meant."""
    group, _, last = key.lower().rpartition(".")
    if key in known:  # in a YAML file
        hint = f"indent {last}: in a new line below {group}:"
        return Problem(key, value, "a name with a dot is not a setting", hint)
    for setting, names, remark in other_names():
        if last in names.split() and setting in known:
            hint = f"use {setting}{remark and f' ({remark})'}"
            break
    else:
        same = [name for name in known if not group and name.rpartition(".")[2] == last]
        near = " or ".join(same) or nearest(key, known)
        hint = f"did you mean {near}?" if near else "--help lists all settings"
    return Problem(key, value, "no such setting", hint)
