"""Generates text with a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR 'prompt=["Once","The bell"]' num_samples=3 top_p=0.9
    python generate.py checkpoint=DIR interactive=true

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory, or hub:NAME. The
decoding is in clearhead/inference/decoding.py.
"""

import codecs
import functools
import itertools
import sys
import typing
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from clearhead.config.command_line import ScriptConfig, settings_command
from clearhead.config.schema import (
    AboveZero,
    AutoOrBool,
    Checkpoint,
    Device,
    NonNegative,
    Positive,
    Precision,
    Seed,
    Text,
    Threads,
)
from clearhead.errors import CheckpointError, refuse, sanitize

if typing.TYPE_CHECKING:
    from clearhead.interop.pretrained import PretrainedModel

MAX_COUNT = 1_000_000  # of tokens, samples, texts in a batch
PositiveCount = Annotated[Positive, Field(le=MAX_COUNT)]
SEPARATOR = "\n---\n"  # printed between samples


class GenerateConfig(ScriptConfig):
    """python generate.py checkpoint=runs/NAME prompt="The ferry bell" [KEY=VALUE ...]"""

    lists_in_quotes = ("prompt",)

    checkpoint: Checkpoint
    interactive: bool = Field(False, description="true: ask for prompts")
    prompt: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        "The", description='the text to continue; several: \'["one","two"]\''
    )
    max_new_tokens: PositiveCount = Field(100, description="maximum number of new tokens")
    num_samples: PositiveCount = Field(1, description="number of samples for each prompt")
    batch_size: PositiveCount = Field(8, description="number of texts generated at once")
    temperature: Annotated[NonNegative, Field(le=1000)] = Field(
        0.8, description="sampling temperature; 0: always the most likely token"
    )
    top_k: Positive | None = Field(50, description="sample from the k most likely; null: from all")
    top_p: Annotated[AboveZero, Field(le=1)] | None = Field(
        None, description="sample from the most likely tokens with total probability p; null: all"
    )
    seed: Seed = Field(0, description="random seed")
    ignore_end: bool = Field(False, description="true: continue after <|endoftext|>")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None
    precision: Precision = Field("auto", description="auto | fp32 | bf16 | fp16")
    compile: AutoOrBool = Field("auto", description="auto (long texts on a GPU) | true | false")

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


@settings_command(GenerateConfig)
def main(settings: GenerateConfig) -> None:
    from clearhead.distributed import device
    from clearhead.inference import cache, decoding
    from clearhead.interop.pretrained import load_pretrained
    from clearhead.ops.specialize import specialize_for_generation

    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # replaces bytes that the encoding does not have
    refuse(device.check(settings.device, settings.precision))
    torch_device = device.prepare(settings.device, settings.seed, settings.threads)
    pretrained = load_pretrained(settings.checkpoint)
    num_texts = settings.num_samples * len(settings.prompts)
    batch_size = min(settings.batch_size, num_texts)
    steps = settings.max_new_tokens * -(-num_texts // batch_size)
    steps = MAX_COUNT if settings.interactive else steps
    compiler = device.compiled_step(settings.compile, torch_device, steps)
    auto = settings.precision == "auto"
    dtype = device.best_dtype(torch_device) if auto else device.DTYPES[settings.precision]
    model = pretrained.model.to(torch_device)
    specialize_for_generation(model, dtype, batch_size, to_compile=compiler is not None)
    write = functools.partial(
        write_texts,
        functools.partial(decoding.generate, pretrained.model, window=pretrained.window),
        pretrained,
        batch_size,
        cache=cache.KVCache(pretrained.window, compiler) if compiler else None,
        max_new_tokens=settings.max_new_tokens,
        sampling=decoding.Sampling(
            settings.temperature, settings.top_k, settings.top_p, settings.seed
        ),
        end_token=None if settings.ignore_end else pretrained.tokenizer.eot_token,
    )
    try:
        if settings.interactive:
            run_interactive(write, settings.num_samples)
        else:
            write([p for p in settings.prompts for _ in range(settings.num_samples)])
    except FloatingPointError as error:
        hint = "use another checkpoint, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, str(error), hint) from error


def write_texts(
    generate: Callable,
    pretrained: "PretrainedModel",
    batch_size: int,
    prompts: list[str],
    first_row: int = 0,
    **options,
) -> None:
    """Prints each prompt with its generated text; the first text of a batch token by token.

    generate: the function in clearhead/inference/decoding.py; options: its keyword arguments.
    first_row: the row number of the first text, which selects its random numbers.
    """
    tokenizer, window, end = pretrained.tokenizer, pretrained.window, options["end_token"]
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        # An empty prompt becomes the end-of-text token, which starts every document.
        ids = [tokenizer.encode(p, allowed_special="all") or [tokenizer.eot_token] for p in batch]
        if (longest := max(map(len, ids))) > window:
            reason = f"{longest:,} tokens, but a training window has {window:,}"
            print(f"prompt: {reason}; only the last tokens are used", file=sys.stderr)
        if options["cache"]:  # compiled code needs a constant batch size
            ids += ids[:1] * (batch_size - len(ids))
        # A character that consists of several tokens is printed after its last token.
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in batch]
        texts = list(batch)
        print_piece((SEPARATOR if start else "") + batch[0])
        options |= {"vocab_size": tokenizer.n_vocab, "first_row": first_row + start}
        for tokens in generate(ids, **options):
            for row, (token, decoder) in enumerate(zip(tokens, decoders, strict=False)):
                if token not in (None, end):
                    piece = decoder.decode(tokenizer.decode_single_token_bytes(token))
                    texts[row] += piece
                    if row == 0:
                        print_piece(piece)
        rest = [decoder.decode(b"", final=True) + "\n" for decoder in decoders]
        print_piece(rest[0])
        for text, ending in zip(texts[1:], rest[1:], strict=True):
            print_piece(SEPARATOR + text + ending)


def run_interactive(write: Callable, num_samples: int) -> None:
    """Reads prompts from stdin, one per line, until end of file. Ctrl-C stops the current text; at
    the prompt, it ends the program."""
    if is_terminal := sys.stdin.isatty():
        print("One prompt per line; Ctrl-C stops a text, Ctrl-D exits.", file=sys.stderr)
    for number in itertools.count():
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        try:
            if prompt := line.rstrip("\r\n"):
                write([prompt] * num_samples, first_row=number * num_samples)
        except KeyboardInterrupt:
            print_piece("\n")


def print_piece(text: str) -> None:
    """Prints text without buffering; on a terminal, control characters are escaped."""
    if sys.stdout.isatty():
        text = sanitize(text.replace("\r", ""))
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
