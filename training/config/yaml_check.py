"""What a settings file of the user's own may hold, checked before Hydra reads it.

YAML can do more than hold settings: a tag makes objects, `_target_` has Hydra call what it names,
`${oc.env:...}` fetches a secret that the run would then write down, and a few lines of aliases
stand for gigabytes. The check reads the events of PyYAML's safe parser and builds nothing.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from errors import Problem

MOST_FILES = 1000
MOST_FOLDERS = 1000
MOST_BYTES = 2**20  # of a file
MOST_NODES = 10_000  # of a file, with its aliases written out
MOST_DEPTH = 50
# Keys that Hydra's instantiation obeys, and the one of Python's logging that names a factory.
CALLS_CODE = {"_target_", "_partial_", "_args_", "_recursive_", "_convert_", "()"}
RESOLVERS = {"now", "repository", "oc.select"}  # none of them knows a secret
_RESOLVER = re.compile(r"\$\{([^{}:]*)(?::|\$\{)")

NO_CODE = ("names code to run, and settings are values only", "leave it out")


def check_reference(text: str) -> tuple[str, str] | None:
    """(cause, fix) when the text asks a resolver that settings have no business with."""
    for found in _RESOLVER.finditer(text):
        name = found[1].strip()
        if name in ("oc.env", "env"):
            cause = "settings are written down with the run, and the environment holds secrets"
            return cause, "give the value itself"
        if name not in RESOLVERS or found[0].endswith("${"):
            cause = f"the reference {found[0]}... is not for settings"
            return cause, "refer to another setting, such as ${model.emb_dim}"
    return None


def check_folder(folder: Path, shipped: Path) -> list[Problem]:
    """Every problem with the *.yaml files of --config-dir; `shipped` is configs/, which goes
    before."""
    problems: list[Problem] = []
    for number, path in enumerate(_yaml_files(folder)):
        if number == MOST_FILES:
            fix = "give a folder that holds settings alone"
            return [("--config-dir", folder, f"has more than {MOST_FILES} YAML files", fix)]
        name = path.relative_to(folder)
        if (shipped / name).is_file() and not os.path.samefile(shipped / name, path):
            cause = f"would never be read, as configs/{name} goes before"
            problems.append(("--config-dir", path, cause, "give it another name"))
        elif found := check_file(path):
            problems.append(("--config-dir", path, *found))
    return problems


def _yaml_files(folder: Path) -> Iterator[Path]:
    """In order, through links to folders as Hydra reads them, each folder once."""
    seen = set()
    for here, folders, files in os.walk(folder, followlinks=True):
        place = os.stat(here)
        if (place.st_dev, place.st_ino) in seen or len(seen) >= MOST_FOLDERS:
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders.sort()
        yield from (Path(here, name) for name in sorted(files) if name.endswith(".yaml"))


def check_file(path: Path) -> tuple[str, str] | None:
    """(cause, fix) of the first thing that is wrong with a file, None when all is well."""
    if not path.is_file():  # a pipe would never end
        return "is not a regular file", "put the settings themselves there"
    if path.stat().st_size > MOST_BYTES:
        return f"has more than {MOST_BYTES:,} bytes", "settings are small: give those alone"
    try:
        return check_text(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start})", "convert it"
    except OSError as error:
        return f"cannot be read ({error.strerror})", "check its permissions"


def check_text(text: str) -> tuple[str, str] | None:
    """The same for the text of a file. In one pass over the events: an open collection is on the
    stack as [anchor, nodes in it, depth below it, whether the next one is a key]."""
    stack: list[list] = [[None, 0, 0, None]]
    section = None  # the key at the top that we are below
    sizes: dict[str, tuple[int, int, str | None]] = {}  # anchor: (nodes, depth, text if scalar)
    mend = "mend the file"

    def add(nodes: int, depth: int, scalar: str | None) -> tuple[str, str] | None:
        nonlocal section
        parent = stack[-1]
        if parent[3] and len(stack) == 2:
            section = scalar
        parent[1] += nodes
        parent[2] = max(parent[2], depth + 1)
        if parent[1] > MOST_NODES:
            cause = f"stands for more than {MOST_NODES:,} values, aliases written out"
            return cause, "settings are few: give those alone"
        if len(stack) + depth > MOST_DEPTH:
            return f"is nested more than {MOST_DEPTH} deep", mend
        if parent[3] and scalar in CALLS_CODE:
            return f"{scalar} {NO_CODE[0]}", NO_CODE[1]
        if section == "defaults" and scalar and re.search(r"(^|[/ @])\.\.|//|\0", scalar):
            return f"{scalar} leaves the folder", "keep the files in it"
        if scalar and (found := check_reference(scalar)):
            return found
        if parent[3] is not None:
            parent[3] = not parent[3]
        return None

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            wrong = None
            line = event.start_mark.line + 1
            if getattr(event, "tag", None) is not None:
                wrong = f"the tag {event.tag} makes more of it than a value", "leave it out"
            elif isinstance(event, yaml.AliasEvent):
                if any(open_one[0] == event.anchor for open_one in stack):
                    wrong = f"*{event.anchor} holds itself", mend
                elif event.anchor not in sizes:
                    wrong = f"*{event.anchor} stands for nothing", mend
                else:
                    wrong = add(*sizes[event.anchor])
            elif isinstance(event, yaml.ScalarEvent):
                if event.anchor:
                    sizes[event.anchor] = (1, 0, event.value)
                wrong = add(1, 0, event.value)
            elif isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                stack.append([event.anchor, 1, 0, True if is_mapping else None])
                if len(stack) > MOST_DEPTH:
                    wrong = f"is nested more than {MOST_DEPTH} deep", mend
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, nodes, depth, _ = stack.pop()
                if anchor:
                    sizes[anchor] = (nodes, depth, None)
                wrong = add(nodes, depth, None)
            if wrong:
                return f"line {line}: {wrong[0]}", wrong[1]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        cause = (
            getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        )
        return f"{where}is no YAML ({cause})", mend
    return None
