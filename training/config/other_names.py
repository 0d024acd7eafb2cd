"""Other names of settings: old names, names in other projects, misspelled names."""

import difflib
import functools
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from errors import UnknownSetting

# Name in version 1: current name. The old names still work on the command line, with a warning, and
# in the stored settings of a run. Remove these aliases in version 3.
RENAMED = {
    "lens.repeated": "lens.repeat_length",
    "repeated": "repeat_length",  # scripts.inspect_attention
    "num_tokens": "max_new_tokens",  # generate.py, benchmarks.generate
}


def current_names(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Replaces old names in KEY=VALUE arguments; prints a warning for each."""
    found = []
    for text in arguments:
        prefix, key, rest = re.fullmatch(r"([+~]*)([\w.]*)(.*)", text, re.DOTALL).groups()
        if key not in known and (new := RENAMED.get(key)) in known:
            if os.environ.get("RANK", "0") == "0":
                print(f"{key}: renamed to {new}; use the new name", file=sys.stderr)
            text = f"{prefix}{new}{rest}"
        found.append(text)
    return found


def rename_stored(settings: dict) -> dict:
    """Replaces old names in the stored settings of a run, in place. Returns `settings`."""
    for old, new in RENAMED.items():
        group, _, key = old.rpartition(".")
        if isinstance(values := settings.get(group), dict) and key in values:
            values.setdefault(new.rpartition(".")[2], values.pop(key))
    return settings


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


def unknown_key(key: str, value: object, known: Sequence[str]) -> UnknownSetting:
    """Returns the problem of an unknown key. The hint is the setting that was probably meant."""
    group, _, last = key.lower().rpartition(".")
    if key in known:  # in a YAML file
        hint = f"indent {last}: in a new line below {group}:"
        return UnknownSetting(key, value, "a name with a dot is not a setting", hint)
    for setting, names, remark in other_names():
        if last in names.split() and setting in known:
            hint = f"use {setting}{remark and f' ({remark})'}"
            break
    else:
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else "--help lists all settings"
    return UnknownSetting(key, value, "no such setting", hint)
