"""Settings: Hydra composes configs/ and overrides, pydantic checks them."""

from training.config.compose import compose
from training.config.schema import Config

__all__ = ["Config", "compose"]
