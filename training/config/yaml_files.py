"""The YAML files of configs/: the default value of every setting and, beside it, its meaning."""

import copy
import functools
import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
# The file of each group that has all of its settings; config.yaml composes these.
DEFAULTS = {
    "": "config",
    "model": "gpt2-small",
    "data": "sample",
    "optimizer": "adamw",
    "trainer": "default",
    "lens": "default",
    "parallel": "auto",
    "wandb": "default",
}
SETTING = re.compile(r"(\w+):(?:.*? # (.*))?")  # key: value # meaning


@functools.cache
def defaults_and_meanings() -> dict[str, tuple[object, str]]:
    """(default value, meaning) of every setting by its dotted key, in the order of the files."""
    found = {}
    for group, name in DEFAULTS.items():
        text = (CONFIGS / group / f"{name}.yaml").read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        for line in text.splitlines():
            match = SETTING.match(line)
            if match and match[1] not in ("defaults", "hydra"):
                key = f"{group}.{match[1]}" if group else match[1]
                found[key] = values[match[1]], match[2] or ""
    path, meaning = found["data.path"]
    found["data.path"] = path.replace("${repository:}", str(REPOSITORY)), meaning
    return found


def default_values() -> dict:
    """The default settings as nested plain values."""
    values: dict = {group: {} for group in DEFAULTS if group}
    for key, (value, _) in defaults_and_meanings().items():
        group, _, name = key.rpartition(".")
        (values[group] if group else values)[name] = copy.deepcopy(value)
    return values


def preset_values(group: str, choice: str) -> dict:
    """The plain values of a choice, such as model=gpt2-xl: the defaults and what its file has."""
    text = (CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8")
    values = default_values()[group] | yaml.safe_load(text)
    return {key: value for key, value in values.items() if key != "defaults"}


def choices_of_groups(config_dir: str | None = None) -> dict[str, list[str]]:
    """The choices of each group in configs/ and in a folder of the user's own."""
    folders = [CONFIGS, Path(config_dir)] if config_dir else [CONFIGS]
    groups = sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})
    return {
        group: sorted(path.stem for folder in folders for path in (folder / group).glob("*.yaml"))
        for group in groups
    }
