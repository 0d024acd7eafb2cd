"""Finds the lines of settings in the YAML files of the user, because OmegaConf does not keep them.

The functions run while Hydra is initialized (`clearhead.config.compose`).
"""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from clearhead.config.yaml_files import CONFIGS
from clearhead.errors import NO_VALUE, Problem, UnknownSetting


def with_places(problems: list[Problem], name: str, overrides: Sequence[str]) -> list[Problem]:
    """Returns the problems with FILE:LINE of each setting that a file of the user sets.

    name: of the primary config. overrides: settings of the command line need no place."""
    given = {text.partition("=")[0].lstrip("+~") for text in overrides}
    loader = GlobalHydra.instance().config_loader()
    try:
        merged = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    except Exception:  # of Hydra, OmegaConf or YAML; it is one of the problems
        return problems
    folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    files = [  # the file that wins is first
        (folder / f"{default.config_path}.yaml", default.package or "")
        for default in reversed(merged)
        for folder in folders
    ]
    files = [(path, package) for path, package in files if path.is_file()]
    return [
        p if p.key in given and type(p) is not UnknownSetting else _with_place(p, files)
        for p in problems
    ]


def _with_place(problem: Problem, files: list[tuple[Path, str]]) -> Problem:
    for path, package in files:
        if CONFIGS in path.parents and not isinstance(problem, UnknownSetting):
            continue  # shipped values are valid; the cause is another setting
        if problem.key == package:  # of a new group, or an experiment without the line below
            hint = "start the file with the line # @package _global_"
            return problem._replace(value=NO_VALUE, hint=hint, place=place(path, 1))
        key = problem.key.removeprefix(f"{package}." if package else "")
        if line := _line(yaml.compose(path.read_bytes()), key):
            return problem._replace(place=place(path, line))
    return problem


def place(path: str | Path, line: int) -> str:
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def _line(node: yaml.Node | None, key: str) -> int | None:
    """Returns the line of a dotted key in the nodes of a YAML file."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key == name.value:
            return name.start_mark.line + 1
        if key.startswith(f"{name.value}."):
            return _line(value, key.removeprefix(f"{name.value}.")) or name.start_mark.line + 1
    return None
