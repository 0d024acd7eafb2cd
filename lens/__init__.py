"""The lens: what shows attention while a model learns.

It imports nothing from outside this folder, so the folder can be copied beside another model. It
needs a function that takes token ids and gives attention weights, and no more:

    lens = Lens(LensConfig(), encode=tokenizer.encode, decode=tokenizer.decode, context_length=1024)
    pictures = lens.look(attn_weights_of, step=100, folder=Path("attention"))

The heavy parts (numpy, matplotlib) are loaded when the first picture is drawn.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# One whose word sense depends on its context ("bank"), one whose verb agrees with a noun far
# away ("letters ... were"), one in which a name comes back and is to be completed.
DEFAULT_PROMPTS = (
    "She sat on the bank of the river, far from the bank in the market where her money was.",
    "The letters that the keeper of the light had hidden in the old mill were found at last.",
    "Wenna rang the bell for Tam, and Tam looked at the river. Then Wenna rang the bell for",
)


@dataclass
class LensConfig:
    """What the lens looks at, and how often."""

    every: int = 40  # steps between looks, and once at the start and the end; 0: never
    prompts: list[str] = field(default_factory=lambda: list(DEFAULT_PROMPTS))
    max_tokens: int = 64  # longer prompts are cropped, and marked as such

    def problems(self) -> list[tuple[str, object, str, str]]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        if self.every < 0:
            found.append(("every", self.every, "must not be negative", "use 0 for no lens"))
        if not 2 <= self.max_tokens <= 256:
            cause = "a heatmap shows from 2 to 256 tokens"
            found.append(("max_tokens", self.max_tokens, cause, "use 64 or so"))
        if self.every > 0 and not self.prompts:
            found.append(("prompts", "[]", "nothing to look at", "give a prompt, or use lens=off"))
        for prompt in self.prompts:
            if not prompt.strip():
                found.append(("prompts", repr(prompt), "an empty prompt", "give it some words"))
        return found


@dataclass
class Prompt:
    """A prompt as the model reads it."""

    name: str  # short, fit for a file name and a dashboard key
    text: str
    token_ids: list[int]
    tokens: list[str]  # what each id stands for, as text
    cropped: bool  # whether the text had more tokens than are looked at


class Lens:
    """Looks at a fixed set of prompts, the same at every step, and draws what it sees."""

    def __init__(
        self,
        config: LensConfig,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        context_length: int,
    ):
        self.config = config
        limit = min(config.max_tokens, context_length)
        self.prompts = []
        for number, text in enumerate(config.prompts, start=1):
            ids = encode(text)
            self.prompts.append(
                Prompt(
                    name=f"{number}-{_slug(text)}",
                    text=text,
                    token_ids=ids[:limit],
                    tokens=[decode([token]) for token in ids[:limit]],
                    cropped=len(ids) > limit,
                )
            )

    def due(self, step: int, last_step: int) -> bool:
        """Whether to look after this many steps: at the start, at each interval and at the end."""
        every = self.config.every
        return every > 0 and (step % every == 0 or step == last_step)

    def look(
        self, attn_weights_of: Callable[[list[int]], Sequence], step: int, folder: Path
    ) -> dict[str, Path]:
        """Draws every head's attention on every prompt: {metric key: PNG file}.

        attn_weights_of(token ids, T of them) gives for each layer an array or CPU tensor
        (H, T, T) of weights, rows being queries.
        """
        from .heatmap import draw_grid

        folder.mkdir(parents=True, exist_ok=True)
        pictures = {}
        for prompt in self.prompts:
            path = folder / f"step_{step:08d}_{prompt.name}.png"
            draw_grid(attn_weights_of(prompt.token_ids), prompt, step, path)
            pictures[f"attention/heatmap/{prompt.name}"] = path
        return pictures


def _slug(text: str, words: int = 4) -> str:
    """The first words of a text as a file name: "She sat on the bank" -> "she-sat-on-the"."""
    found = re.findall(r"[a-z0-9]+", text.lower())[:words]
    return "-".join(found)[:40] or "prompt"
