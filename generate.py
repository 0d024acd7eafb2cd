"""Generates text with a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR 'prompt=["Once","The bell"]' num_samples=3 top_p=0.9
    python generate.py checkpoint=DIR prompts=prompts.txt out=texts.jsonl

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory, or hub:NAME. The
decoding is in clearhead/models/decoding.py.
"""

import codecs
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from clearhead.config.command_line import OutFile, ScriptConfig, settings_command, write_out
from clearhead.config.schema import (
    AboveZero,
    AutoOrBool,
    Checkpoint,
    Device,
    Name,
    NonNegative,
    Positive,
    Precision,
    Seed,
    Text,
    Threads,
)
from clearhead.errors import CheckpointError, ConfigError, message_of, refuse, sanitize
from clearhead.files import read_bounded

if TYPE_CHECKING:
    from clearhead.models.decoding import KVCache, Sampling
    from clearhead.models.pretrained import PretrainedModel

MAX_PROMPT_BYTES = 2**28  # of a file
MAX_COUNT = 1_000_000  # of tokens, samples, texts in a batch
PositiveCount = Annotated[Positive, Field(le=MAX_COUNT)]
SEPARATOR = "\n---\n"  # printed between samples
# Settings that each row of out= contains.
SETTINGS_OF_A_ROW = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "ignore_end")


class GenerateConfig(ScriptConfig):
    """python generate.py checkpoint=runs/NAME prompt="The ferry bell" [KEY=VALUE ...]"""

    free_text = ("prompt",)

    checkpoint: Checkpoint
    prompt: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        "The", description='the text to continue; several: \'["one","two"]\''
    )
    prompts: Name | None = Field(
        None, description="file with a prompt in each line; .jsonl: JSON with the key prompt"
    )
    out: OutFile = Field("", description="JSON Lines file for the texts; they are not printed then")
    overwrite: bool = Field(False, description="true: replace the file of out=")
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
    ignore_end: bool = Field(False, description="true: continue after the end-of-text token")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None
    precision: Precision = Field("auto", description="auto | fp32 | bf16 | fp16")
    compile: AutoOrBool = Field("auto", description="auto (long texts on a GPU) | true | false")


@settings_command(GenerateConfig)
def main(settings: GenerateConfig) -> None:
    from clearhead.parallel import device

    refuse(device.check(settings.device, settings.precision))
    check_combinations(settings)
    texts = [prompt for prompt in read_prompts(settings) for _ in range(settings.num_samples)]
    generator = load_generator(settings, len(texts))
    try:
        if settings.out:
            write_rows(generator, texts, settings)
        else:
            write_texts(generator, texts)
    except FloatingPointError as error:
        hint = "use another checkpoint, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, str(error), hint) from error


def check_combinations(settings: GenerateConfig) -> None:
    """Raises ConfigError for settings that exclude each other, and if `out` must not be written."""
    if settings.prompts and "prompt" in settings.model_fields_set:
        refuse([("prompts", settings.prompts, "cannot be combined with prompt", "use one of them")])
    if settings.out and os.path.lexists(settings.out):
        is_read = os.path.realpath(settings.out) == os.path.realpath(settings.prompts or "")
        if is_read or not settings.overwrite:
            hint = "give another path" + ", or overwrite=true" * (not is_read)
            refuse([("out", settings.out, "already exists", hint)])


# ------------------------------------------------------------------------------------- prompts


def read_prompts(settings: GenerateConfig) -> list[str]:
    """Returns the texts to continue. Raises ConfigError."""
    if path := settings.prompts:
        lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
        is_json = path.lower().endswith(".jsonl")
        found = [prompt_of_json(line, path) if is_json else line for line in lines if line.strip()]
        refuse([("prompts", path, "contains no prompt", "write one in each line")] * (not found))
        return found
    return [settings.prompt] if isinstance(settings.prompt, str) else settings.prompt


def prompt_of_json(line: str, path: str) -> str:
    """Returns the value of the key prompt. Raises ConfigError."""
    try:
        prompt = json.loads(line)["prompt"]
        prompt.encode()  # a text, without half of a character
        return prompt
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason, hint = f"no text with the key prompt in {line:.40}", 'write {"prompt": "TEXT"}'
        raise ConfigError([("prompts", path, reason, hint)]) from error


def read_text(path: str) -> str:
    """Returns the content of a UTF-8 file. Raises ConfigError."""
    try:
        content = read_bounded(Path(os.path.expanduser(path)), MAX_PROMPT_BYTES)
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not in UTF-8, or no path
        reason = f"cannot be read ({getattr(error, 'strerror', None) or message_of(error)})"
        raise ConfigError([("prompts", path, reason, "give a text file in UTF-8")]) from error


# ------------------------------------------------------------------------------------- texts


@dataclass
class TextGenerator:
    """A pretrained model that continues texts, `batch_size` of them at a time."""

    pretrained: "PretrainedModel"
    batch_size: int
    max_new_tokens: int
    sampling: "Sampling"
    end_token: int | None  # ends a text
    cache: "KVCache | None"  # of a compiled step

    def completions(
        self,
        prompts: list[str],
        show: Callable[[str], None] = lambda piece: None,
    ) -> Iterator[str]:
        """Yields the generated text of each prompt, without the prompt.

        show: called with the pieces of the first text of each batch, token by token.
        """
        for start in range(0, len(prompts), self.batch_size):
            batch = prompts[start : start + self.batch_size]
            # A character that consists of several tokens is shown after its last token.
            decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in batch]
            texts = [""] * len(batch)
            for tokens in self._generate(batch, start):
                for row, (token, decoder) in enumerate(zip(tokens, decoders, strict=False)):
                    if token not in (None, self.end_token):
                        raw = self.pretrained.tokenizer.decode_single_token_bytes(token)
                        texts[row] += (piece := decoder.decode(raw))
                        if row == 0:
                            show(piece)
            yield from texts  # without the beginning of a character at the end

    def _generate(self, batch: list[str], first_row: int) -> Iterator[list[int | None]]:
        """Yields the new token of each text of a batch; with padding for a compiled step, which
        needs a full batch."""
        from clearhead.models import decoding

        tokenizer, window = self.pretrained.tokenizer, self.pretrained.window
        # An empty prompt becomes the end-of-text token, which starts every document.
        ids = [tokenizer.encode(p, allowed_special="all") or [tokenizer.eot_token] for p in batch]
        if (longest := max(map(len, ids))) > window:
            reason = f"{longest:,} tokens, but a training window has {window:,}"
            print(f"prompt: {reason}; only the last tokens are used", file=sys.stderr)
        if self.cache:
            ids += ids[:1] * (self.batch_size - len(ids))
        return decoding.generate(
            self.pretrained.model,
            ids,
            self.max_new_tokens,
            self.sampling,
            window=window,
            end_token=self.end_token,
            vocab_size=tokenizer.n_vocab,
            first_row=first_row,
            cache=self.cache,
        )


def load_generator(settings: GenerateConfig, num_texts: int) -> TextGenerator:
    """Loads the model on its device. num_texts: the number of texts that it will continue."""
    from clearhead.compute.specialize import specialize_for_generation
    from clearhead.models.decoding import KVCache, Sampling
    from clearhead.models.pretrained import load_pretrained
    from clearhead.parallel import device

    torch_device = device.prepare(settings.device, settings.seed, settings.threads)
    pretrained = load_pretrained(settings.checkpoint)
    batch_size = min(settings.batch_size, num_texts)
    steps = settings.max_new_tokens * math.ceil(num_texts / batch_size)
    compiler = device.compiled_step(settings.compile, torch_device, steps)
    is_auto = settings.precision == "auto"
    dtype = device.best_dtype(torch_device) if is_auto else device.DTYPES[settings.precision]
    model = pretrained.model.to(torch_device)
    specialize_for_generation(model, dtype, batch_size, to_compile=compiler is not None)
    return TextGenerator(
        pretrained,
        batch_size,
        settings.max_new_tokens,
        Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed),
        end_token=None if settings.ignore_end else pretrained.tokenizer.eot_token,
        cache=KVCache(pretrained.window, compiler) if compiler else None,
    )


def write_texts(generator: TextGenerator, prompts: list[str]) -> None:
    """Prints each prompt with its generated text; the first text of a batch token by token."""
    shown: list[str] = []  # the pieces of the current text that are printed already

    def show(piece: str) -> None:
        shown.append(piece)
        print_piece(piece)

    texts = generator.completions(prompts, show)
    for number, prompt in enumerate(prompts):
        print_piece((SEPARATOR if number else "") + prompt)
        shown.clear()
        text = next(texts)
        print_piece(text.removeprefix("".join(shown)) + "\n")


def write_rows(generator: TextGenerator, prompts: list[str], settings: GenerateConfig) -> None:
    """Writes a row with prompt, generated text and settings for each prompt to settings.out, when
    all are generated."""
    from clearhead.output.console import progress

    state = generator.pretrained.state
    of_all = {"checkpoint": settings.checkpoint, "step": state and state.step}
    of_all |= settings.model_dump(include=set(SETTINGS_OF_A_ROW))
    with progress("generated texts") as report:

        def lines() -> Iterator[bytes]:
            texts = generator.completions(prompts)
            for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                row = {"prompt": prompt, "completion": text}
                row |= {"sample": number % settings.num_samples} | of_all
                yield (json.dumps(row, ensure_ascii=False) + "\n").encode()
                report(number + 1, len(prompts))

        write_out(settings.out, lines())
    print(sanitize(f"wrote {len(prompts):,} texts to {settings.out}"))


def print_piece(text: str) -> None:
    """Prints text without buffering; on a terminal, control characters are escaped."""
    if sys.stdout.isatty():
        text = sanitize(text.replace("\r", ""))
    print(text, end="", flush=True)


if __name__ == "__main__":
    main()
