"""Reads configs/: the default value of each setting, and its meaning from the comment after it."""

import functools
import os
import re
from collections.abc import Mapping

import omegaconf
import yaml
from omegaconf import DictConfig, OmegaConf

from clearhead.errors import as_yaml
from clearhead.files import REPOSITORY

CONFIGS = REPOSITORY / "configs"
REGISTER = "register_new_resolver" if omegaconf.__version__ < "2.4" else "register_resolver"
SETTING = re.compile(r"(\w+):(?:.*? # (.*))?")  # key: value # meaning


@functools.cache
def defaults_and_meanings() -> dict[str, tuple[object, str]]:
    """Returns (default value, meaning) of each setting by dotted key, in the order of the files."""
    found = {}
    entries = yaml.safe_load((CONFIGS / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = [item for entry in entries if entry != "_self_" for item in entry.items()]
    for group, name in [("", "config"), *chosen]:
        path = CONFIGS / group / f"{name}.yaml"
        if not path.is_file():
            continue  # experiment=null, or a file of Hydra
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        for line in text.splitlines():
            match = SETTING.match(line)
            if match and match[1] not in ("defaults", "hydra"):
                key = f"{group}.{match[1]}" if group else match[1]
                found[key] = values[match[1]], match[2] or ""
    return found


def default_values() -> dict:
    """Returns the default settings without `from` as nested plain values, interpolated."""
    values = {key: value for key, (value, _) in defaults_and_meanings().items() if key != "from"}
    return OmegaConf.to_container(OmegaConf.create(nested(values)), resolve=True)


def flat(tree: Mapping) -> dict[str, object]:
    """Returns settings by dotted key, such as trainer.device."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        is_group = isinstance(value, Mapping)
        leaves |= {f"{key}.{name}": v for name, v in value.items()} if is_group else {key: value}
    return leaves


def nested(leaves: Mapping) -> dict:
    """Reverses `flat`."""
    tree: dict = {}
    for key, value in leaves.items():
        group, _, name = key.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[name] = value
    return tree


def table(rows: list[tuple[str, str, str]]) -> str:
    """Returns lines for rows of (key, meaning, value)."""
    width = max(len(key) for key, _, _ in rows)
    lines = [
        f"  {key:<{width}} {meaning}" + f" [{value}]" * bool(value) for key, meaning, value in rows
    ]
    return "\n".join(lines)


def _settings(_root_: DictConfig) -> str:
    """Returns key, meaning and value of each setting, for Hydra's template of --help."""
    values = flat(OmegaConf.to_container(_root_, resolve=False))
    meanings = defaults_and_meanings().items()
    rows = [(key, meaning, as_yaml(values.get(key))) for key, (_, meaning) in meanings]
    return table(rows).replace("$", "$$")


# In YAML files, `${repository:}` is the folder of this repository, and `${env:NAME,default}` an
# environment variable. Unlike oc.env, an empty variable counts as unset.
# `${settings:}` is the list of all settings in --help.
RESOLVERS = {
    "repository": lambda: str(REPOSITORY),
    "env": lambda name, default: os.environ.get(name) or default,
    "settings": _settings,
}
for name, resolver in RESOLVERS.items():
    getattr(OmegaConf, REGISTER)(name, resolver, replace=True)
