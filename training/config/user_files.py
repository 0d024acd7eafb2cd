"""Finds a problem in the YAML files of the user: FILE:LINE.

OmegaConf does not keep the lines of a file, so after an error the files are read again. The
functions run while Hydra is initialized (`training.config.compose`).
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from errors import NO_VALUE, Problem, UnknownSetting
from training.config.yaml_files import CONFIGS

# Errors of Hydra, OmegaConf and YAML. They raise ValueError too.
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)

BOOLEAN = r"^\s*-\s.*:\s*(?i:on|off|yes|no|true|false)\s*(#|$)"  # entry of a defaults list


def with_places(problems: list[Problem], name: str, overrides: Sequence[str]) -> list[Problem]:
    """Returns the problems with the place of each setting that a file of the user sets.

    name: of the primary config. overrides: settings of the command line need no place."""
    given = {text.partition("=")[0].lstrip("+~") for text in overrides}
    files = _merged_files(name, overrides)
    found = [p.place or (p.key in given and type(p) is not UnknownSetting) for p in problems]
    return [p if ok else _with_place(p, files) for p, ok in zip(problems, found, strict=True)]


def place_of(error: Exception, overrides: Sequence[str]) -> str:
    """Returns the place of an error of Hydra, OmegaConf or YAML, or ""."""
    if mark := getattr(error, "problem_mark", None):
        return _place(mark.name, mark.line + 1)
    named = re.findall(r"'(?:override )?([^'@\n]+)[^'\n]*'", str(error).partition("\n")[0])
    files = [path for name in named if (path := _path(name, overrides)) and path.parent != CONFIGS]
    of_list = len(named) == 1 and files  # the message names only the file
    word = "defaults" if of_list else os.path.basename(named[-1]) if named else ""
    pattern = rf"\b{re.escape(word)}\b" if word else BOOLEAN
    for path in files + _chosen(overrides):
        content = path.read_bytes()
        try:
            lines = content.decode().splitlines()
        except UnicodeDecodeError as bad:
            return _place(path, content[: bad.start].count(b"\n") + 1)
        hits = [n for n, line in enumerate(lines, 1) if re.search(pattern, line)]
        if hits or path in files:
            return _place(path, hits[0] if hits else 1)
    return ""


def _with_place(problem: Problem, files: list[tuple[Path, str]]) -> Problem:
    for path, package in files:
        if CONFIGS in path.parents and not isinstance(problem, UnknownSetting):
            continue  # shipped values are valid; the cause is another setting
        if problem.key == package:  # of a new group, or an experiment without the line below
            hint = "start the file with the line # @package _global_"
            return problem._replace(value=NO_VALUE, hint=hint, place=_place(path, 1))
        key = problem.key.removeprefix(f"{package}." if package else "")
        with contextlib.suppress(*ERRORS):
            if line := _line(yaml.compose(path.read_bytes()), key):
                return problem._replace(place=_place(path, line))
    return problem


def _merged_files(name: str, overrides: Sequence[str]) -> list[tuple[Path, str]]:
    """Returns (file, package) of each composed file. The last one, which wins, is first."""
    loader = GlobalHydra.instance().config_loader()
    try:
        merged = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    except ERRORS:
        return [(path, "") for path in _chosen(overrides)]
    found = [(_path(default.config_path, overrides), default.package) for default in merged]
    return [(path, package or "") for path, package in reversed(found) if path]


def _chosen(overrides: Sequence[str]) -> list[Path]:
    """Returns the files that the command line chooses with GROUP=CHOICE."""
    names = [text.lstrip("+").replace("=", "/", 1) for text in overrides]
    return list(filter(None, [_path(name, overrides) for name in names]))


def _path(name: str | None, overrides: Sequence[str]) -> Path | None:
    """Returns the file of a config such as experiment/mine, in the order of Hydra's search path."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders = [source.path for source in sources if source.scheme() == "file"]
    for text in overrides:
        if text.startswith("hydra.searchpath="):
            folders += OverridesParser.create().parse_override(text).value() or []
    paths = [os.path.join(f.removeprefix("file://"), f"{name}.yaml") for f in folders]
    return next((Path(path) for path in paths if os.path.isfile(path)), None)


def _place(path: str | Path, line: int) -> str:
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def _line(node: yaml.Node, key: str) -> int | None:
    """Returns the line of a dotted key in the nodes of a YAML file."""
    if not isinstance(node, yaml.MappingNode):
        return node.start_mark.line + 1 if node.value == key else None
    for name, value in node.value:
        if key == name.value:
            return name.start_mark.line + 1
        if key.startswith(f"{name.value}."):
            if isinstance(value, yaml.MappingNode):
                return _line(value, key.removeprefix(f"{name.value}."))
            return name.start_mark.line + 1
    return None
