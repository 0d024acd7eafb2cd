"""Text from a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR 'prompt=["Once","The bell"]' num_samples=3 top_p=0.9
    python generate.py checkpoint=DIR interactive=true

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory, or hub:NAME. How text
is generated: inference/text.py and the other files there.
"""

import sys
import typing
from dataclasses import dataclass, field

from errors import Problem, refuse, visible
from training.config.command_line import settings_command

if typing.TYPE_CHECKING:
    from inference.text import TextGenerator
    from interop.pretrained import PretrainedModel

MOST = 1_000_000  # tokens, samples
BETWEEN = "\n---\n"  # two samples


@dataclass
class GenerateConfig:
    """python generate.py checkpoint=runs/NAME prompt="The ferry bell" [KEY=VALUE ...]"""

    checkpoint: str = field(
        metadata={"help": "a run (its last checkpoint), a checkpoint, a directory, hub:NAME"}
    )
    prompt: str | list[str] = field(
        default="The", metadata={"help": 'the text to continue; several: \'["one","two"]\''}
    )
    interactive: bool = field(default=False, metadata={"help": "true: asks for prompts"})
    max_new_tokens: int = field(default=100, metadata={"help": "how many tokens to add at most"})
    num_samples: int = field(default=1, metadata={"help": "how many continuations of each prompt"})
    batch_size: int = field(default=8, metadata={"help": "how many texts are written at once"})
    temperature: float = field(default=0.8, metadata={"help": "0: always the likeliest token"})
    top_k: int | None = field(default=50, metadata={"help": "draw from the k likeliest; null: all"})
    top_p: float | None = field(
        default=None, metadata={"help": "draw from the likeliest that make up p; null: all"}
    )
    seed: int = field(default=0, metadata={"help": "start of the random draws"})
    ignore_end: bool = field(default=False, metadata={"help": "true: go on after <|endoftext|>"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    precision: str = field(default="auto", metadata={"help": "auto | fp32 | bf16 | fp16"})
    compile: str | bool = field(
        default="auto", metadata={"help": "auto (long texts on a GPU) | true | false"}
    )
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def problems(self) -> list[Problem]:
        """The problems, as (key, value, reason, hint); empty when there are none."""
        found = []
        if not self.checkpoint:
            found.append(("checkpoint", "", "is empty", "give a run or a checkpoint"))
        if self.prompt == []:
            found.append(("prompt", "[]", "is a list of none", "give a text"))
        if self.interactive and self.prompt != "The":
            cause = "prompts are asked for with interactive=true"
            found.append(("prompt", self.prompt, cause, "leave one of them out"))
        for key in ("max_new_tokens", "num_samples", "batch_size"):
            if not 1 <= getattr(self, key) <= MOST:
                cause = f"must be from 1 to {MOST:,}"
                found.append((key, getattr(self, key), cause, f"use {key}=1 or more"))
        if not (self.temperature == 0 or 0.001 <= self.temperature <= 1000):
            cause = "must be 0 (the likeliest token), or from 0.001 to 1000"
            found.append(("temperature", self.temperature, cause, "use 0.8 or so"))
        if self.top_k is not None and self.top_k < 1:
            found.append(("top_k", self.top_k, "must be at least 1", "use 50, or null for all"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            cause = "must be above 0, and at most 1"
            found.append(("top_p", self.top_p, cause, "use 0.9, or null for all"))
        if not 0 <= self.seed < 2**63:
            found.append(("seed", self.seed, "must be from 0 to 2^63 - 1", "use seed=0"))
        choices = {
            "device": (("auto", "cpu", "cuda", "mps"), "no such device"),
            "precision": (("auto", "fp32", "bf16", "fp16"), "no such precision"),
            "compile": (("auto", True, False), "no such choice"),
        }
        for key, (allowed, cause) in choices.items():
            if getattr(self, key) not in allowed:
                names = ", ".join(str(choice).lower() for choice in allowed)
                found.append((key, getattr(self, key), cause, f"use one of {names}"))
        return found


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
