"""Checked settings of a training run, composed once for each set of overrides."""

import functools

from training.config import Config, compose


@functools.cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)


def settings(*overrides: str) -> Config:
    """The config of these overrides; data.path=none unless they say which data.

    Raises ConfigError with every problem.
    """
    says_which = ("data=", "data.path=", "experiment=", "trainer.resume=")
    if not any(text.startswith(says_which) for text in overrides):
        overrides = ("data.path=none", *overrides)
    return _composed(overrides).model_copy(deep=True)
