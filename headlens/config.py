"""Settings of the attention lens."""

import os
import re
from dataclasses import dataclass

# A word whose meaning depends on its context ("bank"), a verb that agrees with a distant noun
# ("letters ... were"), and a repeated name that the model has to complete.
DEFAULT_PROMPTS = (
    "She sat on the bank of the river, far from the bank in the market where her money was.",
    "The letters that the keeper of the light had hidden in the old mill were found at last.",
    "Wenna rang the bell for Tam, and Tam looked at the river. Then Wenna rang the bell for",
)
# A text that is plainly a path: it has a suffix or a separator, and no white space.
PATH = re.compile(r"[\w.~:/\\+,*@#=()-]*([/\\]|\.[A-Za-z])\w+")


@dataclass
class LensConfig:
    """Prompts, interval and output of attention snapshots."""

    # steps between snapshots; the first and the last step always have one; 0: no snapshots;
    # null: max_steps / 20, between 40 and 1000
    every: int | None = None
    # snapshots take at most this share of the time: others are skipped; null: no limit. The first
    # and the last one are always taken.
    max_percent: float | None = None
    repeat_length: int = 24  # additional prompt: this many random tokens, written twice; 0: none
    max_tokens: int = 64  # longer prompts are truncated; images and pages note this
    prompts: list[str] | None = None  # at most 20; null: passages of the text, or DEFAULT_PROMPTS
    ablation: str = "auto"  # removed heads at the last step: auto, exact or off

    def __post_init__(self) -> None:
        """Raises ValueError for values that make no sense."""
        if isinstance(self.prompts, str):
            raise ValueError(f"prompts={self.prompts!r}: is not a list; write [prompt]")
        if self.ablation not in ("auto", "exact", "off"):
            raise ValueError(f"ablation={self.ablation!r}: must be auto, exact or off")
        if self.repeat_length == 1:
            raise ValueError("repeat_length=1: must be 0 or at least 2")
        for prompt in self.prompts or []:
            refuse_path("prompts", prompt)
        if self.max_percent is not None and not 0 < self.max_percent <= 100:
            raise ValueError(f"max_percent={self.max_percent}: must be above 0 and at most 100")
        for key, least in {"every": 0, "repeat_length": 0, "max_tokens": 2}.items():
            if (value := getattr(self, key)) is not None and value < least:
                raise ValueError(f"{key}={value}: must be at least {least}")

    def interval(self, max_steps: int) -> int:
        """Returns the steps between snapshots in a run of `max_steps` steps; 0: no snapshots."""
        return min(max(max_steps // 20, 40), 1000) if self.every is None else self.every


def refuse_path(name: str, text: str) -> None:
    """Raises ValueError for the path of a file, also of one that does not exist."""
    if len(text) < 256 and (os.path.isfile(text) or PATH.fullmatch(text)):
        reason = "is the path of a file, not a text"
        raise ValueError(f"{name}={text!r} {reason}; give its text, Path.read_text()")
