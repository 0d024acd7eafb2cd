"""Text from a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR 'prompt=["Once","The bell"]' num_samples=3 top_p=0.9
    python generate.py checkpoint=DIR interactive=true

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory, or hub:NAME. How text
is generated: inference/text.py and the other files there.
"""

import sys
import typing
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from errors import refuse, visible
from training.config.command_line import ScriptConfig, settings_command
from training.config.schema import (
    AboveZero,
    AutoOrBool,
    Device,
    Name,
    NonNegative,
    Positive,
    Precision,
    Seed,
    Text,
    rejected,
)

if typing.TYPE_CHECKING:
    from inference.text import TextGenerator
    from interop.pretrained import PretrainedModel

MOST = 1_000_000  # tokens, samples
BETWEEN = "\n---\n"  # two samples


class GenerateConfig(ScriptConfig):
    """python generate.py checkpoint=runs/NAME prompt="The ferry bell" [KEY=VALUE ...]"""

    checkpoint: Name = Field(
        description="a run (its last checkpoint), a checkpoint, a directory, hub:NAME"
    )
    interactive: bool = Field(False, description="true: ask for prompts")
    prompt: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        "The", description='the text to continue; several: \'["one","two"]\''
    )
    max_new_tokens: Annotated[Positive, Field(le=MOST)] = Field(
        100, description="most tokens to add"
    )
    num_samples: Annotated[Positive, Field(le=MOST)] = Field(
        1, description="continuations of each prompt"
    )
    batch_size: Annotated[Positive, Field(le=MOST)] = Field(
        8, description="texts that are generated at once"
    )
    temperature: Annotated[NonNegative, Field(le=1000)] = Field(
        0.8, description="0: always the most likely token"
    )
    top_k: Positive | None = Field(50, description="draw from the k most likely; null: from all")
    top_p: Annotated[AboveZero, Field(le=1)] | None = Field(
        None, description="draw from the most likely that add up to p; null: from all"
    )
    seed: Seed = Field(0, description="seed of the random draws")
    ignore_end: bool = Field(False, description="true: continue after <|endoftext|>")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    precision: Precision = Field("auto", description="auto | fp32 | bf16 | fp16")
    compile: AutoOrBool = Field("auto", description="auto (long texts on a GPU) | true | false")

    @field_validator("prompt")
    @classmethod
    def _not_both(cls, prompt: str | list[str], info: ValidationInfo) -> str | list[str]:
        if info.data.get("interactive"):
            raise rejected("interactive=true asks for prompts", "leave one of them out")
        return prompt

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, temperature: float) -> float:
        if 0 < temperature < 0.001:
            raise rejected("must be 0, or from 0.001 to 1000", "use 0.8")
        return temperature

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


@settings_command(GenerateConfig)
def main(settings: GenerateConfig) -> None:
    from interop.pretrained import load_pretrained
    from training.distributed import device

    for stream in (sys.stdin, sys.stdout):  # characters that the encoding lacks are replaced
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    refuse(device.check(settings.device, settings.precision))
    place = device.prepare(settings.device, settings.seed)
    pretrained = load_pretrained(settings.checkpoint)
    pretrained.model.to(place)
    generator = text_generator(pretrained, settings)
    if settings.interactive:
        converse(generator, settings.num_samples)
        return
    try:
        write(generator, [p for p in settings.prompts for _ in range(settings.num_samples)])
    except KeyboardInterrupt:
        show("\n")  # the shell's prompt begins on its own line
        raise


def text_generator(pretrained: "PretrainedModel", settings: GenerateConfig) -> "TextGenerator":
    from inference.text import Sampling, TextGenerator
    from training.distributed.device import DTYPES, best_dtype, compiled_step

    num_texts = settings.num_samples * len(settings.prompts)
    batch_size = min(settings.batch_size, num_texts)
    steps = settings.max_new_tokens * -(-num_texts // batch_size)
    place = pretrained.model.token_emb.weight.device
    auto = settings.precision == "auto"
    return TextGenerator(
        pretrained.model,
        pretrained.tokenizer,
        pretrained.window,
        settings.max_new_tokens,
        batch_size,
        Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed),
        best_dtype(place) if auto else DTYPES[settings.precision],
        settings.ignore_end,
        compiled_step(settings.compile, place, MOST if settings.interactive else steps),
    )


def write(generator: "TextGenerator", prompts: list[str]) -> None:
    """Prints each prompt with its continuation, the first of a batch while it is generated."""
    for start in range(0, len(prompts), generator.batch_size):
        batch = prompts[start : start + generator.batch_size]
        longest = max(len(generator.encode(prompt)) for prompt in batch)
        if longest > generator.window:
            reason = f"has {longest:,} tokens, and the model reads {generator.window:,}"
            print(f"prompt: {reason}; its beginning is not read", file=sys.stderr)
        for number, pieces in enumerate(generator.continuations(batch)):
            if start + number > 0:
                show(BETWEEN)
            show(batch[number])
            for piece in pieces:
                show(piece)
            show("\n")


def converse(generator: "TextGenerator", num_samples: int) -> None:
    """Asks for prompts until there are no more. Ctrl-C ends a text, or the command where no text is
    being generated."""
    asks = sys.stdin is not None and sys.stdin.isatty()
    if asks:
        print("One prompt per line; Ctrl-C ends a text, Ctrl-D the program.", file=sys.stderr)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            return
        if not (prompt := line.removesuffix("\n").removesuffix("\r")):
            continue
        try:
            write(generator, [prompt] * num_samples)
        except KeyboardInterrupt:
            show("\n")


def show(text: str) -> None:
    """Prints a piece of text at once; on a terminal with control characters made visible."""
    if sys.stdout.isatty():
        text = visible(text.replace("\r", ""))
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
