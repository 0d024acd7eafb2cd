"""The settings of the lens."""

from dataclasses import dataclass, field

# A word whose sense depends on its context ("bank"), a verb that agrees with a distant noun
# ("letters ... were"), a name that occurs again and has to be completed.
DEFAULT_PROMPTS = (
    "She sat on the bank of the river, far from the bank in the market where her money was.",
    "The letters that the keeper of the light had hidden in the old mill were found at last.",
    "Wenna rang the bell for Tam, and Tam looked at the river. Then Wenna rang the bell for",
)


@dataclass
class LensConfig:
    """The settings of the lens: prompts, and how often a snapshot is taken."""

    # steps between snapshots; there is one at the start and at the end too; 0: none at all;
    # null: a twentieth of the run, 40 to 1000
    every: int | None = None
    prompts: list[str] = field(default_factory=lambda: list(DEFAULT_PROMPTS))  # at most 20
    repeat_length: int = 24  # one more prompt: this many random tokens, twice; 0: none
    max_tokens: int = 64  # longer prompts are truncated, and marked as such
    layers: list[int] = field(default_factory=list)  # layers that also get a large picture
    frames: int = 24  # most steps in the time-lapse

    def interval(self, max_steps: int) -> int:
        """Steps between snapshots in a run of `max_steps`; 0: no snapshots."""
        return min(max(max_steps // 20, 40), 1000) if self.every is None else self.every
