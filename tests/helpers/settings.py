"""Validated settings of a training run. YAML files are composed once for each choice of groups."""

import functools
import sys
from copy import deepcopy

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import train
from clearhead.config import Config, compose
from clearhead.config.application import VERSION, checked
from clearhead.config.command_line import errors_in_one_line
from clearhead.config.schema import GROUPS, known_settings
from clearhead.config.yaml_files import CONFIGS


@functools.cache
def _composed(choices: tuple[str, ...]) -> DictConfig:
    """Returns the values for these choices of groups, with interpolations."""
    with hydra.initialize_config_dir(str(CONFIGS), **VERSION):
        return hydra.compose("config", list(choices))


def settings(*overrides: str) -> Config:
    """Returns the same as compose(overrides), in less time: the values of settings are
    changed in a copy of the composed config. data.path=any, if the overrides do not select data.

    Raises ConfigError with all problems.
    """
    selects_data = ("data=", "data.path=", "experiment=", "trainer.resume=")
    if not any(text.startswith(selects_data) for text in overrides):
        overrides = ("data.path=any", *overrides)
    keys = {text: text.partition("=")[0] for text in overrides}
    if not {*keys.values()} <= {*known_settings()} - {"experiment"}:
        return compose(overrides)
    values = [text for text in overrides if keys[text] not in GROUPS]
    try:
        config = deepcopy(_composed(tuple(text for text in overrides if keys[text] in GROUPS)))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    except (HydraException, OmegaConfBaseException):
        return compose(overrides)  # its error has the key
    return checked(config, overrides)


def train_main() -> None:
    """train.main without hydra.main, which composes the YAML files several times. With hydra.main,
    if an argument is an option, an added key or a setting of Hydra."""
    given = sys.argv[1:]
    if any(text.startswith(("+", "-", "hydra")) for text in given):
        return train.main()
    with errors_in_one_line(debug="debug=true" in given):
        train.main.__wrapped__(settings(*given))
