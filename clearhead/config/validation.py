"""Checks values with a pydantic model and turns its errors into problems, one line each."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from clearhead.config.yaml_files import flat
from clearhead.errors import NO_VALUE, Problem

MUST_BE = "must be "
FOLDER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.=,+-]{0,127}$"  # of runs/<name>
NO_SEPARATORS = r"^[^/\\#?%:]+$"  # as W&B requires
PATTERNS = {
    FOLDER_NAME: "must have 1 to 128 characters: A-Z, a-z, 0-9 and _ ; after the first character "
    "also . = , + -",
    NO_SEPARATORS: r"must not be empty and must not contain / \ # ? % :",
    r"\S": "must not be empty or blank",
}

Schema = TypeVar("Schema", bound=BaseModel)


def validate(
    schema: type[Schema], values: Mapping, *, rules: bool = True
) -> tuple[Schema | None, list[Problem]]:
    """Returns (an instance of the schema or None, all problems, at most one per key).

    rules: whether to check rules between settings (`rule`); types and ranges are always checked.
    """
    try:
        return schema.model_validate(values, context=None if rules else "without rules"), []
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for details in error.errors(include_url=False):
            problem = _problem(schema, values, details)
            before = found.setdefault(problem.key, problem)
            if before is not problem and before.reason.startswith(MUST_BE):  # other type of a union
                reason = problem.reason.replace(MUST_BE, f"{before.reason} or ", 1)
                found[problem.key] = before._replace(reason=reason)
        return None, list(found.values())


def _problem(schema: type[BaseModel], values: Mapping, details: ErrorDetails) -> Problem:
    """Turns an error of pydantic into a problem."""
    # A key that is no valid text has no path.
    path, context, fields = details["loc"] or ("",), details.get("ctx", {}), flat_fields(schema)
    # Omits the rest of the path: the index in a list or the type in a union.
    length = 2 if path[0] in groups_of(schema) else 1
    key = context.get("key") or ".".join(map(str, path[:length]))
    if details["type"] == "extra_forbidden":
        return unknown_key(key, details["input"], [*fields, *groups_of(schema)])
    if details["type"] == "missing":
        return Problem(key, NO_VALUE, "is missing", f"set {key}")
    if details["type"] == "model_type":
        return Problem(key, details["input"], "is a group of settings", "see --help")
    reason = PATTERNS.get(context.get("pattern"), details["msg"])
    reason = re.sub("^(Input|List|String) should", "must", reason).replace("False", "false")
    value, hint = flat(values).get(key, NO_VALUE), context.get("hint", "see --help")
    if details["type"] == "string_type" and isinstance(value, int | float):
        hint = f"as a text: '{key}=\"TEXT\"'"
    return Problem(key, value, reason, hint)


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
    """Returns the problem of an unknown key. The hint is the setting with the nearest name."""
    near = nearest(key, known)
    hint = f"did you mean {near}?" if near else "--help lists all settings"
    return Problem(key, value, "no such setting", hint)


def groups_of(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Returns the groups of settings of a schema, by name."""
    return {
        name: info.annotation
        for name, info in schema.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def flat_fields(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of a schema and its groups, by dotted key."""
    return flat(schema.model_fields | {n: g.model_fields for n, g in groups_of(schema).items()})
