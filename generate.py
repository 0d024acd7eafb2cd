"""Text from a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR 'prompt=["Once","The bell"]' num_samples=3 top_p=0.9
    python generate.py checkpoint=DIR interactive=true

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory, or hub:NAME. How
tokens are read and drawn stands in inference/decoding.py, what makes it fast in
inference/packed_weights.py.
"""

import codecs
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field

from errors import Problem, refuse, visible
from training.config.command_line import settings_command

if typing.TYPE_CHECKING:
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

    for stream in (sys.stdin, sys.stdout):  # what an encoding lacks is no error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    refuse(device.check(settings.device, settings.precision))
    place = device.prepare(settings.device, settings.seed)
    pretrained = load_pretrained(settings.checkpoint)
    pretrained.model.to(place)
    write = Writer(pretrained, settings)
    if settings.interactive:
        converse(write)
        return
    try:
        write([prompt for prompt in settings.prompts for _ in range(settings.num_samples)])
    except KeyboardInterrupt:
        show("\n")  # the shell's prompt begins a line of its own
        raise


class Writer:
    """Continues texts on stdout, as the settings say; made once for many of them."""

    def __init__(self, pretrained: "PretrainedModel", settings: GenerateConfig):
        from inference.cache import KVCache
        from inference.decoding import Sampling
        from inference.packed_weights import freeze
        from training.distributed.device import DTYPES, best_dtype, compiled_step

        self.pretrained, self.settings = pretrained, settings
        self.sampling: Sampling = Sampling(
            settings.temperature, settings.top_k, settings.top_p, settings.seed
        )
        self.written = 0  # texts so far: each has random draws of its own
        texts = settings.num_samples * len(settings.prompts)
        self.batch_size = min(settings.batch_size, texts)
        place = pretrained.model.token_emb.weight.device
        auto = settings.precision == "auto"
        dtype = best_dtype(place) if auto else DTYPES[settings.precision]
        steps = settings.max_new_tokens * -(-texts // self.batch_size)
        steps = MOST if settings.interactive else steps
        compiled = compiled_step(settings.compile, place, steps)
        freeze(pretrained.model, dtype, self.batch_size, to_compile=compiled is not None)
        # Compiled code has one shape, and on a GPU one place in memory.
        self.cache = KVCache(pretrained.window, compiled) if compiled else None

    def __call__(self, prompts: list[str]) -> None:
        """Shows each prompt with its continuation, the first of a batch as it appears."""
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            for number, pieces in enumerate(self.continued(batch)):
                if start + number > 0:
                    show(BETWEEN)
                show(batch[number])
                for piece in pieces:
                    show(piece)
                show("\n")

    def continued(self, prompts: list[str]) -> list[Iterator[str]]:
        """The pieces of text that follow each prompt. All are written at the same time, and come
        when the first one's are asked for: those of the others are then whole."""
        from inference.decoding import generate

        tokenizer, settings = self.pretrained.tokenizer, self.settings
        end = tokenizer.eot_token
        ids = [tokenizer.encode(prompt, allowed_special="all") or [end] for prompt in prompts]
        if (longest := max(map(len, ids))) > (window := self.pretrained.window):
            cause = f"has {longest:,} tokens, and the model reads {window:,}"
            print(f"prompt: {cause}; its beginning is not read", file=sys.stderr)
        if self.cache:
            ids += ids[:1] * (self.batch_size - len(ids))  # which nobody is shown
        steps = generate(
            self.pretrained.model,
            ids,
            settings.max_new_tokens,
            self.sampling,
            self.pretrained.window,
            end=None if settings.ignore_end else end,
            known=tokenizer.n_vocab,
            first=self.written,
            cache=self.cache,
        )
        self.written += len(prompts)
        rows: list[list[int]] = [[] for _ in ids]

        def first() -> Iterator[int]:
            for tokens in steps:
                for row, token in zip(rows, tokens, strict=True):
                    if token is not None:
                        row.append(token)
                if tokens[0] is not None:
                    yield tokens[0]

        others = rows[1 : len(prompts)]
        return [self.decoded(first()), *(self.decoded(row) for row in others)]

    def decoded(self, tokens: "Iterator[int] | list[int]") -> Iterator[str]:
        """Tokens as text. A character may be spread over several: it comes with its last byte."""
        tokenizer, end = self.pretrained.tokenizer, self.pretrained.tokenizer.eot_token
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if token != end or self.settings.ignore_end:
                yield decoder.decode(tokenizer.decode_single_token_bytes(token))
        yield decoder.decode(b"", final=True)


def converse(write: Writer) -> None:
    """Asks for prompts until there are no more. Ctrl-C ends a text, and where none is being
    written, the command."""
    asks = sys.stdin is not None and sys.stdin.isatty()
    if asks:
        print("A prompt a line; Ctrl-C ends a text, Ctrl-D all.", file=sys.stderr)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            return
        if not (prompt := line.removesuffix("\n").removesuffix("\r")):
            continue
        try:
            write([prompt] * write.settings.num_samples)
        except KeyboardInterrupt:
            show("\n")


def show(text: str) -> None:
    """Prints a piece of text at once; on a terminal without what a terminal would obey."""
    if sys.stdout.isatty():
        text = visible(text.replace("\r", ""))
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
