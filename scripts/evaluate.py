"""Evaluates a model on a text: loss, perplexity, bits per byte.

    python -m scripts.evaluate checkpoint=runs/NAME data.path=my.txt
    python -m scripts.evaluate checkpoint=DIR data.path=tokens stride=128 out=results.json

`checkpoint` is a run directory, a checkpoint, a Hugging Face GPT-2 directory or hub:NAME.
`data.path` is the same as in training: text files, or a folder of token files.

An end-of-text token precedes each text, as in training. Each token is scored once, in sliding
windows (models/perplexity.py). A smaller stride gives each token more context and takes more
time. With stride=max_length, the windows are those of the validation in training and of the rolling
perplexity of lm-eval (docs/checkpoints.md).
"""

import math
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from clearhead.config.command_line import (
    OutFile,
    ScriptConfig,
    settings_command,
    write_out,
)
from clearhead.config.schema import (
    AboveZero,
    Checkpoint,
    DataConfig,
    Device,
    Encoding,
    Names,
    ParallelConfig,
    Positive,
    Precision,
    Settings,
    Threads,
)
from clearhead.config.stored import data_settings
from clearhead.errors import CheckpointError, DataError, Problem, refuse, sanitize

if TYPE_CHECKING:
    from clearhead.models.pretrained import PretrainedModel
    from clearhead.tokens.token_stream import TokenStream

# The settings of the run are the default.
FROM_RUN = ("text_key", "encoding", "trim", "val_fraction")


class TextConfig(Settings):
    """The text, and how it is read."""

    path: Names = Field(description="text or token file, folder, glob pattern, or a list of these")
    within_documents: bool = Field(
        False, description="true: no context from other documents; end-of-text is not scored"
    )
    val_fraction: Annotated[AboveZero, Field(lt=1)] | None = Field(
        None, description="fraction of the text for split=val; null: as in the run"
    )
    text_key: Names | None = Field(
        None, description="JSON field or column with the text, or a list; null: as trained"
    )
    encoding: Encoding | None = Field(
        None, description="encoding of text files, such as cp1252; null: as in the run"
    )
    trim: bool | None = Field(
        None, description="skip the licence in a book of Project Gutenberg; null: as trained"
    )


class EvaluateConfig(ScriptConfig):
    """python -m scripts.evaluate checkpoint=runs/NAME data.path=FILE [KEY=VALUE ...]"""

    checkpoint: Checkpoint
    data: TextConfig
    split: Literal["auto", "val", "train"] = Field(
        "auto",
        description="val | train: as in a run; auto: the val files if any, else the whole text",
    )
    max_length: Positive | None = Field(None, description="tokens per window; null: as in training")
    stride: Positive | None = Field(
        None, description="tokens between the starts of windows; null: max_length, no overlap"
    )
    batch_size: Positive = Field(8, description="windows per batch")
    precision: Precision = Field("fp32", description="fp32 | bf16 | fp16 | auto (as in training)")
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    threads: Threads = None
    out: OutFile = Field("", description="JSON file for the results")


@settings_command(EvaluateConfig)
def main(settings: EvaluateConfig) -> None:
    from clearhead.compute.specialize import specialize
    from clearhead.models.perplexity import ScoredWindows, evaluate
    from clearhead.models.pretrained import load_pretrained
    from clearhead.output.console import progress
    from clearhead.parallel import device
    from clearhead.parallel.hardware import machine

    refuse(device.check(settings.device, settings.precision))
    pretrained = load_pretrained(settings.checkpoint)
    max_length, stride = window_sizes(settings, pretrained)
    tokens, what = read(settings, pretrained)
    windows = ScoredWindows(tokens, max_length, stride, settings.data.within_documents)
    if not windows.num_targets:
        reason = f"{len(tokens)} tokens ({what}); at least 2 are needed"
        raise DataError("data.path", settings.data.path, reason, "use a longer text")
    single = ParallelConfig.with_defaults(strategy="single")
    chosen = settings.device, settings.precision, 0, settings.threads
    strategy = device.build_strategy(single, *chosen)
    model = pretrained.model.to(strategy.device)
    specialize(model, strategy.device)
    lengths = pretrained.tokenizer.byte_lengths
    with strategy.inference(model), progress("evaluated windows") as report:
        results = evaluate(model, windows, lengths, settings.batch_size, report)
    if not math.isfinite(results["loss"]):
        hint = "use another checkpoint, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, "the loss is NaN or inf", hint)
    within_documents = settings.data.within_documents
    about = {
        "checkpoint": settings.checkpoint,
        "step": pretrained.state.step if pretrained.state else None,
        "parameters": model.num_parameters(),
        "tokenizer": pretrained.tokenizer.name,
        "path": settings.data.path,
        "part": what,
        "rule": {"max_length": max_length, "stride": stride, "within_documents": within_documents},
        "precision": strategy.precision,
        "device": str(strategy.device),
    }
    print_results(about, results, pretrained.tokenizer.n_vocab)
    if settings.out:
        write_out(settings.out, about | results | machine())


def print_results(about: dict, results: dict, vocab_size: int) -> None:
    step = "" if about["step"] is None else ", step {step}"  # None: not of a run
    where = f"{{checkpoint}}{step}, in {{precision}}, on {{part}}".format(**about)
    print(sanitize(where))
    print("windows of {max_length:,} tokens, {stride:,} apart\n".format(**about["rule"]))
    for name, value in results.items():
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if value else value
        print(f"{name:<14} {shown}")
    tokenizer = f"{about['tokenizer']}, {vocab_size:,} ids"
    print(f"\nOnly bits_per_byte can be compared with models of another tokenizer ({tokenizer}).")


def window_sizes(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple[int, int]:
    """Returns max_length and stride of the windows. Raises ConfigError if max_length is larger than
    the context of the model, or stride is larger than max_length."""
    max_length = settings.max_length or pretrained.window
    stride = settings.stride or max_length
    for key, value, most in (
        ("max_length", max_length, pretrained.model.config.context_length),
        ("stride", stride, max_length),
    ):
        if value > most:
            refuse([Problem(key, value, f"must be at most {most}", f"use {most}")])
    if max_length > pretrained.window:
        reason = f"the model was trained on windows of {pretrained.window} tokens"
        print(f"note: max_length={max_length}: {reason}", file=sys.stderr)
    return max_length, stride


def read(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple["TokenStream", str]:
    """Returns the split, tokenized with the checkpoint's tokenizer, and a description of it.

    Raises DataError if the data cannot be read or split.
    """
    from clearhead.tokens.sources import load_streams, split_tokens

    own = data_settings(pretrained.state.settings) if pretrained.state else {}
    values = {key: own[key] for key in FROM_RUN if key in own}
    values |= settings.data.model_dump(exclude_none=True, exclude={"within_documents"})
    values |= {"max_length": 1}
    config, notes = DataConfig.with_defaults(**values), []
    tokenizer, split = pretrained.tokenizer, settings.split
    streams = load_streams(config, config.path, tokenizer, notes)
    if "val" in streams:
        split = "val" if split == "auto" else split
        tokens, what = streams[split], f"the {split} files"
    elif split == "auto":
        tokens, what = streams["train"], "all of the text"
    else:
        tokens = split_tokens(config, streams["train"], tokenizer, notes)[split == "val"]
        what = f"the {split} split, data.val_fraction={config.val_fraction:g}"
    for note in notes:
        print(sanitize(f"note: {note}"), file=sys.stderr)
    return tokens, what


if __name__ == "__main__":
    main()
