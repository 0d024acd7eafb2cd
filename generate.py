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

from pydantic import Field

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
)

if typing.TYPE_CHECKING:
    from inference.text import TextGenerator

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

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


@settings_command(GenerateConfig)
def main(settings: GenerateConfig) -> None:
    from inference.text import Sampling, TextGenerator
    from interop.pretrained import load_pretrained
    from training.distributed import device

    for stream in (sys.stdin, sys.stdout):  # characters that the encoding lacks are replaced
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    refuse(device.check(settings.device, settings.precision))
    place = device.prepare(settings.device, settings.seed)
    pretrained = load_pretrained(settings.checkpoint)
    pretrained.model.to(place)
    num_texts = settings.num_samples * len(settings.prompts)
    batch_size = min(settings.batch_size, num_texts)
    steps = settings.max_new_tokens * -(-num_texts // batch_size)
    auto = settings.precision == "auto"
    generator = TextGenerator(
        pretrained.model,
        pretrained.tokenizer,
        pretrained.window,
        settings.max_new_tokens,
        batch_size,
        Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed),
        device.best_dtype(place) if auto else device.DTYPES[settings.precision],
        settings.ignore_end,
        device.compiled_step(settings.compile, place, MOST if settings.interactive else steps),
    )
    if settings.interactive:
        converse(generator, settings.num_samples)
    else:
        write(generator, [p for p in settings.prompts for _ in range(settings.num_samples)])


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
    if asks := sys.stdin.isatty():
        print("One prompt per line; Ctrl-C ends a text, Ctrl-D the program.", file=sys.stderr)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        try:
            if prompt := line.rstrip("\r\n"):
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
