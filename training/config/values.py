"""Types of setting values, and validation that returns every problem as a line for the user."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from errors import NO_VALUE, Problem, show
from training.config.other_names import unknown_key
from training.config.yaml_files import defaults_and_meanings

MUST_BE = "must be "


def rejected(reason: str, hint: str, key: str = "") -> PydanticCustomError:
    """The error of a validator. key: the setting, where it is not the one being validated."""
    return PydanticCustomError("rejected", "{reason}", {"reason": reason, "hint": hint, "key": key})


def _whole(value: object) -> object:
    """1e5 steps are 100000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_text(value: object) -> object:
    """A name may be a number: name=2026."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return show(value) if is_number else value


def _encodable(value: str) -> str:
    """A shell passes bytes that are not UTF-8 as lone surrogates."""
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise rejected("must be text in UTF-8", "check the characters")
    return value


def _usable_name(value: str) -> str:
    if not value or "\0" in value:
        raise rejected("is empty or has a zero character", "give another, or null for none")
    return value


def _filled(value: str) -> str:
    if not value.strip():
        raise rejected("is empty", "give some text")
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=10**15)]
Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**15)]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]
NonNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
Fractional = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Text = Annotated[str, BeforeValidator(_as_text), AfterValidator(_encodable)]
Name = Annotated[Text, AfterValidator(_usable_name)]
Sentence = Annotated[Text, AfterValidator(_filled)]
Paths = Name | Annotated[list[Name], Field(min_length=1)]
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
AutoOrBool = StrictBool | Literal["auto"]


class Settings(BaseModel):
    """Settings of a training run. Unknown ones are refused; values keep their type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Rejected(Problem):
    """A problem that a validator found; it may depend on other settings."""


Schema = TypeVar("Schema", bound=BaseModel)


def validate(schema: type[Schema], values: Mapping) -> tuple[Schema | None, list[Problem]]:
    """An instance of the schema, or None, and every problem: one for each key."""
    try:
        return schema.model_validate(values), []
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for details in error.errors(include_url=False):
            problem = _problem(schema, values, details)
            before = found.setdefault(problem.key, problem)
            if before is not problem and problem.reason.startswith(MUST_BE):  # of a union
                reason = f"{before.reason} or {problem.reason.removeprefix(MUST_BE)}"
                found[problem.key] = before._replace(reason=reason)
        return None, list(found.values())


def _problem(schema: type[BaseModel], values: Mapping, details: ErrorDetails) -> Problem:
    """pydantic's error as a line for the user."""
    path, context, fields = details["loc"], details.get("ctx", {}), flat_fields(schema)
    # The rest of the path is an element of a list or of a union.
    length = 2 if path[0] in groups_of(schema) else 1
    key = context.get("key") or ".".join(map(str, path[:length]))
    if details["type"] == "extra_forbidden":
        return unknown_key(key, details["input"], [*fields, *groups_of(schema)])
    if details["type"] == "missing":
        return Problem(key, NO_VALUE, "missing", f"give it as {key}=VALUE")
    reason = details["msg"].replace("Input should be ", MUST_BE)
    default = None
    if issubclass(schema, Settings):
        default = defaults_and_meanings().get(key, (None,))[0]
    elif key in fields:
        default = fields[key].default
    has_one = isinstance(default, int | float | str) and default != ""
    hint = context.get("hint") or (f"the default is {show(default)}" if has_one else "see --help")
    value = flat(values).get(key, NO_VALUE)
    kind = Rejected if details["type"] == "rejected" else Problem
    return kind(key, value, reason, hint)


def groups_of(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a schema that are groups of settings themselves."""
    annotations = {name: info.annotation for name, info in schema.model_fields.items()}
    return {
        name: annotation
        for name, annotation in annotations.items()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel)
    }


def flat_fields(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a schema by dotted key, those of its groups too."""
    found, groups = {}, groups_of(schema)
    for name, field in schema.model_fields.items():
        inner = flat_fields(groups[name]) if name in groups else {}
        found |= {f"{name}.{key}": f for key, f in inner.items()} or {name: field}
    return found


def flat(tree: Mapping, prefix: str = "") -> dict[str, object]:
    """Settings by dotted name, as on the command line; lists as they are."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves
