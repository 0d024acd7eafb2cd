"""Validated settings of a training run, composed once for each set of overrides."""

import functools

from training.config import Config, compose


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)


def settings(*overrides: str) -> Config:
    """Returns the config for these overrides, with data.path=none if they do not select data.

    Raises ConfigError with all problems.
    """
    selects_data = ("data=", "data.path=", "experiment=", "trainer.resume=")
    if not any(text.startswith(selects_data) for text in overrides):
        overrides = ("data.path=none", *overrides)
    return _composed(overrides).model_copy(deep=True)
