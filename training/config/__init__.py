"""Settings: configs/ and overrides, composed by Hydra and checked by pydantic."""

from training.config.compose import compose
from training.config.schema import Config

__all__ = ["Config", "compose"]
