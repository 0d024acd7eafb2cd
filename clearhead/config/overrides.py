"""The text of overrides: KEY=VALUE in Hydra's grammar, where a text may look like a number.

Hydra reads name=1_1_1 as the number 111. A setting that takes text keeps what was typed.
"""

import re
import typing
from collections.abc import Collection, Sequence
from types import NoneType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from clearhead.config.schema import Config
from clearhead.config.validation import flat_fields, members
from clearhead.errors import Problem, refuse

# In a value: a quoted text, or text without quotes, brackets and commas, except in ${...}.
WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\$\{[^}]*\}|\\.?|[^\\"'(){}\[\],])+""")
PARSER, FIELDS = OverridesParser.create(), flat_fields(Config)


def with_typed_text(values: dict, overrides: Sequence[str]) -> dict:
    """Returns the composed values, with text settings as they were typed on the command line.
    Raises ConfigError for None in place of null."""
    problems = []
    given = dict(text.lstrip("+").split("=", 1) for text in overrides if "=" in text)
    for key, value in given.items():
        group, _, name = key.rpartition(".")
        holder = values.get(group) if group else values
        if key in FIELDS and isinstance(holder, dict) and "$" not in value:
            holder[name] = typed_value(key, value)
            if holder[name] in ("None", "none") and None in members(FIELDS[key].annotation):
                problems.append(Problem(key, value, "is a text, not null", f"write {key}=null"))
    refuse(problems)
    return values


def typed_value(key: str, value: str) -> object:
    """Returns the value of the override KEY=VALUE; of a text setting, what was typed."""
    kinds = members(FIELDS[key].annotation)
    plain = PARSER.parse_override(f"{key}={value}").value()
    is_tree = isinstance(plain, list | dict)
    if not takes_text(key) or type(plain) in map(type, kinds):  # for example null or false
        return plain
    if is_tree and list not in map(typing.get_origin, kinds):
        return value
    if not is_tree and str not in kinds:
        return plain
    quoted = in_quotes(value, (int, float, bool, NoneType))
    return PARSER.parse_override(f"{key}={quoted}").value()


def takes_text(key: str) -> bool:
    """Returns whether this setting takes a text or a list of texts."""
    kinds = members(FIELDS[key].annotation) if key in FIELDS else []
    lists = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is list]
    return any(str in members(kind) for kind in (*kinds, *lists))


def with_quoted_numbers(override: str) -> str:
    """Returns an override with quotes around the numbers of a text setting."""
    key, equals, value = override.partition("=")
    is_call = re.match(r"\w+\(", value)  # range(1,3)
    if is_call or not takes_text(key.lstrip("+")):
        return override
    return f"{key}{equals}{in_quotes(value, (int, float))}"


def in_quotes(value: str, kinds: Collection[type]) -> str:
    """Returns the value of an override with quotes around words that Hydra reads as these types."""

    def quote(found: re.Match) -> str:
        word = found[0].strip()
        is_kind = word[:1] not in "'\"" and type(PARSER.parse_rule(word, "primitive")) in kinds
        return f'"{word}"' if is_kind else found[0]

    return WORD.sub(quote, value)


def override(key: str, text: object) -> str:
    """Returns KEY=TEXT for Hydra, with quotes if the text is not a plain word or path."""
    if re.fullmatch(r"[\w./+ -]*", str(text), re.ASCII):
        return f"{key}={text}"
    return f"{key}={QuotedString(str(text), Quote.double).with_quotes()}"
