"""The settings of scripts.inspect_attention."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from clearhead.config.command_line import OutFile, ScriptConfig
from clearhead.config.schema import (
    Checkpoint,
    Count,
    Device,
    Paths,
    Positive,
    Settings,
    Text,
    Threads,
    rejected,
)
from clearhead.errors import NO_VALUE, Problem


class AblationText(Settings):
    """The text on which heads are measured."""

    path: Paths | None = Field(
        None,
        description="text or token files on which heads are measured and removed; null: the "
        "validation data of the run",
    )


class InspectConfig(ScriptConfig):
    """python -m scripts.inspect_attention checkpoint=runs/NAME [text="..."] [KEY=VALUE ...]"""

    free_text = ("text",)

    checkpoint: Checkpoint | None = Field(
        None, description="run (last checkpoint), checkpoint, Hugging Face directory or hub:NAME"
    )
    checkpoints: str = Field(
        "",
        description="checkpoints of one training, for a time-lapse: a pattern such as "
        "'out/checkpoint-*', hub:NAME@REVISION,REVISION or hub:NAME@PATTERN",
    )
    tokenizer: str = Field(
        "",
        description="directory or hub:NAME of the tokenizer, for a model of transformers without "
        "one",
    )
    text: Text | list[Text] = Field(
        "",
        description='prompt; several: \'["one","two"]\'; empty: the prompts of the run, or '
        "passages of data.path, or three sentences",
    )
    out: OutFile | None = Field(
        None,
        pattern=r"(?i)(\.html|\.npz|^)$",
        description="HTML file to write, or .npz for the data alone; null: attention.html, but "
        "none with figure=",
    )
    compare: str = Field("", description="second model, shown next to the first")
    max_tokens: Annotated[Positive, Field(ge=2, le=1024)] | None = Field(
        None,
        description="longer prompts are truncated, also to the training window; null: as in the "
        "run, or 64",
    )
    repeat_length: Annotated[Count, Field(le=127)] | None = Field(
        None,
        description="number of random tokens that an extra prompt repeats; 0: none; null: as in "
        "the run, or 24",
    )
    figure: OutFile = Field(
        "",
        pattern=r"(?i)(\.pdf|\.svg|\.png|^)$",
        description="also draw the heatmaps: a .pdf, .svg or .png file",
    )
    prompt: Positive | None = Field(
        None,
        description="number of the prompt in the figure; null: text=, or the prompt on which the "
        "head (without layer= and head=, the most significant one) is clearest",
    )
    layer: Count | None = Field(None, description="layer of the only head in the figure")
    head: Count | None = Field(None, description="the only head in the figure; null: all heads")
    logit_lens: bool = Field(
        False, description="also record what the output layer predicts from each layer's input"
    )
    ablation: Literal["exact", "estimate"] | None = Field(
        None, description="measure the loss without each head: exact | estimate; null: do not"
    )
    data: AblationText = Field(default_factory=AblationText)
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None

    @field_validator("repeat_length")
    @classmethod
    def _repeats(cls, repeat_length: int | None) -> int | None:
        if repeat_length == 1:
            raise rejected("must be 0, or from 2 to 127", "use 24")
        return repeat_length

    @property
    def texts(self) -> list[str]:
        return [text for text in ([self.text] if isinstance(self.text, str) else self.text) if text]


def conflicts(settings: InspectConfig) -> list[Problem]:
    """Returns the problems of settings that exclude each other."""
    if not settings.checkpoints:
        hint = "set checkpoint= or checkpoints="
        needed = [Problem("checkpoint", NO_VALUE, "is missing", hint)]
        is_data = (settings.out or "").lower().endswith(".npz")
        one = Problem("compare", settings.compare, "an .npz file has one model", "use .html")
        return needed * (not settings.checkpoint) + [one] * (is_data and bool(settings.compare))
    found = []
    for key in ("checkpoint", "compare", "figure", "ablation"):
        if value := getattr(settings, key):
            hint = "use it for a single checkpoint"
            found.append(Problem(key, value, "not possible with checkpoints=", hint))
    if (settings.out or "").lower().endswith(".npz"):
        found.append(Problem("out", settings.out, "an .npz file has one step", "use .html"))
    return found
