"""How well a model predicts a text: loss, perplexity, bits per byte.

    python -m scripts.evaluate checkpoint=runs/NAME data.path=my.txt
    python -m scripts.evaluate checkpoint=DIR data.path=tokens stride=128 out=figures.json

`checkpoint` is a run, one of its checkpoints, a Hugging Face GPT-2 directory or hub:NAME;
`data.path` what training reads: texts, or a folder of token files.

A text is its tokens after an end-of-text token, as in training. Each token is scored once, by the
rule of inference/perplexity.py. A small stride takes more windows and gives the model more context.
With stride=max_length these are the windows of training's validation, and of lm-eval's rolling
perplexity (docs/evaluation.md).
"""

import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from errors import CheckpointError, DataError, Problem, refuse, sanitize
from tokens.tokenizers import token_byte_lengths
from training.config.command_line import (
    OutFile,
    ScriptConfig,
    ScriptGroup,
    settings_command,
    write_out,
)
from training.config.schema import (
    AboveZero,
    Checkpoint,
    DataConfig,
    Device,
    Name,
    ParallelConfig,
    Paths,
    Positive,
    Precision,
)
from training.reporting.machine import machine

if TYPE_CHECKING:
    from interop.pretrained import PretrainedModel
    from tokens.stream import TokenStream

FROM_RUN = ("text_key", "endoftext", "val_fraction")  # data settings that default to the run's


class TextConfig(ScriptGroup):
    """Which text, and how it is read."""

    path: Paths = Field(description="a text or token file, a folder, a glob, a list of these")
    within_documents: bool = Field(
        False, description="true: each document by itself, end-of-text not scored"
    )
    val_fraction: Annotated[AboveZero, Field(lt=1)] | None = Field(
        None, description="where split=val and train part; null: the run's own"
    )
    text_key: Name | None = Field(
        None, description="field or column of JSON and Parquet with the text; null: the run's own"
    )
    endoftext: Literal["token", "text"] | None = Field(
        None, description="how <|endoftext|> in a text is read: token | text; null: the run's own"
    )


class EvaluateConfig(ScriptConfig):
    """python -m scripts.evaluate checkpoint=runs/NAME data.path=FILE [KEY=VALUE ...]"""

    checkpoint: Checkpoint
    data: TextConfig
    split: Literal["auto", "val", "train"] = Field(
        "auto", description="val | train, as a run splits it; auto: files named val, else all"
    )
    max_length: Positive | None = Field(
        None, description="tokens that a window reads; null: as many as in training"
    )
    stride: Positive | None = Field(
        None, description="tokens from window to window; null: max_length, no overlap"
    )
    batch_size: Positive = Field(8, description="windows at once")
    precision: Precision = Field(
        "fp32", description="fp32 | bf16 | fp16 | auto (what training would take)"
    )
    device: Device = Field("auto", description="auto | cpu | cuda | mps")
    out: OutFile = Field("", description="a JSON file for the figures")


@settings_command(EvaluateConfig)
def main(settings: EvaluateConfig) -> None:
    from inference.perplexity import ScoredWindows, SlidingWindow, evaluate
    from interop.pretrained import load_pretrained
    from training.distributed import build, device

    refuse(device.check(settings.device, settings.precision))
    pretrained = load_pretrained(settings.checkpoint)
    rule = SlidingWindow(*window_sizes(settings, pretrained), settings.data.within_documents)
    tokens, what = read(settings, pretrained)
    windows = ScoredWindows(tokens, rule)
    if not windows.num_targets:
        reason = f"{len(tokens)} tokens ({what}), and to score one takes two"
        raise DataError("data.path", settings.data.path, reason, "use a longer text")
    single = ParallelConfig.with_defaults(strategy="single")
    strategy = build.build_strategy(single, settings.device, settings.precision, seed=0)
    model = pretrained.model.to(strategy.device)
    strategy.wrap(model, compiled=False)  # the fastest operations for this device
    sizes = token_byte_lengths(pretrained.tokenizer_name).copy()
    sizes[pretrained.tokenizer.eot_token] = 0  # it is not part of the text
    with strategy.inference(model):
        figures = evaluate(model, windows, sizes, settings.batch_size)
    if not math.isfinite(figures["loss"]):
        hint = "use another one, or precision=fp32"
        raise CheckpointError("checkpoint", settings.checkpoint, "its loss is NaN or inf", hint)
    step = pretrained.state.step if pretrained.state else None
    print(sanitize(f"{settings.checkpoint}, step {step}, in {strategy.precision}, on {what}"))
    print(f"windows of {rule.max_length:,} tokens, {rule.stride:,} apart\n")
    for name, value in figures.items():
        shown = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{name:<14} {shown}")
    if settings.out:
        report = {
            "checkpoint": settings.checkpoint,
            "step": step,
            "parameters": model.num_parameters(),
            "tokenizer": pretrained.tokenizer_name,
            "path": settings.data.path,
            "part": what,
            "rule": asdict(rule),
            **figures,
            "precision": strategy.precision,
            "device": str(strategy.device),
            **machine(("torch", "numpy", "tiktoken")),
        }
        write_out(settings.out, report)


def window_sizes(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple[int, int]:
    """max_length and stride of the windows, by default those of training. Raises ConfigError when
    the model reads fewer tokens, or windows would skip tokens between them."""
    max_length = settings.max_length or pretrained.window
    stride = settings.stride or max_length
    for key, value, most in (
        ("max_length", max_length, pretrained.model.config.context_length),
        ("stride", stride, max_length),
    ):
        if value > most:
            refuse([Problem(key, value, f"must be at most {most}", f"use {most}")])
    if max_length > pretrained.window:
        reason = f"the model was trained on windows of {pretrained.window} only"
        print(f"note: max_length={max_length}: {reason}", file=sys.stderr)
    return max_length, stride


def read(settings: EvaluateConfig, pretrained: "PretrainedModel") -> tuple["TokenStream", str]:
    """The tokens of data.path, or of its part, by the checkpoint's tokenizer; and a description.

    Raises DataError when they cannot be read or split.
    """
    from data import load_streams, split_tokens

    own = pretrained.state.settings["data"] if pretrained.state else {}
    values = {key: own[key] for key in FROM_RUN if key in own}
    values |= settings.data.model_dump(exclude_none=True, exclude={"within_documents"})
    values |= {"tokenizer": pretrained.tokenizer_name, "max_length": 1}
    config, notes = DataConfig.with_defaults(**values), []
    streams, split = load_streams(config, config.path), settings.split
    if "val" in streams:
        split = "val" if split == "auto" else split
        tokens, what = streams[split], f"its {split} files"
    elif split == "auto":
        tokens, what = streams["train"], "all of it"
    else:
        tokens = split_tokens(config, streams["train"], notes)[split == "val"]
        what = f"its {split} part, data.val_fraction={config.val_fraction:g}"
    for note in notes:
        print(sanitize(f"note: {note}"), file=sys.stderr)
    return tokens, what


if __name__ == "__main__":
    main()
