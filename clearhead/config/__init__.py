"""Settings: Hydra composes configs/ and overrides, pydantic checks them."""

from clearhead.config.application import compose
from clearhead.config.schema import Config

__all__ = ["Config", "compose"]
