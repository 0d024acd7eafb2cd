"""Settings of a training run without Hydra's composition for each test, which takes 0.3 s.

`compose` of training/config/command_line.py has tests of its own (tests/training/config);
everything else can use `settings`, which composes each combination of groups once per process.
"""

import copy
import functools

from hydra.core.override_parser.overrides_parser import OverridesParser

from errors import refuse
from training.config import command_line as command
from training.config.schema import GROUPS, Settings, build, build_launch, names_a_run


@functools.cache
def _composed(groups: tuple[str, ...]) -> dict:
    """The plain values that these choices of groups (model=gpt2-nano) compose to."""
    from omegaconf import OmegaConf

    OmegaConf.clear_resolvers()
    command.register_resolvers()
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(command.CONFIGS), version_base="1.3"):
        config = compose("config", [*groups, "data.path=none"])
    return OmegaConf.to_container(config, resolve=True)


@functools.cache
def _value(override: str) -> object:
    key, _, text = override.partition("=")
    if key in command.FREE_TEXT and command.quoted(override) != override:
        return text  # all but lists, null and the like
    return OverridesParser.create().parse_override(override).value()


def settings(*overrides: str) -> Settings:
    """The checked settings of these overrides. Raises ConfigError with every problem."""
    keys = [text.partition("=")[0] for text in overrides]
    choices = [text for text in overrides if text.partition("=")[0] in (*GROUPS, "experiment")]
    values = copy.deepcopy(_composed(tuple(choices)))
    for text in overrides:
        group, _, name = text.partition("=")[0].rpartition(".")
        if text not in choices:
            owner = values[group] if group else values
            owner[name] = copy.deepcopy(_value(text))
    if names_a_run(values):
        found, problems = build_launch(values, keys, copy.deepcopy(_composed(())))
    else:
        found, problems = build(values)
    refuse(problems)
    return found
